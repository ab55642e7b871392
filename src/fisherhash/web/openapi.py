"""The description of the API in OpenAPI's terms."""

from __future__ import annotations

from typing import Any

from fisherhash.system.version import __version__
from fisherhash.web.duplicates import WIDEST_RADIUS
from fisherhash.web.queries import DEFAULT_SHOWN, MOST_FILTERS, MOST_SHOWN, TIES

_MOST_ID = 2**62
_COUNT = {"type": "integer", "minimum": 0}
_PAIRS = {
    "type": "array",
    "items": {"type": "array", "minItems": 2, "maxItems": 2, "items": {}},
}


def describe_api(bits: int, *, writable: bool, limit: int) -> dict[str, Any]:
    """The OpenAPI document of a server.

    Args:
        bits: length of the codes of its index.
        writable: whether it accepts changes.
        limit: the most bytes of an upload.
    """
    code = {"type": "string", "pattern": f"^[0-9a-f]{{{2 * -(-bits // 8)}}}$"}
    result = {
        "type": "object",
        "required": ["query", "code", "ranking", "results", "compared", "seconds"],
        "properties": {
            "query": {"anyOf": [_ref("Item"), {"type": "null"}]},
            "code": {"type": "string"},
            "ranking": {"type": "string"},
            "fine_weight": {
                "type": "number",
                "minimum": 0,
                "description": "The weight of the second codes in the order, where it has one.",
            },
            "results": {
                "type": "array",
                "items": {
                    "allOf": [
                        _ref("Item"),
                        {
                            "type": "object",
                            "required": ["rank", "distance"],
                            "properties": {
                                "rank": {"type": "integer", "minimum": 1},
                                "distance": _distance("The distance of the first code."),
                                "fine": _distance("The distance of the second code, if any."),
                                "combined": _distance(
                                    "The distance of both codes, where that orders the results."
                                ),
                            },
                        },
                    ]
                },
            },
            "compared": _COUNT,
            "seconds": {"type": "number", "minimum": 0},
        },
    }
    search = [
        _param("k", "The most results.", _integer(1, MOST_SHOWN, DEFAULT_SHOWN)),
        _param("radius", "Only codes that differ in at most so many bits.", _integer(0, bits)),
        _param(
            "fine_weight",
            "Where the index has second codes: what one of their bits counts beside one of the "
            f"first codes. {TIES} lets them order only what is at the same distance.",
            {"anyOf": [{"type": "number", "minimum": 0, "maximum": 1024}, {"const": TIES}]},
        ),
        _WHERE,
    ]
    given = [
        _param("like", "Search with the item of this id.", _integer(0, _MOST_ID)),
        _param("key", "Search with the item of this key.", {"type": "string"}),
        _param("code", "Search with this code, in hexadecimal.", code),
    ]
    paths: dict[str, Any] = {
        "/api/info": {"get": _verb("Facts about the index.", [], _ref("Info"))},
        "/api/search": {
            "get": _verb("The nearest items of an item or a code.", given + search, result),
            "post": _verb("The nearest items of an image.", search, result, 413, 415, 422)
            | {"requestBody": _upload(limit)},
        },
        "/api/items": {
            "get": _verb(
                "Items by ascending id.",
                [
                    _param("limit", "The most items.", _integer(1, 1000, 100)),
                    _param("after", "Only items with larger ids.", _integer(0, _MOST_ID)),
                    _WHERE,
                ],
                {
                    "type": "object",
                    "required": ["items", "count", "next"],
                    "properties": {
                        "items": {"type": "array", "items": _ref("Item")},
                        "count": _COUNT,
                        "next": {"type": ["integer", "null"]},
                    },
                },
            )
        },
        "/api/items/{id}": {"get": _verb("One item.", [_ID], _ref("Item"))},
        "/api/facets": {
            "get": _verb(
                "How many items have each label, month and value of a field.",
                [_WHERE],
                {
                    "type": "object",
                    "required": ["labels", "months", "fields"],
                    "properties": {
                        "labels": _PAIRS,
                        "months": _PAIRS,
                        "fields": {"type": "object", "additionalProperties": _PAIRS},
                    },
                },
            )
        },
        "/api/duplicates": {
            "get": _verb(
                "Groups of likely duplicates.",
                [
                    _param(
                        "radius",
                        "Bits in which images of a group may differ; by default as many as give "
                        "about one false pair per thousand images.",
                        _integer(0, WIDEST_RADIUS),
                    ),
                    _param(
                        "code",
                        "The codes to compare: copy are made for copies, own are those of the "
                        "index. By default copy where the files are there and their codes are "
                        "known or soon computed.",
                        {"type": "string", "enum": ["copy", "own"]},
                    ),
                ],
                {
                    "type": "object",
                    "required": ["bits", "radius", "count", "code", "groups"],
                    "properties": {"groups": {"type": "array", "items": _GROUP}},
                },
                503,
            )
        },
        "/api/skipped": {
            "get": _verb(
                "Files that could not be read.",
                [],
                {
                    "type": "array",
                    "items": {
                        "type": "object",
                        "required": ["name", "reason"],
                        "properties": {"name": {"type": "string"}, "reason": {"type": "string"}},
                    },
                },
            )
        },
        "/healthz": {"get": _verb("Whether the index can be read.", [], {"type": "object"})},
    }
    if writable:
        added = _verb("Add an image.", [], _ref("Item"), 401, 413, 415, 422, done="201")
        form = {
            "type": "object",
            "required": ["image"],
            "properties": {
                "image": {"type": "string", "format": "binary"},
                "label": {"type": "array", "items": {"type": "string"}},
            },
        }
        paths["/api/items"]["post"] = added | {
            "security": [{"token": []}],
            "requestBody": {
                "required": True,
                "content": {"multipart/form-data": {"schema": form}},
            },
        }
        paths["/api/items/{id}"]["delete"] = _verb(
            "Remove an item from the index; its file stays.", [_ID], {"type": "object"}, 401
        ) | {"security": [{"token": []}]}
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "fisherhash",
            "version": __version__,
            "description": "Search a collection of images by their binary codes.",
        },
        "paths": paths,
        "components": {
            "schemas": {"Item": _ITEM, "Info": _INFO, "Error": _ERROR},
            "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
        },
    }


