"""Code shared by the methods that learn from pairs.

There are two kinds of pairs: batch x all training images, the latter with their last outputs
(:class:`PairMemory`), and the pairs inside a batch (:class:`BatchPairs`). Two images are similar
when they have at least one label in common.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fisherhash.methods.base import Batch, HashMethod, TrainingSet, sign

LABEL_ROWS = 16_384  # label rows converted to floats at once
MOST_PAIRS = 1 << 20
"""Pairs of a batch and the memory that are computed at once, so that N is not limited by them.

More would be slower on a CPU, whose caches they leave.
"""
MOST_PAIRS_GPU = 1 << 23


class TrainingLabels(nn.Module):
    """The labels Y of all N training images: class numbers, or bytes where images have several.

    With ``shares``, each of an image's m labels counts 1/m instead of 1. An image without a label
    is similar to no image, and its row of Y is zero.
    """

    def __init__(self) -> None:
        super().__init__()
        self.classes = 0
        self.single = True
        # Not in checkpoints, because the training set has the labels.
        self.numbers = nn.Buffer(torch.empty(0, dtype=torch.int64), persistent=False)
        self.rows = nn.Buffer(torch.empty(0, 0, dtype=torch.uint8), persistent=False)

    def fill(self, labels: Tensor) -> None:
        """Store labels (N, classes)."""
        rows = (labels > 0).to(torch.uint8)
        self.classes = labels.shape[1]
        self.single = not bool((rows.sum(1) > 1).any())
        numbers = F.pad(rows, (1, 0)).argmax(1) - 1  # -1 without a label
        self.numbers = numbers if self.single else numbers[:0].clone()
        self.rows = rows[:0].clone() if self.single else rows

    def similar(self, index: Tensor, among: slice = slice(None)) -> Tensor:
        """Return whether the images at ``index`` share a label with each training image, (b, N).

        ``among`` selects some of the N.
        """
        if self.single:
            own = self.numbers[index]
            return (own[:, None] == self.numbers[among]) & (own >= 0)[:, None]
        return self.rows[index].float() @ self.rows[among].float().T > 0

    def similar_share(self, most: int = 512) -> float:
        """Return the share of similar pairs among all pairs of two images.

        With one label per image it is exact. With several it is estimated from the pairs of
        ``most`` random images, always the same ones, with all images.
        """
        if self.single:
            counts = self.gram(shares=False).double()
            total = len(self.numbers)
            return float((counts * (counts - 1)).sum()) / max(total * (total - 1), 1)
        total = len(self.rows)
        order = torch.randperm(total, generator=torch.Generator().manual_seed(0))[:most]
        index = order.to(self.rows.device)
        similar = self.similar(index).scatter(1, index[:, None], False)
        return float(similar.sum()) / max(len(index) * (total - 1), 1)

    def mix(self, columns: Tensor, *, shares: bool, among: slice = slice(None)) -> Tensor:
        """Return the columns (k, classes) summed over each image's labels, (N, k).

        With C the columns, row i is C y_i. ``among`` selects some of the N.
        """
        if self.single:
            numbers = self.numbers[among]
            return columns.T[numbers.clamp_min(0)] * (numbers >= 0)[:, None]
        return torch.cat([rows @ columns.T for rows in self._chunks(shares, among)])

    def collect(self, values: Tensor, *, shares: bool) -> Tensor:
        """Return the sum of ``values`` (N, k) over the images of each class, (k, classes).

        With V the values as columns (k, N), this is V Y^T.
        """
        return self.collect_parts(lambda part: values[part], shares=shares)

    def collect_parts(self, values: Callable[[slice], Tensor], *, shares: bool) -> Tensor:
        """Do the same with values that are computed for some images at a time."""
        total = len(self.numbers if self.single else self.rows)
        empty = values(slice(0, 0))
        # In double precision, so that the order in which a device adds does not matter.
        sums = empty.new_zeros(self.classes + 1, empty.shape[1], dtype=torch.float64)
        for first in range(0, total, LABEL_ROWS):
            part = slice(first, first + LABEL_ROWS)
            found = values(part).double()
            if self.single:
                sums.index_add_(0, self.numbers[part] % (self.classes + 1), found)
            else:
                for rows in self._chunks(shares, part):
                    sums[:-1] += rows.double().T @ found
        return sums[:-1].T.to(empty.dtype)

    def means(self, values: Tensor) -> Tensor:
        """Return the mean of ``values`` (N, k) per class, weighted by shares, (k, classes)."""
        weight = self.collect(torch.ones_like(values[:, :1]), shares=True)
        return self.collect(values, shares=True) / weight.clamp_min(1e-12)

    def shares(self) -> Tensor:
        """Return all class proportions (N, classes)."""
        eye = torch.eye(self.classes, device=self.numbers.device)
        return self.mix(eye, shares=True)

    def gram(self, *, shares: bool) -> Tensor:
        """Return Y Y^T (classes, classes); with one label per image its diagonal (classes,)."""
        if self.single:
            return torch.bincount(self.numbers + 1, minlength=self.classes + 1)[1:].float()
        zero = torch.zeros(self.classes, self.classes, device=self.rows.device)
        return sum((rows.T @ rows for rows in self._chunks(shares)), zero)

    def _chunks(self, shares: bool, among: slice = slice(None)) -> Iterator[Tensor]:
        for rows in self.rows[among].split(LABEL_ROWS):
            yield class_proportions(rows.float()) if shares else rows.float()


class PairMemory(nn.Module):
    """The last outputs of all N training images, with their labels.

    Pairs are then batch x N instead of batch x batch. Rows of the memory are constants: the
    gradient reaches only the batch's own outputs.
    """

    def __init__(self) -> None:
        super().__init__()
        self.labels = TrainingLabels()
        self.outputs = nn.Buffer(torch.empty(0, 0))

    def fill(self, train: TrainingSet) -> None:
        """Store the outputs of one pass over the training set.

        So no row starts at zero, where the pair loss is flat.
        """
        self.outputs = train.outputs().float().clone()
        self.labels.fill(train.labels.to(self.outputs.device))

    def refresh(self, outputs: Tensor, batch: Batch) -> None:
        """Store the batch's outputs (b, bits)."""
        self.outputs.index_copy_(0, batch.index, outputs.detach().to(self.outputs))

    def pair_loss(
        self, outputs: Tensor, batch: Batch, *, margin: float = 0.0, positive_weight: float = 1.0
    ) -> Tensor:
        """Return the mean :func:`logistic` loss of the pairs batch x memory, without self pairs.

        theta = u_i . u_j / 2, with u_j from the memory, which also supplies the labels.
        """

        def sums(own: Tensor, part: slice) -> tuple[Tensor, Tensor]:
            theta = 0.5 * own.float() @ self.outputs[part].T
            similar = self.labels.similar(batch.index, part)
            losses = logistic(theta, similar, margin=margin)
            weights = torch.where(similar, positive_weight, 1.0)
            weights = without_self(weights, batch.index, part)
            return (losses * weights).sum(), weights.sum()

        loss, weight = sum_in_parts(outputs, len(self.outputs), sums)
        return loss / weight.clamp_min(1.0)


