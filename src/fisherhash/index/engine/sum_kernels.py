"""The numba kernels of searches by the sum of two distances; see kernels.py for the terms.

A sum is cost + weight * fine distance, where the cost is that of the first code. A search first
finds what costs no more than the k-th sum so far, then reads second codes. These are laid out in
the order of the first table's buckets, so that those of equal and of similar first codes lie
together. An *entry* of 8 bytes says where those of an item are: in its lower half the first place,
and LISTED where there are several; in its upper half their number, or the sketch of the only one.

A *sketch* of 32 bits is the exclusive or of the halves of all words of a second code. It changes by
one bit when the code does, so that two codes differ by at least as much as their sketches.

Rows (room, 4) of (sum, position, cost, fine distance) collect the results of a query; at least the
k best so far are among them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic

from fisherhash.index.engine import kernels
from fisherhash.index.engine.kernels import (
    _AHEAD,
    _I32,
    _I64,
    _ITEM,
    _ITEM_BITS,
    _ONE,
    COMPLETE,
    SCAN_LANES,
    TOO_DEAR,
    _apart,
    _below_mask,
    _block_below,
    _block_cheap,
    _data,
    _fill_bounds,
    _fill_halves,
    _key,
    _load,
    _lowest,
    _next_pattern,
    _order_bits,
    _popcount,
    _popcounts,
    _prefetch,
    _sort,
    _spread,
)
from fisherhash.index.engine.layout import PLANE_BLOCK, WORD_GROUP

LEVELS = 2048
"""Steps in which the sums found so far are counted."""
# second codes that are compared at once
FINE_GROUP = 16
# bits of a quantised weight
_PLANES = 4
# items that wait for their entries, and those that wait for their second codes
_QUEUE = 512
_PENDING = 64
# distances of second codes from which on sketches leave out too few of them
_LOOSE = 8
# more than second codes can differ by
_ALL = 1 << 20
# more effort than there is budget
_NEVER = 1 << 61
# in codes that a plain search compares, what it costs to compare a code where all bits cost the
# same and where they do not
_COMPARED, _COMPARED_WEIGHTED = 3, 5
# the same for an item that is near enough, one whose second codes are read, and each of these
_NEAR, _READ, _READ_EACH = 64, 256, 8
# places in the state of a query
_COUNT, _FOUND, _CUT, _BOUND, _WORK = range(5)
_MOST_SUM = (1 << 63) - 1
_LISTED = np.uint64(1 << 31)
_BEGIN = np.uint64((1 << 31) - 1)


def _jit(function: Callable[..., Any]) -> Any:
    """Like that of kernels.py, but compiled again when that file has changed, too."""
    compiled = kernels._jit(function)
    files = getattr(getattr(compiled, "_cache", None), "_cache_file", None)
    stamp = getattr(files, "_source_stamp", None)
    others = getattr(getattr(kernels.fill_planes, "_cache", None), "_cache_file", None)
    if files is not None and stamp is not None:
        files._source_stamp = (stamp, getattr(others, "_source_stamp", None))
    return compiled


def _typed_pair_mask(
    typing_context: Any, fine: Any, place: Any, first: Any, second: Any, most: Any
) -> Any:
    """A bit for each of the FINE_GROUP rows of fine (n, 2) from ``place`` on: is it near enough?

    Its distance from (first, second) is then at most ``most``.
    """

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        data = _data(context, builder, signature.args[0], args[0])
        group = ir.VectorType(_I64, 2 * FINE_GROUP)
        codes = _load(builder, builder.gep(data, [builder.mul(args[1], _I64(2))]), group)
        nothing = ir.Constant(group, ir.Undefined)
        pair = builder.insert_element(nothing, args[2], _I32(0))
        pair = builder.insert_element(pair, args[3], _I32(1))

        def lanes(vector: Any, numbers: list[int]) -> Any:
            chosen = ir.Constant(ir.VectorType(_I32, len(numbers)), numbers)
            return builder.shuffle_vector(vector, nothing, chosen)

        own = lanes(pair, [0, 1] * FINE_GROUP)
        counts = _popcounts(builder, builder.xor(codes, own))
        halves = (lanes(counts, list(range(i, 2 * FINE_GROUP, 2))) for i in range(2))
        limit = _spread(builder, args[4], FINE_GROUP)
        near = builder.icmp_unsigned("<=", builder.add(*halves), limit)
        return builder.zext(builder.bitcast(near, ir.IntType(FINE_GROUP)), _I64)

    word = types.uint64
    return types.uint64(fine, types.int64, word, word, word), emit


def _typed_sketch_mask(
    typing_context: Any, sketches: Any, place: Any, own: Any, most: Any
) -> Any:  # fmt: skip
    """The same for sketches (n,): does each of FINE_GROUP differ in at most ``most`` bits?"""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        data = _data(context, builder, signature.args[0], args[0])
        group = ir.VectorType(_I32, FINE_GROUP)
        others = _load(builder, builder.gep(data, [args[1]]), group)
        own, limit = (_spread(builder, builder.trunc(arg, _I32), FINE_GROUP) for arg in args[2:])
        counts = _popcounts(builder, builder.xor(others, own))
        near = builder.icmp_unsigned("<=", counts, limit)
        return builder.zext(builder.bitcast(near, ir.IntType(FINE_GROUP)), _I64)

    return types.uint64(sketches, types.int64, types.uint64, types.uint64), emit


def _typed_new_mask(
    typing_context: Any,
    words: Any,
    place: Any,
    stride: Any,
    query: Any,
    most: Any,
    parts: Any,
    bounds: Any,
    distances: Any,
) -> Any:
    """A bit for each of the WORD_GROUP codes from ``place`` on: is it near, and met only now?

    Its distance is at most ``most``, and in each table's part of it at least that of bounds
    (tables,), or an earlier step has met it. parts (tables, words) mark the bits of the tables;
    the codes are those of ``_near_mask``. distances (WORD_GROUP,) receive those of the codes if one
    of them is near.
    """

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        data, marks, least, into = (
            _data(context, builder, signature.args[i], args[i]) for i in (0, 5, 6, 7)
        )
        queries = context.make_array(signature.args[3])(context, builder, args[3])
        count = builder.extract_value(queries.shape, 0)
        tables = builder.extract_value(
            context.make_array(signature.args[6])(context, builder, args[6]).shape, 0
        )
        element = context.get_value_type(signature.args[0].dtype)
        group, mask = ir.VectorType(element, WORD_GROUP), ir.IntType(WORD_GROUP)
        sums = cgutils.alloca_once(builder, group)

        def differing(word: Any) -> Any:
            at = builder.add(args[1], builder.mul(word, args[2]))
            codes = _load(builder, builder.gep(data, [at]), group)
            own = builder.load(builder.gep(queries.data, [word]))
            return builder.xor(codes, _spread(builder, own, WORD_GROUP))

        def add(bits: Any) -> None:
            builder.store(builder.add(builder.load(sums), _popcounts(builder, bits)), sums)

        builder.store(ir.Constant(group, None), sums)
        with cgutils.for_range(builder, count) as loop:
            add(differing(loop.index))
        apart = builder.load(sums)
        near = builder.icmp_unsigned("<=", apart, _spread(builder, args[4], WORD_GROUP))
        result = cgutils.alloca_once_value(builder, builder.bitcast(near, mask))
        with builder.if_then(builder.icmp_unsigned("!=", builder.load(result), mask(0))):
            stored = builder.store(apart, builder.bitcast(into, group.as_pointer()))
            stored.align = 1
            with cgutils.for_range(builder, tables) as table:
                bound = builder.load(builder.gep(least, [table.index]))
                with builder.if_then(builder.icmp_unsigned("!=", bound, element(0))):
                    builder.store(ir.Constant(group, None), sums)
                    with cgutils.for_range(builder, count) as loop:
                        at = builder.add(builder.mul(table.index, count), loop.index)
                        marked = builder.load(builder.gep(marks, [at]))
                        marked = _spread(builder, marked, WORD_GROUP)
                        add(builder.and_(differing(loop.index), marked))
                    bound = _spread(builder, bound, WORD_GROUP)
                    new = builder.icmp_unsigned(">=", builder.load(sums), bound)
                    new = builder.and_(builder.load(result), builder.bitcast(new, mask))
                    builder.store(new, result)
        return builder.zext(builder.load(result), _I64)

    integer = types.int64
    return types.uint64(words, integer, integer, query, words.dtype, parts, bounds, distances), emit


def _typed_light_mask(
    typing_context: Any, words: Any, place: Any, stride: Any, query: Any, planes: Any, most: Any
) -> Any:
    """A bit for each of the WORD_GROUP codes from ``place`` on: is its weight at most ``most``?

    The weight of a bit that differs is a number of _PLANES bits, of which planes (_PLANES, words)
    hold one each. The codes are those of ``_near_mask``.
    """

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        data, marks = (_data(context, builder, signature.args[i], args[i]) for i in (0, 4))
        queries = context.make_array(signature.args[3])(context, builder, args[3])
        count = builder.extract_value(queries.shape, 0)
        element = context.get_value_type(signature.args[0].dtype)
        group = ir.VectorType(element, WORD_GROUP)
        sums = cgutils.alloca_once(builder, group)
        builder.store(ir.Constant(group, None), sums)
        with cgutils.for_range(builder, count) as loop:
            at = builder.add(args[1], builder.mul(loop.index, args[2]))
            codes = _load(builder, builder.gep(data, [at]), group)
            own = builder.load(builder.gep(queries.data, [loop.index]))
            other = builder.xor(codes, _spread(builder, own, WORD_GROUP))
            total = builder.load(sums)
            for plane in range(_PLANES):
                at = builder.add(builder.mul(_I64(plane), count), loop.index)
                marked = builder.load(builder.gep(marks, [at]))
                counts = builder.and_(other, _spread(builder, marked, WORD_GROUP))
                counts = _popcounts(builder, counts)
                shift = ir.Constant(group, [plane] * WORD_GROUP)
                total = builder.add(total, builder.shl(counts, shift))
            builder.store(total, sums)
        limit = _spread(builder, args[5], WORD_GROUP)
        light = builder.icmp_unsigned("<=", builder.load(sums), limit)
        return builder.zext(builder.bitcast(light, ir.IntType(WORD_GROUP)), _I64)

    integer = types.int64
    return types.uint64(words, integer, integer, query, planes, words.dtype), emit


_pair_mask: Any = intrinsic(_typed_pair_mask)
_sketch_mask: Any = intrinsic(_typed_sketch_mask)
_new_mask: Any = intrinsic(_typed_new_mask)
_light_mask: Any = intrinsic(_typed_light_mask)


@_jit
def _sketch(code: Any) -> Any:
    """The sketch of a second code."""
    folded = np.uint64(0)
    for word in code:
        folded ^= word
    return (folded ^ (folded >> _ITEM_BITS)) & _ITEM


@_jit
def fill_places(order: Any, begins: Any, starts: Any, positions: Any, places: Any) -> None:
    """Write the lists of the items of ``order`` one after the other, from begins (order,) on."""
    for i in range(len(order)):
        item = np.int64(order[i])
        at = np.int64(begins[i])
        for place in range(np.int64(starts[item]), np.int64(starts[item + 1])):
            places[at] = positions[place]
            at += 1


@_jit
def fill_entries(
    order: Any, begins: Any, starts: Any, fine: Any, sketches: Any, entries: Any
) -> None:  # fmt: skip
    """The entries (items,) of the items of ``order``, whose second codes begin at ``begins``.

    And the sketches of these.
    """
    for i in range(len(order)):
        item = np.int64(order[i])
        begin = np.int64(begins[i])
        count = np.int64(1)
        if len(starts):
            count = np.int64(starts[item + 1]) - np.int64(starts[item])
        for place in range(begin, begin + count):
            sketches[place] = _sketch(fine[place])
        if count == 1:
            entries[item] = (np.uint64(sketches[begin]) << _ITEM_BITS) | np.uint64(begin)
        else:
            entries[item] = (np.uint64(count) << _ITEM_BITS) | _LISTED | np.uint64(begin)


@_jit
def _begin(totals: Any, state: Any, bound: int) -> None:
    totals[:] = 0
    state[_COUNT] = 0
    state[_FOUND] = 0
    state[_CUT] = len(totals) - 1
    state[_BOUND] = bound
    state[_WORK] = 0


@_jit
def _most(state: Any, shift: int) -> Any:
    """The highest sum that may still be needed."""
    return min(((state[_CUT] + 1) << shift) - 1, state[_BOUND])


@_jit
def _shift(highest: int, fine_weight: int, words: int) -> Any:
    """By how many bits sums are shortened to the number of a level; costs are up to ``highest``."""
    total = highest + fine_weight * 64 * words
    shift = np.int64(0)
    while total >> shift >= LEVELS:
        shift += 1
    return shift


@_jit
def _follows(rows: Any, one: int, total: int, position: int) -> bool:
    return rows[one, 0] > total or (rows[one, 0] == total and rows[one, 1] > position)


@_jit
def _sort_rows(rows: Any, count: int) -> None:
    """Sort by (sum, position), with gaps that shrink."""
    gap = np.int64(1)
    while 3 * gap < count:
        gap = 3 * gap + 1
    while gap:
        for i in range(gap, count):
            total = rows[i, 0]
            position = rows[i, 1]
            if not _follows(rows, i - gap, total, position):
                continue
            cost = rows[i, 2]
            apart = rows[i, 3]
            at = i
            while at >= gap and _follows(rows, at - gap, total, position):
                for column in range(4):
                    rows[at, column] = rows[at - gap, column]
                at -= gap
            rows[at, 0] = total
            rows[at, 1] = position
            rows[at, 2] = cost
            rows[at, 3] = apart
        gap //= 3


@_jit
def _drop(rows: Any, state: Any, shift: int) -> None:
    """Leave out rows that are no longer needed."""
    most = _most(state, shift)
    kept = np.int64(0)
    for i in range(state[_COUNT]):
        if rows[i, 0] <= most:
            for column in range(4):
                rows[kept, column] = rows[i, column]
            kept += 1
    state[_COUNT] = kept


@_jit
def _make_room(rows: Any, state: Any, shift: int, k: int) -> None:
    """Leave at most half of the rows, but the k best."""
    _drop(rows, state, shift)
    if 2 * state[_COUNT] > len(rows):
        _sort_rows(rows, state[_COUNT])
        state[_COUNT] = k
        state[_BOUND] = min(state[_BOUND], rows[k - 1, 0])


@_jit
def _read(
    close: Any,
    count: int,
    fine: Any,
    places: Any,
    query: Any,
    weight: int,
    shift: int,
    k: int,
    rows: Any,
    state: Any,
    totals: Any,
) -> None:
    """Compare second codes, close (cost, place), and keep the best."""
    most = _most(state, shift)
    for i in range(count):
        cost = close[i, 0]
        place = close[i, 1]
        apart = _apart(fine, place, query)
        total = cost + weight * apart
        if total > most:
            continue
        if state[_COUNT] == len(rows):
            _make_room(rows, state, shift, k)
        row = state[_COUNT]
        rows[row, 0] = total
        rows[row, 1] = np.int64(places[place])
        rows[row, 2] = cost
        rows[row, 3] = apart
        state[_COUNT] = row + 1
        totals[total >> shift] += 1
        found = state[_FOUND] + 1
        cut = state[_CUT]
        while found - totals[cut] >= k:
            found -= totals[cut]
            cut -= 1
        state[_FOUND] = found
        if cut < state[_CUT]:
            state[_CUT] = cut
            most = _most(state, shift)


@_jit
def _sift(
    keys: Any, count: int, entries: Any, offset: int, sketch: Any, weight: int, most: int
) -> Any:  # fmt: skip
    """Leave out keys, see ``_take``, that the sketches alone say are too far away; their number.

    Without branches, which no processor could foresee here.
    """
    kept = np.int64(0)
    for i in range(count):
        entry = entries[offset + np.int64(keys[i] & _ITEM)]
        apart = np.int64(_popcount((entry >> _ITEM_BITS) ^ sketch))
        total = np.int64(keys[i] >> _ITEM_BITS) + weight * (0 if entry & _LISTED else apart)
        keys[kept] = keys[i]
        kept += total <= most
    return kept


@_jit
def _take(
    keys: Any,
    count: int,
    spare: Any,
    entries: Any,
    offset: int,
    pending: Any,
    close: Any,
    fine: Any,
    places: Any,
    sketches: Any,
    query: Any,
    sketch: Any,
    weight: int,
    shift: int,
    k: int,
    rows: Any,
    state: Any,
    totals: Any,
) -> None:
    """Take items into the rows: keys are (cost << 32 | number), entries from offset on by number.

    Costs above the highest sum are passed over. Lists wait in pending (cost, first place, number)
    for their sketches, and what is left of them for its second codes.
    """
    if state[_FOUND] < k:
        # so that the bound is low from the start
        _sort(keys, spare, count, np.int64(32), np.int64(64))
    count = _sift(keys, count, entries, offset, sketch, weight, _most(state, shift))
    words = fine.shape[1]
    at = np.int64(0)
    left = np.int64(0)
    while at < count:
        waiting = np.int64(0)
        most = _most(state, shift)
        while at < count and waiting < _PENDING and left < _PENDING:
            cost = np.int64(keys[at] >> _ITEM_BITS)
            entry = entries[offset + np.int64(keys[at] & _ITEM)]
            at += 1
            if cost > most:
                continue
            begin = np.int64(entry & _BEGIN)
            if entry & _LISTED:
                # the processor itself foresees what is read beyond the first group
                if words == 2 and most - cost >= _LOOSE * weight:
                    for place in range(begin, begin + FINE_GROUP + 1, 4):
                        _prefetch(fine, 2 * place)
                else:
                    _prefetch(sketches, begin)
                    _prefetch(sketches, begin + FINE_GROUP - 1)
                pending[waiting, 0] = cost
                pending[waiting, 1] = begin
                pending[waiting, 2] = np.int64(entry >> _ITEM_BITS)
                waiting += 1
            else:
                _prefetch(fine, begin * words)
                _prefetch(places, begin)
                close[left, 0] = cost
                close[left, 1] = begin
                left += 1
        for i in range(waiting):
            cost = pending[i, 0]
            begin = pending[i, 1]
            end = begin + pending[i, 2]
            state[_WORK] += _READ + _READ_EACH * (end - begin)
            for group in range(begin, end, FINE_GROUP):
                if cost > most:
                    break
                reach = np.uint64(min((most - cost) // weight if weight else _ALL, _ALL))
                if words == 2 and reach >= _LOOSE:
                    mask = _pair_mask(fine, group, query[0], query[1], reach)
                else:
                    mask = _sketch_mask(sketches, group, sketch, reach)
                if end - group < FINE_GROUP:
                    mask &= (_ONE << np.uint64(end - group)) - _ONE
                while mask:
                    place = group + _lowest(mask)
                    mask &= mask - _ONE
                    _prefetch(fine, place * words)
                    _prefetch(places, place)
                    close[left, 0] = cost
                    close[left, 1] = place
                    left += 1
                if left > _PENDING:
                    _read(close, left, fine, places, query, weight, shift, k, rows, state, totals)
                    left = np.int64(0)
                    most = _most(state, shift)
        state[_WORK] += _READ * left
        _read(close, left, fine, places, query, weight, shift, k, rows, state, totals)
        left = np.int64(0)


@_jit
def _finish(
    rows: Any, state: Any, shift: int, found: Any, costs: Any, fines: Any
) -> None:  # fmt: skip
    """Fill one query's results (k,) from its rows."""
    _drop(rows, state, shift)
    _sort_rows(rows, state[_COUNT])
    for i in range(min(len(found), state[_COUNT])):
        found[i] = rows[i, 1]
        costs[i] = rows[i, 2]
        fines[i] = rows[i, 3]


