"""The pages to search and to look around, and the images on them."""

from __future__ import annotations

import calendar
from collections import Counter
from typing import Annotated, Any

import numpy as np
from fastapi import APIRouter, HTTPException, Path, Query, Request, Response
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import RedirectResponse
from starlette.datastructures import UploadFile

from fisherhash.codes import pack
from fisherhash.web.derived import DATE_FIELD, Columns
from fisherhash.web.files import MissingError
from fisherhash.web.queries import (
    DEFAULT_SHOWN,
    LARGEST_ID,
    PageQuery,
    Size,
    UploadName,
)
from fisherhash.web.rendering import (
    LONG_CACHE,
    WAIT,
    JsonAnswer,
    Served,
    render_page,
    wants_html,
)
from fisherhash.web.served import ServedIndex

MOST_CHOICES = 40
"""Values of one filter that are offered."""
HISTOGRAM_HIGH = 36
MONTH_SHOWN = 12
COLOURS = 10
"""Labels that have a colour of their own on the map."""
ItemId = Annotated[int, Path(alias="id", ge=0, le=LARGEST_ID, description="The id of the item.")]
router = APIRouter(include_in_schema=False)


# Search


@router.get("/")
def search_page(served: Served, query: Annotated[PageQuery, Query()]) -> Response:
    """A query, its neighbours, filters with counts."""
    answer = served.find(query, seed=query.seed)
    filters = filters_of(served, query)
    values = {"query": query, "answer": answer, "filters": filters, "choices": MOST_CHOICES}
    return render_page("search.html", served, "search", usual=DEFAULT_SHOWN, **values)


@router.get("/results")
def results(served: Served, query: Annotated[PageQuery, Query()]) -> Response:
    """Only the results, for a slider that is being dragged."""
    answer = served.find(query, seed=query.seed)
    return render_page("_results.html", served, "search", query=query, answer=answer)


@router.get("/histogram")
def histogram(served: Served, query: Annotated[PageQuery, Query()]) -> Response:
    """How many items are at each distance, as a drawing."""
    counts = served.histogram(query)
    most = max(*counts, 1)
    # Tall enough to be seen wherever there is anything at all.
    bars = [max(HISTOGRAM_HIGH * count / most, 0.8) if count else 0.0 for count in counts]
    values = {"bars": bars, "high": HISTOGRAM_HIGH, "counts": counts, "query": query}
    return render_page("_histogram.html", served, "search", **values)


@router.post("/search")
async def upload(
    request: Request, served: Served, query: Annotated[PageQuery, Query()]
) -> Response:
    """Encode an uploaded image, and lead to the page that searches with its code."""
    data = await read_upload(request)
    logits = await run_in_threadpool(served.logits, data)
    image = await run_in_threadpool(served.files.preview, data)
    code = pack(logits)[0].tobytes().hex()
    url = query.url(code=code, image=image, like=None, key=None, seed=0)
    return RedirectResponse(url, 303) if wants_html(request.scope) else JsonAnswer({"url": url})


async def read_upload(request: Request) -> bytes:
    """The image that a request carries: as a file of a form, or as its whole body.

    Raises:
        HTTPException: there is none.
    """
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    async with request.app.state.uploads:
        if kind != "multipart/form-data":
            data = await request.body()
        else:
            async with request.form(max_files=1, max_fields=20) as form:
                file = form.get("image")
                if not isinstance(file, UploadFile):
                    raise HTTPException(400, "The form has no file named image")
                data = await file.read()
    if not data:
        raise HTTPException(400, "There is no image in the request: choose a file first")
    # curl calls every body a form, an image too; a form that is one is text.
    if kind == "application/x-www-form-urlencoded" and data.isascii():
        raise HTTPException(415, "Send the image as the body, or as a file of a multipart form")
    return data


# Filters


def filters_of(served: ServedIndex, query: PageQuery) -> list[dict[str, Any]]:
    """The properties to filter by, with counts under the filters that are chosen.

    Returns:
        Of each property its title, whether a value is chosen, and its values: of each its text, how
        many items it would leave, the address that adds or removes it, and whether it is chosen.
    """
    columns = served.columns.get(WAIT / 2)
    if columns is None:
        return []
    matching = served.matching(query.where)
    chosen = None if matching is None else np.isin(columns.ids, matching)
    counts: list[tuple[str, str, list[tuple[Any, int]]]] = [
        ("Label", "label", columns.labels.count(chosen)),
        ("Date", DATE_FIELD, _dates(columns.months.count(chosen), query)),
    ]
    for name, column in columns.fields.items():
        counts.append((name.capitalize(), name, column.count(chosen)))
    filters = []
    for title, name, pairs in counts:
        values = []
        for value, count in pairs:
            text = str(value).lower() if isinstance(value, bool) else str(value)
            now = f"{name}={text}" in query.where
            values.append((text or "no label", count, query.toggled(f"{name}={text}"), now))
        active = any(now for *_, now in values)
        if len(values) > 1 or active:
            filters.append({"title": title, "values": values, "active": active})
    return filters


