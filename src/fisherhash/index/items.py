"""The values that go into an index and come out of it."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, overload

import numpy as np
from numpy.typing import ArrayLike, NDArray

Codes = NDArray[np.uint8]
Ids = NDArray[np.int64]


@dataclass(frozen=True)
class Entry:
    """One item as a caller hands it to an index.

    What is None is empty for a new item and stays as it is for one that is updated.

    Attributes:
        key: the user's name for it, unique within an index.
        code: (bytes,) its packed code, as bytes or an array.
        path: the file it was made from.
        size: size of that file in bytes when it was read.
        mtime_ns: its modification time when it was read.
        labels: names of its classes; a single text is one label.
        metadata: any other fields, as a mapping that JSON can hold.
    """

    key: str
    code: bytes | ArrayLike | None = None
    path: str | os.PathLike[str] | None = None
    size: int | None = None
    mtime_ns: int | None = None
    labels: str | Sequence[str] | None = None
    metadata: Mapping[str, Any] | None = None


@dataclass(frozen=True)
class Item:
    """One item as an index returns it; an index may return the same object again.

    Attributes:
        id: assigned by the index.
        code: its packed code.
        key: the user's name for it; None for codes that were added in bulk.
        path: the file it was made from.
        size: size of that file in bytes when it was read.
        mtime_ns: its modification time when it was read.
        labels: names of its classes.
        metadata: any other fields.
    """

    id: int
    code: bytes = field(repr=False)
    key: str | None = None
    path: str | None = None
    size: int | None = None
    mtime_ns: int | None = None
    labels: tuple[str, ...] = ()
    metadata: dict[str, Any] = field(default_factory=dict)

    def entry(self) -> Entry:
        """The item as it is added to another index; it must have a key."""
        rest = (self.path, self.size, self.mtime_ns, self.labels, self.metadata)
        return Entry(self.key or "", self.code, *rest)

    @property
    def name(self) -> str:
        """Its key; an item without a key is named by its id."""
        return f"id {self.id}" if self.key is None else self.key


class FileState(NamedTuple):
    """What an index knows about an item's file, enough to tell whether the file changed."""

    size: int | None
    mtime_ns: int | None
    id: int


class Match(NamedTuple):
    """One result of a query: the item's id and its distance, as in :class:`Matches`."""

    id: int
    distance: float


class _Results(Sequence[list[Match]]):
    """Results per query: ``len``, indexing and iteration go over the queries."""

    def _row(self, query: int) -> tuple[Ids, NDArray[Any]]:
        raise NotImplementedError

    @overload
    def __getitem__(self, query: int) -> list[Match]: ...
    @overload
    def __getitem__(self, query: slice) -> list[list[Match]]: ...
    def __getitem__(self, query: int | slice) -> list[Match] | list[list[Match]]:
        if isinstance(query, slice):
            return [self[number] for number in range(*query.indices(len(self)))]
        ids, distances = self._row(range(len(self))[query])
        return list(map(Match, ids.tolist(), distances.tolist()))

    def __iter__(self) -> Iterator[list[Match]]:
        return map(self.__getitem__, range(len(self)))

    def to_list(self) -> list[list[tuple[int, float]]]:
        """(id, distance) of every result, one list per query, as plain numbers."""
        return [[(hit.id, hit.distance) for hit in hits] for hits in self]


@dataclass(frozen=True, eq=False)
class Matches(_Results):
    """The nearest items of each query, by (distance, id).

    Attributes:
        ids: (n_queries, k) ids; k is reduced to the number of items that can be found.
        distances: (n_queries, k) Hamming distances; real numbers where the queries had logits: a
            differing bit then counts by its weight, and one of mean weight counts 1.

    >>> matches = Matches(np.array([[4, 2]]), np.array([[0, 3]]))
    >>> len(matches), matches[0], matches.to_list()
    (1, [Match(id=4, distance=0), Match(id=2, distance=3)], [[(4, 0), (2, 3)]])
    """

    ids: Ids
    distances: NDArray[Any]

    def __len__(self) -> int:
        return len(self.ids)

    def _row(self, query: int) -> tuple[Ids, NDArray[Any]]:
        return self.ids[query], self.distances[query]


@dataclass(frozen=True, eq=False)
class Within(_Results):
    """Every item within a radius of each query, ordered by (distance, id).

    Attributes:
        offsets: (n_queries + 1,) where each query's results begin, and where the last ones end.
        ids: ids of all results, query after query.
        distances: their Hamming distances.
    """

    offsets: NDArray[np.int64]
    ids: Ids
    distances: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def _row(self, query: int) -> tuple[Ids, NDArray[Any]]:
        part = slice(self.offsets[query], self.offsets[query + 1])
        return self.ids[part], self.distances[part]


def matches_of(rows: Sequence[Sequence[tuple[int, int]]]) -> Matches:
    """Matches from (id, distance) of each query, by (distance, id).

    >>> matches_of([[(4, 0), (2, 3)]]).to_list()
    [[(4, 0), (2, 3)]]
    """
    found = min(map(len, rows), default=0)
    pairs = np.array([row[:found] for row in rows], dtype=np.int64).reshape(len(rows), found, 2)
    return Matches(pairs[:, :, 0].copy(), pairs[:, :, 1].copy())


@dataclass(frozen=True)
class Problem:
    """Something in an index that is not what was written.

    Attributes:
        file: the file or the part of the index.
        what: what is wrong with it.
        todo: what to do about it.
    """

    file: str
    what: str
    todo: str

    def __str__(self) -> str:
        return f"{self.file} {self.what}; {self.todo}"
