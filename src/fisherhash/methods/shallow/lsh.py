"""Locality-sensitive hashing by random hyperplanes (Charikar, STOC 2002)."""

import torch
from torch import Tensor

from fisherhash.methods.base import FeatureMethod, MethodInfo, register
from fisherhash.model.heads import Head, LinearHead


@register
class LSH(FeatureMethod):
    """Random hyperplanes through the mean of the features: u = R^T (f - mean), R Gaussian.

    The probability that two images differ in a bit is their angle over pi. What differs from the
    paper: the features are centred first; otherwise non-negative features share most of their bits.
    """

    info = MethodInfo(
        name="lsh",
        title="Similarity estimation techniques from rounding algorithms",
        venue="STOC",
        year=2002,
        url="https://doi.org/10.1145/509907.509965",
        supervision="none",
    )

    def solve(self, features: Tensor, labels: Tensor | None, *, seed: int) -> Head:
        """Draw ``bits`` hyperplanes; only the mean of the features (N, d) is used."""
        # Drawn on the CPU, so that a seed yields the same hasher on every device.
        generator = torch.Generator().manual_seed(seed)
        planes = torch.randn(self.bits, features.shape[1], generator=generator)
        return LinearHead.from_matrix(planes, features.float().mean(0).cpu())
