"""The JSON API: the verbs of an index of images over HTTP, described by /openapi.json."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Any

from fastapi import APIRouter, Depends, File, Form, HTTPException, Query, Request, Response
from fastapi import UploadFile as Upload
from fastapi.concurrency import run_in_threadpool
from typing_extensions import TypedDict  # pydantic takes no other one on Python 3.11

from fisherhash.errors import UsageError
from fisherhash.index.images.results import Hit
from fisherhash.system.version import __version__
from fisherhash.web.files import ItemId, read_upload
from fisherhash.web.gallery import Answer, Gallery
from fisherhash.web.guard import bearer, same_token
from fisherhash.web.queries import DuplicatesQuery, Filters, ImageQuery, ItemsQuery, SearchQuery
from fisherhash.web.rendering import JsonAnswer, Shown


class ItemRow(TypedDict):
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


class FoundRow(ItemRow):
    """An item that a search found, or one of a group of likely copies."""

    rank: int
    distance: float


class SearchAnswer(TypedDict):
    """The results of a search, the nearest first."""

    query: ItemRow | None
    code: str
    ranking: str
    results: list[FoundRow]
    compared: int
    seconds: float


class ItemsAnswer(TypedDict):
    """Some items, how many there are, and the id after which the next ones come."""

    items: list[ItemRow]
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


def may_change(request: Request, gallery: Shown) -> None:
    """Refuse a change of an index that is served for reading, or by a stranger."""
    options = gallery.options
    if not options.writable:
        raise HTTPException(403, "This index is served for reading; start it with --writable")
    # Not by the cookie, which a browser sends on its own.
    if not same_token(bearer(request.headers), options.token):
        headers = {"www-authenticate": "Bearer"}
        raise HTTPException(401, "Changes need the header 'Authorization: Bearer TOKEN'", headers)


router = APIRouter(prefix="/api")
changes = APIRouter(prefix="/api", dependencies=[Depends(may_change)])
health = APIRouter()
_IMAGE_BODY = {
    "requestBody": {
        "required": True,
        "description": "An image, as it is or as the file named image of a form.",
        "content": {"application/octet-stream": {}, "multipart/form-data": {}},
    }
}


def item_row(gallery: Gallery, hit: Hit) -> ItemRow:
    """An item as JSON can hold it."""
    return {
        "id": hit.id,
        "key": hit.key,
        "name": gallery.label(hit),
        "labels": list(hit.labels),
        "metadata": hit.metadata,
        "size": hit.size,
        "mtime_ns": hit.mtime_ns,
        "code": hit.code.hex(),
        "image": f"/images/{hit.id}/original",
        "thumbnail": f"/images/{hit.id}/medium",
    }


@router.get("/info", response_model=dict[str, Any])
def info(gallery: Shown) -> Response:
    """Facts about the index: its bits, how many items it has, the model that made its codes."""
    facts = gallery.images.info()
    names = ("bits", "count", "keyed", "skipped", "fingerprint")
    shown: dict[str, Any] = {name: facts.get(name) for name in names}
    # Where a model or a folder is on this machine is nobody's business.
    shown["model"] = {k: v for k, v in (facts.get("model") or {}).items() if k != "path"}
    shown |= {"name": gallery.name, "version": __version__}
    shown |= {"writable": gallery.options.writable, "rankings": ["hamming", "real"]}
    return JsonAnswer(shown)


@router.get("/search", response_model=SearchAnswer)
def search(gallery: Shown, query: Annotated[SearchQuery, Query()]) -> Response:
    """The nearest items of an item or a code."""
    if not query.searches:
        raise UsageError("nothing to search for: give like, key or code, or POST an image")
    return _found(gallery, gallery.find(query))


@router.post("/search", response_model=SearchAnswer, openapi_extra=_IMAGE_BODY)
async def search_image(
    request: Request, gallery: Shown, query: Annotated[ImageQuery, Query()]
) -> Response:
    """The nearest items of an image."""
    data = await read_upload(request)
    return await run_in_threadpool(
        lambda: _found(gallery, gallery.find(gallery.encode(data, query)))
    )


def _rows(gallery: Gallery, hits: Iterable[Hit]) -> list[dict[str, Any]]:
    return [
        {"rank": rank, "distance": hit.distance, **item_row(gallery, hit)}
        for rank, hit in enumerate(hits, start=1)
    ]


def _found(gallery: Gallery, answer: Answer) -> Response:
    found = {
        "query": None if answer.subject is None else item_row(gallery, answer.subject),
        "code": (answer.code or b"").hex(),
        "ranking": "real" if answer.query.ranking == "real" else "hamming",
        "results": _rows(gallery, answer.hits),
        "compared": answer.compared,
        "seconds": round(answer.seconds, 6),
    }
    return JsonAnswer(found)


@router.get("/items", response_model=ItemsAnswer)
def items(gallery: Shown, query: Annotated[ItemsQuery, Query()]) -> Response:
    """Items by ascending id, some at a time."""
    ids = gallery.index.ids(gallery.where(query.where))
    rest = ids[ids > query.after]
    rows = [item_row(gallery, hit) for hit in gallery.hits(rest[: query.limit])]
    more = int(rest[query.limit - 1]) if len(rest) > query.limit else None
    return JsonAnswer({"items": rows, "count": len(ids), "next": more})


@router.get("/items/{id}", response_model=ItemRow)
def item(gallery: Shown, number: ItemId) -> Response:
    """One item."""
    return JsonAnswer(item_row(gallery, gallery.item(number)))


@changes.post("/items", response_model=ItemRow, status_code=201)
def add_item(
    gallery: Shown,
    image: Annotated[Upload, File(description="The image; its name ends as images' names do.")],
    label: Annotated[list[str] | None, Form(description="A label of the image.")] = None,
) -> Response:
    """Store an image in the folder for uploads, and add it to the index."""
    hit = gallery.changes.add(image.file.read(), image.filename or "", label)
    return JsonAnswer(item_row(gallery, hit), 201)


@changes.delete("/items/{id}", response_model=dict[str, int])
def remove_item(gallery: Shown, number: ItemId) -> Response:
    """Remove an item from the index; its file stays."""
    gallery.item(number)
    gallery.changes.remove(number)
    return JsonAnswer({"removed": 1})


@router.get("/facets", response_model=FacetsAnswer)
def facets(gallery: Shown, query: Annotated[Filters, Query()]) -> Response:
    """How many items have each label, month and value of a field."""
    columns = gallery.columns.get(gallery.options.seconds / 2)
    if columns is None:
        raise HTTPException(503, "The labels are still being counted; try again")
    where = gallery.where(query.where)
    chosen = None if where is None else columns.chosen(gallery.index.ids(where))
    fields = {name: column.count(chosen) for name, column in columns.fields.items()}
    months = columns.count_months(chosen)
    return JsonAnswer({"labels": columns.labels.count(chosen), "months": months, "fields": fields})


@router.get("/duplicates", response_model=DuplicatesAnswer)
def duplicates(gallery: Shown, query: Annotated[DuplicatesQuery, Query()]) -> Response:
    """Groups of likely copies; the first item of each group is the one to keep."""
    wait = gallery.options.seconds * 0.9
    state = gallery.duplicates.at(query.radius, code=query.code, wait=wait)
    if state.missing and query.code == "auto":
        # Nobody has allowed to read all files yet: the API answers with what it has.
        state = gallery.duplicates.at(query.radius, code="own", wait=wait)
    found = state.found
    if found is None:
        raise HTTPException(503, state.waiting or _COMPUTE_FIRST)
    groups = [
        {
            "size": len(group),
            "span": group.span,
            "confirmed": group.confirmed,
            "items": _rows(gallery, group),
        }
        for group in found.groups
    ]
    facts = {"bits": found.bits, "radius": found.radius, "count": found.count}
    return JsonAnswer({**facts, "code": state.code, "groups": groups})


_COMPUTE_FIRST = "The codes for copies must be computed first: open the page of duplicates"


@router.get("/skipped", response_model=list[dict[str, str]])
def skipped(gallery: Shown) -> Response:
    """Files that could not be read, with the reasons."""
    return JsonAnswer([file._asdict() for file in gallery.images.skipped()])


@health.get("/healthz", response_model=dict[str, Any])
def healthz(gallery: Shown) -> Response:
    """Whether the index can be read."""
    return JsonAnswer({"status": "ok", "items": len(gallery.index)})


@health.get("/metrics", include_in_schema=False)
def metrics(request: Request, gallery: Shown) -> Response:
    """Counters in the text format of Prometheus."""
    info = gallery.index.info()
    facts = {
        "fisherhash_items": ("Items in the index.", info["count"]),
        "fisherhash_bits": ("Length of its codes.", info["bits"]),
        "fisherhash_commit": ("Number of the last commit.", info.get("commit") or 0),
    }
    text = request.app.state.metrics.render(facts)
    return Response(text, media_type="text/plain; version=0.0.4; charset=utf-8")
