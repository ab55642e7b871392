"""Features of images: in batches of one fixed size, and once only."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fisherhash.backbones import Backbone, fold_batch_norm
from fisherhash.data.loading import Skipped, decode
from fisherhash.data.preprocessing import Preprocessing
from fisherhash.data.row_cache import RowCache
from fisherhash.data.sources import Collection
from fisherhash.system import storage
from fisherhash.system.cache import cache_dir
from fisherhash.system.progress import progress

# Rounding depends on the batch's size, so on a CPU every batch has this one, padded: an image then
# has the same bits alone and among others. Four is where two cores run fastest.
MICRO_BATCH = 4
GPU_BATCH = 256
# Raised when decoding or an architecture changes, so that rows made before are not used again.
FORMAT = 1


@dataclass(frozen=True)
class Rows:
    """One row an image.

    Attributes:
        values: (n, …) the rows of the images that could be read.
        indices: (n,) their numbers in the collection.
        skipped: the others, with reasons.
    """

    values: NDArray
    indices: NDArray[np.int64]
    skipped: list[Skipped]


class Extractor:
    """A backbone as it is now, for inference only; make a new one after training it further.

    Args:
        backbone: images to features; it is not changed.
        device: where to run.
    """

    def __init__(self, backbone: Backbone, device: torch.device) -> None:
        self.name = backbone.name
        self.width = backbone.features
        self.preprocessing = backbone.preprocessing
        self.device = device
        self._checksum = storage.tensors_checksum(backbone.state_dict())
        self._network = on_device(fold_batch_norm(backbone), device).eval()

    @torch.inference_mode()
    def of_tensor(self, pixels: Tensor) -> Tensor:
        """Bytes (n, 3, size, size) on the device to features (n, d)."""
        return self._network(pixels.contiguous(memory_format=torch.channels_last)).float()

    @torch.inference_mode()
    def of_pixels(self, pixels: NDArray[np.uint8]) -> NDArray[np.float32]:
        """Bytes (n, 3, size, size) to features (n, d)."""
        return in_fixed_batches(self.of_tensor, np.ascontiguousarray(pixels), self.device)

    def of_collection(
        self, collection: Collection, indices: NDArray[np.int64] | None = None
    ) -> Rows:
        """Features (n, d) of a collection's images, all of them without ``indices``, cached."""
        return cached_rows(
            collection,
            np.arange(len(collection)) if indices is None else indices,
            self.preprocessing,
            what=f"features {self.name} {self._checksum} {self.device.type}",
            shape=(self.width,),
            dtype=np.float32,
            compute=self.of_pixels,
        )


def on_device(backbone: Backbone, device: torch.device) -> Backbone:
    """Move a backbone, its weights in the channels-last order that convolutions run fastest in."""
    return backbone.to(device, memory_format=torch.channels_last)  # type: ignore[call-overload]


def cached_rows(
    collection: Collection,
    wanted: NDArray[np.int64],
    preprocessing: Preprocessing,
    *,
    what: str,
    shape: tuple[int, ...],
    dtype: type,
    compute: Callable[[NDArray[np.uint8]], NDArray],
) -> Rows:
    """Rows computed from decoded images, from the disk where they were computed before.

    Args:
        collection: the images.
        wanted: (n,) which ones.
        preprocessing: how they are decoded.
        what: names the rows: its first word for people, the whole for telling caches apart.
        shape: of one row.
        dtype: of its values.
        compute: bytes (b, 3, size, size) to rows (b, …).
    """
    key = f"{FORMAT} {what} {preprocessing} {collection.reader.fingerprint()} {len(collection)}"
    folder = cache_dir() / "rows" / hashlib.sha256(key.encode()).hexdigest()[:32]
    cache = RowCache(folder, len(collection), shape, dtype)
    missing = cache.missing(wanted)
    if len(missing):
        numbers = {str(collection.names[int(i)]): int(i) for i in missing}
        with progress(f"{what.split()[0]} of {collection.name}", len(wanted)) as advance:
            advance(len(wanted) - len(missing))
            cache.fill(decode(collection, missing, preprocessing), compute, numbers, advance)
    kept = cache.readable(wanted)
    return Rows(cache.rows[kept], kept, cache.skipped(wanted))


def in_fixed_batches(
    function: Callable[[Tensor], Tensor], values: NDArray, device: torch.device
) -> NDArray[np.float32]:
    """Apply a function to rows (n, …), always in batches of one size, the last one padded."""
    size = MICRO_BATCH if device.type == "cpu" else GPU_BATCH
    rows = []
    for start in range(0, len(values), size):
        chunk = torch.from_numpy(values[start : start + size])
        count = len(chunk)
        if count < size:
            chunk = torch.cat([chunk, chunk.new_zeros(size - count, *chunk.shape[1:])])
        rows.append(function(chunk.to(device)).float().cpu()[:count])
    return torch.cat(rows).numpy() if rows else np.empty((0, 0), dtype=np.float32)
