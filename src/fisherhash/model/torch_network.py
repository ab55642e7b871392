"""A network in PyTorch: a backbone on a CPU or a GPU, in batches of one size.

Frozen features that are stored on disk may be computed by ONNX Runtime instead, which is faster on
a CPU: by the packaged network, or by one that is exported once per weights and image size into the
cache, and compared with the original before it computes anything.
"""

from __future__ import annotations

import functools
import hashlib
import logging
import time
from collections.abc import Callable, Iterator
from contextlib import suppress

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fisherhash.backbones import Backbone, fold_batch_norm
from fisherhash.data.computing import RowFunction
from fisherhash.data.row_cache import count_rows
from fisherhash.errors import FisherhashError
from fisherhash.model import builtin, onnx_network
from fisherhash.model.export import export_features, missing_package, random_images
from fisherhash.model.networks import (
    ONNX_CPU,
    Network,
    NotExportedError,
    feature_key,
)
from fisherhash.model.onnx_network import OnnxNetwork
from fisherhash.system import storage
from fisherhash.system.cache import cache_dir

logger = logging.getLogger(__name__)

# Rounding depends on the batch size, so on a CPU every batch has this one, padded: an image then
# has the same bits alone and in any batch. Four runs fastest on two cores.
MICRO_BATCH = 4
GPU_BATCH = 256
FEATURE_TOLERANCE = 1e-4
"""Difference of two features, as a share of the largest feature, that is more than rounding."""
WORTH_EXPORTING = 64_000_000
"""Pixels of all images (4,000 images at 128 px) below which the export would not save time."""
_FOLDER = "networks"
_EXPORT = 1
"""Raise this when the export changes, so that older files are not used again."""


class TorchNetwork:
    """A backbone in PyTorch, as it is now; create a new one after training it further.

    Args:
        backbone: the network; it is not changed, but moved to the device.
        device: where to run it.
        via_onnx: whether features that are stored may be computed by ONNX Runtime, on a CPU.

    Attributes:
        name: name of the backbone.
        width: number of features per image.
        preprocessing: what happens to an image before.
        kind: ``torch-cpu`` or ``torch-cuda``.
    """

    def __init__(self, backbone: Backbone, device: torch.device, *, via_onnx: bool = False) -> None:
        self.name, self.width = backbone.name, backbone.features
        self.preprocessing = backbone.preprocessing
        self.device, self.kind = device, f"torch-{device.type}"
        self.backbone, self._via_onnx = on_device(backbone, device).eval(), via_onnx
        self._hashed: tuple[list[tuple[int, int, float]] | None, str] = (None, "")
        self._network = on_device(fold_batch_norm(backbone), device).eval()

    @property
    def checksum(self) -> str:
        """SHA-256 of the backbone's weights, computed again only after they changed."""
        state = self.backbone.state_dict()
        # PyTorch counts changes in place, but not those of fused optimizers and captured graphs,
        # nor those of tensors made in inference mode: they change the sum.
        # Together, because each copy from a GPU waits for it.
        sums = torch.stack([t.double().sum() for t in state.values()]).tolist() if state else []
        now = [
            (t.data_ptr(), 0 if t.is_inference() else t._version, total)
            for t, total in zip(state.values(), sums, strict=True)
        ]
        if now != self._hashed[0]:
            self._hashed = now, storage.tensors_checksum(state)
        return self._hashed[1]

    @torch.inference_mode()
    def features(self, pixels: NDArray[np.uint8] | Tensor) -> NDArray[np.float32]:
        """Bytes (n, 3, size, size) to features (n, width).

        A tensor holds the images of a grid of runs: on CUDA it is one batch, and computed in half
        precision, whose mantissa is that of the convolutions' default there.
        """
        if self.device.type != "cuda" or not isinstance(pixels, Tensor):
            return in_fixed_batches(self._network, np.ascontiguousarray(pixels), self.device)
        pixels = pixels.to(self.device, memory_format=torch.channels_last)
        with torch.autocast("cuda", torch.float16):
            features = self._network(pixels).float()
        if not features.isfinite().all():
            features = self._network(pixels).float()
        return features.cpu().numpy()

    def row_function(self) -> RowFunction:
        """What computes here: every other process would import torch and hold the network."""
        return RowFunction(self.features, self.preprocessing, (self.width,))

    def stored_by(self, images: str, count: int, kind: str | None) -> Network:
        """What computes features that are stored: this network, or ONNX Runtime where it pays.

        That of which more rows are stored goes on, so that none is computed twice.
        """
        if not self._via_onnx or self.device.type != "cpu":
            return self
        exported = ExportedNetwork(self)
        if kind is not None:
            return exported if kind == exported.kind else self
        stored, by_onnx = (
            count_rows(images, self.preprocessing, what=feature_key(one))
            for one in (self, exported)
        )
        if stored or by_onnx:
            return exported if by_onnx > stored else self
        pays = count * self.preprocessing.size**2 >= WORTH_EXPORTING
        possible = builtin.is_packaged(self.name, self.checksum) or missing_package() is None
        return exported if pays and possible else self

    def exported(self) -> bytes:
        """The network as an ONNX file that agrees with it on random images.

        Raises:
            FisherhashError: the extra is not installed, a layer has no counterpart in ONNX, or the
                file does not compute what the network does.
        """
        content = export_features(self.backbone, self.checksum)
        if not self.agrees(OnnxNetwork(content)):
            raise FisherhashError(
                f"the exported {self.name} does not compute what it does in torch"
            )
        return content

    def agrees(self, other: OnnxNetwork) -> bool:
        """Whether another network has the same features of random images, but for rounding."""
        pixels = random_images(self.preprocessing.size)
        try:
            expected, found = self.features(pixels), other.features(pixels)
        # ONNX Runtime raises classes of its own for a graph that takes other batches.
        except Exception as error:
            logger.debug("%s: %s", self.name, error)
            return False
        if found.shape != expected.shape:
            return False
        difference = float(np.abs(found - expected).max(initial=0.0))
        size = float(np.abs(expected).max(initial=0.0))
        logger.debug("%s: features differ from torch by at most %.1e", self.name, difference)
        # Also false for NaN.
        return difference <= FEATURE_TOLERANCE * size


