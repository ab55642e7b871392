"""Rows computed from images: beside the decoder in worker processes, or here, block by block."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import DTypeLike, NDArray

from fisherhash.data.collection import Collection, Reader
from fisherhash.data.loading import Rows, decode, decoded_pixels, run_blocks
from fisherhash.data.preprocessing import Preprocessing


@dataclass(frozen=True)
class RowFunction:
    """What turns the pixels of images into rows.

    Attributes:
        compute: bytes (n, 3, size, size) to rows (n, …). With ``portable`` it can be pickled, uses
            one thread, and a row does not depend on the images beside it.
        preprocessing: how the images are decoded.
        shape: shape of one row.
        dtype: type of its values.
        portable: compute in the worker processes, so that no pixels are sent between processes.
    """

    compute: Callable[[NDArray[np.uint8]], NDArray]
    preprocessing: Preprocessing
    shape: tuple[int, ...]
    dtype: DTypeLike = np.float32
    portable: bool = False


def compute_blocks(
    collection: Collection,
    indices: NDArray[np.int64] | None,
    function: RowFunction,
    *,
    block: int = 256,
    workers: int | None = None,
) -> Iterator[Rows]:
    """The rows of images, one block at a time and in order, whatever the number of workers.

    Args:
        collection: the images.
        indices: (n,) which images, in which order; None for all.
        function: computes the rows.
        block: images per block; every skipped image leaves its block one image smaller.
        workers: number of processes; None lets the work decide, as for
            :func:`~fisherhash.data.loading.decode`.
    """
    if function.portable:
        job = functools.partial(_row, function)
        shape, dtype = function.shape, function.dtype
        yield from run_blocks(
            collection, indices, job, shape=shape, dtype=dtype, block=block, workers=workers
        )
        return
    for part in decode(collection, indices, function.preprocessing, block=block, workers=workers):
        pixels = np.asarray(part.pixels)
        if len(pixels):
            values = np.asarray(function.compute(pixels), dtype=function.dtype)
        else:
            values = np.empty((0, *function.shape), dtype=function.dtype)
        yield Rows(values, part.indices, part.skipped)


def _row(function: RowFunction, reader: Reader, index: int) -> bytes:
    pixels = np.frombuffer(decoded_pixels(function.preprocessing, reader, index), np.uint8)
    size = function.preprocessing.size
    row = function.compute(pixels.reshape(1, 3, size, size))
    return np.asarray(row, dtype=function.dtype).tobytes()
