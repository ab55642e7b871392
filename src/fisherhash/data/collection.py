"""Collections: what every source of images is opened as."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray
from PIL import Image


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
        descriptions: a longer name per class if the source has them, else empty.
        notes: sentences about what was skipped or assumed while opening.
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
    """Turn class numbers (n,) into a label matrix (n, classes); -1 is an unlabelled row.

    >>> one_hot([1, -1], 3).tolist()
    [[0, 1, 0], [0, 0, 0]]
    """
    column = np.asarray(numbers, dtype=np.int64)
    matrix = np.zeros((len(column), classes), dtype=np.uint8)
    rows = np.flatnonzero(column >= 0)
    matrix[rows, column[rows]] = 1
    return matrix
