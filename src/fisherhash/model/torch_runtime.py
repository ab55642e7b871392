"""The runtime in PyTorch: a backbone on a CPU or a GPU, in batches of one size."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fisherhash.backbones import Backbone, fold_batch_norm
from fisherhash.model.frozen_runtime import choose_runtime
from fisherhash.model.runtime import Runtime
from fisherhash.system import storage

# Rounding depends on the batch size, so on a CPU every batch has this one, padded: an image then
# has the same bits alone and in any batch. Four runs fastest on two cores.
MICRO_BATCH = 4
GPU_BATCH = 256


class TorchRuntime:
    """A backbone in PyTorch, as it is now; create a new runtime after training it further.

    Args:
        backbone: the network; it is not changed.
        device: where to run it.
        via_onnx: whether features that are stored may be computed by ONNX Runtime, on a CPU.
    """

    def __init__(self, backbone: Backbone, device: torch.device, *, via_onnx: bool = False) -> None:
        self.name = backbone.name
        self.width = backbone.features
        self.preprocessing = backbone.preprocessing
        self.device = device
        self.kind = device.type
        self._backbone, self._via_onnx = backbone, via_onnx
        self._hashed: tuple[list[tuple[int, int, float]] | None, str] = (None, "")
        self._network = on_device(fold_batch_norm(backbone), device).eval()

    @property
    def checksum(self) -> str:
        """SHA-256 of the backbone's weights, computed again only after they changed."""
        state = self._backbone.state_dict()
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
        if self.kind != "cuda" or not isinstance(pixels, Tensor):
            return in_fixed_batches(self._network, np.ascontiguousarray(pixels), self.device)
        pixels = pixels.to(self.device, memory_format=torch.channels_last)
        with torch.autocast("cuda", torch.float16):
            features = self._network(pixels).float()
        if not features.isfinite().all():
            features = self._network(pixels).float()
        return features.cpu().numpy()

    def worker_copy(self) -> None:
        """None: every process would import torch and hold the network."""

    def stored_by(self, images: str, count: int, kind: str | None) -> Runtime:
        """What computes features that are stored: this runtime, or ONNX Runtime."""
        if not self._via_onnx or self.kind != "cpu":
            return self
        return choose_runtime(self, self._backbone, images, count, kind)


def on_device(backbone: Backbone, device: torch.device) -> Backbone:
    """Move a backbone to a device, in the channels-last order that convolutions run fastest in."""
    # To a GPU without blocking: hundreds of small copies would each wait for what else it does.
    later = device.type != "cpu"
    return backbone.to(device, memory_format=torch.channels_last, non_blocking=later)  # type: ignore[call-overload]


@torch.inference_mode()
def in_fixed_batches(
    function: Callable[[Tensor], Tensor],
    values: NDArray,
    device: torch.device,
    *,
    size: int | None = None,
) -> NDArray[np.float32]:
    """Apply a function to rows (n, …), always in batches of one size; the last one is padded.

    Images are given to it in the channels-last order that convolutions run fastest in.
    """
    order = torch.channels_last if values.ndim == 4 else torch.preserve_format
    if size is None:
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
