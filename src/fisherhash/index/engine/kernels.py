"""The numba kernels of the search engine; imported only when a search is large enough.

They release the GIL and are called from plain threads: numba's own parallel layer would make a
later ``fork`` of the process unsafe and would take much longer to compile. They are all in this one
file because numba rebuilds a cached kernel when its own file changes, but not when a kernel that it
calls does; only those of sums are in sum_kernels.py, which sees to that itself.

Terms. An *item* is one distinct code with the list of positions that hold it; items are
numbered by their first position, so that (distance, item) order is (distance, first position)
order. ``starts`` (items + 1,) and ``positions`` hold the lists; both are empty when every item is
its own position. *Planes* hold the items' codes for the scan: blocks of 256 codes, and in a block
the first bytes of all codes, then the second bytes, and so on.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numba
import numpy as np
from llvmlite import ir
from numba.core import cgutils, event, types
from numba.extending import intrinsic

from fisherhash.index.engine.layout import PLANE_BLOCK, WORD_GROUP

SCAN_LANES = 64
# planes whose sum fits a byte
_BYTE_PLANES = 31
# codes whose half bytes are looked up at once
_SHUFFLED = 32

_ONE = np.uint64(1)
_ITEM = np.uint64((1 << 32) - 1)
_ITEM_BITS = np.uint64(32)
_DIGIT = np.uint64(255)
# the distance in a record, below the number of the query
_DISTANCE = np.uint64(2047)

# how the search of buckets ended
COMPLETE = 0
TOO_DEAR = 1
TOO_MANY = 2
# cost of one item that is examined further, in compared codes
_KEPT = 256
# items that wait to be examined, while the memory fetches them
_QUEUE = 128
# how many look-ups ahead the memory is prefetched
_AHEAD = 8
# places in the state of a search of buckets
_COUNT, _FOUND, _CUT, _BOUND = range(4)
_NO_BOUND = 1 << 40

_I1, _I8, _I16, _I32, _I64 = (ir.IntType(size) for size in (1, 8, 16, 32, 64))


class _Clock(event.Listener):
    """Adds up the time spent compiling."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._depth = 0
        self._start = 0.0

    def on_start(self, event: Any) -> None:
        """A kernel starts to compile, perhaps inside another."""
        if self._depth == 0:
            self._start = time.perf_counter()
        self._depth += 1

    def on_end(self, event: Any) -> None:
        """It is compiled; only the outermost one counts."""
        self._depth -= 1
        if self._depth == 0:
            self.seconds += time.perf_counter() - self._start


# numba compiles one kernel at a time, under a lock
compiling = _Clock()
event.register("numba:compile", compiling)


def _jit(function: Callable[..., Any]) -> Any:
    options: dict[str, Any] = {"nogil": True, "error_model": "numpy"}
    try:
        return numba.njit(cache=True, **options)(function)
    except RuntimeError:
        # numba found no folder where it may write its cache: compile in memory instead
        return numba.njit(**options)(function)


def _spread(builder: Any, value: Any, count: int) -> Any:
    """A vector that holds ``value`` in every lane."""
    vector = ir.VectorType(value.type, count)
    nothing = ir.Constant(vector, ir.Undefined)
    one = builder.insert_element(nothing, value, _I32(0))
    zeros = ir.Constant(ir.VectorType(_I32, count), [0] * count)
    return builder.shuffle_vector(one, nothing, zeros)


def _popcounts(builder: Any, vector: Any) -> Any:
    kind = vector.type
    name = f"llvm.ctpop.v{kind.count}i{kind.element.width}"
    function = cgutils.get_or_insert_function(builder.module, ir.FunctionType(kind, [kind]), name)
    return builder.call(function, [vector])


def _load(builder: Any, pointer: Any, vector: Any) -> Any:
    loaded = builder.load(builder.bitcast(pointer, vector.as_pointer()))
    loaded.align = 1
    return loaded


def _data(context: Any, builder: Any, kind: Any, value: Any) -> Any:
    return context.make_array(kind)(context, builder, value).data


def _typed_popcount(typing_context: Any, word: Any) -> Any:
    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.ctpop(args[0])

    return types.uint64(types.uint64), emit


