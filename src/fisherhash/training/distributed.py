"""Training in several processes under ``torchrun``: together they compute what one would.

Each process (a *rank*) runs its share of every batch through the network. The outputs are gathered,
so that every rank computes the loss of the whole batch and updates a method's state with all of it;
no method has to know. Whatever else depends on the whole batch is computed over the ranks, too:
the statistics of batch normalisation, and random numbers, which every rank draws for the whole
batch to use those of its own images. The batch size is that of the whole batch, so a run can
continue on another number of ranks.
"""

from __future__ import annotations

import atexit
import contextlib
import datetime
import functools
import hashlib
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from fisherhash.data.augment import PLAIN_DRAWS, Draws
from fisherhash.errors import FisherhashError, UsageError
from fisherhash.methods.base import Batch, MethodInfo
from fisherhash.system.devices import choose_device
from fisherhash.system.launched import launched_rank

T = TypeVar("T")

PATIENCE = datetime.timedelta(days=7)
"""How long ranks wait for the first one, which may decode a large data set. Where a rank fails,
``torchrun`` ends the others; they need not notice by themselves."""

_RANDOM_LAYER = re.compile("drop|stochastic", re.IGNORECASE)


@dataclass(frozen=True)
class Whole:
    """The outputs of a whole batch, and those rows of them that this rank computed.

    Attributes:
        outputs: (b, …) of the whole batch.
        batch: the whole batch.
        own: what this rank computed, each with what it is a part of.
    """

    outputs: Tensor
    batch: Batch
    own: tuple[tuple[Tensor, Tensor], ...] = ()


class Ranks:
    """The processes that train together; this class is for a process that trains alone.

    Attributes:
        rank: the number of this process.
        size: how many there are.
    """

    rank: int = 0
    size: int = 1

    def draws(self, batch: int) -> Draws:
        """The random numbers of this rank's images in batches of this many."""
        return PLAIN_DRAWS

    def bounds(self, batch: int) -> slice:
        """Which images of a batch are this rank's."""
        return slice(0, batch)

    def share(self, index: Tensor) -> Tensor:
        """Return this rank's images of a batch, index (b,)."""
        return index[self.bounds(len(index))]

    def whole(self, outputs: Tensor, batch: Batch, index: Tensor, labels: Tensor) -> Whole:
        """Gather outputs and features of a batch from all ranks.

        Args:
            outputs: (rows, …) of this rank's images.
            batch: this rank's images.
            index: (b,) all images of the batch.
            labels: (N, classes) of the training set.
        """
        return Whole(outputs, batch)

    def backward(self, loss: Tensor, whole: Whole, parameters: Iterable[nn.Parameter]) -> None:
        """Compute the gradients of the loss of a whole batch, the same on every rank."""
        loss.backward()

    def spread(
        self, total: int, step: int, compute: Callable[[int, int], Tensor], width: int
    ) -> Tensor:
        """Compute rows (total, width) in blocks of ``step``; each rank computes some blocks.

        Args:
            total: number of rows.
            step: rows per block.
            compute: returns the rows from a first one up to another.
            width: values per row.
        """
        starts = range(0, total, step)
        return torch.cat([compute(start, min(start + step, total)) for start in starts])

    @contextlib.contextmanager
    def whole_batches(self, modules: Mapping[str, nn.Module], batch: int) -> Iterator[None]:
        """Let layers that depend on the whole batch compute it over all ranks."""
        yield

    def agree(self, module: nn.Module) -> None:
        """Give a module's tensors the values that they have on the first rank."""

    def on_first(self, function: Callable[[], T]) -> T:
        """Call a function on the first rank only; its result or error is every rank's."""
        return function()

    @contextlib.contextmanager
    def in_turn(self) -> Iterator[None]:
        """Let the first rank of each machine go first, so that the others find what it stored."""
        yield

    def check_trainable(self, info: MethodInfo) -> None:
        """Refuse a method that several ranks cannot train together."""

    def check_same(self, what: str, content: bytes) -> None:
        """Raise an error where something differs between the ranks."""


