"""Spectral hashing (Weiss, Torralba and Fergus, NIPS 2008)."""

import math

import torch
from torch import Tensor

from fisherhash.errors import NotDefinedError
from fisherhash.methods.base import FeatureMethod, MethodInfo, register
from fisherhash.methods.shallow._features import ROWS_AT_ONCE, periodic_head, principal
from fisherhash.model.heads import Head


@register
class SH(FeatureMethod):
    """The smoothest waves on a box fitted around the data, along its principal directions.

    If the data were uniform on a box, the eigenfunctions of its graph Laplacian would be
    cos(m pi (x_j - a_j) / r_j) along direction j, with a_j and r_j the box's start and length. Its
    eigenvalue grows with m / r_j. The K smallest, the constant aside, are the bits: directions of
    large extent are cut several times, at higher and higher frequencies.

    Args:
        bits: K.
        classes: Not used.
    """

    info = MethodInfo(
        name="sh",
        title="Spectral Hashing",
        venue="NIPS",
        year=2008,
        url="https://papers.nips.cc/paper/3383-spectral-hashing",
        supervision="none",
    )

    def solve(self, features: Tensor, labels: Tensor | None, *, seed: int) -> Head:
        """Return a head fitted on features (N, d); labels are not used."""
        count = min(self.bits, features.shape[1], len(features) - 1)
        found = principal(features, count, name="sh")
        low = torch.full((count,), torch.inf, dtype=torch.float64, device=features.device)
        high = -low
        for block in features.split(ROWS_AT_ONCE):
            projected = found.project(block)
            low = torch.minimum(low, projected.amin(0))
            high = torch.maximum(high, projected.amax(0))
        length = high - low
        if not (length > 0).any():
            raise NotDefinedError("sh: all features are equal, so there is no direction to cut")
        modes, axes = smoothest_modes(length.cpu(), self.bits)
        slope = math.pi * modes / length.cpu()[axes]
        weight = slope[:, None] * found.directions.T.cpu()[axes]
        phase = -slope * low.cpu()[axes]
        return periodic_head(weight, phase, mean=found.mean.cpu())


def smoothest_modes(length: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return the frequencies m and the axes (count,) of the ``count`` smallest m / length.

    >>> [part.tolist() for part in smoothest_modes(torch.tensor([4.0, 1.0]), 5)]
    [[1, 2, 3, 1, 4], [0, 0, 0, 1, 0]]
    """
    axes = torch.nonzero(length > 0)[:, 0]
    frequencies = torch.arange(1, count + 1)
    rates = frequencies[:, None] / length[axes]
    # Equal rates: the lower frequency first.
    order = rates.flatten().sort(stable=True).indices[:count]
    return frequencies[order // len(axes)], axes[order % len(axes)]
