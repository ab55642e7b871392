"""Readers: from the number of an image to its pixels."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from fisherhash.data.images import load_image, read_file


class StoredReader:
    """A reader whose images are stored bytes, in which ``check`` finds duplicates.

    Subclasses define ``read`` and ``parse``.
    """

    def read(self, index: int) -> bytes:
        """Return the bytes of image ``index`` as they are stored."""
        raise NotImplementedError

    def parse(self, index: int, data: bytes, *, enough: int | None = None) -> Image.Image:
        """Decode ``data``, which was read from image ``index``: RGB, upright."""
        raise NotImplementedError

    def open(self, index: int, *, enough: int | None = None) -> Image.Image:
        """Return an image, RGB and upright."""
        return self.parse(index, self.read(index), enough=enough)


class FileReader(StoredReader):
    """Image files: item ``i`` is ``names[i]``, relative to ``root`` unless it is absolute."""

    def __init__(self, root: str | os.PathLike[str], names: Sequence[str]) -> None:
        self.root = os.fspath(root)
        self.names = names

    def path(self, index: int) -> str:
        """Return the path of an image file."""
        return os.path.join(self.root, self.names[index])

    def read(self, index: int) -> bytes:
        """Return the bytes of a file."""
        return read_file(self.path(index))

    def parse(self, index: int, data: bytes, *, enough: int | None = None) -> Image.Image:
        """Decode the bytes of a file."""
        return load_image(data, enough=enough)

    def fingerprint(self) -> str:
        """Return a checksum over the name, the size and the time of change of every file."""
        digest = hashlib.sha256()
        for index, name in enumerate(self.names):
            try:
                stat = os.stat(self.path(index))
                state = f"{stat.st_size} {stat.st_mtime_ns}"
            except (OSError, ValueError):
                state = "missing"
            digest.update(f"{name}\0{state}\n".encode("utf-8", "surrogateescape"))
        return digest.hexdigest()


class ArrayReader(StoredReader):
    """Images of one size in memory: ``pixels`` is (n, height, width, 3), uint8."""

    def __init__(self, pixels: NDArray[np.uint8]) -> None:
        self.pixels = pixels

    def read(self, index: int) -> bytes:
        """Return the pixels as bytes, row by row."""
        return self.pixels[index].tobytes()

    def parse(self, index: int, data: bytes, *, enough: int | None = None) -> Image.Image:
        """Build the image from those bytes."""
        height, width = self.pixels.shape[1:3]
        return Image.frombytes("RGB", (width, height), data)

    def fingerprint(self) -> str:
        """Return a checksum over all pixels."""
        return hashlib.sha256(np.ascontiguousarray(self.pixels).data).hexdigest()