ALONE = Ranks()


def current_ranks() -> Ranks:
    """The ranks that this process belongs to, once :func:`join` was called."""
    together = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
    return _Group() if together else ALONE


def join(device: str | torch.device | None) -> tuple[Ranks, torch.device]:
    """Join the other processes that ``torchrun`` started, if there are any.

    Args:
        device: what the user chose; ``cuda`` is then one GPU per process.

    Returns:
        The ranks, and the device of this one.
    """
    size = launched_rank()[1]
    if size == 1 and current_ranks() is ALONE:
        return ALONE, choose_device(device)
    place = choose_device(device)
    if place.type == "cuda":
        number, count = int(os.environ.get("LOCAL_RANK", "0")), torch.cuda.device_count()
        if int(os.environ.get("LOCAL_WORLD_SIZE", "1")) > count:
            raise UsageError(
                f"torchrun started {os.environ['LOCAL_WORLD_SIZE']} processes on a machine with "
                f"{count} GPUs; start at most one per GPU (--nproc-per-node {count}), or use "
                "--device cpu"
            )
        place = torch.device("cuda", number)
        torch.cuda.set_device(place)
    if not dist.is_initialized():
        # What is no tensor of the training travels between the hosts.
        backend = "cpu:gloo,cuda:nccl" if place.type == "cuda" else "gloo"
        dist.init_process_group(backend, timeout=PATIENCE)
        atexit.register(_leave)
    return current_ranks(), place


def _leave() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


def _bounds(count: int, size: int, rank: int) -> tuple[int, int]:
    """The first and the last of ``count`` things that belong to a rank; the first have more.

    >>> [_bounds(5, 3, rank) for rank in range(3)]
    [(0, 2), (2, 4), (4, 5)]
    """
    each, more = divmod(count, size)
    first = rank * each + min(rank, more)
    return first, first + each + (rank < more)