def _dates(months: list[tuple[str, int]], query: PageQuery) -> list[tuple[str, int]]:
    """Years and, once a year is chosen, its months."""
    chosen = [text.partition("=")[2] for text in query.where if text.startswith(f"{DATE_FIELD}=")]
    years = Counter[str]()
    for month, count in months:
        years[month[:4]] += count
    counts = dict(months if len(years) == 1 and chosen else years)
    for value in chosen:
        counts.setdefault(value, sum(count for m, count in months if m.startswith(value)))
    return sorted(counts.items())


# Images


@router.get("/images/{id}/original")
def original(request: Request, served: Served, number: ItemId) -> Response:
    """The file of an item as it is, or re-encoded if a browser cannot show its format."""
    data, kind = served.files.original(served.item(number))
    return _image(data, kind, keep="v" in request.query_params)


@router.get("/images/{id}/{size}")
def resized(request: Request, served: Served, number: ItemId, size: Size) -> Response:
    """The image of an item as a JPEG: small, medium or large."""
    data = served.files.jpeg(served.item(number), size)
    return _image(data, "image/jpeg", keep="v" in request.query_params)


@router.get("/uploads/{name}")
def uploaded(served: Served, name: UploadName) -> Response:
    """The preview of an image that was uploaded as a query."""
    data = served.files.stored(name)
    if data is None:
        raise MissingError("the preview of this upload is not kept any more")
    return _image(data, "image/jpeg", keep=True)


def _image(data: bytes, kind: str, *, keep: bool) -> Response:
    headers = {
        "cache-control": LONG_CACHE if keep else "private, max-age=60",
        # Whatever a file holds, it is shown as an image and runs nothing.
        "content-security-policy": "default-src 'none'; sandbox",
    }
    return Response(data, media_type=kind, headers=headers)


# The map


@router.get("/map")
def map_page(served: Served) -> Response:
    """The page of the map; its points come on their own."""
    served.map.get()
    return render_page("map.html", served, "map")


@router.get("/map/points")
def map_points(served: Served) -> Response:
    """The points of the map: names of labels, then per item id, position, number of its label.

    All in little-endian order. A label that is not among the most frequent ones has the number 255.
    """
    made, columns = served.map.get(WAIT), served.columns.get(WAIT)
    if made is None or columns is None:
        return JsonAnswer({"ready": False}, 202)
    ids, points = made
    colours = np.full(len(ids), 255, dtype=np.uint8)
    names = [name for name, _ in columns.labels.count() if name][:COLOURS]
    # Of several labels, the most frequent one is shown.
    for number, name in reversed(list(enumerate(names))):
        colours[np.isin(ids, columns.ids[columns.labels.rows_of(name)])] = number
    head = "\n".join(name.replace("\n", " ") for name in names).encode("utf-8", "replace")
    parts = [np.array([len(head)], "<f8").tobytes(), head + b" " * (-len(head) % 8)]
    # Ids as floats: JavaScript has no array of 64-bit integers that converts by itself.
    numbers = np.concatenate([[len(ids)], ids]).astype("<f8")
    parts += [numbers.tobytes(), points.astype("<u2").tobytes()]
    return Response(b"".join([*parts, colours.tobytes()]), media_type="application/octet-stream")


# The timeline


@router.get("/timeline")
def timeline(served: Served) -> Response:
    """How many images were taken in each month, with a few of them."""
    columns = served.columns.get(WAIT)
    years = {} if columns is None else _years(served, columns)
    undated = 0 if columns is None else len(columns.ids) - sum(n for _, n in columns.months.count())
    values = {"ready": columns is not None, "years": years, "undated": undated}
    return render_page("timeline.html", served, "timeline", **values)


def _years(served: ServedIndex, columns: Columns) -> dict[str, list[dict[str, Any]]]:
    """The years with their months, the latest first."""
    counts = sorted(columns.months.count(), reverse=True)
    most = max((count for _, count in counts), default=1)
    years: dict[str, list[dict[str, Any]]] = {}
    for month, count in counts:
        rows = columns.months.rows_of(month)
        few = np.linspace(0, len(rows) - 1, min(MONTH_SHOWN, len(rows))).astype(np.int64)
        row = {
            "name": calendar.month_name[int(month[5:])],
            "date": month,
            "count": count,
            "share": count / most,
            "hits": served.hits(columns.ids[rows[few]]),
        }
        years.setdefault(month[:4], []).append(row)
    return years


# The API's description


@router.get("/docs")
async def api_page(request: Request, served: Served) -> Response:
    """What the API can do, from its own description."""
    described = request.app.openapi()
    return render_page("docs.html", served, "docs", api=described, url=str(request.base_url))
