"""Runtimes: what computes the features of decoded images, behind one small interface.

``torch_runtime`` runs a backbone in PyTorch, ``onnx_runtime`` an exported network in ONNX Runtime,
``frozen_runtime`` a backbone in ONNX Runtime whose features are stored. This module imports none.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable
from functools import partial
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from fisherhash.data.collection import Collection
from fisherhash.data.computing import RowFunction, Rows
from fisherhash.data.preprocessing import Preprocessing
from fisherhash.data.row_cache import cached_rows, images_key
from fisherhash.errors import FisherhashError

logger = logging.getLogger(__name__)

UNSURE = 1e-4
"""A logit this near to zero may have the other sign in another runtime."""


PixelFunction = Callable[[NDArray[np.uint8]], NDArray[np.float32]]


class NotExportedError(FisherhashError):
    """A network cannot be run by ONNX Runtime here."""


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

    def stored_by(self, images: str, count: int, kind: str | None) -> Runtime:
        """What computes features that are stored: this runtime, or a faster one that agrees.

        Args:
            images: the :func:`~fisherhash.data.row_cache.images_key` of the images.
            count: how many images there are.
            kind: the kind that an unfinished run began with, if there is one.
        """
        ...


def feature_rows(
    runtime: Runtime,
    collection: Collection,
    indices: NDArray[np.int64] | None = None,
    *,
    workers: int | None = None,
    on_disk: bool = False,
    kind: str | None = None,
) -> Rows:
    """Features (n, width) of a collection's images, stored on disk.

    Args:
        runtime: computes the features.
        collection: the images.
        indices: (n,) which images; None for all.
        workers: number of worker processes; None lets the work decide.
        on_disk: leave the rows on the disk, see :func:`~fisherhash.data.row_cache.cached_rows`.
        kind: the kind of the runtime that an unfinished run began with; by default that which
            stored more rows of these images, or else the fastest.
    """
    images = images_key(collection)

    def rows(by: Runtime) -> Rows:
        prepare = partial(feature_function, by)
        function = RowFunction(by.features, by.preprocessing, (by.width,), prepare=prepare)
        found = cached_rows(
            collection,
            indices,
            function,
            what=feature_key(by),
            images=images,
            workers=workers,
            on_disk=on_disk,
        )
        return dataclasses.replace(found, kind=by.kind)

    try:
        return rows(runtime.stored_by(images, len(collection), kind))
    except NotExportedError as error:
        logger.info("torch computes the features of %s, not ONNX Runtime: %s", runtime.name, error)
        return rows(runtime)


def feature_key(runtime: Runtime, kind: str | None = None) -> str:
    """What identifies stored features of a runtime, or of another kind with its weights."""
    return f"features {runtime.name} {runtime.checksum} {kind or runtime.kind}"


def feature_function(runtime: Runtime) -> RowFunction:
    """What computes the features: here, or in worker processes if the runtime can be sent there."""
    copy = runtime.worker_copy()
    return RowFunction(
        runtime.features if copy is None else copy,
        runtime.preprocessing,
        (runtime.width,),
        portable=copy is not None,
    )