@_jit
def _farthest(state: Any, shift: int, equal: int, bits: int) -> Any:
    """The largest distance of first codes that may still be needed, if all bits cost the same."""
    return min(_most(state, shift) // equal, bits) if equal else bits


@_jit
def _effort(
    directory: Any, table: int, own: int, masks: Any, offsets: Any, radius: int, lookup: int
) -> Any:
    """What it takes to look up all bucket numbers that differ from a table's own in radius bits."""
    if radius + 1 >= len(offsets):
        return np.int64(_NEVER)
    effort = (offsets[radius + 1] - offsets[radius]) * lookup
    for m in range(offsets[radius], offsets[radius + 1]):
        number = own ^ np.int64(masks[m])
        inside = np.int64(directory[table, number + 1]) - np.int64(directory[table, number])
        effort += inside * _COMPARED
    return effort


@_jit
def _probe_equal(
    query: Any,
    equal: int,
    directory: Any,
    words: Any,
    stride: int,
    masks: Any,
    offsets: Any,
    length: int,
    bits: int,
    budget: int,
    lookup: int,
    parts: Any,
    reached: Any,
    bounds: Any,
    distances: Any,
    efforts: Any,
    entries: Any,
    queue: Any,
    spare: Any,
    pending: Any,
    close: Any,
    fine: Any,
    places: Any,
    sketches: Any,
    fine_query: Any,
    sketch: Any,
    weight: int,
    shift: int,
    k: int,
    rows: Any,
    state: Any,
    totals: Any,
) -> Any:
    """Find the best sums of one query whose bits all cost the same; ends like ``_probe``.

    A step looks up the bucket numbers that differ in one bit more than those before, in the table
    where that takes the least effort. reached (tables,) counts the steps: what has not been met
    differs in at least that many bits of a table's part. Masks are those of ``_probe``; parts,
    bounds and distances those of ``_new_mask``.
    """
    tables = len(directory)
    width = len(entries) // tables
    for table in range(tables):
        reached[table] = 0
        own = _key(query, table * length, length)
        efforts[table] = _effort(directory, table, own, masks, offsets, np.int64(0), lookup)
    work = np.int64(0)
    met = np.int64(-1)
    limit = _farthest(state, shift, equal, bits)
    while met < limit:
        table = np.argmin(efforts)
        work += efforts[table]
        if work + state[_WORK] > budget:
            return TOO_DEAR
        radius = np.int64(reached[table])
        for t in range(tables):
            bounds[t] = reached[t]
        bounds[table] = 0
        base = table * len(query) * stride
        own = _key(query, table * length, length)
        offset = table * width
        last = offsets[radius + 1]
        waiting = np.int64(0)
        for m in range(offsets[radius], last):
            ahead = own ^ np.int64(masks[min(m + 2 * _AHEAD, last - 1)])
            _prefetch(directory, table * directory.shape[1] + ahead)
            ahead = own ^ np.int64(masks[min(m + _AHEAD, last - 1)])
            bucket = base + np.int64(directory[table, ahead])
            _prefetch(words, bucket)
            _prefetch(words, bucket + 8)
            number = own ^ np.int64(masks[m])
            start = np.int64(directory[table, number])
            stop = np.int64(directory[table, number + 1])
            for group in range(start, stop, WORD_GROUP):
                near = words.dtype.type(limit)
                mask = _new_mask(
                    words, base + group, stride, query, near, parts, bounds, distances
                )  # fmt: skip
                if stop - group < WORD_GROUP:
                    mask &= (_ONE << np.uint64(stop - group)) - _ONE
                while mask:
                    lane = _lowest(mask)
                    mask &= mask - _ONE
                    _prefetch(entries, offset + group + lane)
                    cost = np.uint64(equal) * np.uint64(distances[lane])
                    queue[waiting] = (cost << _ITEM_BITS) | np.uint64(group + lane)
                    waiting += 1
                if waiting > _QUEUE - WORD_GROUP:
                    _take(
                        queue, waiting, spare, entries, offset, pending, close, fine, places,
                        sketches, fine_query, sketch, weight, shift, k, rows, state, totals,
                    )  # fmt: skip
                    work += waiting * _NEAR
                    waiting = np.int64(0)
                    limit = _farthest(state, shift, equal, bits)
                    if work + state[_WORK] > budget:
                        return TOO_DEAR
        _take(
            queue, waiting, spare, entries, offset, pending, close, fine, places, sketches,
            fine_query, sketch, weight, shift, k, rows, state, totals,
        )  # fmt: skip
        work += waiting * _NEAR
        limit = _farthest(state, shift, equal, bits)
        met += 1
        if radius == length:
            return COMPLETE
        reached[table] = radius + 1
        efforts[table] = _effort(directory, table, own, masks, offsets, radius + 1, lookup)
    return COMPLETE


@_jit
def _fill_planes(by_bit: Any, limit: int, planes: Any) -> Any:
    """Weights in units, rounded down, as planes of their bits; the unit.

    What costs more than ``limit`` counts as if it cost little more.
    """
    largest = np.int64(0)
    for weight in by_bit:
        largest = max(largest, min(weight, limit + 1))
    unit = largest // ((1 << _PLANES) - 1) + 1
    size = 8 * planes.itemsize
    for w in range(planes.shape[1]):
        for plane in range(_PLANES):
            marked = planes.dtype.type(0)
            for i in range(size):
                level = np.uint64(min(by_bit[w * size + i], limit + 1) // unit)
                bit = planes.dtype.type((level >> np.uint64(plane)) & _ONE)
                marked |= bit << planes.dtype.type(i)
            planes[plane, w] = marked
    return unit


@_jit
def _costs(
    query: Any,
    by_bit: Any,
    words: Any,
    base: int,
    stride: int,
    length: int,
    table: int,
    seen: Any,
    other: Any,
    queue: Any,
    waiting: int,
    most: int,
    entries: Any,
    offset: int,
) -> Any:
    """Turn places that wait in the queue into keys of what is new and cheap; their number."""
    size = 8 * words.itemsize
    kept = np.int64(0)
    for i in range(waiting):
        place = np.int64(queue[i])
        cost = np.int64(0)
        for w in range(len(query)):
            other[w] = query[w] ^ words[base + w * stride + place]
            left = np.uint64(other[w])
            while left:
                cost += by_bit[w * size + _lowest(left)]
                left &= left - _ONE
        if cost > most:
            continue
        new = True
        for t in range(len(seen)):
            if t != table:
                pattern = _key(other, t * length, length)
                if (seen[t, pattern >> 6] >> np.uint64(pattern & 63)) & _ONE:
                    new = False
                    break
        if new:
            _prefetch(entries, offset + place)
            queue[kept] = (np.uint64(cost) << _ITEM_BITS) | np.uint64(place)
            kept += 1
    return kept


@_jit
def _probe_weighted(
    query: Any,
    by_bit: Any,
    weights: Any,
    directory: Any,
    words: Any,
    stride: int,
    length: int,
    budget: int,
    lookup: int,
    rising: Any,
    patterns: Any,
    heaps: Any,
    looked: Any,
    seen: Any,
    planes: Any,
    other: Any,
    entries: Any,
    queue: Any,
    spare: Any,
    pending: Any,
    close: Any,
    fine: Any,
    places: Any,
    sketches: Any,
    fine_query: Any,
    sketch: Any,
    weight: int,
    shift: int,
    k: int,
    rows: Any,
    state: Any,
    totals: Any,
) -> Any:
    """Find the best sums of one query; look-ups and end are those of ``_probe_ranked``."""
    tables = len(directory)
    width = len(entries) // tables
    room = heaps.shape[1]
    sizes = np.zeros(tables, dtype=np.int64)
    counts = np.zeros(tables, dtype=np.int64)
    nexts = np.zeros(tables, dtype=np.int64)
    own = np.zeros(tables, dtype=np.int64)
    _order_bits(query, weights, length, own, rising, patterns)
    work = np.int64(0)
    most = min(_most(state, shift), weights.sum())
    rated = most
    unit = _fill_planes(by_bit, most, planes)
    table = 0
    reached = np.int64(-1)
    waiting = np.int64(0)
    end = -1
    while end < 0:
        if nexts[table] > reached:
            for t in range(tables):
                if counts[t] < counts[table]:
                    table = t
        reached, pattern = _next_pattern(
            table,
            length,
            directory,
            own,
            rising,
            patterns,
            heaps,
            sizes,
            counts,
            looked,
            seen,
            nexts,
        )
        number = own[table] ^ pattern
        start = np.int64(directory[table, number])
        stop = np.int64(directory[table, number + 1])
        work += lookup + (stop - start) * _COMPARED_WEIGHTED
        base = table * len(query) * stride
        group = start
        while group < stop and end < 0:
            light = words.dtype.type(min(most // unit, 1 << 30))
            while group < stop and waiting <= _QUEUE - WORD_GROUP:
                mask = _light_mask(words, base + group, stride, query, planes, light)
                if stop - group < WORD_GROUP:
                    mask &= (_ONE << np.uint64(stop - group)) - _ONE
                while mask:
                    queue[waiting] = np.uint64(group + _lowest(mask))
                    mask &= mask - _ONE
                    waiting += 1
                group += WORD_GROUP
            work += waiting * _NEAR
            waiting = _costs(
                query, by_bit, words, base, stride, length, table, seen, other, queue, waiting,
                most, entries, table * width,
            )  # fmt: skip
            _take(
                queue, waiting, spare, entries, table * width, pending, close, fine, places,
                sketches, fine_query, sketch, weight, shift, k, rows, state, totals,
            )  # fmt: skip
            waiting = np.int64(0)
            most = min(most, _most(state, shift))
            if 8 * most < 7 * rated:
                rated = most
                unit = _fill_planes(by_bit, most, planes)
            if work + state[_WORK] > budget:
                end = TOO_DEAR
        if end < 0:
            least = np.int64(0)
            for t in range(tables):
                least += nexts[t]
            if sizes[table] == 0 or least > most:
                end = COMPLETE
            elif (
                sizes[table] + 2 > room or counts[table] == room or work + state[_WORK] > budget
            ):  # fmt: skip
                end = TOO_DEAR
    for table in range(tables):
        for i in range(counts[table]):
            seen[table, looked[table, i] >> 6] = 0
    return end


@_jit
def _equal(weights: Any) -> Any:
    """What every bit costs, or 0 where they differ."""
    for weight in weights:
        if weight != weights[0]:
            return np.int64(0)
    return weights[0]


@_jit
def probe_equal_sums(
    order: Any,
    queries: Any,
    weights: Any,
    fine_queries: Any,
    fine_weights: Any,
    directory: Any,
    words: Any,
    stride: int,
    length: int,
    bits: int,
    masks: Any,
    offsets: Any,
    budget: int,
    lookup: int,
    entries: Any,
    fine: Any,
    places: Any,
    sketches: Any,
    found: Any,
    costs: Any,
    fines: Any,
    done: Any,
    tally: Any,
) -> None:
    """Fill found, costs and fines (n_queries, k) for the queries whose numbers are in ``order``.

    queries (n_queries, words), weights (n_queries, 1) of all bits, fine_queries (n_queries, fine
    words) and fine_weights (n_queries,); done and tally are those of ``probe_nearest``. entries
    (tables * width,) are in the order of the buckets; fine (positions, fine words) and places
    (positions,) in their own, with FINE_GROUP rows of fine more.
    """
    k = found.shape[1]
    tables = len(directory)
    size = 8 * words.itemsize
    queue = np.empty(_QUEUE + WORD_GROUP, dtype=np.uint64)
    spare = np.empty(_QUEUE + WORD_GROUP, dtype=np.uint64)
    pending = np.empty((_PENDING, 3), dtype=np.int64)
    close = np.empty((_PENDING + FINE_GROUP + 1, 2), dtype=np.int64)
    rows = np.empty((2 * k + 512, 4), dtype=np.int64)
    state = np.zeros(5, dtype=np.int64)
    totals = np.zeros(LEVELS, dtype=np.int64)
    parts = np.zeros((tables, queries.shape[1]), dtype=queries.dtype)
    bounds = np.zeros(tables, dtype=queries.dtype)
    distances = np.zeros(WORD_GROUP, dtype=queries.dtype)
    reached = np.zeros(tables, dtype=np.int64)
    efforts = np.zeros(tables, dtype=np.int64)
    kind: Any = queries.dtype.type
    for bit in range(tables * length):
        parts[bit // length, bit // size] |= kind(1) << kind(size - 1 - bit % size)
    for q in order:
        weight = fine_weights[q]
        shift = _shift(weights[q, 0] * bits, weight, fine.shape[1])
        sketch = _sketch(fine_queries[q])
        _begin(totals, state, _MOST_SUM)
        end = _probe_equal(
            queries[q], weights[q, 0], directory, words, stride, masks, offsets, length, bits,
            budget, lookup, parts, reached, bounds, distances, efforts, entries, queue, spare,
            pending, close, fine, places, sketches, fine_queries[q], sketch, weight, shift, k,
            rows, state, totals,
        )  # fmt: skip
        if end == COMPLETE:
            _finish(rows, state, shift, found[q], costs[q], fines[q])
            done[q] = 1
        else:
            tally[1] += 1
        tally[0] += 1
        if tally[1] >= 4 and 2 * tally[1] > tally[0]:
            break


@_jit
def probe_weighted_sums(
    order: Any,
    queries: Any,
    weights: Any,
    fine_queries: Any,
    fine_weights: Any,
    directory: Any,
    words: Any,
    stride: int,
    length: int,
    room: int,
    budget: int,
    lookup: int,
    entries: Any,
    fine: Any,
    places: Any,
    sketches: Any,
    found: Any,
    costs: Any,
    fines: Any,
    done: Any,
    tally: Any,
) -> None:
    """The same for weights (n_queries, bits); ``room`` is that of ``probe_ranked``."""
    k = found.shape[1]
    tables = len(directory)
    bits = weights.shape[1]
    size = 8 * words.itemsize
    queue = np.empty(_QUEUE + WORD_GROUP, dtype=np.uint64)
    spare = np.empty(_QUEUE + WORD_GROUP, dtype=np.uint64)
    pending = np.empty((_PENDING, 3), dtype=np.int64)
    close = np.empty((_PENDING + FINE_GROUP + 1, 2), dtype=np.int64)
    rows = np.empty((2 * k + 512, 4), dtype=np.int64)
    state = np.zeros(5, dtype=np.int64)
    totals = np.zeros(LEVELS, dtype=np.int64)
    by_bit = np.zeros(size * queries.shape[1], dtype=np.int64)
    rising = np.zeros((tables, length), dtype=np.int64)
    patterns = np.zeros((tables, length), dtype=np.int64)
    heaps = np.empty((tables, room + 2), dtype=np.uint64)
    looked = np.empty((tables, room + 2), dtype=np.int64)
    seen = np.zeros((tables, ((1 << length) + 63) >> 6), dtype=np.uint64)
    planes = np.zeros((_PLANES, queries.shape[1]), dtype=queries.dtype)
    other = np.zeros(queries.shape[1], dtype=queries.dtype)
    for q in order:
        weight = fine_weights[q]
        shift = _shift(weights[q].sum(), weight, fine.shape[1])
        sketch = _sketch(fine_queries[q])
        _begin(totals, state, _MOST_SUM)
        for bit in range(bits):
            by_bit[(bit // size + 1) * size - 1 - bit % size] = weights[q, bit]
        end = _probe_weighted(
            queries[q], by_bit, weights[q], directory, words, stride, length, budget, lookup,
            rising, patterns, heaps, looked, seen, planes, other, entries, queue, spare, pending,
            close, fine, places, sketches, fine_queries[q], sketch, weight, shift, k, rows, state,
            totals,
        )  # fmt: skip
        if end == COMPLETE:
            _finish(rows, state, shift, found[q], costs[q], fines[q])
            done[q] = 1
        else:
            tally[1] += 1
        tally[0] += 1
        if tally[1] >= 4 and 2 * tally[1] > tally[0]:
            break


@_jit
def scan_sums(
    queries: Any,
    weights: Any,
    fine_queries: Any,
    fine_weights: Any,
    most: Any,
    planes: Any,
    total: int,
    entries: Any,
    fine: Any,
    places: Any,
    sketches: Any,
    first: int,
    last: int,
    tile: int,
    k: int,
    distances: Any,
    block: Any,
    rows: Any,
    counts: Any,
) -> None:
    """Collect what has the least sums among the items of the blocks ``first`` to ``last``.

    queries (b, width), weights (b, bits), fine_queries (b, words) and fine_weights (b,); sums above
    most (b,) are left out. entries (items,) are by item. rows (b, room, 4) and counts (b,) receive
    the best of each query, sorted. Codes are compared as in ``scan_nearest`` where all bits cost
    the same, and as in ``scan_ranked`` where they do not.
    """
    width = queries.shape[1]
    bits = weights.shape[1]
    halves = np.zeros((len(queries), 2 * width, 16), dtype=np.int64)
    bounds = np.zeros((len(queries), 2 * width, 16), dtype=np.uint8)
    units = np.ones(len(queries), dtype=np.int64)
    rated = np.zeros(len(queries), dtype=np.int64)
    equals = np.zeros(len(queries), dtype=np.int64)
    shifts = np.zeros(len(queries), dtype=np.int64)
    own_sketches = np.zeros(len(queries), dtype=np.uint64)
    states = np.zeros((len(queries), 5), dtype=np.int64)
    totals = np.zeros((len(queries), LEVELS), dtype=np.int64)
    queue = np.empty(_QUEUE + PLANE_BLOCK, dtype=np.uint64)
    spare = np.empty(_QUEUE + PLANE_BLOCK, dtype=np.uint64)
    pending = np.empty((_PENDING, 3), dtype=np.int64)
    close = np.empty((_PENDING + FINE_GROUP + 1, 2), dtype=np.int64)
    for q in range(len(queries)):
        _begin(totals[q], states[q], most[q])
        shifts[q] = _shift(weights[q].sum(), fine_weights[q], fine.shape[1])
        own_sketches[q] = _sketch(fine_queries[q])
        equals[q] = _equal(weights[q])
        rated[q] = min(most[q], weights[q].sum())
        if not equals[q]:
            _fill_halves(weights[q], halves[q])
            units[q] = _fill_bounds(halves[q], rated[q], bounds[q])
    for start in range(first, last, tile):
        stop = min(start + tile, last)
        for q in range(len(queries)):
            # not in the innermost loop, where numba would count their uses
            own = fine_queries[q]
            own_rows = rows[q]
            state = states[q]
            own_totals = totals[q]
            equal = equals[q]
            waiting = np.int64(0)
            limit = min(rated[q], _most(state, shifts[q]))
            for b in range(start, stop):
                offset = b * width * PLANE_BLOCK
                near = distances.dtype.type(0)
                below = np.uint8(0)
                if equal:
                    near = distances.dtype.type(min(limit // equal, bits) + 1)
                    if not _block_below(planes, offset, width, queries, q, near, distances):
                        continue
                else:
                    below = np.uint8(limit // units[q] + 1)
                    if not _block_cheap(planes, offset, width, queries, q, bounds, below, block):
                        continue
                for lane in range(0, PLANE_BLOCK, SCAN_LANES):
                    if equal:
                        mask = _below_mask(distances, lane, near)
                    else:
                        mask = _below_mask(block, lane, below)
                    while mask:
                        i = lane + _lowest(mask)
                        mask &= mask - _ONE
                        item = np.int64(b * PLANE_BLOCK + i)
                        if item >= total:
                            break
                        cost = np.int64(0)
                        if equal:
                            cost = equal * np.int64(distances[i])
                        else:
                            for byte in range(width):
                                value = planes[offset + byte * PLANE_BLOCK + i] ^ queries[q, byte]
                                cost += halves[q, 2 * byte, value >> 4]
                                cost += halves[q, 2 * byte + 1, value & 15]
                        if cost > limit:
                            continue
                        _prefetch(entries, item)
                        queue[waiting] = (np.uint64(cost) << _ITEM_BITS) | np.uint64(item)
                        waiting += 1
                if waiting > _QUEUE:
                    _take(
                        queue, waiting, spare, entries, 0, pending, close, fine, places, sketches,
                        own, own_sketches[q], fine_weights[q], shifts[q], k, own_rows, state,
                        own_totals,
                    )  # fmt: skip
                    waiting = np.int64(0)
                    limit = min(limit, _most(state, shifts[q]))
            _take(
                queue, waiting, spare, entries, 0, pending, close, fine, places, sketches,
                own, own_sketches[q], fine_weights[q], shifts[q], k, own_rows, state, own_totals,
            )  # fmt: skip
            limit = min(limit, _most(state, shifts[q]))
            if not equal and 8 * limit < 7 * rated[q]:
                rated[q] = limit
                units[q] = _fill_bounds(halves[q], limit, bounds[q])
    for q in range(len(queries)):
        _drop(rows[q], states[q], shifts[q])
        _sort_rows(rows[q], states[q, _COUNT])
        counts[q] = min(k, states[q, _COUNT])
