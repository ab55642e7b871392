"""What an index of images returns: the results of a search, the report of a sync."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
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
        combined: the distance plus the weighted fine distance, where this sum orders the matches.
    """

    item: Item
    distance: float
    folder: str | None
    same_bytes: int | None = None
    fine: int | None = None
    combined: float | None = None

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
        fine: dict[str, Any] = {} if self.fine is None else {"fine": self.fine}
        if self.combined is not None:
            fine["combined"] = round(self.combined, 6)
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
        ranking: how bits that differ count: ``hamming`` or ``real``.
        fine_weight: the weight of the second code in the order of the matches; None where it orders
            inside ties only, or where there is none.
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
    fine_weight: float | None = None
    fine: bytes | None = field(default=None, repr=False)
    ties: dict[float, int] = field(default_factory=dict, repr=False)

    def __len__(self) -> int:
        return len(self.matches)

    def __iter__(self) -> Iterator[Match]:
        return iter(self.matches)

    def __getitem__(self, rank: int) -> Match:
        return self.matches[rank]

    def tied(self) -> list[str]:
        """Sentences about the distances at which there are more items than matches.

        One per distance or, where both codes order the matches, one about all of them.
        """
        shown = Counter(match.distance for match in self.matches)
        if self.fine_weight:
            total = sum(self.ties.values())
            if total <= len(self):
                return []
            return [
                f"{total:,} images are at {_listed_distances(sorted(self.ties))}; "
                f"both codes decide which {len(self):,} of them are shown"
            ]
        ordered = self.fine is not None and self.fine_weight is None
        how = " by the second code" if ordered else ""
        return [
            f"{count:,} images are at distance {shown_distance(distance)}; "
            + (
                f"the first {shown[distance]:,}{how} are shown"
                if shown[distance] > 1
                else f"the first{how} is shown"
            )
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
        if self.fine_weight is not None:
            found["fine_weight"] = self.fine_weight
        if self.ties:
            found["ties"] = [{"distance": d, "items": n} for d, n in sorted(self.ties.items())]
        return found if self.unavailable is None else found | {"unavailable": self.unavailable}


def _listed_distances(distances: list[float]) -> str:
    """Distances in words; of many only the ends.

    >>> _listed_distances([0]), _listed_distances([0, 2, 3])
    ('distance 0', 'distance 0, 2 or 3')
    >>> _listed_distances([0, 1, 2, 3, 5])
    'one of 5 distances from 0 to 5'
    """
    texts = list(map(shown_distance, distances))
    if len(texts) > 4:
        return f"one of {len(texts)} distances from {texts[0]} to {texts[-1]}"
    *others, last = texts
    return f"distance {', '.join(others)} or {last}" if others else f"distance {last}"


def shown_distance(distance: float) -> str:
    """A distance as it is printed.

    >>> shown_distance(3), shown_distance(2.256)
    ('3', '2.26')
    """
    return str(distance) if isinstance(distance, int) else f"{distance:.2f}"


def shown_weight(fine_weight: float) -> str:
    """A weight of the second code as it is printed.

    >>> shown_weight(1 / 3), shown_weight(0.37)
    ('1/3', '0.37')
    """
    part = Fraction(fine_weight).limit_denominator(12)
    return str(part) if abs(float(part) - fine_weight) < 1e-9 else f"{fine_weight:g}"


def both_codes(fine_weight: float) -> str:
    """The sentence about an order by both codes.

    >>> both_codes(1 / 6)
    'Ordered by both codes: the distance of the first plus 1/6 of that of the second'
    """
    return (
        "Ordered by both codes: the distance of the first plus "
        f"{shown_weight(fine_weight)} of that of the second"
    )


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
