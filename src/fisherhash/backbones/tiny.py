"""A backbone for tests: 6,000 parameters, milliseconds, the same weights on every machine."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fisherhash.backbones.base import Backbone
from fisherhash.data.preprocessing import Preprocessing

FEATURES = 32
WIDTHS = (8, 16, FEATURES)


class Tiny(Backbone):
    """Three strided convolutions with ReLU and the average over the picture; never trained.

    The weights are drawn from a generator of their own, so that the caller's random numbers are
    neither used nor needed.
    """

    def __init__(self, preprocessing: Preprocessing) -> None:
        super().__init__("tiny", FEATURES, preprocessing)
        layers: list[nn.Module] = []
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            inputs = 3
            for width in WIDTHS:
                conv = nn.Conv2d(inputs, width, 3, stride=2, padding=1)
                nn.init.kaiming_normal_(conv.weight, nonlinearity="relu")
                layers += [conv, nn.ReLU(inplace=True)]
                inputs = width
        self.layers = nn.Sequential(*layers)

    def extract(self, images: Tensor) -> Tensor:
        """Normalised images (n, 3, height, width) to features (n, 32), none negative."""
        return self.layers(images).mean((2, 3))
