"""Exact search with numpy alone: for small collections, and where numba is not installed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fisherhash.codes import add_distances, as_words
from fisherhash.index.engine.threads import run, split

Numbers = NDArray[np.int64]
Block = Callable[[slice], NDArray[np.unsignedinteger]]

# distances that one thread holds at once
_BLOCK_PAIRS = 1 << 20
# codes whose costs are added up at once, in the cache
_BLOCK_ROWS = 1 << 14
# below this many codes a whole row is sorted, which is cheaper than cutting it first
_SORTED_ROW = 2048
# comparisons that are worth waking up a thread
_WORTH_A_THREAD = 1 << 20


def nearest(
    queries: NDArray[np.uint8],
    words: NDArray[np.unsignedinteger],
    bits: int,
    k: int,
    threads: int,
) -> tuple[Numbers, Numbers]:
    """Positions and distances (n_queries, k) by (distance, position).

    Args:
        queries: (n_queries, bytes) codes.
        words: (n, words) the codes that are searched, by :func:`fisherhash.codes.as_words`.
        bits: length of a code.
        k: how many; at most n.
        threads: the most threads to use.
    """
    return _nearest(_hamming_blocks(queries, words, bits), len(queries), len(words), k, threads)


def nearest_weighted(
    queries: NDArray[np.uint8],
    weights: Numbers,
    codes: NDArray[np.uint8],
    k: int,
    threads: int,
) -> tuple[Numbers, Numbers]:
    """The same, where a bit that differs costs its weight (n_queries, bits)."""

    width = codes.shape[1] // 2 * 2
    pairs = np.ascontiguousarray(codes[:, :width]).view("<u2")

    def block(some: slice) -> NDArray[np.unsignedinteger]:
        costs = np.zeros((len(queries[some]), len(codes)), dtype=np.uint32)
        for row, tables in zip(costs, byte_costs(queries[some], weights[some]), strict=True):
            # half as many look-ups with tables of two bytes, the second one above the first
            twos = zip(tables[:width:2], tables[1:width:2], strict=True)
            doubled = [(second[:, None] + first).ravel() for first, second in twos]
            for start in range(0, len(codes), _BLOCK_ROWS):
                part = slice(start, start + _BLOCK_ROWS)
                for pair, table in enumerate(doubled):
                    row[part] += table[pairs[part, pair]]
                if width < len(tables):
                    row[part] += tables[width][codes[part, width]]
        return costs

    return _nearest(block, len(queries), len(codes), k, threads)


def byte_costs(queries: NDArray[np.uint8], weights: Numbers) -> NDArray[np.uint32]:
    """Costs (n_queries, bytes, 256) of every value that a byte of a code may have.

    >>> byte_costs(np.array([[1]], np.uint8), np.full((1, 8), 5))[0, 0, [0, 1, 2, 3]].tolist()
    [5, 0, 10, 5]
    """
    count, width = queries.shape
    padded = np.zeros((count, 8 * width), dtype=np.int64)
    padded[:, : weights.shape[1]] = weights
    values = np.arange(256, dtype=np.uint8)
    # what a byte costs that differs from the query's in the bits of a value
    costs = padded.reshape(count, width, 8) @ np.unpackbits(values[:, None], axis=1).T
    order = (queries[:, :, None] ^ values).astype(np.intp)
    return np.take_along_axis(costs, order, axis=2).astype(np.uint32)


def within(
    queries: NDArray[np.uint8],
    words: NDArray[np.unsignedinteger],
    bits: int,
    radius: int,
    threads: int,
) -> tuple[Numbers, Numbers, Numbers]:
    """Offsets (n_queries + 1,), positions and distances of everything up to the radius."""
    compute = _hamming_blocks(queries, words, bits)

    def job(first: int, last: int) -> tuple[list[int], list[Numbers], list[Numbers]]:
        counts, positions, distances = [], [], []
        for row in compute(slice(first, last)):
            found = np.flatnonzero(row <= radius)
            near = row[found]
            # stable: the positions of each distance still ascend
            order = np.argsort(near, kind="stable")
            counts.append(len(found))
            positions.append(found[order])
            distances.append(near[order].astype(np.int64))
        return counts, positions, distances

    parts = run(job, *_pieces(len(queries), len(words), threads))
    counts, positions, distances = ([one for part in parts for one in part[i]] for i in range(3))
    none = np.zeros(0, dtype=np.int64)
    offsets = np.concatenate([none, [0], np.cumsum(counts, dtype=np.int64)])
    return offsets, np.concatenate([none, *positions]), np.concatenate([none, *distances])


def _hamming_blocks(
    queries: NDArray[np.uint8], words: NDArray[np.unsignedinteger], bits: int
) -> Block:
    own, kind = as_words(queries), np.uint8 if bits < 256 else np.uint16

    def block(some: slice) -> NDArray[np.unsignedinteger]:
        distances = np.zeros((len(own[some]), len(words)), dtype=kind)
        add_distances(own[some], words, distances)
        return distances

    return block


def _pieces(queries: int, codes: int, threads: int) -> tuple[list[tuple[int, int]], int]:
    """Ranges of queries whose distances are held at once, and how many threads share them."""
    count = -(-queries * codes // _BLOCK_PAIRS)
    worth = queries * codes // _WORTH_A_THREAD
    return split(queries, min(queries, max(1, count))), max(1, min(threads, worth))


def _nearest(
    compute: Block, queries: int, codes: int, k: int, threads: int
) -> tuple[Numbers, Numbers]:
    positions = np.zeros((queries, k), dtype=np.int64)
    distances = np.zeros((queries, k), dtype=np.int64)

    def job(first: int, last: int) -> None:
        block = compute(slice(first, last))
        if codes <= _SORTED_ROW:
            # for a stable order numpy sorts small types by radix
            order = np.argsort(block, axis=1, kind="stable")[:, :k]
            positions[first:last] = order
            distances[first:last] = np.take_along_axis(block, order, axis=1)
            return
        for i, row in enumerate(block, first):
            positions[i], distances[i] = _first(row, k)

    run(job, *_pieces(queries, codes, threads))
    return positions, distances


def _first(row: NDArray[np.unsignedinteger], k: int) -> tuple[Numbers, NDArray[Any]]:
    """Positions and values of the k smallest values of a row, by (value, position)."""
    if row.itemsize <= 2:
        # counting is so fast that a search for the k-th value takes less than a partition
        low, cut = 0, int(row.max())
        while low < cut:
            middle = (low + cut) // 2
            if np.count_nonzero(row <= middle) >= k:
                cut = middle
            else:
                low = middle + 1
    else:
        cut = np.partition(row, k - 1)[k - 1]
    below = np.flatnonzero(row < cut)
    below = below[np.argsort(row[below], kind="stable")]
    ties = np.flatnonzero(row == cut)[: k - len(below)]
    found = np.concatenate([below, ties])
    return found, row[found]
