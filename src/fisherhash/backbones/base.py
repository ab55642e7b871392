"""What every backbone is: normalised pixels in, one feature vector an image out."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar, Self

import torch
from torch import Tensor, nn

from fisherhash.backbones.weights import fit, read_tensors
from fisherhash.data.preprocessing import Preprocessing
from fisherhash.errors import UsageError


class Backbone(nn.Module):
    """A network that turns pixels into features.

    Attributes:
        name: what ``backbones.create`` takes, saved with a model.
        features: the width of the feature vector.
        preprocessing: geometry and normalisation, saved with a model.
        early: how many of its first layers are better left as they are when it is fine-tuned.
    """

    early: ClassVar[int] = 0
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
        self._fixed = 0
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

    def layers_in_order(self) -> list[nn.Module]:
        """Its parts that have weights, from the pixels to the features, for :meth:`fix`."""
        parts: list[nn.Module] = []
        for child in self.children():
            parts += list(child) if type(child) is nn.Sequential else [child]
        return [part for part in parts if next(part.parameters(), None) is not None]

    def fix(self, count: int) -> None:
        """Keep the weights and statistics of the first ``count`` layers as they are from now on."""
        layers = self.layers_in_order()
        if not 0 <= count < len(layers):
            raise UsageError(
                f"{self.name} has {len(layers)} layers with weights; from 0 to {len(layers) - 1} "
                f"of them can stay fixed, not {count}"
            )
        for layer in layers[:count]:
            layer.requires_grad_(False)
        self._fixed = count
        self.train(self.training)

    def train(self, mode: bool = True) -> Self:
        """Into training mode, but for the layers that are fixed."""
        super().train(mode)
        for layer in self.layers_in_order()[: self._fixed] if mode else ():
            layer.eval()
        return self

    def load(self, path: Path) -> None:
        """Weights from a file; a network with a published checkpoint reads that one too."""
        fit(self, read_tensors(path), path=path, what=f"a state dict of {self.name}")
