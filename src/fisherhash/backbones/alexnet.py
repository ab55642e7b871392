"""AlexNet as torchvision has it: 57 million parameters, 4096 features.

Krizhevsky, *One weird trick for parallelizing convolutional neural networks* (2014): one column, no
local response normalisation. Many hashing papers fine-tune it.
"""

from __future__ import annotations

from pathlib import Path

from torch import Tensor, nn
from torch.nn import functional

from fisherhash.backbones.base import Backbone
from fisherhash.backbones.weights import fit, read_tensors
from fisherhash.data.preprocessing import Preprocessing

FEATURES = 4096
GRID = 6


class AlexNet(Backbone):
    """AlexNet up to the rectified output of fc7; dropout before fc6 and fc7 while training.

    At another size than 224 pixels the last feature map is averaged or repeated to 6 x 6, as
    torchvision does.
    """

    def __init__(self, preprocessing: Preprocessing) -> None:
        super().__init__("alexnet", FEATURES, preprocessing)
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
        self.fc6 = nn.Linear(256 * GRID * GRID, FEATURES)
        self.fc7 = nn.Linear(FEATURES, FEATURES)

    def extract(self, images: Tensor) -> Tensor:
        """Normalised images (n, 3, height, width) to features (n, 4096), none negative."""
        maps = to_grid(self.layers(images), GRID).flatten(1)
        hidden = functional.relu(self.fc6(self.dropout(maps)))
        return functional.relu(self.fc7(self.dropout(hidden)))

    def load(self, path: Path) -> None:
        """torchvision's checkpoint (.pth or .safetensors), or tensors with our names."""
        fit(
            self,
            {_translate(name): tensor for name, tensor in read_tensors(path).items()},
            path=path,
            what="AlexNet with torchvision's names (features.0.weight, …, classifier.4.bias)",
            ignore=("classifier.6.",),
        )


def to_grid(maps: Tensor, side: int) -> Tensor:
    """Feature maps (n, c, height, width) averaged to (n, c, side, side); as they are if they fit.

    An export keeps no pooling that does nothing, and needs none where the sizes agree.
    """
    if maps.shape[-2:] == (side, side):
        return maps
    return functional.adaptive_avg_pool2d(maps, side)


_NAMES = {"features": "layers", "classifier.1": "fc6", "classifier.4": "fc7"}


def _translate(name: str) -> str:
    for theirs, ours in _NAMES.items():
        if name.startswith(theirs + "."):
            return ours + name.removeprefix(theirs)
    return name
