"""What every index promises: exact, deterministic search by Hamming distance.

Answers are ordered by (distance, id). Ids are whole numbers that the index gives at ``add``; they
are never reused, stay with their item when it is updated, and are kept by ``compact`` and by a copy
to another index. A key is the user's own name for an item.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class Matches:
    """The nearest items of each query, ordered by (distance, id).

    Attributes:
        ids: (n_queries, k) ids; k is cut to the number of items that may be found.
        distances: (n_queries, k) Hamming distances.
    """

    ids: NDArray[np.int64]
    distances: NDArray[np.int64]


@dataclass(frozen=True)
class Within:
    """Everything within a radius: a list a query, ordered by (distance, id).

    Attributes:
        offsets: (n_queries + 1,) where each query's list begins and the last one ends.
        ids: ids of all lists, one after the other.
        distances: their Hamming distances.
    """

    offsets: NDArray[np.int64]
    ids: NDArray[np.int64]
    distances: NDArray[np.int64]

    def of(self, query: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Ids and distances of one query."""
        part = slice(self.offsets[query], self.offsets[query + 1])
        return self.ids[part], self.distances[part]


@dataclass(frozen=True)
class Item:
    """What an index knows about one item besides its code.

    Attributes:
        id: given by the index.
        key: the user's name for it, unique in an index; None for codes added in bulk.
        path: the file it was made from.
        size: bytes of that file when it was read.
        mtime_ns: its time of change when it was read.
        labels: names of its classes.
        metadata: anything else the user gave, as JSON.
    """

    id: int
    key: str | None = None
    path: str | None = None
    size: int | None = None
    mtime_ns: int | None = None
    labels: tuple[str, ...] = ()
    metadata: dict[str, Any] = field(default_factory=dict)
