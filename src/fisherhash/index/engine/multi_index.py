"""Search by buckets: look up the buckets whose numbers are near the query's own, nearest first."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from fisherhash.index.engine import kernels
from fisherhash.index.engine.pool import run
from fisherhash.index.engine.tables import Tables, split

# queries per job
_QUERIES = 1024

# cost of one look-up, in compared codes: from the cache, and from memory
_LOOKUP_NEAR = 100
_LOOKUP_FAR = 300
_NEAR_BYTES = 1 << 24


def query_words(tables: Tables, queries: NDArray[np.uint8]) -> NDArray[np.unsignedinteger]:
    """Queries (n, words), the first bit highest, as the buckets hold their codes."""
    size = tables.words.itemsize
    missing = -queries.shape[1] % size
    padded = np.pad(queries, ((0, 0), (0, missing))) if missing else queries
    return padded.view(f">u{size}").astype(tables.words.dtype)


def _ranges(queries: int, threads: int) -> list[tuple[int, int]]:
    return split(queries, max(min(queries, 4 * threads), -(-queries // _QUERIES)))


def lookup_cost(tables: Tables) -> int:
    """Cost of one look-up, in compared codes."""
    return _LOOKUP_NEAR if tables.words.nbytes <= _NEAR_BYTES else _LOOKUP_FAR


def nearest_by_buckets(
    tables: Tables,
    queries: NDArray[np.uint8],
    k: int,
    threads: int,
    budget: int,
    guess: int | None,
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.uint8], int]:
    """Positions and distances (n_queries, k), a flag per query, and a guess for the next call.

    The flag says whether the budget was enough for the query. The guess is a distance within which
    the k nearest are likely to be found.
    """
    found = np.zeros((len(queries), k), dtype=np.int64)
    distances = np.zeros((len(queries), k), dtype=np.int64)
    done = np.zeros(len(queries), dtype=np.uint8)
    tally = np.zeros(2, dtype=np.int64)
    words = query_words(tables, queries)
    offsets, masks = tables.masks

    guess = tables.bits if guess is None else guess

    def job(first: int, last: int) -> int:
        return kernels.probe_nearest(
            *(words, first, last, tables.directory, tables.words.reshape(-1)),
            *(tables.words.shape[2], tables.bucket_items, masks, offsets),
            *(
                tables.starts,
                tables.positions,
                tables.length,
                tables.bits,
                budget,
                lookup_cost(tables),
            ),
            *(guess, found, distances, done, tally),
        )

    guesses = run(job, _ranges(len(queries), threads), threads)
    return found, distances, done, max(guesses)


def within_by_buckets(
    tables: Tables, queries: NDArray[np.uint8], radius: int, threads: int, budget: int
) -> tuple[NDArray[np.uint64], NDArray[np.uint8]]:
    """Sorted records like those of the scan, and for which queries the budget was enough."""
    done = np.zeros(len(queries), dtype=np.uint8)
    tally = np.zeros(2, dtype=np.int64)
    words = query_words(tables, queries)
    offsets, masks = tables.masks

    def job(first: int, last: int) -> NDArray[np.uint64]:
        return kernels.probe_within(
            *(words, first, last, tables.directory, tables.words.reshape(-1)),
            *(tables.words.shape[2], tables.bucket_items, masks, offsets),
            *(tables.starts, tables.length, tables.bits, radius, budget, lookup_cost(tables)),
            *(done, tally),
        )

    parts = run(job, _ranges(len(queries), threads), threads)
    return np.concatenate([np.zeros(0, dtype=np.uint64), *parts]), done