def _ref(name: str) -> dict[str, str]:
    return {"$ref": f"#/components/schemas/{name}"}


def _integer(least: int, most: int, default: int | None = None) -> dict[str, Any]:
    schema = {"type": "integer", "minimum": least, "maximum": most}
    return schema if default is None else schema | {"default": default}


def _distance(text: str) -> dict[str, Any]:
    return {"type": "number", "minimum": 0, "description": text}


def _param(name: str, text: str, schema: dict[str, Any]) -> dict[str, Any]:
    return {"name": name, "in": "query", "description": text, "schema": schema}


def _verb(
    text: str, parameters: list[Any], schema: dict[str, Any], *refusals: int, done: str = "200"
) -> dict[str, Any]:
    """One operation; every one may be refused for its parameters."""
    refused = {
        str(status): {
            "description": _REFUSALS[status],
            "content": {"application/json": {"schema": _ref("Error")}},
        }
        for status in sorted({400, 403, 404, *refusals})
    }
    answer = {"description": text, "content": {"application/json": {"schema": schema}}}
    return {"summary": text, "parameters": parameters, "responses": {done: answer} | refused}


def _upload(limit: int) -> dict[str, Any]:
    image = {"type": "string", "format": "binary"}
    form = {"type": "object", "required": ["image"], "properties": {"image": image}}
    return {
        "required": True,
        "description": f"An image of at most {limit:,} bytes, as it is or as a file of a form.",
        "content": {
            "application/octet-stream": {"schema": {}},
            "multipart/form-data": {"schema": form},
        },
    }


_REFUSALS = {
    400: "A parameter is not as it must be.",
    401: "A token is needed.",
    403: "This server does not do that.",
    404: "There is no such item.",
    413: "The upload is too large.",
    415: "The body is of another kind.",
    422: "The image cannot be read.",
    503: "It is still being computed.",
}
_ID = {"name": "id", "in": "path", "required": True, "schema": _integer(0, _MOST_ID)}
_WHERE = {
    "name": "where",
    "in": "query",
    "description": "Only items that match these filters, label=cat or taken>=2021.",
    "schema": {"type": "array", "maxItems": MOST_FILTERS, "items": {"type": "string"}},
    "style": "form",
    "explode": True,
}
_ITEM = {
    "type": "object",
    "required": ["id", "key", "name", "labels", "metadata", "code", "image", "thumbnail"],
    "properties": {
        "id": {"type": "integer"},
        "key": {"type": ["string", "null"]},
        "name": {"type": "string"},
        "labels": {"type": "array", "items": {"type": "string"}},
        "metadata": {"type": "object"},
        "size": {"type": ["integer", "null"]},
        "mtime_ns": {"type": ["integer", "null"]},
        "code": {"type": "string"},
        "image": {"type": "string"},
        "thumbnail": {"type": "string"},
    },
}
_INFO = {
    "type": "object",
    "required": ["name", "bits", "count", "model", "writable"],
    "properties": {
        "name": {"type": "string"},
        "bits": {"type": "integer", "minimum": 1},
        "count": _COUNT,
        "model": {"type": "object"},
        "writable": {"type": "boolean"},
    },
}
_GROUP = {
    "type": "object",
    "required": ["size", "span", "confirmed", "items"],
    "properties": {
        "size": {"type": "integer", "minimum": 2},
        "span": {"type": "integer", "minimum": 0},
        "confirmed": {"type": ["boolean", "null"]},
        "items": {"type": "array", "items": _ref("Item")},
    },
}
_ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {"error": {"type": "string"}},
}
