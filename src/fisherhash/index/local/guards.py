"""What proves that a catalogue is whole: the number of its last commit and the sums of its bytes.

SQLite keeps no checksums of its pages, and drops what follows a damaged place of its log without a
word. So two small files stand beside it. ``head`` tells the last commit: a catalogue behind it has
lost something. ``catalogue.sums`` tells the checksums of the catalogue's bytes; it is taken away
before they change and written again afterwards, so while it is there it is right.
"""

from __future__ import annotations

import errno
import json
import os
import threading
import time
import zlib
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from fisherhash.errors import FisherhashError

BLOCK = 1 << 20
"""Bytes that one checksum covers, in the catalogue and in the code files."""

BINARY = getattr(os, "O_BINARY", 0)
_SLOT = 48
_FULL = {errno.ENOSPC, errno.EFBIG, getattr(errno, "EDQUOT", errno.ENOSPC)}


class CannotWriteError(FisherhashError):
    """A disk that takes no more, or that fails.

    Args:
        what: what failed.
        todo: what to do before the same command is run again.
        done: what was changed before.
        then: what the same command will do.
    """

    def __init__(
        self, what: str, todo: str, done: str = "Nothing was added or changed", then: str = ""
    ) -> None:
        again = "then run the same command again" + (f": {then}" if then else "")
        super().__init__(f"{what}. {done}; {todo}, {again}")
        self.what, self.todo = what, todo


def cannot_write(place: Path, error: Exception) -> CannotWriteError:
    """The error for what the system or SQLite said about a failed write."""
    told = getattr(error, "strerror", None) or error
    name = getattr(error, "sqlite_errorname", None) or ""
    full = isinstance(error, OSError) and error.errno in _FULL
    if full or name.startswith(("SQLITE_FULL", "SQLITE_IOERR_WRITE")):
        return CannotWriteError(f"no room to write {place} ({told})", "make room on the disk")
    return CannotWriteError(f"{place} cannot be written: {told}", "check the disk and the rights")


def sync_folder(folder: Path) -> None:
    """Make names that were added to or taken from a folder last, where the system can."""
    if os.name != "posix":
        return
    fd = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def replace_file(path: Path, data: bytes) -> None:
    """Write a small file so that it is either the old one or the new one."""
    draft = path.with_name(path.name + ".new")
    fd = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | BINARY, 0o666)
    try:
        write_all(fd, data, 0)
        os.fsync(fd)
    finally:
        os.close(fd)
    os.replace(draft, path)


def write_all(fd: int, data: bytes | memoryview, offset: int) -> None:
    """Write all of ``data`` at a place; one call of the system may write less."""
    view = memoryview(data).cast("B")
    os.lseek(fd, offset, os.SEEK_SET)
    while len(view):
        view = view[os.write(fd, view[: 1 << 30]) :]


def _slot(commit: int) -> bytes:
    text = f"commit {commit:020d}"
    return f"{text} {zlib.crc32(text.encode()):08x}".ljust(_SLOT - 1).encode() + b"\n"


class Head:
    """The number of the last commit, in two places that are written in turn.

    A power cut while one is written leaves the other.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def start(self, commit: int) -> None:
        """Write both places anew."""
        replace_file(self.path, _slot(commit) * 2)

    def write(self, commit: int) -> None:
        """Note a commit that is on the disk."""
        fd = os.open(self.path, os.O_WRONLY | BINARY)
        try:
            write_all(fd, _slot(commit), (commit % 2) * _SLOT)
        finally:
            os.close(fd)

    def read(self) -> tuple[int | None, str | None]:
        """The last commit noted (None: unreadable) and what is wrong with the file."""
        found = self._read()
        if found[1]:
            # Perhaps in the middle of a writer's change.
            time.sleep(0.02)
            found = self._read()
        return found

    def _read(self) -> tuple[int | None, str | None]:
        try:
            data = self.path.read_bytes()
        except FileNotFoundError:
            return None, "is missing"
        except OSError as error:
            return None, f"cannot be read: {error.strerror or error}"
        commits = []
        for start in (0, _SLOT):
            slot = data[start : start + _SLOT]
            number = slot[7:27]
            if number.isdigit() and slot == _slot(int(number)):
                commits.append(int(number))
        wrong = None if len(commits) == 2 and len(data) == 2 * _SLOT else "is damaged"
        return max(commits, default=None), wrong


def crc_blocks(blocks: Iterable[memoryview]) -> list[int]:
    """CRC-32 of each block; zlib lets go of the interpreter, so threads share the work."""
    pending = list(blocks)
    if len(pending) < 16:
        return [zlib.crc32(block) for block in pending]
    with ThreadPoolExecutor(min(4, os.cpu_count() or 1)) as pool:
        return list(pool.map(zlib.crc32, pending, chunksize=8))


class SharedFile:
    """Read access to a SQLite file without closing it while SQLite has it open.

    POSIX drops all locks a process holds on a file when any of its handles to it is closed, those
    that SQLite holds included. So a handle is kept until the last user in this process lets go.
    """

    _lock = threading.Lock()
    _open: dict[tuple[int, int], list[int]] = {}  # noqa: RUF012 (a registry of the process)

    def __init__(self, path: Path) -> None:
        with self._lock:
            status = os.stat(path)
            self._key: tuple[int, int] | None = (status.st_dev, status.st_ino)
            entry = self._open.get(self._key)
            if entry is None:
                entry = self._open[self._key] = [os.open(path, os.O_RDONLY | BINARY), 0]
            entry[1] += 1
            self._fd = entry[0]

    def blocks(self) -> Iterable[memoryview]:
        """The file's bytes, a block at a time."""
        offset = 0
        while True:
            with self._lock:
                os.lseek(self._fd, offset, os.SEEK_SET)
                data = os.read(self._fd, BLOCK)
            if not data:
                return
            yield memoryview(data)
            offset += len(data)

    def sums(self) -> tuple[int, list[int]]:
        """Size and checksums of the blocks."""
        size, sums = 0, []
        for block in self.blocks():
            size += len(block)
            sums.append(zlib.crc32(block))
        return size, sums

    def release(self) -> None:
        """Let go; again does nothing."""
        with self._lock:
            if self._key is None:
                return
            entry = self._open[self._key]
            entry[1] -= 1
            if not entry[1]:
                os.close(entry[0])
                del self._open[self._key]
            self._key = None


@dataclass(frozen=True)
class Sums:
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
        """As two lines: the facts, and their own checksum."""
        facts = {"commit": self.commit, "size": self.size, "sums": self.blocks}
        text = json.dumps(facts, separators=(",", ":")).encode()
        return text + f"\n{zlib.crc32(text):08x}\n".encode()

    @classmethod
    def read(cls, path: Path) -> tuple[Sums | None, str | None]:
        """The sums (None: there are none) and what is wrong with the file, if it is there."""
        try:
            data = path.read_bytes()
        except FileNotFoundError:
            return None, None
        except OSError as error:
            return None, f"cannot be read: {error.strerror or error}"
        text, _, rest = data.partition(b"\n")
        if rest != f"{zlib.crc32(text):08x}\n".encode():
            return None, "is damaged"
        try:
            facts = json.loads(text)
            return cls(int(facts["commit"]), int(facts["size"]), tuple(facts["sums"])), None
        except (ValueError, KeyError, TypeError):
            return None, "is damaged"
