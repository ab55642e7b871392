"""Batch normalisation and ReLU6 in one pass each way, for training on CUDA.

PyTorch runs the two separately, and its kernels for channels-last half precision reach a fraction
of the memory bandwidth: a large part of a training step of EfficientNet-Lite0. Here the forward
pass reads the input twice and writes once. The backward pass reads input and gradient twice and
writes once; it derives from the input where ReLU6 was flat, so nothing else is stored.

The kernels need Triton, which comes with PyTorch's CUDA builds. Without it, on other devices or in
another memory format, the layers run unfused. In evaluation they are fused if no gradient is
needed.
"""

from __future__ import annotations

import functools
import logging
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

logger = logging.getLogger(__name__)

PROGRAMS = 1056  # eight per multiprocessor of a large GPU
TILE_VALUES = 2048  # values per program at a time: their sums stay in registers
LARGEST = 64
_TILE = ("M", "C", "BLOCK_C", "ROWS")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def usable(norm: nn.BatchNorm2d, values: Tensor) -> bool:
    """Whether :func:`normalise` can replace a layer on these values (n, channels, h, w)."""
    return (
        values.is_cuda
        # A subclass may compute something else, such as statistics over several processes.
        and type(norm) is nn.BatchNorm2d
        and values.dtype in DTYPES
        and norm.affine
        and norm.track_running_stats
        and norm.momentum is not None
        and values.shape[1] % 8 == 0
        and values.is_contiguous(memory_format=torch.channels_last)
        # In evaluation there is no backward pass here.
        and (norm.training or not (torch.is_grad_enabled() and _has_gradient(norm, values)))
        and _works(values.device)
    )


@functools.cache
def _works(device: torch.device) -> bool:
    """Whether Triton's kernels compile and run on a device; tried once."""
    try:
        values = torch.zeros(1, 8, 1, 1, device=device)
        saved, ones = torch.zeros(2, 8, device=device), torch.ones(8, device=device)
        _normalised(values.contiguous(memory_format=torch.channels_last), saved, ones, ones, True)
        torch.cuda.synchronize(device)
    except ImportError:
        return False
    except Exception as error:  # no C compiler, no headers, an unknown GPU
        logger.warning("batch normalisation is not fused with ReLU6: %s", error)
        return False
    return True


def _has_gradient(norm: nn.BatchNorm2d, values: Tensor) -> bool:
    return values.requires_grad or norm.weight.requires_grad or norm.bias.requires_grad


def normalise(norm: nn.BatchNorm2d, values: Tensor, *, relu6: bool) -> Tensor:
    """Apply the layer, and ReLU6 if asked, to values (n, channels, h, w) in channels-last order.

    While training, the running statistics are updated as the layer itself would update them.
    """
    mean, variance = norm.running_mean, norm.running_var
    if not norm.training:
        saved = torch.stack([mean, (variance + norm.eps).rsqrt()])  # type: ignore[operator]
        return _normalised(values, saved, norm.weight, norm.bias, relu6)
    return _FusedNorm.apply(
        values, norm.weight, norm.bias, mean, variance, norm.momentum, norm.eps, relu6
    )


def _normalised(values: Tensor, saved: Tensor, weight: Tensor, bias: Tensor, relu6: bool) -> Tensor:
    kernels, _, sizes = _plan(values)
    out = torch.empty_like(values)
    few = _only(sizes, *_TILE)
    with _on(values):
        kernels.apply[_tiles(sizes)](values, out, saved, weight, bias, RELU6=relu6, **few)
    return out


def _on(values: Tensor) -> AbstractContextManager:
    """Make the device of the values current: Triton launches its kernels there."""
    return torch.cuda.device(values.device) if values.is_cuda else nullcontext()


class _FusedNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor,
        mean: Tensor,
        variance: Tensor,
        momentum: float,
        epsilon: float,
        relu6: bool,
    ) -> Tensor:
        kernels, grid, sizes = _plan(x)
        splits, channels = grid[1], sizes["C"]
        partial = torch.empty(2, splits, channels, device=x.device)
        saved = torch.empty(2, channels, device=x.device)
        with _on(x):
            kernels.moments[grid](x, mean, partial, **sizes)
            given = {"momentum": momentum, "epsilon": epsilon, **_only(sizes, "M", "C", "BLOCK_C")}
            kernels.finish_moments[grid[:1]](partial, saved, mean, variance, splits, **given)
        ctx.save_for_backward(x, saved, weight, bias)
        ctx.relu6 = relu6
        return _normalised(x, saved, weight, bias, relu6)

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, *gradients: Any
    ) -> tuple[Tensor | None, ...]:
        x, saved, weight, bias = ctx.saved_tensors
        dy = gradients[0].contiguous(memory_format=torch.channels_last)
        kernels, grid, sizes = _plan(x)
        splits, channels = grid[1], sizes["C"]
        partial = torch.empty(2, splits, channels, device=x.device)
        sums = torch.empty(2, channels, device=x.device)
        dx = torch.empty_like(x)
        with _on(x):
            kernels.slopes[grid](x, dy, saved, weight, bias, partial, RELU6=ctx.relu6, **sizes)
            kernels.finish_slopes[grid[:1]](partial, sums, splits, **_only(sizes, "C", "BLOCK_C"))
            kernels.apply_slopes[_tiles(sizes)](
                x, dy, dx, saved, weight, bias, sums, RELU6=ctx.relu6, **_only(sizes, *_TILE)
            )
        return dx, sums[1], sums[0], None, None, None, None, None


def _plan(x: Tensor) -> tuple[Any, tuple[int, int], dict[str, int]]:
    """Return the kernels, a grid of (blocks of channels, splits of the rows), and the sizes."""
    from fisherhash.backbones import _norm_kernels

    channels = x.shape[1]
    rows = x.numel() // channels
    # The largest power of two that divides the channels: no lane is ever masked.
    block = min(channels & -channels, LARGEST)
    blocks = channels // block
    most = max(1, PROGRAMS // blocks)
    tile = TILE_VALUES // block
    each = -(-rows // (tile * most)) * tile  # rows per split, a multiple of the rows per tile
    sizes = {"M": rows, "C": channels, "EACH": each, "BLOCK_C": block, "ROWS": tile}
    return _norm_kernels, (blocks, -(-rows // each)), sizes


def _tiles(sizes: dict[str, int]) -> tuple[int, int]:
    return sizes["C"] // sizes["BLOCK_C"], -(-sizes["M"] // sizes["ROWS"])


def _only(sizes: dict[str, int], *names: str) -> dict[str, int]:
    return {name: sizes[name] for name in names}
