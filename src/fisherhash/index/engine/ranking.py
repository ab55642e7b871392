"""Ranked searches by the engine's kernels: a scan, look-ups in buckets, and sums of two distances.

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
_MOST_LOOKUPS = 1 << 16
# queries per job of the scan, and the most entries of its scratch memory
_QUERIES = 64
_ENTRIES = 1 << 24


def fine_words(codes: Bytes) -> NDArray[np.uint64]:
    """Second codes (n, words) as the kernels compare them."""
    missing = -codes.shape[1] % 8
    padded = np.pad(codes, ((0, 0), (0, missing))) if missing else np.ascontiguousarray(codes)
    return padded.view(np.uint64)


def fine_sketches(tables: Tables, fine: NDArray[np.uint64], threads: int) -> NDArray[np.uint64]:
    """Bounds of the second codes of what is in the buckets (tables, items), see the kernels."""
    from fisherhash.index.engine import kernels
    from fisherhash.index.engine.layout import WORD_GROUP

    each = np.zeros(tables.items, dtype=np.uint64)

    def job(first: int, last: int) -> None:
        kernels.fill_sketches(fine, tables.starts, first, last, each)

    run(job, split(tables.items, 4 * threads), threads)
    sketches = np.zeros((len(tables.directory), tables.items + WORD_GROUP), dtype=np.uint64)

    def order(table: int) -> None:
        np.take(each, tables.bucket_items[table], out=sketches[table, : tables.items])

    run(order, [(table,) for table in range(len(sketches))], threads)
    return sketches


def _arrays(
    tables: Tables, queries: WeightedQueries
) -> tuple[Bytes, Numbers, NDArray[np.uint64], Numbers]:
    """Codes, weights, second codes and their weights, as the kernels take them."""
    codes, weights, fine, extra = queries
    if weights is None:
        weights = np.ones((len(codes), tables.bits), dtype=np.int64)
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

    codes, weights, fine_queries, _ = _arrays(tables, queries)
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
    sketches: NDArray[np.uint64],
    threads: int,
    budget: int,
) -> tuple[Ranked, Bytes]:
    """The k best of each query by look-ups in rising cost; a flag says whether that was done.

    By (cost, fine distance, position), or where the queries say so by (sum, position).
    """
    from fisherhash.index.engine import kernels, multi_index

    codes, weights, fine_queries, extra = _arrays(tables, queries)
    results = empty_ranked(len(codes), k)
    done = np.zeros(len(codes), dtype=np.uint8)
    tally = np.zeros(2, dtype=np.int64)
    words = multi_index.query_words(tables, codes)
    room = min(1 << tables.length, _MOST_LOOKUPS)

    def job(first: int, last: int) -> None:
        kernels.probe_ranked(
            *(words, weights, first, last, tables.directory, tables.words.reshape(-1)),
            *(tables.words.shape[2], tables.bucket_items, tables.starts, tables.positions),
            *(tables.length, _LEVELS, room, budget, multi_index.lookup_cost(tables)),
            *(fine, sketches, fine_queries, extra, *results, done, tally),
        )

    run(job, split(len(codes), min(len(codes), 4 * threads)), threads)
    return results, done


def summed_by_scan(
    tables: Tables,
    queries: WeightedQueries,
    near: Ranked,
    k: int,
    fine: NDArray[np.uint64],
    threads: int,
) -> Ranked:
    """The k best of each query by (cost + weight * fine distance, position).

    The k-th sum among the cheapest items bounds that of the results. Unless every other item costs
    more than that, a scan compares the second codes of all items that do not.

    Args:
        tables: what is searched.
        queries: with weights, second codes and their weights.
        near: the cheapest items of each query, at least k.
        k: how many are wanted.
        fine: the second codes in the order of the tables' lists.
        threads: the most threads.
    """
    codes, weights, own, extra = _arrays(tables, queries)
    sums = near.costs + extra[:, None] * near.fines
    order = np.lexsort((near.positions, sums), axis=1)[:, :k]
    results = Ranked(*(np.take_along_axis(values, order, axis=1) for values in near))
    most = np.take_along_axis(sums, order[:, -1:], axis=1)[:, 0]
    whole = near.positions.shape[1] == len(fine)
    left = np.flatnonzero((most >= near.costs[:, -1]) & (not whole))
    if not len(left):
        return results

    from fisherhash.index.engine import kernels, scan
    from fisherhash.index.engine.layout import PLANE_BLOCK

    tile = max(1, scan.TILE // (PLANE_BLOCK * codes.shape[1]))
    at_once = max(1, min(_QUERIES, _ENTRIES // (4 * k)))
    ranges, parts = scan.pieces(tables, len(left), threads, at_once)

    def job(first: int, last: int) -> None:
        some = left[first:last]
        heaps = np.empty((len(parts), len(some), k, 4), dtype=np.int64)
        counts = np.zeros(heaps.shape[:2], dtype=np.int64)
        given = (codes[some], weights[some], own[some], extra[some], most[some])

        def collect(part: tuple[int, int], *into: NDArray[Any]) -> None:
            kernels.scan_sums(
                *(*given, tables.planes, tables.items, tables.starts, tables.positions, fine),
                *(*part, tile, np.zeros(PLANE_BLOCK, dtype=np.uint8), *into),
            )

        run(collect, zip(parts, heaps, counts, strict=True), len(parts))
        for i, q in enumerate(some):
            rows = np.concatenate([heap[i, : n[i]] for heap, n in zip(heaps, counts, strict=True)])
            rows = rows[np.lexsort((rows[:, 1], rows[:, 0]))[:k]]
            for result, values in zip(results, rows.T[1:], strict=True):
                result[q] = values

    run(job, ranges, threads if len(parts) == 1 else 1)
    return results
