"""Rows computed from images (features, pixels), stored on disk and computed only once."""

from __future__ import annotations

import hashlib
import itertools
import logging
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

logger = logging.getLogger(__name__)

ROWS_FORMAT = 4
"""Raise this when decoding or an architecture changes, so that older rows are not used again."""


def cached_rows(
    collection: Collection,
    indices: NDArray[np.int64] | None,
    function: RowFunction,
    *,
    what: str,
    workers: int | None = None,
    on_disk: bool = False,
) -> Rows:
    """Rows computed from decoded images; those computed before come from the disk.

    Args:
        collection: the images.
        indices: (n,) which images; None for all.
        function: computes the rows.
        what: identifies the rows; the first word is shown to the user.
        workers: number of processes; None lets the work decide.
        on_disk: leave the rows on the disk: the values are :class:`StoredRows`.
    """
    total = len(collection)
    wanted = np.arange(total) if indices is None else indices
    folder = _folder(collection, function.preprocessing, what)
    cache = RowCache(folder, total, function.shape, function.dtype)
    missing = cache.missing(wanted, check=not on_disk)
    if len(missing):
        with progress(f"{what.split()[0]} of {collection.name}", len(wanted)) as advance:
            advance(len(wanted) - len(missing))
            for block in compute_blocks(collection, missing, function, workers=workers):
                cache.store(block)
                advance(len(block.indices) + len(block.skipped))
    kept = cache.readable(wanted)
    values = StoredRows(cache, kept) if on_disk else cache.rows[kept]
    return Rows(values, kept, [cache.skipped[i] for i in sorted(cache.skipped)])


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
    folder = _folder(collection, preprocessing, what)
    if not folder.is_dir():
        return None
    cache, every = RowCache(folder, len(collection), shape, dtype), np.arange(len(collection))
    cache.missing(every)  # forgets those that are damaged
    kept = cache.readable(every)
    return Rows(cache.rows[kept], kept, [])


def has_rows(kind: str) -> bool:
    """Whether rows of a kind, the first word of ``what``, are stored for any images."""
    return any((cache_dir() / "rows").glob(f"*-{kind}-*"))


def _folder(collection: Collection, preprocessing: Preprocessing, what: str) -> Path:
    images = _short_hash(f"{collection.reader.fingerprint()} {len(collection)}")
    kind, key = what.split()[0], f"{ROWS_FORMAT} {what} {preprocessing}"
    return cache_dir() / "rows" / f"{images}-{kind}-{_short_hash(key)}"


def _short_hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:24]


class RowCache:
    """A sparse file of rows, and one of their checksums, which are 0 where there is no row yet.

    A row that is not what was written, because a process was interrupted or a disk failed, has
    another checksum and is computed again. Images that cannot be read are not stored: the next run
    tries them again.

    Args:
        folder: where to store the files; its name must identify what the rows are made from.
        count: number of rows.
        shape: shape of one row.
        dtype: type of its values.
    """

    def __init__(self, folder: Path, count: int, shape: tuple[int, ...], dtype: DTypeLike) -> None:
        self.folder = folder
        self.skipped: dict[int, Skipped] = {}
        row = np.dtype(dtype)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with (folder / "rows.bin").open("ab") as file:
                file.truncate(max(count * int(np.prod(shape)) * row.itemsize, 1))
            with (folder / "sums.u4").open("ab") as file:
                # Not sparse: on a full disk, reading a hole through a map can kill the process.
                file.write(bytes(max(4 * count - file.tell(), 1)))
                file.truncate(max(4 * count, 1))
            self.rows = np.memmap(folder / "rows.bin", row, mode="r", shape=(count, *shape))
            self.sums = np.memmap(folder / "sums.u4", "<u4", mode="r", shape=(count,))
        except OSError as error:
            raise self._full(error) from error

    def missing(self, indices: NDArray[np.int64], *, check: bool = True) -> NDArray[np.int64]:
        """Those of ``indices`` that were never computed, or with ``check`` are damaged."""
        stored = self.sums[indices]
        lost = stored == 0
        if check:
            pairs = zip(indices.tolist(), stored.tolist(), strict=True)
            damaged = [crc != 0 and crc != _row_crc(i, self.rows[i].tobytes()) for i, crc in pairs]
            if any(damaged):
                logger.info(
                    "%s: %d damaged rows are computed again", self.folder, np.count_nonzero(damaged)
                )
                lost |= damaged
                self._write("sums.u4", indices[damaged].tolist(), itertools.repeat(bytes(4)))
        return indices[lost]

    def read(self, indices: NDArray[np.int64], out: Iterable[NDArray]) -> None:
        """Read rows through the file, one into each array: pages of a map would count as memory.

        Raises:
            FisherhashError: a row is not what was written; the next run computes it again.
        """
        with (self.folder / "rows.bin").open("rb", buffering=0) as file:
            for index, row in zip(indices.tolist(), out, strict=True):
                file.seek(index * row.nbytes)
                read = file.readinto(row.data.cast("B"))
                if read != row.nbytes or _row_crc(index, row.data) != self.sums[index]:
                    self._write("sums.u4", [index], [bytes(4)])
                    raise FisherhashError(
                        f"row {index} of the cache {self.folder} is damaged; run the command "
                        "again, which computes it again and continues"
                    )

    def readable(self, indices: NDArray[np.int64]) -> NDArray[np.int64]:
        """Those of ``indices`` that have a row."""
        return indices[self.sums[indices] != 0]

    def store(self, block: Rows) -> None:
        """Store the rows of a block; keep in mind which images could not be read."""
        self.skipped |= {item.index: item for item in block.skipped}
        indices = block.indices.tolist()
        rows = [row.tobytes() for row in np.asarray(block.values, dtype=self.rows.dtype)]
        sums = [
            _row_crc(i, row).to_bytes(4, "little") for i, row in zip(indices, rows, strict=True)
        ]
        self._write("rows.bin", indices, rows)
        # After the rows: an interrupted process must not leave one that looks whole.
        self._write("sums.u4", indices, sums)

    def _write(self, name: str, indices: list[int], values: Iterable[bytes]) -> None:
        """Write through the file: on a full disk, writing to the map would kill the process."""
        try:
            with (self.folder / name).open("rb+") as file:
                for index, value in zip(indices, values, strict=False):
                    file.seek(index * len(value))
                    file.write(value)
        except OSError as error:
            raise self._full(error) from error

    def _full(self, error: OSError) -> FisherhashError:
        return FisherhashError(
            f"the cache {self.folder} cannot be written: {error.strerror or error}. "
            "Set FISHERHASH_CACHE to a folder with enough space"
        )


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
    """Checksum of a row and its number; never 0."""
    return zlib.crc32(data, index + 1) or 1
