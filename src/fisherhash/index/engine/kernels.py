"""The numba kernels of the search engine; imported only when a search is large enough.

They release the GIL and are called from plain threads: numba's own parallel layer would make a
later ``fork`` of the process unsafe and would take much longer to compile. They are all in this one
file because numba rebuilds a cached kernel when its own file changes, but not when a kernel that it
calls does.

*Planes* hold codes for the scan: blocks of 256 codes, and in a block the first bytes of all codes,
then the second bytes, and so on. A *key* is ``distance << 32 | position``, so that the order of
keys is that of results.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numba
import numpy as np
from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic

PLANE_BLOCK = 256
"""Codes of one block of planes."""
WORD_GROUP = 16
"""Words of a bucket that are compared at once."""
SCAN_LANES = 64
"""Distances of a block that are compared with a limit at once."""
QUERY_SHIFT = 43
"""In a record of a radius search, the number of the query lies above this many bits of a key."""
# planes whose sum fits a byte
_BYTE_PLANES = 31

_ONE = np.uint64(1)
_POSITION = np.uint64((1 << 32) - 1)
_POSITION_BITS = np.uint64(32)
_DIGIT = np.uint64(255)
_NO_LIMIT = ~np.uint64(0)

# how the search of buckets ended
COMPLETE = 0
TOO_DEAR = 1
TOO_MANY = 2
# cost of one code that is examined further, in compared codes
_KEPT = 64
# entries of buckets that wait to be examined, while the memory fetches them
_QUEUE = 128
# how many look-ups ahead the memory is prefetched
_AHEAD = 8
# meaning of the numbers in the state of a search of buckets
_COUNT, _FOUND, _CUT, _BOUND = range(4)
_NO_BOUND = 1 << 40

_I1, _I8, _I16, _I32, _I64 = (ir.IntType(size) for size in (1, 8, 16, 32, 64))


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


def _typed_prefetch(typing_context: Any, values: Any, index: Any) -> Any:
    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        pointer = builder.gep(_data(context, builder, signature.args[0], args[0]), [args[1]])
        pointer = builder.bitcast(pointer, _I8.as_pointer())
        kind = ir.FunctionType(ir.VoidType(), [_I8.as_pointer(), _I32, _I32, _I32])
        function = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0i8")
        builder.call(function, [pointer, _I32(0), _I32(2), _I32(1)])
        return context.get_dummy_value()

    return types.void(values, types.int64), emit


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
                start = builder.add(args[1], builder.mul(plane, _I64(PLANE_BLOCK)))
                codes = _load(builder, builder.gep(data, [start]), block)
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
    typing_context: Any, words: Any, first: Any, stride: Any, query: Any, most: Any
) -> Any:
    """A bit for each of the WORD_GROUP codes from ``first`` on: is its distance at most ``most``?

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


_popcount: Any = intrinsic(_typed_popcount)
_lowest: Any = intrinsic(_typed_lowest)
_prefetch: Any = intrinsic(_typed_prefetch)
_block_below: Any = intrinsic(_typed_block_below)
_below_mask: Any = intrinsic(_typed_below_mask)
_near_mask: Any = intrinsic(_typed_near_mask)


@_jit
def _cut(positions: Any, distances: Any, count: int, k: int, totals: Any) -> Any:
    """Keep the k nearest of a row whose positions ascend; return how many, and the new limit."""
    totals[:] = 0
    for i in range(count):
        totals[distances[i]] += 1
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
        positions[kept] = positions[i]
        distances[kept] = distances[i]
        kept += 1
    return kept, level


