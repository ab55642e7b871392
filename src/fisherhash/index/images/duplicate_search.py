"""Searches an index for duplicates: near codes, confirmed by the pixels of their files."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from fisherhash.codes import hamming
from fisherhash.errors import UsageError
from fisherhash.index.base import Index
from fisherhash.index.images.chance import Chance
from fisherhash.index.images.confirming import (
    ALIKE,
    likeness,
    load_thumbnail,
    pixel_count,
    same_bytes,
)
from fisherhash.index.images.copies import false_pairs_of
from fisherhash.index.images.duplicates import DuplicateGroup, Duplicates
from fisherhash.index.images.grouping import (
    NearPairs,
    all_codes,
    complete_groups,
    distinct_codes,
    remembered_pairs,
)
from fisherhash.index.images.options import DuplicateOptions, Keep
from fisherhash.index.images.results import Hit, joined_codes, synced_folder
from fisherhash.index.items import Ids
from fisherhash.system.progress import progress

MOST_LOOKED = 10_000
"""Groups of other radii than the last one that are remembered."""
_MOST_ROUNDS = 8
"""Images of a group with which the others are compared, before the rest counts as unlike."""
_Look = tuple[bytes, bool, Keep, bool]
"""Which items were looked at, and how."""


class Candidates(NamedTuple):
    """Items that may be copies of each other.

    Attributes:
        ids: their ids, ascending.
        span: the largest distance between any two of them.
    """

    ids: Ids
    span: int


class DuplicateSearch:
    """The likely duplicates of one state of an index, at any radius.

    The codes are read once, pairs of near codes are searched for once, and the files of a group are
    read once: another radius only groups again. Threads must not share it.

    Args:
        index: the index.
        copies: an index whose codes are compared in place of its own; it has the same keys. It may
            be closed afterwards.
    """

    def __init__(self, index: Index, *, copies: Index | None = None) -> None:
        self._index, source = index, index if copies is None else copies
        self._ids, self._codes = all_codes(source)
        if source is not index:
            self._take_ids(source)
        self.bits: int = source.bits
        """Length of the codes that are compared."""
        self._uri, self._builtin = source.uri, source.model.get("builtin")
        self._without_code = len(index) - len(self._ids)
        # Equal codes count once: what a thousand copies of one image have in common is no chance.
        self._unique, self._number = distinct_codes(self._codes)
        known = false_pairs_of(source)
        self._chance = Chance.of(self._unique, source.bits, known and known.within)
        self._within, self._near = 0, NearPairs.joined([])
        self._looked: dict[_Look, list[DuplicateGroup]] = {}

    def _take_ids(self, copies: Index) -> None:
        """The ids that the items of the copy codes have in the index itself, ascending."""
        own = self._index.files()
        known = {s.id: own[key].id for key, s in copies.files().items() if key in own}
        # -1: removed from the index since the copy codes were brought up to date.
        ids = np.array([known.get(number, -1) for number in self._ids.tolist()], dtype=np.int64)
        order = np.argsort(ids, kind="stable")[np.count_nonzero(ids < 0) :]
        self._ids, self._codes = ids[order], self._codes[order]

    def radius(self) -> int:
        """The radius that lets about one false pair per thousand items through."""
        return self._chance.radius()

    def find(self, options: DuplicateOptions) -> Duplicates:
        """The duplicates within a radius.

        Raises:
            UsageError: the radius is out of range, or so wide that a code is near most others.
        """
        radius = self.radius() if options.radius is None else options.radius
        if radius > self.bits:
            raise UsageError(f"radius must be between 0 and {self.bits} bits, got {radius}")
        found = self.pairs(radius) if options.pairs else self.groups(radius)
        groups: list[DuplicateGroup] = []
        for parts in self._look_at(found, options):
            pairs = itertools.chain.from_iterable(map(DuplicateGroup.pairs, parts))
            groups += pairs if options.pairs else parts
        groups.sort(key=DuplicateGroup.rank)
        rate = self._chance.rate(radius) if self._chance.sampled else 0.0
        return Duplicates(
            index=os.path.basename(os.path.abspath(self._index.uri)),
            bits=self.bits,
            count=len(self._ids),
            radius=radius,
            groups=groups,
            folder=synced_folder(self._index),
            compared=options.compare_files,
            pairs=options.pairs,
            comparisons=1 / rate if rate else None,
            distinct=self._chance.count,
            keep=options.keep,
            code=self._builtin,
            without_code=self._without_code,
        )

    # Items that may be copies, by their codes alone

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
        equal = self._together(self._number, np.zeros(len(self._unique), dtype=np.uint16))
        ends = np.sort(np.stack([first[near.left], first[near.right]], axis=1), axis=1)
        return equal + list(map(Candidates, ends, near.distances.tolist()))

    def _pairs(self, radius: int) -> NearPairs:
        """The pairs of distinct codes within a radius, from those of the widest one so far."""
        if radius > self._within:
            self._near = remembered_pairs(self._uri, self._unique, self.bits, radius)
            self._within = radius
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
        first = np.full(len(self._unique), np.iinfo(np.int64).max)
        np.minimum.at(first, self._number, self._ids)
        return first

    # A look at their files

    def _look_at(
        self, found: Sequence[Candidates], options: DuplicateOptions
    ) -> list[list[DuplicateGroup]]:
        """What each group of candidates is after a look at its files."""
        how = options.compare_files, options.keep, options.confirm
        names = [(group.ids.tobytes(), *how) for group in found]
        looked = {name: self._looked[name] for name in names if name in self._looked}
        new = [pair for pair in zip(names, found, strict=True) if pair[0] not in looked]
        # All at once: one query to the index per group would be slow for many groups.
        wanted = np.concatenate([np.empty(0, dtype=np.int64), *(group.ids for _, group in new)])
        hits = iter(self._hits(wanted))
        with progress("comparing images", len(new)) as advance:
            for name, group in new:
                # None: another writer removed the item meanwhile.
                left = [hit for hit in itertools.islice(hits, len(group.ids)) if hit is not None]
                looked[name] = list(_looked_at(left, options)) if len(left) > 1 else []
                advance(1)
        # Groups of other radii are kept, too, up to some memory.
        full = len(self._looked) > MOST_LOOKED + 2 * len(looked)
        self._looked = looked if full else self._looked | looked
        return [looked[name] for name in names]

    def _hits(self, ids: Ids) -> list[Hit | None]:
        """Items of the index, with the codes that are compared."""
        folder, rows = synced_folder(self._index), self._codes[np.searchsorted(self._ids, ids)]
        return [
            None if item is None else replace(Hit.of(item, folder=folder), code=row.tobytes())
            for item, row in zip(self._index.get_items(ids), rows, strict=True)
        ]


def _looked_at(hits: list[Hit], options: DuplicateOptions) -> Iterator[DuplicateGroup]:
    if options.keep == "best":
        hits = best_first(hits)
    if options.compare_files:
        marks = same_bytes([hit.path for hit in hits])
        hits = [replace(hit, same_bytes=mark) for hit, mark in zip(hits, marks, strict=True)]
    return _confirm(hits) if options.confirm else iter([_group(hits)])


def best_first(hits: Sequence[Hit]) -> list[Hit]:
    """The items to keep first: files before links, the most pixels, the oldest file, the id.

    All of them are in order, since a group may be split, and then each part keeps its first.
    """

    def worth(hit: Hit) -> tuple[bool, int, float, int]:
        age = float("inf") if hit.mtime_ns is None else hit.mtime_ns
        is_link = hit.path is not None and os.path.islink(hit.path)
        return is_link, -pixel_count(hit.path), age, hit.id

    return sorted(hits, key=worth)


def _group(hits: Sequence[Hit], *, confirmed: bool | None = None) -> DuplicateGroup:
    """A group of items with their distances from the first."""
    codes = joined_codes([hit.code for hit in hits])
    distances = hamming(codes[:1], codes)[0].tolist()
    rows = [replace(hit, distance=d) for hit, d in zip(hits, distances, strict=True)]
    # In blocks: there may be thousands.
    distinct = np.unique(codes, axis=0)
    blocks = (distinct[start : start + 256] for start in range(0, len(distinct), 256))
    span = max(int(hamming(block, distinct).max()) for block in blocks)
    return DuplicateGroup(tuple(rows), span=span, confirmed=confirmed)


def _confirm(hits: Sequence[Hit]) -> Iterator[DuplicateGroup]:
    """Split a group by what its thumbnails show.

    Images that are alike stay together. The others follow behind one of those, in a group that is
    not confirmed. Without any thumbnail, nothing is known.
    """
    thumbnails = {hit.id: load_thumbnail(hit.path) for hit in hits}
    left = [hit for hit in hits if thumbnails[hit.id] is not None]
    alone = [hit for hit in hits if thumbnails[hit.id] is None]
    if not left:
        yield _group(hits)
        return
    anchor: Hit | None = None
    for _ in range(_MOST_ROUNDS):
        if len(left) < 2:
            break
        first, *others = left
        shown = thumbnails[first.id]
        alike, left = [], []
        for hit in others:
            other = thumbnails[hit.id]
            same = shown is not None and other is not None and likeness(shown, other) >= ALIKE
            (alike if same else left).append(hit)
        if alike:
            anchor = anchor or first
            yield _group([first, *alike], confirmed=True)
        else:
            alone.append(first)
    alone += left
    if anchor is None:
        yield _group(hits, confirmed=False)
    elif alone:
        yield _group([anchor, *alone], confirmed=False)
