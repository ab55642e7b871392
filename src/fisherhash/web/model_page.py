"""The page about the model: what made the codes, the centre of each label, what each bit means."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np
from fastapi import APIRouter, Query, Response
from numpy.typing import NDArray

from fisherhash.codes import code_bytes, hamming, pack, unpack
from fisherhash.data.formats import UnreadableImage
from fisherhash.errors import FisherhashError
from fisherhash.index.images.choosing import describe_model
from fisherhash.index.images.results import joined_codes
from fisherhash.index.items import Ids
from fisherhash.web.gallery import Gallery, MissingError
from fisherhash.web.pages import WAIT
from fisherhash.web.queries import LARGEST_ID, PageQuery
from fisherhash.web.rendering import Shown, render_page

MOST_CENTRES = 24
SAMPLE = 192
"""Images that are encoded again to see how sure the model is of each bit."""
SIDE_SHOWN = 5
_MOST_PER_LABEL = 2000
Subject = Annotated[int | None, Query(ge=0, le=LARGEST_ID)]
router = APIRouter(prefix="/model", include_in_schema=False)


@router.get("")
def page(gallery: Shown, like: Subject = None) -> Response:
    """What made the codes, how good they are, and where the labels lie."""
    index, hasher = gallery.index, None
    with contextlib.suppress(FisherhashError):
        hasher = gallery.images.hasher
    details = {} if hasher is None else hasher.details
    facts: dict[str, Any] = {
        "model": describe_model(index.model) if index.model else "not known",
        "bits": index.bits,
        "fingerprint": (index.fingerprint or "not known")[:16],
    }
    if hasher is not None:
        facts |= {"method": hasher.method, "backbone": hasher.backbone_name}
        facts |= {"runs in": hasher.runtime_name}
        if details.get("reference"):
            facts["reference"] = details["reference"]
        if not hasher.vectors_only:
            facts["image size"] = f"{hasher.preprocessing.size} px"
        if hasher.classes:
            names = ", ".join(hasher.classes[:12]) + (", …" if len(hasher.classes) > 12 else "")
            facts["classes"] = f"{len(hasher.classes)}: {names}"
    rows = gallery.derived(label_centres).get(WAIT)
    return render_page(
        "model.html",
        gallery,
        "model",
        facts=facts,
        tables={name: found for name in _TABLES if (found := _flat(details.get(name)))},
        results=_flat(details.get("results")),
        ready=rows is not None,
        rows=rows,
        can_encode=hasher is not None and not hasher.vectors_only,
        subject=None if like is None else gallery.item(like),
    )


@router.get("/bits")
def bits(gallery: Shown, like: Subject = None) -> Response:
    """What each bit separates: the images most on either side of it."""
    sides, own, rows = gallery.derived(bit_sides, once=True).get(WAIT), None, []
    if like is not None:
        own = unpack(np.frombuffer(gallery.item(like).code, np.uint8)[None], gallery.index.bits)[0]
    if sides is not None:
        hits = gallery.hits_by_id([np.unique(sides.ids[sides.ids >= 0])])
        rows = [
            {
                "share": float(share),
                "own": None if own is None else int(own[bit]),
                "sides": [[hits[i] for i in side.tolist() if i in hits] for side in both],
            }
            for bit, (share, both) in enumerate(zip(sides.share, sides.ids, strict=True))
        ]
    values = {"ready": sides is not None, "sample": 0 if sides is None else sides.sample}
    return render_page("_bits.html", gallery, "model", rows=rows, **values)


_TABLES = ("ranking", "data", "options", "settings")


def _flat(table: Any) -> dict[str, Any]:
    """The plain values of one part of a model card."""
    if not isinstance(table, dict):
        return {}
    plain = {k: v for k, v in table.items() if isinstance(v, str | int | float | bool)}
    return {k: f"{v:.4f}" if isinstance(v, float) else v for k, v in plain.items()}


def label_centres(gallery: Gallery) -> list[dict[str, Any]]:
    """The centre of each frequent label: of every bit the value that most of its images have.

    Returns:
        Of each label its name, the count and the mean distance of its images, the address that
        searches with its centre, and the distances of all centres with a shade from 0 to 9 and
        whether it is the smallest; None for its own.
    """
    index, columns = gallery.index, gallery.columns.get(60.0)
    if columns is None:
        raise FisherhashError("the labels are still being counted")
    frequent = sorted([pair for pair in columns.labels.count() if pair[0]][:MOST_CENTRES])
    rows, centres = [], np.zeros((len(frequent), code_bytes(index.bits)), np.uint8)
    for number, (name, count) in enumerate(frequent):
        ids = columns.ids[columns.labels.rows_of(name)]
        found = index.get_items(ids[:: max(1, count // _MOST_PER_LABEL)])
        codes = joined_codes([item.code for item in found if item])
        centres[number] = pack(unpack(codes, index.bits).mean(axis=0)[None] - 0.5)[0]
        spread = float(hamming(centres[[number]], codes).mean())
        url = PageQuery(code=centres[number].tobytes().hex()).url()
        rows.append({"name": name, "count": count, "spread": spread, "url": url})
    apart = hamming(centres, centres).astype(np.int64)
    other = apart[~np.eye(len(apart), dtype=bool)]
    low, high = (int(other.min()), int(other.max())) if len(other) else (0, 1)
    for number, row in enumerate(rows):
        cells = [(v, 9 * (v - low) // max(high - low, 1), v == low) for v in apart[number].tolist()]
        row["cells"] = [*cells[:number], None, *cells[number + 1 :]]
    return rows


@dataclass(frozen=True)
class BitSides:
    """The images of a sample that are most on either side of each bit.

    Attributes:
        ids: (bits, 2, shown) for the values 0 and 1 the ids, the surest first; -1 where there are
            no more.
        share: (bits,) how many of the sample have the bit set, from 0 to 1.
        sample: how many images were encoded.
    """

    ids: Ids
    share: NDArray[np.float64]
    sample: int


def bit_sides(gallery: Gallery) -> BitSides:
    """Encode a sample of the collection again, and order it by the logit of each bit."""
    ids = gallery.index.ids()
    chosen = ids[np.linspace(0, len(ids) - 1, min(SAMPLE, len(ids))).astype(np.int64)]
    known, rows = [], []
    for hit in gallery.hits(chosen):
        with contextlib.suppress(MissingError, UnreadableImage, OSError):
            rows.append(gallery.images.hasher.logits(gallery.file_of(hit))[0])
            known.append(hit.id)
    bits = gallery.index.bits
    numbers, logits = np.array(known, np.int64), np.array(rows, np.float32).reshape(-1, bits)
    found = np.full((bits, 2, SIDE_SHOWN), -1, dtype=np.int64)
    for bit, order in enumerate(np.argsort(logits, axis=0, kind="stable").T):
        ones = logits[order, bit] > 0
        for value, side in enumerate((order[~ones], order[ones][::-1])):
            found[bit, value, : len(side[:SIDE_SHOWN])] = numbers[side[:SIDE_SHOWN]]
    share = (logits > 0).mean(axis=0) if known else np.zeros(bits)
    return BitSides(found, share, len(known))
