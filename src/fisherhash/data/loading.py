"""Decode images into blocks of pixels, in worker processes where that is faster.

An image that cannot be read is left out and listed with its reason. No other image takes its
place: the indices of a block say which images its pixels belong to.
"""

from __future__ import annotations

import contextlib
import csv
import dataclasses
import functools
import io
import itertools
import os
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import DTypeLike, NDArray
from PIL import Image

from fisherhash.data.collection import Collection, Reader
from fisherhash.data.images import ImageLike, UnreadableImage, load_image
from fisherhash.data.preprocessing import Preprocessing
from fisherhash.data.readers import FileReader
from fisherhash.data.workers import TIMEOUT, Answer, Job, LostWorkerError, run_jobs
from fisherhash.errors import UsageError
from fisherhash.system.cores import available_cores

if TYPE_CHECKING:
    from torch import Tensor

ALONE_SECONDS = 30.0
"""Time limit for an image that is decoded alone after it took a worker process down."""

LOST_IN_A_ROW = 8
"""Images in a row that may take their worker down before the images are no longer to blame."""


@dataclass(frozen=True)
class Skipped:
    """An image that could not be read.

    Attributes:
        index: its number in the source.
        name: its name in the source.
        reason: why it could not be read.
        passing: whether another attempt may succeed.
    """

    index: int
    name: str
    reason: str
    passing: bool = False


@dataclass(frozen=True)
class Rows:
    """One row per image.

    Attributes:
        values: (n, …) the rows of the images that could be read; if they were left on the disk,
            :class:`~fisherhash.data.row_cache.StoredRows`.
        indices: (n,) the numbers of these images.
        skipped: the images that could not be read.
    """

    values: Any
    indices: NDArray[np.int64]
    skipped: list[Skipped]


@dataclass(frozen=True)
class DecodedBlock:
    """Some images, decoded.

    Attributes:
        indices: (n,) numbers of the images that were read, in the order requested.
        pixels: (n, 3, size, size) bytes; row ``i`` is image ``indices[i]``. A
            :class:`~fisherhash.data.pixels.PixelBank` yields tensors, all others arrays.
        skipped: the images of this block that could not be read.
    """

    indices: NDArray[np.int64]
    pixels: NDArray[np.uint8] | Tensor
    skipped: list[Skipped]


def decoded_pixels(preprocessing: Preprocessing, reader: Reader, index: int) -> bytes:
    """The bytes (3, size, size) of one image: the job of a worker process."""
    return preprocessing.pixels(reader.open(index)).transpose(2, 0, 1).tobytes()


def decode(
    collection: Collection,
    indices: Sequence[int] | NDArray[np.integer] | None,
    preprocessing: Preprocessing,
    *,
    block: int = 256,
    workers: int | None = None,
    timeout: float = TIMEOUT,
) -> Iterator[DecodedBlock]:
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
            starts processes only on Linux and only for more than a few seconds of work.
        timeout: seconds without an answer after which a worker counts as hung.

    Raises:
        UsageError: an index is outside the collection, or ``block`` is below 1.
        FisherhashError: worker processes fail image after image, or a reader has a bug.

    >>> from fisherhash.data.sources import open_data
    >>> first = next(decode(open_data("sample"), [3, 1], Preprocessing(size=64)))
    >>> first.indices.tolist(), first.pixels.shape
    ([3, 1], (2, 3, 64, 64))
    """
    job = functools.partial(decoded_pixels, preprocessing)
    shape = (3, preprocessing.size, preprocessing.size)
    blocks = run_blocks(
        collection, indices, job, shape=shape, block=block, workers=workers, timeout=timeout
    )
    return _decoded(blocks)


def _decoded(blocks: Generator[Rows]) -> Generator[DecodedBlock]:
    with contextlib.closing(blocks):
        for part in blocks:
            yield DecodedBlock(part.indices, part.values, part.skipped)


def run_blocks(
    collection: Collection,
    indices: Sequence[int] | NDArray[np.integer] | None,
    job: Job,
    *,
    shape: tuple[int, ...],
    dtype: DTypeLike = np.uint8,
    block: int = 256,
    workers: int | None = None,
    timeout: float = TIMEOUT,
) -> Generator[Rows]:
    """What a job makes of each image, one block of rows at a time; see :func:`decode`.

    Args:
        collection: the images.
        indices: (n,) which images, in which order; None for all.
        job: returns the bytes of the row of one image.
        shape: shape of one row.
        dtype: type of its values.
        block: images per block.
        workers: number of processes.
        timeout: seconds without an answer after which a worker counts as hung.
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
    run = functools.partial(run_jobs, collection.reader, job, names=collection.names)
    answers = _answers(run, wanted.tolist(), workers, timeout)
    return _blocks(collection, answers, len(wanted), (shape, np.dtype(dtype)), block)


