"""Layers that depend on the whole batch, computed over all the processes that share it."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from fisherhash.errors import UsageError

if TYPE_CHECKING:
    from fisherhash.training.distributed import Ranks

_RANDOM_LAYER = re.compile("drop|stochastic", re.IGNORECASE)


def check_layer(layer: nn.Module) -> None:
    """Refuse layers whose results depend on the other images of a batch in ways unknown here."""
    if not layer.training or type(layer) in TWINS:
        return
    chance = next(
        (getattr(layer, name, 0) for name in ("p", "drop_prob") if name in vars(layer)), 0
    )
    mixing = isinstance(layer, nn.modules.batchnorm._BatchNorm)
    if mixing or (chance and _RANDOM_LAYER.search(type(layer).__name__)):
        raise UsageError(
            f"the network has a layer {type(layer).__name__}, which cannot be shared by several "
            "processes with the results of one; train in one process, or with --frozen"
        )


class _WholeLayer(nn.Module):
    """What a layer that depends on the whole batch knows."""

    ranks: Ranks
    batch: int


class _WholeDropout(_WholeLayer, nn.Dropout):
    def forward(self, input: Tensor) -> Tensor:
        if not self.training or not self.p:
            return input
        rows = self.ranks.whole_rows(len(input), self.batch)
        kept = F.dropout(input.new_ones(rows, *input.shape[1:]), self.p)
        return input * self.ranks.own_rows(kept, self.batch)


class _WholeBatchNorm(_WholeLayer, nn.modules.batchnorm._BatchNorm):
    """Not ``nn.SyncBatchNorm``, which runs on GPUs only."""

    def forward(self, input: Tensor) -> Tensor:
        if not self.training:
            return super().forward(input)
        self._check_input_dim(input)
        dims, shape = [0, *range(2, input.ndim)], [1, -1] + [1] * (input.ndim - 2)
        each = input[0, 0].numel() if input.ndim > 2 else 1
        count = self.ranks.whole_rows(len(input), self.batch) * each
        wide = input.float()
        mean = cast(Tensor, _Sum.apply(wide.sum(dims))) / count
        centred = wide - mean.view(shape)
        variance = cast(Tensor, _Sum.apply(centred.square().sum(dims))) / count
        found = centred * (variance + self.eps).rsqrt().view(shape)
        if self.affine:
            found = found * self.weight.view(shape) + self.bias.view(shape)
        if self.running_mean is not None and self.running_var is not None:
            self.num_batches_tracked.add_(1)  # type: ignore[operator]
            share = self.momentum
            if share is None:
                share = 1.0 / float(self.num_batches_tracked)  # type: ignore[arg-type]
            self.running_mean.lerp_(mean.detach(), share)
            self.running_var.lerp_(variance.detach() * (count / (count - 1)), share)
        return found.to(input.dtype)


class _WholeBatchNorm1d(_WholeBatchNorm, nn.BatchNorm1d):
    pass


class _WholeBatchNorm2d(_WholeBatchNorm, nn.BatchNorm2d):
    pass


TWINS: dict[type[nn.Module], type[nn.Module]] = {
    nn.Dropout: _WholeDropout,
    nn.BatchNorm1d: _WholeBatchNorm1d,
    nn.BatchNorm2d: _WholeBatchNorm2d,
}


class _Sum(torch.autograd.Function):
    """The sum of a tensor over the ranks; its gradient is the sum of theirs."""

    @staticmethod
    def forward(ctx: Any, values: Tensor) -> Tensor:
        whole = values.clone()
        dist.all_reduce(whole)
        return whole

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Tensor:
        whole = grads[0].clone()
        dist.all_reduce(whole)
        return whole
