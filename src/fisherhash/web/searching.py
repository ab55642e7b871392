"""The search page: a query, its neighbours, filters with counts, the histogram of distances."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from starlette.datastructures import UploadFile
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response

from fisherhash.index.images.labels import where_labels
from fisherhash.web.cards import card_of, cards_of, code_drawing
from fisherhash.web.columns import DATE_FIELD
from fisherhash.web.gallery import Gallery, PageAnswer
from fisherhash.web.queries import DEFAULT_SHOWN, MOST_SHOWN, SearchQuery
from fisherhash.web.serving import JsonAnswer, in_thread, render_page, threaded, wants_html

MOST_CHOICES = 40
"""Values of one filter that are offered."""
COLUMNS_WAIT = 1.0
HISTOGRAM_HIGH = 36


@dataclass(frozen=True)
class FilterChoice:
    """One value of a filter, as it is offered.

    Attributes:
        text: for people.
        count: how many items it would leave.
        url: the address with the filter, or without it where it is chosen.
        chosen: whether it is.
    """

    text: str
    count: int
    url: str
    chosen: bool


@dataclass(frozen=True)
class Filter:
    """A property to filter by, with its values."""

    title: str
    choices: list[FilterChoice]
    more: int = 0

    @property
    def active(self) -> bool:
        """Whether one of its values is chosen."""
        return any(choice.chosen for choice in self.choices)


class SearchPages:
    """The endpoints of the search page."""

    def __init__(self, gallery: Gallery) -> None:
        self.gallery = gallery

    @threaded
    def page(self, request: Request) -> Response:
        """The whole page."""
        query, answer, values = self._answer(request)
        subject = None
        if answer.subject is not None:
            subject = card_of(self.gallery, answer.subject)
            values["pixels"] = self.gallery.pixels(answer.subject)
        return render_page(
            "search.html",
            self.gallery,
            "search",
            subject=subject,
            preview=None if query.image is None else f"/uploads/{query.image}",
            drawing=self._drawing(answer.code),
            filters=filters_of(self.gallery, query),
            most=MOST_SHOWN,
            usual=DEFAULT_SHOWN,
            rankings=self.gallery.rankings(),
            accepted=self.gallery.options.max_upload,
            **values,
        )

    @threaded
    def results(self, request: Request) -> Response:
        """Only the results, for a slider that is being dragged."""
        _, _, values = self._answer(request)
        return render_page("_results.html", self.gallery, "search", **values)

    @threaded
    def histogram(self, request: Request) -> Response:
        """How many items are at each distance, as a drawing."""
        query = SearchQuery.parse(request.query_params, self.gallery.index.bits)
        counts = self.gallery.histogram(query)
        most = max(max(counts), 1)
        # Tall enough to be seen wherever there is anything at all.
        bars = [
            (place, max(HISTOGRAM_HIGH * count / most, 0.8) if count else 0.0)
            for place, count in enumerate(counts)
        ]
        return render_page(
            "_histogram.html",
            self.gallery,
            "search",
            bars=bars,
            high=HISTOGRAM_HIGH,
            counts=",".join(map(str, counts)),
            query=query,
        )

    def _answer(self, request: Request) -> tuple[SearchQuery, PageAnswer, dict[str, Any]]:
        query = SearchQuery.parse(request.query_params, self.gallery.index.bits)
        answer = self.gallery.find(query)
        cards = cards_of(self.gallery, answer.found, bits=query.bits, against=answer.code)
        way = self.gallery.way() if query.searches and not query.where else ""
        return query, answer, {"query": query, "answer": answer, "cards": cards, "way": way}

    def _drawing(self, code: bytes | None) -> Any:
        return None if code is None else code_drawing(code, self.gallery.index.bits)

    async def upload(self, request: Request) -> Response:
        """Encode an uploaded image, and lead to the page that searches with its code."""
        data = await read_upload(request)
        query = SearchQuery.parse(request.query_params, self.gallery.index.bits)
        found = await in_thread(request, lambda: self.gallery.encode(data, query, preview=True))
        url = found.url()
        if wants_html(request.scope):
            return RedirectResponse(url, 303)
        return JsonAnswer({"url": url})


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


def filters_of(gallery: Gallery, query: SearchQuery) -> list[Filter]:
    """The filters that the collection offers, with counts under those that are chosen."""
    columns = gallery.columns.get(COLUMNS_WAIT)
    if columns is None:
        return []
    rows = None
    if query.where:
        rows = columns.rows(gallery.index.ids(where_labels(gallery.index, query.where)))
    labels, months = columns.count_labels_of(rows), columns.count_months(rows)
    found = [_labels(labels, query), _dates(months, query)]
    for name, column in columns.fields.items():
        counts = [(_text(value), count) for value, count in column.count(rows)]
        found.append(_filter(name, name, counts, query))
    return [one for one in found if len(one.choices) > 1 or one.active]


def _text(value: object) -> str:
    """A value as a filter says it."""
    return str(value).lower() if isinstance(value, bool) else str(value)


def _labels(counts: Any, query: SearchQuery) -> Filter:
    pairs = [pair for pair in counts.most_common() if pair[0] or len(counts) > 1]
    return _filter("Label", "label", pairs, query)


def _dates(months: dict[str, int], query: SearchQuery) -> Filter:
    """Years and, once a year is chosen, its months."""
    chosen = [text for text in query.where if text.startswith(f"{DATE_FIELD}=")]
    years: dict[str, int] = {}
    for month, count in months.items():
        years[month[:4]] = years.get(month[:4], 0) + count
    counts = list((months if len(years) == 1 and chosen else years).items())
    for text in chosen:
        value = text.partition("=")[2]
        if value not in dict(counts):
            counts.insert(0, (value, sum(c for m, c in months.items() if m.startswith(value))))
    return _filter("Date", DATE_FIELD, sorted(counts), query)


def _filter(title: str, field: str, counts: list[tuple[str, int]], query: SearchQuery) -> Filter:
    choices = []
    for value, count in counts:
        text = f"{field}={value}"
        chosen = text in query.where
        if chosen or len(choices) < MOST_CHOICES:
            shown = value or "no label"
            choices.append(FilterChoice(shown, count, query.with_filter(text), chosen))
    return Filter(title.capitalize(), choices, max(0, len(counts) - len(choices)))
