"""Decoded pixels of a collection, kept for many trainings in one process."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fisherhash.data.loading import Skipped
from fisherhash.data.preprocessing import Preprocessing
from fisherhash.data.sources import Collection
from fisherhash.model.features import MICRO_BATCH, cached_rows
from fisherhash.model.hasher import Encoded, Hasher

GRID_BATCH = 1024


def pixel_rows(
    collection: Collection, numbers: NDArray[np.int64], preprocessing: Preprocessing
) -> tuple[NDArray[np.uint8], NDArray[np.int64], list[Skipped]]:
    """Bytes (n, 3, size, size) of the images that can be read, decoded once and kept on disk."""
    size = preprocessing.size
    rows = cached_rows(
        collection,
        numbers,
        preprocessing,
        what="pixels",
        shape=(3, size, size),
        dtype=np.uint8,
        compute=lambda pixels: pixels,
    )
    return rows.values, rows.indices, rows.skipped


class PixelBank:
    """Pixels of a collection, held once where the network runs: a grid of runs shares them.

    Args:
        collection: the images.
        numbers: (n,) those that any run will ask for.
        preprocessing: how they are decoded.
        device: where they are held, if at most half of its free memory is needed.
    """

    def __init__(
        self,
        collection: Collection,
        numbers: NDArray[np.int64],
        preprocessing: Preprocessing,
        device: torch.device,
    ) -> None:
        values, kept, self.skipped = pixel_rows(collection, np.unique(numbers), preprocessing)
        self.collection = collection
        self.preprocessing = preprocessing
        self.pixels = placed(torch.from_numpy(values), device)
        self._row = np.full(len(collection), -1, dtype=np.int64)
        self._row[kept] = np.arange(len(kept))

    def readable(self, numbers: NDArray[np.int64]) -> NDArray[np.int64]:
        """Those of ``numbers`` that are here."""
        return numbers[self._row[numbers] >= 0]

    def of(self, numbers: NDArray[np.int64]) -> Tensor:
        """Bytes (n, 3, size, size) of images that are here."""
        return self.pixels[torch.from_numpy(self._row[numbers]).to(self.pixels.device)]

    @torch.inference_mode()
    def encode(
        self, hasher: Hasher, numbers: NDArray[np.int64], *, queries: bool = False
    ) -> Encoded:
        """What :meth:`Hasher.encode_collection` gives, without decoding anything again.

        On CUDA in half precision, whose mantissa is that of the convolutions' default there.
        """
        from fisherhash import codes

        kept = self.readable(numbers)
        cuda = hasher.device.type == "cuda"
        size = GRID_BATCH if cuda else MICRO_BATCH
        logits, real = [], []
        for start in range(0, len(kept), size):
            chunk = self.of(kept[start : start + size]).to(hasher.device)
            with torch.autocast(hasher.device.type, torch.float16, enabled=cuda):
                features = hasher.features_of_tensor(chunk)
            if cuda and not features.isfinite().all():
                features = hasher.features_of_tensor(chunk)
            logits.append(hasher.head.logits(features))
            if queries:
                real.append(hasher.head.query(features).float())
        packed = (
            codes.pack(torch.cat(logits).float().cpu().numpy())
            if logits
            else np.empty((0, codes.code_bytes(hasher.bits)), dtype=np.uint8)
        )
        missing = set(numbers.tolist()) - set(kept.tolist())
        names = {str(self.collection.names[i]) for i in missing}
        skipped = [item for item in self.skipped if item.name in names]
        if queries and not real:
            nothing = np.empty((0, hasher.head.in_features), dtype=np.float32)
            return Encoded(packed, kept, skipped, hasher.queries_of_features(nothing))
        return Encoded(packed, kept, skipped, torch.cat(real).cpu().numpy() if real else None)


def placed(pixels: Tensor, device: torch.device) -> Tensor:
    """On the device if at most half of its free memory is needed, else where they are."""
    if device.type != "cuda":
        return pixels
    free, _ = torch.cuda.mem_get_info(device)
    return pixels.to(device) if pixels.numel() <= free // 2 else pixels
