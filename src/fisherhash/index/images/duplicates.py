"""Groups of items whose codes are equal or nearly so, the surest first.

Near codes are candidates for duplicates, not a proof. Where their files are there, the pixels of
their thumbnails confirm them.
"""

from __future__ import annotations

import csv
import io
import itertools
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fisherhash.codes import hamming
from fisherhash.errors import UsageError, counted, printable, printable_text
from fisherhash.index.base import Codes, Ids, Index
from fisherhash.index.images.confirming import (
    ALIKE,
    likeness,
    load_thumbnail,
    pixel_count,
    same_bytes,
)
from fisherhash.index.images.copies import false_pairs_of
from fisherhash.index.images.grouping import (
    Chance,
    check_radius,
    complete_groups,
    distinct_codes,
)
from fisherhash.index.images.known_pairs import remembered_pairs
from fisherhash.index.images.results import Match, image_path, joined_codes, synced_folder
from fisherhash.index.items import Item
from fisherhash.system.progress import progress

Keep = Literal["first", "best"]
KEEP: tuple[Keep, ...] = ("first", "best")

CODES_AT_ONCE = 1 << 18
_MOST_ROUNDS = 8
"""Images of a group with which the others are compared, before the rest counts as unlike."""


class Candidates(NamedTuple):
    """Items that may be copies of each other.

    Attributes:
        ids: their ids, ascending.
        span: the largest distance between any two of them.
    """

    ids: Ids
    span: int


class DuplicateGroup(list[Match]):
    """The items of a group. The first is the one to keep; the others have their distance from it.

    Attributes:
        span: the largest distance between any two of them.
        confirmed: whether their thumbnails show the same image; None if that was not compared.
    """

    def __init__(
        self, matches: Sequence[Match], *, span: int = 0, confirmed: bool | None = None
    ) -> None:
        super().__init__(matches)
        self.span, self.confirmed = span, confirmed

    def pairs(self) -> Iterator[DuplicateGroup]:
        """The first item with each of the others."""
        for match in self[1:]:
            span = int(match.distance)
            yield DuplicateGroup([self[0], match], span=span, confirmed=self.confirmed)

    def rank(self) -> tuple[bool, int, int, int, int]:
        """What groups are ordered by: the surest first."""
        # Where many images have equal codes, the code is more likely to say too little.
        ids = self[0].item.id, self[1].item.id
        return self.confirmed is not True, self.span, len(self), *ids