@_jit
def scan_nearest(
    queries: Any,
    planes: Any,
    total: int,
    first: int,
    last: int,
    tile: int,
    k: int,
    bits: int,
    block: Any,
    positions: Any,
    distances: Any,
    counts: Any,
) -> None:
    """Keep the k nearest codes of each query among the blocks ``first`` to ``last``.

    queries (b, width); positions, distances (b, room) and counts (b,) receive them by ascending
    position. block (256,) is scratch.
    """
    width = queries.shape[1]
    room = positions.shape[1]
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
                    lowest = b * PLANE_BLOCK + lane
                    while mask:
                        i = _lowest(mask)
                        mask &= mask - _ONE
                        if lowest + i >= total:
                            break
                        positions[q, count] = lowest + i
                        distances[q, count] = block[lane + i]
                        count += 1
                    if count > room - SCAN_LANES:
                        count, level = _cut(positions[q], distances[q], count, k, totals)
                        limit = block.dtype.type(level)
            counts[q] = count
            limits[q] = limit
    for q in range(len(queries)):
        counts[q], _ = _cut(positions[q], distances[q], counts[q], k, totals)


@_jit
def finish_nearest(
    positions: Any, near: Any, counts: Any, bits: int, found: Any, distances: Any
) -> None:
    """Merge what ``scan_nearest`` kept in each part into found and distances (b, k).

    positions, near (parts, b, room) and counts (parts, b), with the parts in order.
    """
    k = found.shape[1]
    slots = np.zeros(bits + 1, dtype=np.int64)
    for q in range(found.shape[0]):
        slots[:] = 0
        for part in range(positions.shape[0]):
            for i in range(counts[part, q]):
                slots[near[part, q, i]] += 1
        before = 0
        for level in range(bits + 1):
            inside = slots[level]
            slots[level] = before
            before += inside
        for part in range(positions.shape[0]):
            for i in range(counts[part, q]):
                distance = near[part, q, i]
                slot = slots[distance]
                slots[distance] = slot + 1
                if slot < k:
                    found[q, slot] = positions[part, q, i]
                    distances[q, slot] = distance


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
                lowest = b * PLANE_BLOCK + lane
                while mask:
                    i = _lowest(mask)
                    mask &= mask - _ONE
                    if lowest + i >= total:
                        break
                    level = np.uint64(q << 11) | np.uint64(block[lane + i])
                    records[count] = (level << _POSITION_BITS) | np.uint64(lowest + i)
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
    """Records (query << 43 | key) of all codes up to the radius, in no order.

    Of the blocks ``first`` to ``last``, that is. block (256,) is scratch.
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
    return records[:count]


@_jit
def _sort(keys: Any, spare: Any, count: int) -> None:
    """Sort the first ``count`` keys byte by byte, from the lowest to the highest that differ."""
    if count <= 40:
        for i in range(1, count):
            key = keys[i]
            j = i
            while j and keys[j - 1] > key:
                keys[j] = keys[j - 1]
                j -= 1
            keys[j] = key
        return
    differing = np.uint64(0)
    for i in range(count):
        differing |= keys[i] ^ keys[0]
    slots = np.zeros(256, dtype=np.int64)
    swapped = False
    for shift in range(0, 64, 8):
        digit = np.uint64(shift)
        if (differing >> digit) & _DIGIT == 0:
            continue
        source = spare if swapped else keys
        target = keys if swapped else spare
        slots[:] = 0
        for i in range(count):
            slots[(source[i] >> digit) & _DIGIT] += 1
        before = 0
        for value in range(256):
            inside = slots[value]
            slots[value] = before
            before += inside
        for i in range(count):
            key = source[i]
            value = (key >> digit) & _DIGIT
            target[slots[value]] = key
            slots[value] += 1
        swapped = not swapped
    if swapped:
        for i in range(count):
            keys[i] = spare[i]


@_jit
def scan_weighted(
    planes: Any, tables: Any, total: int, first: int, last: int, k: int, keys: Any, spare: Any
) -> Any:
    """Put the k smallest keys among the blocks ``first`` to ``last`` into keys, sorted.

    tables (width, 256) hold the cost of every value of a byte. Returns how many keys there are.
    """
    width = len(tables)
    costs = np.zeros(PLANE_BLOCK, dtype=np.uint32)
    limit = np.uint32(0xFFFFFFFF)
    count = np.int64(0)
    for b in range(first, last):
        codes = planes[b * width * PLANE_BLOCK : (b + 1) * width * PLANE_BLOCK]
        costs[:] = 0
        for byte in range(width):
            table = tables[byte]
            plane = codes[byte * PLANE_BLOCK : (byte + 1) * PLANE_BLOCK]
            for i in range(PLANE_BLOCK):
                costs[i] += table[plane[i]]
        least = limit
        for i in range(PLANE_BLOCK):
            least = min(least, costs[i])
        if least >= limit:
            continue
        for i in range(min(PLANE_BLOCK, total - b * PLANE_BLOCK)):
            if costs[i] < limit:
                if count == len(keys):
                    _sort(keys, spare, count)
                    count = np.int64(k)
                    limit = np.uint32(keys[k - 1] >> _POSITION_BITS)
                    if costs[i] >= limit:
                        continue
                position = np.uint64(b * PLANE_BLOCK + i)
                keys[count] = (np.uint64(costs[i]) << _POSITION_BITS) | position
                count += 1
    _sort(keys, spare, count)
    return min(count, k)


@_jit
def _key(words: Any, first: int, length: int) -> Any:
    """Bits ``first`` to ``first + length`` of a code's words; at most 32 of them."""
    size = 8 * words.itemsize
    word = first // size
    end = first + length - word * size
    if end <= size:
        value = np.uint64(words[word]) >> np.uint64(size - end)
    else:
        value = np.uint64(words[word]) << np.uint64(end - size)
        value |= np.uint64(words[word + 1]) >> np.uint64(2 * size - end)
    return np.int64(value & ((_ONE << np.uint64(length)) - _ONE))


