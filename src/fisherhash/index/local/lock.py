"""One writer at a time: a lock on a file that the system releases when its process ends."""

from __future__ import annotations

import contextlib
import errno
import os
import sys
import time
import weakref
from pathlib import Path
from typing import ClassVar

from fisherhash.errors import FisherhashError
from fisherhash.index.local.files import NotAFileError, open_inside

_BUSY = {errno.EACCES, errno.EAGAIN, errno.EDEADLK, errno.EWOULDBLOCK}


class WriterLock:
    """The right to write an index; held until :meth:`release` or the end of the process.

    Raises:
        FisherhashError: another process, or another object of this one, holds it.
    """

    _held: ClassVar[weakref.WeakSet[WriterLock]] = weakref.WeakSet()

    def __init__(self, path: Path) -> None:
        self.path = path
        self._fd = -1
        for _ in range(100):
            self._fd = _open_lock(path)
            self._held.add(self)
            self._take()
            if self.is_ours():
                break
            # It was deleted after it was opened, so another process may hold a new one.
            self.release()
        with contextlib.suppress(OSError):
            # For the message below and for settle(); a full disk must not keep a writer out.
            os.ftruncate(self._fd, 0)
            os.write(self._fd, f"{os.getpid()}\n".encode())

    def __del__(self) -> None:
        # After an interruption nobody else may know of it.
        self.release()

    def _take(self) -> None:
        try:
            _take_soon(self._fd)
        except OSError as error:
            holder = _holder(self._fd)
            self.release()
            if error.errno not in _BUSY:
                raise FisherhashError(
                    f"{self.path} cannot be locked: {error.strerror or error}. "
                    "Store an index that is written on a local disk"
                ) from None
            raise FisherhashError(
                f"{self.path.parent} is being written by {holder}. Wait until it has finished, "
                "then run this again; searching works meanwhile"
            ) from None

    def is_ours(self) -> bool:
        """Whether the file that this object locked is still the one that others would lock."""
        try:
            own = os.fstat(self._fd)
            now = os.stat(self.path, follow_symlinks=False)
        except OSError:
            return False
        return (own.st_dev, own.st_ino) == (now.st_dev, now.st_ino)

    def settle(self) -> None:
        """Record that this writer left everything in order."""
        if self._fd >= 0:
            with contextlib.suppress(OSError):
                os.ftruncate(self._fd, 0)

    def release(self) -> None:
        """Admit the next writer; again does nothing."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            with contextlib.suppress(OSError):
                os.close(fd)


def _forget_locks() -> None:
    """In a forked child: close its copies, which would keep the lock after the parent released it.

    The parent's lock is not released by this.
    """
    for lock in list(WriterLock._held):
        lock.release()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_locks)


def _open_lock(path: Path) -> int:
    try:
        return open_inside(path.parent, path.name, os.O_RDWR | os.O_CREAT)
    except NotAFileError as error:
        raise FisherhashError(f"{path} cannot be locked: {error.strerror}. Delete it") from None
    except OSError as error:
        raise FisherhashError(
            f"{path.parent} cannot be opened for writing: {error.strerror or error}. "
            "Reading it may still work; to change it, get write permission or copy the folder"
        ) from None


def is_unsettled(path: Path) -> bool:
    """Whether some process is writing, or the last one ended without :meth:`WriterLock.settle`."""
    with contextlib.suppress(OSError):
        if path.lstat().st_size:
            return True
    return is_held(path)


def is_held(path: Path) -> bool:
    """Whether some process is writing now."""
    try:
        fd = open_inside(path.parent, path.name, os.O_RDWR)
    except OSError:
        return False
    try:
        _take(fd)
    except OSError:
        return True
    finally:
        os.close(fd)
    return False


def _take_soon(fd: int) -> None:
    """Take the lock, even if :func:`is_held` of another process holds it for a moment."""
    for _ in range(5):
        try:
            return _take(fd)
        except OSError as error:
            if error.errno not in _BUSY:
                raise
            time.sleep(0.02)
    _take(fd)


def _holder(fd: int) -> str:
    try:
        os.lseek(fd, 0, os.SEEK_SET)
        text = os.read(fd, 32).decode().strip()
    except (OSError, ValueError):
        text = ""
    if text == str(os.getpid()):
        return f"this process ({text}) already"
    return f"process {text}" if text.isdecimal() else "another process"


if sys.platform == "win32":
    import msvcrt

    def _take(fd: int) -> None:
        # Far behind the process id, which others must be able to read.
        os.lseek(fd, 1 << 20, os.SEEK_SET)
        msvcrt.locking(fd, msvcrt.LK_NBLCK, 1)
        os.lseek(fd, 0, os.SEEK_SET)

else:
    import fcntl

    def _take(fd: int) -> None:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
