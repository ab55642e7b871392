"""From numbers of images to blocks of pixels, decoded in worker processes; bad files are skipped.

A bad file is left out and listed with its reason. No other image takes its place: the indices of a
block say which images its pixels are.
"""

from __future__ import annotations

import csv
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fisherhash.data.collection import Collection, Reader
from fisherhash.data.images import MAX_PIXELS, ImageLike, UnreadableImage, load_image
from fisherhash.data.preprocessing import Preprocessing
from fisherhash.data.workers import TIMEOUT, run_jobs
from fisherhash.errors import UsageError

__all__ = [
    "MAX_PIXELS",
    "Block",
    "ImageLike",
    "Skipped",
    "UnreadableImage",
    "decode",
    "load_image",
    "write_skipped",
]


@dataclass(frozen=True)
class Skipped:
    """An image that could not be read, and why; ``passing`` if another try may succeed."""

    name: str
    reason: str
    passing: bool = False


@dataclass(frozen=True)
class Block:
    """Some images, decoded.

    Attributes:
        indices: (n,) numbers of the images that were read, in the order asked for.
        pixels: (n, 3, size, size) bytes, contiguous; row ``i`` is image ``indices[i]``.
        skipped: the images of this block that could not be read.
    """

    indices: NDArray[np.int64]
    pixels: NDArray[np.uint8]
    skipped: list[Skipped]


@dataclass(frozen=True)
class _PixelJob:
    preprocessing: Preprocessing

    def __call__(self, reader: Reader, index: int) -> bytes:
        picture = self.preprocessing.pixels(reader.open(index))
        return np.ascontiguousarray(picture.transpose(2, 0, 1)).tobytes()


def decode(
    collection: Collection,
    indices: Sequence[int] | NDArray[np.integer] | None,
    preprocessing: Preprocessing,
    *,
    block: int = 256,
    workers: int | None = None,
    timeout: float = TIMEOUT,
) -> Iterator[Block]:
    """Decode images in order, a block at a time; memory stays bounded whatever their number.

    Args:
        collection: the images.
        indices: (n,) which ones, in which order; None for all.
        preprocessing: the geometry of the pixels.
        block: images asked for in a block; the last may be smaller, and a skipped image leaves its
            block smaller by one.
        workers: processes; 0 decodes in this one. None times the first few images and starts
            processes only on Linux and only for work of more than a few seconds.
        timeout: seconds without an answer after which a worker counts as hung.

    Raises:
        UsageError: an index outside the collection, or a block below 1.
        FisherhashError: a worker process hung or was killed.

    >>> from fisherhash.data.sources import open_data
    >>> first = next(decode(open_data("sample"), [3, 1], Preprocessing(size=64)))
    >>> first.indices.tolist(), first.pixels.shape
    ([3, 1], (2, 3, 64, 64))
    """
    total = len(collection)
    wanted = np.arange(total) if indices is None else np.asarray(indices, dtype=np.int64)
    if wanted.ndim != 1:
        raise UsageError(f"indices must have shape (n,), got {wanted.shape}")
    if wanted.size and not 0 <= wanted.min() <= wanted.max() < total:
        wrong = wanted.min() if wanted.min() < 0 else wanted.max()
        raise UsageError(f"image {wrong} does not exist: '{collection.name}' has {total} images")
    if block < 1:
        raise UsageError(f"a block must hold at least 1 image, got {block}")
    return _blocks(collection, wanted, preprocessing, block, workers, timeout)


def _blocks(
    collection: Collection,
    wanted: NDArray[np.int64],
    preprocessing: Preprocessing,
    block: int,
    workers: int | None,
    timeout: float,
) -> Iterator[Block]:
    size = preprocessing.size
    answers = run_jobs(
        collection.reader,
        _PixelJob(preprocessing),
        wanted.tolist(),
        names=collection.names,
        workers=workers,
        timeout=timeout,
    )
    try:
        for start in range(0, len(wanted), block):
            asked = min(block, len(wanted) - start)
            pixels = np.empty((asked, 3, size, size), dtype=np.uint8)
            read: list[int] = []
            skipped: list[Skipped] = []
            for _ in range(asked):
                index, answer = next(answers)
                if isinstance(answer, UnreadableImage):
                    skipped.append(Skipped(collection.names[index], str(answer), answer.passing))
                    continue
                pixels[len(read)] = np.frombuffer(answer, dtype=np.uint8).reshape(3, size, size)
                read.append(index)
            yield Block(np.array(read, dtype=np.int64), pixels[: len(read)], skipped)
    finally:
        answers.close()


def write_skipped(path: str | os.PathLike[str], skipped: Iterable[Skipped]) -> int:
    """Write the skipped images as a CSV ``name,reason``; returns how many there were."""
    rows = [(item.name, item.reason) for item in skipped]
    with Path(path).open("w", encoding="utf-8", errors="surrogateescape", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(("name", "reason"))
        writer.writerows(rows)
    return len(rows)
