"""The pages to search and to look around: search, map, timeline, buckets, the API's description."""

from __future__ import annotations

import calendar
from collections import Counter
from collections.abc import Sequence
from typing import Annotated, Any, NamedTuple

import numpy as np
from fastapi import APIRouter, Query, Request, Response
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import RedirectResponse

from fisherhash.index.images.grouping import all_codes, distinct_codes
from fisherhash.index.items import Ids
from fisherhash.web.columns import DATE_FIELD, Columns
from fisherhash.web.files import read_upload
from fisherhash.web.gallery import Gallery
from fisherhash.web.layout import MapLayout, lay_out
from fisherhash.web.queries import DEFAULT_SHOWN, MOST_SHOWN, PageQuery
from fisherhash.web.rendering import JsonAnswer, Shown, render_page, wants_html

MOST_CHOICES = 40
"""Values of one filter that are offered."""
WAIT = 2.0
"""Seconds that a page waits for what is computed of the whole collection."""
HISTOGRAM_HIGH = 36
MOST_BUCKETS, BUCKETS_ON_PAGE = 200, 30
BUCKET_SHOWN = 12
"""Items of a bucket that are shown."""
MONTH_SHOWN = 12
COLOURS = 10
"""Labels that have a colour of their own on the map."""
Asked = Annotated[PageQuery, Query()]
router = APIRouter(include_in_schema=False)


# Search


@router.get("/")
def search_page(gallery: Shown, query: Asked) -> Response:
    """A query, its neighbours, filters with counts."""
    answer = gallery.find(query)
    return render_page(
        "search.html",
        gallery,
        "search",
        query=query,
        answer=answer,
        filters=filters_of(gallery, query),
        most=MOST_SHOWN,
        usual=DEFAULT_SHOWN,
    )


@router.get("/results")
def results(gallery: Shown, query: Asked) -> Response:
    """Only the results, for a slider that is being dragged."""
    answer = gallery.find(query)
    return render_page("_results.html", gallery, "search", query=query, answer=answer)


@router.get("/histogram")
def histogram(gallery: Shown, query: Asked) -> Response:
    """How many items are at each distance, as a drawing."""
    counts = gallery.histogram(query)
    most = max(*counts, 1)
    # Tall enough to be seen wherever there is anything at all.
    bars = [max(HISTOGRAM_HIGH * count / most, 0.8) if count else 0.0 for count in counts]
    values = {"bars": bars, "high": HISTOGRAM_HIGH, "counts": counts, "query": query}
    return render_page("_histogram.html", gallery, "search", **values)


@router.post("/search")
async def upload(request: Request, gallery: Shown, query: Asked) -> Response:
    """Encode an uploaded image, and lead to the page that searches with its code."""
    data = await read_upload(request)
    found = await run_in_threadpool(gallery.encode, data, query, preview=True)
    url = found.model_copy(update={"bits": query.bits}).url()
    return RedirectResponse(url, 303) if wants_html(request.scope) else JsonAnswer({"url": url})


# Filters


class Filter(NamedTuple):
    """A property to filter by, with its values.

    Attributes:
        title: for people.
        choices: of each value its text, how many items it would leave, the address that adds or
            removes it, and whether it is chosen.
        more: how many values are not offered.
        active: whether a value is chosen.
    """

    title: str
    choices: list[tuple[str, int, str, bool]]
    more: int
    active: bool


def filters_of(gallery: Gallery, query: PageQuery) -> list[Filter]:
    """The filters that the collection offers, with counts under those that are chosen."""
    columns = gallery.columns.get(WAIT / 2)
    if columns is None:
        return []
    where = gallery.where(query.where)
    chosen = None if where is None else columns.chosen(gallery.index.ids(where))
    labels = columns.labels.count(chosen)
    found = [_filter("label", labels, query)]
    found.append(_filter(DATE_FIELD, _dates(columns.count_months(chosen), query), query, "date"))
    for name, column in columns.fields.items():
        found.append(_filter(name, column.count(chosen), query))
    return [one for one in found if len(one.choices) > 1 or one.active]


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


def _filter(
    field: str, counts: Sequence[tuple[Any, int]], query: PageQuery, title: str = ""
) -> Filter:
    choices = []
    for value, count in counts:
        name = str(value).lower() if isinstance(value, bool) else str(value)
        text = f"{field}={name}"
        chosen = text in query.where
        if chosen or len(choices) < MOST_CHOICES:
            choices.append((name or "no label", count, query.toggled(text), chosen))
    active = any(chosen for *_, chosen in choices)
    return Filter((title or field).capitalize(), choices, len(counts) - len(choices), active)


# The map


@router.get("/map")
def map_page(gallery: Shown) -> Response:
    """The page of the map; its points come on their own."""
    gallery.derived(map_layout).get()
    return render_page("map.html", gallery, "map")


