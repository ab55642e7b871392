"""Opening files that others wrote: never blocks, never reads more than a limit."""

from __future__ import annotations

import os
import stat
from typing import BinaryIO

_FLAGS = ("O_NONBLOCK", "O_NOCTTY", "O_CLOEXEC", "O_BINARY")
_READ = sum((getattr(os, name, 0) for name in _FLAGS), os.O_RDONLY)


class NotRegularError(OSError):
    """A folder, a pipe, a socket or a device where a file was expected."""


class TooLongError(OSError):
    """A file with more bytes than may be read.

    Attributes:
        size: bytes it has, as far as is known.
    """

    def __init__(self, size: int, limit: int) -> None:
        super().__init__(f"{size:,} bytes, above the limit of {limit:,}")
        self.size = size


def open_regular(path: str | os.PathLike[str]) -> BinaryIO:
    """Open a file for reading. Links are followed; a pipe or a device is never waited for.

    Raises:
        NotRegularError: it is something other than a file.
        OSError: it cannot be opened.
    """
    # Before opening, because opening a device may have an effect; and after, because another
    # program may have put a pipe in its place.
    _check(os.stat(path))
    file = open(os.open(path, _READ), "rb")  # noqa: SIM115
    try:
        _check(os.fstat(file.fileno()))
    except BaseException:
        file.close()
        raise
    return file


def read_bounded(path: str | os.PathLike[str], limit: int) -> bytes:
    """Read a whole file of at most ``limit`` bytes.

    Raises:
        TooLongError: it has more.
        NotRegularError: it is something other than a file.
        OSError: it cannot be read.
    """
    with open_regular(path) as file:
        return read_rest(file, limit)


def check_size(file: BinaryIO, limit: int) -> int:
    """The size of an open file.

    Raises:
        TooLongError: it has more than ``limit`` bytes.
    """
    size = os.fstat(file.fileno()).st_size
    if size > limit:
        raise TooLongError(size, limit)
    return size


def read_rest(file: BinaryIO, limit: int) -> bytes:
    """Read what is left of an open file, at most ``limit`` bytes of it.

    Raises:
        TooLongError: there is more.
    """
    size = check_size(file, limit)
    # Not read(): the file may grow meanwhile.
    data = file.read(size + 1) or b""
    if len(data) > size:
        data += file.read(max(limit - len(data), 0) + 1) or b""
        if len(data) > limit:
            raise TooLongError(len(data), limit)
    return data


def _check(state: os.stat_result) -> None:
    if not stat.S_ISREG(state.st_mode):
        kind = "a folder" if stat.S_ISDIR(state.st_mode) else "a pipe, socket or device"
        raise NotRegularError(f"{kind}, not a file")
