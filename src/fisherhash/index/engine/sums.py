"""Searches by the sum of two distances: how second codes are laid out for them, and two ways.

See sum_kernels.py for the terms.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fisherhash.index.engine.pool import run
from fisherhash.index.engine.ranking import MOST_LOOKUPS, query_arrays
from fisherhash.index.engine.tables import Tables, split
from fisherhash.index.ranking import Bytes, Numbers, Ranked, WeightedQueries, empty_ranked

# queries per job of the scan, and the most entries of its scratch memory
_QUERIES = 64
_ENTRIES = 1 << 24
# rows of second codes that are copied at once
_PART = 1 << 16


class SumLayout(NamedTuple):
    """Second codes as the kernels read them; in memory only.

    Attributes:
        fine: (n + FINE_GROUP, words) second codes, by the first table's buckets.
        places: (n,) their positions.
        sketches: (n + FINE_GROUP,) their sketches.
        entries: (items,) where the second codes of an item are.
    """

    fine: NDArray[np.uint64]
    places: NDArray[np.uint32]
    sketches: NDArray[np.uint32]
    entries: NDArray[np.uint64]

    @property
    def bytes(self) -> int:
        """Size of all arrays in bytes."""
        return sum(array.nbytes for array in self)


def sum_layout(tables: Tables, fine: Bytes, threads: int) -> SumLayout:
    """Lay out second codes (n, bytes) for the items of the tables."""
    from fisherhash.index.engine import sum_kernels as kernels

    begins = np.arange(tables.items + 1, dtype=np.int64)
    order = tables.bucket_items[0] if tables.length else begins[:-1].astype(np.uint32)
    if len(tables.starts):
        sizes = np.diff(tables.starts)
        np.cumsum(sizes[order], out=begins[1:])
    places = np.empty(len(fine), dtype=np.uint32)
    words = np.zeros((len(fine) + kernels.FINE_GROUP, -(-fine.shape[1] // 8)), dtype=np.uint64)
    sketches = np.zeros(len(words), dtype=np.uint32)
    entries = np.empty(tables.items, dtype=np.uint64)
    # whole words are copied several times as fast as bytes
    whole = fine.shape[1] % 8 == 0 and fine.flags.c_contiguous
    source = fine.view(np.uint64) if whole else fine
    target = words if whole else words.view(np.uint8)[:, : fine.shape[1]]

    def fill(first: int, last: int) -> None:
        some, where = order[first:last], begins[first:last]
        begin, end = int(begins[first]), int(begins[last])
        if len(tables.starts):
            kernels.fill_places(some, where, tables.starts, tables.positions, places)
        else:
            places[begin:end] = some
        for at in range(begin, end, _PART):
            part = slice(at, min(at + _PART, end))
            if whole:
                # places are in range, and with this mode numpy needs no buffer
                np.take(source, places[part], axis=0, out=target[part], mode="clip")
            else:
                target[part] = source[places[part]]
        kernels.fill_entries(some, where, tables.starts, words, sketches, entries)

    run(fill, split(tables.items, 4 * threads), threads)
    return SumLayout(words, places, sketches, entries)


def bucket_entries(tables: Tables, entries: NDArray[np.uint64], threads: int) -> NDArray[np.uint64]:
    """The entries of what is in the buckets (tables, items)."""
    ordered = np.empty(tables.bucket_items.shape, dtype=np.uint64)

    def order(table: int) -> None:
        np.take(entries, tables.bucket_items[table], out=ordered[table])

    run(order, [(table,) for table in range(len(ordered))], threads)
    return ordered


def summed_by_buckets(
    tables: Tables,
    queries: WeightedQueries,
    k: int,
    layout: SumLayout,
    entries: NDArray[np.uint64],
    threads: int,
    budget: int,
) -> tuple[Ranked, Bytes]:
    """The k best of each query by (sum, position); a flag says whether the budget was enough."""
    from fisherhash.index.engine import multi_index
    from fisherhash.index.engine import sum_kernels as kernels

    codes, *others = query_arrays(queries, 1 if queries.plain else tables.bits)
    words = multi_index.query_words(tables, codes)
    # similar queries one after the other: what they read is then in the cache
    order = np.argsort(words[:, 0])
    results = empty_ranked(len(codes), k)
    done = np.zeros(len(codes), dtype=np.uint8)
    tally = np.zeros(2, dtype=np.int64)

    def job(first: int, last: int) -> None:
        given = (order[first:last], words, *others)
        buckets = (tables.directory, tables.words.reshape(-1), tables.words.shape[2], tables.length)
        limits = (budget, multi_index.lookup_cost(tables))
        into = (entries.reshape(-1), *layout[:3], *results, done, tally)
        # not in one kernel, so that one search does not wait until the other is compiled
        if queries.plain:
            offsets, masks = tables.masks
            kernels.probe_equal_sums(*given, *buckets, tables.bits, masks, offsets, *limits, *into)
        else:
            room = min(1 << tables.length, MOST_LOOKUPS)
            kernels.probe_weighted_sums(*given, *buckets, room, *limits, *into)

    run(job, split(len(codes), min(len(codes), 4 * threads)), threads)
    return results, done


def summed_by_scan(
    tables: Tables,
    queries: WeightedQueries,
    near: Ranked,
    k: int,
    layout: SumLayout,
    threads: int,
) -> Ranked:
    """The k best of each query by (sum, position), by a scan.

    The k-th sum among the cheapest items bounds that of the results. Unless every other item costs
    more than that, a scan compares the second codes of the items that do not.

    Args:
        tables: what is searched.
        queries: with second codes and their weights.
        near: the cheapest items of each query, at least k.
        k: how many are wanted.
        layout: the second codes.
        threads: the most threads.
    """
    codes, weights, own, extra = query_arrays(queries, tables.bits)
    sums = near.costs + extra[:, None] * near.fines
    order = np.lexsort((near.positions, sums), axis=1)[:, :k]
    results = Ranked(*(np.take_along_axis(values, order, axis=1) for values in near))
    most = np.take_along_axis(sums, order[:, -1:], axis=1)[:, 0]
    whole = near.positions.shape[1] == tables.total
    left = np.flatnonzero((most >= near.costs[:, -1]) & (not whole))
    if not len(left):
        return results

    from fisherhash.index.engine import scan
    from fisherhash.index.engine import sum_kernels as kernels
    from fisherhash.index.engine.layout import PLANE_BLOCK

    tile = max(1, scan.TILE // (PLANE_BLOCK * codes.shape[1]))
    room = 2 * k + 512
    at_once = max(1, min(_QUERIES, _ENTRIES // (4 * room)))
    ranges, parts = scan.pieces(tables, len(left), threads, at_once)

    def job(first: int, last: int) -> None:
        some = left[first:last]
        rows = np.empty((len(parts), len(some), room, 4), dtype=np.int64)
        counts = np.zeros(rows.shape[:2], dtype=np.int64)
        given = (codes[some], weights[some], own[some], extra[some], most[some])

        def collect(part: tuple[int, int], *into: NDArray[Any]) -> None:
            scratch = scan.scratch(tables.bits), np.zeros(PLANE_BLOCK, dtype=np.uint8)
            kernels.scan_sums(
                *(*given, tables.planes, tables.items, layout.entries, *layout[:3]),
                *(*part, tile, k, *scratch, *into),
            )

        run(collect, zip(parts, rows, counts, strict=True), len(parts))
        for i, q in enumerate(some):
            best = np.concatenate([row[i, : n[i]] for row, n in zip(rows, counts, strict=True)])
            best = best[np.lexsort((best[:, 1], best[:, 0]))[:k]]
            for result, values in zip(results, best.T[1:], strict=True):
                result[q] = values

    run(job, ranges, threads if len(parts) == 1 else 1)
    return results


def fine_distances(near: Ranked, queries: Bytes, fine: Bytes) -> Numbers:
    """Distances (n_queries, k) of the second codes of what was found from those of the queries."""
    apart = fine[near.positions] ^ queries[:, None]
    return np.bitwise_count(apart).sum(axis=2, dtype=np.int64)