def _typed_lowest(typing_context: Any, word: Any) -> Any:
    """The number of the lowest bit that is set."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.cttz(args[0], _I1(1))

    return types.int64(types.uint64), emit


def _typed_prefetch(typing_context: Any, values: Any, place: Any) -> Any:
    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        pointer = builder.gep(_data(context, builder, signature.args[0], args[0]), [args[1]])
        pointer = builder.bitcast(pointer, _I8.as_pointer())
        kind = ir.FunctionType(ir.VoidType(), [_I8.as_pointer(), _I32, _I32, _I32])
        function = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0i8")
        builder.call(function, [pointer, _I32(0), _I32(2), _I32(1)])
        return context.get_dummy_value()

    return types.void(values, types.int64), emit


def _typed_apart(typing_context: Any, codes: Any, row: Any, query: Any) -> Any:
    """The Hamming distance of a row of codes (n, words) and a query (words,).

    Without the tests for negative places that numba would make for every word.
    """

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        data = _data(context, builder, signature.args[0], args[0])
        queries = context.make_array(signature.args[2])(context, builder, args[2])
        count = builder.extract_value(queries.shape, 0)
        first = builder.gep(data, [builder.mul(args[1], count)])
        total = cgutils.alloca_once_value(builder, _I64(0))
        with cgutils.for_range(builder, count) as loop:
            one, other = (
                builder.load(builder.gep(words, [loop.index])) for words in (first, queries.data)
            )
            ones = builder.ctpop(builder.xor(one, other))
            builder.store(builder.add(builder.load(total), ones), total)
        return builder.load(total)

    return types.int64(codes, types.int64, query), emit


def _typed_block_below(
    typing_context: Any,
    planes: Any,
    offset: Any,
    width: Any,
    queries: Any,
    query: Any,
    limit: Any,
    distances: Any,
) -> Any:
    """Is any distance of a block of 256 codes below ``limit``? Then the distances are written.

    Written with vectors of the block's size, which the compiler cuts into the registers there
    are. Distances of 8 or 16 bits, as ``distances`` has them.
    """
    wide = distances.dtype.bitwidth == 16

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        block = ir.VectorType(_I8, PLANE_BLOCK)
        data = _data(context, builder, signature.args[0], args[0])
        query_data = _data(context, builder, signature.args[3], args[3])
        query_data = builder.gep(query_data, [builder.mul(args[4], args[2])])
        out = _data(context, builder, signature.args[6], args[6])
        sums = cgutils.alloca_once(builder, block)

        def add(first: Any, last: Any) -> None:
            builder.store(ir.Constant(block, None), sums)
            with cgutils.for_range_slice(builder, first, last, _I64(1), _I64) as (plane, _):
                place = builder.add(args[1], builder.mul(plane, _I64(PLANE_BLOCK)))
                codes = _load(builder, builder.gep(data, [place]), block)
                byte = _spread(builder, builder.load(builder.gep(query_data, [plane])), PLANE_BLOCK)
                counts = _popcounts(builder, builder.xor(codes, byte))
                builder.store(builder.add(builder.load(sums), counts), sums)

        if wide:
            long = ir.VectorType(_I16, PLANE_BLOCK)
            total = cgutils.alloca_once(builder, long)
            builder.store(ir.Constant(long, None), total)
            step = _I64(_BYTE_PLANES)
            with cgutils.for_range_slice(builder, _I64(0), args[2], step, _I64) as (first, _):
                last = builder.add(first, step)
                last = builder.select(builder.icmp_signed("<", last, args[2]), last, args[2])
                add(first, last)
                more = builder.zext(builder.load(sums), long)
                builder.store(builder.add(builder.load(total), more), total)
            result = builder.load(total)
        else:
            add(_I64(0), args[2])
            result = builder.load(sums)
        # the minimum of four lanes, so that one comparison is enough
        quarters = [
            builder.shuffle_vector(
                result,
                ir.Constant(result.type, ir.Undefined),
                ir.Constant(ir.VectorType(_I32, SCAN_LANES), list(range(at, at + SCAN_LANES))),
            )
            for at in range(0, PLANE_BLOCK, SCAN_LANES)
        ]
        least = quarters[0]
        for other in quarters[1:]:
            least = builder.select(builder.icmp_unsigned("<", least, other), least, other)
        below = builder.icmp_unsigned("<", least, _spread(builder, args[5], SCAN_LANES))
        some = builder.icmp_unsigned("!=", builder.bitcast(below, _I64), _I64(0))
        with builder.if_then(some, likely=False):
            stored = builder.store(result, builder.bitcast(out, result.type.as_pointer()))
            stored.align = 1
        return some

    integer = types.int64
    signature = types.boolean(
        planes, integer, integer, queries, integer, distances.dtype, distances
    )
    return signature, emit


def _typed_below_mask(typing_context: Any, values: Any, start: Any, limit: Any) -> Any:
    """A bit for each of the 64 values from ``start`` on: is it below ``limit``?"""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        data = _data(context, builder, signature.args[0], args[0])
        element = context.get_value_type(signature.args[0].dtype)
        loaded = _load(builder, builder.gep(data, [args[1]]), ir.VectorType(element, SCAN_LANES))
        below = builder.icmp_unsigned("<", loaded, _spread(builder, args[2], SCAN_LANES))
        return builder.bitcast(below, _I64)

    return types.uint64(values, types.int64, values.dtype), emit


def _typed_near_mask(
    typing_context: Any, words: Any, place: Any, stride: Any, query: Any, most: Any
) -> Any:
    """A bit for each of the WORD_GROUP codes from ``place`` on: is its distance at most ``most``?

    words is flat, word w of a code ``w * stride`` after its first; query holds its words.
    """

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        data = _data(context, builder, signature.args[0], args[0])
        query_type = signature.args[3]
        queries = context.make_array(query_type)(context, builder, args[3])
        count = builder.extract_value(queries.shape, 0)
        element = context.get_value_type(signature.args[0].dtype)
        group = ir.VectorType(element, WORD_GROUP)
        sums = cgutils.alloca_once(builder, group)
        builder.store(ir.Constant(group, None), sums)
        with cgutils.for_range(builder, count) as loop:
            at = builder.add(args[1], builder.mul(loop.index, args[2]))
            codes = _load(builder, builder.gep(data, [at]), group)
            word = _spread(
                builder, builder.load(builder.gep(queries.data, [loop.index])), WORD_GROUP
            )
            counts = _popcounts(builder, builder.xor(codes, word))
            builder.store(builder.add(builder.load(sums), counts), sums)
        limit = _spread(builder, args[4], WORD_GROUP)
        near = builder.icmp_unsigned("<=", builder.load(sums), limit)
        return builder.zext(builder.bitcast(near, ir.IntType(WORD_GROUP)), _I64)

    return types.uint64(words, types.int64, types.int64, query, words.dtype), emit


def _typed_cheap_mask(
    typing_context: Any,
    words: Any,
    place: Any,
    stride: Any,
    query: Any,
    never: Any,
    rarely: Any,
    most: Any,
) -> Any:
    """A bit for each of the WORD_GROUP codes from ``place`` on: does it pass two tests?

    It differs in no bit of ``never`` and in at most ``most`` bits of ``rarely``. The codes are
    those of ``_near_mask``.
    """

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        data = _data(context, builder, signature.args[0], args[0])
        queries = context.make_array(signature.args[3])(context, builder, args[3])
        tests = [_data(context, builder, signature.args[i], args[i]) for i in (4, 5)]
        count = builder.extract_value(queries.shape, 0)
        element = context.get_value_type(signature.args[0].dtype)
        group = ir.VectorType(element, WORD_GROUP)
        sums, wrong = cgutils.alloca_once(builder, group), cgutils.alloca_once(builder, group)
        builder.store(ir.Constant(group, None), sums)
        builder.store(ir.Constant(group, None), wrong)
        with cgutils.for_range(builder, count) as loop:
            at = builder.add(args[1], builder.mul(loop.index, args[2]))
            codes = _load(builder, builder.gep(data, [at]), group)
            own, never_word, rarely_word = (
                _spread(builder, builder.load(builder.gep(one, [loop.index])), WORD_GROUP)
                for one in (queries.data, *tests)
            )
            other = builder.xor(codes, own)
            counts = _popcounts(builder, builder.and_(other, rarely_word))
            builder.store(builder.add(builder.load(sums), counts), sums)
            more = builder.and_(other, never_word)
            builder.store(builder.or_(builder.load(wrong), more), wrong)
        few = builder.icmp_unsigned("<=", builder.load(sums), _spread(builder, args[6], WORD_GROUP))
        right = builder.icmp_unsigned("==", builder.load(wrong), ir.Constant(group, None))
        both = builder.bitcast(builder.and_(few, right), ir.IntType(WORD_GROUP))
        return builder.zext(both, _I64)

    integer = types.int64
    return types.uint64(words, integer, integer, query, never, rarely, words.dtype), emit


def _saturating_sum(builder: Any, one: Any, other: Any) -> Any:
    kind = one.type
    function = cgutils.get_or_insert_function(
        builder.module, ir.FunctionType(kind, [kind, kind]), f"llvm.uadd.sat.v{kind.count}i8"
    )
    return builder.call(function, [one, other])


def _half_byte_costs(builder: Any, values: Any, table: Any, *, shuffle: bool) -> Any:
    """The entries of a table of 16 bytes for a vector of half bytes.

    The processor has an instruction for that, or the entries of single bits are added, which gives
    the same or less.
    """
    count = values.type.count
    if shuffle:
        loaded = _load(builder, table, ir.VectorType(_I8, 16))
        places = ir.Constant(ir.VectorType(_I32, count), [i % 16 for i in range(count)])
        twice = builder.shuffle_vector(loaded, ir.Constant(loaded.type, ir.Undefined), places)
        kind = ir.FunctionType(values.type, [values.type, values.type])
        function = cgutils.get_or_insert_function(builder.module, kind, "llvm.x86.avx2.pshuf.b")
        return builder.call(function, [twice, values])
    nothing = ir.Constant(values.type, None)
    total = nothing
    for bit in (1, 2, 4, 8):
        cost = _spread(builder, builder.load(builder.gep(table, [_I64(bit)])), count)
        marked = builder.and_(values, _spread(builder, _I8(bit), count))
        differs = builder.icmp_unsigned("!=", marked, nothing)
        total = _saturating_sum(builder, total, builder.select(differs, cost, nothing))
    return total


def _typed_block_cheap(
    typing_context: Any,
    planes: Any,
    offset: Any,
    width: Any,
    queries: Any,
    query: Any,
    bounds: Any,
    limit: Any,
    block: Any,
) -> Any:
    """Is any cost of a block of 256 codes below ``limit``? Then the costs are written.

    bounds (n_queries, 2 * width, 16) holds the costs of half bytes; sums end at 255.
    """

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        part = ir.VectorType(_I8, _SHUFFLED)
        shuffle = "+avx2" in context.codegen().magic_tuple()[2].split(",")
        data = _data(context, builder, signature.args[0], args[0])
        own = _data(context, builder, signature.args[3], args[3])
        own = builder.gep(own, [builder.mul(args[4], args[2])])
        tables = _data(context, builder, signature.args[5], args[5])
        each = builder.mul(args[2], _I64(32))
        tables = builder.gep(tables, [builder.mul(args[4], each)])
        out = _data(context, builder, signature.args[7], args[7])
        sums = [cgutils.alloca_once(builder, part) for _ in range(PLANE_BLOCK // _SHUFFLED)]
        for one in sums:
            builder.store(ir.Constant(part, None), one)
        with cgutils.for_range(builder, args[2]) as loop:
            place = builder.add(args[1], builder.mul(loop.index, _I64(PLANE_BLOCK)))
            byte = builder.load(builder.gep(own, [loop.index]))
            table = builder.gep(tables, [builder.mul(loop.index, _I64(32))])
            second = builder.gep(table, [_I64(16)])
            for number, one in enumerate(sums):
                at = builder.gep(data, [builder.add(place, _I64(number * _SHUFFLED))])
                codes = _load(builder, at, part)
                other = builder.xor(codes, _spread(builder, byte, _SHUFFLED))
                high = builder.lshr(other, ir.Constant(part, [4] * _SHUFFLED))
                low = builder.and_(other, ir.Constant(part, [15] * _SHUFFLED))
                total = builder.load(one)
                for values, costs in ((high, table), (low, second)):
                    more = _half_byte_costs(builder, values, costs, shuffle=shuffle)
                    total = _saturating_sum(builder, total, more)
                builder.store(total, one)
        results = [builder.load(one) for one in sums]
        least = results[0]
        for other in results[1:]:
            least = builder.select(builder.icmp_unsigned("<", least, other), least, other)
        below = builder.icmp_unsigned("<", least, _spread(builder, args[6], _SHUFFLED))
        some = builder.icmp_unsigned("!=", builder.bitcast(below, _I32), _I32(0))
        with builder.if_then(some, likely=False):
            for number, result in enumerate(results):
                at = builder.gep(out, [_I64(number * _SHUFFLED)])
                builder.store(result, builder.bitcast(at, part.as_pointer())).align = 1
        return some

    integer = types.int64
    signature = types.boolean(
        planes, integer, integer, queries, integer, bounds, types.uint8, block
    )
    return signature, emit


_popcount: Any = intrinsic(_typed_popcount)
_lowest: Any = intrinsic(_typed_lowest)
_prefetch: Any = intrinsic(_typed_prefetch)
_apart: Any = intrinsic(_typed_apart)
_block_below: Any = intrinsic(_typed_block_below)
_below_mask: Any = intrinsic(_typed_below_mask)
_near_mask: Any = intrinsic(_typed_near_mask)
_cheap_mask: Any = intrinsic(_typed_cheap_mask)
_block_cheap: Any = intrinsic(_typed_block_cheap)


@_jit
def fill_planes(codes: Any, rows: Any, planes: Any) -> None:
    """Copy codes (n, width) into planes (blocks * width * 256,); of ``rows`` only if there are any.

    Places beyond the last code are left as they are.
    """
    width = codes.shape[1]
    total = len(rows) if len(rows) else len(codes)
    for block in range((total + PLANE_BLOCK - 1) // PLANE_BLOCK):
        start = block * PLANE_BLOCK
        size = min(PLANE_BLOCK, total - start)
        part = planes[start * width : (start + PLANE_BLOCK) * width]
        if len(rows):
            for i in range(size):
                code = codes[rows[start + i]]
                for byte in range(width):
                    part[byte * PLANE_BLOCK + i] = code[byte]
        else:
            for byte in range(width):
                plane = part[byte * PLANE_BLOCK : (byte + 1) * PLANE_BLOCK]
                for i in range(size):
                    plane[i] = codes[start + i, byte]


@_jit
def _weight(starts: Any, item: Any) -> Any:
    if len(starts):
        return np.int64(starts[item + 1]) - np.int64(starts[item])
    return 1


@_jit
def _cut(items: Any, distances: Any, count: int, starts: Any, k: int, totals: Any) -> Any:
    """The k best lists of a row whose items ascend: how many are kept, and the new limit.

    They stay in the order of items. Of the last distance as many lists are kept as there are
    places left, each of which may give one position.
    """
    totals[:] = 0
    for i in range(count):
        totals[distances[i]] += _weight(starts, items[i])
    below = 0
    level = 0
    while level < len(totals) and below + totals[level] < k:
        below += totals[level]
        level += 1
    if level == len(totals):
        return count, level
    left = k - below
    kept = 0
    for i in range(count):
        distance = np.int64(distances[i])
        if distance > level:
            continue
        if distance == level:
            if left == 0:
                continue
            left -= 1
        items[kept] = items[i]
        distances[kept] = distances[i]
        kept += 1
    return kept, level if left == 0 else level + 1


@_jit
def scan_nearest(
    queries: Any,
    planes: Any,
    total: int,
    starts: Any,
    first: int,
    last: int,
    tile: int,
    k: int,
    bits: int,
    block: Any,
    items: Any,
    distances: Any,
    counts: Any,
) -> None:
    """Keep the best lists of each query among the blocks ``first`` to ``last``.

    queries (b, width); items, distances (b, room) and counts (b,) receive, in the order of items,
    what may be among the k nearest: at most k lists. block (256,) is scratch.
    """
    width = queries.shape[1]
    room = items.shape[1]
    limits = np.empty(len(queries), dtype=np.int64)
    limits[:] = bits + 1
    totals = np.zeros(bits + 1, dtype=np.int64)
    counts[:] = 0
    for start in range(first, last, tile):
        stop = min(start + tile, last)
        for q in range(len(queries)):
            # views of a row are created in the rare branch only: each costs an atomic count
            count = counts[q]
            limit = block.dtype.type(limits[q])
            for b in range(start, stop):
                if not _block_below(
                    planes, b * width * PLANE_BLOCK, width, queries, q, limit, block
                ):
                    continue
                for lane in range(0, PLANE_BLOCK, SCAN_LANES):
                    mask = _below_mask(block, lane, limit)
                    place = b * PLANE_BLOCK + lane
                    while mask:
                        i = _lowest(mask)
                        mask &= mask - _ONE
                        if place + i >= total:
                            break
                        items[q, count] = place + i
                        distances[q, count] = block[lane + i]
                        count += 1
                    if count > room - SCAN_LANES:
                        count, level = _cut(items[q], distances[q], count, starts, k, totals)
                        limit = block.dtype.type(level)
            counts[q] = count
            limits[q] = limit
    for q in range(len(queries)):
        counts[q], _ = _cut(items[q], distances[q], counts[q], starts, k, totals)


@_jit
def _sort(keys: Any, spare: Any, count: int, low: int, high: int) -> None:
    """Sort the first keys by their bits ``low`` to ``high``; equal ones keep their order.

    The order must be that of whole keys, for the small ones are sorted by those.
    """
    if count <= 40:
        for i in range(1, count):
            key = keys[i]
            j = i
            while j and keys[j - 1] > key:
                keys[j] = keys[j - 1]
                j -= 1
            keys[j] = key
        return
    places = np.zeros(256, dtype=np.int64)
    swapped = False
    for shift in range(low, high, 8):
        digit = np.uint64(shift)
        source = spare if swapped else keys
        target = keys if swapped else spare
        places[:] = 0
        for i in range(count):
            places[(source[i] >> digit) & _DIGIT] += 1
        if places[(source[0] >> digit) & _DIGIT] == count:
            continue
        before = 0
        for value in range(256):
            inside = places[value]
            places[value] = before
            before += inside
        for i in range(count):
            key = source[i]
            value = (key >> digit) & _DIGIT
            target[places[value]] = key
            places[value] += 1
        swapped = not swapped
    if swapped:
        for i in range(count):
            keys[i] = spare[i]


@_jit
def _expand(
    keys: Any,
    count: int,
    starts: Any,
    positions: Any,
    found: Any,
    distances: Any,
    distance_bits: Any,
) -> None:
    """Fill found and distances (k,) from sorted keys (distance << 32 | item).

    distance_bits masks the distance where a key holds more above it. The lists of one distance are
    merged by position, with a heap of those that have begun.
    """
    k = len(found)
    if len(starts) == 0:
        for i in range(k):
            found[i] = keys[i] & _ITEM
            distances[i] = (keys[i] >> _ITEM_BITS) & distance_bits
        return
    heap = np.empty(count, dtype=np.int64)
    ends = np.empty(count, dtype=np.int64)
    filled = 0
    i = 0
    while i < count and filled < k:
        level = keys[i] >> _ITEM_BITS
        distance = np.int64(level & distance_bits)
        size = 0
        while filled < k:
            while i < count and keys[i] >> _ITEM_BITS == level:
                item = keys[i] & _ITEM
                place = np.int64(starts[item])
                if size and positions[place] > positions[heap[0]]:
                    break
                # it goes to the top, because no list that was started comes before it
                child = size
                while child:
                    parent = (child - 1) >> 1
                    heap[child] = heap[parent]
                    ends[child] = ends[parent]
                    child = parent
                heap[0] = place
                ends[0] = starts[item + 1]
                size += 1
                i += 1
            if size == 0:
                break
            found[filled] = positions[heap[0]]
            distances[filled] = distance
            filled += 1
            place = heap[0] + 1
            end = ends[0]
            if place == end:
                size -= 1
                if size == 0:
                    continue
                place = heap[size]
                end = ends[size]
            value = positions[place]
            parent = 0
            while True:
                child = 2 * parent + 1
                if child >= size:
                    break
                if child + 1 < size and positions[heap[child + 1]] < positions[heap[child]]:
                    child += 1
                if positions[heap[child]] > value:
                    break
                heap[parent] = heap[child]
                ends[parent] = ends[child]
                parent = child
            heap[parent] = place
            ends[parent] = end


@_jit
def finish_nearest(
    items: Any,
    near: Any,
    counts: Any,
    starts: Any,
    positions: Any,
    bits: int,
    found: Any,
    distances: Any,
) -> None:
    """Merge what ``scan_nearest`` kept in each part into found and distances (b, k).

    items, near (parts, b, room) and counts (parts, b), with the parts in the order of items.
    """
    k = found.shape[1]
    room = np.int64(1)
    for q in range(found.shape[0]):
        count = np.int64(0)
        for part in range(items.shape[0]):
            count += counts[part, q]
        room = max(room, count)
    row = np.empty(room, dtype=np.uint32)
    row_near = np.empty(room, dtype=near.dtype)
    keys = np.empty(room, dtype=np.uint64)
    totals = np.zeros(bits + 1, dtype=np.int64)
    for q in range(found.shape[0]):
        count = np.int64(0)
        for part in range(items.shape[0]):
            for i in range(counts[part, q]):
                row[count] = items[part, q, i]
                row_near[count] = near[part, q, i]
                count += 1
        if items.shape[0] > 1:
            count, _ = _cut(row, row_near, count, starts, k, totals)
        totals[:] = 0
        for i in range(count):
            totals[row_near[i]] += 1
        before = 0
        for level in range(bits + 1):
            inside = totals[level]
            totals[level] = before
            before += inside
        for i in range(count):
            distance = row_near[i]
            keys[totals[distance]] = (np.uint64(distance) << _ITEM_BITS) | np.uint64(row[i])
            totals[distance] += 1
        _expand(keys, count, starts, positions, found[q], distances[q], _DISTANCE)


@_jit
def _with_room(values: Any, count: int, more: int) -> Any:
    if count + more <= len(values):
        return values
    larger = np.empty(2 * (count + more), dtype=values.dtype)
    for i in range(count):
        larger[i] = values[i]
    return larger


@_jit
def _tile_within(
    queries: Any,
    query: int,
    planes: Any,
    total: int,
    start: int,
    stop: int,
    limit: Any,
    block: Any,
    records: Any,
    count: int,
) -> Any:
    """Records of one tile for the queries from ``query`` on, until they might not fit.

    Returns their number and the next query. Nothing here makes or replaces an array: numba would
    count its uses in the innermost loop.
    """
    width = queries.shape[1]
    for q in range(query, len(queries)):
        if count + (stop - start) * PLANE_BLOCK > len(records):
            return count, q
        for b in range(start, stop):
            if not _block_below(planes, b * width * PLANE_BLOCK, width, queries, q, limit, block):
                continue
            for lane in range(0, PLANE_BLOCK, SCAN_LANES):
                mask = _below_mask(block, lane, limit)
                place = b * PLANE_BLOCK + lane
                while mask:
                    i = _lowest(mask)
                    mask &= mask - _ONE
                    if place + i >= total:
                        break
                    level = np.uint64(q << 11) | np.uint64(block[lane + i])
                    records[count] = (level << _ITEM_BITS) | np.uint64(place + i)
                    count += 1
    return count, len(queries)


@_jit
def scan_within(
    queries: Any,
    planes: Any,
    total: int,
    first: int,
    last: int,
    tile: int,
    radius: int,
    block: Any,
) -> Any:
    """Records (query << 43 | distance << 32 | item) of all items up to the radius, sorted.

    Sorted, that is, among the blocks ``first`` to ``last``. block (256,) is scratch.
    """
    records = np.empty(tile * PLANE_BLOCK, dtype=np.uint64)
    count = np.int64(0)
    limit = block.dtype.type(radius + 1)
    for start in range(first, last, tile):
        stop = min(start + tile, last)
        query = np.int64(0)
        while query < len(queries):
            count, query = _tile_within(
                queries, query, planes, total, start, stop, limit, block, records, count
            )
            if query < len(queries):
                records = _with_room(records, count, np.int64(tile * PLANE_BLOCK))
    sort_records(records, count)
    return records[:count]


@_jit
def sort_records(records: Any, count: int) -> None:
    """Sort records whose items ascend for each query and distance."""
    highest = np.uint64(0)
    for i in range(count):
        highest = max(highest, records[i])
    high = 32
    while high < 64 and highest >> np.uint64(high):
        high += 8
    _sort(records, np.empty(count, dtype=np.uint64), count, np.int64(32), np.int64(high))


@_jit
def count_within(records: Any, starts: Any, sizes: Any) -> None:
    """Add to sizes (n_queries,) how many positions each query's records stand for."""
    for record in records:
        sizes[record >> np.uint64(43)] += _weight(starts, record & _ITEM)


