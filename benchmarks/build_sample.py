"""Builds the sample of the package, ``sample.webp`` and ``sample.json``, from CIFAR-10.

    python benchmarks/build_sample.py cifar-10-batches-bin src/fisherhash/data

Takes the 200 training images per class whose names have the smallest SHA-256.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import sys
from pathlib import Path

import numpy as np
from PIL import Image

from fisherhash.data.cifar import CITATION, SIDE, WIDE, open_cifar10
from fisherhash.system.storage import write_files


def build_sample(
    cifar_folder: str | os.PathLike[str],
    dest: str | os.PathLike[str],
    *,
    per_class: int = 200,
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


if __name__ == "__main__":
    build_sample(sys.argv[1], sys.argv[2])
