"""Features of a frozen backbone by ONNX Runtime, for training on a CPU.

The network is exported once per weights and image size, into the cache. Before it computes anything
it is compared with the original. Features are stored under the checksum of the weights and the kind
of the runtime, so that one file never holds rows of both runtimes.
"""

from __future__ import annotations

import functools
import hashlib
import logging
import time
from collections.abc import Iterator
from contextlib import suppress
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from fisherhash.data.row_cache import count_rows
from fisherhash.errors import FisherhashError
from fisherhash.model import onnx_runtime
from fisherhash.model.export import export_features, missing_package, random_images
from fisherhash.model.onnx_runtime import OnnxFunction, OnnxRuntime
from fisherhash.model.runtime import NotExportedError, Runtime, feature_key
from fisherhash.system import storage
from fisherhash.system.cache import cache_dir

if TYPE_CHECKING:
    from fisherhash.backbones import Backbone

logger = logging.getLogger(__name__)

FEATURE_TOLERANCE = 1e-4
"""Difference of two features, as a share of the largest feature, that is more than rounding."""
WORTH_EXPORTING = 64_000_000
"""Pixels of all images (4,000 images at 128 px) below which the export would not save time."""
_FOLDER = "networks"
_EXPORT = 1
"""Raise this when the export changes, so that older files are not used again."""


class FrozenRuntime:
    """A backbone in ONNX Runtime on the CPU, exported when it first computes.

    Args:
        original: the runtime in torch.
        backbone: its network.

    Attributes:
        name: name of the backbone.
        width: number of features per image.
        preprocessing: what happens to an image before.
        kind: ``onnx-cpu``.
    """

    kind = "onnx-cpu"

    def __init__(self, original: Runtime, backbone: Backbone) -> None:
        self.name, self.width = original.name, original.width
        self.preprocessing = original.preprocessing
        self._original, self._backbone = original, backbone

    @property
    def checksum(self) -> str:
        """SHA-256 of the weights, not of the exported file, which differs between exporters."""
        return self._original.checksum

    def features(self, pixels: NDArray[np.uint8]) -> NDArray[np.float32]:
        """Bytes (n, 3, size, size) to features (n, width)."""
        return self._exported.features(pixels)

    def worker_copy(self) -> OnnxFunction | None:
        """What worker processes compute with.

        Raises:
            NotExportedError: the network cannot be exported.
        """
        return self._exported.worker_copy()

    def stored_by(self, images: str, count: int, kind: str | None) -> FrozenRuntime:
        """This runtime: there is no faster one."""
        return self

    @functools.cached_property
    def _exported(self) -> OnnxRuntime:
        if not onnx_runtime.installed():
            raise NotExportedError("onnxruntime is not installed")
        for found in self._found():
            return found
        if package := missing_package():
            raise NotExportedError(f"the package '{package}' is not installed")
        began = time.perf_counter()
        try:
            content = export_features(self._backbone, self.checksum)
            digest = hashlib.sha256(content).hexdigest()
            storage.write_file(cache_dir() / _FOLDER / f"{self._key}-{digest[:24]}.onnx", content)
        except FisherhashError as error:
            raise NotExportedError(str(error)) from error
        for found in self._found():
            seconds = time.perf_counter() - began
            logger.info("exported %s for ONNX Runtime, once, in %.0f s", self.name, seconds)
            return found
        raise NotExportedError(f"the exported {self.name} does not compute what it does in torch")

    @property
    def _key(self) -> str:
        text = f"{_EXPORT} {self.name} {self.checksum} {self.preprocessing}"
        return hashlib.sha256(text.encode()).hexdigest()[:24]

    def _found(self) -> Iterator[OnnxRuntime]:
        """The exported networks in the cache that are whole and agree with the original."""
        for path in sorted((cache_dir() / _FOLDER).glob(f"{self._key}-*.onnx")):
            with suppress(FisherhashError):
                runtime = OnnxRuntime(path)
                if path.stem.endswith(runtime.checksum[:24]) and self._agrees(runtime):
                    yield runtime

    def _agrees(self, runtime: OnnxRuntime) -> bool:
        pixels = random_images(self.preprocessing.size)
        expected, found = self._original.features(pixels), runtime.features(pixels)
        if found.shape != expected.shape:
            return False
        difference = float(np.abs(found - expected).max(initial=0.0))
        size = float(np.abs(expected).max(initial=0.0))
        logger.debug("%s: features differ from torch by at most %.1e", self.name, difference)
        # Also false for NaN.
        return difference <= FEATURE_TOLERANCE * size


def choose_runtime(
    original: Runtime, backbone: Backbone, images: str, count: int, kind: str | None
) -> Runtime:
    """The runtime whose features of some images are stored: torch, or ONNX Runtime.

    That of which more rows are stored goes on, so that none is computed twice. Otherwise it is ONNX
    Runtime where the export pays.

    Args:
        original: the runtime in torch, on the CPU.
        backbone: its network.
        images: the :func:`~fisherhash.data.row_cache.images_key` of the images.
        count: how many images there are.
        kind: the kind that an unfinished run began with, if there is one.
    """
    frozen = FrozenRuntime(original, backbone)
    if kind is not None:
        return frozen if kind == frozen.kind else original
    stored, exported = (
        count_rows(images, original.preprocessing, what=feature_key(one))
        for one in (original, frozen)
    )
    if stored or exported:
        return frozen if exported > stored else original
    pays = count * original.preprocessing.size**2 >= WORTH_EXPORTING
    return frozen if pays and missing_package() is None else original
