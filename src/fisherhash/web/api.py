"""The JSON API: the verbs of an index of images over HTTP."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

from starlette.datastructures import UploadFile
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from fisherhash.errors import UsageError
from fisherhash.index.images.labels import where_labels
from fisherhash.index.items import Item
from fisherhash.system.version import __version__
from fisherhash.web.gallery import Found, Gallery, MissingError, PageAnswer
from fisherhash.web.guard import bearer, same_token
from fisherhash.web.image_routes import item_number
from fisherhash.web.openapi import describe_api
from fisherhash.web.queries import MOST_FILTERS, UNASKED, SearchQuery, parse_number_of
from fisherhash.web.reviewing import parse_duplicates
from fisherhash.web.searching import read_upload
from fisherhash.web.serving import JsonAnswer, in_thread, threaded

MOST_LISTED = 1000
"""Items of one answer."""
MOST_LABELS = 50


def _distances(found: Found) -> dict[str, float]:
    """The distances of a result that were computed."""
    both = None if found.combined is None else round(found.combined, 6)
    all_three = {"distance": found.distance, "fine": found.fine, "combined": both}
    return {name: value for name, value in all_three.items() if value is not None}


class Api:
    """The endpoints of the API."""

    def __init__(self, gallery: Gallery) -> None:
        self.gallery = gallery

    @threaded
    def info(self, request: Request) -> Response:
        """Facts about the index."""
        facts = self.gallery.images.info()
        shown = {name: facts.get(name) for name in _PUBLIC_FACTS}
        # Where a model or a folder is on this machine is nobody's business.
        shown["model"] = {k: v for k, v in (facts["model"] or {}).items() if k != "path"}
        shown |= {
            "name": self.gallery.name,
            "version": __version__,
            "writable": self.gallery.options.writable,
            "rankings": list(self.gallery.rankings()),
        }
        return JsonAnswer(shown)

    async def search(self, request: Request) -> Response:
        """Search with an item or a code (GET), or with an image (POST)."""
        bits = self.gallery.index.bits
        query = await in_thread(request, lambda: self._query(request, bits))
        if request.method == "POST":
            data, given = await read_upload(request), query
            ranking = query.ranking if request.query_params.get("ranking") else None
            query = await in_thread(
                request, lambda: self.gallery.encode(data, given, ranking=ranking)
            )
        elif not query.searches:
            raise UsageError("nothing to search for: give like, key or code, or POST an image")
        answer = await in_thread(request, lambda: self.gallery.find(query))
        return JsonAnswer(self._found(answer))

    def _query(self, request: Request, bits: int) -> SearchQuery:
        query = SearchQuery.parse(request.query_params, bits)
        key = request.query_params.get("key")
        if key is None:
            return query
        if query.searches:
            raise UsageError("search with one of like, key and code")
        item = self._by_key(key)
        # Only an uploaded image has more.
        return replace(query, item=item.id, **UNASKED)

    def _by_key(self, key: str) -> Item:
        item = None if "\0" in key else self.gallery.index.get_items([key])[0]
        if item is None:
            raise MissingError(f"there is no item with the key {key!r}")
        return item

    def _found(self, answer: PageAnswer) -> dict[str, Any]:
        rows = [
            {"rank": rank, **_distances(one)} | self.describe(one.item)
            for rank, one in enumerate(answer.found, start=1)
        ]
        weight = {} if answer.fine_weight is None else {"fine_weight": answer.fine_weight}
        return {
            "query": None if answer.subject is None else self.describe(answer.subject),
            "code": (answer.code or b"").hex(),
            "ranking": answer.query.ranking,
            "results": rows,
            "compared": answer.compared,
            "seconds": round(answer.seconds, 6),
            **weight,
        }

    def describe(self, item: Item) -> dict[str, Any]:
        """An item as JSON can hold it; where its file is on this machine is left out."""
        return {
            "id": item.id,
            "key": item.key,
            "name": self.gallery.label(item),
            "labels": list(item.labels),
            "metadata": item.metadata,
            "size": item.size,
            "mtime_ns": item.mtime_ns,
            "code": item.code.hex(),
            "image": f"/images/{item.id}/original",
            "thumbnail": f"/images/{item.id}/medium",
        }

    async def items(self, request: Request) -> Response:
        """List items (GET), or add an image (POST)."""
        if request.method == "POST":
            return await self._add(request)
        return await in_thread(request, lambda: self._list(request))

    def _list(self, request: Request) -> Response:
        params = request.query_params
        limit = parse_number_of(params, "limit", 100, 1, MOST_LISTED)
        after = parse_number_of(params, "after", -1, 0, 2**62)
        where = tuple(text for text in params.getlist("where") if text)
        if len(where) > MOST_FILTERS:
            raise UsageError(f"{len(where)} filters are too many, the most is {MOST_FILTERS}")
        index = self.gallery.index
        with index.reading():
            ids = index.ids(where_labels(index, where) if where else None)
            chosen = ids[ids > after]
            found = index.get_items(chosen[:limit])
        rows = [self.describe(item) for item in found if item is not None]
        left = len(chosen) > limit
        return JsonAnswer(
            {"items": rows, "count": len(ids), "next": int(chosen[limit - 1]) if left else None}
        )

    async def _add(self, request: Request) -> Response:
        self.check_may_write(request)
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != "multipart/form-data":
            raise HTTPException(415, "Send the image as a file named image of a multipart form")
        async with request.form(max_files=1, max_fields=MOST_LABELS + 1) as form:
            file = form.get("image")
            if not isinstance(file, UploadFile):
                raise HTTPException(400, "The form has no file named image")
            data, name = await file.read(), file.filename or ""
            labels = [text for text in form.getlist("label") if isinstance(text, str)]
        item = await in_thread(
            request, lambda: self.gallery.changes.add(data, name, labels or None)
        )
        return JsonAnswer(self.describe(item), 201)

    async def item(self, request: Request) -> Response:
        """One item (GET), or its removal from the index (DELETE)."""
        number = item_number(request)
        if request.method == "DELETE":
            self.check_may_write(request)
            await in_thread(request, lambda: self._remove(number))
            return JsonAnswer({"removed": 1})
        item = await in_thread(request, lambda: self.gallery.item(number))
        return JsonAnswer(self.describe(item))

    def _remove(self, number: int) -> None:
        self.gallery.item(number)
        self.gallery.changes.remove(number)

    def check_may_write(self, request: Request) -> None:
        """Refuse a change of an index that is served for reading, or by a stranger.

        Raises:
            HTTPException: the request may not change anything.
        """
        options = self.gallery.options
        if not options.writable:
            raise HTTPException(403, "This index is served for reading; start it with --writable")
        # Not by the cookie, which a browser sends on its own.
        if not same_token(bearer(request.headers), options.token):
            raise HTTPException(
                401,
                "Changes need the header 'Authorization: Bearer TOKEN'",
                headers={"www-authenticate": "Bearer"},
            )

    @threaded
    def facets(self, request: Request) -> Response:
        """How many items have each label, month and value of a field."""
        index, params = self.gallery.index, request.query_params
        where = tuple(text for text in params.getlist("where") if text)[:MOST_FILTERS]
        columns = self.gallery.columns.get(self.gallery.options.seconds / 2)
        if columns is None:
            raise HTTPException(503, "The labels are still being counted; try again")
        rows = columns.rows(index.ids(where_labels(index, where))) if where else None
        fields = {name: one.count(rows) for name, one in columns.fields.items()}
        return JsonAnswer(
            {
                "labels": [[a, b] for a, b in columns.count_labels_of(rows).most_common()],
                "months": [[a, b] for a, b in columns.count_months(rows).items()],
                "fields": {name: [[a, b] for a, b in pairs] for name, pairs in fields.items()},
            }
        )

    @threaded
    def duplicates(self, request: Request) -> Response:
        """Groups of likely duplicates."""
        radius, code = parse_duplicates(request.query_params)
        wait = self.gallery.options.seconds * 0.9
        state = self.gallery.duplicates.at(radius, code=code, wait=wait)
        if state.missing:
            # Too much work to begin without being asked: `dedup`, or the page, computes them.
            state = self.gallery.duplicates.at(radius, code="own", wait=wait)
        found = state.found
        if found is None:
            raise HTTPException(503, f"{state.waiting} Try again later")
        groups = [
            {name: about[name] for name in ("size", "span", "confirmed")}
            | {"items": [{"distance": m.distance} | self.describe(m.item) for m in group]}
            for about, group in zip(found.to_json()["groups"], found.groups, strict=True)
        ]
        facts = {"bits": found.bits, "radius": found.radius, "count": found.count}
        return JsonAnswer(facts | {"code": state.code, "groups": groups})

    @threaded
    def skipped(self, request: Request) -> Response:
        """The files that could not be read."""
        return JsonAnswer([file._asdict() for file in self.gallery.images.skipped()])

    async def openapi(self, request: Request) -> Response:
        """The description of this API."""
        bits, options = self.gallery.index.bits, self.gallery.options
        return JsonAnswer(describe_api(bits, writable=options.writable, limit=options.max_upload))

    @threaded
    def health(self, request: Request) -> Response:
        """Whether the index can be read."""
        return JsonAnswer({"status": "ok", "items": len(self.gallery.index)})

    @threaded
    def metrics(self, request: Request) -> Response:
        """Counters in the text format of Prometheus."""
        facts = self.gallery.index.info()
        gauges = {
            "fisherhash_items": ("Items in the index.", facts["count"]),
            "fisherhash_bits": ("Length of its codes.", facts["bits"]),
            "fisherhash_resident_bytes": ("Memory of the process that answered.", _resident()),
        }
        if facts.get("commit") is not None:
            gauges["fisherhash_commit"] = ("Number of the last commit.", facts["commit"])
        text = request.app.state.metrics.render(gauges)
        return PlainTextResponse(text, media_type="text/plain; version=0.0.4; charset=utf-8")


_PUBLIC_FACTS = ("bits", "fingerprint", "count", "keyed", "skipped", "encoded_by")


def _resident() -> int:
    """Bytes of memory that this process holds; 0 where the system does not say."""
    try:
        with open("/proc/self/statm", encoding="ascii") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        return 0