@dataclass(frozen=True)
class Duplicates:
    """Groups of likely duplicates.

    Attributes:
        index: the name of the index.
        bits: length of the codes that were compared.
        count: items in it.
        radius: bits in which any two items of a group may differ.
        groups: the items of each group, the surest group first: those that are confirmed, then by
            the largest distance in the group, then by its size. The first item of a group is the
            one to keep, and the others have their distance from it.
        compared: whether files were compared, see :attr:`Match.same_bytes`.
        pairs: whether the groups are pairs, of which several may share an item.
        comparisons: in how many comparisons one false pair is expected; None if it is not known.
        distinct: different codes among the items.
        keep: which item of a group comes first: the ``first`` added, or the ``best``.
        code: the built-in hasher of the codes that were compared; None for another one.
        without_code: items of the index that have no such code, because their files cannot be read.
    """

    index: str
    bits: int
    count: int
    radius: int
    groups: Sequence[Sequence[Match]]
    compared: bool = False
    pairs: bool = False
    comparisons: float | None = None
    distinct: int = 0
    keep: Keep = "first"
    code: str | None = None
    without_code: int = 0

    def __str__(self) -> str:
        lines = []
        for group in self.groups:
            sure = confirmed(group)
            state = "" if sure is None else ", confirmed" if sure else ", not confirmed"
            lines.append(f"{len(group)} items{state}")
            for number, match in enumerate(group):
                mark = match.same_bytes
                same = "" if mark is None else f"  same bytes ({mark + 1})"
                kept = "  keep" if self.keep == "best" and not number else ""
                lines.append(f"{match.distance:>6}  {printable(match.name)}{same}{kept}")
            lines.append("")
        return "\n".join(lines)

    def summary(self) -> str:
        """The counts in one sentence."""
        items = len({match.item.id for group in self.groups for match in group})
        codes = f"codes within {counted(self.radius, 'bit')}" if self.radius else "equal codes"
        groups = counted(len(self.groups), "pair" if self.pairs else "group")
        sentence = f"{groups} of {codes}, {items:,} of {self.count:,} items"
        if self.compared:
            copies = 0
            for group in self.groups:
                marks = [match.same_bytes for match in group if match.same_bytes is not None]
                copies += len(marks) - len(set(marks))
            sentence += f"; byte for byte copies of another file: {copies:,}"
        sure = sum(confirmed(group) is True for group in self.groups)
        if any(confirmed(group) is not None for group in self.groups):
            sentence += f"; confirmed by their pixels: {sure:,}"
        if self.groups and sure < len(self.groups):
            alike = "Equal or near" if self.radius else "Equal"
            sentence += f". {alike} codes are candidates, not a proof: look before you delete"
        return sentence

    def expectation(self) -> str | None:
        """What the radius lets through by chance, in one sentence; None if it is not known."""
        if self.comparisons is None or self.distinct < 2:
            return None
        pairs = self.distinct * (self.distinct - 1) // 2
        expected = pairs / self.comparisons
        amount = "less than one" if expected < 1 else f"about {expected:,.0f}"
        return (
            f"Within {counted(self.radius, 'bit')} of {self.bits}, expect one false pair in about "
            f"{_rounded(self.comparisons)} comparisons: {amount} among the {pairs:,} pairs of "
            "different codes here"
        )

    def to_json(self) -> dict[str, Any]:
        """The groups as JSON can hold them."""
        groups = []
        for group in self.groups:
            rows = [match.to_json() for match in group]
            if self.compared:
                rows = [match.to_json() | {"same_bytes": match.same_bytes} for match in group]
            about = {"size": len(group), "span": _span(group), "confirmed": confirmed(group)}
            groups.append(about | {"keep": rows[0]["key"] if rows else None, "items": rows})
        facts = {"bits": self.bits, "radius": self.radius, "count": self.count}
        facts |= {"code": self.code, "pairs": self.pairs, "comparisons": self.comparisons}
        return facts | {"groups": groups}

    def to_csv(self) -> str:
        """One line per item: group, keep, distance, span, confirmed, same_bytes, key, path."""
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        names = ("group", "keep", "distance", "span", "confirmed", "same_bytes", "key", "path")
        writer.writerow(names)
        for number, group in enumerate(self.groups, start=1):
            sure = {None: "", True: "yes", False: "no"}[confirmed(group)]
            for place, match in enumerate(group):
                same = "" if match.same_bytes is None else match.same_bytes + 1
                kept = "" if place else "yes"
                facts = (number, kept, match.distance, _span(group), sure, same)
                key, path = printable_text(match.name), printable_text(match.path or "")
                writer.writerow((*facts, key, path))
        return text.getvalue()


def confirmed(group: Sequence[Match]) -> bool | None:
    """Whether thumbnails show that a group is one image; None if they were not compared."""
    return group.confirmed if isinstance(group, DuplicateGroup) else None


def _span(group: Sequence[Match]) -> int:
    if isinstance(group, DuplicateGroup):
        return group.span
    return int(max((match.distance for match in group), default=0))


def _rounded(number: float) -> str:
    """Two digits of a number say all that is known about it.

    >>> _rounded(12_345_678.0), _rounded(1.4), _rounded(3e22)
    ('12,000,000', '1.4', '3e+22')
    """
    if number >= 1e15 or number < 10:
        return f"{number:.2g}"
    return f"{float(f'{number:.2g}'):,.0f}"


def duplicates_of(
    index: Index,
    radius: int | None = 0,
    *,
    compare_files: bool = False,
    pairs: bool = False,
    keep: Keep = "first",
    confirm: bool = False,
    copies: Index | None = None,
) -> Duplicates:
    """The likely duplicates of an index, see :meth:`ImageIndex.duplicates`.

    Args:
        index: the index.
        radius: as there.
        compare_files: as there.
        pairs: as there.
        keep: as there.
        confirm: as there.
        copies: an index whose codes are compared in place of its own; it has the same keys.
    """
    if keep not in KEEP:
        raise UsageError(f"keep must be one of {', '.join(KEEP)}, got '{keep}'")
    folder, source = synced_folder(index), index if copies is None else copies
    ids, codes = all_codes(source)
    # Equal codes count once: what a thousand copies of one image have in common is no chance.
    known = false_pairs_of(source)
    chance = Chance.of(distinct_codes(codes)[0], source.bits, known and known.within)
    radius = chance.radius() if radius is None else check_radius(radius, source.bits)
    find = find_pairs if pairs else find_duplicates
    found = find(source.uri, ids, codes, source.bits, radius)
    # All at once: one query to the index per group would be slow for many groups.
    wanted = np.concatenate([np.empty(0, dtype=np.int64), *(group.ids for group in found)])
    items = iter(_items(index, source, wanted))
    groups: list[DuplicateGroup] = []
    members = [list(itertools.islice(items, len(group.ids))) for group in found]
    with progress("comparing images", len(found)) as advance:
        for group, listed in zip(found, members, strict=True):
            advance(1)
            # None: another writer removed the item meanwhile.
            left = [item for item in listed if item is not None]
            if len(left) < 2:
                continue
            if keep == "best":
                left = best_first(left, folder)
            matches = _matches(left, folder, compare_files=compare_files)
            span = group.span if len(left) == len(listed) else _widest(left)
            whole = DuplicateGroup(matches, span=span)
            parts = _confirm(whole) if confirm else [whole]
            groups += itertools.chain(*map(DuplicateGroup.pairs, parts)) if pairs else parts
    groups.sort(key=DuplicateGroup.rank)
    rate = chance.rate(radius) if chance.sampled else 0.0
    return Duplicates(
        index=os.path.basename(os.path.abspath(index.uri)),
        bits=source.bits,
        count=len(source),
        radius=radius,
        groups=groups,
        compared=compare_files,
        pairs=pairs,
        comparisons=1 / rate if rate else None,
        distinct=chance.count,
        keep=keep,
        code=source.model.get("builtin"),
        without_code=len(index) - len(source),
    )


