"""Locality-sensitive codes from shift-invariant kernels (Raginsky and Lazebnik, NIPS 2009)."""

import math
from typing import Annotated

import torch
from torch import Tensor

from fisherhash.methods.base import FeatureMethod, MethodInfo, register
from fisherhash.methods.shallow._features import draw_rows, kernel_width, periodic_head
from fisherhash.model.heads import Head
from fisherhash.system.options import Range, Tuned


@register
class SKLSH(FeatureMethod):
    """Random Fourier features with random thresholds: u = cos(w . f + b) + tau.

    w is Gaussian with variance 1 / s^2, b uniform in [0, 2 pi], tau uniform in [-1, 1]. The
    expected Hamming distance then depends on the Gaussian kernel of width s only. The method needs
    many bits.

    Args:
        bits: K.
        classes: Not used.
        width: s, in units of the median distance between images.
    """

    info = MethodInfo(
        name="sklsh",
        title="Locality-Sensitive Binary Codes from Shift-Invariant Kernels",
        venue="NIPS",
        year=2009,
        url="https://papers.nips.cc/paper/3749-locality-sensitive-binary-codes",
        supervision="none",
    )

    width: Annotated[float, Range(above=0), Tuned(0.25, 4.0, "log")] = 1.0

    def solve(self, features: Tensor, labels: Tensor | None, *, seed: int) -> Head:
        """Draw waves and thresholds; only mean and scale of the features (N, d) are used."""
        generator = torch.Generator().manual_seed(seed)
        anchors = features[draw_rows(len(features), 200, generator).to(features.device)]
        scale = self.width * kernel_width(features, anchors, name="sklsh")
        weight = torch.randn(self.bits, features.shape[1], generator=generator) / scale
        phase = 2.0 * math.pi * torch.rand(self.bits, generator=generator)
        offset = 2.0 * torch.rand(self.bits, generator=generator) - 1.0
        mean = features.float().mean(0).cpu()
        return periodic_head(weight, phase, mean=mean, offset=offset)
