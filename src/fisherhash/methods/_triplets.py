"""Triplets of a batch: a query, an image that should be nearer to it, one that should be farther.

A batch of b images has up to b^3 triplets. A step uses at most ``limit`` of them, in tensors whose
shapes depend on b alone, so that a captured step stays correct: every query gets up to P nearer and
N farther images, with b P N <= limit. A query with more uses those that follow it in the batch,
wrapping around at the end. Batches are drawn in a new order every epoch, so this fixed pattern is a
random choice. A query is never its own nearer or farther image.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from fisherhash.errors import UsageError
from fisherhash.methods._pairs import BatchPairs

LIMIT = 2**18
"""Default number of triplets per step."""


@dataclass(frozen=True)
class Triplets:
    """The triplets of one batch.

    Attributes:
        near: (b, P) columns of the nearer images of each query.
        far: (b, N) columns of the farther ones.
        valid: (b, P, N) whether that triplet exists; the others are padding.
    """

    near: Tensor
    far: Tensor
    valid: Tensor

    @classmethod
    def of(cls, near: Tensor, far: Tensor, *, limit: int = LIMIT) -> Triplets:
        """Choose triplets; ``near`` and ``far``, (b, b) booleans, mark the candidates per query."""
        most_near, most_far = sides(len(near), limit)
        near_columns, near_found = _following(near, most_near)
        far_columns, far_found = _following(far, most_far)
        return cls(near_columns, far_columns, near_found[:, :, None] & far_found[:, None, :])

    @classmethod
    def of_labels(cls, labels: Tensor, *, limit: int = LIMIT) -> Triplets:
        """Choose triplets of a similar and a dissimilar image, from labels (b, classes)."""
        pairs = BatchPairs.of(labels)
        return cls.of(pairs.similar, pairs.dissimilar, limit=limit)

    def gap(self, values: Tensor) -> Tensor:
        """Return the values (b, b) of query and nearer image minus those of the farther one.

        The result is (b, P, N).
        """
        return values.gather(1, self.near)[:, :, None] - values.gather(1, self.far)[:, None, :]

    def mean(self, losses: Tensor, weights: Tensor | None = None) -> Tensor:
        """Return the (weighted) mean of losses (b, P, N); 0 with zero gradient without triplets."""
        kept = self.valid.to(losses) if weights is None else torch.where(self.valid, weights, 0.0)
        total = kept.sum()
        share = torch.where(total > 0, 1.0 / total.clamp_min(1e-30), 0.0)
        return (torch.where(self.valid, losses, 0.0) * kept).sum() * share


def sides(batch: int, limit: int) -> tuple[int, int]:
    """Return how many nearer and farther images each of ``batch`` queries gets.

    Similar images are rarer, so the farther ones get four times as many places; places that one
    side cannot use go to the other. For up to 64 images 2^18 covers all triplets.

    >>> sides(64, 2**18), sides(128, 2**18), sides(1000, 2**18)
    ((64, 64), (22, 93), (8, 32))
    """
    if limit < batch:
        raise UsageError(f"{limit} triplets per step are fewer than the {batch} images of a batch")
    near = min(batch, max(1, math.isqrt(limit // (4 * batch))))
    far = min(batch, limit // (batch * near))
    return min(batch, limit // (batch * far)), far


def squared_distances(values: Tensor) -> Tensor:
    """Return ||v_i - v_j||^2 (b, b) of the rows of values (b, d), without a (b, b, d) tensor."""
    squares = values.square().sum(1)
    return (squares[:, None] + squares - 2.0 * values @ values.T).clamp_min(0.0)


def _following(wanted: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return the first ``count`` wanted columns after each row's own, and whether they exist."""
    batch = len(wanted)
    place = torch.arange(batch, device=wanted.device)
    ahead = (place - place[:, None]) % batch
    # From 1 (the last in turn) to b - 1 (the next one); 0 is unwanted, or the query itself.
    score = torch.where(wanted & (ahead > 0), batch - ahead, 0)
    found = score.topk(count, dim=1)
    return found.indices, found.values > 0
