"""Triplets of a batch: a query, an image that should be nearer to it, one that should be farther.

All triplets of a batch of b images are up to b^3. A step takes at most ``limit`` of them, in
tensors whose shapes depend on b alone, so that a captured step stays right: every query gets up to
P nearer and N farther images, b P N <= limit. Where a query has more, it takes those that follow it
in the batch, around the end. The order of a batch is drawn anew in every epoch, so this fixed
pattern is a random choice. A query is never its own nearer or farther image.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from fisherhash.errors import UsageError

LIMIT = 2**18
"""Triplets a step of the methods that take them, unless told otherwise."""


@dataclass(frozen=True)
class Triplets:
    """The triplets of one batch.

    Attributes:
        near: (b, P) columns of the nearer images of each query.
        far: (b, N) columns of the farther ones.
        valid: (b, P, N) whether that triplet exists; the others only fill the shape.
    """

    near: Tensor
    far: Tensor
    valid: Tensor

    @classmethod
    def of(cls, near: Tensor, far: Tensor, *, limit: int = LIMIT) -> Triplets:
        """Choose triplets where ``near`` and ``far``, (b, b) booleans, say what may be which."""
        most_near, most_far = sides(len(near), limit)
        near_columns, near_found = _following(near, most_near)
        far_columns, far_found = _following(far, most_far)
        return cls(near_columns, far_columns, near_found[:, :, None] & far_found[:, None, :])

    def nearer(self, values: Tensor) -> Tensor:
        """Values (b, b) of query and nearer image, (b, P, 1)."""
        return values.gather(1, self.near)[:, :, None]

    def farther(self, values: Tensor) -> Tensor:
        """Values (b, b) of query and farther image, (b, 1, N)."""
        return values.gather(1, self.far)[:, None, :]

    def gap(self, values: Tensor) -> Tensor:
        """Values of query and nearer image less those of query and farther one, (b, P, N)."""
        return self.nearer(values) - self.farther(values)

    def mean(self, losses: Tensor, weights: Tensor | None = None) -> Tensor:
        """The (weighted) mean of losses (b, P, N); 0, without gradient, where no triplet exists."""
        kept = self.valid.to(losses) if weights is None else torch.where(self.valid, weights, 0.0)
        total = kept.sum()
        share = torch.where(total > 0, 1.0 / total.clamp_min(1e-30), 0.0)
        return (torch.where(self.valid, losses, 0.0) * kept).sum() * share


def sides(batch: int, limit: int) -> tuple[int, int]:
    """How many nearer and farther images each of ``batch`` queries gets.

    Similar images are rarer, so the farther ones get four times the places; what one side has no
    use for goes to the other. Up to 64 images 2^18 triplets are all there are.

    >>> sides(64, 2**18), sides(128, 2**18), sides(1000, 2**18)
    ((64, 64), (22, 93), (8, 32))
    """
    if limit < batch:
        raise UsageError(f"{limit} triplets a step are fewer than the {batch} images of a batch")
    near = min(batch, max(1, math.isqrt(limit // (4 * batch))))
    far = min(batch, limit // (batch * near))
    return min(batch, limit // (batch * far)), far


def squared_distances(values: Tensor) -> Tensor:
    """||v_i - v_j||^2 (b, b) of the rows of values (b, d), without a (b, b, d) tensor."""
    squares = values.square().sum(1)
    return (squares[:, None] + squares - 2.0 * values @ values.T).clamp_min(0.0)


def _following(wanted: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The first ``count`` wanted columns of each row after its own, and whether they are wanted."""
    batch = len(wanted)
    place = torch.arange(batch, device=wanted.device)
    ahead = (place - place[:, None]) % batch
    # From 1 (the last in turn) to b - 1 (the next one); 0 is not wanted, or the query itself.
    score = torch.where(wanted & (ahead > 0), batch - ahead, 0)
    found = score.topk(count, dim=1)
    return found.indices, found.values > 0
