"""What an index of images returns: the hits of a search, the report of a sync."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Self

import numpy as np

from fisherhash.errors import counted
from fisherhash.index.base import Index
from fisherhash.index.items import Codes, Item


@dataclass(frozen=True)
class Hit:
    """One item of an index as a search, a list or a group of duplicates shows it.

    Attributes:
        id: of the item.
        key: the user's name for it; None for codes that were added in bulk.
        distance: from the query or, in a group of duplicates, from its first item: the bits that
            differ or, in a search with real-valued queries, their weights, where a bit of mean
            weight counts 1. None where nothing was searched for.
        path: where its image file is now, also after its folder was moved; None without a file.
        labels: names of its classes.
        metadata: its other fields.
        size: bytes of its file.
        mtime_ns: when its file was changed.
        code: its packed code.
        same_bytes: among duplicates whose files were compared: the number of its set of
            byte-identical files, None for a file that equals no other.
    """

    id: int
    key: str | None
    distance: float | None = None
    path: str | None = None
    labels: tuple[str, ...] = ()
    metadata: dict[str, Any] = field(default_factory=dict)
    size: int | None = None
    mtime_ns: int | None = None
    code: bytes = field(default=b"", repr=False)
    same_bytes: int | None = None

    @classmethod
    def of(cls, item: Item, distance: float | None = None, *, folder: str | None = None) -> Self:
        """The hit of an item.

        Args:
            item: the item.
            distance: from the query.
            folder: the folder that the index is in sync with, see :func:`synced_folder`.
        """
        return cls(
            id=item.id,
            key=item.key,
            distance=distance,
            path=image_path(item, folder),
            labels=item.labels,
            metadata=item.metadata,
            size=item.size,
            mtime_ns=item.mtime_ns,
            code=item.code,
        )

    @property
    def name(self) -> str:
        """Its key; an item without a key is named by its id."""
        return f"id {self.id}" if self.key is None else self.key

    def to_json(self) -> dict[str, Any]:
        """What identifies it, and what it is about, as JSON can hold it."""
        facts = {"distance": self.distance, "id": self.id, "key": self.key, "path": self.path}
        return facts | {"labels": list(self.labels), "metadata": self.metadata}


@dataclass(frozen=True)
class SearchResult:
    """One query and its hits, the nearest first; iterates over the hits.

    Attributes:
        query: the file or the key of the query.
        path: the query's image file.
        code: the query's packed code.
        hits: the items it found.
        error: why its image cannot be read; such a query has no code and no hits.
        by_key: whether the query is an item of the index, which then says where its file is.
        unavailable: items that were left out because they are damaged; None where none may be.
        ranking: how bits that differ count: ``hamming`` or ``real``.
        ties: how many items of the index are at each distance of a hit, if they were counted.
    """

    query: str
    path: str | None = None
    code: bytes = field(default=b"", repr=False)
    hits: list[Hit] = field(default_factory=list)
    error: str | None = None
    by_key: bool = False
    unavailable: int | None = None
    ranking: str = "hamming"
    ties: dict[float, int] = field(default_factory=dict, repr=False)

    def __len__(self) -> int:
        return len(self.hits)

    def __iter__(self) -> Iterator[Hit]:
        return iter(self.hits)

    def __getitem__(self, rank: int) -> Hit:
        return self.hits[rank]

    def tied(self) -> list[str]:
        """One sentence per distance at which there are more items than hits."""
        shown = Counter(hit.distance for hit in self.hits)
        return [
            f"{count:,} images are at distance {shown_distance(distance)}; "
            + (
                f"the first {shown[distance]:,} are shown"
                if shown[distance] > 1
                else "the first is shown"
            )
            for distance, count in sorted(self.ties.items())
            if count > shown[distance]
        ]

    def to_json(self) -> dict[str, Any]:
        """The query and its hits as JSON can hold them."""
        rows = [{"rank": rank} | hit.to_json() for rank, hit in enumerate(self.hits, start=1)]
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
