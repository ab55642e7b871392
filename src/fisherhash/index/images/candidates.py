"""Items that may be copies of each other, by their codes alone."""

from __future__ import annotations

import os
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from fisherhash.index.base import Codes, Ids, Index
from fisherhash.index.images.grouping import NearPairs, complete_groups, distinct_codes
from fisherhash.index.images.known_pairs import remembered_pairs

CODES_AT_ONCE = 1 << 18


class Candidates(NamedTuple):
    """Items that may be copies of each other.

    Attributes:
        ids: their ids, ascending.
        span: the largest distance between any two of them.
    """

    ids: Ids
    span: int


class CandidateFinder:
    """Groups of near codes at any radius; the pairs of near codes are searched for once.

    Args:
        uri: the index, under whose name pairs are remembered.
        ids: (n,) of its items.
        codes: (n, bytes) their codes.
        bits: length of a code.

    Attributes:
        unique: (distinct, bytes) the distinct codes.
    """

    def __init__(self, uri: str | os.PathLike[str], ids: Ids, codes: Codes, bits: int) -> None:
        self._uri, self._ids, self._bits = uri, ids, bits
        self.unique, self._number = distinct_codes(codes)
        self._within, self._near = 0, NearPairs.joined([])

    def groups(self, radius: int) -> list[Candidates]:
        """Groups of two items or more, any two of which differ in at most ``radius`` bits.

        The groups with the smallest largest distance come first, then the smallest groups, then by
        the smallest id.
        """
        group, widest = complete_groups(self._first_ids(), self._pairs(radius))
        found = self._together(group[self._number], widest)
        return sorted(found, key=lambda one: (one.span, len(one.ids), one.ids[0]))

    def pairs(self, radius: int) -> list[Candidates]:
        """Pairs of items within ``radius`` bits, and groups of items of equal codes.

        Only the first of several items with equal codes stands for them in the pairs: a thousand
        equal codes would be half a million pairs.
        """
        near, first = self._pairs(radius), self._first_ids()
        equal = self._together(self._number, np.zeros(len(self.unique), dtype=np.uint16))
        ends = np.sort(np.stack([first[near.left], first[near.right]], axis=1), axis=1)
        return equal + list(map(Candidates, ends, near.distances.tolist()))

    def _pairs(self, radius: int) -> NearPairs:
        """The pairs of distinct codes within a radius, from those of the widest one so far."""
        if radius > self._within:
            self._near = remembered_pairs(self._uri, self.unique, self._bits, radius)
            self._within = radius
        if radius == self._within:
            return self._near
        left, right, distances = self._near
        keep = distances <= radius
        return NearPairs(left[keep], right[keep], distances[keep])

    def _together(self, group: Ids, widest: NDArray[np.uint16]) -> list[Candidates]:
        """The ids of each group of at least two; ``widest``: the span of each group."""
        several = np.flatnonzero(np.bincount(group, minlength=len(widest))[group] > 1)
        order = several[np.lexsort((self._ids[several], group[several]))]
        if not len(order):
            return []
        starts = np.flatnonzero(np.diff(group[order], prepend=-1))
        spans = widest[group[order[starts]]].tolist()
        return list(map(Candidates, np.split(self._ids[order], starts[1:]), spans))

    def _first_ids(self) -> Ids:
        """The smallest id of each distinct code."""
        first = np.full(len(self.unique), np.iinfo(np.int64).max)
        np.minimum.at(first, self._number, self._ids)
        return first


def all_codes(index: Index) -> tuple[Ids, Codes]:
    """The ids and the codes of all items."""
    parts = list(index.scan(CODES_AT_ONCE))
    if not parts:
        width = -(-index.bits // 8)
        return np.empty(0, dtype=np.int64), np.empty((0, width), dtype=np.uint8)
    return np.concatenate([ids for ids, _ in parts]), np.concatenate([codes for _, codes in parts])
