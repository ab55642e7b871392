"""Searches an index for duplicates: near codes, confirmed by the pixels of their files."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from fisherhash.codes import hamming
from fisherhash.errors import UsageError
from fisherhash.index.base import Index
from fisherhash.index.images.candidates import CandidateFinder, Candidates, all_codes
from fisherhash.index.images.confirming import (
    ALIKE,
    likeness,
    load_thumbnail,
    pixel_count,
    same_bytes,
)
from fisherhash.index.images.copies import false_pairs_of
from fisherhash.index.images.duplicates import KEEP, DuplicateGroup, Duplicates, Keep
from fisherhash.index.images.grouping import Chance, check_radius
from fisherhash.index.images.results import Match, image_path, joined_codes, synced_folder
from fisherhash.index.items import Ids, Item
from fisherhash.system.progress import progress

MOST_LOOKED = 10_000
"""Groups of other radii than the last one that are remembered."""
_Look = tuple[bytes, bool, str, bool]
"""Which items were looked at, and how."""
_MOST_ROUNDS = 8
"""Images of a group with which the others are compared, before the rest counts as unlike."""


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
        self._replaced = source is not index
        if self._replaced:
            self._take_ids(source)
        self.bits: int = source.bits
        """Length of the codes that are compared."""
        self._builtin = source.model.get("builtin")
        self._without_code = len(index) - len(self._ids)
        self._finder = CandidateFinder(source.uri, self._ids, self._codes, source.bits)
        # Equal codes count once: what a thousand copies of one image have in common is no chance.
        known = false_pairs_of(source)
        self._chance = Chance.of(self._finder.unique, source.bits, known and known.within)
        self._looked: dict[_Look, list[DuplicateGroup]] = {}

    def _take_ids(self, copies: Index) -> None:
        """The ids that the items of the copy codes have in the index itself, ascending."""
        own = self._index.files()
        known = {s.id: own[key].id for key, s in copies.files().items() if key in own}
        del own
        # -1: removed from the index since the copy codes were brought up to date.
        ids = np.array([known.get(number, -1) for number in self._ids.tolist()], dtype=np.int64)
        order = np.argsort(ids, kind="stable")[np.count_nonzero(ids < 0) :]
        self._ids, self._codes = ids[order], self._codes[order]

    def radius(self) -> int:
        """The radius that lets about one false pair per thousand items through."""
        return self._chance.radius()

    def find(
        self,
        radius: int | None = 0,
        *,
        compare_files: bool = False,
        pairs: bool = False,
        keep: Keep = "first",
        confirm: bool = False,
    ) -> Duplicates:
        """The duplicates within a radius, see :meth:`ImageIndex.duplicates`."""
        if keep not in KEEP:
            raise UsageError(f"keep must be one of {', '.join(KEEP)}, got '{keep}'")
        radius = self.radius() if radius is None else check_radius(radius, self.bits)
        found = self._finder.pairs(radius) if pairs else self._finder.groups(radius)
        groups: list[DuplicateGroup] = []
        for parts in self._look_at(found, compare_files=compare_files, keep=keep, confirm=confirm):
            groups += itertools.chain(*map(DuplicateGroup.pairs, parts)) if pairs else parts
        groups.sort(key=DuplicateGroup.rank)
        rate = self._chance.rate(radius) if self._chance.sampled else 0.0
        return Duplicates(
            index=os.path.basename(os.path.abspath(self._index.uri)),
            bits=self.bits,
            count=len(self._ids),
            radius=radius,
            groups=groups,
            compared=compare_files,
            pairs=pairs,
            comparisons=1 / rate if rate else None,
            distinct=self._chance.count,
            keep=keep,
            code=self._builtin,
            without_code=self._without_code,
        )

    def _look_at(
        self, found: Sequence[Candidates], *, compare_files: bool, keep: Keep, confirm: bool
    ) -> list[list[DuplicateGroup]]:
        """What each group of candidates is after a look at its files."""
        names = [(group.ids.tobytes(), compare_files, keep, confirm) for group in found]
        looked = {name: self._looked[name] for name in names if name in self._looked}
        new = [pair for pair in zip(names, found, strict=True) if pair[0] not in looked]
        # All at once: one query to the index per group would be slow for many groups.
        wanted = np.concatenate([np.empty(0, dtype=np.int64), *(group.ids for _, group in new)])
        items, folder = iter(self._items(wanted)), synced_folder(self._index)
        with progress("comparing images", len(new)) as advance:
            for name, group in new:
                listed = list(itertools.islice(items, len(group.ids)))
                # None: another writer removed the item meanwhile.
                left = [item for item in listed if item is not None]
                parts: list[DuplicateGroup] = []
                if len(left) > 1:
                    left = best_first(left, folder) if keep == "best" else left
                    matches = _matches(left, folder, compare_files=compare_files)
                    span = group.span if len(left) == len(listed) else _widest(left)
                    whole = DuplicateGroup(matches, span=span)
                    parts = list(_confirm(whole)) if confirm else [whole]
                looked[name] = parts
                advance(1)
        # Groups of other radii are kept, too, up to some memory.
        full = len(self._looked) > MOST_LOOKED + 2 * len(looked)
        self._looked = looked if full else self._looked | looked
        return [looked[name] for name in names]

    def _items(self, ids: Ids) -> list[Item | None]:
        """Items of the index, with the codes that are compared."""
        found = self._index.get_items(ids)
        if not self._replaced:
            return found
        rows = self._codes[np.searchsorted(self._ids, ids)]
        return [
            None if item is None else replace(item, code=row.tobytes())
            for item, row in zip(found, rows, strict=True)
        ]


def best_first(items: Sequence[Item], folder: str | None) -> list[Item]:
    """The items to keep first: files before links, the most pixels, the oldest file, the id.

    All of them are in order, since a group may be split, and then each part keeps its first.
    """

    def worth(item: Item) -> tuple[bool, int, float, int]:
        age = float("inf") if item.mtime_ns is None else item.mtime_ns
        path = image_path(item, folder)
        return path is not None and os.path.islink(path), -pixel_count(path), age, item.id

    return sorted(items, key=worth)


def _matches(items: Sequence[Item], folder: str | None, *, compare_files: bool) -> list[Match]:
    codes = joined_codes([item.code for item in items])
    distances = hamming(codes[:1], codes)[0].tolist()
    marks: list[int | None] = [None] * len(items)
    if compare_files:
        marks = same_bytes([image_path(item, folder) for item in items])
    return list(map(Match, items, distances, [folder] * len(items), marks))


def _widest(items: Sequence[Item]) -> int:
    """The largest distance between any two items, in blocks: there may be thousands."""
    codes = np.unique(joined_codes([item.code for item in items]), axis=0)
    blocks = (codes[start : start + 256] for start in range(0, len(codes), 256))
    return max(int(hamming(block, codes).max()) for block in blocks)


def _confirm(group: DuplicateGroup) -> Iterator[DuplicateGroup]:
    """Split a group by what its thumbnails show.

    Images that are alike stay together. The others follow behind one of those, in a group that is
    not confirmed.
    """
    thumbnails = {match.item.id: load_thumbnail(match.path) for match in group}
    left = [match for match in group if thumbnails[match.item.id] is not None]
    alone = [match for match in group if thumbnails[match.item.id] is None]
    if not left:
        yield group
        return
    anchor: Match | None = None
    for _ in range(_MOST_ROUNDS):
        if len(left) < 2:
            break
        first, *others = left
        shown = thumbnails[first.item.id]
        alike, left = [], []
        for match in others:
            other = thumbnails[match.item.id]
            same = shown is not None and other is not None and likeness(shown, other) >= ALIKE
            (alike if same else left).append(match)
        if alike:
            anchor = anchor or first
            yield _part(group, [first, *alike], confirmed=True)
        else:
            alone.append(first)
    alone += left
    if anchor is None:
        yield DuplicateGroup(group, span=group.span, confirmed=False)
    elif alone:
        yield _part(group, [anchor, *alone], confirmed=False)


def _part(group: DuplicateGroup, matches: Sequence[Match], *, confirmed: bool) -> DuplicateGroup:
    """Some of a group; their distances are from the first of them."""
    if len(matches) == len(group):
        return DuplicateGroup(matches, span=group.span, confirmed=confirmed)
    items = [match.item for match in matches]
    codes = joined_codes([item.code for item in items])
    distances = hamming(codes[:1], codes)[0].tolist()
    renewed = [
        match._replace(distance=distance)
        for match, distance in zip(matches, distances, strict=True)
    ]
    return DuplicateGroup(renewed, span=_widest(items), confirmed=confirmed)
