"""Locality-sensitive hashing for Euclidean distance (Datar et al., SoCG 2004)."""

import math
from typing import Annotated

import torch
from torch import Tensor

from fisherhash.methods.base import FeatureMethod, MethodInfo, register
from fisherhash.methods.shallow._features import draw_rows, kernel_width, periodic_head
from fisherhash.model.heads import Head
from fisherhash.system.options import Range, Tuned


@register
class E2LSH(FeatureMethod):
    """Random directions cut into cells of equal width; a bit is the parity of the cell's number.

    h(f) = floor((a . f + t) / w), a Gaussian, t uniform in [0, w).

    What differs from the paper: h is an integer and the paper looks up equal ones. A Hamming code
    needs bits, so we keep the parity of h. w is ``width`` times the median distance between
    images, and f is centred, which changes t only.

    Args:
        bits: K.
        classes: Not used.
        width: w, in units of the median distance between images.
    """

    info = MethodInfo(
        name="e2lsh",
        title="Locality-Sensitive Hashing Scheme Based on p-Stable Distributions",
        venue="SoCG",
        year=2004,
        url="https://doi.org/10.1145/997817.997857",
        supervision="none",
    )

    width: Annotated[float, Range(above=0), Tuned(0.5, 8.0, "log")] = 2.0

    def solve(self, features: Tensor, labels: Tensor | None, *, seed: int) -> Head:
        """Draw directions and offsets; only mean and scale of the features (N, d) are used."""
        generator = torch.Generator().manual_seed(seed)
        anchors = features[draw_rows(len(features), 200, generator).to(features.device)]
        cell = self.width * kernel_width(features, anchors, name="e2lsh")
        directions = torch.randn(self.bits, features.shape[1], generator=generator)
        shift = torch.rand(self.bits, generator=generator)
        # floor(z) is odd where -sin(pi z) = cos(pi z + pi / 2) > 0.
        return periodic_head(
            directions * (math.pi / cell),
            math.pi * shift + math.pi / 2,
            mean=features.float().mean(0).cpu(),
        )
