"""Search tables on disk: derived from a code file, checked when opened, rebuilt when wrong."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import secrets
import time
import zlib
from collections.abc import Container, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fisherhash.errors import FisherhashError
from fisherhash.index.local.files import (
    list_inside,
    replace_inside,
    size_inside,
    unlink_inside,
)
from fisherhash.index.local.guards import SUM_BLOCK, array_bytes, crc_blocks
from fisherhash.index.local.stored import StoredBytes

logger = logging.getLogger(__name__)

TABLES_FOLDER = "tables"
_MAGIC = b"fisherhash tables 1\n"
_FIRST = len(_MAGIC) + 22
_ALIGN = 64
_MOST_HEADER = 16 << 20
_DRAFT_SECONDS = 3600.0
_NAME = re.compile(r"(\d{1,18})-(\d{1,18})\.table", re.ASCII)
_TYPE = re.compile(r"[<>|][iu][1248]", re.ASCII)

TableArrays = dict[str, NDArray[Any]]


class StoredTables(NamedTuple):
    """Tables of a file, with what they were built from."""

    arrays: TableArrays
    facts: dict[str, Any]
    file: StoredBytes


def table_name(number: int, length: int) -> str:
    """The file with the tables of the first ``length`` codes of a code file, inside the index."""
    return f"{TABLES_FOLDER}/{number:06d}-{length}.table"


def table_names(folder: Path) -> list[tuple[str, int, int]]:
    """Files with tables, the number of their code file, and how many of its codes they cover."""
    try:
        matches = map(_NAME.fullmatch, list_inside(folder, TABLES_FOLDER))
        return [(f"{TABLES_FOLDER}/{m[0]}", int(m[1]), int(m[2])) for m in matches if m]
    except OSError as error:
        logger.warning("%s is not used: %s", folder / TABLES_FOLDER, error.strerror or error)
        return []


def save_tables(
    folder: Path, name: str, tables: Mapping[str, NDArray[Any]], facts: Mapping[str, Any]
) -> bool:
    """Write tables so that the file is complete or absent; returns whether that was possible."""
    parts, places, offset = [], [], 0
    for array_name, array in tables.items():
        view = array_bytes(np.ascontiguousarray(array))
        place = {"name": array_name, "type": array.dtype.str, "shape": array.shape}
        places.append({**place, "offset": offset, "sums": crc_blocks(view)})
        parts += [view, bytes(-len(view) % _ALIGN)]
        offset += len(view) + len(parts[-1])
    header = json.dumps({"facts": facts, "arrays": places, "size": offset}).encode()
    head = _MAGIC + f"{len(header):012d} {zlib.crc32(header):08x}\n".encode() + header
    # Several processes, and several objects of one, may store the same tables.
    draft = f"{TABLES_FOLDER}/.{Path(name).name}.{os.getpid()}-{secrets.token_hex(4)}.new"
    try:
        with contextlib.suppress(FileExistsError):
            (folder / TABLES_FOLDER).mkdir()
        replace_inside(folder, name, head, bytes(-len(head) % _ALIGN), *parts, draft=draft)
    except OSError as error:
        logger.warning("search tables could not be stored in %s: %s", folder / TABLES_FOLDER, error)
        return False
    finally:
        with contextlib.suppress(OSError):
            unlink_inside(folder, draft)
    return True


def load_tables(folder: Path, name: str, facts: Mapping[str, Any]) -> StoredTables | None:
    """Tables of a file; None, with a line in the log, if it does not hold them."""
    try:
        found = read_tables(folder, name)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, FisherhashError) as error:
        logger.warning("%s is damaged and will be built again: %s", folder / name, error)
        return None
    if found.facts != dict(facts):
        logger.info("%s belongs to another state and will be built again", folder / name)
        return None
    return found


def read_tables(folder: Path, name: str) -> StoredTables:
    """Tables and facts of a file whose checksums all hold.

    Whether they are tables of the codes is for :meth:`Tables.prove` to say: checksums protect from
    accidents, not from somebody who writes them too.

    Raises:
        ValueError: they do not.
        OSError, FisherhashError: it cannot be read.
    """
    file = StoredBytes(folder, name)
    first = file.read_range(0, min(_FIRST, file.size)).tobytes()
    if not first.startswith(_MAGIC):
        raise ValueError("not a file of search tables")
    length, _, crc = first[len(_MAGIC) :].decode("ascii", "replace").strip().partition(" ")
    if not length.isdecimal() or int(length) > min(file.size - _FIRST, _MOST_HEADER):
        raise ValueError("its first lines changed")
    header = file.read_range(_FIRST, int(length)).tobytes()
    if f"{zlib.crc32(header):08x}" != crc:
        raise ValueError("its first lines changed")
    try:
        described = json.loads(header)
        start = -(-(_FIRST + len(header)) // _ALIGN) * _ALIGN
        if file.size != start + described["size"]:
            raise ValueError(f"{file.size} bytes instead of {start + described['size']}")
        file.load()
        places = {place["name"]: place for place in described["arrays"]}
        arrays = {n: _array(file, start, place) for n, place in places.items()}
        return StoredTables(arrays, dict(described["facts"]), file)
    except (KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise ValueError(f"its description is wrong ({error!r})") from None


def _array(file: StoredBytes, start: int, place: dict[str, Any]) -> NDArray[Any]:
    shape, offset, kind = tuple(place["shape"]), place["offset"], place["type"]
    if not _TYPE.fullmatch(kind) or not all(isinstance(n, int) for n in (*shape, offset)):
        raise ValueError(f"'{place['name']}' is no table")
    count = 1
    for side in shape:
        count *= side
    size = count * np.dtype(kind).itemsize
    if min((*shape, offset)) < 0 or offset % _ALIGN or start + offset + size > file.size:
        raise ValueError(f"'{place['name']}' lies outside of the file")
    if not count:
        return np.zeros(shape, dtype=kind)
    sums = place["sums"]
    if len(sums) != -(-size // SUM_BLOCK) or file.crcs(start + offset, size) != sums:
        raise ValueError(f"the bytes of '{place['name']}' changed")
    return file.data[start + offset : start + offset + size].view(kind).reshape(shape)


def delete_tables(folder: Path, numbers: Container[int], *, keep: str | None = None) -> None:
    """Delete the tables of some code files, and drafts that nobody will finish."""
    with contextlib.suppress(OSError):
        for name in list_inside(folder, TABLES_FOLDER):
            _delete(folder, f"{TABLES_FOLDER}/{name}", numbers, keep)


def _delete(folder: Path, name: str, numbers: Container[int], keep: str | None) -> None:
    with contextlib.suppress(OSError):
        if name.endswith(".new"):
            unneeded = time.time() - (folder / name).lstat().st_mtime > _DRAFT_SECONDS
        else:
            match = _NAME.fullmatch(Path(name).name)
            unneeded = match is not None and int(match[1]) in numbers and name != keep
        if unneeded:
            unlink_inside(folder, name)


def table_bytes(folder: Path) -> int:
    """Bytes that all tables take on the disk."""
    total = 0
    for name, _, _ in table_names(folder):
        with contextlib.suppress(OSError):
            total += size_inside(folder, name)
    return total
