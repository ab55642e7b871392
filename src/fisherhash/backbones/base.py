"""What every backbone is: normalised pixels in, one feature vector an image out."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn

from fisherhash.backbones.weights import fit, read_tensors
from fisherhash.preprocessing import Preprocessing


class Backbone(nn.Module):
    """A network that turns pixels into features.

    Attributes:
        name: what ``backbones.create`` takes, saved with a model.
        features: the width of the feature vector.
        preprocessing: geometry and normalisation, saved with a model.
    """

    name: str
    features: int
    preprocessing: Preprocessing
    mean: Tensor
    std: Tensor

    def __init__(self, name: str, features: int, preprocessing: Preprocessing) -> None:
        super().__init__()
        self.name = name
        self.features = features
        self.preprocessing = preprocessing
        # Buffers, so that a captured CUDA graph never copies from the host; derived, so not saved.
        shape = (1, 3, 1, 1)
        self.register_buffer("mean", torch.tensor(preprocessing.mean).view(shape), persistent=False)
        self.register_buffer("std", torch.tensor(preprocessing.std).view(shape), persistent=False)

    def forward(self, pixels: Tensor) -> Tensor:
        """Bytes or floats in 0..255 (n, 3, size, size), RGB, to features (n, features)."""
        return self.extract((pixels - self.mean) / self.std)

    def extract(self, images: Tensor) -> Tensor:
        """Normalised images (n, 3, size, size) to features (n, features)."""
        raise NotImplementedError

    def load(self, path: Path) -> None:
        """Weights from a file; a network with a published checkpoint reads that one too."""
        fit(self, read_tensors(path), path=path, what=f"a state dict of {self.name}")
