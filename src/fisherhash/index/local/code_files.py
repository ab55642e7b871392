"""Code files: packed codes one after the other, and their ids where those are not implied.

Bytes are only ever appended to a file. Those that the catalogue has not committed do not count, and
the next writer cuts them off. Each block of ``guards.SUM_BLOCK`` bytes has a checksum in the
catalogue; that of the last block changes as the block grows.
"""

from __future__ import annotations

import contextlib
import io
import os
import zlib
from collections.abc import Iterable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fisherhash.index.base import DamagedError
from fisherhash.index.local.files import open_inside, unlink_inside, write_all
from fisherhash.index.local.fine_sums import FineSums, fine_name
from fisherhash.index.local.guards import SUM_BLOCK, array_bytes, crc_blocks
from fisherhash.index.local.schema import REMEDY
from fisherhash.index.local.stored import missing_bytes

CODES_FOLDER = "codes"


def codes_name(number: int) -> str:
    """The file of codes with this number, inside its index."""
    return f"{CODES_FOLDER}/{number:06d}.codes"


def ids_name(number: int, kind: str = "loose") -> str:
    """The file with the ids of the codes with this number, inside its index."""
    return f"{CODES_FOLDER}/{number:06d}.{'runs' if kind == 'runs' else 'ids'}"


def copy_name(name: str) -> str:
    """A second copy of a file of runs, inside its index: for repair, as every id depends on it."""
    return f"{name}-copy"


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

    def __init__(self, folder: Path, name: str, size: int, sums: bytes) -> None:
        self.start = self.size = size
        self.sums = sums
        # An object, so that the descriptor is closed even after an interruption.
        self._file = io.FileIO(open_inside(folder, name, os.O_RDWR | os.O_CREAT), "rb+")
        found = os.fstat(self._file.fileno()).st_size
        if found < size:
            raise missing_bytes(folder / name, found, size)
        # Bytes that an earlier writer left behind the committed end.
        if found > size:
            os.ftruncate(self._file.fileno(), size)
        self._fine = FineSums(folder, name, self._file.fileno(), size)

    def write(self, data: NDArray) -> None:
        """Add an array's bytes."""
        view = array_bytes(np.ascontiguousarray(data))
        write_all(self._file.fileno(), view, self.size)
        self.sums = extend_sums(self.sums, self.size, view)
        self._fine.add(view)
        self.size += len(view)

    def sync(self) -> None:
        """Wait until the bytes are on the disk."""
        os.fsync(self._file.fileno())
        self._fine.store()

    def undo(self) -> None:
        """Cut off what was added."""
        os.ftruncate(self._file.fileno(), self.start)
        self._fine.undo()

    def close(self) -> None:
        """Close the file."""
        with contextlib.suppress(OSError):
            self._file.close()


def damaged_blocks(path: Path, blocks: list[int]) -> DamagedError:
    """The error for a file whose bytes changed."""
    more = f" and {len(blocks) - 1} more" if len(blocks) > 1 else ""
    where = f"its block {blocks[0]}{more}" if blocks[0] >= 0 else "its checksums"
    return DamagedError(
        f"{path} is damaged: {where} (of at most {SUM_BLOCK:,} bytes) is not what was written. "
        f"{REMEDY}"
    )


def delete_files(folder: Path, numbers: Iterable[int]) -> None:
    """Delete code files; where the system refuses as one is in use, the next open deletes it."""
    for number in numbers:
        for name in (codes_name(number), ids_name(number), ids_name(number, "runs")):
            for one in (name, fine_name(name), copy_name(name)):
                with contextlib.suppress(OSError):
                    unlink_inside(folder, one)
