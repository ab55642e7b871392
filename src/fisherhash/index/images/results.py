"""What a search returns: queries with the items they found, and where their images are."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from fisherhash.index.base import Index, Item


@dataclass(frozen=True)
class Match:
    """One item that a query found.

    Attributes:
        item: the item of the index.
        distance: its Hamming distance from the query.
        path: where its image file is now.
        same_bytes: among duplicates whose files were compared: the number of its set of
            byte-identical files, None for a file that equals no other.
    """

    item: Item
    distance: int
    path: str | None
    same_bytes: int | None = None

    @property
    def name(self) -> str:
        """Its key; an item without a key is named by its id."""
        return self.item.name


@dataclass(frozen=True)
class SearchResult:
    """One query and its matches, ordered by (distance, id); iterates over the matches.

    Attributes:
        query: the file or the key of the query.
        path: the query's image file.
        code: the query's packed code.
        matches: the items it found.
        error: why its image cannot be read; such a query has no code and no matches.
    """

    query: str
    path: str | None
    code: bytes = field(repr=False)
    matches: list[Match]
    error: str | None = None

    def __len__(self) -> int:
        return len(self.matches)

    def __iter__(self) -> Iterator[Match]:
        return iter(self.matches)

    def __getitem__(self, rank: int) -> Match:
        return self.matches[rank]

    def to_json(self) -> dict[str, Any]:
        """The query and its matches as JSON can hold them."""
        rows = [
            {
                "rank": rank,
                "distance": match.distance,
                "id": match.item.id,
                "key": match.item.key,
                "path": match.path,
                "labels": list(match.item.labels),
                "metadata": match.item.metadata,
            }
            for rank, match in enumerate(self.matches, start=1)
        ]
        return {"query": self.query, "code": self.code.hex(), "results": rows}


def synced_folder(index: Index) -> str | None:
    """The folder that an index is kept in sync with, or None."""
    note = index.notes("sync").get("folder")
    return None if note is None else note["folder"]


def image_path(item: Item, folder: str | None) -> str | None:
    """Where the image of an item is now, also after its folder was moved."""
    if folder is None or item.key is None or item.size is None or os.path.isabs(item.key):
        return item.path
    return os.path.join(folder, item.key)
