"""Training in several processes under ``torchrun``: together they compute what one would.

Each process (a *rank*) runs its share of every batch through the network that is trained. The
features are gathered, so that every rank trains the head on the whole batch and updates a method's
state with all of it; no method has to know. What else depends on the whole batch is computed over
the ranks, too: the statistics of batch normalisation, and random numbers, which every rank draws
for the whole batch to use those of its own images. Features of a network that is not trained are
not shared: every rank has them all. The batch size is that of the whole batch, so a run can
continue on another number of ranks.

Gradients are the mean over the ranks. The head has its whole gradient on every rank; what goes
through :class:`_Gather` has a rank's part of it, times the number of ranks.
"""

from __future__ import annotations

import atexit
import contextlib
import datetime
import functools
import hashlib
import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from fisherhash.data.augment import PLAIN_DRAWS, Draws
from fisherhash.errors import FisherhashError, UsageError
from fisherhash.methods.base import AnyMethod, HashMethod
from fisherhash.system.devices import choose_device
from fisherhash.system.launched import launched_rank

T = TypeVar("T")

PATIENCE = datetime.timedelta(days=7)
"""How long ranks wait for the first one, which may decode a large data set. Where a rank fails,
``torchrun`` ends the others; they need not notice by themselves."""
_RANDOM_LAYER = re.compile("drop|stochastic", re.IGNORECASE)


@dataclass(frozen=True)
class Ranks:
    """The processes that train together, which may be this one alone.

    Attributes:
        rank: the number of this process.
        size: how many there are.
    """

    rank: int = 0
    size: int = 1

    def draws(self, batch: int) -> Draws:
        """Return the source of the random numbers of this rank's images in batches of this many."""
        return PLAIN_DRAWS if self.size == 1 else _SharedDraws(self.bounds(batch), batch)

    def bounds(self, count: int, rank: int | None = None) -> slice:
        """Return which of ``count`` images belong to a rank, by default this one.

        The first ranks have one more where they cannot have as many each.

        >>> [Ranks(rank, 3).bounds(5) for rank in range(3)]
        [slice(0, 2, None), slice(2, 4, None), slice(4, 5, None)]
        """
        rank = self.rank if rank is None else rank
        each, more = divmod(count, self.size)
        first = rank * each + min(rank, more)
        return slice(first, first + each + (rank < more))

    def own_rows(self, whole: Tensor, batch: int) -> Tensor:
        """Return those of the rows (views * batch, …) that are of this rank's images."""
        return whole.unflatten(0, (-1, batch))[:, self.bounds(batch)].flatten(0, 1)

    def whole_rows(self, rows: int, batch: int) -> int:
        """Return how many rows the whole batch has, of which this rank has ``rows``."""
        own = self.bounds(batch)
        return rows // (own.stop - own.start) * batch

    def gather(self, features: Tensor, batch: int) -> Tensor:
        """Return the rows (views * batch, …) of all ranks, of which this rank has its own."""
        return features if self.size == 1 else cast(Tensor, _Gather.apply(features, self, batch))

    def share_gradients(self, parameters: Iterable[nn.Parameter]) -> None:
        """Make the gradients of a step those of the whole batch, the same on every rank."""
        if self.size > 1:
            gradients = [p.grad for p in parameters if p.grad is not None]
            _at_once(gradients, dist.all_reduce)
            for gradient in gradients:
                gradient /= self.size

    @contextlib.contextmanager
    def whole_batches(self, network: nn.Module, batch: int) -> Iterator[None]:
        """Let layers that depend on the whole batch compute it over all ranks.

        Raises:
            UsageError: a layer cannot, or there are fewer images in a batch than ranks.
        """
        if self.size == 1:
            yield
            return
        if batch < self.size:
            raise UsageError(
                f"a batch of {batch} images cannot be shared by {self.size} processes; use fewer "
                "processes or a larger batch"
            )
        parts = list(network.modules())
        for part in parts:
            _check_layer(part)
        changed = [part for part in parts if type(part) in _WHOLE_LAYERS]
        kinds = [type(part) for part in changed]
        try:
            for part in changed:
                # The other class has the same tensors under the same names, so whoever knows the
                # layer, an optimiser or a checkpoint, need not know about this.
                part.ranks, part.batch = self, batch  # type: ignore[assignment]
                part.__class__ = _WHOLE_LAYERS[type(part)]
            yield
        finally:
            for part, kind in zip(changed, kinds, strict=True):
                part.__class__ = kind
                del part.ranks, part.batch

    def agree(self, module: nn.Module) -> None:
        """Give a module's tensors the values that they have on the first rank."""
        if self.size > 1:
            tensors = list(module.state_dict().values())
            _at_once(tensors, functools.partial(dist.broadcast, src=0))

    def on_first(self, function: Callable[[], T]) -> T:
        """Call a function on the first rank only; its result or error is every rank's."""
        if self.size == 1:
            return function()
        outcome: list[Any] = [None, None]
        if self.rank == 0:
            try:
                outcome[0] = function()
            except Exception as error:
                outcome[1] = error
        failed = outcome[1]
        dist.broadcast_object_list(outcome, 0)
        if outcome[1] is not None:
            raise outcome[1] if failed is None else failed
        return cast(T, outcome[0])

    @contextlib.contextmanager
    def in_turn(self) -> Iterator[None]:
        """Let the first rank of each machine go first, so that the others find what it stored."""
        first = os.environ.get("LOCAL_RANK", str(self.rank)) == "0"
        if self.size > 1 and not first:
            dist.barrier()
        yield
        if self.size > 1 and first:
            dist.barrier()

    def check_trainable(self, method: type[AnyMethod]) -> None:
        """Refuse a method that several ranks cannot train together."""
        if self.size > 1 and not issubclass(method, HashMethod):
            raise UsageError(
                f"{method.info.name} is not trained by gradient, so {self.size} processes cannot "
                "share its training; run the command without torchrun"
            )

    def check_same(self, what: str, content: bytes) -> None:
        """Raise an error where something differs between the ranks."""
        if self.size == 1:
            return
        found: list[Any] = [None] * self.size
        dist.all_gather_object(found, hashlib.sha256(content).hexdigest())
        other = next((rank for rank, one in enumerate(found) if one != found[0]), None)
        if other is not None:
            raise FisherhashError(
                f"process {other} has other {what} than process 0; give all of them the same data "
                "and the same command, then run it again"
            )


