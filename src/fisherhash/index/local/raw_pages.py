"""Rows of a damaged SQLite file, read page by page without SQLite.

SQLite finds a row through the pages above it and gives up where one of them is damaged. Here every
page is read by itself, so that a damaged page costs the rows that lie on it and no others. Nothing
is trusted: the caller compares each row with the checksum that it carries.
"""

from __future__ import annotations

import contextlib
import os
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fisherhash.index.local.files import open_inside

PAGE = 4096
"""The page size of every catalogue: SQLite's default."""
_TABLE_LEAF, _TABLE_INNER, _INDEX_LEAF, _INDEX_INNER = 13, 5, 10, 2
_KINDS = (_TABLE_LEAF, _TABLE_INNER, _INDEX_LEAF, _INDEX_INNER)
_FRAME_HEAD, _WAL_HEAD = 24, 32
_WAL_MAGIC = 0x377F0683
_MAX_PAYLOAD = 1 << 30
_SIZES = (0, 1, 2, 3, 4, 6, 8, 8, 0, 0)
"""Bytes of a value by its serial type, below 10."""

Read = tuple[Any, int]


class Record(NamedTuple):
    """A row as it lies on a page.

    Attributes:
        rowid: its number in a table; None in an index or a table without row numbers.
        values: its columns.
        held: whether another page leads to its page, so that it is surely no deleted one.
    """

    rowid: int | None
    values: list[Any]
    held: bool


