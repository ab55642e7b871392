"""Triton kernels of :mod:`fisherhash.backbones.fused_norm`.

An image batch in channels-last order is a matrix of M rows (pixels) and C columns (channels). A
program works on tiles of ROWS rows and BLOCK_C columns. Sums over rows are split among programs and
finished by another kernel, always in the same order, so that a step is reproducible to the bit.
"""

# Only Triton's compiler knows the types of kernel arguments (pointers and numbers).
# pyright: basic, reportArgumentType=false, reportMissingImports=false

from __future__ import annotations

import triton
import triton.language as tl

SPLITS = tl.constexpr(64)


@triton.jit
def moments(x, shift, partial, M, C, EACH, BLOCK_C: tl.constexpr, ROWS: tl.constexpr):
    """Sum x - shift and its square; the shift avoids cancellation when the mean is large."""
    columns = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    split = tl.program_id(1)
    first = split * EACH
    centre = tl.load(shift + columns)
    total = tl.zeros([ROWS, BLOCK_C], tl.float32)
    squares = tl.zeros([ROWS, BLOCK_C], tl.float32)
    for start in range(0, EACH, ROWS):
        rows = first + start + tl.arange(0, ROWS)
        inside = (rows < M)[:, None]
        offsets = rows.to(tl.int64)[:, None] * C + columns[None, :]
        values = tl.load(x + offsets, mask=inside, other=0.0).to(tl.float32)
        values = tl.where(inside, values - centre[None, :], 0.0)
        total += values
        squares += values * values
    here = partial + split * C + columns
    tl.store(here, tl.sum(total, 0))
    tl.store(here + tl.num_programs(1) * C, tl.sum(squares, 0))


@triton.jit
def added(partial, columns, splits, C, BLOCK_C: tl.constexpr):
    """Add up all splits (splits, C) for some columns."""
    total = tl.zeros([SPLITS, BLOCK_C], tl.float32)
    for first in range(0, splits, SPLITS):
        rows = first + tl.arange(0, SPLITS)
        offsets = rows[:, None] * C + columns[None, :]
        total += tl.load(partial + offsets, mask=(rows < splits)[:, None], other=0.0)
    return tl.sum(total, 0)


@triton.jit
def finish_moments(
    partial, saved, mean, variance, splits, M, C, momentum, epsilon, BLOCK_C: tl.constexpr
):
    """Store mean and 1 / deviation in ``saved`` and update the running statistics."""
    columns = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    total = added(partial, columns, splits, C, BLOCK_C)
    squares = added(partial + splits * C, columns, splits, C, BLOCK_C)
    before = tl.load(mean + columns)
    offset = total / M
    batch_mean = before + offset
    batch_variance = tl.maximum(squares / M - offset * offset, 0.0)
    tl.store(saved + columns, batch_mean)
    tl.store(saved + C + columns, 1.0 / tl.sqrt(batch_variance + epsilon))
    tl.store(mean + columns, before + momentum * offset)
    unbiased = batch_variance * M / tl.maximum(M - 1.0, 1.0)
    old = tl.load(variance + columns)
    tl.store(variance + columns, old + momentum * (unbiased - old))


@triton.jit
def apply(
    x, y, saved, weight, bias, M, C, BLOCK_C: tl.constexpr, ROWS: tl.constexpr, RELU6: tl.constexpr
):
    """y = (x - mean) / deviation * weight + bias, clamped to 0..6 if RELU6."""
    columns = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    rows = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    inside = (rows < M)[:, None]
    offsets = rows.to(tl.int64)[:, None] * C + columns[None, :]
    slope = tl.load(saved + C + columns) * tl.load(weight + columns)
    offset = tl.load(bias + columns) - tl.load(saved + columns) * slope
    values = tl.load(x + offsets, mask=inside, other=0.0).to(tl.float32)
    values = values * slope[None, :] + offset[None, :]
    if RELU6:
        values = tl.minimum(tl.maximum(values, 0.0), 6.0)
    tl.store(y + offsets, values.to(y.dtype.element_ty), mask=inside)


@triton.jit
def slopes(
    x,
    dy,
    saved,
    weight,
    bias,
    partial,
    M,
    C,
    EACH,
    BLOCK_C: tl.constexpr,
    ROWS: tl.constexpr,
    RELU6: tl.constexpr,
):
    """Sum g and g * xhat, where g is the gradient before ReLU6."""
    columns = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    split = tl.program_id(1)
    first = split * EACH
    mean = tl.load(saved + columns)
    inverse = tl.load(saved + C + columns)
    scale = tl.load(weight + columns)
    offset = tl.load(bias + columns)
    total = tl.zeros([ROWS, BLOCK_C], tl.float32)
    products = tl.zeros([ROWS, BLOCK_C], tl.float32)
    for start in range(0, EACH, ROWS):
        rows = first + start + tl.arange(0, ROWS)
        inside = (rows < M)[:, None]
        offsets = rows.to(tl.int64)[:, None] * C + columns[None, :]
        values = tl.load(x + offsets, mask=inside, other=0.0).to(tl.float32)
        slope = tl.load(dy + offsets, mask=inside, other=0.0).to(tl.float32)
        standard = (values - mean[None, :]) * inverse[None, :]
        if RELU6:
            linear = standard * scale[None, :] + offset[None, :]
            slope = tl.where((linear > 0.0) & (linear < 6.0), slope, 0.0)
        total += slope
        products += slope * standard
    here = partial + split * C + columns
    tl.store(here, tl.sum(total, 0))
    tl.store(here + tl.num_programs(1) * C, tl.sum(products, 0))


@triton.jit
def finish_slopes(partial, sums, splits, C, BLOCK_C: tl.constexpr):
    """Finish the two sums, which are the gradients of bias and weight."""
    columns = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    tl.store(sums + columns, added(partial, columns, splits, C, BLOCK_C))
    tl.store(sums + C + columns, added(partial + splits * C, columns, splits, C, BLOCK_C))


@triton.jit
def apply_slopes(
    x,
    dy,
    dx,
    saved,
    weight,
    bias,
    sums,
    M,
    C,
    BLOCK_C: tl.constexpr,
    ROWS: tl.constexpr,
    RELU6: tl.constexpr,
):
    """dx = weight / deviation * (g - mean(g) - xhat * mean(g * xhat))."""
    columns = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    rows = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    inside = (rows < M)[:, None]
    offsets = rows.to(tl.int64)[:, None] * C + columns[None, :]
    mean = tl.load(saved + columns)
    inverse = tl.load(saved + C + columns)
    scale = tl.load(weight + columns)
    mean_slope = tl.load(sums + columns) / M
    mean_product = tl.load(sums + C + columns) / M
    values = tl.load(x + offsets, mask=inside, other=0.0).to(tl.float32)
    slope = tl.load(dy + offsets, mask=inside, other=0.0).to(tl.float32)
    standard = (values - mean[None, :]) * inverse[None, :]
    if RELU6:
        linear = standard * scale[None, :] + tl.load(bias + columns)[None, :]
        slope = tl.where((linear > 0.0) & (linear < 6.0), slope, 0.0)
    slope = slope - mean_slope[None, :] - standard * mean_product[None, :]
    slope = slope * (scale * inverse)[None, :]
    tl.store(dx + offsets, slope.to(dx.dtype.element_ty), mask=inside)
