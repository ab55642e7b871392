"""Rows computed from images: their pixels, or what a function makes of these.

Worker processes read and decode, and compute where the function can be sent to them.

An image that cannot be read is left out and listed with its reason. No other image is
read instead: the indices of a block say which images its rows belong to.
"""

from __future__ import annotations

import contextlib
import csv
import dataclasses
import io
import os
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray
from PIL import Image

from fisherhash.data.collection import Collection, FileReader, Reader
from fisherhash.data.images import ImageLike, UnreadableImage, load_image
from fisherhash.data.preprocessing import Preprocessing
from fisherhash.data.workers import Answer, run_jobs
from fisherhash.errors import UsageError, counted


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
    """One row per image: its pixels (3, size, size), its features or its logits.

    Attributes:
        values: (n, …) the rows of the images that could be read. A
            :class:`~fisherhash.data.pixels.PixelBank` yields tensors; rows left on the disk are
            :class:`~fisherhash.data.row_cache.StoredRows`; all others are arrays.
        indices: (n,) the numbers of these images, in the order requested.
        skipped: the images that could not be read.
        kind: the kind of the runtime that computed stored features, otherwise empty.
    """

    values: Any
    indices: NDArray[np.int64]
    skipped: list[Skipped]
    kind: str = ""


@dataclass(frozen=True)
class RowFunction:
    """What turns images into rows.

    Attributes:
        compute: bytes (n, 3, size, size) to rows (n, …); None where the pixels are the rows. With
            ``portable`` it can be pickled, uses one thread, and a row does not depend on the
            images beside it.
        preprocessing: how the images are decoded.
        shape: shape of one row.
        dtype: type of its values.
        portable: compute in the worker processes, so that no pixels are sent between processes.
    """

    compute: Callable[[NDArray[np.uint8]], NDArray] | None
    preprocessing: Preprocessing
    shape: tuple[int, ...]
    dtype: DTypeLike = np.float32
    portable: bool = False

    @classmethod
    def pixels(cls, preprocessing: Preprocessing) -> RowFunction:
        """The function whose rows are the pixels."""
        side = preprocessing.size
        return cls(None, preprocessing, (3, side, side), np.uint8)

    def __call__(self, reader: Reader, index: int) -> bytes:
        """The bytes of one image's row: the job of a worker process."""
        image = reader.open(index, enough=self.preprocessing.enough)
        pixels = self.preprocessing.pixels(image).transpose(2, 0, 1)
        if self.compute is None:
            return pixels.tobytes()
        row = self.compute(np.ascontiguousarray(pixels)[None])
        return np.asarray(row, dtype=self.dtype).tobytes()


def compute_blocks(
    collection: Collection,
    indices: Sequence[int] | NDArray[np.integer] | None,
    function: RowFunction,
    *,
    block: int = 256,
    workers: int | None = None,
) -> Generator[Rows]:
    """The rows of images, one block at a time and in order, whatever the number of workers.

    An image whose decoder crashes or hangs is decoded again, alone; if that fails too, it is
    skipped like any other image that cannot be read.

    Args:
        collection: the images.
        indices: (n,) which images, in which order; None for all.
        function: computes the rows.
        block: images per block; the last block may hold fewer, and every skipped image leaves its
            block one image smaller.
        workers: number of processes; 0 decodes in this one. None times the first few images and
            starts processes, except on Windows, if more than a second or two of work is left.

    Raises:
        UsageError: an index is outside the collection, or ``block`` is below 1.
        FisherhashError: worker processes fail image after image, or a reader has a bug.
    """
    total = len(collection)
    wanted = np.arange(total) if indices is None else np.asarray(indices, dtype=np.int64)
    if wanted.ndim != 1:
        raise UsageError(f"indices must have shape (n,), got {wanted.shape}")
    if wanted.size and not 0 <= wanted.min() <= wanted.max() < total:
        wrong = wanted.min() if wanted.min() < 0 else wanted.max()
        raise UsageError(
            f"image {wrong} does not exist: '{collection.name}' has {counted(total, 'image')}"
        )
    if block < 1:
        raise UsageError(f"a block must hold at least 1 image, got {block}")
    job = function if function.portable else RowFunction.pixels(function.preprocessing)
    answers = run_jobs(
        collection.reader, job, wanted.tolist(), names=collection.names, workers=workers
    )
    return _blocks(collection, answers, len(wanted), job, function, block)


def _blocks(
    collection: Collection,
    answers: Generator[tuple[int, Answer]],
    count: int,
    job: RowFunction,
    function: RowFunction,
    block: int,
) -> Generator[Rows]:
    """The answers of a job in blocks; what it leaves to be computed is computed here."""
    dtype, compute = np.dtype(job.dtype), None if function is job else function.compute
    with contextlib.closing(answers):
        for start in range(0, count, block):
            length = min(block, count - start)
            values = np.empty((length, *job.shape), dtype=dtype)
            read: list[int] = []
            skipped: list[Skipped] = []
            for index, answer in islice(answers, length):
                if isinstance(answer, UnreadableImage):
                    name = collection.names[index]
                    skipped.append(Skipped(index, name, str(answer), answer.passing))
                else:
                    values[len(read)] = np.frombuffer(answer, dtype).reshape(job.shape)
                    read.append(index)
            rows: NDArray[Any] = values[: len(read)]
            if compute is not None:
                rows = compute(rows) if read else np.empty((0, *function.shape))
                rows = np.asarray(rows, dtype=function.dtype)
            yield Rows(rows, np.array(read, dtype=np.int64), skipped)


def decode(
    collection: Collection,
    indices: Sequence[int] | NDArray[np.integer] | None,
    preprocessing: Preprocessing,
    *,
    block: int = 256,
    workers: int | None = None,
) -> Generator[Rows]:
    """Decode images in order, one block at a time, in bounded memory.

    The rows of :func:`compute_blocks` are the pixels; the arguments are the same.

    >>> from fisherhash.data.sources import open_data
    >>> first = next(decode(open_data("sample"), [3, 1], Preprocessing(size=64)))
    >>> first.indices.tolist(), first.values.shape
    ([3, 1], (2, 3, 64, 64))
    """
    function = RowFunction.pixels(preprocessing)
    return compute_blocks(collection, indices, function, block=block, workers=workers)


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
    rest, first = iter(images), 0
    parts = [images] if isinstance(images, Sequence) else iter(lambda: [*islice(rest, block)], [])
    for some in parts:
        files = all(isinstance(image, str | os.PathLike) for image in some)
        names = [
            os.fspath(image) if isinstance(image, str | os.PathLike) else f"image {number}"
            for number, image in enumerate(some, first)
        ]
        reader = FileReader("", names) if files else _MemoryReader(some)
        labels = np.zeros((len(names), 0), dtype=np.uint8)
        given, workers = Collection("images", names, labels, (), reader), None if files else 0
        for rows in decode(given, None, preprocessing, block=block, workers=workers):
            skipped = [dataclasses.replace(s, index=s.index + first) for s in rows.skipped]
            yield Rows(rows.values, rows.indices + first, skipped)
        first += len(names)


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
