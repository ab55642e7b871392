"""Ascending ids as runs: pairs of (ids left out, ids that follow each other), as varints.

A varint stores seven bits in a byte, the lowest first; the highest bit says that more bytes follow.
A million ids of which one was removed take seven bytes this way.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from fisherhash.index.items import Ids

_WIDEST = 9
"""Bytes of the longest varint: 63 bits."""

Numbers = NDArray[np.int64]


class Runs(NamedTuple):
    """Ids in ascending order.

    Attributes:
        ids: the first id of each run.
        places: the position of each run's first id, and at the end the number of ids.
    """

    ids: Numbers
    places: Numbers

    def __len__(self) -> int:
        return int(self.places[-1])

    def at(self, positions: Numbers) -> Ids:
        """Ids of positions."""
        runs = np.searchsorted(self.places[1:], positions, side="right")
        return self.ids[runs] + (positions - self.places[runs])

    def locate(self, ids: Ids) -> tuple[Numbers, NDArray[np.bool_]]:
        """Positions of ids, and whether each is there."""
        runs = np.maximum(np.searchsorted(self.ids, ids, side="right") - 1, 0)
        inside = ids - self.ids[runs]
        there = (inside >= 0) & (inside < np.diff(self.places)[runs])
        return np.where(there, self.places[runs] + inside, 0), there


def id_runs(ids: Ids) -> tuple[Numbers, Numbers]:
    """The first id and the length of each run in ascending ids.

    >>> [part.tolist() for part in id_runs(np.array([3, 4, 9]))]
    [[3, 9], [2, 1]]
    """
    if not len(ids):
        return np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64)
    cuts = np.concatenate([[0], np.flatnonzero(np.diff(ids) != 1) + 1, [len(ids)]])
    return ids[cuts[:-1]], np.diff(cuts)


class RunsWriter:
    """Collects ascending ids that come in blocks.

    Attributes:
        count: how many there are.
    """

    def __init__(self) -> None:
        self.count = 0
        self._starts: list[Numbers] = []
        self._lengths: list[Numbers] = []

    def add(self, ids: Ids) -> None:
        """Add ids that are larger than all before."""
        if not len(ids):
            return
        self.count += len(ids)
        starts, lengths = id_runs(ids)
        if self._starts and self._starts[-1][-1] + self._lengths[-1][-1] == starts[0]:
            self._lengths[-1][-1] += lengths[0]
            starts, lengths = starts[1:], lengths[1:]
        if len(starts):
            self._starts.append(starts.astype(np.int64))
            self._lengths.append(lengths.astype(np.int64))

    @property
    def first_id(self) -> int:
        """The smallest id."""
        return int(self._starts[0][0]) if self._starts else 0

    def has_gaps(self) -> bool:
        """Whether the ids are not all those between the smallest and the largest."""
        return sum(map(len, self._starts)) > 1

    def encode(self) -> bytes:
        """All runs as bytes."""
        if not self._starts:
            return b""
        starts, lengths = np.concatenate(self._starts), np.concatenate(self._lengths)
        ends = np.concatenate([[self.first_id], (starts + lengths)[:-1]])
        return encode_varints(np.stack([starts - ends, lengths], axis=1).reshape(-1))


def decode_runs(data: NDArray[np.uint8], first_id: int, count: int) -> Runs:
    """The runs of a file.

    Raises:
        ValueError: they are not ``count`` ascending ids from ``first_id`` on.
    """
    numbers = decode_varints(data)
    if len(numbers) % 2:
        raise ValueError("half a run at the end")
    gaps, lengths = numbers[::2], numbers[1::2]
    if len(numbers) and (lengths.min() < 1 or gaps.min() < 0 or (gaps[1:] < 1).any()):
        raise ValueError("an empty run")
    # As floats first: sums of whole numbers could wrap around.
    if float(first_id) + float(numbers.sum(dtype=np.float64)) > 2.0**62:
        raise ValueError("ids that are too large")
    places = np.concatenate([[0], np.cumsum(lengths)])
    if places[-1] != count:
        raise ValueError(f"{places[-1]} ids instead of {count}")
    return Runs(first_id + np.cumsum(gaps) + places[:-1], places)


def encode_varints(numbers: Numbers) -> bytes:
    """Whole numbers from 0 on as varints.

    >>> encode_varints(np.array([1, 300]))
    b'\\x01\\xac\\x02'
    """
    shifts = 7 * np.arange(_WIDEST)
    parts = numbers[:, None] >> shifts
    follows = (parts >> 7) > 0
    used = np.concatenate([np.ones((len(numbers), 1), dtype=bool), follows[:, :-1]], axis=1)
    return ((parts & 127) | (follows << 7)).astype(np.uint8)[used].tobytes()


def decode_varints(data: NDArray[np.uint8]) -> Numbers:
    """The inverse of :func:`encode_varints`.

    >>> decode_varints(np.frombuffer(b"\\x01\\xac\\x02", np.uint8)).tolist()
    [1, 300]
    """
    if not len(data):
        return np.zeros(0, dtype=np.int64)
    last = data < 128
    if not last[-1]:
        raise ValueError("half a number at the end")
    starts = np.concatenate([[0], np.flatnonzero(last)[:-1] + 1])
    lengths = np.diff(np.append(starts, len(data)))
    if lengths.max() > _WIDEST:
        raise ValueError("a number that is too large")
    shifts = 7 * (np.arange(len(data)) - np.repeat(starts, lengths))
    return np.add.reduceat((data & 127).astype(np.int64) << shifts, starts)
