"""What proves that a catalogue is complete: the number of its last commit, sums of its bytes.

SQLite stores no checksums of its pages, and silently drops what follows a damaged place in its log.
So there are two small files beside it. ``head`` holds the number of the last commit: a catalogue
behind it has lost something. ``catalogue.sums`` holds checksums of the catalogue's bytes. It is
deleted before they change and written again afterwards, so while it exists it is right.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import threading
import time
import weakref
import zlib
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fisherhash.index.base import CannotReadError, CannotWriteError
from fisherhash.index.local.files import (
    NotAFileError,
    open_inside,
    read_at,
    read_inside,
    replace_inside,
    write_all,
)

SUM_BLOCK = 1 << 20
"""Bytes that one checksum covers, in the catalogue and in the code files."""

TRUSTED_SECONDS = 1.0
"""How long ``head`` is believed without a look at the catalogue."""
_SLOT = 48
_MOST_SUMS = 64 << 20
"""A longer file holds no sums; those of a catalogue of a terabyte are shorter."""
_FULL = {errno.ENOSPC, errno.EFBIG, getattr(errno, "EDQUOT", errno.ENOSPC)}


def cannot_write(place: Path, error: Exception) -> CannotWriteError:
    """The error for a write that the system or SQLite refused."""
    reason = getattr(error, "strerror", None) or error
    name = getattr(error, "sqlite_errorname", None) or ""
    full = isinstance(error, OSError) and error.errno in _FULL
    if full or name.startswith(("SQLITE_FULL", "SQLITE_IOERR_WRITE", "SQLITE_IOERR_SHMSIZE")):
        return CannotWriteError(f"no room to write {place} ({reason})", "make room on the disk")
    todo = "check the disk and the permissions"
    return CannotWriteError(f"{place} cannot be written: {reason}", todo)


def cannot_read(path: Path, error: OSError) -> CannotReadError:
    """The error for a file that the system refused to read; it may be whole."""
    where = getattr(error, "offset", None)
    place = f"{path} cannot be read" + (f" at byte {where:,}" if where is not None else "")
    reason = error.strerror or error
    if isinstance(error, NotAFileError):
        todo = "Restore that file, or ask whoever made this index what it is"
    elif error.errno == errno.EIO:
        todo = (
            "The disk failed there: look at the system's log, copy what can be read to another "
            "disk, and try again. What was written may still be whole"
        )
    else:
        todo = "Check the disk and the permissions, then try again"
    return CannotReadError(f"{place}: {reason}. {todo}")


def _slot(commit: int) -> bytes:
    text = f"commit {commit:020d}"
    return f"{text} {zlib.crc32(text.encode()):08x}".ljust(_SLOT - 1).encode() + b"\n"


class CommitMark:
    """The number of the last commit, in two slots that are written in turn.

    A power cut while one is written leaves the other.
    """

    def __init__(self, folder: Path) -> None:
        self.folder, self.path = folder, folder / "head"

    def start(self, commit: int) -> None:
        """Write both slots."""
        replace_inside(self.folder, "head", _slot(commit) * 2)

    def write(self, commit: int) -> None:
        """Write the number of a commit that is on the disk."""
        fd = open_inside(self.folder, "head", os.O_WRONLY)
        try:
            write_all(fd, _slot(commit), (commit % 2) * _SLOT)
        finally:
            os.close(fd)

    def read(self) -> tuple[int | None, str | None]:
        """The last commit written (None: unreadable) and what is wrong with the file."""
        found = self._read()
        if found[1]:
            # Perhaps a writer is in the middle of a change.
            time.sleep(0.02)
            found = self._read()
        return found

    def _read(self) -> tuple[int | None, str | None]:
        try:
            return _commit_in(read_inside(self.folder, "head", 1 << 16))
        except FileNotFoundError:
            return None, "is missing"
        except OSError as error:
            return None, f"cannot be read: {error.strerror or error}"


def _commit_in(data: bytes) -> tuple[int | None, str | None]:
    """The commit that the bytes of ``head`` name (None: none), and what is wrong with them."""
    slots = [data[start : start + _SLOT] for start in (0, _SLOT)]
    found = [(slot, int(slot[7:27])) for slot in slots if slot[7:27].isdigit()]
    commits = [commit for slot, commit in found if slot == _slot(commit)]
    wrong = None if len(commits) == 2 and len(data) == 2 * _SLOT else "is damaged"
    return max(commits, default=None), wrong


class CommitWatch:
    """Tells a reader that it has seen the last commit, by one read of ``head`` and without SQLite.

    A writer writes ``head`` before it reports a commit as done. One that is killed just before
    leaves it as it was, so what it says counts for a second, and then the catalogue is read again.

    Args:
        folder: the index.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._close: Callable[[], object] = lambda: None
        self._fd, self._seen, self._commit, self._until = -1, b"", -1, 0.0

    def saw(self, commit: int) -> None:
        """Note a commit that the catalogue holds now."""
        now = time.monotonic()
        if commit == self._commit and now < self._until:
            return
        self.close()
        try:
            self._fd = open_inside(self._folder, "head", os.O_RDONLY)
        except OSError:
            return
        self._close = weakref.finalize(self, os.close, self._fd)
        self._seen = self._read()
        if _commit_in(self._seen) == (commit, None):
            self._commit, self._until = commit, now + TRUSTED_SECONDS

    def is_last(self, commit: int) -> bool:
        """Whether no other commit was completed since this one was noted; False if unknown."""
        known = commit == self._commit and time.monotonic() < self._until
        return known and self._read() == self._seen

    def close(self) -> None:
        """Release the file; again does nothing."""
        self._until = 0.0
        self._close()

    def _read(self) -> bytes:
        data = bytearray(2 * _SLOT + 1)
        try:
            return bytes(data[: read_at(self._fd, memoryview(data), 0)])
        except OSError:
            return b""


