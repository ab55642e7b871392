"""What verifies of a code file that may be damaged, cut off or missing."""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from fisherhash.index.items import Ids
from fisherhash.index.local.code_files import codes_name, copy_name, ids_name
from fisherhash.index.local.files import NotAFileError, open_inside, read_at, size_inside
from fisherhash.index.local.fine_sums import FINE_BLOCK, read_fine, right_parts
from fisherhash.index.local.guards import SUM_BLOCK, array_bytes
from fisherhash.index.local.runs import Runs, decode_varints
from fisherhash.index.local.schema import FileRow


class VerifiedCodes(NamedTuple):
    """The committed content of a code file, as far as it is what was written.

    Attributes:
        row: the file as committed.
        records: (length, bytes) records.
        ids: (length,) ids; -1 where one is lost.
        good: (length,) whether both verify.
        damage: what is wrong, by the name of the file.
    """

    row: FileRow
    records: NDArray[np.uint8]
    ids: Ids
    good: NDArray[np.bool_]
    damage: dict[str, str]


def read_verified(folder: Path, row: FileRow, width: int) -> VerifiedCodes:
    """Read a code file with records of ``width`` bytes and its ids; say what of them verifies."""
    damage: dict[str, str] = {}
    name = codes_name(row.number)
    data, bad = _read_checked(folder, name, row.length * width, row.code_sums, damage)
    good = np.ones(row.length, dtype=bool)
    for start, end in bad:
        good[start // width : -(-end // width)] = False
    if row.kind == "implied":
        ids = np.arange(row.first_id, row.first_id + row.length, dtype=np.int64)
    elif row.kind == "runs":
        ids = _read_runs(folder, row, damage)
        good &= ids >= 0
    else:
        name = ids_name(row.number)
        stored, bad = _read_checked(folder, name, row.length * 8, row.id_sums, damage)
        ids = stored.view("<i8").astype(np.int64)
        for start, end in bad:
            ids[start // 8 : -(-end // 8)] = -1
            good[start // 8 : -(-end // 8)] = False
    return VerifiedCodes(row, data.reshape(row.length, width), ids, good, damage)


def _read_runs(folder: Path, row: FileRow, damage: dict[str, str]) -> Ids:
    """The ids of a file of runs up to its first damaged part; -1 for those behind it."""
    name = ids_name(row.number, "runs")
    data = _right_start(folder, name, row.id_sums, damage)
    if name in damage:
        wrong: dict[str, str] = {}
        other = _right_start(folder, copy_name(name), row.id_sums, wrong)
        data = other if len(other) > len(data) else data
        damage[name] += "" if wrong else "; its copy was used"
    ends = np.flatnonzero(data < 128)
    numbers = decode_varints(data[: ends[-1] + 1] if len(ends) else data[:0])
    gaps, lengths = numbers[: len(numbers) // 2 * 2].reshape(-1, 2).T
    places = np.concatenate([[0], np.cumsum(lengths)])
    runs = Runs(row.first_id + np.cumsum(gaps) + places[:-1], places)
    ids = np.full(row.length, -1, dtype=np.int64)
    known = np.arange(min(row.length, len(runs)))
    ids[known] = runs.at(known)
    return ids


def _right_start(folder: Path, name: str, sums: bytes, damage: dict[str, str]) -> NDArray[np.uint8]:
    """The bytes of a file, all of which counts, up to the first damaged part."""
    try:
        found = size_inside(folder, name)
    except OSError:
        found = 0
    # Only the checksums say how many blocks it had.
    size = min(found, len(sums) // 4 * SUM_BLOCK)
    blocks = -(-size // SUM_BLOCK)
    data, bad = _read_checked(folder, name, size, sums[: 4 * blocks], damage)
    if 4 * blocks < len(sums):
        damage[name] = "is cut off" if found else "is missing"
    return data[: min([size, *(start for start, _ in bad)])]


def _read_checked(
    folder: Path, name: str, size: int, sums: bytes, damage: dict[str, str]
) -> tuple[NDArray[np.uint8], list[tuple[int, int]]]:
    """The bytes of a file, and the parts of them that are not what was written."""
    data = np.zeros(size, dtype=np.uint8)
    noted = np.frombuffer(sums[: len(sums) // 4 * 4], dtype="<u4").tolist()
    if len(noted) != -(-size // SUM_BLOCK):
        damage[name] = "has checksums of another length"
        return data, [(0, size)]
    why = _fill(folder, name, data)
    bad = list(_bad_parts(folder, name, data, noted))
    if bad or why:
        lost = sum(end - start for start, end in bad)
        damage[name] = why or f"has {lost:,} bytes in blocks that are not what was written"
    return data, bad


def _fill(folder: Path, name: str, data: NDArray[np.uint8]) -> str | None:
    """Read as much of a file as can be read; what cannot is zeros. Returns what is wrong."""
    try:
        fd = open_inside(folder, name, os.O_RDONLY)
    except FileNotFoundError:
        return "is missing"
    except NotAFileError:
        return "is not a regular file"
    except OSError as error:
        return f"cannot be read: {error.strerror or error}"
    try:
        view = array_bytes(data)
        wrong = "is cut off" if os.fstat(fd).st_size < len(data) else None
        for start in range(0, len(data), SUM_BLOCK):
            block = view[start : start + SUM_BLOCK]
            try:
                read_at(fd, block, start)
            except OSError as error:
                wrong = f"cannot be read in places: {error.strerror or error}"
                for at in range(0, len(block), FINE_BLOCK):
                    with_errors = block[at : at + FINE_BLOCK]
                    try:
                        read_at(fd, with_errors, start + at)
                    except OSError:
                        continue
        return wrong
    finally:
        os.close(fd)


def _bad_parts(
    folder: Path, name: str, data: NDArray[np.uint8], noted: list[int]
) -> Iterator[tuple[int, int]]:
    view = array_bytes(data)
    for block, crc in enumerate(noted):
        start = block * SUM_BLOCK
        part = view[start : start + SUM_BLOCK]
        if zlib.crc32(part) == crc:
            continue
        at = 0
        for good, end in right_parts(part, read_fine(folder, name, block, len(part)), crc):
            if good > at:
                yield start + at, start + good
            at = end
        if at < len(part):
            yield start + at, start + len(part)
