"""Which process works on what: one-byte file locks that end with their process."""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


class Claims:
    """Named locks among the processes that open the same file.

    A name maps to one byte offset; the file stays empty. The system drops the locks of a killed
    process.
    """

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)

    def close(self) -> None:
        """Release every lock."""
        os.close(self._file)

    @contextmanager
    def claim(self, name: str) -> Iterator[bool]:
        """Try to lock ``name``; yields whether we hold it, and releases it afterwards."""
        place = int.from_bytes(hashlib.sha256(name.encode()).digest()[:3], "big")
        try:
            _lock(self._file, place, hold=True)
        except (BlockingIOError, PermissionError):  # held by another process
            yield False
            return
        try:
            yield True
        finally:
            _lock(self._file, place, hold=False)


if sys.platform == "win32":
    import msvcrt

    def _lock(file: int, place: int, *, hold: bool) -> None:
        os.lseek(file, place, os.SEEK_SET)
        msvcrt.locking(file, msvcrt.LK_NBLCK if hold else msvcrt.LK_UNLCK, 1)

else:
    import fcntl

    def _lock(file: int, place: int, *, hold: bool) -> None:
        how = fcntl.LOCK_EX | fcntl.LOCK_NB if hold else fcntl.LOCK_UN
        fcntl.lockf(file, how, 1, place)
