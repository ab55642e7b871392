"""Decoded pixels of a collection, held in memory for training and for grids of runs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fisherhash.data.collection import Collection
from fisherhash.data.computing import RowFunction, Rows, Skipped
from fisherhash.data.preprocessing import Preprocessing
from fisherhash.data.row_cache import cached_rows
from fisherhash.errors import FisherhashError, counted

GRID_BATCH = 1024


def pixel_rows(
    collection: Collection,
    indices: NDArray[np.int64],
    preprocessing: Preprocessing,
    *,
    on_disk: bool = False,
) -> Rows:
    """Bytes (n, 3, size, size) of images, decoded once and stored on disk."""
    function = RowFunction.pixels(preprocessing)
    return cached_rows(collection, indices, function, what="pixels", on_disk=on_disk)


class PixelBank:
    """Pixels of a collection, held once where the network runs; the runs of a grid share them.

    Args:
        collection: the images.
        indices: (n,) all images that a run may need.
        preprocessing: how to decode them.
        device: where to hold them, if at most half of its free memory is needed.
    """

    def __init__(
        self,
        collection: Collection,
        indices: NDArray[np.int64],
        preprocessing: Preprocessing,
        device: torch.device,
    ) -> None:
        rows = pixel_rows(collection, np.unique(indices), preprocessing)
        self.skipped = rows.skipped
        self.indices = rows.indices
        self.pixels = placed(torch.from_numpy(rows.values), device)
        self._row = np.full(len(collection), -1, dtype=np.int64)
        self._row[rows.indices] = np.arange(len(rows.indices))

    def of(self, indices: NDArray[np.int64]) -> Tensor:
        """Bytes (n, 3, size, size) of images that are in the bank."""
        rows = self._row[indices]
        check_readable(indices[rows < 0], self.skipped)
        if np.array_equal(indices, self.indices):
            return self.pixels
        return self.pixels[torch.from_numpy(rows).to(self.pixels.device)]

    def blocks(
        self, indices: NDArray[np.int64] | None = None, *, block: int = GRID_BATCH
    ) -> Iterator[Rows]:
        """Decoded images for :meth:`Hasher.encode_blocks`, without decoding anything again."""
        wanted = self.indices if indices is None else indices
        kept = wanted[self._row[wanted] >= 0]
        missing = set(wanted.tolist()) - set(kept.tolist())
        skipped = [item for item in self.skipped if item.index in missing]
        for start in range(0, max(1, len(kept)), block):
            some = kept[start : start + block]
            pixels = self.of(some)
            yield Rows(pixels, some, [] if start else skipped)  # type: ignore[arg-type]


def check_readable(missing: NDArray[np.int64], skipped: Sequence[Skipped]) -> None:
    """Raise an error if there are images that could be read before and cannot now."""
    if len(missing):
        numbers = set(missing.tolist())
        reasons = [f"{s.name} ({s.reason})" for s in skipped if s.index in numbers]
        raise FisherhashError(
            f"{counted(len(numbers), 'image')} could be read before and cannot now, the first is "
            f"{reasons[0] if reasons else f'number {min(numbers)}'}; run the command again "
            "when the files are back"
        )


def placed(pixels: Tensor, device: torch.device) -> Tensor:
    """On the device if at most half of its free memory is needed, else where they are."""
    if device.type != "cuda":
        return pixels
    free, _ = torch.cuda.mem_get_info(device)
    return pixels.to(device) if pixels.numel() <= free // 2 else pixels
