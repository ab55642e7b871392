"""Decode images into blocks of pixels, in worker processes where that is faster."""

from __future__ import annotations

import csv
import dataclasses
import io
import itertools
import os
from collections.abc import Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from fisherhash.data.collection import Collection
from fisherhash.data.computing import RowFunction, Rows, Skipped, compute_blocks
from fisherhash.data.images import ImageLike, UnreadableImage, load_image
from fisherhash.data.preprocessing import Preprocessing
from fisherhash.data.readers import FileReader
from fisherhash.data.workers import TIMEOUT
from fisherhash.errors import UsageError

__all__ = [
    "ImageLike",
    "Rows",
    "Skipped",
    "UnreadableImage",
    "decode",
    "decode_images",
    "skipped_csv",
]


def decode(
    collection: Collection,
    indices: Sequence[int] | NDArray[np.integer] | None,
    preprocessing: Preprocessing,
    *,
    block: int = 256,
    workers: int | None = None,
    timeout: float = TIMEOUT,
) -> Generator[Rows]:
    """Decode images in order, one block at a time, in bounded memory.

    An image whose decoder crashes or hangs is decoded again, alone; if that fails too, it is
    skipped like any other image that cannot be read.

    Args:
        collection: the images.
        indices: (n,) which images, in which order; None for all.
        preprocessing: the geometry of the pixels.
        block: images per block; the last block may hold fewer, and every skipped image leaves its
            block one image smaller.
        workers: number of processes; 0 decodes in this one. None times the first few images and
            starts processes, except on Windows, if more than a second or two of work is left.
        timeout: seconds without an answer after which a worker counts as hung.

    Raises:
        UsageError: an index is outside the collection, or ``block`` is below 1.
        FisherhashError: worker processes fail image after image, or a reader has a bug.

    >>> from fisherhash.data.sources import open_data
    >>> first = next(decode(open_data("sample"), [3, 1], Preprocessing(size=64)))
    >>> first.indices.tolist(), first.values.shape
    ([3, 1], (2, 3, 64, 64))
    """
    function = RowFunction.pixels(preprocessing)
    return compute_blocks(
        collection, indices, function, block=block, workers=workers, timeout=timeout
    )


def decode_images(
    images: Iterable[ImageLike], preprocessing: Preprocessing, *, block: int = 256
) -> Iterator[Rows]:
    """Decode images in memory, or image files by their paths; image ``i`` is the i-th one given.

    Images in memory are decoded in this process. An iterator is consumed one block at a time.

    Args:
        images: paths, bytes, Pillow images or arrays.
        preprocessing: the geometry of the pixels.
        block: images per block.
    """
    if not isinstance(images, Sequence):
        return _decode_iterator(iter(images), preprocessing, block)
    files = all(isinstance(image, str | os.PathLike) for image in images)
    given, workers = _collection_of(images, files=files), None if files else 0
    return decode(given, None, preprocessing, block=block, workers=workers)


def _decode_iterator(
    images: Iterator[ImageLike], preprocessing: Preprocessing, block: int
) -> Iterator[Rows]:
    first = 0
    while some := list(itertools.islice(images, block)):
        for part in decode(
            _collection_of(some, first), None, preprocessing, block=block, workers=0
        ):
            skipped = [dataclasses.replace(s, index=s.index + first) for s in part.skipped]
            yield Rows(part.values, part.indices + first, skipped)
        first += len(some)


def _collection_of(
    images: Sequence[ImageLike], first: int = 0, *, files: bool = False
) -> Collection:
    """Images without labels; ``first`` is the number of the first, ``files``: all are paths."""
    names = [
        os.fspath(image) if isinstance(image, str | os.PathLike) else f"image {number}"
        for number, image in enumerate(images, first)
    ]
    reader = FileReader("", names) if files else _MemoryReader(images)
    return Collection("images", names, np.zeros((len(images), 0), dtype=np.uint8), (), reader)


@dataclass(frozen=True)
class _MemoryReader:
    images: Sequence[ImageLike]

    def open(self, index: int, *, enough: int | None = None) -> Image.Image:
        return load_image(self.images[index], enough=enough)

    def fingerprint(self) -> str:
        raise UsageError("images in memory have no fingerprint, so nothing of them can be cached")


def skipped_csv(skipped: Iterable[Skipped]) -> str:
    """The skipped images as a CSV ``name,reason``."""
    text = io.StringIO()
    rows = ((item.name, item.reason) for item in skipped)
    csv.writer(text, lineterminator="\n").writerows([("name", "reason"), *rows])
    return text.getvalue()
