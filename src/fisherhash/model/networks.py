"""Networks: what turns decoded images into features, behind one small interface.

:mod:`~fisherhash.model.onnx_network` runs an ONNX file in ONNX Runtime,
:mod:`~fisherhash.model.torch_network` a backbone in PyTorch. This module imports neither.
"""

from __future__ import annotations

import dataclasses
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from fisherhash.data.collection import Collection
from fisherhash.data.computing import RowFunction, Rows
from fisherhash.data.preprocessing import Preprocessing
from fisherhash.data.row_cache import cached_rows

ONNX_CPU, TORCH_CPU = "onnx-cpu", "torch-cpu"
"""The kinds of networks that share a processor; each may have stored features for the other."""


class Network(Protocol):
    """Computes features from pixels, arrays in and arrays out.

    Attributes:
        name: name of the backbone.
        width: number of features per image.
        preprocessing: what happens to an image before.
        kind: what computes, and where. Features of two kinds may be rounded differently.
    """

    name: str
    preprocessing: Preprocessing
    kind: str

    @property
    def width(self) -> int:
        """Number of features per image."""
        ...

    @property
    def checksum(self) -> str:
        """SHA-256 of the weights, whatever runs the network."""
        ...

    def features(self, pixels: NDArray[np.uint8]) -> NDArray[np.float32]:
        """Bytes (n, 3, size, size) to features (n, width)."""
        ...

    def row_function(self) -> RowFunction:
        """What computes the features of image files, in worker processes where that is possible.

        An image has the features of :meth:`features`, whatever other images there are.
        """
        ...

    def stored_by(self, count: int) -> Network:
        """What computes features that are stored of so many images.

        This network, or a faster one that agrees with it.
        """
        ...


def feature_rows(
    network: Network,
    collection: Collection,
    indices: NDArray[np.int64] | None = None,
    *,
    workers: int | None = None,
    on_disk: bool = False,
) -> Rows:
    """Features (n, width) of a collection's images, stored on disk.

    Args:
        network: computes the features.
        collection: the images.
        indices: (n,) which images; None for all.
        workers: number of worker processes; None lets the work decide.
        on_disk: leave the rows on the disk, see :func:`~fisherhash.data.row_cache.cached_rows`.
    """
    by = network.stored_by(len(collection))
    found = cached_rows(
        collection,
        indices,
        by.row_function(),
        what=feature_key(by),
        workers=workers,
        on_disk=on_disk,
    )
    return dataclasses.replace(found, kind=by.kind)


def feature_key(network: Network, kind: str | None = None) -> str:
    """What identifies stored features of a network, or of one of another kind with its weights."""
    return f"features {network.name} {network.checksum} {network.width} {kind or network.kind}"
