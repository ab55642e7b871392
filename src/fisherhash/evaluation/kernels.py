"""The numba kernels behind ``backend="numba"``; imported only when that backend runs.

They release the GIL and are called from plain threads: numba's own parallel layer would make a
later ``fork`` of the process unsafe and would compile for much longer.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numba
import numpy as np
from numba.core import types
from numba.extending import intrinsic

TILE = 2048

_SHIFT = np.uint64(16)
_ITEM = np.uint64(1 << 16)
_DISTANCE = np.uint64((1 << 16) - 1)


def _jit(function: Callable[..., Any]) -> Any:
    options: dict[str, Any] = {"nogil": True, "error_model": "numpy"}
    try:
        return numba.njit(cache=True, **options)(function)
    except RuntimeError:
        # numba found no folder it may write its cache to: compile in memory instead
        return numba.njit(**options)(function)


def _typed_popcount(typing_context: Any, word: Any) -> Any:
    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.ctpop(args[0])

    return types.uint64(types.uint64), emit


_popcount: Any = intrinsic(_typed_popcount)


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
def _relevant_rows(mask: Any, masks: Any, most: int, rows: Any, grades: Any) -> int:
    for j in range(masks.shape[1]):
        grades[j] = 0
    for v in range(masks.shape[0]):
        column = masks[v]
        word = mask[v]
        for j in range(masks.shape[1]):
            grades[j] += _popcount(column[j] & word)
    found = 0
    for j in range(masks.shape[1]):
        rows[found] = j
        if grades[j] > most:
            grades[j] = most
        found += grades[j] > 0
    return found


@_jit
def scan(
    queries: Any,
    words: Any,
    query_masks: Any,
    masks: Any,
    self_rows: Any,
    tops: Any,
    first: int,
    last: int,
    distances: Any,
    items: Any,
    grades: Any,
    stable: Any,
    stable_found: Any,
) -> None:
    """Fill the tie groups and the stable-order sums of the queries ``first`` to ``last``.

    queries (n_queries, words) and words (words, n_database) are uint64, as are the label masks
    query_masks (n_queries, v) and masks (v, n_database); queries with equal masks should follow
    each other. distances (2, TILE) is scratch of a type that can hold ``levels``. items
    (n_queries, levels) and grades (n_queries, levels, most), zero at the start, receive counts;
    stable (n_queries,) the sum of the precisions at the relevant ranks up to tops, and
    stable_found (n_queries,) the number of those ranks.
    """
    total = words.shape[1]
    levels = items.shape[1]
    most = grades.shape[2]
    # A counter holds (items seen << 16) | distance, so that one copy of it says all about an item.
    # There is one level more than a distance can be: only the query itself is counted there.
    counters = np.zeros((2, levels + 1), dtype=np.uint64)
    seen = np.zeros((2, TILE), dtype=np.uint64)
    keys = np.zeros((2, total), dtype=np.uint64)
    rows = np.zeros((2, total + 1), dtype=np.int32)
    row_grades = np.zeros((2, total), dtype=np.uint16)
    relevant = np.zeros(2, dtype=np.int64)
    cursors = np.zeros(2, dtype=np.int64)
    rel_counts = np.zeros(levels + 1, dtype=np.int64)
    items_before = np.zeros(levels + 1, dtype=np.int64)
    left_counters, right_counters = counters[0], counters[1]
    left_seen, right_seen = seen[0], seen[1]
    left_distances, right_distances = distances[0], distances[1]
    # two queries at a time: an increment of one need not wait for the last increment of the other
    for left in range(first, last, 2):
        right = min(left + 1, last - 1)
        for side in range(2):
            q = left if side == 0 else right
            same = left > first
            for v in range(query_masks.shape[1]):
                same = same and query_masks[q, v] == query_masks[left + side - 2, v]
            if not same:
                relevant[side] = _relevant_rows(
                    query_masks[q], masks, most, rows[side], row_grades[side]
                )
            for level in range(levels + 1):
                counters[side, level] = level
            cursors[side] = 0
        for start in range(0, total, TILE):
            stop = min(start + TILE, total)
            _tile_distances(queries[left], words, start, stop, left_distances)
            _tile_distances(queries[right], words, start, stop, right_distances)
            if start <= self_rows[left] < stop:
                left_distances[self_rows[left] - start] = levels
            if start <= self_rows[right] < stop:
                right_distances[self_rows[right] - start] = levels
            for i in range(stop - start):
                a = left_distances[i]
                b = right_distances[i]
                x = left_counters[a]
                y = right_counters[b]
                left_seen[i] = x
                right_seen[i] = y
                left_counters[a] = x + _ITEM
                right_counters[b] = y + _ITEM
            for side in range(2):
                side_rows, side_keys, side_seen = rows[side], keys[side], seen[side]
                begin = cursors[side]
                end = begin
                while end < relevant[side] and side_rows[end] < stop:
                    end += 1
                for k in range(begin, end):
                    side_keys[k] = side_seen[side_rows[k] - start]
                cursors[side] = end
        for side in range(right - left + 1):
            q = left + side
            side_keys = keys[side]
            rel_counts[:] = 0
            for k in range(relevant[side]):
                rel_counts[side_keys[k] & _DISTANCE] += 1
            before = 0
            rel_before = 0
            for level in range(levels):
                items[q, level] = counters[side, level] >> _SHIFT
                items_before[level] = before
                before += items[q, level]
                inside = rel_counts[level]
                if most == 1:
                    grades[q, level, 0] = inside
                rel_counts[level] = rel_before
                rel_before += inside
            # the query itself must fall behind every cut
            items_before[levels] = total + 1
            top = tops[q]
            value = 0.0
            found = 0
            for k in range(relevant[side]):
                d = side_keys[k] & _DISTANCE
                rel_counts[d] += 1
                rank = items_before[d] + np.int64(side_keys[k] >> _SHIFT) + 1
                if rank <= top:
                    value += rel_counts[d] / rank
                    found += 1
            stable[q] = value
            stable_found[q] = found
            if most > 1:
                side_rows, side_grades = rows[side], row_grades[side]
                for k in range(relevant[side]):
                    d = side_keys[k] & _DISTANCE
                    if d < levels:
                        grades[q, d, side_grades[side_rows[k]] - 1] += 1


@_jit
def nearest(
    queries: Any,
    words: Any,
    self_rows: Any,
    first: int,
    last: int,
    bits: int,
    ids: Any,
    distances: Any,
) -> None:
    """Fill ids and distances (n_queries, k) with the nearest rows by (distance, row)."""
    total = words.shape[1]
    k = ids.shape[1]
    row = np.zeros(total, dtype=np.uint16)
    counts = np.zeros(bits + 2, dtype=np.int64)
    for q in range(first, last):
        counts[:] = 0
        _tile_distances(queries[q], words, 0, total, row)
        if self_rows[q] >= 0:
            row[self_rows[q]] = bits + 1
        for j in range(total):
            counts[row[j]] += 1
        before = 0
        limit = bits
        for level in range(bits + 1):
            inside = counts[level]
            counts[level] = before
            before += inside
            if before >= k:
                limit = level
                break
        for j in range(total):
            d = row[j]
            if d <= limit:
                place = counts[d]
                if place < k:
                    ids[q, place] = j
                    distances[q, place] = d
                    counts[d] = place + 1
