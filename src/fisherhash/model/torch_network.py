"""A network in PyTorch: a backbone on a CPU or a GPU, in batches of one size."""

from __future__ import annotations

import logging

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fisherhash.backbones import Backbone, fold_batch_norm
from fisherhash.data.computing import RowFunction
from fisherhash.errors import FisherhashError
from fisherhash.model import builtin, onnx_network
from fisherhash.model.export import export_features, random_images
from fisherhash.model.networks import Network
from fisherhash.model.onnx_network import OnnxNetwork
from fisherhash.model.torch_batches import in_fixed_batches
from fisherhash.system import storage

logger = logging.getLogger(__name__)

FEATURE_TOLERANCE = 1e-4
"""Difference of two features, as a share of the largest feature, that is more than rounding."""
MANY_PIXELS = 64_000_000
"""Pixels of all images (4,000 images at 128 px) from which on ONNX Runtime saves much time."""


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
        self.backbone, self.via_onnx = on_device(backbone, device).eval(), via_onnx
        self._checksum = ""
        self._network = on_device(fold_batch_norm(backbone), device).eval()

    @property
    def checksum(self) -> str:
        """SHA-256 of the backbone's weights."""
        if not self._checksum:
            self._checksum = storage.tensors_checksum(self.backbone.state_dict())
        return self._checksum

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

    def stored_by(self, count: int) -> Network:
        """What computes features that are stored: this network, or the packaged one of its weights.

        ONNX Runtime is faster on a CPU, and rounds differently.
        """
        here = self.via_onnx and self.device.type == "cpu" and onnx_network.installed()
        many = count * self.preprocessing.size**2 >= MANY_PIXELS
        if not here or not many or not builtin.is_packaged(self.name, self.checksum):
            return self
        return builtin.packaged_network(self.name, self.preprocessing)

    def exported(self) -> bytes:
        """The network as an ONNX file that agrees with it on random images.

        Raises:
            FisherhashError: the extra is not installed, a layer has no counterpart in ONNX, or the
                file does not compute what the network does.
        """
        content = export_features(self.backbone, self.checksum)
        pixels = random_images(self.preprocessing.size)
        expected, found = self.features(pixels), OnnxNetwork(content).features(pixels)
        size = float(np.abs(expected).max(initial=0.0))
        # Also true for NaN.
        if not np.abs(found - expected).max(initial=0.0) <= FEATURE_TOLERANCE * size:
            raise FisherhashError(f"the exported {self.name} computes something else than in torch")
        return content


def on_device(backbone: Backbone, device: torch.device) -> Backbone:
    """Move a backbone to a device, in the channels-last order that convolutions run fastest in."""
    # To a GPU without blocking: hundreds of small copies would each wait for what else it does.
    later = device.type != "cpu"
    return backbone.to(device, memory_format=torch.channels_last, non_blocking=later)  # type: ignore[call-overload]
