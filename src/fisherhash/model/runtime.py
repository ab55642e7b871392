"""Runtimes: what computes the features of decoded images, behind one small interface.

``torch_runtime`` runs a backbone in PyTorch, ``onnx_runtime`` an exported network in ONNX Runtime.
This module imports neither.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from fisherhash.data.collection import Collection
from fisherhash.data.preprocessing import Preprocessing
from fisherhash.data.row_cache import Rows, cached_rows

UNSURE = 1e-4
"""A logit this near to zero may have the other sign in another runtime."""


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


def feature_rows(
    runtime: Runtime, collection: Collection, indices: NDArray[np.int64] | None = None
) -> Rows:
    """Features (n, width) of a collection's images, stored on disk.

    Args:
        runtime: computes the features.
        collection: the images.
        indices: (n,) which images; None for all.
    """
    return cached_rows(
        collection,
        indices,
        runtime.preprocessing,
        what=f"features {runtime.name} {runtime.checksum} {runtime.kind}",
        shape=(runtime.width,),
        dtype=np.float32,
        compute=runtime.features,
    )