@dataclass
class RawPages:
    """The pages of a SQLite file as of the last commit in its log.

    Attributes:
        path: the file.
        whole_log: use the log's last frames even if what says that they are committed is damaged.
        count: pages.
        lost: pages that cannot be read, or whose last version lies in a damaged part of the log.
        log_damaged: whether a part of the log that belongs to a commit is not what was written.
    """

    path: Path
    whole_log: bool = False
    count: int = 0
    lost: set[int] = field(default_factory=set)
    log_damaged: bool = False
    _frames: dict[int, int] = field(default_factory=dict)
    _doubtful: dict[int, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._wal = -1
        self._fd = _open(self.path)
        self.count = -(-_end_of_data(self._fd) // PAGE)
        with contextlib.suppress(OSError):
            self._wal = _open(self.path.with_name(self.path.name + "-wal"))
            self._read_log()

    def close(self) -> None:
        """Close the files."""
        for fd in (self._fd, self._wal):
            if fd >= 0:
                os.close(fd)
        self._fd = self._wal = -1

    # The log

    def _read_log(self) -> None:
        count = (_end_of_data(self._wal) - _WAL_HEAD) // (_FRAME_HEAD + PAGE)
        if count < 1:
            return
        try:
            data = _pread(self._wal, _WAL_HEAD + count * (_FRAME_HEAD + PAGE), 0)
        except OSError:
            data = _pread_slowly(self._wal, _WAL_HEAD + count * (_FRAME_HEAD + PAGE))
        head = np.frombuffer(data[:_WAL_HEAD], dtype=">u4")
        frames = np.frombuffer(data, np.uint8, offset=_WAL_HEAD).reshape(count, -1)
        heads = np.ascontiguousarray(frames[:, :_FRAME_HEAD]).view(">u4").astype(np.int64)
        salts = _salts(head, heads)
        salted = (heads[:, 2:4] == salts).all(axis=1)
        right = _right_frames(frames, heads, head) & salted
        commits = np.flatnonzero(right & (heads[:, 1] > 0))
        last = int(commits[-1]) if len(commits) else -1
        if len(commits):
            self.count = int(heads[last, 1])
        if self.whole_log and salted.any():
            last = int(np.flatnonzero(salted)[-1])
            self.count = max([self.count, *heads[: last + 1][right[: last + 1], 0].tolist()])
        for number in range(last + 1):
            page = int(heads[number, 0])
            place = _WAL_HEAD + number * (_FRAME_HEAD + PAGE) + _FRAME_HEAD
            if right[number]:
                self._frames[page] = place
                self._doubtful.pop(page, None)
                self.lost.discard(page)
            else:
                self.log_damaged = True
                # Which page it is may be wrong, but its rows have checksums of their own.
                if 0 < page <= self.count:
                    self.lost.add(page)
                self._doubtful[page] = place

    # Pages

    def page(self, number: int, *, old: bool = False) -> bytes:
        """The bytes of a page, counted from 1; empty where it is lost.

        Args:
            number: the page.
            old: the version before the one that is lost will do.
        """
        if (number in self.lost and not old) or not 0 < number <= self.count:
            return b""
        frame = self._frames.get(number)
        try:
            if frame is not None:
                data = os.pread(self._wal, PAGE, frame)
            else:
                data = os.pread(self._fd, PAGE, (number - 1) * PAGE)
        except OSError:
            data = b""
        if len(data) < PAGE:
            self.lost.add(number)
            return b""
        return data

    def _free(self) -> set[int] | None:
        """Pages that hold nothing; None where the list of them is damaged."""
        first = self.page(1)
        if not first.startswith(b"SQLite format 3\0"):
            return None
        trunk, total = struct.unpack_from(">II", first, 32)
        found: set[int] = set()
        while trunk:
            page = self.page(trunk)
            if not page or trunk in found:
                return None
            following, count = struct.unpack_from(">II", page)
            if count > PAGE // 4 - 2:
                return None
            found |= {trunk, *struct.unpack_from(f">{count}I", page, 8)}
            trunk = following
        return found if len(found) == total else None

    def records(self, kind: str) -> Iterator[Record]:
        """All rows in pages of tables ("table") or of indexes ("index"), in no order.

        Rows that were deleted may be among them where the list of free pages is damaged; those are
        not ``held``.
        """
        free = self._free()
        wanted = (_TABLE_LEAF,) if kind == "table" else (_INDEX_LEAF, _INDEX_INNER)
        held = self._children(free or set())
        for place in self._doubtful.values():
            data = os.pread(self._wal, PAGE, place)
            start = 100 if data.startswith(b"SQLite format 3\0") else 0
            if data[start] in wanted:
                yield from (Record(*row, True) for row in self._rows(data, start))
        for number in range(1, self.count + 1):
            if free and number in free:
                continue
            data = self.page(number)
            start = 100 if number == 1 else 0
            if data and data[start] in wanted:
                sure = number in held or free is not None
                for rowid, values in self._rows(data, start):
                    yield Record(rowid, values, sure)

    def old_records(self) -> Iterator[Record]:
        """Rows of the versions that lost pages had before: no longer true, perhaps."""
        for number in sorted(self.lost):
            data = self.page(number, old=True)
            start = 100 if number == 1 else 0
            if data and data[start] in (_TABLE_LEAF, _INDEX_LEAF, _INDEX_INNER):
                for rowid, values in self._rows(data, start):
                    yield Record(rowid, values, False)

    def _children(self, free: set[int]) -> set[int]:
        """Pages that other pages lead to."""
        found: set[int] = set()
        for number in range(1, self.count + 1):
            data = b"" if number in free else self.page(number)
            start = 100 if number == 1 else 0
            if not data or data[start] not in (_TABLE_INNER, _INDEX_INNER):
                continue
            found.add(struct.unpack_from(">I", data, start + 8)[0])
            for at in _pointers(data, start):
                if at + 4 <= PAGE:
                    found.add(struct.unpack_from(">I", data, at)[0])
        return found

    def _rows(self, data: bytes, start: int) -> Iterator[tuple[int | None, list[Any]]]:
        kind = data[start]
        for at in _pointers(data, start):
            try:
                if kind == _INDEX_INNER:
                    at += 4
                size, at = _varint(data, at)
                rowid = None
                if kind == _TABLE_LEAF:
                    rowid, at = _varint(data, at)
                yield rowid, _decode(self._payload(data, at, size, table=kind == _TABLE_LEAF))
            except (IndexError, ValueError, struct.error):
                continue

    def _payload(self, data: bytes, at: int, size: int, *, table: bool) -> bytes:
        """The bytes of a row, from its page and from those it continues on."""
        most = PAGE - 35 if table else (PAGE - 12) * 64 // 255 - 23
        if size <= most:
            if at + size > PAGE:
                raise ValueError("a row leaves its page")
            return data[at : at + size]
        if size > min(_MAX_PAYLOAD, self.count * PAGE):
            raise ValueError("a row is longer than the file")
        least = (PAGE - 12) * 32 // 255 - 23
        own = least + (size - least) % (PAGE - 4)
        own = own if own <= most else least
        parts, left = [data[at : at + own]], size - own
        (following,) = struct.unpack_from(">I", data, at + own)
        while left > 0:
            page = self.page(following)
            if not page:
                raise ValueError("a part of the row is lost")
            parts.append(page[4 : 4 + left])
            left -= PAGE - 4
            (following,) = struct.unpack_from(">I", page)
        return b"".join(parts)


def _open(path: Path) -> int:
    """A regular file; a pipe or a link in its place is an error."""
    return open_inside(path.parent, path.name, os.O_RDONLY)


def _end_of_data(fd: int) -> int:
    """Where the bytes of a file end, without a hole at its end: that may be a terabyte of zeros."""
    size = os.fstat(fd).st_size
    end = 0
    with contextlib.suppress(OSError):
        while end < size:
            end = os.lseek(fd, os.lseek(fd, end, os.SEEK_DATA), os.SEEK_HOLE)
        return size
    # ENXIO: there are no data after this point. A system without holes fails at once.
    return end or size


def _pread(fd: int, size: int, offset: int) -> bytes:
    """Read up to ``size`` bytes; one system call may read less."""
    parts = []
    while size:
        data = os.pread(fd, min(size, 1 << 30), offset)
        if not data:
            break
        parts.append(data)
        size -= len(data)
        offset += len(data)
    return b"".join(parts)


def _pread_slowly(fd: int, size: int) -> bytes:
    """Read a file with bad sectors, which become zeros."""
    parts = []
    for offset in range(0, size, PAGE):
        want = min(PAGE, size - offset)
        try:
            parts.append(os.pread(fd, want, offset).ljust(want, b"\0"))
        except OSError:
            parts.append(bytes(want))
    return b"".join(parts)


def _right_frames(
    frames: NDArray[np.uint8], heads: NDArray[np.int64], head: NDArray[Any]
) -> NDArray[np.bool_]:
    """Which frames of a log are what was written.

    A frame's checksum continues that of the frame before it, as stored there, so that each can be
    checked without the others.
    """
    stored = heads[:, 4:6].astype(np.uint32)
    before = np.concatenate([head[None, 6:8].astype(np.uint32), stored[:-1]])
    content = np.concatenate([frames[:, :8], frames[:, _FRAME_HEAD:]], axis=1)
    right = np.zeros(len(frames), dtype=bool)
    # The first bytes say in which order; try both, for they may be damaged.
    for order in ("<u4", ">u4"):
        right |= (_sums(content.view(order), before) == stored).all(axis=1)
    return right


def _salts(head: NDArray[Any], heads: NDArray[np.int64]) -> NDArray[Any]:
    """What marks the frames that belong to this log, and not to an older one in the same file."""
    salts = head[4:6].astype(np.int64)
    near = heads[:3, 2:4]
    if int(head[0]) | 1 == _WAL_MAGIC and (near == salts).all(axis=1).any():
        return salts
    # The log's own first bytes are damaged, and perhaps its first frame with them.
    return near[-1]


def _sums(words: NDArray[Any], start: NDArray[np.uint32]) -> NDArray[np.uint32]:
    """SQLite's checksum of each row of words, from a state per row."""
    first, second = start[:, 0].copy(), start[:, 1].copy()
    columns = np.ascontiguousarray(words.T).astype(np.uint32)
    for column in range(0, len(columns), 2):
        first += columns[column] + second
        second += columns[column + 1] + first
    return np.stack([first, second], axis=1)


def _pointers(data: bytes, start: int) -> list[int]:
    """Where the rows of a page begin."""
    head = 12 if data[start] in (_TABLE_INNER, _INDEX_INNER) else 8
    count = int.from_bytes(data[start + 3 : start + 5], "big")
    if data[start] not in _KINDS or start + head + 2 * count > PAGE:
        return []
    return list(struct.unpack_from(f">{count}H", data, start + head))


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """A number of one to nine bytes, and what follows it."""
    byte = data[at]
    if byte < 0x80:
        return byte, at + 1
    value = byte & 0x7F
    for step in range(1, 9):
        byte = data[at + step]
        if step == 8:
            value = value << 8 | byte
            return value - (1 << 64) if value >> 63 else value, at + 9
        value = value << 7 | byte & 0x7F
        if byte < 0x80:
            return value, at + step + 1
    raise ValueError("unreachable")


def _decode(payload: bytes) -> list[Any]:
    """The columns of a row."""
    end, at = _varint(payload, 0)
    kinds = []
    while at < end:
        kind, at = _varint(payload, at)
        kinds.append(kind)
    values: list[Any] = []
    for kind in kinds:
        if kind >= 12:
            size = (kind - 12) // 2
            part = payload[at : at + size]
            if len(part) < size:
                raise ValueError("a row is cut off")
            values.append(part.decode() if kind & 1 else part)
        elif kind >= 10:
            raise ValueError("a reserved type")
        else:
            size = _SIZES[kind]
            part = payload[at : at + size]
            if kind == 0:
                values.append(None)
            elif kind == 7:
                values.append(struct.unpack(">d", part)[0])
            elif kind >= 8:
                values.append(kind - 8)
            else:
                values.append(int.from_bytes(part, "big", signed=True))
        at += size
    return values
