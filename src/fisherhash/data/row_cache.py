"""Rows computed from images (features, pixels), stored on disk and computed only once."""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import shutil
import zlib
from collections.abc import Iterable
from pathlib import Path

import numpy as np
from numpy.typing import DTypeLike, NDArray

from fisherhash.data.collection import Collection
from fisherhash.data.computing import RowFunction, Rows, Skipped, compute_blocks
from fisherhash.data.preprocessing import Preprocessing
from fisherhash.errors import FisherhashError
from fisherhash.system.cache import cache_dir
from fisherhash.system.progress import progress
from fisherhash.system.storage import draft_folder

logger = logging.getLogger(__name__)

ROWS_FORMAT = 3
"""Raise this when decoding or an architecture changes, so that older rows are not used again."""

TODO, DONE, SKIPPED = 0, 1, 2


def cached_rows(
    collection: Collection,
    indices: NDArray[np.int64] | None,
    function: RowFunction,
    *,
    what: str,
    images: str | None = None,
    workers: int | None = None,
    on_disk: bool = False,
) -> Rows:
    """Rows computed from decoded images; those computed before come from the disk.

    Args:
        collection: the images.
        indices: (n,) which images; None for all.
        function: computes the rows.
        what: identifies the rows; the first word is shown to the user.
        images: the :func:`images_key` of the collection, if it is known.
        workers: number of processes; None lets the work decide.
        on_disk: leave the rows on the disk: the values are :class:`StoredRows`.
    """
    total = len(collection)
    wanted = np.arange(total) if indices is None else indices
    folder = _folder(images or images_key(collection), function.preprocessing, what)
    cache = RowCache(folder, total, function.shape, function.dtype)
    missing = cache.missing(wanted, check=not on_disk)
    if len(missing):
        if function.prepare is not None:
            function = function.prepare()
        with progress(f"{what.split()[0]} of {collection.name}", len(wanted)) as advance:
            advance(len(wanted) - len(missing))
            for block in compute_blocks(collection, missing, function, workers=workers):
                cache.store(block)
                advance(len(block.indices) + len(block.skipped))
    kept = cache.readable(wanted)
    values = StoredRows(cache, kept) if on_disk else cache.rows[kept]
    return Rows(values, kept, cache.skipped(wanted))


def stored_rows(
    collection: Collection,
    preprocessing: Preprocessing,
    *,
    what: str,
    shape: tuple[int, ...],
    dtype: DTypeLike,
) -> Rows | None:
    """The rows that :func:`cached_rows` stored for these images; None where there are none.

    Nothing is computed. The images must be exactly those of then: names, sizes and times.
    """
    folder = _folder(images_key(collection), preprocessing, what)
    if not folder.is_dir():
        return None
    cache, every = RowCache(folder, len(collection), shape, dtype), np.arange(len(collection))
    cache.missing(every)  # forgets those that are damaged
    kept = cache.readable(every)
    return Rows(cache.rows[kept], kept, [])


def count_rows(images: str, preprocessing: Preprocessing, *, what: str) -> int:
    """How many rows :func:`cached_rows` stored for the images with this :func:`images_key`."""
    try:
        state = (_folder(images, preprocessing, what) / "state.u8").read_bytes()
    except FileNotFoundError:
        return 0
    return state.count(DONE)


def has_rows(kind: str, collection: Collection | None = None) -> bool:
    """Whether rows of a kind, the first word of ``what``, are stored: for these images, or any."""
    images = "*" if collection is None else images_key(collection)
    return any((cache_dir() / "rows").glob(f"{images}-{kind}-*"))


def _folder(images: str, preprocessing: Preprocessing, what: str) -> Path:
    kind, key = what.split()[0], f"{ROWS_FORMAT} {what} {preprocessing}"
    return cache_dir() / "rows" / f"{images}-{kind}-{_short_hash(key)}"


def images_key(collection: Collection) -> str:
    """What identifies the images of a collection in the cache; reads all that is in its reader."""
    return _short_hash(f"{collection.reader.fingerprint()} {len(collection)}")


def _short_hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:24]


