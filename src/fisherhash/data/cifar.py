"""CIFAR-10 in its official binary layout (Krizhevsky 2009): six files, 3,073 bytes per image."""

from __future__ import annotations

import functools
import hashlib
import os
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from fisherhash.data.collection import Collection, one_hot
from fisherhash.data.readers import StoredReader
from fisherhash.errors import UsageError

CIFAR_FOLDER = "cifar-10-batches-bin"
BATCHES = (*(f"data_batch_{number}" for number in range(1, 6)), "test_batch")
CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
RECORD_BYTES = 1 + 3 * 32 * 32


class CifarReader(StoredReader):
    """Reads records from the memory-mapped batch files: a label, then the R, G and B planes."""

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = os.fspath(folder)

    def __getstate__(self) -> dict[str, Any]:
        return {"folder": self.folder}

    @functools.cached_property
    def batches(self) -> list[NDArray[np.uint8]]:
        """The six files as (records, 3073) arrays, mapped on first use."""
        return [_map_batch(Path(self.folder) / f"{name}.bin") for name in BATCHES]

    def read(self, index: int) -> bytes:
        """Return the 3,072 pixel bytes of a record, without its label."""
        for batch in self.batches:
            if index < len(batch):
                return batch[index, 1:].tobytes()
            index -= len(batch)
        raise IndexError(index)

    def parse(self, index: int, data: bytes, *, enough: int | None = None) -> Image.Image:
        """Build the 32 x 32 image from the pixel bytes of a record."""
        planes = np.frombuffer(data, dtype=np.uint8).reshape(3, 32, 32)
        return Image.fromarray(np.ascontiguousarray(planes.transpose(1, 2, 0)))

    def fingerprint(self) -> str:
        """Return a checksum over the content of the six files."""
        digest = hashlib.sha256()
        for batch in self.batches:
            digest.update(np.ascontiguousarray(batch).data)
        return digest.hexdigest()


def find_cifar10(folder: Path) -> Path | None:
    """Find the batch files in ``folder`` or in the folder of the archive inside it."""
    folders = (folder, folder / CIFAR_FOLDER)
    return next(
        (p for p in folders if any((p / f"{name}.bin").is_file() for name in BATCHES)), None
    )


def open_cifar10(folder: Path) -> Collection:
    """Open the 60,000 images of a folder that holds the six batch files."""
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
        name="cifar10",
        names=names,
        labels=one_hot(numbers.astype(np.int64), 10),
        classes=CLASSES,
        reader=reader,
        kind="cifar10",
    )


def _map_batch(path: Path) -> NDArray[np.uint8]:
    size = path.stat().st_size
    if size == 0 or size % RECORD_BYTES:
        raise UsageError(
            f"{path} has {size:,} bytes, which is not a whole number of records of "
            f"{RECORD_BYTES:,} bytes; the file is truncated or not CIFAR-10. Unpack "
            "cifar-10-binary.tar.gz again"
        )
    return np.memmap(path, dtype=np.uint8, mode="r").reshape(-1, RECORD_BYTES)
