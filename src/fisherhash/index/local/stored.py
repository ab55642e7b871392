"""Bytes of an index as they are read: by system calls that report errors, checked once, in memory.

A file that is mapped into memory turns a bad sector, or a file that somebody cuts off, into a
signal that ends the process. So bytes are read with system calls: an error then names the file and
the place. Afterwards they are in memory, where nothing that happens to the file matters. Files
larger than :func:`most_in_memory` are mapped after they were read and checked once. Their sizes are
compared before every search, which leaves a cut during a search and a sector that fails later.
"""

from __future__ import annotations

import io
import mmap
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fisherhash.index.base import DamagedError
from fisherhash.index.local.files import open_inside, read_at
from fisherhash.index.local.guards import SUM_BLOCK, cannot_read, crc_blocks
from fisherhash.index.local.schema import REMEDY
from fisherhash.system.memory import available_memory

_STEP = 64 * SUM_BLOCK
_GROWTH = 1.5

Bytes = NDArray[np.uint8]


def most_in_memory() -> int:
    """Bytes up to which a file is read into memory: a gibibyte, or an eighth of what is free.

    An index of a billion codes has many files of a gibibyte. As memory fills up, the later ones are
    mapped.
    """
    free = available_memory()
    return 1 << 30 if free is None else min(1 << 30, free // 8)


def missing_bytes(path: Path, found: int, needed: int) -> DamagedError:
    """The error for a file that is shorter than was committed."""
    return DamagedError(f"{path} is cut off: {found} bytes, {needed} were committed. {REMEDY}")


class StoredBytes:
    """The first ``size`` bytes of a file, which never change.

    Args:
        folder: the index.
        name: the file in it.
        size: bytes that count; None for all.
        before: the same file when it was shorter; what was read of it is not read again.

    Raises:
        DamagedError: the file is shorter.
        FileNotFoundError: it does not exist.
        CannotReadError: it cannot be opened.
    """

    def __init__(
        self, folder: Path, name: str, size: int | None = None, before: StoredBytes | None = None
    ) -> None:
        self.folder, self.name = folder, name
        self.path = folder / name
        self._file = before._file if before is not None else self._open()
        self.size = self._length() if size is None else size
        self.must_be_whole()
        self._large: bool | None = None
        self._buffer: Bytes | None = None
        self._ready = 0
        self._proven = 0
        if before is not None and self.size >= before._ready:
            self._buffer, self._ready, self._proven = before._buffer, before._ready, before._proven

    def _open(self) -> io.FileIO:
        try:
            # An object, so that the descriptor is closed with its last user.
            return io.FileIO(open_inside(self.folder, self.name, os.O_RDONLY), "rb")
        except FileNotFoundError:
            raise
        except OSError as error:
            raise cannot_read(self.path, error) from None

    def _length(self) -> int:
        return os.fstat(self._file.fileno()).st_size

    def must_be_whole(self) -> None:
        """Raise an error if the file is shorter than what is needed of it."""
        found = self._length()
        if found < self.size:
            raise missing_bytes(self.path, found, self.size)

    def is_whole(self) -> bool:
        """Whether the bytes can be used; those in memory always can."""
        return not self._is_mapped() or self._length() >= self.size

    @property
    def data(self) -> Bytes:
        """The bytes; after :meth:`load`."""
        if self._buffer is None:
            return np.zeros(0, dtype=np.uint8)
        return self._buffer[: self._ready]

    def load(self) -> Bytes:
        """All bytes, in memory or mapped; those that were read before are not read again.

        Raises:
            CannotReadError: the system refuses.
            DamagedError: there are fewer.
        """
        if self._ready < self.size:
            if self._is_large():
                self.must_be_whole()
                mapped = mmap.mmap(self._file.fileno(), self.size, access=mmap.ACCESS_READ)
                self._buffer = np.frombuffer(mapped, dtype=np.uint8)
            else:
                self._grow()
            self._ready = self.size
        elif self._is_mapped():
            self.must_be_whole()
        return self.data

    def _is_large(self) -> bool:
        """Whether the file is mapped; decided once, though the free memory changes."""
        if self._large is None:
            self._large = self.size > most_in_memory()
        return self._large

    def _is_mapped(self) -> bool:
        return self._buffer is not None and not self._buffer.flags.writeable

    def _grow(self) -> None:
        """Read what is not in memory yet; an array that others use is never changed."""
        buffer = self._buffer
        if buffer is None or len(buffer) < self.size or not buffer.flags.writeable:
            room = self.size if buffer is None else max(self.size, int(_GROWTH * len(buffer)))
            grown = np.empty(room, dtype=np.uint8)
            grown[: self._ready] = self.data
            buffer = grown
        self._read(buffer.data[self._ready : self.size], self._ready)
        self._buffer = buffer

    def _read(self, into: memoryview, offset: int) -> None:
        try:
            count = read_at(self._file.fileno(), into, offset)
        except OSError as error:
            raise cannot_read(self.path, error) from None
        if count < len(into):
            raise missing_bytes(self.path, offset + count, self.size)

    def read_range(self, offset: int, size: int) -> Bytes:
        """A copy of some bytes, read from the file."""
        part = np.empty(size, dtype=np.uint8)
        self._read(part.data, offset)
        return part

    def crcs(self, offset: int, size: int) -> list[int]:
        """CRC-32 of each block of some bytes, after :meth:`load`."""
        if not self._is_mapped():
            return crc_blocks(self.data[offset : offset + size].data)
        # By system calls, not through the map: an error must have a name.
        steps = range(offset, offset + size, _STEP)
        parts = (self.read_range(at, min(_STEP, offset + size - at)) for at in steps)
        return [crc for part in parts for crc in crc_blocks(part.data)]

    def check(self, sums: Sequence[int] | NDArray[Any]) -> list[int]:
        """Numbers of the blocks that are not what was written; [-1] where the sums do not fit.

        Bytes that were found right before are not compared again.
        """
        if self._proven == self.size:
            self.load()
            return []
        noted = np.asarray(sums, dtype=np.uint32)
        if len(noted) != -(-self.size // SUM_BLOCK):
            return [-1]
        first = self._proven // SUM_BLOCK
        if self._is_large():
            # By system calls, not through the map: an error must have a name.
            bad = list(self.bad_blocks(noted, first))
            self.load()
        else:
            found = crc_blocks(self.load().data, first * SUM_BLOCK)
            bad = [number for number, crc in enumerate(found, first) if crc != noted[number]]
        if not bad:
            self._proven = self.size
        return bad

    def bad_blocks(self, sums: Sequence[int] | NDArray[Any], first: int = 0) -> Iterator[int]:
        """Read the file again, and compare every block from ``first`` on."""
        noted = np.asarray(sums, dtype=np.uint32)
        if len(noted) != -(-self.size // SUM_BLOCK):
            yield -1
            return
        for start in range(first * SUM_BLOCK, self.size, _STEP):
            part = self.read_range(start, min(_STEP, self.size - start))
            for number, crc in enumerate(crc_blocks(part.data), start // SUM_BLOCK):
                if crc != noted[number]:
                    yield number