def decode_images(
    images: Iterable[ImageLike], preprocessing: Preprocessing, *, block: int = 256
) -> Iterator[DecodedBlock]:
    """Decode images in memory, or image files by their paths; image ``i`` is the i-th one given.

    Images in memory are decoded in this process. An iterator is consumed one block at a time.

    Args:
        images: paths, bytes, Pillow images or arrays.
        preprocessing: the geometry of the pixels.
        block: images per block.
    """
    files = isinstance(images, Sequence) and all(isinstance(i, str | os.PathLike) for i in images)
    waiting, first = iter(images), 0
    while some := list(itertools.islice(waiting, None if files else block)):
        names = [
            os.fspath(image) if isinstance(image, str | os.PathLike) else f"image {number}"
            for number, image in enumerate(some, first)
        ]
        reader = FileReader("", names) if files else _MemoryReader(some)
        labels = np.zeros((len(some), 0), dtype=np.uint8)
        given = Collection("images", names, labels, (), reader)
        workers = None if files else 0
        for part in decode(given, None, preprocessing, block=block, workers=workers):
            skipped = [dataclasses.replace(s, index=s.index + first) for s in part.skipped]
            yield DecodedBlock(part.indices + first, part.pixels, skipped)
        first += len(some)


@dataclass(frozen=True)
class _MemoryReader:
    images: Sequence[ImageLike]

    def open(self, index: int) -> Image.Image:
        return load_image(self.images[index])

    def fingerprint(self) -> str:
        raise UsageError("images in memory have no fingerprint, so nothing of them can be cached")


def _blocks(
    collection: Collection,
    answers: Generator[tuple[int, Answer]],
    count: int,
    row: tuple[tuple[int, ...], np.dtype],
    block: int,
) -> Generator[Rows]:
    shape, dtype = row
    with contextlib.closing(answers):
        for start in range(0, count, block):
            length = min(block, count - start)
            values = np.empty((length, *shape), dtype=dtype)
            read: list[int] = []
            skipped: list[Skipped] = []
            for index, answer in itertools.islice(answers, length):
                if isinstance(answer, UnreadableImage):
                    name = collection.names[index]
                    skipped.append(Skipped(index, name, str(answer), answer.passing))
                else:
                    values[len(read)] = np.frombuffer(answer, dtype).reshape(shape)
                    read.append(index)
            yield Rows(values[: len(read)], np.array(read, dtype=np.int64), skipped)


def _answers(
    run: Callable[..., Iterator[tuple[int, Answer]]],
    wanted: list[int],
    workers: int | None,
    timeout: float,
) -> Generator[tuple[int, Answer]]:
    """The answers of ``run_jobs``; a decoder that crashes or hangs costs one image only."""
    lost = 0
    while wanted:
        done = 0
        try:
            for pair in run(wanted, workers=workers, timeout=timeout):
                yield pair
                done += 1
            return
        except LostWorkerError as error:
            at = wanted.index(error.index, done)
        # From here on nothing is decoded in this process, which must survive.
        workers = workers or available_cores()
        yield from _answers(run, wanted[done:at], workers, timeout)
        lost = lost + 1 if at == 0 else 1
        try:
            yield from run([wanted[at]], workers=1, timeout=min(timeout, ALONE_SECONDS))
            lost = 0
        except LostWorkerError as error:
            if lost > LOST_IN_A_ROW:
                raise
            yield wanted[at], UnreadableImage(str(error), passing=True)
        wanted = wanted[at + 1 :]


def write_skipped(path: str | os.PathLike[str], skipped: Iterable[Skipped]) -> int:
    """Write the skipped images as a CSV ``name,reason``; returns their number."""
    rows = [(item.name, item.reason) for item in skipped]
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows([("name", "reason"), *rows])
    Path(path).write_text(text.getvalue(), "utf-8", "surrogateescape", newline="")
    return len(rows)
