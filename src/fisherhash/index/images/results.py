"""What an index of images returns: the results of a search, the report of a sync."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from fisherhash.errors import counted
from fisherhash.index.base import Codes, Index, Item


class Match(NamedTuple):
    """One item that a query found.

    Attributes:
        item: the item of the index.
        distance: its distance from the query: the bits that differ or, in a search with real-valued
            queries, their weights, where a bit of mean weight counts 1.
        folder: the folder that the index is kept in sync with.
        same_bytes: among duplicates whose files were compared: the number of its set of
            byte-identical files, None for a file that equals no other.
        fine: the distance of its second code, where the search used those.
    """

    item: Item
    distance: float
    folder: str | None
    same_bytes: int | None = None
    fine: int | None = None

    @property
    def name(self) -> str:
        """Its key; an item without a key is named by its id."""
        return self.item.name

    @property
    def path(self) -> str | None:
        """Where its image file is now."""
        return image_path(self.item, self.folder)

    def to_json(self) -> dict[str, Any]:
        """What identifies it, as JSON can hold it."""
        item = self.item
        fine = {} if self.fine is None else {"fine": self.fine}
        place = {"id": item.id, "key": item.key, "path": self.path}
        return {"distance": self.distance, **fine, **place}


@dataclass(frozen=True)
class SearchResult:
    """One query and its matches, nearest first; iterates over the matches.

    Attributes:
        query: the file or the key of the query.
        path: the query's image file.
        code: the query's packed code.
        matches: the items it found.
        error: why its image cannot be read; such a query has no code and no matches.
        by_key: whether the query is an item of the index, which then says where its file is.
        unavailable: items that were left out because they are damaged; None where none may be.
        ranking: by what the matches are ordered: ``hamming`` or ``real``.
        fine: the query's second code, where its hasher makes those.
        ties: how many items of the index are at each distance of a match, if they were counted.
    """

    query: str
    path: str | None
    code: bytes = field(repr=False)
    matches: list[Match]
    error: str | None = None
    by_key: bool = False
    unavailable: int | None = None
    ranking: str = "hamming"
    fine: bytes | None = field(default=None, repr=False)
    ties: dict[float, int] = field(default_factory=dict, repr=False)

    def __len__(self) -> int:
        return len(self.matches)

    def __iter__(self) -> Iterator[Match]:
        return iter(self.matches)

    def __getitem__(self, rank: int) -> Match:
        return self.matches[rank]

    def tied(self) -> list[str]:
        """A sentence for every distance at which there are more items than matches."""
        shown = Counter(match.distance for match in self.matches)
        how = " by the second code" if self.fine is not None else ""
        return [
            f"{count:,} images are at distance {shown_distance(distance)}; "
            f"the first {shown[distance]:,}{how} are shown"
            for distance, count in sorted(self.ties.items())
            if count > shown[distance]
        ]

    def to_json(self) -> dict[str, Any]:
        """The query and its matches as JSON can hold them."""
        rows = [
            {"rank": rank}
            | match.to_json()
            | {"labels": list(match.item.labels), "metadata": match.item.metadata}
            for rank, match in enumerate(self.matches, start=1)
        ]
        found: dict[str, Any] = {"query": self.query, "code": self.code.hex()}
        found |= {"ranking": self.ranking, "results": rows}
        if self.ties:
            found["ties"] = [{"distance": d, "items": n} for d, n in sorted(self.ties.items())]
        return found if self.unavailable is None else found | {"unavailable": self.unavailable}


def shown_distance(distance: float) -> str:
    """A distance as it is printed.

    >>> shown_distance(3), shown_distance(2.256)
    ('3', '2.26')
    """
    return str(distance) if isinstance(distance, int) else f"{distance:.2f}"


def left_out(count: int) -> str:
    """The sentence about items that a search left out because they are damaged.

    >>> left_out(2)
    'Left out because they are damaged: 2 items'
    """
    return f"Left out because they are damaged: {counted(count, 'item')}"


class SkippedFile(NamedTuple):
    """A file that is not in the index, and why."""

    name: str
    reason: str


@dataclass
class SyncReport:
    """What a sync did or, as a dry run, would do.

    Attributes:
        added: keys of images that were new.
        updated: keys of images that had changed.
        removed: keys of images that are gone.
        unchanged: how many were left as they are.
        skipped: files that are not in the index: those named by the caller first, then those found
            by this run, then those that were known before.
        new_skipped: how many of them were found by this run.
        named: how many of them were named by the caller.
        count: items in the index afterwards.
        notes: sentences about what was left out or assumed.
    """

    added: list[str] = field(default_factory=list)
    updated: list[str] = field(default_factory=list)
    removed: list[str] = field(default_factory=list)
    unchanged: int = 0
    skipped: list[SkippedFile] = field(default_factory=list)
    new_skipped: int = 0
    named: int = 0
    count: int = 0
    notes: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        counts = f"{self.changes()}, {self.unchanged:,} unchanged"
        if self.skipped:
            counts += f", {len(self.skipped):,} skipped ({self.new_skipped:,} of them new)"
        return counts

    def changes(self) -> str:
        """The counts of what was changed, in words."""
        return ", ".join(f"{count:,} {done}" for done, count in self._counts().items())

    def _counts(self) -> dict[str, int]:
        return {done: len(getattr(self, done)) for done in ("added", "updated", "removed")}

    def to_json(self) -> dict[str, Any]:
        """Counts, and the skipped files with their reasons."""
        skipped = [skip._asdict() for skip in self.skipped]
        rest = {"unchanged": self.unchanged, "skipped": skipped, "count": self.count}
        return self._counts() | rest


def synced_folder(index: Index) -> str | None:
    """The folder that an index is kept in sync with, or None."""
    note = index.notes("sync").get("folder")
    return None if note is None else note["folder"]


def image_path(item: Item, folder: str | None) -> str | None:
    """Where the image of an item is now, also after its folder was moved."""
    if folder is None or item.key is None or item.size is None or os.path.isabs(item.key):
        return item.path
    return os.path.join(folder, item.key)


def joined_codes(codes: Sequence[bytes]) -> Codes:
    """Codes of items (n, bytes) as one array; at least one."""
    return np.frombuffer(b"".join(codes), np.uint8).reshape(len(codes), -1)
