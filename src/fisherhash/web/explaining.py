"""What the bits of a model mean in a collection: the centre of each label, both sides of a bit."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fisherhash.codes import hamming, pack, unpack
from fisherhash.data.formats import UnreadableImage
from fisherhash.index.base import Index
from fisherhash.index.items import Codes, Ids
from fisherhash.web.columns import Columns
from fisherhash.web.gallery import Gallery, MissingError

MOST_CENTRES = 24
SAMPLE = 192
"""Images that are encoded again to see how sure the model is of each bit."""
SIDE_SHOWN = 5
_MOST_PER_LABEL = 2000


@dataclass(frozen=True)
class Centres:
    """The middle of each label: of every bit the value that most of its images have.

    Attributes:
        names: the labels.
        counts: how many images each has.
        codes: (n, bytes) the centres.
        spread: mean distance of the images of each label from its centre.
        distances: (n, n) between the centres.
    """

    names: list[str]
    counts: list[int]
    codes: Codes
    spread: list[float]
    distances: NDArray[np.int64]


def label_centres(index: Index, columns: Columns) -> Centres:
    """The centres of the most frequent labels."""
    frequent = columns.labels.count(None)[: MOST_CENTRES + 1]
    names = sorted(name for name, _ in frequent if name)[:MOST_CENTRES]
    counts, centres, spread = [], [], []
    for name in names:
        number = columns.labels.values.index(name)
        ids = columns.ids[columns.labels.numbers == number]
        counts.append(len(ids))
        found = index.get_items(ids[:: max(1, len(ids) // _MOST_PER_LABEL)])
        rows = np.array([list(item.code) for item in found if item], dtype=np.uint8)
        rows = rows.reshape(-1, -(-index.bits // 8))
        share = unpack(rows, index.bits).mean(axis=0) if len(rows) else np.zeros(index.bits)
        centre = pack(share[None] - 0.5)
        centres.append(centre[0])
        spread.append(float(hamming(centre, rows).mean()) if len(rows) else 0.0)
    codes = np.array(centres, dtype=np.uint8).reshape(len(names), -1)
    apart = hamming(codes, codes).astype(np.int64) if names else np.zeros((0, 0), dtype=np.int64)
    return Centres(names, counts, codes, spread, apart)


@dataclass(frozen=True)
class BitSides:
    """The images of a sample that are most on either side of each bit.

    Attributes:
        zeros: (bits, shown) ids, the surest first; -1 where there are none.
        ones: likewise.
        share: (bits,) how many of the sample have the bit set, from 0 to 1.
        sample: how many images were encoded.
    """

    zeros: Ids
    ones: Ids
    share: NDArray[np.float64]
    sample: int


def bit_sides(gallery: Gallery) -> BitSides:
    """Encode a sample of the collection again, and order it by the logit of each bit."""
    ids = gallery.index.ids()
    chosen = ids[np.linspace(0, len(ids) - 1, min(SAMPLE, len(ids))).astype(np.int64)]
    known, rows = [], []
    hasher = gallery.images.hasher
    for item in gallery.index.get_items(chosen):
        with contextlib.suppress(MissingError, UnreadableImage, OSError):
            if item is not None:
                rows.append(hasher.logits(gallery.file_of(item))[0])
                known.append(item.id)
    bits = gallery.index.bits
    numbers = np.array(known, dtype=np.int64)
    logits = np.array(rows, dtype=np.float32).reshape(len(known), bits)
    zeros = np.full((bits, SIDE_SHOWN), -1, dtype=np.int64)
    ones = zeros.copy()
    for bit in range(bits):
        order = np.argsort(logits[:, bit], kind="stable")
        low = order[logits[order, bit] <= 0][:SIDE_SHOWN]
        high = order[::-1][logits[order[::-1], bit] > 0][:SIDE_SHOWN]
        zeros[bit, : len(low)] = numbers[low]
        ones[bit, : len(high)] = numbers[high]
    share = (logits > 0).mean(axis=0) if len(known) else np.zeros(bits)
    return BitSides(zeros, ones, share, len(known))
