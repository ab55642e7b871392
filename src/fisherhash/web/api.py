"""The JSON API: the verbs of an index of images over HTTP, described by /openapi.json."""

from __future__ import annotations

import io
import os
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from fastapi import APIRouter, Depends, File, Form, HTTPException, Query, Request, Response
from fastapi import UploadFile as Upload
from fastapi.concurrency import run_in_threadpool
from typing_extensions import TypedDict  # pydantic takes no other one on Python 3.11

from fisherhash.data.formats import IMAGE_EXTENSIONS, UnreadableImage, open_image
from fisherhash.errors import FisherhashError, UsageError
from fisherhash.index.base import Index
from fisherhash.index.images.image_index import ImageIndex
from fisherhash.index.images.results import Hit, synced_folder
from fisherhash.index.images.searching import where_labels
from fisherhash.system.version import __version__
from fisherhash.web.guard import bearer, render_metrics, same_token
from fisherhash.web.pages import ItemId, read_upload
from fisherhash.web.queries import DuplicatesQuery, Filters, ImageQuery, ItemsQuery, SearchQuery
from fisherhash.web.rendering import JsonAnswer, Served
from fisherhash.web.served import Answer, ServedIndex


class ListedItem(TypedDict):
    """An item of the index; where its file is on this machine is left out."""

    id: int
    key: str | None
    name: str
    labels: list[str]
    metadata: dict[str, Any]
    size: int | None
    mtime_ns: int | None
    code: str
    image: str
    thumbnail: str


class FoundRow(ListedItem):
    """An item that a search found, or one of a group of likely copies."""

    rank: int
    distance: float


class SearchAnswer(TypedDict):
    """The results of a search, the nearest first."""

    query: ListedItem | None
    code: str
    ranking: str
    results: list[FoundRow]
    compared: int
    seconds: float


class ItemsAnswer(TypedDict):
    """Some items, how many there are, and the id after which the next ones come."""

    items: list[ListedItem]
    count: int
    next: int | None


class FacetsAnswer(TypedDict):
    """Pairs of a value and how many items have it."""

    labels: list[list[str | int]]
    months: list[list[str | int]]
    fields: dict[str, list[list[str | int | float | bool]]]


class GroupRow(TypedDict):
    """A group of likely copies, of which the first is to be kept."""

    size: int
    span: int
    confirmed: bool | None
    items: list[FoundRow]


class DuplicatesAnswer(TypedDict):
    """Groups of likely copies, the surest first."""

    bits: int
    radius: int
    count: int
    code: str
    groups: list[GroupRow]


def may_change(request: Request, served: Served) -> None:
    """Refuse a change of an index that is served for reading, or by a stranger."""
    options = served.options
    if not options.writable:
        raise HTTPException(403, "This index is served for reading; start it with --writable")
    # Not by the cookie, which a browser sends on its own.
    if not same_token(bearer(request.headers), options.token):
        headers = {"www-authenticate": "Bearer"}
        raise HTTPException(401, "Changes need the header 'Authorization: Bearer TOKEN'", headers)


router = APIRouter(prefix="/api")
changes = APIRouter(prefix="/api", dependencies=[Depends(may_change)])
health = APIRouter()
_changing = threading.Lock()
_IMAGE_BODY = {
    "requestBody": {
        "required": True,
        "description": "An image, as it is or as the file named image of a form.",
        "content": {"application/octet-stream": {}, "multipart/form-data": {}},
    }
}


def item_row(served: ServedIndex, hit: Hit) -> dict[str, Any]:
    """An :class:`ListedItem`."""
    return {
        "id": hit.id,
        "key": hit.key,
        "name": served.label(hit),
        "labels": list(hit.labels),
        "metadata": hit.metadata,
        "size": hit.size,
        "mtime_ns": hit.mtime_ns,
        "code": hit.code.hex(),
        "image": f"/images/{hit.id}/original",
        "thumbnail": f"/images/{hit.id}/medium",
    }


def _found_rows(served: ServedIndex, hits: Iterable[Hit]) -> list[dict[str, Any]]:
    return [
        {"rank": rank, "distance": hit.distance, **item_row(served, hit)}
        for rank, hit in enumerate(hits, start=1)
    ]


@router.get("/info", response_model=dict[str, Any])
def info(served: Served) -> Response:
    """Facts about the index: its bits, how many items it has, the model that made its codes."""
    facts = served.images.info()
    names = ("bits", "count", "keyed", "skipped", "fingerprint")
    shown: dict[str, Any] = {name: facts.get(name) for name in names}
    # Where a model or a folder is on this machine is nobody's business.
    shown["model"] = {k: v for k, v in (facts.get("model") or {}).items() if k != "path"}
    shown |= {"name": served.name, "version": __version__}
    return JsonAnswer(shown | {"writable": served.options.writable})


@router.get("/search", response_model=SearchAnswer)
def search(served: Served, query: Annotated[SearchQuery, Query()]) -> Response:
    """The nearest items of an item or a code."""
    if not query.searches:
        raise UsageError("nothing to search for: give like, key or code, or POST an image")
    return _search_answer(served, served.find(query))


@router.post("/search", response_model=SearchAnswer, openapi_extra=_IMAGE_BODY)
async def search_image(
    request: Request, served: Served, query: Annotated[ImageQuery, Query()]
) -> Response:
    """The nearest items of an image."""
    data = await read_upload(request)
    return await run_in_threadpool(lambda: _search_answer(served, served.find_image(data, query)))