class _Group(Ranks):
    """Several processes, connected by ``torch.distributed``."""

    def __init__(self) -> None:
        self.rank, self.size = dist.get_rank(), dist.get_world_size()

    def draws(self, batch: int) -> Draws:
        return _SharedDraws(self, batch)

    def bounds(self, batch: int) -> slice:
        return slice(*_bounds(batch, self.size, self.rank))

    def own_rows(self, whole: Tensor, batch: int) -> Tensor:
        """Those of the rows (views * batch, …) that are of this rank's images."""
        first, last = _bounds(batch, self.size, self.rank)
        return whole.unflatten(0, (-1, batch))[:, first:last].flatten(0, 1)

    def whole_rows(self, rows: int, batch: int) -> int:
        """How many rows the whole batch has, of which this rank has ``rows``."""
        first, last = _bounds(batch, self.size, self.rank)
        return rows // (last - first) * batch

    def whole(self, outputs: Tensor, batch: Batch, index: Tensor, labels: Tensor) -> Whole:
        own = outputs, batch.features
        found = [self._gather_views(values, len(index), batch.views) for values in own]
        for mine, leaf in zip(own, found, strict=True):
            leaf.requires_grad_(mine.requires_grad)
        rows = index.repeat(batch.views)
        all_images = Batch(labels[rows], rows, found[1], batch.views)
        return Whole(found[0], all_images, tuple(zip(own, found, strict=True)))

    def _gather_views(self, values: Tensor, batch: int, views: int) -> Tensor:
        """Rows (views * own, …) of every rank as rows (views * batch, …)."""
        by_image = values.detach().unflatten(0, (views, -1)).transpose(0, 1)
        counts = [last - first for first, last in self._all_bounds(batch)]
        return self._gather(by_image, counts).transpose(0, 1).flatten(0, 1)

    def _all_bounds(self, count: int) -> list[tuple[int, int]]:
        return [_bounds(count, self.size, rank) for rank in range(self.size)]

    def _gather(self, values: Tensor, counts: Sequence[int]) -> Tensor:
        """Rows of every rank, in the order of the ranks; they have ``counts`` rows."""
        most = max(counts)
        # Every rank sends as many rows as the others; those of the padding are dropped.
        sent = values.new_zeros(most, *values.shape[1:])
        sent[: len(values)] = values
        found = [torch.empty_like(sent) for _ in counts]
        dist.all_gather(found, sent)
        return torch.cat([rows[:count] for rows, count in zip(found, counts, strict=True)])

    def backward(self, loss: Tensor, whole: Whole, parameters: Iterable[nn.Parameter]) -> None:
        given = list(parameters)
        loss.backward()
        # What the loss uses directly has its whole gradient on every rank.
        for parameter in given:
            if parameter.grad is not None:
                parameter.grad /= self.size
        batch = len(whole.batch.index) // whole.batch.views
        pairs = [(mine, leaf.grad) for mine, leaf in whole.own if leaf.grad is not None]
        torch.autograd.backward(
            [mine for mine, _ in pairs], [self.own_rows(grad, batch) for _, grad in pairs]
        )
        _at_once([p.grad for p in given if p.grad is not None], dist.all_reduce)

    def spread(
        self, total: int, step: int, compute: Callable[[int, int], Tensor], width: int
    ) -> Tensor:
        starts = range(0, total, step)
        blocks = [starts[first:last] for first, last in self._all_bounds(len(starts))]
        counts = [sum(min(step, total - start) for start in some) for some in blocks]
        own = [compute(start, min(start + step, total)) for start in blocks[self.rank]]
        if not own:
            # The type is that of the first rank's rows, which has at least one block.
            own = [compute(0, min(step, total))[:0]]
        return self._gather(torch.cat(own).view(-1, width), counts)

    @contextlib.contextmanager
    def whole_batches(self, modules: Mapping[str, nn.Module], batch: int) -> Iterator[None]:
        if batch < self.size:
            raise UsageError(
                f"a batch of {batch} images cannot be shared by {self.size} processes; use fewer "
                "processes or a larger batch"
            )
        parts = [part for module in modules.values() for part in module.modules()]
        for part in parts:
            _check_layer(part)
        changed = [part for part in parts if type(part) in _TWINS]
        try:
            for part in changed:
                # A twin has the same tensors under the same names, so whoever knows the layer, an
                # optimiser or a checkpoint, need not know about this.
                part.ranks, part.batch = self, batch  # type: ignore[assignment]
                part.__class__ = _TWINS[type(part)]
            yield
        finally:
            plain = {twin: kind for kind, twin in _TWINS.items()}
            for part in changed:
                part.__class__ = plain.get(type(part), type(part))
                del part.ranks, part.batch

    def agree(self, module: nn.Module) -> None:
        _at_once(list(module.state_dict().values()), functools.partial(dist.broadcast, src=0))

    def on_first(self, function: Callable[[], T]) -> T:
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
        first = os.environ.get("LOCAL_RANK", str(self.rank)) == "0"
        if not first:
            dist.barrier()
        yield
        if first:
            dist.barrier()

    def check_trainable(self, info: MethodInfo) -> None:
        if info.fit != "gradient":
            raise UsageError(
                f"{info.name} is not trained by gradient, so {self.size} processes cannot share "
                "its training; run the command without torchrun"
            )

    def check_same(self, what: str, content: bytes) -> None:
        digest = hashlib.sha256(content).hexdigest()
        found: list[Any] = [None] * self.size
        dist.all_gather_object(found, digest)
        other = next((rank for rank, one in enumerate(found) if one != found[0]), None)
        if other is not None:
            raise FisherhashError(
                f"process {other} has other {what} than process 0; give all of them the same data "
                "and the same command, then run it again"
            )


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


class _SharedDraws(Draws):
    """Draws for the whole batch, and returns the numbers of a rank's own images."""

    def __init__(self, ranks: _Group, batch: int) -> None:
        self.bounds, self.batch = _bounds(batch, ranks.size, ranks.rank), batch

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
        first, last = self.bounds
        return super().uniform(whole, low, high, device=device).narrow(axis, first, last - first)


