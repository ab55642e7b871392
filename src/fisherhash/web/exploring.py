"""Pages to look around: the map, buckets of equal codes, the timeline, the model."""

from __future__ import annotations

from typing import Any

import numpy as np
from starlette.requests import Request
from starlette.responses import Response

from fisherhash.codes import unpack
from fisherhash.errors import FisherhashError
from fisherhash.index.images.creating import describe_model
from fisherhash.web.cards import card_of, cards_by_id, code_drawing
from fisherhash.web.columns import Columns, month_text
from fisherhash.web.derived import Derived
from fisherhash.web.explaining import BitSides, Centres, bit_sides, label_centres
from fisherhash.web.gallery import Gallery
from fisherhash.web.queries import SearchQuery, parse_number_of
from fisherhash.web.serving import LONG_CACHE, JsonAnswer, render_page, threaded

BUCKETS_ON_PAGE = 30
MONTH_SHOWN = 12
COLOURS = 10
"""Labels that have a colour of their own on the map."""
_WAIT = 2.0
_MONTHS = "January February March April May June July August September October November December"


class ExploringPages:
    """The endpoints of these pages."""

    def __init__(self, gallery: Gallery) -> None:
        self.gallery = gallery
        self.centres: Derived[Centres] = Derived(gallery.version, self._centres)
        # Once per process: what a bit means does not change with the collection.
        self.sides: Derived[BitSides] = Derived(lambda: ("once",), lambda: bit_sides(gallery))

    def _centres(self) -> Centres:
        columns = self.gallery.columns.get(60.0)
        if columns is None:
            raise FisherhashError("the labels are still being counted")
        return label_centres(self.gallery.index, columns)

    # The map

    @threaded
    def map(self, request: Request) -> Response:
        """The page of the map; its points come on their own."""
        self.gallery.map.get()
        return render_page("map.html", self.gallery, "map")

    @threaded
    def points(self, request: Request) -> Response:
        """The points of the map: ids, places, and which of the frequent labels each has."""
        layout = self.gallery.map.get(_WAIT)
        if layout is None:
            return JsonAnswer({"ready": False}, 202)
        columns = self.gallery.columns.get(_WAIT)
        names, colours = _colours(columns, layout.ids)
        head = "\n".join(names).encode()
        body = np.array([len(head)], "<f8").tobytes() + head + b" " * (-len(head) % 8)
        headers = {"cache-control": LONG_CACHE if "v" in request.query_params else "no-store"}
        return Response(
            body + layout.to_bytes() + colours.tobytes(),
            media_type="application/octet-stream",
            headers=headers,
        )

    # Buckets

    @threaded
    def buckets(self, request: Request) -> Response:
        """The largest groups of equal codes."""
        buckets = self.gallery.buckets.get(_WAIT)
        start = parse_number_of(request.query_params, "start", 0, 0, 10**6)
        part = (buckets or [])[start : start + BUCKETS_ON_PAGE]
        cards = cards_by_id(self.gallery, [number for one in part for number in one.ids])
        bits = self.gallery.index.bits
        rows = [
            {
                "count": one.count,
                "url": SearchQuery(code=one.code, radius=0, k=min(one.count, 500)).url(),
                "drawing": code_drawing(one.code, bits),
                "cards": [cards[number] for number in one.ids if number in cards],
            }
            for one in part
        ]
        return render_page(
            "buckets.html",
            self.gallery,
            "buckets",
            ready=buckets is not None,
            rows=rows,
            total=len(buckets or []),
            start=start,
            step=BUCKETS_ON_PAGE,
        )

    # The timeline

    @threaded
    def timeline(self, request: Request) -> Response:
        """How many images were taken in each month, with a few of them."""
        columns = self.gallery.columns.get(_WAIT)
        years: list[dict[str, Any]] = []
        undated = 0
        if columns is not None:
            years = self._years(columns)
            undated = int((columns.months < 0).sum())
        return render_page(
            "timeline.html",
            self.gallery,
            "timeline",
            ready=columns is not None,
            years=years,
            undated=undated,
        )

    def _years(self, columns: Columns) -> list[dict[str, Any]]:
        months, counts = np.unique(columns.months[columns.months >= 0], return_counts=True)
        shown: dict[int, list[int]] = {}
        for month in months.tolist():
            ids = columns.ids[columns.months == month]
            places = np.linspace(0, len(ids) - 1, min(MONTH_SHOWN, len(ids))).astype(np.int64)
            shown[month] = ids[places].tolist()
        cards = cards_by_id(self.gallery, [number for ids in shown.values() for number in ids])
        most = int(counts.max(initial=1))
        names, years = _MONTHS.split(), {}
        for month, count in zip(months.tolist(), counts.tolist(), strict=True):
            row = {
                "name": names[month % 12],
                "count": count,
                "share": count / most,
                "url": SearchQuery(where=(f"taken={month_text(month)}",)).url(),
                "cards": [cards[number] for number in shown[month] if number in cards],
            }
            years.setdefault(month // 12, []).append(row)
        return [
            {
                "name": str(year),
                "count": sum(row["count"] for row in rows),
                "url": SearchQuery(where=(f"taken={year:04d}",)).url(),
                "months": rows[::-1],
            }
            for year, rows in sorted(years.items(), reverse=True)
        ]

    # The model

    @threaded
    def model(self, request: Request) -> Response:
        """What made the codes, how good they are, and where the labels lie."""
        index = self.gallery.index
        number = parse_number_of(request.query_params, "like", -1, 0, 2**62)
        subject = None if number < 0 else self.gallery.item(number)
        try:
            hasher = self.gallery.images.hasher
        except FisherhashError:
            hasher = None
        details = {} if hasher is None else hasher.details
        facts = {
            "model": describe_model(index.model) if index.model else "not known",
            "bits": index.bits,
            "fingerprint": (index.fingerprint or "not known")[:16],
        }
        if hasher is not None:
            facts |= {
                "method": hasher.method,
                "backbone": hasher.backbone_name,
                "runs in": hasher.runtime_name,
            }
            if hasher.fine_bits:
                facts["second code"] = f"{hasher.fine_bits} bits, which searches count too"
            if details.get("reference"):
                facts["reference"] = details["reference"]
            if not hasher.vectors_only:
                facts["image size"] = f"{hasher.preprocessing.size} px"
        centres = self.centres.get(_WAIT)
        return render_page(
            "model.html",
            self.gallery,
            "model",
            facts=facts,
            details=_flat(details),
            results=quality(details),
            classes=() if hasher is None else hasher.classes,
            ready=centres is not None,
            centres=centres,
            rows=None if centres is None else _centre_rows(centres, index.bits),
            can_encode=hasher is not None and not hasher.vectors_only,
            subject=None if subject is None else card_of(self.gallery, subject),
        )

    @threaded
    def bits(self, request: Request) -> Response:
        """What each bit separates: the images most on either side of it."""
        number = parse_number_of(request.query_params, "like", -1, 0, 2**62)
        subject = None if number < 0 else self.gallery.item(number)
        sides = self.sides.get(_WAIT)
        rows: list[dict[str, Any]] = []
        if sides is not None:
            both = np.unique(np.concatenate([sides.zeros.ravel(), sides.ones.ravel()]))
            cards = cards_by_id(self.gallery, both[both >= 0].tolist())
            own = None
            if subject is not None:
                code = np.frombuffer(subject.code, np.uint8)[None]
                own = unpack(code, self.gallery.index.bits)[0].tolist()
            for bit in range(self.gallery.index.bits):
                rows.append(
                    {
                        "bit": bit,
                        "share": float(sides.share[bit]),
                        "own": None if own is None else own[bit],
                        "sides": [
                            (value, [cards[i] for i in ids[bit].tolist() if i in cards])
                            for value, ids in ((0, sides.zeros), (1, sides.ones))
                        ],
                    }
                )
        return render_page(
            "_bits.html",
            self.gallery,
            "model",
            ready=sides is not None,
            rows=rows,
            sample=0 if sides is None else sides.sample,
        )


def _colours(columns: Columns | None, ids: Any) -> tuple[list[str], Any]:
    """The names of the most frequent labels, and the number of each point's label; 255: another."""
    colours = np.full(len(ids), 255, dtype=np.uint8)
    if columns is None or not len(columns.ids):
        return [], colours
    frequent = [name for name, _ in columns.labels.count(None)[: COLOURS + 1] if name]
    names = frequent[:COLOURS]
    table = np.full(len(columns.labels.values) + 1, 255, dtype=np.uint8)
    for number, name in enumerate(names):
        table[columns.labels.values.index(name)] = number
    places = np.minimum(np.searchsorted(columns.ids, ids), len(columns.ids) - 1)
    known = columns.ids[places] == ids
    colours[known] = table[columns.labels.numbers[places[known]]]
    return [name.replace("\n", " ") for name in names], colours


def _centre_rows(centres: Centres, bits: int) -> list[dict[str, Any]]:
    """The table of distances between centres, each with a step of shading from 0 to 9."""
    apart = centres.distances
    other = apart[~np.eye(len(apart), dtype=bool)]
    low, high = (int(other.min()), int(other.max())) if len(other) else (0, 1)
    return [
        {
            "name": name,
            "count": centres.counts[row],
            "spread": centres.spread[row],
            "url": SearchQuery(code=centres.codes[row].tobytes()).url(),
            "drawing": code_drawing(centres.codes[row].tobytes(), bits),
            "cells": [
                None
                if column == row
                else (value, 9 * (value - low) // max(high - low, 1), value == low)
                for column, value in enumerate(apart[row].tolist())
            ],
        }
        for row, name in enumerate(centres.names)
    ]


def quality(details: dict[str, Any]) -> dict[str, Any]:
    """Numbers about the quality of a model, where it stores them: mAP and its bounds."""
    found: dict[str, Any] = {}
    results = details.get("results")
    for name, value in (results or {}).items() if isinstance(results, dict) else ():
        if isinstance(value, int | float | str) and not isinstance(value, bool):
            found[name] = f"{value:.4f}" if isinstance(value, float) else value
    return found


def _flat(details: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The parts of a model card as tables."""
    return {
        title: {k: v for k, v in details[title].items() if isinstance(v, str | int | float | bool)}
        for title in ("ranking", "data", "options", "settings")
        if isinstance(details.get(title), dict) and details[title]
    }
