"""Checksums of small blocks of a code file, beside it: they narrow damage down to 4 KiB.

The catalogue holds one checksum per ``guards.SUM_BLOCK`` bytes, and only that one counts. The file
here is written beside the code file without waiting for the disk, and may be missing, old or
damaged: its numbers are believed only where they combine to the checksum in the catalogue.
"""

from __future__ import annotations

import contextlib
import os
import zlib
from pathlib import Path

import numpy as np

from fisherhash.index.local.files import open_inside, write_all
from fisherhash.index.local.guards import SUM_BLOCK

FINE_BLOCK = 4096
_ZEROS = bytes(FINE_BLOCK)
_OF_ZEROS = zlib.crc32(_ZEROS)


def fine_name(name: str) -> str:
    """The file with the small blocks' checksums of a file of codes or ids, inside its index."""
    return f"{name}-sums"


class FineSums:
    """The checksums of what an appender adds behind the committed end of a file.

    Args:
        folder: the index.
        name: the file of codes or ids inside it.
        fd: the same file, open.
        size: its committed size.
    """

    def __init__(self, folder: Path, name: str, fd: int, size: int) -> None:
        self._folder, self._name = folder, fine_name(name)
        self._first, started = divmod(size, FINE_BLOCK)
        os.lseek(fd, size - started, os.SEEK_SET)
        self._room = FINE_BLOCK - started if started else 0
        self._before = [zlib.crc32(os.read(fd, started))] if started else []
        self._sums = list(self._before)

    def add(self, data: memoryview) -> None:
        """Count bytes that were added to the file."""
        if self._room and len(data):
            self._sums[-1] = zlib.crc32(data[: self._room], self._sums[-1])
        rest = data[self._room :]
        self._sums += [
            zlib.crc32(rest[i : i + FINE_BLOCK]) for i in range(0, len(rest), FINE_BLOCK)
        ]
        self._room = self._room - len(data) if len(data) <= self._room else -len(rest) % FINE_BLOCK

    def store(self) -> None:
        """Write the checksums; a failure is harmless."""
        self._write(self._sums)

    def undo(self) -> None:
        """Write what was there before."""
        self._write(self._before)

    def _write(self, sums: list[int]) -> None:
        with contextlib.suppress(OSError):
            fd = open_inside(self._folder, self._name, os.O_WRONLY | os.O_CREAT)
            try:
                write_all(fd, np.array(sums, dtype="<u4").tobytes(), 4 * self._first)
                os.ftruncate(fd, 4 * (self._first + len(sums)))
            finally:
                os.close(fd)


def right_parts(data: memoryview, fine: list[int], noted: int) -> list[tuple[int, int]]:
    """The parts of a damaged block that are what was written.

    Args:
        data: the block; what is missing at its end is zeros.
        fine: checksums of its small blocks, as far as they are known.
        noted: the block's checksum in the catalogue.

    Returns:
        Start and end of each part; none where the fine checksums do not combine to ``noted``.
    """
    places = range(0, len(data), FINE_BLOCK)
    parts = [data[i : i + FINE_BLOCK] for i in places]
    if len(fine) != len(parts) or _combined(fine, len(data)) != noted:
        return []
    return [
        (start, start + len(part))
        for start, part, crc in zip(places, parts, fine, strict=True)
        if zlib.crc32(part) == crc
    ]


def _combined(sums: list[int], size: int) -> int:
    """The checksum of a block from those of its parts.

    >>> _combined([zlib.crc32(b"a" * 4096), zlib.crc32(b"bc")], 4098) == zlib.crc32(
    ...     b"a" * 4096 + b"bc"
    ... )
    True
    """
    total = 0
    for number, crc in enumerate(sums):
        length = min(FINE_BLOCK, size - number * FINE_BLOCK)
        zeros = _ZEROS[:length]
        of_zeros = _OF_ZEROS if length == FINE_BLOCK else zlib.crc32(zeros)
        # Zeros move a checksum on to where the next part begins.
        total = zlib.crc32(zeros, total) ^ of_zeros ^ crc
    return total


def read_fine(folder: Path, name: str, block: int, size: int) -> list[int]:
    """The stored checksums of the small blocks of one block of ``size`` bytes; perhaps too few."""
    with contextlib.suppress(OSError):
        fd = open_inside(folder, fine_name(name), os.O_RDONLY)
        try:
            os.lseek(fd, 4 * block * (SUM_BLOCK // FINE_BLOCK), os.SEEK_SET)
            data = os.read(fd, 4 * -(-size // FINE_BLOCK))
        finally:
            os.close(fd)
        return np.frombuffer(data[: len(data) // 4 * 4], dtype="<u4").tolist()
    return []
