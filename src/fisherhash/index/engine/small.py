"""Exact search with plain numpy, for collections too small to be worth a compiled kernel."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from fisherhash.codes import hamming

# limits the distances held at once
_BLOCK_PAIRS = 1 << 21
# below this many codes a whole row is sorted, which is cheaper than cutting it first
_SORTED_ROW = 2048


def nearest_by_numpy(
    queries: NDArray[np.uint8], codes: NDArray[np.uint8], bits: int, k: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Positions and distances (n_queries, min(k, n)) by (distance, position).

    >>> nearest_by_numpy(np.array([[1]], np.uint8), np.array([[3], [1], [1]], np.uint8), 8, 2)
    (array([[1, 2]]), array([[0, 0]]))
    """
    k = min(k, len(codes))
    positions = np.zeros((len(queries), k), dtype=np.int64)
    found = np.zeros((len(queries), k), dtype=np.int64)
    step, kind = _at_once(codes, bits)
    for start in range(0, len(queries), step):
        block = hamming(queries[start : start + step], codes).astype(kind, copy=False)
        if len(codes) <= _SORTED_ROW:
            # for a stable order numpy sorts these small types by radix
            order = np.argsort(block, axis=1, kind="stable")[:, :k]
            positions[start : start + len(block)] = order
            found[start : start + len(block)] = np.take_along_axis(block, order, axis=1)
            continue
        for i, row in enumerate(block, start):
            within = np.cumsum(np.bincount(row, minlength=bits + 1))
            cut = int(np.searchsorted(within, k))
            places = np.flatnonzero(row <= cut)
            near = row[places]
            order = np.argsort(near, kind="stable")[:k]
            positions[i], found[i] = places[order], near[order]
    return positions, found


def within_by_numpy(
    queries: NDArray[np.uint8], codes: NDArray[np.uint8], bits: int, radius: int
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """Offsets (n_queries + 1,), positions and distances of everything up to the radius.

    >>> within_by_numpy(np.array([[1]], np.uint8), np.array([[3], [1], [6]], np.uint8), 8, 1)
    (array([0, 2]), array([1, 0]), array([0, 1]))
    """
    none = np.zeros(0, dtype=np.int64)
    parts = [(np.zeros(1, dtype=np.int64), none, none)]
    step, kind = _at_once(codes, bits)
    for start in range(0, len(queries), step):
        block = hamming(queries[start : start + step], codes).astype(kind, copy=False)
        rows, places = np.nonzero(block <= radius)
        near = block[rows, places]
        # stable: places ascend within a row, and still do within each distance
        order = np.lexsort((near, rows))
        counts = np.bincount(rows, minlength=len(block))
        parts.append((counts, places[order], near[order].astype(np.int64)))
    counts, positions, distances = map(np.concatenate, zip(*parts, strict=True))
    return np.cumsum(counts), positions, distances


def _at_once(codes: NDArray[np.uint8], bits: int) -> tuple[int, type[np.unsignedinteger]]:
    """How many queries are compared at once, and the smallest type that holds a distance."""
    return max(1, _BLOCK_PAIRS // max(1, len(codes))), np.uint8 if bits < 256 else np.uint16