@_jit
def fill_within(
    records: Any, starts: Any, positions: Any, offsets: Any, found: Any, distances: Any
) -> None:
    """Write the positions of sorted records to their queries' places."""
    i = 0
    while i < len(records):
        query = records[i] >> np.uint64(43)
        j = i
        while j < len(records) and records[j] >> np.uint64(43) == query:
            j += 1
        first = offsets[query]
        last = offsets[query + np.uint64(1)]
        _expand(
            records[i:j], j - i, starts, positions, found[first:last], distances[first:last],
            _DISTANCE,
        )  # fmt: skip
        i = j


@_jit
def _mixed(word: Any) -> Any:
    """A one-to-one scrambling of 64 bits."""
    word = np.uint64(word)
    word = (word ^ (word >> np.uint64(32))) * np.uint64(0x9FB21C651E98DF25)
    word = (word ^ (word >> np.uint64(29))) * np.uint64(0xD6E8FEB86659FD93)
    return word ^ (word >> np.uint64(32))


@_jit
def _word(code: Any, first: int, size: int) -> Any:
    """Bytes from ``first`` on as one number of ``size`` bytes, zeros after the last one."""
    word = np.uint64(0)
    for byte in range(first, first + size):
        word = (word << np.uint64(8)) | np.uint64(code[byte] if byte < len(code) else 0)
    return word