def current_ranks() -> Ranks:
    """Return the ranks that this process belongs to, once :func:`join` was called."""
    if dist.is_available() and dist.is_initialized():
        return Ranks(dist.get_rank(), dist.get_world_size())
    return Ranks()


def join(device: str | torch.device | None) -> tuple[Ranks, torch.device]:
    """Join the other processes that ``torchrun`` started, if there are any.

    Args:
        device: what the user chose; ``cuda`` is then one GPU per process.

    Returns:
        The ranks, and the device of this one.
    """
    chosen = choose_device(device)
    if launched_rank()[1] == 1 and current_ranks().size == 1:
        return Ranks(), chosen
    if chosen.type == "cuda":
        number, count = int(os.environ.get("LOCAL_RANK", "0")), torch.cuda.device_count()
        if int(os.environ.get("LOCAL_WORLD_SIZE", "1")) > count:
            raise UsageError(
                f"torchrun started {os.environ['LOCAL_WORLD_SIZE']} processes on a machine with "
                f"{count} GPUs; start at most one per GPU (--nproc-per-node {count}), or use "
                "--device cpu"
            )
        chosen = torch.device("cuda", number)
        torch.cuda.set_device(chosen)
    if not dist.is_initialized():
        # What is no tensor of the training travels between the hosts.
        backend = "cpu:gloo,cuda:nccl" if chosen.type == "cuda" else "gloo"
        dist.init_process_group(backend, timeout=PATIENCE)
        atexit.register(lambda: dist.is_initialized() and dist.destroy_process_group())
    return current_ranks(), chosen


def _at_once(tensors: Sequence[Tensor], operation: Callable[[Tensor], object]) -> None:
    """Apply a collective operation in place to many tensors, all of one type in one call."""
    kinds: dict[tuple[torch.dtype, str], list[Tensor]] = {}
    for tensor in tensors:
        kinds.setdefault((tensor.dtype, tensor.device.type), []).append(tensor)
    for (kind, _), some in kinds.items():
        flat = torch.cat([tensor.detach().flatten() for tensor in some])
        operation(flat.view(torch.uint8) if kind == torch.bool else flat)
        pieces = flat.split([tensor.numel() for tensor in some])
        for tensor, piece in zip(some, pieces, strict=True):
            tensor.detach().copy_(piece.view(tensor.shape))


class _Gather(torch.autograd.Function):
    """Rows (views * own, …) of every rank as rows (views * batch, …)."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, ranks: Ranks, batch: int) -> Tensor:
        ctx.ranks, ctx.batch = ranks, batch
        own = [ranks.bounds(batch, rank) for rank in range(ranks.size)]
        counts = [part.stop - part.start for part in own]
        by_image = values.unflatten(0, (-1, counts[ranks.rank])).transpose(0, 1)
        # Every rank sends as many rows as the others; those of the padding are dropped.
        sent = by_image.new_zeros(max(counts), *by_image.shape[1:])
        sent[: len(by_image)] = by_image
        found = [torch.empty_like(sent) for _ in counts]
        dist.all_gather(found, sent)
        rows = [part[:count] for part, count in zip(found, counts, strict=True)]
        return torch.cat(rows).transpose(0, 1).flatten(0, 1)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        return ctx.ranks.own_rows(grads[0], ctx.batch) * ctx.ranks.size, None, None


@dataclass
class _SharedDraws(Draws):
    """Draws for the whole batch, and returns the numbers of a rank's own images."""

    own: slice
    batch: int

    def uniform(
        self,
        shape: Sequence[int],
        low: float = 0.0,
        high: float = 1.0,
        *,
        device: torch.device,
        axis: int = 0,
    ) -> Tensor:
        whole = list(shape)
        whole[axis] = self.batch
        drawn = super().uniform(whole, low, high, device=device)
        return drawn.narrow(axis, self.own.start, self.own.stop - self.own.start)


def _check_layer(layer: nn.Module) -> None:
    """Refuse layers whose results depend on the other images of a batch in ways unknown here."""
    if not layer.training or type(layer) in _WHOLE_LAYERS:
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


_WHOLE_LAYERS: dict[type[nn.Module], type[nn.Module]] = {
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
        return _Sum.forward(ctx, grads[0])
