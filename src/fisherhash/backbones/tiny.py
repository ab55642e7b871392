"""A backbone for tests: 6,000 parameters, milliseconds per image, fixed random weights."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fisherhash.backbones.base import Backbone
from fisherhash.data.preprocessing import Preprocessing

WIDTHS = (8, 16, 32)


class Tiny(Backbone):
    """Three strided convolutions with ReLU, averaged over the image; never trained.

    The weights have a random state of their own: they are the same on every machine, and the
    caller's random numbers stay untouched.
    """

    name = "tiny"
    title = "Small convolutional network for tests, never trained"
    features = WIDTHS[-1]
    preprocessing = Preprocessing(size=32, interpolation="bilinear")
    source = "are drawn with a fixed seed"

    def __init__(self, preprocessing: Preprocessing) -> None:
        super().__init__(preprocessing)
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

    @classmethod
    def installed_weights(cls) -> None:
        """There are no trained weights."""

    def extract(self, images: Tensor) -> Tensor:
        """Turn normalised images (n, 3, height, width) into non-negative features (n, 32)."""
        return self.layers(images).mean((2, 3))
