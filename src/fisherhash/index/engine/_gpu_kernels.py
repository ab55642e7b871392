"""Triton kernels of :mod:`fisherhash.index.engine.gpu`.

Codes are words of 32 bits, one plane per word: word w of code i is ``words[w * stride + i]``. Every
GROUP codes in a row are a group; the last group is filled up with copies of its last code.
"""

# Only Triton's compiler knows the types of kernel arguments (pointers and numbers).
# pyright: basic, reportArgumentType=false, reportMissingImports=false

from __future__ import annotations

import triton
import triton.language as tl

FARTHEST = tl.constexpr(32767)


@triton.jit
def count_ones(x, ASM: tl.constexpr):
    """The bits that are 1 in each word; Triton's interpreter does not know the instruction."""
    if ASM:
        return tl.inline_asm_elementwise(
            "popc.b32 $0, $1;", "=r,r", [x], dtype=tl.int32, is_pure=True, pack=1
        )
    else:
        x = x - ((x >> 1) & 0x55555555)
        x = (x & 0x33333333) + ((x >> 2) & 0x33333333)
        x = (x + (x >> 4)) & 0x0F0F0F0F
        x = x + (x >> 8)
        return (x + (x >> 16)) & 0x3F


@triton.jit
def minima_by_count(
    words,
    stride,
    queries,
    count,
    out,
    groups,
    WORDS: tl.constexpr,
    GROUP: tl.constexpr,
    TOGETHER: tl.constexpr,
    ASM: tl.constexpr,
):
    """The smallest distance in each group, for a few queries: a group is read once for all."""
    stride = stride.to(tl.int64)
    group = tl.program_id(0).to(tl.int64) * TOGETHER + tl.arange(0, TOGETHER)
    inside = group < groups
    places = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    for query in range(count):
        near = tl.zeros([TOGETHER, GROUP], tl.int32)
        for w in tl.static_range(WORDS):
            word = tl.load(words + w * stride + places, mask=inside[:, None], other=0)
            near += count_ones(word ^ tl.load(queries + query * WORDS + w), ASM)
        tl.store(out + query * groups + group, tl.min(near, 1).to(tl.int16), mask=inside)


@triton.jit
def minima_by_dot(
    words,
    stride,
    signs,
    ones,
    count,
    out,
    groups,
    WORDS: tl.constexpr,
    WIDE: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    QUERIES: tl.constexpr,
):
    """The smallest distance in each group, for many queries, on the matrix units.

    With a code's bits x and a query's bits q, the distance is |q| + x · (1 - 2q): ``ones`` are the
    |q|, ``signs`` the 1 - 2q, as bytes (count, 32 * WIDE), filled up with zeros to whole blocks of
    queries. WIDE is the power of two from WORDS on.
    """
    stride = stride.to(tl.int64)
    group = tl.program_id(0).to(tl.int64)
    query = tl.program_id(1) * QUERIES + tl.arange(0, QUERIES)
    plane = tl.arange(0, WIDE)[None, :]
    bit = tl.arange(0, 32)[None, None, :]
    sign = tl.load(signs + query[:, None] * (32 * WIDE) + tl.arange(0, 32 * WIDE)[None, :]).T
    best = tl.full([ROWS, QUERIES], FARTHEST, tl.int32)
    for start in range(0, GROUP, ROWS):
        places = group * GROUP + start + tl.arange(0, ROWS)
        word = tl.load(words + plane * stride + places[:, None], mask=plane < WORDS, other=0)
        bits = ((word[:, :, None] >> bit) & 1).to(tl.int8)
        bits = tl.reshape(bits, [ROWS, 32 * WIDE])
        best = tl.minimum(best, tl.dot(bits, sign, out_dtype=tl.int32))
    inside = query < count
    found = tl.min(best, 0) + tl.load(ones + query, mask=inside, other=0)
    tl.store(out + query.to(tl.int64) * groups + group, found.to(tl.int16), mask=inside)


@triton.jit
def distances_in_groups(
    words,
    stride,
    queries,
    pair_query,
    pair_group,
    out,
    WORDS: tl.constexpr,
    GROUP: tl.constexpr,
    ASM: tl.constexpr,
):
    """The distances (pairs, GROUP) of one query to the codes of one group, for each pair."""
    stride = stride.to(tl.int64)
    pair = tl.program_id(0).to(tl.int64)
    query = tl.load(pair_query + pair)
    group = tl.load(pair_group + pair)
    inner = tl.arange(0, GROUP)
    near = tl.zeros([GROUP], tl.int32)
    for w in tl.static_range(WORDS):
        word = tl.load(words + w * stride + group * GROUP + inner)
        near += count_ones(word ^ tl.load(queries + query * WORDS + w), ASM)
    tl.store(out + pair * GROUP + inner, near.to(tl.int16))