@_jit
def _hash(code: Any) -> Any:
    mixed = _mixed(_word(code, np.int64(0), np.int64(8)))
    for first in range(8, len(code), 8):
        mixed = _mixed(mixed ^ _word(code, first, np.int64(8))) + mixed * np.uint64(
            0x9E3779B97F4A7C15
        )
    return mixed


@_jit
def count_parts(codes: Any, first: int, last: int, shift: int, counts: Any) -> None:
    """Count how many codes' hashes begin with each number; ``shift`` cuts off the rest."""
    for row in range(first, last):
        counts[_hash(codes[row]) >> np.uint64(shift)] += 1


@_jit
def fill_parts(
    codes: Any, first: int, last: int, shift: int, places: Any, keys: Any, rows: Any
) -> None:
    """Put hashes and row numbers into the parts that begin at ``places``."""
    for row in range(first, last):
        key = _hash(codes[row])
        part = key >> np.uint64(shift)
        place = places[part]
        keys[place] = key
        rows[place] = row
        places[part] = place + 1


@_jit
def _same(one: Any, other: Any) -> bool:
    for byte in range(len(one)):  # noqa: SIM110 (generators do not compile)
        if one[byte] != other[byte]:
            return False
    return True


@_jit
def group_parts(
    codes: Any, bounds: Any, first: int, last: int, keys: Any, rows: Any, begins: Any
) -> bool:
    """Bring the rows of equal codes together inside each part, ascending; mark where each begins.

    False when two different codes of more than 64 bits had the same hash: then there is no
    grouping by hash.
    """
    slots = 1 << 10
    table = np.zeros(slots, dtype=np.int64)
    for part in range(first, last):
        start = bounds[part]
        size = bounds[part + 1] - start
        part_keys = keys[start : start + size]
        part_rows = rows[start : start + size]
        groups = np.empty(size, dtype=np.int64)
        # the first row of each group, inside the part
        heads = np.empty(size, dtype=np.int64)
        counts = np.zeros(size, dtype=np.int64)
        found = np.int64(0)
        table[:] = 0
        for i in range(size):
            key = part_keys[i]
            slot = np.int64(key & np.uint64(slots - 1))
            while True:
                group = table[slot] - 1
                if group < 0 or part_keys[heads[group]] == key:
                    break
                slot = (slot + 1) & (slots - 1)
            if group < 0:
                group = found
                table[slot] = group + 1
                heads[group] = i
                found += 1
                if 2 * found > slots:
                    slots *= 4
                    table = np.zeros(slots, dtype=np.int64)
                    for other in range(found):
                        slot = np.int64(part_keys[heads[other]] & np.uint64(slots - 1))
                        while table[slot]:
                            slot = (slot + 1) & (slots - 1)
                        table[slot] = other + 1
            elif codes.shape[1] > 8 and not _same(
                codes[part_rows[heads[group]]], codes[part_rows[i]]
            ):
                return False
            groups[i] = group
            counts[group] += 1
        before = 0
        for group in range(found):
            begins[start + before] = 1
            inside = counts[group]
            counts[group] = before
            before += inside
        ordered = np.empty(size, dtype=np.uint32)
        for i in range(size):
            group = groups[i]
            ordered[counts[group]] = part_rows[i]
            counts[group] += 1
        for i in range(size):
            part_rows[i] = ordered[i]
    return True


@_jit
def number_items(rows: Any, begins: Any, marks: Any, before: Any) -> Any:
    """Number the groups by first row; return how many there are.

    marks (n / 64,) receives a bit for each first row, before (n / 64,) the bits in front.
    """
    for i in range(len(rows)):
        if begins[i]:
            row = np.int64(rows[i])
            marks[row >> 6] |= _ONE << np.uint64(row & 63)
    total = np.int64(0)
    for i in range(len(marks)):
        before[i] = total
        total += np.int64(_popcount(marks[i]))
    return total


@_jit
def fill_lists(
    rows: Any, begins: Any, marks: Any, before: Any, starts: Any, positions: Any
) -> None:
    """Write each group's rows to its item's list."""
    total = len(rows)
    for again in range(2):
        i = 0
        while i < total:
            j = i + 1
            while j < total and not begins[j]:
                j += 1
            row = np.int64(rows[i])
            below = marks[row >> 6] & ((_ONE << np.uint64(row & 63)) - _ONE)
            item = np.int64(before[row >> 6]) + np.int64(_popcount(below))
            if again:
                place = np.int64(starts[item])
                for offset in range(j - i):
                    positions[place + offset] = rows[i + offset]
            else:
                starts[item + 1] = j - i
            i = j
        if not again:
            for item in range(len(starts) - 1):
                starts[item + 1] += starts[item]


@_jit
def fill_words(codes: Any, rows: Any, words: Any) -> None:
    """Codes as numbers (count, n) of 4 or 8 bytes, the first bit highest; of ``rows`` if any."""
    size = words.itemsize
    for i in range(words.shape[1]):
        code = codes[rows[i]] if len(rows) else codes[i]
        for w in range(words.shape[0]):
            words[w, i] = _word(code, w * size, size)


