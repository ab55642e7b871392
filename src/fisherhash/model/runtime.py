"""Runtimes: what computes the features of decoded images, behind one small interface.

``torch_runtime`` runs a backbone in PyTorch, ``onnx_runtime`` an exported network in ONNX Runtime.
This module imports neither.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from fisherhash.data.collection import Collection
from fisherhash.data.computing import RowFunction, Rows
from fisherhash.data.preprocessing import Preprocessing
from fisherhash.data.row_cache import cached_rows

UNSURE = 1e-4
"""A logit this near to zero may have the other sign in another runtime."""


PixelFunction = Callable[[NDArray[np.uint8]], NDArray[np.float32]]


class Runtime(Protocol):
    """Computes features from pixels, arrays in and arrays out.

    Attributes:
        name: name of the backbone.
        width: number of features per image.
        preprocessing: what happens to an image before.
        kind: what computes, and where. Features of two kinds may be rounded differently.
    """

    name: str
    width: int
    preprocessing: Preprocessing
    kind: str

    @property
    def checksum(self) -> str:
        """SHA-256 of the backbone's weights."""
        ...

    def features(self, pixels: NDArray[np.uint8]) -> NDArray[np.float32]:
        """Bytes (n, 3, size, size) to features (n, width)."""
        ...

    def worker_copy(self) -> PixelFunction | None:
        """A function for worker processes: it can be pickled and computes with one thread.

        It returns the bits of :meth:`features`, whatever images are in a batch. None for a runtime
        that has to stay in this process.
        """
        ...


def feature_rows(
    runtime: Runtime,
    collection: Collection,
    indices: NDArray[np.int64] | None = None,
    *,
    workers: int | None = None,
    on_disk: bool = False,
) -> Rows:
    """Features (n, width) of a collection's images, stored on disk.

    Args:
        runtime: computes the features.
        collection: the images.
        indices: (n,) which images; None for all.
        workers: number of worker processes; None lets the work decide.
        on_disk: leave the rows on the disk, see :func:`~fisherhash.data.row_cache.cached_rows`.
    """
    function, what = feature_function(runtime), feature_key(runtime)
    return cached_rows(collection, indices, function, what=what, workers=workers, on_disk=on_disk)


def feature_key(runtime: Runtime) -> str:
    """What identifies stored features of a runtime."""
    return f"features {runtime.name} {runtime.checksum} {runtime.kind}"


def feature_function(runtime: Runtime) -> RowFunction:
    """What computes the features: here, or in worker processes if the runtime can be sent there."""
    copy = runtime.worker_copy()
    return RowFunction(
        runtime.features if copy is None else copy,
        runtime.preprocessing,
        (runtime.width,),
        portable=copy is not None,
    )