@router.get("/map/points")
def map_points(gallery: Shown) -> Response:
    """The points of the map: ids, positions, and which of the frequent labels each has."""
    layout, columns = gallery.derived(map_layout).get(WAIT), gallery.columns.get(WAIT)
    if layout is None:
        return JsonAnswer({"ready": False}, 202)
    names, colours = _colours(columns, layout.ids)
    head = "\n".join(name.replace("\n", " ") for name in names).encode("utf-8", "replace")
    body = np.array([len(head)], "<f8").tobytes() + head + b" " * (-len(head) % 8)
    return Response(
        body + layout.to_bytes() + colours.tobytes(), media_type="application/octet-stream"
    )


def map_layout(gallery: Gallery) -> MapLayout:
    """Where each item is on the map."""
    return lay_out(*all_codes(gallery.index), gallery.index.bits)


def _colours(columns: Columns | None, ids: Any) -> tuple[list[str], Any]:
    """The most frequent labels, and the number of each point's label; 255 for another one."""
    colours = np.full(len(ids), 255, dtype=np.uint8)
    if columns is None:
        return [], colours
    names = [name for name, _ in columns.labels.count() if name][:COLOURS]
    # Of several labels, the most frequent one is shown.
    for number, name in reversed(list(enumerate(names))):
        colours[np.isin(ids, columns.ids[columns.labels.rows_of(name)])] = number
    return names, colours


# Buckets and the timeline


class Bucket(NamedTuple):
    """Items with the same code: how many, and the ids of some."""

    code: bytes
    size: int
    ids: Ids


def largest_buckets(gallery: Gallery) -> list[Bucket]:
    """The largest groups of equal codes, the largest first."""
    ids, codes = all_codes(gallery.index)
    distinct, number = distinct_codes(codes)
    counts = np.bincount(number, minlength=len(distinct))
    largest = np.argsort(-counts, kind="stable")[:MOST_BUCKETS]
    return [
        Bucket(distinct[one].tobytes(), int(counts[one]), ids[number == one][:BUCKET_SHOWN])
        for one in largest[counts[largest] > 1]
    ]


@router.get("/buckets")
def buckets(gallery: Shown, start: Annotated[int, Query(ge=0, le=10**6)] = 0) -> Response:
    """The largest groups of equal codes."""
    found = gallery.derived(largest_buckets).get(WAIT)
    part = (found or [])[start : start + BUCKETS_ON_PAGE]
    hits = gallery.hits_by_id(bucket.ids for bucket in part)
    rows = [
        {
            "count": one.size,
            "url": PageQuery(code=one.code.hex(), radius=0, k=min(one.size, MOST_SHOWN)).url(),
            "code": one.code,
            "hits": [hits[number] for number in one.ids.tolist() if number in hits],
        }
        for one in part
    ]
    values = {"total": len(found or []), "start": start, "step": BUCKETS_ON_PAGE}
    return render_page(
        "buckets.html", gallery, "buckets", ready=found is not None, rows=rows, **values
    )


@router.get("/timeline")
def timeline(gallery: Shown) -> Response:
    """How many images were taken in each month, with a few of them."""
    columns = gallery.columns.get(WAIT)
    years = [] if columns is None else _years(gallery, columns)
    undated = 0 if columns is None else len(columns.ids) - len(columns.months.rows)
    values = {"ready": columns is not None, "years": years, "undated": undated}
    return render_page("timeline.html", gallery, "timeline", **values)


def _years(gallery: Gallery, columns: Columns) -> list[dict[str, Any]]:
    """The years and their months, the latest first."""
    counts = columns.count_months()[::-1]
    shown = {}
    for month, _ in counts:
        rows = columns.months.rows_of(month)
        few = np.linspace(0, len(rows) - 1, min(MONTH_SHOWN, len(rows))).astype(np.int64)
        shown[month] = columns.ids[rows[few]]
    hits = gallery.hits_by_id(shown.values())
    most = max((count for _, count in counts), default=1)
    years: dict[str, list[dict[str, Any]]] = {}
    for month, count in counts:
        row = {
            "name": calendar.month_name[int(month[5:])],
            "count": count,
            "share": count / most,
            "url": PageQuery(where=(f"{DATE_FIELD}={month}",)).url(),
            "hits": [hits[number] for number in shown[month].tolist() if number in hits],
        }
        years.setdefault(month[:4], []).append(row)
    return [
        {
            "name": year,
            "count": sum(row["count"] for row in rows),
            "url": PageQuery(where=(f"{DATE_FIELD}={year}",)).url(),
            "months": rows,
        }
        for year, rows in years.items()
    ]


# The API's description


@router.get("/docs")
async def api_page(request: Request, gallery: Shown) -> Response:
    """What the API can do, from its own description."""
    described = request.app.openapi()
    return render_page("docs.html", gallery, "docs", api=described, url=str(request.base_url))