@_jit
def _key(words: Any, first: int, length: int) -> Any:
    """Bits ``first`` to ``first + length`` of a code's words; at most 32 of them."""
    size = 8 * words.itemsize
    place = first // size
    end = first + length - place * size
    if end <= size:
        value = np.uint64(words[place]) >> np.uint64(size - end)
    else:
        value = np.uint64(words[place]) << np.uint64(end - size)
        value |= np.uint64(words[place + 1]) >> np.uint64(2 * size - end)
    return np.int64(value & ((_ONE << np.uint64(length)) - _ONE))


@_jit
def fill_table(
    words: Any, table: int, length: int, directory: Any, bucket_words: Any, bucket_items: Any
) -> None:
    """Sort items into the buckets of one part of their codes.

    words (count, items); directory (2 ** length + 1,) receives where each bucket begins,
    bucket_words (count, room) and bucket_items (items,) what is in them.
    """
    first = table * length
    directory[:] = 0
    for i in range(words.shape[1]):
        directory[_key(words[:, i], first, length) + 1] += 1
    for i in range(len(directory) - 1):
        directory[i + 1] += directory[i]
    for i in range(words.shape[1]):
        key = _key(words[:, i], first, length)
        place = directory[key]
        directory[key] = place + 1
        for w in range(words.shape[0]):
            bucket_words[w, place] = words[w, i]
        bucket_items[place] = i
    for i in range(len(directory) - 1, 0, -1):
        directory[i] = directory[i - 1]
    directory[0] = 0


@_jit
def _keyed(number: int, words: Any, key: Any) -> Any:
    """A hash of a number and the words that belong to it, which nobody can foresee."""
    value = _mixed(np.uint64(number) + key)
    for w in range(len(words)):
        value = _mixed(value ^ np.uint64(words[w]))
    return value


@_jit
def lists_hold(codes: Any, starts: Any, positions: Any, key: Any) -> bool:
    """Whether lists hold every position once, with the code of the first one of its list.

    starts and positions are in range. Instead of one random access per position, sums of keyed
    hashes of (position, code) are compared: once by position, once by list.
    """
    width = (codes.shape[1] + 7) // 8
    words = np.empty(width, dtype=np.uint64)
    total = np.uint64(0)
    for i in range(len(codes)):
        for w in range(width):
            words[w] = _word(codes[i], 8 * w, 8)
        total += _keyed(i, words, key)
    for item in range(len(starts) - 1):
        code = codes[positions[starts[item]]]
        for w in range(width):
            words[w] = _word(code, 8 * w, 8)
        before = np.int64(-1)
        for place in range(np.int64(starts[item]), np.int64(starts[item + 1])):
            position = np.int64(positions[place])
            if position <= before:
                return False
            before = position
            total -= _keyed(position, words, key)
    return total == np.uint64(0)


@_jit
def hash_words(words: Any, key: Any) -> Any:
    """Sum of the keyed hashes of items with their words (count, items)."""
    total = np.uint64(0)
    for i in range(words.shape[1]):
        total += _keyed(i, words[:, i], key)
    return total


@_jit
def table_holds(
    table: int, length: int, directory: Any, words: Any, items: Any, total: Any, key: Any
) -> bool:
    """Whether the buckets of one table hold every item once, with its words, where it belongs.

    directory (2 ** length + 1,), words (count, room) and items (items,) are those of the table;
    ``total`` is the :func:`hash_words` of the items.
    """
    count = len(items)
    if directory[0] != 0 or directory[len(directory) - 1] != count:
        return False
    for bucket in range(len(directory) - 1):
        start, stop = np.int64(directory[bucket]), np.int64(directory[bucket + 1])
        if stop < start or stop > count:
            return False
        before = np.int64(-1)
        for place in range(start, stop):
            item = np.int64(items[place])
            own = words[:, place]
            if item <= before or item >= count or _key(own, table * length, length) != bucket:
                return False
            before = item
            total -= _keyed(item, own, key)
    return total == np.uint64(0)


@_jit
def fill_masks(length: int, offsets: Any, masks: Any) -> None:
    """All numbers of ``length`` bits with 0, 1, 2, … bits set, as far as offsets go."""
    for ones in range(len(offsets) - 1):
        mask = (_ONE << np.uint64(ones)) - _ONE
        for i in range(offsets[ones], offsets[ones + 1]):
            masks[i] = mask
            if mask:
                # the next larger number with as many bits set
                lowest = mask & (~mask + _ONE)
                ripple = mask + lowest
                moved = ((mask ^ ripple) >> np.uint64(2)) >> np.uint64(_lowest(mask))
                mask = ripple | moved


@_jit
def _first_reached(other: Any, tables: int, length: int, table: int, radius: int) -> bool:
    """Whether no earlier (radius, table) reaches a code; ``other`` holds its differing bits."""
    for t in range(tables):
        if t != table:
            apart = np.int64(_popcount(np.uint64(_key(other, t * length, length))))
            if apart < radius or (apart == radius and t < table):
                return False
    return True


@_jit
def _keep(
    query: Any,
    words: Any,
    stride: int,
    items: Any,
    starts: Any,
    length: int,
    tables: int,
    table: int,
    radius: int,
    k: int,
    queue: Any,
    waiting: int,
    state: Any,
    totals: Any,
    other: Any,
    keys: Any,
    spare: Any,
) -> bool:
    """Take the places that wait in the queue into keys; False when there is no room for them.

    state holds, from step to step: the number of keys, how many positions they stand for up to
    the cut, the cut (the last distance needed so far), and the key that later ones must be below.
    """
    base = table * len(query) * stride
    kept = np.int64(0)
    cut = np.int64(state[_CUT])
    for i in range(waiting):
        place = np.int64(queue[i])
        distance = np.int64(0)
        for w in range(len(query)):
            other[w] = query[w] ^ words[base + w * stride + place]
            distance += np.int64(_popcount(np.uint64(other[w])))
        if distance <= cut and _first_reached(other, tables, length, table, radius):
            item = np.int64(items[table, place])
            if len(starts):
                _prefetch(starts, item)
            queue[kept] = (np.uint64(distance) << _ITEM_BITS) | np.uint64(item)
            kept += 1
    count = np.int64(state[_COUNT])
    found = np.int64(state[_FOUND])
    for i in range(kept):
        key = queue[i]
        distance = np.int64(key >> _ITEM_BITS)
        if distance > cut or key >= state[_BOUND]:
            continue
        if count == len(keys):
            if count < 2 * k:
                return False
            _sort(keys, spare, count, np.int64(0), np.int64(48))
            count = k
            state[_BOUND] = keys[k - 1]
            if key >= state[_BOUND]:
                continue
        keys[count] = key
        count += 1
        weight = _weight(starts, key & _ITEM)
        totals[distance] += weight
        found += weight
        while found - totals[cut] >= k:
            found -= totals[cut]
            cut -= 1
    state[_COUNT] = count
    state[_FOUND] = found
    state[_CUT] = cut
    return True


@_jit
def _probe(
    query: Any,
    directory: Any,
    words: Any,
    stride: int,
    items: Any,
    masks: Any,
    offsets: Any,
    starts: Any,
    length: int,
    k: int,
    most: int,
    budget: int,
    lookup: int,
    queue: Any,
    state: Any,
    totals: Any,
    other: Any,
    keys: Any,
    spare: Any,
) -> Any:
    """Find the nearest items of one query up to the distance ``most``.

    It ends COMPLETE, TOO_DEAR (the budget was not enough) or TOO_MANY (for keys, where k gives no
    bound). keys (distance << 32 | item) then hold, in no order, at least the k smallest. A step
    looks up all bucket numbers that differ in ``radius`` bits, in one table. After the step
    (radius, table) everything up to the distance tables * radius + table has been met.
    """
    tables = len(directory)
    work = np.int64(0)
    waiting = np.int64(0)
    state[_COUNT] = 0
    state[_FOUND] = 0
    state[_CUT] = most
    state[_BOUND] = ~np.uint64(0)
    for level in range(len(totals)):
        totals[level] = 0
    for radius in range(len(offsets) - 1):
        last = offsets[radius + 1]
        for table in range(tables):
            work += (last - offsets[radius]) * lookup
            if work > budget:
                return TOO_DEAR
            base = table * len(query) * stride
            own = _key(query, table * length, length)
            cut = words.dtype.type(state[_CUT])
            for m in range(offsets[radius], last):
                # prefetch: first where a bucket begins, then the bucket
                ahead = own ^ np.int64(masks[min(m + 2 * _AHEAD, last - 1)])
                _prefetch(directory, table * directory.shape[1] + ahead)
                ahead = own ^ np.int64(masks[min(m + _AHEAD, last - 1)])
                bucket = base + np.int64(directory[table, ahead])
                _prefetch(words, bucket)
                _prefetch(words, bucket + 8)
                number = own ^ np.int64(masks[m])
                start = np.int64(directory[table, number])
                stop = np.int64(directory[table, number + 1])
                work += stop - start
                for group in range(start, stop, WORD_GROUP):
                    mask = _near_mask(words, base + group, stride, query, cut)
                    if stop - group < WORD_GROUP:
                        mask &= (_ONE << np.uint64(stop - group)) - _ONE
                    while mask:
                        place = group + _lowest(mask)
                        mask &= mask - _ONE
                        _prefetch(items, table * items.shape[1] + place)
                        queue[waiting] = place
                        waiting += 1
                    if waiting > _QUEUE - WORD_GROUP:
                        if not _keep(
                            query, words, stride, items, starts, length, tables, table, radius,
                            k, queue, waiting, state, totals, other, keys, spare,
                        ):  # fmt: skip
                            return TOO_MANY
                        work += waiting * _KEPT
                        waiting = np.int64(0)
                        cut = words.dtype.type(state[_CUT])
                        if work > budget:
                            return TOO_DEAR
            if not _keep(
                query, words, stride, items, starts, length, tables, table, radius,
                k, queue, waiting, state, totals, other, keys, spare,
            ):  # fmt: skip
                return TOO_MANY
            work += waiting * _KEPT
            waiting = np.int64(0)
            if tables * radius + table >= np.int64(state[_CUT]):
                return COMPLETE
            if work > budget:
                return TOO_DEAR
    return COMPLETE if len(offsets) == length + 2 else TOO_DEAR


