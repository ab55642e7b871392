"""The built-in sample: 2,000 images of CIFAR-10 (Krizhevsky 2009), 200 per class, in one file.

The images are chosen from the five training batches by a hash of their names and stored without
loss as one WebP mosaic; ``sample.json`` lists their names and labels in the mosaic's order.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
from pathlib import Path

import numpy as np
from PIL import Image

from fisherhash.data.cifar import open_cifar10
from fisherhash.data.collection import Collection, one_hot
from fisherhash.data.readers import ArrayReader
from fisherhash.errors import FisherhashError
from fisherhash.system.storage import write_files

PER_CLASS = 200
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


def build_sample(
    cifar_folder: str | os.PathLike[str],
    dest: str | os.PathLike[str],
    *,
    per_class: int = PER_CLASS,
) -> None:
    """Write ``sample.webp`` and ``sample.json`` into ``dest`` from CIFAR-10's binary files."""
    cifar = open_cifar10(Path(cifar_folder))
    numbers = cifar.labels.argmax(axis=1)
    chosen: list[int] = []
    training = [item for item, name in enumerate(cifar.names) if name.startswith("data_batch_")]
    for number in range(len(cifar.classes)):
        members = [item for item in training if numbers[item] == number]
        members.sort(key=lambda item: hashlib.sha256(cifar.names[item].encode()).digest())
        chosen += members[:per_class]
    chosen.sort()
    rows = -(-len(chosen) // WIDE)
    tiles = np.zeros((rows * WIDE, SIDE, SIDE, 3), dtype=np.uint8)
    for place, item in enumerate(chosen):
        tiles[place] = np.asarray(cifar.reader.open(item))
    grid = tiles.reshape(rows, WIDE, SIDE, SIDE, 3).transpose(0, 2, 1, 3, 4)
    mosaic = Image.fromarray(np.ascontiguousarray(grid.reshape(rows * SIDE, WIDE * SIDE, 3)))
    index = {
        "citation": CITATION,
        "classes": list(cifar.classes),
        "names": [cifar.names[item] for item in chosen],
        "labels": [int(numbers[item]) for item in chosen],
    }
    pixels = io.BytesIO()
    mosaic.save(pixels, "webp", lossless=True, quality=100, method=6)
    text = json.dumps(index, separators=(",", ":")) + "\n"
    write_files(Path(dest), {"sample.webp": pixels.getvalue(), "sample.json": text})
