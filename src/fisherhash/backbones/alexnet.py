"""AlexNet as in torchvision: 57 million parameters, 4096 features.

Krizhevsky, *One weird trick for parallelizing convolutional neural networks* (2014): one column, no
local response normalisation. Many hashing papers fine-tune it.
"""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor, nn
from torch.nn import functional

from fisherhash.backbones.base import Backbone
from fisherhash.data.preprocessing import Preprocessing

GRID = 6


class AlexNet(Backbone):
    """AlexNet up to the rectified output of fc7; dropout before fc6 and fc7 while training.

    At sizes other than 224 pixels the last feature map is averaged or repeated to 6 x 6, as in
    torchvision. Reads torchvision's checkpoint (.pth or .safetensors).
    """

    name = "alexnet"
    title = "AlexNet, one column (2014)"
    features = 4096
    smallest = 63
    source = "are torchvision's: https://download.pytorch.org/models/alexnet-owt-7be5be79.pth"
    checkpoint = "AlexNet with torchvision's names (features.0.weight, …, classifier.4.bias)"
    renamed: ClassVar = {"features.": "layers.", "classifier.1.": "fc6.", "classifier.4.": "fc7."}
    unwanted = ("classifier.6.",)

    def __init__(self, preprocessing: Preprocessing) -> None:
        super().__init__(preprocessing)
        self.layers = nn.Sequential(
            nn.Conv2d(3, 64, 11, stride=4, padding=2),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(3, stride=2),
            nn.Conv2d(64, 192, 5, padding=2),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(3, stride=2),
            nn.Conv2d(192, 384, 3, padding=1),
            nn.ReLU(inplace=True),
            nn.Conv2d(384, 256, 3, padding=1),
            nn.ReLU(inplace=True),
            nn.Conv2d(256, 256, 3, padding=1),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(3, stride=2),
        )
        self.dropout = nn.Dropout(0.5)
        self.fc6 = nn.Linear(256 * GRID * GRID, 4096)
        self.fc7 = nn.Linear(4096, 4096)

    def extract(self, images: Tensor) -> Tensor:
        """Turn normalised images (n, 3, height, width) into non-negative features (n, 4096)."""
        maps = to_grid(self.layers(images), GRID).flatten(1)
        hidden = functional.relu(self.fc6(self.dropout(maps)))
        return functional.relu(self.fc7(self.dropout(hidden)))


def to_grid(maps: Tensor, side: int) -> Tensor:
    """Average feature maps (n, c, height, width) to (n, c, side, side).

    Maps of that size are returned unchanged, so that an exported graph holds no idle pooling.
    """
    if maps.shape[-2:] == (side, side):
        return maps
    return functional.adaptive_avg_pool2d(maps, side)
