r"""Filters as SQL over the table of an index, and texts and documents as PostgreSQL stores them.

Every value of a filter is a parameter. PostgreSQL refuses the character 0 and lone surrogates,
which Python uses for file names that are not UTF-8. They are escaped so that texts sort as
:mod:`fisherhash.index.filters` says: by code point, and names that are not UTF-8 after all others.
Almost every text is stored unchanged.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Sequence
from decimal import Decimal
from typing import Any

from fisherhash.index.filters import (
    NUMBER_FIELDS,
    OWN_FIELDS,
    All,
    Condition,
    alternatives,
    as_number,
    is_date_part,
)

Sql = tuple[str, list[Any]]
"""An expression and its parameters."""

_DATE = "'^[0-9]{4}-[0-9]{2}-[0-9]{2}([T ]|$)'"
_LAST = "\U0010ffff"
_ODD = re.compile("[\0\x01\ud7ff\ud800-\udfff]|\\A\U0010ffff")
_ESCAPE = re.compile("\x01([\x01\x02])|\ud7ff(?:\x01|\x02([0-9a-f]{4}))|\\A\U0010ffff\x01")
_ESCAPED_JSON = re.compile("\\\\u0001|\\\\ud7ff|\\\\udbff|\ud7ff|\U0010ffff")
_ODD_JSON = re.compile(r"\\u000[01]|\\ud[7-9a-f]|\d[eE]")


def stored_text(text: str) -> str:
    r"""A text, or the name of a file, as it is stored.

    >>> stored_text("cat"), stored_text("a\0b")
    ('cat', 'a\x01\x01b')
    """
    if not _ODD.search(text):
        return text
    try:
        text.encode()
    except UnicodeEncodeError:
        return 2 * _LAST + text.encode(errors="surrogateescape").hex()
    return escaped_text(text)


def loaded_text(stored: str) -> str:
    """The inverse of :func:`stored_text`."""
    if stored.startswith(2 * _LAST):
        return bytes.fromhex(stored[2:]).decode(errors="surrogateescape")
    return _ESCAPE.sub(_unescape, stored)


def escaped_text(text: str) -> str:
    """A text inside of a JSON document as it is stored."""
    return _ODD.sub(_escape, text)


def _escape(match: re.Match[str]) -> str:
    one = match[0]
    if one in "\0\x01":
        return "\x01" + chr(ord(one) + 1)
    return one + "\x01" if one in ("\ud7ff", _LAST) else f"\ud7ff\x02{ord(one):04x}"


def _unescape(match: re.Match[str]) -> str:
    if match[1]:
        return chr(ord(match[1]) - 1)
    return chr(int(match[2], 16)) if match[2] else match[0][0]


def stored_json(text: str) -> str:
    """A document of JSON in ASCII as a column of the type jsonb takes it.

    That type has decimal numbers only. A number with a point stays one with a point, so that a
    float is a float again when it is read.
    """
    return _dump(json.loads(text)) if _ODD_JSON.search(text) else text


def _dump(value: Any) -> str:
    if isinstance(value, str):
        return json.dumps(escaped_text(value))
    if isinstance(value, float):
        digits = format(Decimal(repr(value)), "f")
        return digits if "." in digits else digits + ".0"
    if isinstance(value, list):
        return f"[{', '.join(map(_dump, value))}]"
    if isinstance(value, dict):
        parts = (f"{_dump(name)}: {_dump(part)}" for name, part in value.items())
        return f"{{{', '.join(parts)}}}"
    return json.dumps(value)


def loaded_json(stored: str) -> Any:
    """The value of a document that :func:`stored_json` wrote."""
    value = json.loads(stored)
    return _load(value) if _ESCAPED_JSON.search(stored) else value


def _load(value: Any) -> Any:
    if isinstance(value, str):
        return _ESCAPE.sub(_unescape, value)
    if isinstance(value, list):
        return [_load(part) for part in value]
    if isinstance(value, dict):
        return {_load(name): _load(part) for name, part in value.items()}
    return value


def where_sql(where: All) -> Sql:
    """A filter as one expression; without conditions it is true for every item."""
    if not where:
        return "true", []
    parts, values = ["key IS NOT NULL"], []
    for condition in where.conditions:
        text, own = _any_of(_condition(condition))
        parts.append(f"NOT {text}" if condition.operator == "!=" else text)
        values += own
    return " AND ".join(parts), values


def has_field_sql(condition: Condition) -> Sql:
    """Whether an item has the field of a condition in its metadata."""
    return _any_of((f"{_at(path)} IS NOT NULL", _names(path)) for path in condition.paths)


def _any_of(parts: Iterable[Sql]) -> Sql:
    found = list(parts)
    text = " OR ".join(f"({part})" for part, _ in found) or "false"
    return f"coalesce(({text}), false)", [value for _, values in found for value in values]


def _condition(condition: Condition) -> Iterable[Sql]:
    operator = "=" if condition.operator == "!=" else condition.operator
    if condition.field == "label":
        yield "labels && %s::text[]", [list(map(stored_text, condition.values))]
        if "" in condition.values:
            yield "labels = '{}'", []
    elif condition.field in NUMBER_FIELDS:
        yield _number_test(condition.field, operator, map(as_number, condition.values))
    elif condition.field in OWN_FIELDS:
        texts = [stored_text(str(value)) for value in condition.values]
        yield f"{condition.field} {operator} ANY(%s::text[])", [texts]
    else:
        for path in condition.paths:
            yield from _metadata(condition, operator, path)


def _number_test(expression: str, operator: str, values: Iterable[int | float | None]) -> Sql:
    # NaN is equal to nothing and beside nothing; in SQL it is the largest number.
    numbers = [value for value in values if value is not None and not math.isnan(value)]
    kind = "bigint" if all(isinstance(value, int) for value in numbers) else "numeric"
    return f"{expression} {operator} ANY(%s::text[]::{kind}[])", [list(map(repr, numbers))]


def _metadata(condition: Condition, operator: str, path: Sequence[str]) -> Iterable[Sql]:
    """Tests of one path in the metadata, one of which must hold."""
    documents: list[str] = []
    numbers: list[int | float] = []
    texts: dict[int, list[str]] = {}
    for value in condition.values:
        for kind, one in alternatives(value, typed=condition.typed):
            if kind == "text":
                texts.setdefault(len(one) if is_date_part(one) else 0, []).append(stored_text(one))
            elif kind == "number":
                numbers.append(one)
                documents += [stored_json(json.dumps(one))] if math.isfinite(one) else []
            elif kind != "other":
                documents.append(kind)
    at, names = _at(path), _names(path)
    if operator == "=":
        yield f"{at} = ANY(%s::text[]::jsonb[])", [*names, documents]
    elif numbers:
        test, values = _number_test(f"({at})::numeric", operator, numbers)
        yield _of_kind("number", at, test), [*names, *names, *values]
    for length, some in texts.items():
        stored, uses = f"({at} #>> '{{}}')", 1
        if length:
            # Of a date only the part that the value names.
            stored = f"CASE WHEN {stored} ~ {_DATE} THEN left({stored}, {length}) ELSE {stored} END"
            uses = 3
        test = f'({stored}) COLLATE "C" {operator} ANY(%s::text[])'
        yield _of_kind("string", at, test), [*names, *names * uses, some]


def _of_kind(kind: str, at: str, test: str) -> str:
    """A test of values of one kind; a CASE, as the parts of AND are computed in any order."""
    return f"CASE WHEN jsonb_typeof({at}) = '{kind}' THEN {test} END"


def _at(path: Sequence[str]) -> str:
    return "(metadata" + " -> %s::text" * len(path) + ")"


def _names(path: Sequence[str]) -> list[str]:
    return list(map(escaped_text, path))
