"""One row an image, kept on disk: computed once, and after a kill only what is missing."""

from __future__ import annotations

import contextlib
import json
import logging
import os
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
            if self._prepare("rows.bin", (count, *shape), np.dtype(dtype)):
                # Marks without their rows would pass zeros for features.
                (folder / "state.u8").unlink(missing_ok=True)
            self._prepare("state.u8", (count,), np.dtype(np.uint8))
            self.rows = self._map("rows.bin", (count, *shape), np.dtype(dtype))
            self._state = self._map("state.u8", (count,), np.dtype(np.uint8))
        except OSError as error:
            raise self._full(error) from error

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
        found: dict[int, Skipped] = {}
        for line in path.read_text(encoding="utf-8").splitlines():
            # A line that a full disk cut short was written again, whole, before its row was marked.
            with contextlib.suppress(ValueError, KeyError):
                entry = json.loads(line)
                found[entry["index"]] = Skipped(entry["name"], entry["reason"])
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
            rows = compute(block.pixels) if len(block.indices) else None
            bad = np.array([numbers[item.name] for item in block.skipped], dtype=np.int64)
            try:
                if rows is not None:
                    self._write("rows.bin", block.indices, np.asarray(rows, dtype=self.rows.dtype))
                    self._mark(block.indices, DONE)
                if block.skipped:
                    with (self.folder / "skipped.jsonl").open("a", encoding="utf-8") as file:
                        for index, item in zip(bad.tolist(), block.skipped, strict=True):
                            entry = {"index": index, "name": item.name, "reason": item.reason}
                            file.write("\n" + json.dumps(entry))
                    self._mark(bad, SKIPPED)
            except OSError as error:
                raise self._full(error) from error
            advance(len(block.indices) + len(block.skipped))

    def _mark(self, indices: NDArray[np.int64], state: int) -> None:
        self._write("state.u8", indices, np.full(len(indices), state, dtype=np.uint8))

    def _write(self, name: str, indices: NDArray[np.int64], rows: NDArray) -> None:
        """Through the file, not the map: a full disk is an error there, and a dead process here."""
        with (self.folder / name).open("rb+") as file:
            for index, row in zip(indices.tolist(), rows, strict=True):
                file.seek(index * row.nbytes)
                file.write(row.tobytes())
            file.flush()
            os.fsync(file.fileno())

    def _full(self, error: OSError) -> FisherhashError:
        return FisherhashError(
            f"the cache {self.folder} cannot be written: {error.strerror or error}. "
            "Set FISHERHASH_CACHE to a folder with room"
        )

    def _prepare(self, name: str, shape: tuple[int, ...], dtype: np.dtype) -> bool:
        """Make a file of zeros, unless there is one of the right size; whether it was made."""
        path = self.folder / name
        size = max(int(np.prod(shape)) * dtype.itemsize, 1)
        if path.exists() and path.stat().st_size == size:
            return False
        with path.open("wb") as file:
            file.truncate(size)
        return True

    def _map(self, name: str, shape: tuple[int, ...], dtype: np.dtype) -> np.memmap:
        return np.memmap(self.folder / name, dtype=dtype, mode="r", shape=shape)
