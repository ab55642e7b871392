"""Preprocessing: how a decoded image becomes the input of a backbone; saved with every model."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from fisherhash.errors import UsageError

IMAGENET_MEAN = (0.485 * 255, 0.456 * 255, 0.406 * 255)
IMAGENET_STD = (0.229 * 255, 0.224 * 255, 0.225 * 255)
_FILTERS = ("nearest", "bilinear", "bicubic", "lanczos")
_GAP = 3.0
"""An image is averaged down to no less than this many times its final size, then resized."""
INTERPOLATIONS = {name: Image.Resampling[name.upper()] for name in _FILTERS}


@dataclass(frozen=True)
class Preprocessing:
    """Geometry on the CPU (Pillow); the normalisation runs on the device, inside the backbone.

    The shorter side is resized to ``size / crop``, then the central square of ``size`` pixels is
    cut out. With ``whole``, the whole image is squashed into the square instead. ``mean`` and
    ``std`` are in units of 0..255, channels are RGB.

    With ``draft``, a large JPEG is decoded at 1/2, 1/4 or 1/8 of its size, which takes half the
    time, if its sides keep at least ``draft`` times the pixels that are needed. The reduced pixels
    are averages, as those of an image in memory are before it is resized. 0 decodes all pixels.
    """

    size: int = 224
    crop: float = 1.0
    interpolation: str = "bicubic"
    mean: tuple[float, float, float] = IMAGENET_MEAN
    std: tuple[float, float, float] = IMAGENET_STD
    whole: bool = False
    draft: float = 0.0

    def __post_init__(self) -> None:
        if not 8 <= self.size <= 4096:
            raise UsageError(f"image size must be between 8 and 4096 pixels, got {self.size}")
        if not 0.1 <= self.crop <= 1.0:
            raise UsageError(f"crop must be between 0.1 and 1, got {self.crop}")
        if self.interpolation not in INTERPOLATIONS:
            raise UsageError(f"interpolation must be one of {', '.join(INTERPOLATIONS)}")
        if self.whole and self.crop != 1.0:
            raise UsageError(f"the whole image is not cropped: crop must be 1, got {self.crop}")
        if self.draft and not 1.0 <= self.draft <= 8.0:
            raise UsageError(f"draft must be 0, or between 1 and 8, got {self.draft}")

    @property
    def enough(self) -> int | None:
        """The shorter side at which a JPEG may be decoded; None where all pixels are needed."""
        return math.ceil(self.draft * self.size / self.crop) if self.draft else None

    def pixels(self, image: Image.Image) -> NDArray[np.uint8]:
        """Turn an RGB image of any size into (size, size, 3) bytes."""
        width, height = image.size
        if self.whole:
            return self._resized(image, (0.0, 0.0, width, height))
        scale = self.size / self.crop / min(width, height)
        # Crop before resizing: a 20,000 x 10 strip must not become 448,000 pixels wide.
        side = self.size / scale
        left, top = (width - side) / 2, (height - side) / 2
        box = (max(left, 0.0), max(top, 0.0), min(left + side, width), min(top + side, height))
        return self._resized(image, box)

    def _resized(
        self, image: Image.Image, box: tuple[float, float, float, float]
    ) -> NDArray[np.uint8]:
        size, how = (self.size, self.size), INTERPOLATIONS[self.interpolation]
        resized = image.resize(size, how, box=box, reducing_gap=self.draft or _GAP)
        return np.asarray(resized, dtype=np.uint8)

    def to_config(self) -> dict[str, Any]:
        """Return the fields as a JSON object."""
        return dataclasses.asdict(self)

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Preprocessing:
        """Build from what :meth:`to_config` returned."""
        return cls(**{**config, "mean": tuple(config["mean"]), "std": tuple(config["std"])})
