"""One row an image, kept on disk: computed once, and after a kill only what is missing."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import shutil
import tempfile
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
        self._passing: dict[int, Skipped] = {}
        row, mark = np.dtype(dtype), np.dtype(np.uint8)
        sizes = {
            "rows.bin": max(int(np.prod((count, *shape))) * row.itemsize, 1),
            "state.u8": max(count, 1),
        }
        try:
            self._claim(sizes)
            self.rows = np.memmap(folder / "rows.bin", row, mode="r", shape=(count, *shape))
            self._state = np.memmap(folder / "state.u8", mark, mode="r", shape=(count,))
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
        found = {i: self._passing[i] for i in indices.tolist() if i in self._passing}
        path = self.folder / "skipped.jsonl"
        lines = path.read_text(encoding="utf-8").splitlines() if bad and path.exists() else []
        for line in lines:
            # A line that a full disk cut short was written again, whole, before its row was marked.
            with contextlib.suppress(ValueError, KeyError):
                entry = json.loads(line)
                if entry["index"] in bad:
                    found[entry["index"]] = Skipped(entry["name"], entry["reason"])
        return [found[i] for i in sorted(found)]

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
            # What could not be opened now may be there the next time, and is not remembered.
            self._passing |= {numbers[item.name]: item for item in block.skipped if item.passing}
            damaged = [item for item in block.skipped if not item.passing]
            bad = np.array([numbers[item.name] for item in damaged], dtype=np.int64)
            try:
                if rows is not None:
                    self._write("rows.bin", block.indices, np.asarray(rows, dtype=self.rows.dtype))
                    self._mark(block.indices, DONE)
                if damaged:
                    with (self.folder / "skipped.jsonl").open("a", encoding="utf-8") as file:
                        for index, item in zip(bad.tolist(), damaged, strict=True):
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

    def _claim(self, sizes: dict[str, int]) -> None:
        """Make both files, unless they are there: beside their place, then moved in one step.

        Two processes may open a new cache at once; one of them wins, and both use its files. A
        folder with a file of another size lost something, and marks without their rows would pass
        zeros for features: it is made anew.
        """
        while not self._whole(sizes):
            self.folder.parent.mkdir(parents=True, exist_ok=True)
            draft = Path(tempfile.mkdtemp(prefix=".new-", dir=self.folder.parent))
            try:
                draft.chmod(0o755)  # mkdtemp's are for one user only
                for name, size in sizes.items():
                    with (draft / name).open("wb") as file:
                        file.truncate(size)
                if self.folder.exists() and not self._whole(sizes):
                    os.rename(self.folder, draft / "old")
                # Fails where another process was first; the next look then finds its files.
                with contextlib.suppress(OSError):
                    os.rename(draft, self.folder)
            finally:
                shutil.rmtree(draft, ignore_errors=True)
                shutil.rmtree(self.folder / "old", ignore_errors=True)

    def _whole(self, sizes: dict[str, int]) -> bool:
        paths = {name: self.folder / name for name in sizes}
        return all(p.is_file() and p.stat().st_size == sizes[name] for name, p in paths.items())
