"""Groups of items whose codes are equal or nearly so: candidates for duplicates, not a proof."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fisherhash.errors import UsageError, printable
from fisherhash.index.engine import Engine
from fisherhash.index.images.asking import Answer, answers_of
from fisherhash.index.images.folders import mirrored_folder
from fisherhash.index.local.index import LocalIndex

BLOCK = 1024
SCAN = 1 << 18
"""Codes read from the index at a time."""


@dataclass(frozen=True)
class Group:
    """Items that belong together, ordered by id.

    Attributes:
        ids: (n,) the items.
        distances: (n,) Hamming distance of each from the first.
    """

    ids: NDArray[np.int64]
    distances: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.ids)


def find_duplicates(index: LocalIndex, radius: int = 0) -> list[Group]:
    """Groups of two items or more, the largest first, then by the smallest id.

    Two items are in one group if a chain of items leads from one to the other in which neighbours
    differ in at most ``radius`` bits. Equal codes are put together first, so that thousands of
    copies of a picture cost no more than one.
    """
    if isinstance(radius, bool) or not 0 <= radius <= index.bits:
        raise UsageError(f"radius must be between 0 and {index.bits} bits, got {radius}")
    parts = list(index.scan(SCAN))
    if not parts:
        return []
    ids = np.concatenate([np.asarray(part, dtype=np.int64) for part, _ in parts])
    codes = np.concatenate([part for _, part in parts])
    order = np.argsort(ids, kind="stable")
    ids, codes = ids[order], codes[order]
    unique, number = _unique(codes)
    component = np.arange(len(unique))
    if radius:
        _connect(component, unique, index.bits, radius)
    belongs = component[number]
    # Stable: inside a group the ids stay in their order.
    order = np.argsort(belongs, kind="stable")
    starts = np.flatnonzero(np.r_[True, np.diff(belongs[order]) != 0])
    ends = np.r_[starts[1:], len(order)]
    groups = []
    for start, end in zip(starts.tolist(), ends.tolist(), strict=True):
        if end - start > 1:
            rows = order[start:end]
            apart = np.bitwise_count(codes[rows] ^ codes[rows[0]]).sum(axis=1, dtype=np.int64)
            groups.append(Group(ids[rows], apart))
    groups.sort(key=lambda group: (-len(group), int(group.ids[0])))
    return groups


def _unique(codes: NDArray[np.uint8]) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """The different codes, and for each row the number of its code."""
    width = codes.shape[1]
    if width <= 8:
        # As one number: numpy sorts numbers much faster than strings of bytes.
        rows = np.pad(codes, ((0, 0), (0, 8 - width))).view(np.uint64).ravel()
    else:
        rows = np.ascontiguousarray(codes).view(f"V{width}").ravel()
    _, first, number = np.unique(rows, return_index=True, return_inverse=True)
    return np.ascontiguousarray(codes[first]), number.ravel().astype(np.int64)


def _connect(
    component: NDArray[np.int64], codes: NDArray[np.uint8], bits: int, radius: int
) -> None:
    """Give all codes that a chain of near neighbours connects the smallest of their numbers."""
    engine = Engine(codes, bits)
    for start in range(0, len(codes), BLOCK):
        block = codes[start : start + BLOCK]
        offsets, near, _ = engine.within(block, radius)
        own = np.repeat(np.arange(start, start + len(block)), np.diff(offsets))
        _join(component, own, np.asarray(near))
    _settle(component)


def _join(parent: NDArray[np.int64], left: NDArray[np.int64], right: NDArray[np.int64]) -> None:
    """Put the two ends of every edge under one root; the root is the smaller number."""
    while len(left):
        left, right = _roots(parent, left), _roots(parent, right)
        apart = left != right
        left, right = left[apart], right[apart]
        np.minimum.at(parent, np.maximum(left, right), np.minimum(left, right))


def _roots(parent: NDArray[np.int64], items: NDArray[np.int64]) -> NDArray[np.int64]:
    above = parent[items]
    while True:
        higher = parent[above]
        if np.array_equal(higher, above):
            return above
        above = higher


def _settle(parent: NDArray[np.int64]) -> None:
    parent[:] = _roots(parent, np.arange(len(parent)))


@dataclass(frozen=True)
class Duplicates:
    """Groups of likely duplicates with their names and files.

    Attributes:
        index: the name of the index.
        bits: length of its codes.
        count: items in it.
        radius: bits in which neighbours in a group may differ.
        groups: the items of each group, with their distance from the first one.
        same: for each item of each group the number of its set of byte-identical files, None for a
            file that is like no other; empty where files were not compared.
    """

    index: str
    bits: int
    count: int
    radius: int
    groups: list[list[Answer]]
    same: list[list[int | None]]

    def __str__(self) -> str:
        lines = []
        for number, group in enumerate(self.groups):
            lines.append(f"{len(group)} items")
            marks = self.same[number] if self.same else [None] * len(group)
            for answer, mark in zip(group, marks, strict=True):
                same = "" if mark is None else f"  same bytes ({mark + 1})"
                lines.append(f"{answer.distance:>6}  {printable(answer.name)}{same}")
            lines.append("")
        return "\n".join(lines)

    def summary(self) -> str:
        """The counts in one sentence."""
        items = sum(map(len, self.groups))
        bits = f"{self.radius} bit{'s' * (self.radius != 1)}"
        codes = "equal codes" if self.radius == 0 else f"codes within {bits}"
        groups = f"{len(self.groups):,} group{'s' * (len(self.groups) != 1)}"
        sentence = f"{groups} of {codes}, {items:,} of {self.count:,} items"
        if self.same:
            copies = sum(
                len(marks) - len({m for m in marks if m is not None}) - marks.count(None)
                for marks in self.same
            )
            sentence += f"; byte for byte copies of another file: {copies:,}"
        if self.groups:
            alike = "Equal or near" if self.radius else "Equal"
            sentence += f". {alike} codes are candidates, not a proof: look before you delete"
        return sentence

    def to_json(self) -> dict[str, Any]:
        """For programs."""
        groups = []
        for number, group in enumerate(self.groups):
            rows: list[dict[str, Any]] = [
                {"id": a.item.id, "key": a.item.key, "path": a.path, "distance": a.distance}
                for a in group
            ]
            for row, mark in zip(rows, self.same[number] if self.same else (), strict=False):
                row["same_bytes"] = mark
            groups.append({"size": len(group), "items": rows})
        return {"bits": self.bits, "radius": self.radius, "count": self.count, "groups": groups}


def duplicates(
    path: str | os.PathLike[str], *, radius: int = 0, compare_files: bool = False
) -> Duplicates:
    """The likely duplicates of an index.

    Args:
        path: the index.
        radius: bits in which neighbours in a group may differ.
        compare_files: read the files of a group, and say which are the same byte for byte.
    """
    root = mirrored_folder(path)
    with LocalIndex.open(path) as index:
        found = find_duplicates(index, radius)
        # All at once: one question to the catalogue a group would be slow for many groups.
        ids = np.concatenate([np.empty(0, np.int64), *(group.ids for group in found)])
        distances = np.concatenate([ids[:0], *(group.distances for group in found)])
        answers = iter(answers_of(index, ids, distances, root))
        groups = [_left(itertools.islice(answers, len(group))) for group in found]
        groups = [group for group in groups if len(group) > 1]
        same = [same_bytes([a.path for a in group]) for group in groups] if compare_files else []
        name = os.path.basename(os.path.abspath(path))
        return Duplicates(name, index.bits, len(index), radius, groups, same)


def _left(answers: Iterable[Answer | None]) -> list[Answer]:
    """What a writer has not removed meanwhile, with distances from the first that is left."""
    group = [answer for answer in answers if answer is not None]
    if group and group[0].distance:
        first = group[0].code
        apart = [int(np.bitwise_count(answer.code ^ first).sum()) for answer in group]
        group = [replace(one, distance=away) for one, away in zip(group, apart, strict=True)]
    return group


def same_bytes(paths: Sequence[str | None]) -> list[int | None]:
    """For each file the number of its set of byte-identical files; None for one of its own.

    Only files that share their size are read.
    """
    by_size: dict[int, list[int]] = {}
    for number, path in enumerate(paths):
        with contextlib.suppress(OSError):
            if path is not None:
                by_size.setdefault(os.stat(path).st_size, []).append(number)
    by_content: dict[str, list[int]] = {}
    for numbers in by_size.values():
        for number in numbers if len(numbers) > 1 else ():
            with contextlib.suppress(OSError), open(os.fspath(paths[number] or ""), "rb") as file:
                digest = hashlib.file_digest(file, "sha256").hexdigest()
                by_content.setdefault(digest, []).append(number)
    found: list[int | None] = [None] * len(paths)
    for mark, numbers in enumerate(sorted(n for n in by_content.values() if len(n) > 1)):
        for number in numbers:
            found[number] = mark
    return found
