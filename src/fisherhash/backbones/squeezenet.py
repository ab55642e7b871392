"""SqueezeNet 1.0: 0.7 million parameters, 512 features, under 3 MB as half floats.

Iandola et al., *SqueezeNet: AlexNet-level accuracy with 50x fewer parameters and < 0.5 MB model
size* (2016).
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from fisherhash.backbones.base import Backbone
from fisherhash.data.preprocessing import Preprocessing

# Squeeze width and the width of each expanding half; None is a 3 x 3 pooling with stride 2.
FIRES = (
    *((16, 64), (16, 64), (32, 128), None),
    *((32, 128), (48, 192), (48, 192), (64, 256), None, (64, 256)),
)


class Fire(nn.Module):
    """Squeeze to few channels, then expand by 1 x 1 and by 3 x 3 filters side by side."""

    def __init__(self, inputs: int, squeeze: int, expand: int) -> None:
        super().__init__()
        self.squeeze = nn.Conv2d(inputs, squeeze, 1)
        self.expand1x1 = nn.Conv2d(squeeze, expand, 1)
        self.expand3x3 = nn.Conv2d(squeeze, expand, 3, padding=1)

    def forward(self, images: Tensor) -> Tensor:
        """Turn images (n, inputs, height, width) into (n, 2 * expand, height, width)."""
        squeezed = functional.relu(self.squeeze(images))
        expanded = torch.cat((self.expand1x1(squeezed), self.expand3x3(squeezed)), dim=1)
        return functional.relu(expanded)


class SqueezeNet(Backbone):
    """SqueezeNet 1.0 up to the output of fire9, averaged over the image.

    The 1 x 1 convolution of the classifier is not part of it: its 1000 outputs are classes, not
    features. Reads torchvision's checkpoint (.pth or .safetensors).
    """

    name = "squeezenet1.0"
    title = "SqueezeNet 1.0 (2016)"
    features = 512
    smallest = 21
    source = (
        "are torchvision's: https://download.pytorch.org/models/squeezenet1_0-b66bff10.pth, or the "
        "same tensors as .safetensors"
    )
    early = 3  # the same share of the network as in EfficientNet-Lite0
    checkpoint = "SqueezeNet 1.0 with torchvision's names (features.0.weight, …)"
    # torchvision calls this chain "features", a name that a backbone uses for the width.
    renamed: ClassVar = {"features.": "layers."}
    unwanted = ("classifier.",)

    def __init__(self, preprocessing: Preprocessing) -> None:
        super().__init__(preprocessing)
        layers: list[nn.Module] = [nn.Conv2d(3, 96, 7, stride=2), nn.ReLU(inplace=True), _pool()]
        width = 96
        for fire in FIRES:
            if fire is None:
                layers.append(_pool())
            else:
                layers.append(Fire(width, *fire))
                width = 2 * fire[1]
        self.layers = nn.Sequential(*layers)

    def extract(self, images: Tensor) -> Tensor:
        """Turn normalised images (n, 3, height, width) into non-negative features (n, 512)."""
        return self.layers(images).mean((2, 3))


def _pool() -> nn.MaxPool2d:
    return nn.MaxPool2d(3, stride=2, ceil_mode=True)
