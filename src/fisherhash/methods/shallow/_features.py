"""What shallow methods share: moments computed in blocks, PCA, samples, rotations, kernel widths.

Everything that needs all features goes through :func:`row_blocks`, so that a memory-mapped matrix
larger than the memory can be fitted.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from fisherhash.errors import NotDefinedError
from fisherhash.model.heads import ArrayHead, distances_to

logger = logging.getLogger(__name__)
ROWS_AT_ONCE = 16_384
HELD = 2**25
"""Similarities to anchors that are held in memory; more are computed again in each pass."""


def row_blocks(features: Tensor, rows: int = ROWS_AT_ONCE) -> Iterator[Tensor]:
    """Yield the features (N, d) in blocks of rows, in double precision."""
    for block in features.split(rows):
        yield block.double()


@dataclass(frozen=True)
class Principal:
    """The principal directions of some features.

    Attributes:
        mean: (d,) the mean.
        directions: (d, count) orthonormal, the largest variance first.
        variances: (count,) the variance along each.
    """

    mean: Tensor
    directions: Tensor
    variances: Tensor

    @property
    def whitening(self) -> Tensor:
        """(count,) what gives each coordinate variance 1; 0 where there is no variance."""
        known = self.variances > 1e-9 * self.variances.max()
        return torch.where(known, self.variances.clamp_min(1e-12).rsqrt(), 0.0)

    def project(self, features: Tensor) -> Tensor:
        """Return the coordinates (N, count) of features (N, d)."""
        return torch.cat([(block - self.mean) @ self.directions for block in row_blocks(features)])


def mean_and_covariance(features: Tensor) -> tuple[Tensor, Tensor]:
    """Return the mean (d,) and the covariance (d, d) of features (N, d)."""
    mean = sum((block.sum(0) for block in row_blocks(features)), start=torch.tensor(0.0))
    mean = mean / len(features)
    scatter = torch.zeros(len(mean), len(mean), dtype=torch.float64, device=features.device)
    for block in row_blocks(features):
        centred = block - mean
        scatter += centred.T @ centred
    return mean, scatter / len(features)


def principal(features: Tensor, count: int, *, name: str) -> Principal:
    """Return the first principal directions of features (N, d).

    They come from the eigenvectors of the d x d covariance, whose size does not grow with N.

    Raises:
        NotDefinedError: The features have fewer than ``count`` dimensions.
    """
    images, width = features.shape
    if count > min(width, images - 1):
        raise NotDefinedError(
            f"{name}: {count} bits need at least {count} feature dimensions and {count + 1} "
            f"images, there are {width} and {images}; take fewer bits or lsh"
        )
    mean, covariance = mean_and_covariance(features)
    variances, vectors = torch.linalg.eigh(covariance)
    return Principal(mean, vectors[:, -count:].flip(1), variances[-count:].flip(0).clamp_min(0.0))


def periodic_head(
    weight: Tensor, phase: Tensor, *, mean: Tensor, offset: Tensor | None = None
) -> ArrayHead:
    """Return the head u = cos(weight (f - mean) + phase) + offset; weight: (bits, d)."""
    waves = {"weight": weight, "phase": phase, "shift": mean}
    waves["offset"] = torch.zeros(len(weight)) if offset is None else offset
    return ArrayHead("periodic", weight.shape[1], len(weight), waves)


def random_rotation(size: int, generator: torch.Generator) -> Tensor:
    """Draw an orthogonal matrix (size, size) on the CPU, uniformly among all of them."""
    drawn = torch.randn(size, size, generator=generator, dtype=torch.float64)
    q, r = torch.linalg.qr(drawn)
    # A QR decomposition alone favours some rotations; the signs of r's diagonal undo that.
    return q * torch.where(torch.diagonal(r) < 0, -1.0, 1.0)


def draw_rows(count: int, wanted: int, generator: torch.Generator) -> Tensor:
    """Draw positions of at most ``wanted`` distinct rows out of ``count``, in order."""
    return torch.randperm(count, generator=generator)[: min(wanted, count)].sort().values


def kernel_width(features: Tensor, anchors: Tensor, *, name: str) -> float:
    """Return the median distance of features (N, d) to anchors (m, d), and log it."""
    found = distances_to(features[:2000].double(), anchors.double()).sqrt()
    positive = found[found > 0]
    width = float(positive.median()) if len(positive) else 1.0
    logger.info("%s: median distance to the anchors %.4g, the unit of its kernel", name, width)
    return width


def k_means(features: Tensor, count: int, generator: torch.Generator, *, turns: int = 10) -> Tensor:
    """Return ``count`` centres (count, d) of features (N, d), by Lloyd's algorithm.

    It starts from distinct images. A centre that loses all its images moves to the image that is
    farthest from its own centre.
    """
    sample = features[draw_rows(len(features), 20_000, generator)].double()
    start = torch.randperm(len(sample), generator=generator)[:count].to(sample.device)
    centres = sample[start].clone()
    for _ in range(turns):
        nearest, owner = distances_to(sample, centres).min(1)
        sums = torch.zeros_like(centres).index_add_(0, owner, sample)
        counts = torch.bincount(owner, minlength=len(centres))
        empty = torch.nonzero(counts == 0)[:, 0]
        centres = sums / counts.clamp_min(1)[:, None]
        if len(empty):
            centres[empty] = sample[nearest.topk(len(empty)).indices]
    return centres