def _check_layer(layer: nn.Module) -> None:
    """Refuse layers whose results depend on the other images of a batch in ways unknown here."""
    if not layer.training or type(layer) in _TWINS:
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

    ranks: _Group
    batch: int


class _WholeDropout(_WholeLayer, nn.Dropout):
    def forward(self, input: Tensor) -> Tensor:
        if not self.training or not self.p:
            return input
        rows = self.ranks.whole_rows(len(input), self.batch)
        kept = F.dropout(input.new_ones(rows, *input.shape[1:]), self.p)
        return input * self.ranks.own_rows(kept, self.batch)


class _WholeBatchNorm(_WholeLayer, nn.modules.batchnorm._BatchNorm):
    def forward(self, input: Tensor) -> Tensor:
        if not self.training:
            return super().forward(input)
        self._check_input_dim(input)
        each = input[0, 0].numel() if input.ndim > 2 else 1
        count = self.ranks.whole_rows(len(input), self.batch) * each
        found, mean, variance = _WholeNorm.apply(input, self.weight, self.bias, self.eps, count)
        if self.running_mean is not None and self.running_var is not None:
            self.num_batches_tracked.add_(1)  # type: ignore[operator]
            share = self.momentum
            if share is None:
                share = 1.0 / float(self.num_batches_tracked)  # type: ignore[arg-type]
            self.running_mean.lerp_(mean, share)
            self.running_var.lerp_(variance * (count / (count - 1)), share)
        return found


class _WholeBatchNorm1d(_WholeBatchNorm, nn.BatchNorm1d):
    pass


class _WholeBatchNorm2d(_WholeBatchNorm, nn.BatchNorm2d):
    pass


_TWINS: dict[type[nn.Module], type[nn.Module]] = {
    nn.Dropout: _WholeDropout,
    nn.BatchNorm1d: _WholeBatchNorm1d,
    nn.BatchNorm2d: _WholeBatchNorm2d,
}


class _WholeNorm(torch.autograd.Function):
    """Batch normalisation with the mean and variance over the values of all ranks."""

    @staticmethod
    def forward(
        ctx: Any,
        values: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        eps: float,
        count: int,
    ) -> tuple[Tensor, Tensor, Tensor]:
        dims = [0, *range(2, values.ndim)]
        shape = [1, -1] + [1] * (values.ndim - 2)
        wide = values.float()
        mean = wide.sum(dims)
        dist.all_reduce(mean)
        mean /= count
        centred = wide - mean.view(shape)
        variance = centred.square().sum(dims)
        dist.all_reduce(variance)
        variance /= count
        scale = (variance + eps).rsqrt()
        ctx.save_for_backward(values, weight, mean, scale)
        ctx.count, ctx.biased = count, bias is not None
        found = centred * (scale if weight is None else scale * weight).view(shape)
        found = found if bias is None else found + bias.view(shape)
        ctx.mark_non_differentiable(mean, variance)
        return found.to(values.dtype), mean, variance

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        values, weight, mean, scale = ctx.saved_tensors
        grad = grads[0].float()
        dims = [0, *range(2, values.ndim)]
        shape = [1, -1] + [1] * (values.ndim - 2)
        normal = (values.float() - mean.view(shape)) * scale.view(shape)
        own = torch.stack([grad.sum(dims), (grad * normal).sum(dims)])
        # Those of weight and bias stay this rank's: gradients of parameters are summed at the end.
        whole = own.clone()
        dist.all_reduce(whole)
        whole /= ctx.count
        factor = (scale if weight is None else scale * weight).view(shape)
        inner = grad - whole[0].view(shape) - normal * whole[1].view(shape)
        to_weight = None if weight is None else own[1].to(weight.dtype)
        to_bias = own[0] if ctx.biased else None
        return (factor * inner).to(values.dtype), to_weight, to_bias, None, None