def _items(index: Index, source: Index, ids: Ids) -> list[Item | None]:
    """The items of ids of ``source``, as ``index`` has them but with the codes of ``source``."""
    found = source.get_items(ids)
    if source is index:
        return found
    own = index.get_items([item.key or "" for item in found if item is not None])
    others = iter(own)
    joined: list[Item | None] = []
    for item in found:
        other = None if item is None else next(others)
        joined.append(other if item is None or other is None else replace(other, code=item.code))
    return joined


def all_codes(index: Index) -> tuple[Ids, Codes]:
    """The ids and the codes of all items."""
    parts = list(index.scan(CODES_AT_ONCE))
    if not parts:
        width = -(-index.bits // 8)
        return np.empty(0, dtype=np.int64), np.empty((0, width), dtype=np.uint8)
    return np.concatenate([ids for ids, _ in parts]), np.concatenate([codes for _, codes in parts])


def find_duplicates(
    uri: str | os.PathLike[str], ids: Ids, codes: Codes, bits: int, radius: int
) -> list[Candidates]:
    """Groups of two items or more, any two of which differ in at most ``radius`` bits.

    The groups with the smallest largest distance come first, then the smallest groups, then by the
    smallest id.
    """
    unique, number = distinct_codes(codes)
    near = remembered_pairs(uri, unique, bits, radius)
    group, widest = complete_groups(_first_ids(ids, number, len(unique)), near)
    found = _together(ids, group[number], widest)
    return sorted(found, key=lambda one: (one.span, len(one.ids), one.ids[0]))


def _together(ids: Ids, group: Ids, widest: NDArray[np.uint16]) -> list[Candidates]:
    """The ids of each group of at least two; ``widest``: the span of each group."""
    several = np.flatnonzero(np.bincount(group, minlength=len(widest))[group] > 1)
    order = several[np.lexsort((ids[several], group[several]))]
    if not len(order):
        return []
    starts = np.flatnonzero(np.diff(group[order], prepend=-1))
    spans = widest[group[order[starts]]].tolist()
    return list(map(Candidates, np.split(ids[order], starts[1:]), spans))


def find_pairs(
    uri: str | os.PathLike[str], ids: Ids, codes: Codes, bits: int, radius: int
) -> list[Candidates]:
    """Pairs of items that differ in at most ``radius`` bits, and groups of items of equal codes.

    Only the first of several items with equal codes stands for them in the pairs: a thousand equal
    codes would be half a million pairs.
    """
    unique, number = distinct_codes(codes)
    near = remembered_pairs(uri, unique, bits, radius)
    first = _first_ids(ids, number, len(unique))
    equal = _together(ids, number, np.zeros(len(unique), dtype=np.uint16))
    ends = np.sort(np.stack([first[near.left], first[near.right]], axis=1), axis=1)
    return equal + list(map(Candidates, ends, near.distances.tolist()))


def _first_ids(ids: Ids, number: Ids, distinct: int) -> Ids:
    """The smallest id of each distinct code."""
    first = np.full(distinct, np.iinfo(np.int64).max)
    np.minimum.at(first, number, ids)
    return first


def best_first(items: Sequence[Item], folder: str | None) -> list[Item]:
    """The item to keep before all others: the most pixels, then the oldest file, then the id."""

    def worth(item: Item) -> tuple[int, float, int]:
        age = float("inf") if item.mtime_ns is None else item.mtime_ns
        return -pixel_count(image_path(item, folder)), age, item.id

    best = min(items, key=worth)
    return [best, *(item for item in items if item is not best)]


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
