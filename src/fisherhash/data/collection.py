"""Collections, what every source of images is opened as, and the readers of their images."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from fisherhash.data.images import UnreadableImage, current_limits, load_image
from fisherhash.system.remote import file_system, is_url


class Reader(Protocol):
    """Opens images by number. Must be picklable: worker processes are spawned, never forked."""

    def open(self, index: int, *, enough: int | None = None) -> Image.Image:
        """Return an RGB image, upright; raises :class:`~fisherhash.data.images.UnreadableImage`.

        It may be smaller than what is stored, if its shorter side has ``enough`` pixels.
        """
        ...

    def fingerprint(self) -> str:
        """Return a checksum that changes with any image (content, or path + size + mtime)."""
        ...


class FileReader:
    """Image files: item ``i`` is ``names[i]``, relative to ``root`` unless it is absolute or a URL.

    The fingerprint is over the name, the size and the time of change of every file; of a URL, over
    its name.
    """

    def __init__(self, root: str | os.PathLike[str], names: Sequence[str]) -> None:
        self.root = os.fspath(root)
        self.names = names

    def path(self, index: int) -> str:
        """Return the path of an image file."""
        return os.path.join(self.root, self.names[index])

    def open(self, index: int, *, enough: int | None = None) -> Image.Image:
        """Return an image, RGB and upright."""
        name = self.names[index]
        return load_image(_fetch(name) if is_url(name) else self.path(index), enough=enough)

    def fingerprint(self) -> str:
        """Return a checksum over the files."""
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
    """Images of one size in memory: ``pixels`` is (n, height, width, 3), uint8."""

    def __init__(self, pixels: NDArray[np.uint8]) -> None:
        self.pixels = pixels

    def open(self, index: int, *, enough: int | None = None) -> Image.Image:
        """Return an image."""
        return Image.fromarray(self.pixels[index])

    def fingerprint(self) -> str:
        """Return a checksum over all pixels."""
        return hashlib.sha256(np.ascontiguousarray(self.pixels).data).hexdigest()


@dataclass(frozen=True)
class Collection:
    """Images that are read by number, with their labels and the splits that list files define.

    Attributes:
        name: for logs and model cards.
        names: one stable, unique, POSIX-style name per image.
        labels: (n, classes) matrix of 0 and 1. A row of zeros is an unlabelled image.
        classes: one name per class.
        reader: opens the images.
        splits: ``train``, ``query`` and ``database`` as index arrays, or empty.
        kind: where the images came from: ``folder``, ``csv``, ``lists``, ``cifar10``, ``sample``
            or ``photos`` (no labels).
        notes: sentences about what was skipped or assumed while opening.
    """

    name: str
    names: Sequence[str]
    labels: NDArray[np.uint8]
    classes: tuple[str, ...]
    reader: Reader
    splits: Mapping[str, NDArray[np.int64]] = field(default_factory=dict)
    kind: str = "folder"
    notes: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.names)


def _fetch(url: str) -> bytes:
    limit = current_limits().bytes
    fs, path = file_system(url)
    try:
        with fs.open(path, "rb") as file:
            data = file.read(limit + 1)
    except Exception as error:  # every file system has errors of its own
        raise UnreadableImage(f"cannot be read: {error}", passing=True) from None
    if len(data) > limit:
        raise UnreadableImage(f"is larger than {limit:,} bytes")
    return data


def one_hot(numbers: Sequence[int] | NDArray[np.integer], classes: int) -> NDArray[np.uint8]:
    """Turn class numbers (n,) into a label matrix (n, classes); -1 is an unlabelled row.

    >>> one_hot([1, -1], 3).tolist()
    [[0, 1, 0], [0, 0, 0]]
    """
    column = np.asarray(numbers, dtype=np.int64)
    matrix = np.zeros((len(column), classes), dtype=np.uint8)
    rows = np.flatnonzero(column >= 0)
    matrix[rows, column[rows]] = 1
    return matrix
