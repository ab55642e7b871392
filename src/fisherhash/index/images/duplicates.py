"""Groups of items whose codes are equal or nearly so: candidates for duplicates, not a proof."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import os
import stat
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fisherhash.codes import hamming
from fisherhash.errors import UsageError, counted, printable
from fisherhash.index.base import Codes, Ids, Index
from fisherhash.index.engine import Engine
from fisherhash.index.images.results import Match, image_path, joined_codes, synced_folder
from fisherhash.system.files import open_regular

QUERIES_AT_ONCE = 1024
CODES_AT_ONCE = 1 << 18
_READ_AT_ONCE = 1 << 20


@dataclass(frozen=True)
class Duplicates:
    """Groups of likely duplicates.

    Attributes:
        index: the name of the index.
        bits: length of its codes.
        count: items in it.
        radius: bits in which neighbours in a group may differ.
        groups: the items of each group, with their distances from the first one.
        compared: whether files were compared, see :attr:`Match.same_bytes`.
    """

    index: str
    bits: int
    count: int
    radius: int
    groups: list[list[Match]]
    compared: bool = False

    def __str__(self) -> str:
        lines = []
        for group in self.groups:
            lines.append(f"{len(group)} items")
            for match in group:
                mark = match.same_bytes
                same = "" if mark is None else f"  same bytes ({mark + 1})"
                lines.append(f"{match.distance:>6}  {printable(match.name)}{same}")
            lines.append("")
        return "\n".join(lines)

    def summary(self) -> str:
        """The counts in one sentence."""
        items = sum(map(len, self.groups))
        codes = f"codes within {counted(self.radius, 'bit')}" if self.radius else "equal codes"
        groups = counted(len(self.groups), "group")
        sentence = f"{groups} of {codes}, {items:,} of {self.count:,} items"
        if self.compared:
            copies = 0
            for group in self.groups:
                marks = [match.same_bytes for match in group if match.same_bytes is not None]
                copies += len(marks) - len(set(marks))
            sentence += f"; byte for byte copies of another file: {copies:,}"
        if self.groups:
            alike = "Equal or near" if self.radius else "Equal"
            sentence += f". {alike} codes are candidates, not a proof: look before you delete"
        return sentence

    def to_json(self) -> dict[str, Any]:
        """The groups as JSON can hold them."""
        groups = []
        for group in self.groups:
            rows = [match.to_json() for match in group]
            if self.compared:
                rows = [match.to_json() | {"same_bytes": match.same_bytes} for match in group]
            groups.append({"size": len(group), "items": rows})
        return {"bits": self.bits, "radius": self.radius, "count": self.count, "groups": groups}


def duplicates_of(index: Index, radius: int = 0, *, compare_files: bool = False) -> Duplicates:
    """The likely duplicates of an index, see :meth:`ImageIndex.duplicates`."""
    folder, found = synced_folder(index), find_duplicates(index, radius)
    # All at once: one query to the index per group would be slow for many groups.
    items = iter(index.get_items(np.concatenate([np.empty(0, dtype=np.int64), *found])))
    groups = []
    for ids in found:
        # None: another writer removed the item meanwhile.
        left = [item for item in itertools.islice(items, len(ids)) if item is not None]
        if len(left) < 2:
            continue
        codes = joined_codes([item.code for item in left])
        distances = hamming(codes[:1], codes)[0].tolist()
        marks: list[int | None] = [None] * len(left)
        if compare_files:
            marks = same_bytes([image_path(item, folder) for item in left])
        folders = [folder] * len(left)
        groups.append(list(map(Match, left, distances, folders, marks)))
    name = os.path.basename(os.path.abspath(index.uri))
    return Duplicates(name, index.bits, len(index), radius, groups, compare_files)


def find_duplicates(index: Index, radius: int = 0) -> list[Ids]:
    """Ids of groups of two items or more, the largest group first, then by the smallest id.

    Two items are in one group if a chain of items connects them in which neighbours differ in at
    most ``radius`` bits. Equal codes are put together first, so that thousands of copies of an
    image cost no more than one.
    """
    if isinstance(radius, bool) or not 0 <= radius <= index.bits:
        raise UsageError(f"radius must be between 0 and {index.bits} bits, got {radius}")
    parts = list(index.scan(CODES_AT_ONCE))
    if not parts:
        return []
    ids = np.concatenate([part for part, _ in parts])
    unique, number = _unique(np.concatenate([part for _, part in parts]))
    component = np.arange(len(unique))
    if radius:
        _connect(component, unique, index.bits, radius)
    belongs = component[number]
    order = np.lexsort((ids, belongs))
    ends = np.flatnonzero(np.diff(belongs[order])) + 1
    groups = [group for group in np.split(ids[order], ends) if len(group) > 1]
    return sorted(groups, key=lambda group: (-len(group), group[0]))


def _unique(codes: Codes) -> tuple[Codes, NDArray[np.int64]]:
    """The distinct codes, and for each row the number of its code."""
    width = codes.shape[1]
    if width <= 8:
        # As one number: numpy sorts numbers much faster than strings of bytes.
        rows = np.pad(codes, ((0, 0), (0, 8 - width))).view(np.uint64).ravel()
    else:
        rows = np.ascontiguousarray(codes).view(f"V{width}").ravel()
    _, first, number = np.unique(rows, return_index=True, return_inverse=True)
    return np.ascontiguousarray(codes[first]), number.ravel().astype(np.int64)


def _connect(component: Ids, codes: Codes, bits: int, radius: int) -> None:
    """Number all codes that a chain of near neighbours connects by the smallest of them."""
    engine = Engine(codes, bits)
    for start in range(0, len(codes), QUERIES_AT_ONCE):
        block = codes[start : start + QUERIES_AT_ONCE]
        offsets, near, _ = engine.within(block, radius)
        own = np.repeat(np.arange(start, start + len(block)), np.diff(offsets))
        _join(component, own, np.asarray(near))
    component[:] = _roots(component, np.arange(len(component)))


def _join(parent: Ids, left: Ids, right: Ids) -> None:
    """Put the two ends of every edge under one root; the root is the smaller number."""
    while len(left):
        left, right = _roots(parent, left), _roots(parent, right)
        apart = left != right
        left, right = left[apart], right[apart]
        np.minimum.at(parent, np.maximum(left, right), np.minimum(left, right))


def _roots(parent: Ids, items: Ids) -> Ids:
    above = parent[items]
    while True:
        higher = parent[above]
        if np.array_equal(higher, above):
            return above
        above = higher


def same_bytes(paths: Sequence[str | None]) -> list[int | None]:
    """For each file the number of its set of byte-identical files; None for one that is unique.

    Only files of equal size are read; a pipe or a device is never opened.
    """
    by_size: dict[int, list[int]] = {}
    for number, path in enumerate(paths):
        with contextlib.suppress(OSError, ValueError):
            if path is not None and stat.S_ISREG((state := os.stat(path)).st_mode):
                by_size.setdefault(state.st_size, []).append(number)
    by_content: dict[str, list[int]] = {}
    for size, numbers in by_size.items():
        for number in numbers if len(numbers) > 1 else ():
            with contextlib.suppress(OSError, ValueError):
                by_content.setdefault(_digest(paths[number] or "", size), []).append(number)
    found: list[int | None] = [None] * len(paths)
    for mark, numbers in enumerate(sorted(n for n in by_content.values() if len(n) > 1)):
        for number in numbers:
            found[number] = mark
    return found


def _digest(path: str, size: int) -> str:
    """A checksum of the first ``size`` bytes of a file: some that grow are endless."""
    digest = hashlib.sha256(f"{size}\n".encode())
    with open_regular(path) as file:
        while size > 0 and (block := file.read(min(size, _READ_AT_ONCE))):
            digest.update(block)
            size -= len(block)
    return digest.hexdigest()