@_jit
def probe_nearest(
    queries: Any,
    first: int,
    last: int,
    directory: Any,
    words: Any,
    stride: int,
    items: Any,
    masks: Any,
    offsets: Any,
    starts: Any,
    positions: Any,
    length: int,
    bits: int,
    budget: int,
    lookup: int,
    guess: Any,
    found: Any,
    distances: Any,
    done: Any,
    tally: Any,
) -> Any:
    """Fill found and distances (n_queries, k) for the queries ``first`` to ``last``.

    done (n_queries,) says for which that was cheap enough; when most attempts fail, the rest of
    the queries is not tried: tally (2,) counts attempts and failures, of all threads together.
    ``guess`` is a distance that k items are likely to be within: it saves looking at the many
    beyond. The return value is the guess for a next query, from the last one.
    """
    k = found.shape[1]
    totals = np.zeros(bits + 1, dtype=np.int64)
    other = np.zeros(queries.shape[1], dtype=queries.dtype)
    keys = np.empty(2 * k + 1024, dtype=np.uint64)
    spare = np.empty(len(keys), dtype=np.uint64)
    queue = np.empty(_QUEUE, dtype=np.uint64)
    state = np.empty(4, dtype=np.uint64)
    for q in range(first, last):
        query = queries[q]
        most = guess
        while True:
            end = _probe(
                query, directory, words, stride, items, masks, offsets, starts, length,
                k, most, budget, lookup, queue, state, totals, other, keys, spare,
            )  # fmt: skip
            if end != COMPLETE or most == bits or np.int64(state[_FOUND]) >= k:
                break
            most = bits
        if end == COMPLETE:
            guess = min(bits, np.int64(state[_CUT]) + 2)
            count = np.int64(state[_COUNT])
            _sort(keys, spare, count, np.int64(0), np.int64(48))
            _expand(keys, min(count, k), starts, positions, found[q], distances[q], _DISTANCE)
            done[q] = 1
        else:
            tally[1] += 1
        tally[0] += 1
        if tally[1] >= 4 and 2 * tally[1] > tally[0]:
            break
    return guess


@_jit
def probe_within(
    queries: Any,
    first: int,
    last: int,
    directory: Any,
    words: Any,
    stride: int,
    items: Any,
    masks: Any,
    offsets: Any,
    starts: Any,
    length: int,
    bits: int,
    radius: int,
    budget: int,
    lookup: int,
    done: Any,
    tally: Any,
) -> Any:
    """Sorted records of the queries ``first`` to ``last``, as ``scan_within`` has them."""
    totals = np.zeros(bits + 1, dtype=np.int64)
    other = np.zeros(queries.shape[1], dtype=queries.dtype)
    keys = np.empty(1024, dtype=np.uint64)
    queue = np.empty(_QUEUE, dtype=np.uint64)
    state = np.empty(4, dtype=np.uint64)
    records = np.empty(1024, dtype=np.uint64)
    total = np.int64(0)
    for q in range(first, last):
        end = TOO_MANY
        query = queries[q]
        while True:
            end = _probe(
                query, directory, words, stride, items, masks, offsets, starts, length,
                np.int64(_NO_BOUND), radius, budget, lookup, queue, state, totals, other, keys,
                keys,
            )  # fmt: skip
            if end != TOO_MANY:
                break
            keys = np.empty(4 * len(keys), dtype=np.uint64)
        if end == COMPLETE:
            count = np.int64(state[_COUNT])
            _sort(keys, np.empty(count, dtype=np.uint64), count, np.int64(0), np.int64(48))
            records = _with_room(records, total, count)
            for i in range(count):
                records[total + i] = (np.uint64(q) << np.uint64(43)) | keys[i]
            total += count
            done[q] = 1
        else:
            tally[1] += 1
        tally[0] += 1
        if tally[1] >= 4 and 2 * tally[1] > tally[0]:
            break
    return records[:total]


# Ranked searches: a bit that differs costs its weight, and equal costs may be ordered by a second,
# finer code. A key is (cost << 32 | item); costs are below 2 ** 31.


@_jit
def _take(
    key: Any,
    starts: Any,
    shift: int,
    k: int,
    ties: bool,
    keys: Any,
    spare: Any,
    totals: Any,
    state: Any,
) -> bool:
    """Add a key to those of a query; False when there is no room, which happens with ``ties`` only.

    keys hold at least the k smallest, with ``ties`` everything up to the k-th cost. totals count
    positions by ``cost >> shift``; state is that of ``_keep``, with such a level as the cut.
    """
    cut = np.int64(state[_CUT])
    level = np.int64(key >> _ITEM_BITS) >> shift
    if level > cut or key >= state[_BOUND]:
        return True
    count = np.int64(state[_COUNT])
    if count == len(keys):
        kept = np.int64(0)
        for i in range(count):
            if np.int64(keys[i] >> _ITEM_BITS) >> shift <= cut:
                keys[kept] = keys[i]
                kept += 1
        count = kept
        state[_COUNT] = count
        if 2 * count > len(keys):
            if ties:
                return False
            _sort(keys, spare, count, np.int64(0), np.int64(64))
            count = np.int64(k)
            state[_COUNT] = count
            state[_BOUND] = keys[k - 1]
            if key >= state[_BOUND]:
                return True
    keys[count] = key
    state[_COUNT] = count + 1
    weight = _weight(starts, key & _ITEM)
    totals[level] += weight
    found = np.int64(state[_FOUND]) + weight
    while found - totals[cut] >= k:
        found -= totals[cut]
        cut -= 1
    state[_FOUND] = found
    state[_CUT] = cut
    return True


@_jit
def _start(totals: Any, state: Any) -> None:
    for level in range(len(totals)):
        totals[level] = 0
    state[_COUNT] = 0
    state[_FOUND] = 0
    state[_CUT] = len(totals) - 1
    state[_BOUND] = ~np.uint64(0)


@_jit
def _limit(state: Any, shift: int) -> Any:
    """The highest cost that may still be needed."""
    highest = ((np.int64(state[_CUT]) + 1) << shift) - 1
    return min(highest, np.int64(state[_BOUND] >> _ITEM_BITS))


@_jit
def _refine(
    keys: Any,
    count: int,
    starts: Any,
    positions: Any,
    fine: Any,
    query: Any,
    found: Any,
    costs: Any,
    fines: Any,
) -> None:
    """Fill found, costs and fines (k,) by (cost, fine distance, position) from sorted keys.

    fine (positions, words) holds the second codes in the order of the lists, so that those of one
    item lie together; query (words,) is the query's.
    """
    k = len(found)
    totals = np.zeros(64 * len(query) + 1, dtype=np.int64)
    room = np.empty(1024, dtype=np.uint64)
    spare = np.empty(1024, dtype=np.uint64)
    filled = np.int64(0)
    first = np.int64(0)
    while filled < k:
        level = keys[first] >> _ITEM_BITS
        last = first
        size = np.int64(0)
        while last < count and keys[last] >> _ITEM_BITS == level:
            size += _weight(starts, keys[last] & _ITEM)
            last += 1
        if size > len(room):
            room = np.empty(2 * size, dtype=np.uint64)
            spare = np.empty(2 * size, dtype=np.uint64)
        size = np.int64(0)
        totals[:] = 0
        for i in range(first, last):
            ahead = np.int64(keys[min(i + _AHEAD, last - 1)] & _ITEM)
            item = np.int64(keys[i] & _ITEM)
            place = item
            end = item + 1
            if len(starts):
                ahead = np.int64(starts[ahead])
                place = np.int64(starts[item])
                end = np.int64(starts[item + 1])
                _prefetch(positions, ahead)
            _prefetch(fine, ahead * len(query))
            while place < end:
                apart = _apart(fine, place, query)
                position = np.int64(positions[place]) if len(starts) else place
                room[size] = (np.uint64(apart) << _ITEM_BITS) | np.uint64(position)
                totals[apart] += 1
                size += 1
                place += 1
        left = k - filled
        if size > left:
            # of the last group only the nearest are sorted
            cut = np.int64(0)
            inside = totals[0]
            while inside < left:
                cut += 1
                inside += totals[cut]
            kept = np.int64(0)
            for i in range(size):
                if np.int64(room[i] >> _ITEM_BITS) <= cut:
                    room[kept] = room[i]
                    kept += 1
            size = kept
        _sort(room, spare, size, np.int64(0), np.int64(48))
        for i in range(min(size, left)):
            found[filled] = room[i] & _ITEM
            costs[filled] = level
            fines[filled] = room[i] >> _ITEM_BITS
            filled += 1
        first = last


