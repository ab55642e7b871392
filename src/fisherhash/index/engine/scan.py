"""The block scan over all items: threads share the queries, or the items if queries are few."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fisherhash.index.engine import kernels
from fisherhash.index.engine.layout import PLANE_BLOCK
from fisherhash.index.engine.pool import run
from fisherhash.index.engine.tables import Tables, split

# bytes of planes that a batch of queries scans before it moves on: they fit the first cache
TILE = 1 << 14
# queries per job, and the most entries of its scratch memory
_QUERIES = 128
_ENTRIES = 1 << 24
_WORTH_A_THREAD = 1 << 19
# records store their query in 21 bits
MOST_QUERIES = 1 << 16

Pieces = list[tuple[int, int]]


def pieces(tables: Tables, queries: int, threads: int, most: int) -> tuple[Pieces, Pieces]:
    """Ranges of queries and ranges of blocks; every pair of them is a job."""
    blocks = -(-tables.items // PLANE_BLOCK)
    # a thread takes as long to wake up as to read this much
    threads = max(1, min(threads, queries * tables.planes.nbytes // _WORTH_A_THREAD))
    if threads == 1 or queries >= 8 * threads:
        size = max(1, min(most, -(-queries // (4 * threads))))
        return split(queries, -(-queries // size)), [(0, blocks)]
    size = max(1, min(most, queries))
    return split(queries, -(-queries // size)), split(blocks, threads) or [(0, 0)]


def scratch(bits: int) -> NDArray[np.unsignedinteger]:
    """Room for the distances of a block."""
    return np.zeros(PLANE_BLOCK, dtype=np.uint8 if bits < 255 else np.uint16)


def nearest_by_scan(
    tables: Tables, queries: NDArray[np.uint8], k: int, threads: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Positions and distances (n_queries, k), k at most the number of positions."""
    found = np.zeros((len(queries), k), dtype=np.int64)
    distances = np.zeros((len(queries), k), dtype=np.int64)
    if not found.size:
        return found, distances
    tile = max(1, TILE // (PLANE_BLOCK * queries.shape[1]))
    room = min(2 * k + 4 * kernels.SCAN_LANES, tables.items + kernels.SCAN_LANES)
    most = max(1, min(_QUERIES, _ENTRIES // room))
    ranges, parts = pieces(tables, len(queries), threads, most)

    def job(first: int, last: int) -> None:
        shape = (len(parts), last - first, room)
        items = np.empty(shape, dtype=np.uint32)
        near = np.empty(shape, dtype=scratch(tables.bits).dtype)
        counts = np.zeros(shape[:2], dtype=np.int64)

        def scan(part: tuple[int, int], *into: NDArray[Any]) -> None:
            kernels.scan_nearest(
                *(queries[first:last], tables.planes, tables.items, tables.starts),
                *(*part, tile, k, tables.bits, scratch(tables.bits), *into),
            )

        run(scan, zip(parts, items, near, counts, strict=True), len(parts))
        kernels.finish_nearest(
            *(items, near, counts, tables.starts, tables.positions, tables.bits),
            *(found[first:last], distances[first:last]),
        )

    run(job, ranges, threads if len(parts) == 1 else 1)
    return found, distances


def within_by_scan(
    tables: Tables, queries: NDArray[np.uint8], radius: int, threads: int
) -> NDArray[np.uint64]:
    """Sorted records (query << 43 | distance << 32 | item) of all items up to the radius."""
    tile = max(1, TILE // (PLANE_BLOCK * queries.shape[1]))
    ranges, parts = pieces(tables, len(queries), threads, _QUERIES)

    def job(queried: tuple[int, int], part: tuple[int, int]) -> NDArray[np.uint64]:
        first, last = queried
        records = kernels.scan_within(
            *(queries[first:last], tables.planes, tables.items),
            *(*part, tile, radius, scratch(tables.bits)),
        )
        records += np.uint64(first << 43)
        return records

    results = run(job, itertools.product(ranges, parts), threads)
    records = np.concatenate([np.zeros(0, dtype=np.uint64), *results])
    if len(parts) > 1:
        kernels.sort_records(records, len(records))
    return records
