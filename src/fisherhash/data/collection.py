"""What every source of images becomes: a :class:`Collection`, read by number."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray
from PIL import Image


class Reader(Protocol):
    """Opens image number ``i``. Must be picklable: worker processes are spawned, never forked."""

    def open(self, index: int) -> Image.Image:
        """The picture as RGB, upright; raises :class:`~fisherhash.data.loading.UnreadableImage`."""
        ...

    def fingerprint(self) -> str:
        """A checksum that changes when an image changes (content, or path + size + mtime)."""
        ...


@runtime_checkable
class ByteReader(Protocol):
    """A reader that also gives the stored bytes; ``check`` compares them to find duplicates."""

    def read(self, index: int) -> bytes:
        """The bytes of image ``index`` as they are stored."""
        ...

    def parse(self, index: int, data: bytes) -> Image.Image:
        """The picture that ``data``, read from image ``index``, holds: RGB, upright."""
        ...


@dataclass(frozen=True)
class Collection:
    """Images that are read by number, with their labels and the splits their files dictate.

    Attributes:
        name: how the collection is called in logs and model cards.
        names: one stable, unique, POSIX-style name an image.
        labels: (n, classes) matrix of 0 and 1. A row of zeros is an unlabelled image.
        classes: one name a class.
        reader: opens the images.
        splits: ``train``, ``query`` and ``database`` as index arrays, or empty.
        kind: what the images came from: ``folder``, ``csv``, ``lists``, ``cifar10``, ``sample``
            or ``photos`` (no labels).
        descriptions: a longer name of each class, where the source has one, else empty.
        notes: sentences about what was left out or assumed while opening.
    """

    name: str
    names: Sequence[str]
    labels: NDArray[np.uint8]
    classes: tuple[str, ...]
    reader: Reader
    splits: Mapping[str, NDArray[np.int64]] = field(default_factory=dict)
    kind: str = "folder"
    descriptions: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.names)


def one_hot(numbers: Sequence[int] | NDArray[np.integer], classes: int) -> NDArray[np.uint8]:
    """Class numbers (n,) as a label matrix (n, classes); -1 is an unlabelled row.

    >>> one_hot([1, -1], 3).tolist()
    [[0, 1, 0], [0, 0, 0]]
    """
    column = np.asarray(numbers, dtype=np.int64)
    matrix = np.zeros((len(column), classes), dtype=np.uint8)
    rows = np.flatnonzero(column >= 0)
    matrix[rows, column[rows]] = 1
    return matrix