@_jit
def _rank(
    keys: Any,
    spare: Any,
    count: int,
    starts: Any,
    positions: Any,
    fine: Any,
    query: Any,
    found: Any,
    costs: Any,
    fines: Any,
) -> None:
    """Fill one query's results from its keys, in any order; without fine codes by position."""
    _sort(keys, spare, count, np.int64(0), np.int64(64))
    if len(fine):
        _refine(keys, count, starts, positions, fine, query, found, costs, fines)
    else:
        _expand(keys, min(count, len(found)), starts, positions, found, costs, _ITEM)


@_jit
def _fill_filter(by_bit: Any, limit: int, never: Any, rarely: Any) -> Any:
    """Two tests that every item up to the cost ``limit`` passes.

    It differs in none of the bits of ``never``, each of which costs more, and in at most as many
    bits of ``rarely`` as the return value says: one more of them would cost more.
    """
    most = np.int64(1)
    best = np.int64(-(1 << 30))
    for bits in range(1, 9):
        heavy = np.int64(0)
        for i in range(len(by_bit)):
            heavy += (bits + 1) * by_bit[i] > limit
        if heavy - 8 * bits > best:
            best = heavy - 8 * bits
            most = np.int64(bits)
    size = 8 * never.itemsize
    one = never.dtype.type(1)
    for w in range(len(never)):
        never[w] = 0
        rarely[w] = 0
        for i in range(size):
            mark = one << never.dtype.type(i)
            if by_bit[w * size + i] > limit:
                never[w] |= mark
            if (most + 1) * by_bit[w * size + i] > limit:
                rarely[w] |= mark
    return most


@_jit
def _push(heap: Any, size: int, key: Any) -> None:
    child = size
    while child:
        parent = (child - 1) >> 1
        if heap[parent] <= key:
            break
        heap[child] = heap[parent]
        child = parent
    heap[child] = key


@_jit
def _pop(heap: Any, size: int) -> Any:
    """The smallest of ``size`` keys, which leaves the heap."""
    top = heap[0]
    last = heap[size - 1]
    size -= 1
    parent = 0
    while True:
        child = 2 * parent + 1
        if child >= size:
            break
        if child + 1 < size and heap[child + 1] < heap[child]:
            child += 1
        if heap[child] >= last:
            break
        heap[parent] = heap[child]
        parent = child
    heap[parent] = last
    return top


@_jit
def _examine(
    query: Any,
    by_bit: Any,
    equal: int,
    words: Any,
    stride: int,
    items: Any,
    starts: Any,
    length: int,
    table: int,
    seen: Any,
    shift: int,
    k: int,
    ties: bool,
    queue: Any,
    waiting: int,
    state: Any,
    totals: Any,
    other: Any,
    keys: Any,
    spare: Any,
) -> bool:
    """Take the places that wait in the queue into keys; False when there is no room for them."""
    tables = len(items)
    size = 8 * words.itemsize
    base = table * len(query) * stride
    kept = np.int64(0)
    limit = _limit(state, shift)
    for i in range(waiting):
        place = np.int64(queue[i])
        cost = np.int64(0)
        for w in range(len(query)):
            other[w] = query[w] ^ words[base + w * stride + place]
            left = np.uint64(other[w])
            if equal:
                cost += equal * np.int64(_popcount(left))
                continue
            while left:
                cost += by_bit[w * size + _lowest(left)]
                left &= left - _ONE
        if cost > limit:
            continue
        new = True
        if tables > 1:
            for t in range(tables):
                if t != table:
                    pattern = _key(other, t * length, length)
                    if (seen[t, pattern >> 6] >> np.uint64(pattern & 63)) & _ONE:
                        new = False
                        break
        if new:
            item = np.int64(items[table, place])
            if len(starts):
                _prefetch(starts, item)
            queue[kept] = (np.uint64(cost) << _ITEM_BITS) | np.uint64(item)
            kept += 1
    for i in range(kept):
        if not _take(queue[i], starts, shift, k, ties, keys, spare, totals, state):
            return False
    return True


@_jit
def _order_bits(
    query: Any, weights: Any, length: int, own: Any, rising: Any, patterns: Any
) -> None:
    """Fill the bucket number of a query in each table, and the bits of each by rising cost."""
    for table in range(len(own)):
        own[table] = _key(query, table * length, length)
        for i in range(length):
            weight = weights[table * length + i]
            j = i
            while j and rising[table, j - 1] > weight:
                rising[table, j] = rising[table, j - 1]
                patterns[table, j] = patterns[table, j - 1]
                j -= 1
            rising[table, j] = weight
            patterns[table, j] = np.int64(1) << (length - 1 - i)


@_jit
def _next_pattern(
    table: int,
    length: int,
    directory: Any,
    own: Any,
    rising: Any,
    patterns: Any,
    heaps: Any,
    sizes: Any,
    counts: Any,
    looked: Any,
    seen: Any,
    nexts: Any,
) -> Any:
    """Return the cost and the bits of the next look-up in a table, and note what comes after it."""
    heap = heaps[table]
    pattern = np.int64(0)
    reached = np.int64(0)
    if counts[table] == 0:
        heap[0] = (np.uint64(rising[table, 0]) << _ITEM_BITS) | np.uint64(patterns[table, 0])
        sizes[table] = 1
    else:
        top = _pop(heap, sizes[table])
        sizes[table] -= 1
        reached = np.int64(top >> _ITEM_BITS)
        pattern = np.int64(top & np.uint64(0xFFFFFF))
        last = np.int64((top >> np.uint64(24)) & np.uint64(255))
        if last + 1 < length:
            cost = reached + rising[table, last + 1]
            longer = pattern | patterns[table, last + 1]
            mark = np.uint64(last + 1) << np.uint64(24)
            for _ in range(2):
                _prefetch(directory, table * directory.shape[1] + (own[table] ^ longer))
                key = (np.uint64(cost) << _ITEM_BITS) | mark | np.uint64(longer)
                _push(heap, sizes[table], key)
                sizes[table] += 1
                cost -= rising[table, last]
                longer ^= patterns[table, last]
    looked[table, counts[table]] = pattern
    counts[table] += 1
    seen[table, pattern >> 6] |= _ONE << np.uint64(pattern & 63)
    nexts[table] = np.int64(heap[0] >> _ITEM_BITS)
    return reached, pattern


@_jit
def _probe_ranked(
    query: Any,
    by_bit: Any,
    weights: Any,
    directory: Any,
    words: Any,
    stride: int,
    items: Any,
    starts: Any,
    length: int,
    shift: int,
    k: int,
    ties: bool,
    budget: int,
    lookup: int,
    rising: Any,
    patterns: Any,
    heaps: Any,
    looked: Any,
    seen: Any,
    never: Any,
    rarely: Any,
    queue: Any,
    state: Any,
    totals: Any,
    other: Any,
    keys: Any,
    spare: Any,
) -> Any:
    """Find the cheapest items of one query; it ends like ``_probe``.

    In every table the bucket numbers are looked up by rising cost of the bits in which they differ
    from the query's own. A set of bits leads to two others, which cost as much or more: with the
    next bit in addition, and with it in place of the last one. An item that no table has reached
    costs at least the sum of what the tables come to next, so a table first looks up everything of
    one cost.
    """
    tables = len(directory)
    room = heaps.shape[1]
    _start(totals, state)
    sizes = np.zeros(tables, dtype=np.int64)
    counts = np.zeros(tables, dtype=np.int64)
    nexts = np.zeros(tables, dtype=np.int64)
    own = np.zeros(tables, dtype=np.int64)
    _order_bits(query, weights, length, own, rising, patterns)
    # what every bit costs, or 0 where they differ
    equal = weights[0]
    for weight in weights:
        if weight != equal:
            equal = np.int64(0)
    work = np.int64(0)
    limit = _limit(state, shift)
    most = _fill_filter(by_bit, limit, never, rarely)
    table = 0
    reached = np.int64(-1)
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
        work += lookup + stop - start
        base = table * len(query) * stride
        group = start
        while group < stop and end < 0:
            waiting = np.int64(0)
            while group < stop and waiting <= _QUEUE - WORD_GROUP:
                mask = _cheap_mask(
                    words, base + group, stride, query, never, rarely, words.dtype.type(most)
                )
                if stop - group < WORD_GROUP:
                    mask &= (_ONE << np.uint64(stop - group)) - _ONE
                while mask:
                    place = group + _lowest(mask)
                    mask &= mask - _ONE
                    _prefetch(items, table * items.shape[1] + place)
                    queue[waiting] = place
                    waiting += 1
                group += WORD_GROUP
            work += waiting * _KEPT
            if not _examine(
                query, by_bit, equal, words, stride, items, starts, length, table, seen, shift, k,
                ties, queue, waiting, state, totals, other, keys, spare,
            ):  # fmt: skip
                end = TOO_MANY
            if _limit(state, shift) < limit:
                limit = _limit(state, shift)
                most = _fill_filter(by_bit, limit, never, rarely)
            if work > budget and end < 0:
                end = TOO_DEAR
        if end < 0:
            least = np.int64(0)
            for t in range(tables):
                least += nexts[t]
            if sizes[table] == 0 or least > limit:
                end = COMPLETE
            elif sizes[table] + 2 > room or counts[table] == room or work > budget:
                end = TOO_DEAR
    for table in range(tables):
        for i in range(counts[table]):
            seen[table, looked[table, i] >> 6] = 0
    return end