class ExportedNetwork:
    """A backbone in ONNX Runtime on the CPU, found or exported when it first computes.

    Args:
        original: the network in torch.

    Attributes:
        name: name of the backbone.
        width: number of features per image.
        preprocessing: what happens to an image before.
        kind: ``onnx-cpu``.
    """

    kind = ONNX_CPU

    def __init__(self, original: TorchNetwork) -> None:
        self.name, self.width = original.name, original.width
        self.preprocessing = original.preprocessing
        self._original = original

    @property
    def checksum(self) -> str:
        """SHA-256 of the weights, not of the exported file, which differs between exporters."""
        return self._original.checksum

    def features(self, pixels: NDArray[np.uint8]) -> NDArray[np.float32]:
        """Bytes (n, 3, size, size) to features (n, width)."""
        return self._network.features(pixels)

    def row_function(self) -> RowFunction:
        """What computes the features of image files, in worker processes.

        Raises:
            NotExportedError: the network cannot be exported.
        """
        return self._network.row_function()

    def stored_by(self, images: str, count: int, kind: str | None) -> ExportedNetwork:
        """This network: there is no faster one."""
        return self

    @functools.cached_property
    def _network(self) -> OnnxNetwork:
        if not onnx_network.installed():
            raise NotExportedError("onnxruntime is not installed")
        for found in self._found():
            return found
        if package := missing_package():
            raise NotExportedError(f"the package '{package}' is not installed")
        began = time.perf_counter()
        try:
            content = export_features(self._original.backbone, self.checksum)
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

    def _found(self) -> Iterator[OnnxNetwork]:
        """The packaged network, or those in the cache that are whole and agree with torch."""
        if builtin.is_packaged(self.name, self.checksum):
            yield builtin.packaged_network(self.name, self.preprocessing)
            return
        for path in sorted((cache_dir() / _FOLDER).glob(f"{self._key}-*.onnx")):
            with suppress(FisherhashError):
                digest = hashlib.sha256(storage.read_bytes(path)).hexdigest()
                network = OnnxNetwork(path)
                if path.stem.endswith(digest[:24]) and self._original.agrees(network):
                    yield network


def on_device(backbone: Backbone, device: torch.device) -> Backbone:
    """Move a backbone to a device, in the channels-last order that convolutions run fastest in."""
    # To a GPU without blocking: hundreds of small copies would each wait for what else it does.
    later = device.type != "cpu"
    return backbone.to(device, memory_format=torch.channels_last, non_blocking=later)  # type: ignore[call-overload]


@torch.inference_mode()
def in_fixed_batches(
    function: Callable[[Tensor], Tensor], values: NDArray, device: torch.device
) -> NDArray[np.float32]:
    """Apply a function to rows (n, …), always in batches of one size; the last one is padded.

    Images are given to it in the channels-last order that convolutions run fastest in.
    """
    order = torch.channels_last if values.ndim == 4 else torch.preserve_format
    size = MICRO_BATCH if device.type == "cpu" else GPU_BATCH
    rows = []
    # No rows at all are one batch of padding: the result has its shape nevertheless.
    for start in range(0, max(1, len(values)), size):
        chunk = torch.from_numpy(values[start : start + size])
        padding = chunk.new_zeros(size - len(chunk), *chunk.shape[1:])
        padded = torch.cat([chunk, padding]) if len(padding) else chunk
        given = padded.to(device, memory_format=order)
        rows.append(function(given).float().cpu()[: len(chunk)])
    return torch.cat(rows).numpy()
