"""Files inside the folder of an index: regular files only, never reached through a link.

An index may come from somebody else. Its folder may hold a link to any file of the reader, or a
pipe that never ends. So every file is opened one name after the other, starting at the folder,
and no name on the way may be a link. The folder itself may be one.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Iterator
from pathlib import Path

_LINK = getattr(os, "O_NOFOLLOW", 0)
_PLAIN = (
    getattr(os, "O_BINARY", 0)
    | getattr(os, "O_CLOEXEC", 0)
    | getattr(os, "O_NONBLOCK", 0)
    | getattr(os, "O_NOCTTY", 0)
    | _LINK
)
_HAS_DIR_FD = {os.open, os.unlink, os.mkdir, os.stat} <= os.supports_dir_fd and bool(_LINK)


class NotAFileError(OSError):
    """There is something else than a regular file: a link, a pipe, a device or a folder."""


def not_a_file(path: Path, what: str) -> NotAFileError:
    """The error for a name that stands for something else than a file or a folder of an index."""
    return NotAFileError(errno.EINVAL, f"it is {what}, which an index never contains", str(path))


@contextlib.contextmanager
def _parent(folder: Path, name: str) -> Iterator[tuple[int | None, str | Path]]:
    """The open folder that holds a name, and the last part of the name."""
    *parts, last = name.split("/")
    if not _HAS_DIR_FD:
        for number in range(len(parts)):
            _refuse_link(folder.joinpath(*parts[: number + 1]))
        yield None, folder / name
        return
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
    # Taken from the list before it is closed: after an interruption a second close would hit
    # whatever file got the same number meanwhile.
    fds = [os.open(folder, flags)]
    try:
        for number, part in enumerate(parts):
            try:
                fds.append(os.open(part, flags | _LINK, dir_fd=fds[-1]))
            except OSError as error:
                raise _named(error, folder.joinpath(*parts[: number + 1])) from None
        yield fds[-1], last
    finally:
        while fds:
            os.close(fds.pop())


def _refuse_link(path: Path) -> None:
    if path.is_symlink():
        raise not_a_file(path, "a link")


def _named(error: OSError, path: Path) -> OSError:
    """The error with the whole path, and with the reason where a link was in the way."""
    if error.errno in (errno.ELOOP, errno.EMLINK, errno.ENOTDIR) and path.is_symlink():
        return not_a_file(path, "a link")
    if error.errno == errno.ENXIO:
        return not_a_file(path, "a pipe or a socket")
    return type(error)(error.errno, error.strerror, str(path))


def open_inside(folder: Path, name: str, flags: int, mode: int = 0o666) -> int:
    """Open a regular file of an index; returns its descriptor.

    Args:
        folder: the index.
        name: the file inside it, with ``/`` between the parts.
        flags: of ``os.open``.
        mode: the permissions of a new file.

    Raises:
        OSError: it cannot be opened, or it is no regular file (:class:`NotAFileError`).
    """
    path = folder / name
    # A link is refused and a pipe does not wait for its other end; what it is, is checked below.
    truncate = flags & os.O_TRUNC
    with _parent(folder, name) as (fd, last):
        if fd is None:
            _refuse_link(path)
        try:
            found = os.open(last, flags & ~os.O_TRUNC | _PLAIN, mode, dir_fd=fd)
        except OSError as error:
            raise _named(error, path) from None
    try:
        if not stat.S_ISREG(os.fstat(found).st_mode):
            raise not_a_file(path, "no regular file")
        if truncate:
            os.ftruncate(found, 0)
    except BaseException:
        os.close(found)
        raise
    return found


def read_inside(folder: Path, name: str, most: int) -> bytes:
    """The bytes of a small file.

    Raises:
        OSError: it cannot be read, or it has more than ``most`` bytes.
    """
    fd = open_inside(folder, name, os.O_RDONLY)
    try:
        size = os.fstat(fd).st_size
        if size > most:
            reason = f"it has {size:,} bytes, {most:,} at most are read"
            raise NotAFileError(errno.EFBIG, reason, str(folder / name))
        parts = []
        while data := os.read(fd, min(1 << 20, most + 1)):
            parts.append(data)
            most -= len(data)
            if most < 0:
                raise NotAFileError(errno.EFBIG, "it grows", str(folder / name))
        return b"".join(parts)
    except OSError as error:
        error.filename = error.filename or str(folder / name)
        raise
    finally:
        os.close(fd)


def unlink_inside(folder: Path, name: str) -> None:
    """Delete a file, or a link but never what it leads to; nothing happens if there is none."""
    with contextlib.suppress(FileNotFoundError), _parent(folder, name) as (fd, last):
        os.unlink(last, dir_fd=fd)


def list_inside(folder: Path, name: str) -> list[str]:
    """The names in a folder of an index; none if it does not exist.

    Raises:
        OSError: it cannot be listed, or it is a link.
    """
    with contextlib.suppress(FileNotFoundError):
        if not _HAS_DIR_FD:
            _refuse_link(folder / name)
            return sorted(os.listdir(folder / name))
        with _parent(folder, f"{name}/.") as (fd, _):
            return sorted(os.listdir(fd if fd is not None else folder / name))
    return []


def size_inside(folder: Path, name: str) -> int:
    """The size of a file, not of what a link leads to."""
    with _parent(folder, name) as (fd, last):
        return os.stat(last, dir_fd=fd, follow_symlinks=False).st_size


def replace_inside(
    folder: Path, name: str, *parts: bytes | memoryview, draft: str | None = None
) -> None:
    """Write a file so that, after a power cut too, it is either the old one or the new one.

    Args:
        folder: the index.
        name: the file inside it.
        parts: its bytes, one part after the other.
        draft: the name under which it is written first; it needs its own where several objects
            may write the file.
    """
    draft = name + ".new" if draft is None else draft
    # Never into a file that is there already, which may have a second name somewhere else.
    unlink_inside(folder, draft)
    fd = open_inside(folder, draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
    try:
        offset = 0
        for part in parts:
            write_all(fd, part, offset)
            offset += len(part)
        os.fsync(fd)
    finally:
        os.close(fd)
    with _parent(folder, name) as (parent, last):
        place = Path(draft).name if parent is not None else folder / draft
        os.replace(place, last, src_dir_fd=parent, dst_dir_fd=parent)


def write_all(fd: int, data: bytes | memoryview, offset: int) -> None:
    """Write all of ``data`` at an offset; one system call may write less."""
    view = memoryview(data).cast("B")
    os.lseek(fd, offset, os.SEEK_SET)
    while len(view):
        view = view[os.write(fd, view[: 1 << 30]) :]


def read_at(fd: int, into: memoryview, offset: int) -> int:
    """Read bytes at an offset into memory; returns how many there were.

    Raises:
        OSError: the disk refused; its ``filename`` is left to the caller, and ``offset`` (an
            attribute) says where.
    """
    done = 0
    while done < len(into):
        try:
            count = _read_into(fd, into[done : done + (1 << 26)], offset + done)
        except OSError as error:
            error.offset = offset + done  # type: ignore[attr-defined]
            raise
        if not count:
            break
        done += count
    return done


def _read_into(fd: int, into: memoryview, offset: int) -> int:
    if hasattr(os, "preadv"):
        return os.preadv(fd, [into], offset)
    os.lseek(fd, offset, os.SEEK_SET)
    data = os.read(fd, len(into))
    into[: len(data)] = data
    return len(data)
