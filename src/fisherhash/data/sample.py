"""The built-in sample: 2,000 images of CIFAR-10 (Krizhevsky 2009), 200 per class, in one file.

The images are chosen from the five training batches by a hash of their names and stored without
loss as one WebP mosaic; ``sample.json`` lists their names and labels in the mosaic's order.
``benchmarks/build_sample.py`` builds both files.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from PIL import Image

from fisherhash.data.collection import Collection, one_hot
from fisherhash.data.readers import ArrayReader
from fisherhash.errors import FisherhashError

WIDE = 50
"""Images per row of the mosaic."""
SIDE = 32
CITATION = (
    "Alex Krizhevsky, Learning Multiple Layers of Features from Tiny Images, technical report, "
    "University of Toronto, 2009"
)


def open_sample() -> Collection:
    """Open the 2,000 images inside the package: (2000, 32, 32, 3) pixels, 10 classes."""
    folder = Path(__file__).parent
    try:
        index = json.loads((folder / "sample.json").read_text(encoding="utf-8"))
        with Image.open(folder / "sample.webp") as image:
            mosaic = np.asarray(image.convert("RGB"))
    except (OSError, ValueError) as error:
        raise FisherhashError(
            f"the built-in sample in {folder} cannot be read ({error}); reinstall fisherhash"
        ) from None
    rows = mosaic.shape[0] // SIDE
    tiles = mosaic.reshape(rows, SIDE, WIDE, SIDE, 3).transpose(0, 2, 1, 3, 4)
    pixels = np.ascontiguousarray(tiles.reshape(-1, SIDE, SIDE, 3)[: len(index["names"])])
    return Collection(
        name="sample",
        names=index["names"],
        labels=one_hot(index["labels"], len(index["classes"])),
        classes=tuple(index["classes"]),
        reader=ArrayReader(pixels),
        kind="sample",
    )
