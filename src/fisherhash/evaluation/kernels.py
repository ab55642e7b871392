"""The numba kernels of ``backend="numba"``; imported only when that backend runs.

They release the GIL and run in plain threads. Numba's own parallel layer would make a later
``fork`` of the process unsafe and would take much longer to compile.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numba
import numpy as np
from llvmlite import ir
from numba.core import types
from numba.extending import intrinsic

_LANES = 64
SCAN_TILE = 64 * _LANES

_INDEX = ir.IntType(32)

_SHIFT = np.uint64(16)
_ONE = np.uint64(1)
_DISTANCE = np.uint64((1 << 16) - 1)


def _jit(function: Callable[..., Any]) -> Any:
    options: dict[str, Any] = {"nogil": True, "error_model": "numpy"}
    try:
        return numba.njit(cache=True, **options)(function)
    except RuntimeError:
        # numba found no writable folder for its cache, so compile in memory
        return numba.njit(**options)(function)


def _typed_popcount(typing_context: Any, word: Any) -> Any:
    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.ctpop(args[0])

    return types.uint64(types.uint64), emit


def _typed_equal_mask(typing_context: Any, values: Any, start: Any, value: Any) -> Any:
    """Return one bit for each of the 64 values from ``start`` on: whether it equals ``value``.

    Written as one vector comparison, because the compiler does not turn a loop into one.
    """

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        array = context.make_array(signature.args[0])(context, builder, args[0])
        element = context.get_value_type(signature.args[0].dtype)
        block = ir.VectorType(element, _LANES)
        place = builder.bitcast(builder.gep(array.data, [args[1]]), block.as_pointer())
        loaded = builder.load(place)
        loaded.align = 1
        one = builder.insert_element(ir.Constant(block, ir.Undefined), args[2], _INDEX(0))
        zeros = ir.Constant(ir.VectorType(_INDEX, _LANES), [0] * _LANES)
        copies = builder.shuffle_vector(one, ir.Constant(block, ir.Undefined), zeros)
        equal = builder.icmp_unsigned("==", loaded, copies)
        return builder.bitcast(equal, ir.IntType(_LANES))

    return types.uint64(values, types.int64, values.dtype), emit


_popcount: Any = intrinsic(_typed_popcount)
_equal_mask: Any = intrinsic(_typed_equal_mask)


@_jit
def _tile_distances(query: Any, words: Any, start: int, stop: int, out: Any) -> None:
    first = words[0, start:stop]
    word = query[0]
    for i in range(stop - start):
        out[i] = _popcount(first[i] ^ word)
    for w in range(1, words.shape[0]):
        column = words[w, start:stop]
        word = query[w]
        for i in range(stop - start):
            out[i] += _popcount(column[i] ^ word)


@_jit
def _mark_relevant(mask: Any, masks: Any, most: int, marks: Any, grades: Any) -> None:
    """Fill ``marks`` with one bit and ``grades`` with the shared labels per database row."""
    total = masks.shape[1]
    grades[:] = 0
    for v in range(masks.shape[0]):
        column = masks[v]
        word = mask[v]
        for j in range(total):
            grades[j] += _popcount(column[j] & word)
    for j in range(total):
        grades[j] = min(grades[j], most)
    for block in range(len(marks)):
        marks[block] = ~_equal_mask(grades, block * _LANES, np.uint16(0))


@_jit
def scan_queries(
    queries: Any,
    words: Any,
    query_masks: Any,
    masks: Any,
    self_rows: Any,
    top: int,
    first: int,
    last: int,
    distances: Any,
    items: Any,
    grades: Any,
    stable: Any,
    stable_found: Any,
) -> None:
    """Fill the tie groups and the stable-order sums of the queries ``first`` to ``last``.

    Args:
        queries: (n_queries, words) uint64.
        words: (words, n_database) uint64.
        query_masks: (n_queries, v) uint64 label masks; equal masks should be neighbours.
        masks: (v, n_database) uint64 label masks.
        self_rows: (n_queries,) database row of the query itself, or -1.
        top: Ranks that count in ``stable``.
        first: First query.
        last: One past the last query.
        distances: (SCAN_TILE,) scratch of an unsigned type whose largest value is no distance.
        items: (n_queries, levels) zeros, filled with counts.
        grades: (n_queries, levels, most) zeros, filled with counts.
        stable: (n_queries,) filled with the sum of precisions at relevant ranks up to ``top``.
        stable_found: (n_queries,) filled with the number of those ranks.
    """
    total = words.shape[1]
    levels = items.shape[1]
    most = grades.shape[2]
    nowhere = ~distances.dtype.type(0)
    blocks = (total + _LANES - 1) // _LANES
    marks = np.zeros(blocks, dtype=np.uint64)
    row_grades = np.zeros(blocks * _LANES, dtype=np.uint16)
    # per relevant item: (place inside its level << 16) | distance
    keys = np.zeros(total, dtype=np.uint64)
    # one more, because the levels are counted in pairs
    counts = np.zeros(levels + 1, dtype=np.uint64)
    rel_counts = np.zeros(levels, dtype=np.int64)
    items_before = np.zeros(levels, dtype=np.int64)
    for q in range(first, last):
        same = q > first
        for v in range(query_masks.shape[1]):
            same = same and query_masks[q, v] == query_masks[q - 1, v]
        if not same:
            _mark_relevant(query_masks[q], masks, most, marks, row_grades)
        counts[:] = 0
        rel_counts[:] = 0
        relevant = 0
        for start in range(0, total, SCAN_TILE):
            stop = min(start + SCAN_TILE, total)
            size = stop - start
            _tile_distances(queries[q], words, start, stop, distances)
            least = distances[0]
            greatest = distances[0]
            for i in range(size):
                least = min(least, distances[i])
                greatest = max(greatest, distances[i])
            padded = (size + _LANES - 1) // _LANES * _LANES
            distances[size:padded] = nowhere
            own = self_rows[q] - start
            if 0 <= own < size:
                distances[own] = nowhere
            for block in range(0, padded, _LANES):
                waiting = marks[(start + block) // _LANES]
                if block <= own < block + _LANES:
                    waiting &= ~(_ONE << np.uint64(own - block))
                while waiting:
                    # all bits below the lowest set bit
                    below = (waiting & (~waiting + _ONE)) - _ONE
                    i = block + np.int64(_popcount(below))
                    d = distances[i]
                    place = counts[d] + _popcount(_equal_mask(distances, block, d) & below)
                    keys[relevant] = (place << _SHIFT) | np.uint64(d)
                    rel_counts[d] += 1
                    relevant += 1
                    if most > 1:
                        grades[q, d, row_grades[start + i] - 1] += 1
                    waiting &= waiting - _ONE
                for level in range(np.int64(least), np.int64(greatest) + 1, 2):
                    even = distances.dtype.type(level)
                    odd = distances.dtype.type(level + 1)
                    at_even = _popcount(_equal_mask(distances, block, even))
                    at_odd = _popcount(_equal_mask(distances, block, odd))
                    counts[level] += at_even
                    counts[level + 1] += at_odd
        before = 0
        rel_before = 0
        for level in range(levels):
            items[q, level] = counts[level]
            items_before[level] = before
            before += items[q, level]
            inside = rel_counts[level]
            if most == 1:
                grades[q, level, 0] = inside
            rel_counts[level] = rel_before
            rel_before += inside
        value = 0.0
        found = 0
        for k in range(relevant):
            d = keys[k] & _DISTANCE
            rel_counts[d] += 1
            rank = items_before[d] + np.int64(keys[k] >> _SHIFT) + 1
            if rank <= top:
                value += rel_counts[d] / rank
                found += 1
        stable[q] = value
        stable_found[q] = found
