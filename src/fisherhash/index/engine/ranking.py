"""Ranked searches by the engine's kernels: a scan, look-ups in buckets, and sums of two distances.

See :mod:`fisherhash.index.ranking` for what a ranking is.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fisherhash.index.engine.pool import run
from fisherhash.index.engine.tables import Tables, split
from fisherhash.index.ranking import Bytes, Numbers, Ranked, empty_ranked

# steps in which the costs found so far are counted, see kernels._take
_LEVELS = 2048
# bucket numbers that are looked up in one table before the search scans instead
_MOST_LOOKUPS = 1 << 16
# queries per job of the scan, and the most entries of its scratch memory
_QUERIES = 64
_ENTRIES = 1 << 24
# results that are held at once while sums are ranked
_MOST_RANKED = 1 << 22


def fine_words(codes: Bytes) -> NDArray[np.uint64]:
    """Second codes (n, words) as the kernels compare them."""
    missing = -codes.shape[1] % 8
    padded = np.pad(codes, ((0, 0), (0, missing))) if missing else np.ascontiguousarray(codes)
    return padded.view(np.uint64)


def ranked_by_scan(
    tables: Tables,
    queries: Bytes,
    k: int,
    weights: Numbers,
    fine_queries: NDArray[np.uint64],
    fine: NDArray[np.uint64],
    threads: int,
) -> Ranked:
    """The k best of each query by a scan of all items."""
    from fisherhash.index.engine import kernels, scan
    from fisherhash.index.engine.layout import PLANE_BLOCK

    results = empty_ranked(len(queries), k)
    tile = max(1, scan.TILE // (PLANE_BLOCK * queries.shape[1]))

    def search(numbers: Numbers, room: int) -> Numbers:
        """Fill the results of some queries; returns those whose ties had no room."""
        most = max(1, min(_QUERIES, _ENTRIES // room))
        ranges, parts = scan.pieces(tables, len(numbers), threads, most)

        def job(first: int, last: int) -> Numbers:
            some = numbers[first:last]
            keys = np.empty((len(parts), len(some), room), dtype=np.uint64)
            counts = np.zeros(keys.shape[:2], dtype=np.int64)
            own, own_weights = queries[some], weights[some]

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

    left, room = np.arange(len(queries)), 2 * k + 1024
    while len(left) and k:
        left, room = search(left, room), 8 * room
    return results


def ranked_by_buckets(
    tables: Tables,
    queries: Bytes,
    k: int,
    weights: Numbers,
    fine_queries: NDArray[np.uint64],
    fine: NDArray[np.uint64],
    threads: int,
    budget: int,
) -> tuple[Ranked, Bytes]:
    """The k best of each query by look-ups in rising cost; a flag says whether that was done."""
    from fisherhash.index.engine import kernels, multi_index

    results = empty_ranked(len(queries), k)
    done = np.zeros(len(queries), dtype=np.uint8)
    tally = np.zeros(2, dtype=np.int64)
    words = multi_index.query_words(tables, queries)
    room = min(1 << tables.length, _MOST_LOOKUPS)

    def job(first: int, last: int) -> None:
        kernels.probe_ranked(
            *(words, weights, first, last, tables.directory, tables.words.reshape(-1)),
            *(tables.words.shape[2], tables.bucket_items, tables.starts, tables.positions),
            *(tables.length, _LEVELS, room, budget, multi_index.lookup_cost(tables)),
            *(fine, fine_queries, *results, done, tally),
        )

    run(job, split(len(queries), min(len(queries), 4 * threads)), threads)
    return results, done


def ranked_by_sum(
    rank: Callable[[Numbers, int], Ranked], queries: int, total: int, k: int, fine_weight: Numbers
) -> Ranked:
    """The k best of each query by (cost + weight * fine distance, position).

    More and more are ranked by cost, until those not yet seen cost more than the k-th sum.

    Args:
        rank: ranks some queries, by their numbers, by (cost, fine distance, position).
        queries: how many.
        total: how many positions there are.
        k: how many are wanted, at most ``total``.
        fine_weight: (queries,) weights in the units of the costs.
    """
    results = empty_ranked(queries, k)
    left, fetch = np.arange(queries), min(total, 2 * k + 64)
    while len(left) and k:
        again = []
        step = max(1, _MOST_RANKED // fetch)
        for some in (left[start : start + step] for start in range(0, len(left), step)):
            found = rank(some, fetch)
            sums = found.costs + fine_weight[some, None] * found.fines
            order = np.lexsort((found.positions, sums), axis=1)[:, :k]
            last = np.take_along_axis(sums, order[:, -1:], axis=1)[:, 0]
            enough = (last < found.costs[:, -1]) | (fetch == total)
            for result, values in zip(results, found, strict=True):
                result[some[enough]] = np.take_along_axis(values[enough], order[enough], axis=1)
            again.append(some[~enough])
        left, fetch = np.concatenate(again), min(total, 4 * fetch)
    return results
