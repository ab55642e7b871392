"""Code shared by the methods that learn from pairs.

There are two kinds of pairs: batch x all training images, the latter with their last outputs
(:class:`PairMemory`), and the pairs inside a batch (:class:`BatchPairs`). Two images are similar
when they have at least one label in common.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fisherhash.methods.base import Batch, HashMethod, TrainingSet, sign

LABEL_ROWS = 16_384  # label rows converted to floats at once
MOST_PAIRS = 1 << 23
"""Pairs of a batch and the memory that are in memory at once, so that N is not limited by them."""


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

    def mix(self, columns: Tensor, *, shares: bool) -> Tensor:
        """Return the columns (k, classes) summed over each image's labels, (N, k).

        With C the columns, row i is C y_i.
        """
        if self.single:
            chosen = columns.T[self.numbers.clamp_min(0)]
            return chosen * (self.numbers >= 0)[:, None]
        return torch.cat([rows @ columns.T for rows in self._chunks(shares)])

    def collect(self, values: Tensor, *, shares: bool) -> Tensor:
        """Return the sum of ``values`` (N, k) over the images of each class, (k, classes).

        With V the values as columns (k, N), this is V Y^T.
        """
        # In double precision, so that the order in which a device adds does not matter.
        sums = torch.zeros(self.classes + 1, values.shape[1], dtype=torch.float64).to(values.device)
        if self.single:
            sums.index_add_(0, self.numbers % (self.classes + 1), values.double())
        else:
            parts = zip(self._chunks(shares), values.split(LABEL_ROWS), strict=True)
            for rows, part in parts:
                sums[:-1] += rows.double().T @ part.double()
        return sums[:-1].T.to(values.dtype)

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

    def _chunks(self, shares: bool) -> Iterator[Tensor]:
        for rows in self.rows.split(LABEL_ROWS):
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
        total, step = len(self.outputs), max(1, MOST_PAIRS // max(1, len(outputs)))
        parts = [slice(first, min(first + step, total)) for first in range(0, total, step)]
        if len(parts) <= 1:
            loss, weight = self._pair_sums(outputs, batch, slice(0, total), margin, positive_weight)
            return loss / weight.clamp_min(1.0)
        # The gradient of each part is taken at once, so that no part stays in memory.
        slope = torch.zeros_like(outputs)
        loss = weight = torch.zeros((), device=outputs.device)
        for part in parts:
            with torch.enable_grad():
                own = outputs.detach().requires_grad_()
                sums = self._pair_sums(own, batch, part, margin, positive_weight)
                slope += torch.autograd.grad(sums[0], own)[0]
            loss, weight = loss + sums[0].detach(), weight + sums[1]
        # Its value is the loss, its gradient the slope.
        loss = loss + ((outputs - outputs.detach()) * slope).sum()
        return loss / weight.clamp_min(1.0)

    def _pair_sums(
        self, outputs: Tensor, batch: Batch, part: slice, margin: float, positive_weight: float
    ) -> tuple[Tensor, Tensor]:
        """Return the sums of the weighted losses and of the weights, for a part of the memory."""
        theta = 0.5 * outputs.float() @ self.outputs[part].T
        similar = self.labels.similar(batch.index, part)
        losses = logistic(theta, similar, margin=margin)
        weights = torch.where(similar, positive_weight, 1.0)
        # An image and itself are no pair.
        place = batch.index - part.start
        outside = (place < 0) | (place >= part.stop - part.start)
        place = place.clamp(0, part.stop - part.start - 1)[:, None]
        weights = weights.scatter(1, place, weights.gather(1, place) * outside[:, None])
        return (losses * weights).sum(), weights.sum()


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
