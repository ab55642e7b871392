"""Readers: from the number of an image to its picture."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from fisherhash.data.images import load_image, read_file


class FileReader:
    """Image files: item ``i`` is ``names[i]``, relative to ``root`` (an absolute name stays)."""

    def __init__(self, root: str | os.PathLike[str], names: Sequence[str]) -> None:
        self.root = os.fspath(root)
        self.names = names

    def path(self, index: int) -> str:
        """Where image ``index`` lies on disk."""
        return os.path.join(self.root, self.names[index])

    def read(self, index: int) -> bytes:
        """The bytes of the file."""
        return read_file(self.path(index))

    def parse(self, index: int, data: bytes) -> Image.Image:
        """The picture in the bytes of a file."""
        return load_image(data)

    def open(self, index: int) -> Image.Image:
        """The picture, RGB and upright."""
        return load_image(self.read(index))

    def fingerprint(self) -> str:
        """A checksum over the name, the size and the time of change of every file."""
        digest = hashlib.sha256()
        for index, name in enumerate(self.names):
            try:
                stat = os.stat(self.path(index))
                state = f"{stat.st_size} {stat.st_mtime_ns}"
            except (OSError, ValueError):
                state = "missing"
            digest.update(f"{name}\0{state}\n".encode("utf-8", "surrogateescape"))
        return digest.hexdigest()


class ArrayReader:
    """Pictures of one size in memory: ``pixels`` is (n, height, width, 3), uint8."""

    def __init__(self, pixels: NDArray[np.uint8]) -> None:
        self.pixels = pixels

    def read(self, index: int) -> bytes:
        """The pixels as bytes, row by row."""
        return self.pixels[index].tobytes()

    def parse(self, index: int, data: bytes) -> Image.Image:
        """The picture in those bytes."""
        height, width = self.pixels.shape[1:3]
        return Image.frombytes("RGB", (width, height), data)

    def open(self, index: int) -> Image.Image:
        """The picture, RGB."""
        return Image.fromarray(self.pixels[index])

    def fingerprint(self) -> str:
        """A checksum over all pixels."""
        return hashlib.sha256(np.ascontiguousarray(self.pixels).data).hexdigest()