@_jit
def probe_ranked(
    queries: Any,
    weights: Any,
    first: int,
    last: int,
    directory: Any,
    words: Any,
    stride: int,
    items: Any,
    starts: Any,
    positions: Any,
    length: int,
    levels: int,
    room: int,
    budget: int,
    lookup: int,
    fine: Any,
    fine_queries: Any,
    found: Any,
    costs: Any,
    fines: Any,
    done: Any,
    tally: Any,
) -> None:
    """Fill found, costs and fines (n_queries, k) for the queries ``first`` to ``last``.

    queries (n_queries, words) and weights (n_queries, bits); done and tally are those of
    ``probe_nearest``. At most ``room`` bucket numbers are looked up in one table.
    """
    k = found.shape[1]
    tables = len(directory)
    size = 8 * words.itemsize
    by_bit = np.zeros(size * queries.shape[1], dtype=np.int64)
    rising = np.zeros((tables, length), dtype=np.int64)
    patterns = np.zeros((tables, length), dtype=np.int64)
    heaps = np.empty((tables, room + 2), dtype=np.uint64)
    looked = np.empty((tables, room + 2), dtype=np.int64)
    seen = np.zeros((tables, ((1 << length) + 63) >> 6), dtype=np.uint64)
    never = np.zeros(queries.shape[1], dtype=queries.dtype)
    rarely = np.zeros(queries.shape[1], dtype=queries.dtype)
    other = np.zeros(queries.shape[1], dtype=queries.dtype)
    totals = np.zeros(levels, dtype=np.int64)
    queue = np.empty(_QUEUE, dtype=np.uint64)
    state = np.empty(4, dtype=np.uint64)
    keys = np.empty(2 * k + 1024, dtype=np.uint64)
    spare = np.empty(len(keys), dtype=np.uint64)
    for q in range(first, last):
        total = np.int64(0)
        for bit in range(weights.shape[1]):
            total += weights[q, bit]
            by_bit[(bit // size + 1) * size - 1 - bit % size] = weights[q, bit]
        shift = np.int64(0)
        while total >> shift >= levels:
            shift += 1
        while True:
            end = _probe_ranked(
                queries[q], by_bit, weights[q], directory, words, stride, items, starts, length,
                shift, k, len(fine) > 0, budget, lookup, rising, patterns, heaps, looked, seen,
                never, rarely, queue, state, totals, other, keys, spare,
            )  # fmt: skip
            if end != TOO_MANY:
                break
            keys = np.empty(4 * len(keys), dtype=np.uint64)
            spare = np.empty(len(keys), dtype=np.uint64)
        if end == COMPLETE:
            count = np.int64(state[_COUNT])
            _rank(
                keys, spare, count, starts, positions, fine, fine_queries[q], found[q], costs[q],
                fines[q],
            )  # fmt: skip
            done[q] = 1
        else:
            tally[1] += 1
        tally[0] += 1
        if tally[1] >= 4 and 2 * tally[1] > tally[0]:
            break


@_jit
def _fill_halves(weights: Any, halves: Any) -> None:
    """Costs (2 * bytes, 16) of what differs in each half byte; weights (bits,)."""
    for half in range(len(halves)):
        halves[half, 0] = 0
        for value in range(1, 16):
            bit = 4 * half + 3 - _lowest(np.uint64(value))
            more = weights[bit] if bit < len(weights) else 0
            halves[half, value] = halves[half, value & (value - 1)] + more


@_jit
def _fill_bounds(halves: Any, limit: int, bounds: Any) -> Any:
    """The same in bytes, rounded down to units of which ``limit`` has at most 254; the unit."""
    unit = limit // 254 + 1
    for half in range(len(halves)):
        for value in range(16):
            bounds[half, value] = min(halves[half, value] // unit, 255)
    return unit


@_jit
def scan_ranked(
    queries: Any,
    weights: Any,
    planes: Any,
    total: int,
    starts: Any,
    first: int,
    last: int,
    tile: int,
    k: int,
    levels: int,
    ties: bool,
    block: Any,
    keys: Any,
    counts: Any,
) -> None:
    """Collect the keys of the cheapest items among the blocks ``first`` to ``last``.

    queries (b, width), weights (b, bits); keys (b, room) and counts (b,) receive them, in no order.
    A count is -1 when there was no room for all ties. Codes are compared by tables of bytes that
    are rounded down; what passes is computed again.
    """
    width = queries.shape[1]
    halves = np.zeros((len(queries), 2 * width, 16), dtype=np.int64)
    bounds = np.zeros((len(queries), 2 * width, 16), dtype=np.uint8)
    totals = np.zeros((len(queries), levels), dtype=np.int32)
    states = np.zeros((len(queries), 4), dtype=np.uint64)
    # what the bytes are relative to, and from which value on they are too large
    units = np.ones(len(queries), dtype=np.int64)
    rated = np.zeros(len(queries), dtype=np.int64)
    limits = np.zeros(len(queries), dtype=np.int64)
    shifts = np.zeros(len(queries), dtype=np.int64)
    spare = np.empty(keys.shape[1], dtype=np.uint64)
    for q in range(len(queries)):
        _fill_halves(weights[q], halves[q])
        _start(totals[q], states[q])
        while weights[q].sum() >> shifts[q] >= levels:
            shifts[q] += 1
        limits[q] = _limit(states[q], shifts[q])
        rated[q] = limits[q]
        units[q] = _fill_bounds(halves[q], limits[q], bounds[q])
        counts[q] = 0
    for start in range(first, last, tile):
        stop = min(start + tile, last)
        for q in range(len(queries)):
            if counts[q] < 0:
                continue
            below = np.uint8(limits[q] // units[q] + 1)
            for b in range(start, stop):
                offset = b * width * PLANE_BLOCK
                if not _block_cheap(planes, offset, width, queries, q, bounds, below, block):
                    continue
                for lane in range(0, PLANE_BLOCK, SCAN_LANES):
                    mask = _below_mask(block, lane, below)
                    while mask:
                        i = lane + _lowest(mask)
                        mask &= mask - _ONE
                        if b * PLANE_BLOCK + i >= total:
                            break
                        cost = np.int64(0)
                        for byte in range(width):
                            value = planes[offset + byte * PLANE_BLOCK + i] ^ queries[q, byte]
                            cost += halves[q, 2 * byte, value >> 4]
                            cost += halves[q, 2 * byte + 1, value & 15]
                        if cost > limits[q]:
                            continue
                        key = (np.uint64(cost) << _ITEM_BITS) | np.uint64(b * PLANE_BLOCK + i)
                        if not _take(
                            key, starts, shifts[q], k, ties, keys[q], spare, totals[q], states[q]
                        ):
                            counts[q] = -1
                            break
                        limits[q] = _limit(states[q], shifts[q])
                    if counts[q] < 0:
                        break
                if counts[q] < 0:
                    break
                if 8 * limits[q] < 7 * rated[q]:
                    rated[q] = limits[q]
                    units[q] = _fill_bounds(halves[q], limits[q], bounds[q])
                below = np.uint8(limits[q] // units[q] + 1)
    for q in range(len(queries)):
        if counts[q] == 0:
            counts[q] = np.int64(states[q, _COUNT])


@_jit
def finish_ranked(
    keys: Any,
    counts: Any,
    starts: Any,
    positions: Any,
    fine: Any,
    fine_queries: Any,
    found: Any,
    costs: Any,
    fines: Any,
) -> None:
    """Merge what ``scan_ranked`` collected in each part into found, costs and fines (b, k).

    keys (parts, b, room) and counts (parts, b); queries that lack room in a part are left out.
    """
    room = keys.shape[0] * keys.shape[2]
    row = np.empty(room, dtype=np.uint64)
    spare = np.empty(room, dtype=np.uint64)
    for q in range(found.shape[0]):
        count = np.int64(0)
        whole = True
        for part in range(keys.shape[0]):
            whole = whole and counts[part, q] >= 0
            for i in range(counts[part, q]):
                row[count] = keys[part, q, i]
                count += 1
        if whole:
            _rank(
                row, spare, count, starts, positions, fine, fine_queries[q], found[q], costs[q],
                fines[q],
            )  # fmt: skip
