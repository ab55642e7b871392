"""One row an image, kept on disk: computed once, and after a kill only what is missing."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fisherhash.data.loading import Block, Skipped
from fisherhash.errors import FisherhashError

logger = logging.getLogger(__name__)

TODO, DONE, SKIPPED = 0, 1, 2


class RowCache:
    """A sparse file of rows, and a byte a row that says whether it is there.

    A row is marked only after it was written, so an interrupted process loses at most a block.

    Args:
        folder: where; its name must identify what the rows are made from.
        count: number of rows.
        shape: of one row.
        dtype: of its values.
    """

    def __init__(
        self, folder: Path, count: int, shape: tuple[int, ...], dtype: np.dtype | type
    ) -> None:
        self.folder = folder
        self.count = count
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._state = self._map("state.u8", (count,), np.dtype(np.uint8))
            self.rows = self._map("rows.bin", (count, *shape), np.dtype(dtype))
        except OSError as error:
            raise FisherhashError(
                f"the cache {folder} cannot be written: {error.strerror or error}. "
                "Set FISHERHASH_CACHE to a folder with room"
            ) from error

    def missing(self, indices: NDArray[np.int64]) -> NDArray[np.int64]:
        """Those of ``indices`` that were never computed."""
        return indices[self._state[indices] == TODO]

    def readable(self, indices: NDArray[np.int64]) -> NDArray[np.int64]:
        """Those of ``indices`` whose image could be read."""
        return indices[self._state[indices] == DONE]

    def skipped(self, indices: NDArray[np.int64]) -> list[Skipped]:
        """The images among ``indices`` that could not be read, with their reasons."""
        bad = set(indices[self._state[indices] == SKIPPED].tolist())
        path = self.folder / "skipped.jsonl"
        if not bad or not path.exists():
            return []
        lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        found = {line["index"]: Skipped(line["name"], line["reason"]) for line in lines}
        return [found[i] for i in sorted(bad) if i in found]

    def fill(
        self,
        blocks: Iterable[Block],
        compute: Callable[[NDArray[np.uint8]], NDArray],
        numbers: dict[str, int],
        advance: Callable[[int], None],
    ) -> None:
        """Compute the rows of decoded blocks; ``numbers`` gives an image's row by its name."""
        for block in blocks:
            if len(block.indices):
                self.rows[block.indices] = compute(block.pixels)
                self.rows.flush()
                self._state[block.indices] = DONE
            if block.skipped:
                with (self.folder / "skipped.jsonl").open("a", encoding="utf-8") as file:
                    for item in block.skipped:
                        entry = {
                            "index": numbers[item.name],
                            "name": item.name,
                            "reason": item.reason,
                        }
                        file.write(json.dumps(entry) + "\n")
                self._state[[numbers[item.name] for item in block.skipped]] = SKIPPED
            self._state.flush()
            advance(len(block.indices) + len(block.skipped))

    def _map(self, name: str, shape: tuple[int, ...], dtype: np.dtype) -> np.memmap:
        path = self.folder / name
        size = int(np.prod(shape)) * dtype.itemsize
        if not path.exists() or path.stat().st_size != size:
            with path.open("wb") as file:
                file.truncate(max(size, 1))
        return np.memmap(path, dtype=dtype, mode="r+", shape=shape)