def parts_of(total: int, rows: int, device: torch.device) -> list[slice]:
    """Return slices of ``total`` images that make few enough pairs with ``rows`` others."""
    most = MOST_PAIRS if device.type == "cpu" else MOST_PAIRS_GPU
    step = max(1, most // max(1, rows))
    return [slice(first, min(first + step, total)) for first in range(0, total, step)]


def sum_in_parts(
    values: Tensor, total: int, sums: Callable[[Tensor, slice], tuple[Tensor, Tensor]]
) -> tuple[Tensor, Tensor]:
    """Return the sums of losses and of weights over the pairs of a batch with N images.

    Only one part of the pairs is in memory at a time, for the gradient too.

    Args:
        values: (b, bits) what the losses depend on; the gradient reaches nothing else.
        total: N.
        sums: Returns both sums for ``values`` and a part of the N images.
    """
    parts = parts_of(total, len(values), values.device)
    if len(parts) == 1:
        return sums(values, parts[0])
    # The gradient of each part is taken at once, so that no part stays in memory.
    slope = torch.zeros_like(values)
    loss = weight = torch.zeros((), device=values.device)
    for part in parts:
        with torch.enable_grad():
            own = values.detach().requires_grad_()
            found = sums(own, part)
            slope += torch.autograd.grad(found[0], own)[0]
        loss, weight = loss + found[0].detach(), weight + found[1].detach()
    # Its value is the loss, its gradient the slope.
    return loss + ((values - values.detach()) * slope).sum(), weight


def without_self(values: Tensor, index: Tensor, part: slice) -> Tensor:
    """Return values (b, images of the part), 0 where an image at ``index`` meets itself."""
    place = index - part.start
    outside = (place < 0) | (place >= part.stop - part.start)
    place = place.clamp(0, part.stop - part.start - 1)[:, None]
    return values.scatter(1, place, values.gather(1, place) * outside[:, None])


class MemoryMethod(HashMethod):
    """A method that remembers the last outputs of all training images."""

    remembered = ("memory.outputs",)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.memory = PairMemory()

    def start(self, train: TrainingSet) -> None:
        """Fill the memory of outputs."""
        self.memory.fill(train)

    def refresh(self, train: TrainingSet) -> None:
        """Fill the memory with the outputs as they are now."""
        self.memory.fill(train)

    def after_step(self, outputs: Tensor, batch: Batch) -> None:
        """Store the batch's outputs in the memory."""
        self.memory.refresh(outputs, batch)


@dataclass(frozen=True)
class BatchPairs:
    """All pairs of different images in a batch, in both orders.

    Attributes:
        similar: (b, b) whether the pair shares a label; False on the diagonal.
        dissimilar: (b, b) whether it shares none; False on the diagonal.
        overlap: (b, b) shared labels over the labels that either has (the Jaccard index).
    """

    similar: Tensor
    dissimilar: Tensor
    overlap: Tensor

    @classmethod
    def of(cls, labels: Tensor) -> BatchPairs:
        """Return the pairs of a batch with labels (b, classes)."""
        labels = labels.float()
        shared = labels @ labels.T
        either = labels.sum(1)[:, None] + labels.sum(1) - shared
        overlap = torch.where(shared > 0, shared / either.clamp_min(1.0), 0.0)
        different = ~torch.eye(len(labels), dtype=torch.bool, device=labels.device)
        return cls((shared > 0) & different, (shared <= 0) & different, overlap)

    def mean(self, values: Tensor) -> Tensor:
        """Return the mean of values (b, b) over all pairs; 0 with zero gradient without pairs."""
        return _mean(values, self.similar | self.dissimilar)

    def balanced(self, values: Tensor) -> Tensor:
        """Return the mean of values (b, b) over similar pairs plus that over dissimilar pairs.

        With S all pairs, S1 the similar and S0 the dissimilar ones, this is (1/|S|) sum w_ij v_ij
        with w_ij = |S|/|S1| on similar and |S|/|S0| on dissimilar pairs: the weights of HashNet and
        Deep Cauchy Hashing within the batch. A kind that is absent adds nothing.
        """
        return _mean(values, self.similar) + _mean(values, self.dissimilar)


def _mean(values: Tensor, where: Tensor) -> Tensor:
    return torch.where(where, values, 0.0).sum() / where.sum().clamp_min(1)


def logistic(theta: Tensor, similar: Tensor, *, margin: float = 0.0) -> Tensor:
    """Return log(1 + e^(margin - theta)) for similar, log(1 + e^(margin + theta)) for other pairs.

    Without margin this is log(1 + e^theta) - s theta, with s = 1 for similar pairs, else 0.

    >>> logistic(torch.tensor([0.0, 100.0]), torch.tensor([True, False])).tolist()
    [0.6931471824645996, 100.0]
    """
    return F.softplus(margin - torch.where(similar, theta, -theta))


def log_cosh(values: Tensor) -> Tensor:
    """Return log((e^x + e^-x) / 2), without overflow.

    >>> [round(x, 3) for x in log_cosh(torch.tensor([0.0, 1000.0])).tolist()]
    [0.0, 999.307]
    """
    size = values.abs()
    return size + F.softplus(-2.0 * size) - math.log(2.0)


def quantization_error(outputs: Tensor, codes: Tensor | None = None) -> Tensor:
    """Return the mean of ||b - u||^2 over images; b are codes (n, bits), or the outputs' signs."""
    outputs = outputs.float()
    target = sign(outputs.detach()) if codes is None else codes.to(outputs)
    return (outputs - target).square().sum(1).mean()


def class_proportions(labels: Tensor) -> Tensor:
    """Return rows that sum to 1: 1/m on each of an image's m labels; an unlabelled row is zero.

    >>> class_proportions(torch.tensor([[1.0, 0.0, 1.0], [0.0, 1.0, 0.0]])).tolist()
    [[0.5, 0.0, 0.5], [0.0, 1.0, 0.0]]
    """
    return labels / labels.sum(1, keepdim=True).clamp_min(1.0)
