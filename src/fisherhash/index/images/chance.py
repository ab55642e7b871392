"""How near two codes of a collection come by chance, which decides the radius of duplicates."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

from fisherhash.index.items import Codes

SAMPLED_PAIRS = 1 << 20
FEWEST_SAMPLED = 5000
"""Pairs below which a sample says too little about how near codes come by chance."""
FALSE_PAIRS_PER_ITEM = 1e-3
"""The false pairs that the default radius allows for: one per thousand images."""
MOST_FALSE = 1e-6
"""The largest share of false pairs that it allows for, however few images there are."""

_SPREAD = 1.5
"""Standard deviation of distances, as a multiple of that of independent bits, if none is known."""
_TAIL = (1e-4, 2e-3)
"""The part of the distances from which rarer ones are extrapolated; copies are rarer than that."""
_VALLEY = 1 / 16
"""The width of the valley between the distances of copies and those of other images, as a share of
the bits."""
_IN_VALLEY = (10, 1 / 20)
"""The most pairs in it, and the most as a share of the pairs below it."""


@dataclass(frozen=True)
class Chance:
    """How near two codes of a collection come by chance, from pairs drawn at random.

    Attributes:
        bits: length of a code.
        count: codes in the collection.
        sampled: pairs that were drawn.
        within: (bits + 1,) how many of them are within each distance.
        measured: false pairs within a radius per million, as measured elsewhere for codes of this
            kind; stands in where a sample says too little.
    """

    bits: int
    count: int
    sampled: int
    within: NDArray[np.int64]
    measured: Callable[[int], float] | None = None

    @classmethod
    def of(cls, codes: Codes, bits: int, measured: Callable[[int], float] | None = None) -> Chance:
        """Draw pairs of different rows; the same codes have the same pairs every time."""
        count = len(codes)
        rng = np.random.default_rng(count)
        total = count * (count - 1) // 2
        if total <= SAMPLED_PAIRS:
            left, right = np.triu_indices(count, 1)
        else:
            left = rng.integers(0, count, SAMPLED_PAIRS)
            right = (left + rng.integers(1, count, SAMPLED_PAIRS)) % count
        differ = np.bitwise_count(codes[left] ^ codes[right]).sum(axis=1, dtype=np.int64)
        within = np.cumsum(np.bincount(differ, minlength=bits + 1))
        return cls(bits, count, len(left), within, measured)

    @property
    def pairs(self) -> int:
        """Pairs of codes in the collection."""
        return self.count * (self.count - 1) // 2

    @functools.cached_property
    def copies(self) -> int:
        """How many of the sampled pairs are copies: those below the valley of the distances.

        Copies are near each other and other images are far; between them hardly any distance
        occurs. Where distances only become rarer towards 0, there is no valley and none is told.
        """
        width = max(1, round(_VALLEY * self.bits))
        below, inside = self.within[:-width], self.within[width:] - self.within[:-width]
        most, share = _IN_VALLEY
        valleys = np.flatnonzero(inside <= np.minimum(most, share * below))
        # Those above the middle are on the other side of all distances.
        valleys = valleys[below[valleys] < self.within[-1] / 2]
        return int(below[valleys[-1]]) if len(valleys) else 0

    def rate(self, radius: int) -> float:
        """The share of pairs of different images that are within a radius.

        Where the sample holds too few of them, the rate is extrapolated from distances that it
        holds often enough: with each bit it falls by the same factor, as it does for codes of
        photos. For independent bits it falls faster, so it is rather too high than too low. Copies
        do not count, as far as they are told from the others.
        """
        sampled = self.sampled - self.copies
        if sampled < FEWEST_SAMPLED and self.measured is not None:
            return self.measured(radius) / 1e6
        if sampled < FEWEST_SAMPLED:
            spread = _SPREAD * self.bits**0.5 / 2
            return NormalDist(self.bits / 2, spread).cdf(radius + 0.5)
        share = np.maximum(self.within - self.copies, 0) / sampled
        low, high = max(_TAIL[0], 100 / sampled), _TAIL[1]
        if share[radius] >= low:
            return float(share[radius])
        usable = np.flatnonzero((share >= low) & (share <= high))
        if len(usable) < 2:
            # So few distances are in the tail that the next ones have to do.
            usable = np.flatnonzero(share >= low)[:3]
        if len(usable) < 2 or share[usable[0]] == share[usable[-1]]:
            return float(share[radius])
        slope, offset = np.polyfit(usable, np.log(share[usable]), 1)
        return float(np.exp(offset + slope * radius))

    def false_pairs(self, radius: int) -> float:
        """How many pairs of different images to expect within a radius."""
        return self.pairs * self.rate(radius)

    def radius(self) -> int:
        """The largest radius with few false pairs: one per thousand images, one in a million."""
        allowed = min(MOST_FALSE, FALSE_PAIRS_PER_ITEM * self.count / max(1, self.pairs))
        radius = 0
        while radius < self.bits and self.rate(radius + 1) <= allowed:
            radius += 1
        return radius
