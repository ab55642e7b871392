"""Ranked searches by the engine's kernels: a scan, and look-ups in buckets.

See :mod:`fisherhash.index.ranking` for what a ranking is.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from fisherhash.index.engine.pool import run
from fisherhash.index.engine.tables import Tables, split
from fisherhash.index.ranking import Bytes, Numbers, Ranked, WeightedQueries, empty_ranked

# steps in which the costs found so far are counted, see kernels._take
_LEVELS = 2048
# bucket numbers that are looked up in one table before the search scans instead
MOST_LOOKUPS = 1 << 16
# queries per job of the scan, and the most entries of its scratch memory
_QUERIES = 64
_ENTRIES = 1 << 24


def fine_words(codes: Bytes) -> NDArray[np.uint64]:
    """Second codes (n, words) as the kernels compare them."""
    missing = -codes.shape[1] % 8
    padded = np.pad(codes, ((0, 0), (0, missing))) if missing else np.ascontiguousarray(codes)
    return padded.view(np.uint64)


def query_arrays(
    queries: WeightedQueries, bits: int
) -> tuple[Bytes, Numbers, NDArray[np.uint64], Numbers]:
    """Codes, weights (n, bits), second codes and their weights, as the kernels take them."""
    codes, weights, fine, extra = queries
    if weights is None:
        weights = np.ones((len(codes), bits), dtype=np.int64)
    elif weights.shape[1] < bits:
        weights = np.repeat(weights, bits, axis=1)
    second = np.zeros((len(codes), 1), np.uint64) if fine is None else fine_words(fine)
    return codes, weights, second, np.zeros(0, np.int64) if extra is None else extra


def ranked_by_scan(
    tables: Tables,
    queries: WeightedQueries,
    k: int,
    fine: NDArray[np.uint64],
    threads: int,
) -> Ranked:
    """The k best of each query by a scan of all items."""
    from fisherhash.index.engine import kernels, scan
    from fisherhash.index.engine.layout import PLANE_BLOCK

    codes, weights, fine_queries, _ = query_arrays(queries, tables.bits)
    results = empty_ranked(len(codes), k)
    tile = max(1, scan.TILE // (PLANE_BLOCK * codes.shape[1]))

    def search(numbers: Numbers, room: int) -> Numbers:
        """Fill the results of some queries; returns those whose ties had no room."""
        most = max(1, min(_QUERIES, _ENTRIES // room))
        ranges, parts = scan.pieces(tables, len(numbers), threads, most)

        def job(first: int, last: int) -> Numbers:
            some = numbers[first:last]
            keys = np.empty((len(parts), len(some), room), dtype=np.uint64)
            counts = np.zeros(keys.shape[:2], dtype=np.int64)
            own, own_weights = codes[some], weights[some]

            def collect(part: tuple[int, int], *into: NDArray[Any]) -> None:
                kernels.scan_ranked(
                    *(own, own_weights, tables.planes, tables.items, tables.starts, *part, tile),
                    *(k, _LEVELS, len(fine) > 0, np.zeros(PLANE_BLOCK, dtype=np.uint8), *into),
                )

            run(collect, zip(parts, keys, counts, strict=True), len(parts))
            filled = empty_ranked(len(some), k)
            kernels.finish_ranked(
                *(keys, counts, tables.starts, tables.positions),
                *(fine, fine_queries[some], *filled),
            )
            for result, values in zip(results, filled, strict=True):
                result[some] = values
            return some[(counts < 0).any(axis=0)]

        left = run(job, ranges, threads if len(parts) == 1 else 1)
        return np.concatenate([np.zeros(0, dtype=np.int64), *left])

    left, room = np.arange(len(codes)), 2 * k + 1024
    while len(left) and k:
        left, room = search(left, room), 8 * room
    return results


def ranked_by_buckets(
    tables: Tables,
    queries: WeightedQueries,
    k: int,
    fine: NDArray[np.uint64],
    threads: int,
    budget: int,
) -> tuple[Ranked, Bytes]:
    """The k best of each query by look-ups in rising cost; a flag says whether that was done.

    By (cost, fine distance, position).
    """
    from fisherhash.index.engine import kernels, multi_index

    codes, weights, fine_queries, _ = query_arrays(queries, tables.bits)
    results = empty_ranked(len(codes), k)
    done = np.zeros(len(codes), dtype=np.uint8)
    tally = np.zeros(2, dtype=np.int64)
    words = multi_index.query_words(tables, codes)
    room = min(1 << tables.length, MOST_LOOKUPS)

    def job(first: int, last: int) -> None:
        kernels.probe_ranked(
            *(words, weights, first, last, tables.directory, tables.words.reshape(-1)),
            *(tables.words.shape[2], tables.bucket_items, tables.starts, tables.positions),
            *(tables.length, _LEVELS, room, budget, multi_index.lookup_cost(tables)),
            *(fine, fine_queries, *results, done, tally),
        )

    run(job, split(len(codes), min(len(codes), 4 * threads)), threads)
    return results, done
