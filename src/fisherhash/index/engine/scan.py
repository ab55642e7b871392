"""The block scan over all codes: threads share the queries, or the codes if queries are few."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fisherhash.index.engine import kernels
from fisherhash.index.engine.by_numpy import byte_costs
from fisherhash.index.engine.kernels import PLANE_BLOCK, SCAN_LANES
from fisherhash.index.engine.threads import run, split

Numbers = NDArray[np.int64]
Pieces = list[tuple[int, int]]

# bytes of planes that a batch of queries scans before it moves on: they fit the first cache
_TILE = 1 << 14
# queries per job, and the most entries of its scratch memory
_QUERIES = 128
_ENTRIES = 1 << 24
# bytes that a thread reads while it wakes up
_WORTH_A_THREAD = 1 << 19


class Planes:
    """Codes (n, bytes) as the scan reads them, see :mod:`fisherhash.index.engine.kernels`.

    Args:
        codes: they are copied.
        bits: length of a code.
        threads: the most threads to use, here and in every search.
    """

    def __init__(self, codes: NDArray[np.uint8], bits: int, threads: int) -> None:
        self.total, self.width = codes.shape
        self.bits = bits
        self.threads = threads
        self._blocks = -(-self.total // PLANE_BLOCK)
        self._tile = max(1, _TILE // (PLANE_BLOCK * self.width))
        self._bytes = np.zeros(self._blocks * PLANE_BLOCK * self.width, dtype=np.uint8)
        shaped = self._bytes.reshape(self._blocks, self.width, PLANE_BLOCK)

        def fill(first: int, last: int) -> None:
            part = codes[first * PLANE_BLOCK : last * PLANE_BLOCK]
            whole = len(part) // PLANE_BLOCK
            blocks = part[: whole * PLANE_BLOCK].reshape(whole, PLANE_BLOCK, self.width)
            shaped[first : first + whole] = blocks.transpose(0, 2, 1)
            rest = part[whole * PLANE_BLOCK :]
            if len(rest):
                shaped[first + whole, :, : len(rest)] = rest.T

        run(fill, split(self._blocks, 4 * threads), threads)

    def nearest(self, queries: NDArray[np.uint8], k: int) -> tuple[Numbers, Numbers]:
        """Positions and distances (n_queries, k), k at most the number of codes."""
        found = np.zeros((len(queries), k), dtype=np.int64)
        distances = np.zeros((len(queries), k), dtype=np.int64)
        if not found.size:
            return found, distances
        room = min(2 * k + 4 * SCAN_LANES, self.total + SCAN_LANES)
        ranges, parts = self._pieces(len(queries), max(1, min(_QUERIES, _ENTRIES // room)))

        def job(first: int, last: int) -> None:
            shape = (len(parts), last - first, room)
            positions = np.empty(shape, dtype=np.uint32)
            near = np.empty(shape, dtype=self._block().dtype)
            counts = np.zeros(shape[:2], dtype=np.int64)

            def scan(part: tuple[int, int], *into: NDArray[Any]) -> None:
                kernels.scan_nearest(
                    *(queries[first:last], self._bytes, self.total, *part, self._tile),
                    *(k, self.bits, self._block(), *into),
                )

            run(scan, zip(parts, positions, near, counts, strict=True), len(parts))
            kernels.finish_nearest(
                positions, near, counts, self.bits, found[first:last], distances[first:last]
            )

        run(job, ranges, self.threads if len(parts) == 1 else 1)
        return found, distances

    def within(self, queries: NDArray[np.uint8], radius: int) -> NDArray[np.uint64]:
        """Records (query << 43 | distance << 32 | position) of everything up to the radius."""
        ranges, parts = self._pieces(len(queries), _QUERIES)

        def job(queried: tuple[int, int], part: tuple[int, int]) -> NDArray[np.uint64]:
            first, last = queried
            records = kernels.scan_within(
                *(queries[first:last], self._bytes, self.total, *part, self._tile),
                *(radius, self._block()),
            )
            records += np.uint64(first << kernels.QUERY_SHIFT)
            return records

        found = run(job, itertools.product(ranges, parts), self.threads)
        return np.concatenate([np.zeros(0, dtype=np.uint64), *found])

    def nearest_weighted(
        self, queries: NDArray[np.uint8], weights: Numbers, k: int
    ) -> tuple[Numbers, Numbers]:
        """Positions and costs (n_queries, k), where a bit that differs costs its weight."""
        found = np.zeros((len(queries), k), dtype=np.int64)
        costs = np.zeros((len(queries), k), dtype=np.int64)
        if not found.size:
            return found, costs
        ranges, parts = self._pieces(len(queries), 1)
        room = 2 * k + 1024

        def scan(tables: NDArray[np.uint32], first: int, last: int) -> NDArray[np.uint64]:
            keys, spare = np.empty(room, dtype=np.uint64), np.empty(room, dtype=np.uint64)
            count = kernels.scan_weighted(
                self._bytes, tables, self.total, first, last, k, keys, spare
            )
            return keys[:count]

        def job(query: int, _: int) -> None:
            tables = byte_costs(queries[query : query + 1], weights[query : query + 1])[0]
            lists = run(scan, [(tables, *part) for part in parts], len(parts))
            keys = lists[0] if len(lists) == 1 else np.sort(np.concatenate(lists))[:k]
            found[query] = keys & np.uint64(0xFFFFFFFF)
            costs[query] = keys >> np.uint64(32)

        run(job, ranges, self.threads if len(parts) == 1 else 1)
        return found, costs

    def _pieces(self, queries: int, most: int) -> tuple[Pieces, Pieces]:
        """Ranges of at most so many queries, and ranges of blocks; every pair of them is a job."""
        threads = max(1, min(self.threads, queries * self._bytes.nbytes // _WORTH_A_THREAD))
        if threads == 1 or queries >= 8 * threads:
            size = max(1, min(most, -(-queries // (4 * threads))))
            return split(queries, -(-queries // size)), [(0, self._blocks)]
        size = max(1, min(most, queries))
        return split(queries, -(-queries // size)), split(self._blocks, threads)

    def _block(self) -> NDArray[np.unsignedinteger]:
        """Scratch memory for the distances of a block."""
        return np.zeros(PLANE_BLOCK, dtype=np.uint8 if self.bits < 255 else np.uint16)