def _search_answer(served: ServedIndex, answer: Answer) -> Response:
    found = {
        "query": None if answer.subject is None else item_row(served, answer.subject),
        "code": (answer.code or b"").hex(),
        "ranking": answer.ranking,
        "results": _found_rows(served, answer.hits),
        "compared": answer.compared,
        "seconds": round(answer.seconds, 6),
    }
    return JsonAnswer(found)


@router.get("/items", response_model=ItemsAnswer)
def items(served: Served, query: Annotated[ItemsQuery, Query()]) -> Response:
    """Items by ascending id, some at a time."""
    ids = served.index.ids(where_labels(served.index, query.where))
    rest = ids[ids > query.after]
    rows = [item_row(served, hit) for hit in served.hits(rest[: query.limit])]
    more = int(rest[query.limit - 1]) if len(rest) > query.limit else None
    return JsonAnswer({"items": rows, "count": len(ids), "next": more})


@router.get("/items/{id}", response_model=ListedItem)
def item(served: Served, number: ItemId) -> Response:
    """One item."""
    return JsonAnswer(item_row(served, served.item(number)))


@router.get("/facets", response_model=FacetsAnswer)
def facets(served: Served, query: Annotated[Filters, Query()]) -> Response:
    """How many items have each label, month and value of a field."""
    columns = served.columns.get(served.options.seconds / 2)
    if columns is None:
        raise HTTPException(503, "The labels are still being counted; try again")
    matching = served.matching(query.where)
    chosen = None if matching is None else np.isin(columns.ids, matching)
    found = {
        "labels": columns.labels.count(chosen),
        "months": sorted(columns.months.count(chosen)),
        "fields": {name: column.count(chosen) for name, column in columns.fields.items()},
    }
    return JsonAnswer(found)


@router.get("/duplicates", response_model=DuplicatesAnswer)
def duplicates(served: Served, query: Annotated[DuplicatesQuery, Query()]) -> Response:
    """Groups of likely copies; the first item of each group is the one to keep."""
    wait = served.options.seconds * 0.9
    state = served.duplicates.at(query.radius, code=query.code, wait=wait)
    found = state.found
    if found is None:
        raise HTTPException(503, state.waiting)
    groups = [
        {
            "size": len(group),
            "span": group.span,
            "confirmed": group.confirmed,
            "items": _found_rows(served, group),
        }
        for group in found.groups
    ]
    facts = {"bits": found.bits, "radius": found.radius, "count": found.count}
    return JsonAnswer({**facts, "code": state.code, "groups": groups})


@router.get("/skipped", response_model=list[dict[str, str]])
def skipped(served: Served) -> Response:
    """Files that could not be read, with the reasons."""
    return JsonAnswer([file._asdict() for file in served.images.skipped()])


@changes.post("/items", response_model=ListedItem, status_code=201)
def add_item(
    served: Served,
    image: Annotated[Upload, File(description="The image; its name ends as images' names do.")],
    label: Annotated[list[str] | None, Form(description="A label of the image.")] = None,
) -> Response:
    """Store an image in the folder for uploads, and add it to the index."""
    data, index, options = image.file.read(), served.index, served.options
    open_image(io.BytesIO(data), pixels=options.max_pixels)
    folder = options.uploads or synced_folder(index)
    if folder is None or not os.path.isdir(folder):
        raise UsageError(
            "the index is not in sync with a folder that images could be added to; start the "
            "server with --uploads FOLDER"
        )
    path = _free_path(Path(folder), image.filename or "")
    with _changing, Index.open(index.uri, write=True) as writer:
        with open(path, "xb") as file:
            file.write(data)
        try:
            images = ImageIndex(writer, served.images.hasher)
            report = images.add(path, labels=label, workers=0)
            keys = [*report.added, *report.updated]
            if not keys:
                reasons = [skip.reason for skip in report.skipped if skip.name in str(path)]
                raise UnreadableImage(reasons[0] if reasons else "it cannot be read")
            hit = Hit.of(writer.get(keys[0]), folder=synced_folder(writer))
        except BaseException:
            path.unlink(missing_ok=True)
            raise
    return JsonAnswer(item_row(served, hit), 201)


def _free_path(folder: Path, name: str) -> Path:
    """A file name in a folder that is not taken yet, from what a client called its file."""
    plain = name.replace("\\", "/").rpartition("/")[2].strip().lstrip(".")
    stem, suffix = os.path.splitext(plain)
    bad = any(not c.isprintable() for c in plain) or len(plain.encode(errors="replace")) > 200
    if bad or not stem or suffix.lower() not in IMAGE_EXTENSIONS:
        raise UsageError(f"{name!r} is not the name of an image file; send one such as photo.jpg")
    for number in range(10_000):
        path = folder / (f"{stem}-{number}{suffix}" if number else plain)
        if not os.path.lexists(path):
            return path
    raise FisherhashError(f"there are too many files named {plain} in the folder for uploads")


@changes.delete("/items/{id}", response_model=dict[str, int])
def remove_item(served: Served, number: ItemId) -> Response:
    """Remove an item from the index; its file stays."""
    served.item(number)
    with _changing, Index.open(served.index.uri, write=True) as writer:
        return JsonAnswer({"removed": writer.remove(ids=[number])})


@health.get("/healthz", response_model=dict[str, Any])
def healthz(served: Served) -> Response:
    """Whether the index can be read."""
    return JsonAnswer({"status": "ok", "items": len(served.index)})


@health.get("/metrics", include_in_schema=False)
def metrics(served: Served) -> Response:
    """Counters in the text format of Prometheus."""
    items = f"# TYPE fisherhash_items gauge\nfisherhash_items {len(served.index)}\n"
    kind = "text/plain; version=0.0.4; charset=utf-8"
    return Response(render_metrics() + items.encode(), media_type=kind)