class RowCache:
    """A sparse file of rows, one byte per row that says whether the row is there, and a checksum.

    A row is marked only after it was written, so an interrupted process loses one block at most.
    Rows that are not what was written are computed again.

    Args:
        folder: where to store the files; its name must identify what the rows are made from.
        count: number of rows.
        shape: shape of one row.
        dtype: type of its values.
    """

    def __init__(self, folder: Path, count: int, shape: tuple[int, ...], dtype: DTypeLike) -> None:
        self.folder = folder
        self._passing: dict[int, Skipped] = {}
        row, mark = np.dtype(dtype), np.dtype(np.uint8)
        sizes = {
            "rows.bin": max(int(np.prod((count, *shape))) * row.itemsize, 1),
            "state.u8": max(count, 1),
            "sums.u4": max(4 * count, 1),
        }
        try:
            self._claim(sizes)
            self.rows = np.memmap(folder / "rows.bin", row, mode="r", shape=(count, *shape))
            self._state = np.memmap(folder / "state.u8", mark, mode="r", shape=(count,))
            self._sums = np.memmap(folder / "sums.u4", "<u4", mode="r", shape=(count,))
        except OSError as error:
            raise self._full(error) from error

    def missing(self, indices: NDArray[np.int64], *, check: bool = True) -> NDArray[np.int64]:
        """Those of ``indices`` that were never computed, or are not what was written.

        With ``check`` every row is read and compared with its checksum.
        """
        if not check:
            return indices[self._state[indices] == TODO]
        self._forget_damaged(np.unique(indices))
        return indices[self._state[indices] == TODO]

    def _forget_damaged(self, indices: NDArray[np.int64]) -> None:
        """Mark rows that are not what was written as never computed."""
        states = self._state[indices].tolist()
        reasons = self._reasons() if SKIPPED in states else {}

        def holds(index: int, state: int) -> bool:
            if state == DONE:
                return _row_crc(index, self.rows[index].tobytes()) == self._sums[index]
            return state == SKIPPED and index in reasons

        pairs = zip(indices.tolist(), states, strict=True)
        wrong = [i for i, state in pairs if state != TODO and not holds(i, state)]
        if wrong:
            logger.info("%s: %d damaged rows are computed again", self.folder, len(wrong))
            try:
                self._mark(np.array(wrong), TODO)
            except OSError as error:
                raise self._full(error) from error

    def _reasons(self) -> dict[int, Skipped]:
        """The images that could not be read, as far as their lines are what was written."""
        found: dict[int, Skipped] = {}
        with contextlib.suppress(FileNotFoundError):
            for line in (self.folder / "skipped.jsonl").read_bytes().split(b"\n"):
                noted, _, text = line.partition(b" ")
                if noted == b"%08x" % zlib.crc32(text):
                    item = Skipped(**json.loads(text))
                    found[item.index] = item
        return found

    def read(self, indices: NDArray[np.int64], out: Iterable[NDArray]) -> None:
        """Read rows through the file, one into each array: pages of a map would count as memory.

        Raises:
            FisherhashError: a row is not what was written; the next run computes it again.
        """
        with (self.folder / "rows.bin").open("rb", buffering=0) as file:
            for index, row in zip(indices.tolist(), out, strict=True):
                file.seek(index * row.nbytes)
                read = file.readinto(row.data.cast("B"))
                if read != row.nbytes or _row_crc(index, row.data) != self._sums[index]:
                    self._mark(np.array([index]), TODO)
                    raise FisherhashError(
                        f"row {index} of the cache {self.folder} is damaged; run the command "
                        "again, which computes it again and continues"
                    )

    def readable(self, indices: NDArray[np.int64]) -> NDArray[np.int64]:
        """Those of ``indices`` whose image could be read."""
        return indices[self._state[indices] == DONE]

    def skipped(self, indices: NDArray[np.int64]) -> list[Skipped]:
        """The images among ``indices`` that could not be read, with their reasons."""
        bad = indices[self._state[indices] == SKIPPED].tolist()
        reasons = self._reasons() if bad else {}
        found = {i: reasons[i] for i in bad if i in reasons}
        found |= {i: self._passing[i] for i in indices.tolist() if i in self._passing}
        return [found[i] for i in sorted(found)]

    def store(self, block: Rows) -> None:
        """Store the rows of a block, and the reasons of the images that could not be read."""
        # An image that cannot be opened now may be there next time: it is not stored.
        self._passing |= {item.index: item for item in block.skipped if item.passing}
        damaged = [item for item in block.skipped if not item.passing]
        try:
            if len(block.indices):
                rows = np.asarray(block.values, dtype=self.rows.dtype)
                pairs = zip(block.indices.tolist(), rows, strict=True)
                sums = [_row_crc(i, row.tobytes()) for i, row in pairs]
                self._write("rows.bin", block.indices, rows)
                self._write("sums.u4", block.indices, np.array(sums, dtype="<u4"))
                self._mark(block.indices, DONE)
            if damaged:
                texts = [json.dumps(vars(item)).encode() for item in damaged]
                with (self.folder / "skipped.jsonl").open("ab") as file:
                    # A line that a full disk cut short must not take the next one along.
                    file.writelines(b"\n%08x %b" % (zlib.crc32(text), text) for text in texts)
                self._mark(np.array([item.index for item in damaged]), SKIPPED)
        except OSError as error:
            raise self._full(error) from error

    def _mark(self, indices: NDArray[np.int64], state: int) -> None:
        self._write("state.u8", indices, np.full(len(indices), state, dtype=np.uint8))

    def _write(self, name: str, indices: NDArray[np.int64], rows: NDArray) -> None:
        """Write through the file: on a full disk, writing to the map would kill the process."""
        with (self.folder / name).open("rb+") as file:
            for index, row in zip(indices.tolist(), rows, strict=True):
                file.seek(index * row.nbytes)
                file.write(row.tobytes())
            file.flush()
            os.fsync(file.fileno())

    def _full(self, error: OSError) -> FisherhashError:
        return FisherhashError(
            f"the cache {self.folder} cannot be written: {error.strerror or error}. "
            "Set FISHERHASH_CACHE to a folder with enough space"
        )

    def _claim(self, sizes: dict[str, int]) -> None:
        """Create the files unless they are there: under a draft name, then moved in one step.

        Two processes may open a new cache at once; one of them wins, and both use its files. A
        folder in which a file has another size lost data, and marks without their rows would pass
        zeros off as features: it is created anew.
        """
        self.folder.parent.mkdir(parents=True, exist_ok=True)
        while not self._whole(sizes):
            # Fails if another process was first; the next check then finds its files.
            with contextlib.suppress(FileExistsError), draft_folder(self.folder) as draft:
                for name, size in sizes.items():
                    with (draft / name).open("wb") as file:
                        file.truncate(size)
                if self.folder.exists() and not self._whole(sizes):
                    os.rename(self.folder, draft / "old")
            shutil.rmtree(self.folder / "old", ignore_errors=True)

    def _whole(self, sizes: dict[str, int]) -> bool:
        paths = [self.folder / name for name in sizes]
        return [p.stat().st_size for p in paths if p.is_file()] == list(sizes.values())


class StoredRows:
    """Some rows of a file, in a given order; selecting rows reads nothing.

    Args:
        cache: the file.
        numbers: (n,) the rows' numbers in the file.
    """

    def __init__(self, cache: RowCache, numbers: NDArray[np.int64]) -> None:
        self._cache, self._numbers = cache, numbers
        self.row_shape = cache.rows.shape[1:]
        self.dtype = cache.rows.dtype

    def __len__(self) -> int:
        return len(self._numbers)

    def __getitem__(self, which: NDArray[np.bool_] | NDArray[np.int64]) -> StoredRows:
        return StoredRows(self._cache, self._numbers[which])

    @property
    def row_bytes(self) -> int:
        """Bytes of one row."""
        return int(np.prod(self.row_shape)) * self.dtype.itemsize

    def read(self, rows: NDArray[np.int64], out: Iterable[NDArray]) -> None:
        """Read rows by their position here, one into each array, and compare their checksums."""
        self._cache.read(self._numbers[rows], out)


def _row_crc(index: int, data: bytes | memoryview) -> int:
    """Checksum of a row and its number; never 0, which is what an empty file holds."""
    return zlib.crc32(data, index + 1) or 1