@_jit
def fill_table(
    words: Any, table: int, length: int, directory: Any, bucket_words: Any, bucket_items: Any
) -> None:
    """Sort codes into the buckets of one part of their bits, ascending in each.

    words (n, count); directory (2 ** length + 1,) receives where each bucket begins, bucket_words
    (count, room) the codes in the buckets, and bucket_items (n,) their positions.
    """
    first = table * length
    directory[:] = 0
    for i in range(len(words)):
        directory[_key(words[i], first, length) + 1] += 1
    for i in range(len(directory) - 1):
        directory[i + 1] += directory[i]
    for i in range(len(words)):
        key = _key(words[i], first, length)
        slot = directory[key]
        directory[key] = slot + 1
        for w in range(words.shape[1]):
            bucket_words[w, slot] = words[i, w]
        bucket_items[slot] = i
    for i in range(len(directory) - 1, 0, -1):
        directory[i] = directory[i - 1]
    directory[0] = 0


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
    length: int,
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
    """Take the bucket entries that wait in the queue into keys; False if there is no room for them.

    state holds, from step to step: the number of keys, how many of them are up to the cut, the cut
    (the last distance needed so far), and the key that later ones must be below.
    """
    base = table * len(query) * stride
    cut = np.int64(state[_CUT])
    count = np.int64(state[_COUNT])
    found = np.int64(state[_FOUND])
    for i in range(waiting):
        entry = np.int64(queue[i])
        distance = np.int64(0)
        for w in range(len(query)):
            other[w] = query[w] ^ words[base + w * stride + entry]
            distance += np.int64(_popcount(np.uint64(other[w])))
        if distance > cut:
            continue
        key = (np.uint64(distance) << _POSITION_BITS) | np.uint64(items[table, entry])
        if key >= state[_BOUND] or not _first_reached(other, len(items), length, table, radius):
            continue
        if count == len(keys):
            if count < 2 * k:
                return False
            _sort(keys, spare, count)
            count = np.int64(k)
            state[_BOUND] = keys[k - 1]
            if key >= state[_BOUND]:
                continue
        keys[count] = key
        count += 1
        totals[distance] += 1
        found += 1
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
    """Find the nearest codes of one query up to the distance ``most``.

    It ends COMPLETE, TOO_DEAR (the budget was not enough) or TOO_MANY (for keys, where k gives no
    bound). keys then hold, in no order, at least the k smallest. A step looks up all bucket numbers
    that differ in ``radius`` bits, in one table. After the step (radius, table) everything up to
    the distance tables * radius + table has been met.
    """
    tables = len(directory)
    # one table holds whole codes: all of a bucket are equally far, and the first k are enough
    whole = tables == 1 and length == len(totals) - 1
    work = np.int64(0)
    waiting = np.int64(0)
    state[_COUNT] = 0
    state[_FOUND] = 0
    state[_CUT] = most
    state[_BOUND] = _NO_LIMIT
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
            wanted = k - np.int64(state[_FOUND]) if whole else np.int64(_NO_BOUND)
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
                stop = min(np.int64(directory[table, number + 1]), start + wanted)
                work += stop - start
                for group in range(start, stop, WORD_GROUP):
                    mask = _near_mask(words, base + group, stride, query, cut)
                    if stop - group < WORD_GROUP:
                        mask &= (_ONE << np.uint64(stop - group)) - _ONE
                    while mask:
                        entry = group + _lowest(mask)
                        mask &= mask - _ONE
                        _prefetch(items, table * items.shape[1] + entry)
                        queue[waiting] = entry
                        waiting += 1
                    if waiting > _QUEUE - WORD_GROUP:
                        if not _keep(
                            query, words, stride, items, length, table, radius, k, queue, waiting,
                            state, totals, other, keys, spare,
                        ):  # fmt: skip
                            return TOO_MANY
                        work += waiting * _KEPT
                        waiting = np.int64(0)
                        cut = words.dtype.type(state[_CUT])
                        if work > budget:
                            return TOO_DEAR
            if not _keep(
                query, words, stride, items, length, table, radius, k, queue, waiting,
                state, totals, other, keys, spare,
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
    ``guess`` is a distance that k codes are likely to be within: it saves looking at the many
    beyond. The return value is the guess for a next query, from the last one.
    """
    k = found.shape[1]
    totals = np.zeros(bits + 1, dtype=np.int64)
    other = np.zeros(queries.shape[1], dtype=queries.dtype)
    keys = np.empty(2 * k + 1024, dtype=np.uint64)
    spare = np.empty(len(keys), dtype=np.uint64)
    queue = np.empty(_QUEUE, dtype=np.int64)
    state = np.empty(4, dtype=np.uint64)
    for q in range(first, last):
        query = queries[q]
        most = guess
        while True:
            end = _probe(
                query, directory, words, stride, items, masks, offsets, length,
                k, most, budget, lookup, queue, state, totals, other, keys, spare,
            )  # fmt: skip
            if end != COMPLETE or most == bits or np.int64(state[_FOUND]) >= k:
                break
            most = bits
        if end == COMPLETE:
            guess = min(bits, np.int64(state[_CUT]) + 2)
            _sort(keys, spare, np.int64(state[_COUNT]))
            for i in range(k):
                found[q, i] = keys[i] & _POSITION
                distances[q, i] = keys[i] >> _POSITION_BITS
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
    length: int,
    bits: int,
    radius: int,
    budget: int,
    lookup: int,
    done: Any,
    tally: Any,
) -> Any:
    """Records of the queries ``first`` to ``last``, as ``scan_within`` has them."""
    totals = np.zeros(bits + 1, dtype=np.int64)
    other = np.zeros(queries.shape[1], dtype=queries.dtype)
    keys = np.empty(1024, dtype=np.uint64)
    queue = np.empty(_QUEUE, dtype=np.int64)
    state = np.empty(4, dtype=np.uint64)
    records = np.empty(1024, dtype=np.uint64)
    total = np.int64(0)
    for q in range(first, last):
        end = TOO_MANY
        query = queries[q]
        while True:
            end = _probe(
                query, directory, words, stride, items, masks, offsets, length,
                np.int64(_NO_BOUND), radius, budget, lookup, queue, state, totals, other, keys,
                keys,
            )  # fmt: skip
            if end != TOO_MANY:
                break
            keys = np.empty(4 * len(keys), dtype=np.uint64)
        if end == COMPLETE:
            count = np.int64(state[_COUNT])
            records = _with_room(records, total, count)
            for i in range(count):
                records[total + i] = (np.uint64(q) << np.uint64(QUERY_SHIFT)) | keys[i]
            total += count
            done[q] = 1
        else:
            tally[1] += 1
        tally[0] += 1
        if tally[1] >= 4 and 2 * tally[1] > tally[0]:
            break
    return records[:total]
