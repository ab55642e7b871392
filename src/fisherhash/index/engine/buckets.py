"""Search by buckets: codes sorted by parts of their bits, so that a search looks at few of them.

One part (direct addressing) while codes are short, several (multi-index hashing) when they are
longer, because two codes at distance d agree up to d // parts bits in one part. The buckets whose
numbers are near the query's own are looked up, nearest first.
"""

from __future__ import annotations

import itertools
import math

import numpy as np
from numpy.typing import NDArray

from fisherhash.index.engine import kernels
from fisherhash.index.engine.kernels import WORD_GROUP
from fisherhash.index.engine.threads import run, split

Numbers = NDArray[np.int64]

# parts of a code by which buckets are addressed
_MOST_TABLES = 6
_LONGEST_KEY = 24
# log2 of the bucket size at which scanning a bucket is worth the look-up
_FULL_BUCKET = 3
# look-ups per table for which bit patterns are prepared
_MOST_MASKS = 1 << 17
# queries per job
_QUERIES = 1024
# cost of one look-up, in compared codes: from the cache, and from memory
_LOOKUP_NEAR = 100
_LOOKUP_FAR = 300
_NEAR_BYTES = 1 << 24


def bytes_needed(bits: int, count: int) -> int:
    """The memory that buckets of so many codes take."""
    tables, length = tables_and_length(bits, count)
    size = _word(bits).itemsize
    return tables * (count * (size * -(-bits // (8 * size)) + 4) + (4 << length))


def tables_and_length(bits: int, count: int) -> tuple[int, int]:
    """How many tables, and how many bits a bucket number has.

    >>> [tables_and_length(bits, 1_000_000) for bits in (16, 24, 32, 48, 64)]
    [(1, 16), (2, 12), (2, 16), (3, 16), (4, 16)]
    """
    size = max(2.0, math.log2(max(2, count)))
    if bits <= min(_LONGEST_KEY, size + _FULL_BUCKET):
        return 1, bits
    tables = math.ceil(bits / max(4.0, size - _FULL_BUCKET))
    tables = min(max(2, tables), _MOST_TABLES)
    return tables, min(bits // tables, _LONGEST_KEY, int(size) + _FULL_BUCKET)


class Buckets:
    """Codes (n, bytes) in buckets.

    Args:
        codes: they are copied, once per table.
        bits: length of a code.
        threads: the most threads to use, here and in every search.
    """

    def __init__(self, codes: NDArray[np.uint8], bits: int, threads: int) -> None:
        self.bits = bits
        self.threads = threads
        count, self._length = tables_and_length(bits, len(codes))
        words = self._as_words(codes)
        # where each bucket begins, and the codes and their positions in the buckets
        self._directory = np.zeros((count, (1 << self._length) + 1), dtype=np.uint32)
        room = len(codes) + WORD_GROUP
        self._words = np.zeros((count, words.shape[1], room), dtype=words.dtype)
        self._items = np.zeros((count, len(codes)), dtype=np.uint32)

        def fill(table: int) -> None:
            into = (self._directory[table], self._words[table], self._items[table])
            kernels.fill_table(words, table, self._length, *into)

        run(fill, [(table,) for table in range(count)], threads)
        # the bit patterns in which bucket numbers differ, and offsets by their number of bits
        patterns = (math.comb(self._length, ones) for ones in range(self._length + 1))
        totals = itertools.accumulate(patterns, initial=0)
        offsets = [total for total in totals if total <= _MOST_MASKS]
        self._offsets = np.array(offsets, dtype=np.int64)
        self._masks = np.zeros(offsets[-1], dtype=np.uint32)
        kernels.fill_masks(self._length, self._offsets, self._masks)

    def nearest(
        self, queries: NDArray[np.uint8], k: int, budget: int, guess: int | None
    ) -> tuple[Numbers, Numbers, NDArray[np.bool_], int]:
        """The nearest codes of those queries for which the budget is enough.

        Args:
            queries: (n_queries, bytes) codes.
            k: how many; at most the number of codes.
            budget: work per query, in compared codes.
            guess: a distance within which the k nearest are likely to be found.

        Returns:
            Positions and distances (n_queries, k), for which queries they are complete, and a guess
            for the next call.
        """
        found = np.zeros((len(queries), k), dtype=np.int64)
        distances = np.zeros((len(queries), k), dtype=np.int64)
        done, tally = np.zeros(len(queries), dtype=np.bool_), np.zeros(2, dtype=np.int64)
        words = self._as_words(queries)
        guess = self.bits if guess is None else guess

        def job(first: int, last: int) -> int:
            return kernels.probe_nearest(
                *(words, first, last, *self._tables(), self.bits, budget, self._lookup_cost()),
                *(guess, found, distances, done, tally),
            )

        guesses = run(job, self._ranges(len(queries)), self.threads)
        return found, distances, done, max(guesses)

    def within(
        self, queries: NDArray[np.uint8], radius: int, budget: int
    ) -> tuple[NDArray[np.uint64], NDArray[np.bool_]]:
        """Records like those of the scan, and for which queries the budget was enough."""
        done, tally = np.zeros(len(queries), dtype=np.bool_), np.zeros(2, dtype=np.int64)
        words = self._as_words(queries)

        def job(first: int, last: int) -> NDArray[np.uint64]:
            return kernels.probe_within(
                *(words, first, last, *self._tables(), self.bits, radius, budget),
                *(self._lookup_cost(), done, tally),
            )

        parts = run(job, self._ranges(len(queries)), self.threads)
        return np.concatenate([np.zeros(0, dtype=np.uint64), *parts]), done

    def _tables(self) -> tuple:
        """What the kernels look up."""
        words, stride = self._words.reshape(-1), self._words.shape[2]
        tables = (self._directory, words, stride, self._items)
        return (*tables, self._masks, self._offsets, self._length)

    def _as_words(self, codes: NDArray[np.uint8]) -> NDArray[np.unsignedinteger]:
        """Codes (n, words) as numbers, the first bit highest."""
        kind = _word(self.bits)
        missing = -codes.shape[1] % kind.itemsize
        padded = np.pad(codes, ((0, 0), (0, missing))) if missing else codes
        return padded.view(kind.newbyteorder(">")).astype(kind)

    def _ranges(self, queries: int) -> list[tuple[int, int]]:
        return split(queries, max(min(queries, 4 * self.threads), -(-queries // _QUERIES)))

    def _lookup_cost(self) -> int:
        return _LOOKUP_NEAR if self._words.nbytes <= _NEAR_BYTES else _LOOKUP_FAR


def _word(bits: int) -> np.dtype:
    return np.dtype(np.uint32 if bits <= 32 else np.uint64)
