"""Rows computed from images: their pixels, or what a function makes of these.

An image that cannot be read is left out and listed with its reason. No other image takes its
place: the indices of a block say which images its rows belong to.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from fisherhash.data.collection import Collection, Reader
from fisherhash.data.images import UnreadableImage
from fisherhash.data.preprocessing import Preprocessing
from fisherhash.data.workers import TIMEOUT, Answer, run_jobs
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
        prepare: makes the function that computes, where that takes time; it is called only if rows
            are missing.
    """

    compute: Callable[[NDArray[np.uint8]], NDArray] | None
    preprocessing: Preprocessing
    shape: tuple[int, ...]
    dtype: DTypeLike = np.float32
    portable: bool = False
    prepare: Callable[[], RowFunction] | None = None

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
    timeout: float = TIMEOUT,
) -> Generator[Rows]:
    """The rows of images, one block at a time and in order, whatever the number of workers.

    Args:
        collection: the images.
        indices: (n,) which images, in which order; None for all.
        function: computes the rows.
        block: images per block; every skipped image leaves its block one image smaller.
        workers: number of processes; None lets the work decide, as for
            :func:`~fisherhash.data.loading.decode`.
        timeout: seconds without an answer after which a worker counts as hung.

    Raises:
        UsageError: an index is outside the collection, or ``block`` is below 1.
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
        collection.reader,
        job,
        wanted.tolist(),
        names=collection.names,
        workers=workers,
        timeout=timeout,
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
            for index, answer in itertools.islice(answers, length):
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
