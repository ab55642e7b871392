"""Code files: packed codes one after the other, and their ids where those are not implied.

Bytes are only ever appended to a file. Those that the catalogue has not committed do not count, and
the next writer cuts them off. Each block of ``guards.SUM_BLOCK`` bytes has a checksum in the
catalogue; that of the last block changes as the block grows.
"""

from __future__ import annotations

import contextlib
import os
import zlib
from collections.abc import Iterable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fisherhash.errors import FisherhashError
from fisherhash.index.local.fine_sums import FineSums, fine_path
from fisherhash.index.local.guards import BINARY, SUM_BLOCK, array_bytes, crc_blocks, write_all

CODES_FOLDER = "codes"


def codes_path(folder: Path, number: int) -> Path:
    """The file of codes with this number."""
    return folder / CODES_FOLDER / f"{number:06d}.codes"


def ids_path(folder: Path, number: int) -> Path:
    """The file of ids with this number."""
    return folder / CODES_FOLDER / f"{number:06d}.ids"


def extend_sums(sums: bytes, size: int, data: memoryview) -> bytes:
    """Checksums of a file of ``size`` bytes after ``data`` was added to it."""
    found = np.frombuffer(sums, dtype="<u4").tolist()
    # The last block is filled up first.
    start = -size % SUM_BLOCK
    if start:
        found[-1] = zlib.crc32(data[:start], found[-1])
    return np.array(found + crc_blocks(data, start), dtype="<u4").tobytes()


class Appender:
    """Adds bytes behind the committed end of a file."""

    def __init__(self, path: Path, size: int, sums: bytes) -> None:
        self.path = path
        self.start = self.size = size
        self.sums = sums
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | BINARY, 0o666)
        try:
            # Bytes that an earlier writer left behind the committed end.
            if os.fstat(self._fd).st_size > size:
                os.ftruncate(self._fd, size)
            if os.fstat(self._fd).st_size < size:
                raise missing_bytes(path, size)
            self._fine = FineSums(path, self._fd, size)
        except BaseException:
            os.close(self._fd)
            raise

    def write(self, data: NDArray) -> None:
        """Add an array's bytes."""
        view = array_bytes(np.ascontiguousarray(data))
        write_all(self._fd, view, self.size)
        self.sums = extend_sums(self.sums, self.size, view)
        self._fine.add(view)
        self.size += len(view)

    def sync(self) -> None:
        """Wait until the bytes are on the disk."""
        os.fsync(self._fd)
        self._fine.store()

    def undo(self) -> None:
        """Cut off what was added."""
        os.ftruncate(self._fd, self.start)
        self._fine.undo()

    def close(self) -> None:
        """Close the file."""
        os.close(self._fd)


def map_file(path: Path, dtype: str, shape: tuple[int, ...]) -> NDArray:
    """The committed part of a file, read from the disk as it is used.

    Raises:
        FisherhashError: it is shorter than that.
        FileNotFoundError: it does not exist.
    """
    count = int(np.prod(shape))
    needed = count * np.dtype(dtype).itemsize
    try:
        if path.stat().st_size < needed:
            raise missing_bytes(path, needed)
        if not count:
            return np.zeros(shape, dtype=dtype)
        return np.memmap(path, dtype=dtype, mode="r", shape=shape)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise FisherhashError(f"{path} cannot be read: {error.strerror or error}") from None


def missing_bytes(path: Path, needed: int) -> FisherhashError:
    """The error for a file that is shorter than was committed."""
    return FisherhashError(
        f"{path} is cut off: {path.stat().st_size} bytes, {needed} were committed. "
        "Restore the index from a copy, or create it again"
    )


def bad_blocks(array: NDArray, sums: bytes, first: int = 0) -> list[int]:
    """Blocks, from number ``first`` on, whose bytes are not those that were written."""
    noted = np.frombuffer(sums, dtype="<u4")
    if len(noted) != -(-array.nbytes // SUM_BLOCK):
        return [-1]
    found = crc_blocks(array_bytes(array), first * SUM_BLOCK)
    return [number for number, crc in enumerate(found, first) if crc != noted[number]]


def damaged_blocks(path: Path, blocks: list[int]) -> FisherhashError:
    """The error for a file whose bytes changed."""
    more = f" and {len(blocks) - 1} more" if len(blocks) > 1 else ""
    where = f"block {blocks[0]}{more}" if blocks[0] >= 0 else "its checksums"
    return FisherhashError(
        f"{path} is damaged: {where} of {SUM_BLOCK} bytes is not what was written. "
        "Restore the index from a copy, or create it again"
    )


def delete_files(folder: Path, numbers: Iterable[int]) -> None:
    """Delete code files; where the system refuses as one is in use, the next open deletes it."""
    for number in numbers:
        for path in (codes_path(folder, number), ids_path(folder, number)):
            for one in (path, fine_path(path)):
                with contextlib.suppress(OSError):
                    one.unlink(missing_ok=True)
