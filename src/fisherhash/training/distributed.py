"""Training in several processes under ``torchrun``: together they compute what one would.

Each process (a *rank*) runs its share of every batch through the network. The outputs are gathered,
so that every rank computes the loss of the whole batch and updates a method's state with all of it;
no method has to know. Whatever else depends on the whole batch is computed over the ranks, too:
the statistics of batch normalisation, and random numbers, which every rank draws for the whole
batch to use those of its own images. The batch size is that of the whole batch, so a run can
continue on another number of ranks.

Gradients are the mean over the ranks. What the loss uses directly has its whole gradient on every
rank; what goes through :class:`_Gather` has a rank's part of it, times the number of ranks.
"""

from __future__ import annotations

import atexit
import contextlib
import datetime
import functools
import hashlib
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fisherhash.data.augment import PLAIN_DRAWS, Draws
from fisherhash.errors import FisherhashError, UsageError
from fisherhash.methods.base import Batch, MethodInfo
from fisherhash.system.devices import choose_device
from fisherhash.system.launched import launched_rank
from fisherhash.training.whole_layers import TWINS, check_layer

T = TypeVar("T")

PATIENCE = datetime.timedelta(days=7)
"""How long ranks wait for the first one, which may decode a large data set. Where a rank fails,
``torchrun`` ends the others; they need not notice by themselves."""


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
        """Return which of ``count`` things belong to a rank, by default this one.

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

    def whole(
        self, outputs: Tensor, batch: Batch, index: Tensor, labels: Tensor
    ) -> tuple[Tensor, Batch]:
        """Gather outputs and features of a batch from all ranks.

        Args:
            outputs: (rows, …) of this rank's images.
            batch: this rank's images.
            index: (b,) all images of the batch.
            labels: (N, classes) of the training set.
        """
        if self.size == 1:
            return outputs, batch
        found = [
            cast(Tensor, _Gather.apply(values, self, len(index), batch.views))
            for values in (outputs, batch.features)
        ]
        rows = index.repeat(batch.views)
        return found[0], Batch(labels[rows], rows, found[1], batch.views)

    def gather(self, values: Tensor, counts: Sequence[int]) -> Tensor:
        """Return the rows of every rank, in the order of the ranks, which have ``counts`` rows."""
        # Every rank sends as many rows as the others; those of the padding are dropped.
        sent = values.new_zeros(max(counts), *values.shape[1:])
        sent[: len(values)] = values
        found = [torch.empty_like(sent) for _ in counts]
        dist.all_gather(found, sent)
        return torch.cat([rows[:count] for rows, count in zip(found, counts, strict=True)])

    def share_gradients(self, parameters: Iterable[nn.Parameter]) -> None:
        """Make the gradients of a step those of the whole batch, the same on every rank."""
        if self.size > 1:
            gradients = [p.grad for p in parameters if p.grad is not None]
            _at_once(gradients, dist.all_reduce)
            for gradient in gradients:
                gradient /= self.size

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
        blocks = [starts[self.bounds(len(starts), rank)] for rank in range(self.size)]
        own = [compute(start, min(start + step, total)) for start in blocks[self.rank]]
        if self.size == 1:
            return torch.cat(own)
        if not own:
            # The type is that of the first rank's rows, which has at least one block.
            own = [compute(0, min(step, total))[:0]]
        counts = [sum(min(step, total - start) for start in some) for some in blocks]
        return self.gather(torch.cat(own).view(-1, width), counts)

    @contextlib.contextmanager
    def whole_batches(self, modules: Mapping[str, nn.Module], batch: int) -> Iterator[None]:
        """Let layers that depend on the whole batch compute it over all ranks."""
        if self.size == 1:
            yield
            return
        if batch < self.size:
            raise UsageError(
                f"a batch of {batch} images cannot be shared by {self.size} processes; use fewer "
                "processes or a larger batch"
            )
        parts = [part for module in modules.values() for part in module.modules()]
        for part in parts:
            check_layer(part)
        changed = [part for part in parts if type(part) in TWINS]
        plain = {twin: kind for kind, twin in TWINS.items()}
        try:
            for part in changed:
                # A twin has the same tensors under the same names, so whoever knows the layer, an
                # optimiser or a checkpoint, need not know about this.
                part.ranks, part.batch = self, batch  # type: ignore[assignment]
                part.__class__ = TWINS[type(part)]
            yield
        finally:
            for part in changed:
                part.__class__ = plain.get(type(part), type(part))
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

    def check_trainable(self, info: MethodInfo) -> None:
        """Refuse a method that several ranks cannot train together."""
        if self.size > 1 and info.fit != "gradient":
            raise UsageError(
                f"{info.name} is not trained by gradient, so {self.size} processes cannot share "
                "its training; run the command without torchrun"
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
    def forward(ctx: Any, values: Tensor, ranks: Ranks, batch: int, views: int) -> Tensor:
        ctx.ranks, ctx.batch = ranks, batch
        own = [ranks.bounds(batch, rank) for rank in range(ranks.size)]
        by_image = values.unflatten(0, (views, -1)).transpose(0, 1)
        found = ranks.gather(by_image, [part.stop - part.start for part in own])
        return found.transpose(0, 1).flatten(0, 1)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        return ctx.ranks.own_rows(grads[0], ctx.batch) * ctx.ranks.size, None, None, None


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
