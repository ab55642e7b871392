"""CIFAR-10 in its official binary layout (Krizhevsky 2009): six files, 3,073 bytes an image."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from fisherhash.data.collection import Collection, one_hot
from fisherhash.errors import UsageError

FOLDER = "cifar-10-batches-bin"
BATCHES = (*(f"data_batch_{number}" for number in range(1, 6)), "test_batch")
CLASSES = (
    "airplane",
    "automobile",
    "bird",
    "cat",
    "deer",
    "dog",
    "frog",
    "horse",
    "ship",
    "truck",
)
RECORD = 1 + 3 * 32 * 32


class CifarReader:
    """Reads records from the memory-mapped batch files: a label, then the R, G and B planes."""

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = os.fspath(folder)
        self._batches: list[NDArray[np.uint8]] = []

    def __getstate__(self) -> dict[str, Any]:
        return {"folder": self.folder, "_batches": []}

    @property
    def batches(self) -> list[NDArray[np.uint8]]:
        """The six files as (records, 3073) arrays, mapped on first use."""
        if not self._batches:
            self._batches = [_map_batch(Path(self.folder) / f"{name}.bin") for name in BATCHES]
        return self._batches

    def read(self, index: int) -> bytes:
        """The 3,072 pixel bytes of a record, without its label."""
        for batch in self.batches:
            if index < len(batch):
                return batch[index, 1:].tobytes()
            index -= len(batch)
        raise IndexError(index)

    def parse(self, index: int, data: bytes) -> Image.Image:
        """The picture in the pixel bytes of a record."""
        planes = np.frombuffer(data, dtype=np.uint8).reshape(3, 32, 32)
        return Image.fromarray(np.ascontiguousarray(planes.transpose(1, 2, 0)))

    def open(self, index: int) -> Image.Image:
        """The picture, 32 x 32 RGB."""
        return self.parse(index, self.read(index))

    def fingerprint(self) -> str:
        """A checksum over the content of the six files."""
        digest = hashlib.sha256()
        for batch in self.batches:
            digest.update(np.ascontiguousarray(batch).data)
        return digest.hexdigest()


def find_cifar10(folder: Path) -> Path | None:
    """The folder with the batch files: ``folder`` itself or the one of the archive inside it."""
    for place in (folder, folder / FOLDER):
        if any((place / f"{name}.bin").is_file() for name in BATCHES):
            return place
    return None


def open_cifar10(folder: Path, *, name: str = "cifar10") -> Collection:
    """The 60,000 images of a folder that holds the six batch files."""
    missing = [f"{batch}.bin" for batch in BATCHES if not (folder / f"{batch}.bin").is_file()]
    if missing:
        raise UsageError(
            f"{folder} holds part of CIFAR-10 but not {', '.join(missing)}; unpack "
            "cifar-10-binary.tar.gz again"
        )
    reader = CifarReader(folder)
    numbers = np.concatenate([np.asarray(batch[:, 0]) for batch in reader.batches])
    if numbers.size and numbers.max() > 9:
        raise UsageError(
            f"{folder} holds labels up to {numbers.max()}, CIFAR-10 has 0 to 9; are these the "
            "files of CIFAR-100?"
        )
    names = [
        f"{batch}/{number:05d}"
        for batch, records in zip(BATCHES, reader.batches, strict=True)
        for number in range(len(records))
    ]
    return Collection(
        name=name,
        names=names,
        labels=one_hot(numbers.astype(np.int64), 10),
        classes=CLASSES,
        reader=reader,
        kind="cifar10",
    )


def _map_batch(path: Path) -> NDArray[np.uint8]:
    size = path.stat().st_size
    if size == 0 or size % RECORD:
        raise UsageError(
            f"{path} has {size:,} bytes, which is no whole number of records of {RECORD:,} bytes; "
            "the file is truncated or not CIFAR-10. Unpack cifar-10-binary.tar.gz again"
        )
    return np.memmap(path, dtype=np.uint8, mode="r").reshape(-1, RECORD)
