"""What verifies of a code file that may be damaged, cut off or missing."""

from __future__ import annotations

import os
import stat
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from fisherhash.codes import code_bytes
from fisherhash.index.items import Codes, Ids
from fisherhash.index.local.code_files import codes_path, ids_path
from fisherhash.index.local.fine_sums import FINE_BLOCK, read_fine, right_parts
from fisherhash.index.local.guards import BINARY, SUM_BLOCK, array_bytes
from fisherhash.index.local.schema import FileRow

_OPEN = os.O_RDONLY | BINARY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)


class VerifiedCodes(NamedTuple):
    """The committed content of a code file, as far as it is what was written.

    Attributes:
        row: the file as committed.
        codes: (length, bytes) codes.
        ids: (length,) ids; -1 where one is lost.
        good: (length,) whether both verify.
        damage: what is wrong, by the name of the file.
    """

    row: FileRow
    codes: Codes
    ids: Ids
    good: NDArray[np.bool_]
    damage: dict[str, str]


def read_verified(folder: Path, row: FileRow, bits: int) -> VerifiedCodes:
    """Read a code file and its ids, and say position by position what verifies."""
    width = code_bytes(bits)
    damage: dict[str, str] = {}
    path = codes_path(folder, row.number)
    data, bad = _read_checked(path, row.length * width, row.code_sums, damage)
    good = np.ones(row.length, dtype=bool)
    for start, end in bad:
        good[start // width : -(-end // width)] = False
    if row.kind == "implied":
        ids = np.arange(row.first_id, row.first_id + row.length, dtype=np.int64)
    else:
        path = ids_path(folder, row.number)
        stored, bad = _read_checked(path, row.length * 8, row.id_sums, damage)
        ids = stored.view("<i8").astype(np.int64)
        for start, end in bad:
            ids[start // 8 : -(-end // 8)] = -1
            good[start // 8 : -(-end // 8)] = False
    return VerifiedCodes(row, data.reshape(row.length, width), ids, good, damage)


def _read_checked(
    path: Path, size: int, sums: bytes, damage: dict[str, str]
) -> tuple[NDArray[np.uint8], list[tuple[int, int]]]:
    """The bytes of a file, and the parts of them that are not what was written."""
    data = np.zeros(size, dtype=np.uint8)
    noted = np.frombuffer(sums[: len(sums) // 4 * 4], dtype="<u4").tolist()
    name = f"{path.parent.name}/{path.name}"
    if len(noted) != -(-size // SUM_BLOCK):
        damage[name] = "has checksums of another length"
        return data, [(0, size)]
    why = _fill(path, data)
    bad = list(_bad_parts(path, data, noted))
    if bad or why:
        lost = sum(end - start for start, end in bad)
        damage[name] = why or f"has {lost:,} bytes in blocks that are not what was written"
    return data, bad


def _fill(path: Path, data: NDArray[np.uint8]) -> str | None:
    """Read as much of a file as can be read; what cannot is zeros. Returns what is wrong."""
    try:
        fd = os.open(path, _OPEN)
    except FileNotFoundError:
        return "is missing"
    except OSError as error:
        return f"cannot be read: {error.strerror or error}"
    try:
        found = os.fstat(fd)
        if not stat.S_ISREG(found.st_mode):
            return "is not a regular file"
        view = array_bytes(data)
        wrong = "is cut off" if found.st_size < len(data) else None
        for start in range(0, len(data), SUM_BLOCK):
            block = view[start : start + SUM_BLOCK]
            try:
                _read_into(fd, block, start)
            except OSError as error:
                wrong = f"cannot be read in places: {error.strerror or error}"
                for at in range(0, len(block), FINE_BLOCK):
                    with_errors = block[at : at + FINE_BLOCK]
                    try:
                        _read_into(fd, with_errors, start + at)
                    except OSError:
                        continue
        return wrong
    finally:
        os.close(fd)


def _read_into(fd: int, view: memoryview, offset: int) -> None:
    done = 0
    while done < len(view):
        part = os.pread(fd, len(view) - done, offset + done)
        if not part:
            return
        view[done : done + len(part)] = part
        done += len(part)


def _bad_parts(path: Path, data: NDArray[np.uint8], noted: list[int]) -> Iterator[tuple[int, int]]:
    view = array_bytes(data)
    for block, crc in enumerate(noted):
        start = block * SUM_BLOCK
        part = view[start : start + SUM_BLOCK]
        if zlib.crc32(part) == crc:
            continue
        at = 0
        for good, end in right_parts(part, read_fine(path, block, len(part)), crc):
            if good > at:
                yield start + at, start + good
            at = end
        if at < len(part):
            yield start + at, start + len(part)