def array_bytes(array: NDArray[Any]) -> memoryview:
    """The bytes of an array that is contiguous in memory."""
    return array.reshape(-1).view(np.uint8).data


def crc_blocks(data: memoryview, start: int = 0) -> list[int]:
    """CRC-32 of each block of bytes from ``start`` on."""
    pending = [data[i : i + SUM_BLOCK] for i in range(start, len(data), SUM_BLOCK)]
    # zlib releases the GIL, so threads share the work.
    if len(pending) < 16:
        return [zlib.crc32(block) for block in pending]
    with ThreadPoolExecutor(min(4, os.cpu_count() or 1)) as pool:
        return list(pool.map(zlib.crc32, pending, chunksize=8))


class SharedFile:
    """Read access to a SQLite file without closing it while SQLite has it open.

    POSIX drops all locks that a process holds on a file when any of its handles to it is closed,
    including those of SQLite. So one handle stays open until the last user in this process
    releases it.
    """

    _lock = threading.Lock()
    _open: dict[tuple[int, int], list[int]] = {}  # noqa: RUF012 (a registry of the process)

    def __init__(self, path: Path) -> None:
        self.path = path
        with self._lock:
            status = os.stat(path, follow_symlinks=False)
            self._key: tuple[int, int] | None = (status.st_dev, status.st_ino)
            entry = self._open.get(self._key)
            if entry is None:
                entry = [open_inside(path.parent, path.name, os.O_RDONLY), 0]
                self._open[self._key] = entry
            entry[1] += 1
            self._fd = entry[0]

    def blocks(self) -> Iterable[memoryview]:
        """The file's bytes, one block at a time."""
        offset = 0
        while True:
            data = memoryview(bytearray(SUM_BLOCK))
            try:
                count = read_at(self._fd, data, offset)
            except OSError as error:
                raise cannot_read(self.path, error) from None
            if not count:
                return
            yield data[:count]
            offset += count

    def size(self) -> int:
        """Bytes of the file."""
        try:
            return os.fstat(self._fd).st_size
        except OSError as error:
            raise cannot_read(self.path, error) from None

    def sums(self) -> tuple[int, list[int]]:
        """Size and checksums of the blocks."""
        found = [(len(block), zlib.crc32(block)) for block in self.blocks()]
        return sum(size for size, _ in found), [crc for _, crc in found]

    def release(self) -> None:
        """Release the file; again does nothing."""
        with self._lock:
            key, self._key = self._key, None
            if key is None:
                return
            entry = self._open[key]
            entry[1] -= 1
            if not entry[1]:
                del self._open[key]
                with contextlib.suppress(OSError):
                    os.close(entry[0])


class Sums(NamedTuple):
    """Checksums of a catalogue's bytes and the commit they hold.

    Attributes:
        commit: last commit in these bytes.
        size: bytes.
        blocks: CRC-32 of each block.
    """

    commit: int
    size: int
    blocks: tuple[int, ...]

    def dump(self) -> bytes:
        """Two lines: the facts, and their own checksum."""
        facts = {"commit": self.commit, "size": self.size, "sums": self.blocks}
        text = json.dumps(facts, separators=(",", ":")).encode()
        return text + f"\n{zlib.crc32(text):08x}\n".encode()

    @classmethod
    def read(cls, path: Path) -> tuple[Sums | None, str | None]:
        """The sums (None: there are none) and what is wrong with the file, if it exists."""
        try:
            data = read_inside(path.parent, path.name, _MOST_SUMS)
        except FileNotFoundError:
            return None, None
        except OSError as error:
            return None, f"cannot be read: {error.strerror or error}"
        text, _, rest = data.partition(b"\n")
        with contextlib.suppress(ValueError, KeyError, TypeError, RecursionError):
            if rest == f"{zlib.crc32(text):08x}\n".encode():
                facts = json.loads(text)
                return cls(int(facts["commit"]), int(facts["size"]), tuple(facts["sums"])), None
        return None, "is damaged"
