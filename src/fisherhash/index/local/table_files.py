"""Search tables on disk: derived from a code file, checked when opened, made again when wrong."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import time
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fisherhash.index.local.guards import BINARY, BLOCK, crc_blocks, write_all

logger = logging.getLogger(__name__)

FOLDER = "tables"
_MAGIC = b"fisherhash tables 1\n"
_ALIGN = 64
_DRAFT_SECONDS = 3600.0

Tables = dict[str, NDArray[Any]]


def table_path(folder: Path, number: int, length: int) -> Path:
    """The file with the tables of the first ``length`` codes of a code file."""
    return folder / FOLDER / f"{number:06d}-{length}.table"


def table_paths(folder: Path, number: int) -> dict[int, Path]:
    """Files with tables of a code file, by how many codes they cover."""
    found = {}
    for path in (folder / FOLDER).glob(f"{number:06d}-*.table"):
        covered = path.stem.partition("-")[2]
        if covered.isdecimal():
            found[int(covered)] = path
    return found


def save(path: Path, tables: Mapping[str, NDArray[Any]], facts: Mapping[str, Any]) -> bool:
    """Write tables so that the file is whole or not there; False where that is not possible."""
    arrays, places, offset = [], [], 0
    for name, array in tables.items():
        kind, shape = array.dtype.str, array.shape
        view = _bytes(np.ascontiguousarray(array))
        sums = crc_blocks(view[i : i + BLOCK] for i in range(0, len(view), BLOCK))
        places.append({"name": name, "type": kind, "shape": shape, "offset": offset, "sums": sums})
        arrays.append((offset, view))
        offset += -(-len(view) // _ALIGN) * _ALIGN
    header = json.dumps({"facts": facts, "arrays": places, "size": offset}).encode()
    head = _MAGIC + f"{len(header):012d} {zlib.crc32(header):08x}\n".encode() + header
    start = -(-len(head) // _ALIGN) * _ALIGN
    draft = path.with_name(f".{path.name}.{os.getpid()}.new")
    try:
        path.parent.mkdir(exist_ok=True)
        fd = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | BINARY, 0o666)
        try:
            write_all(fd, head, 0)
            for place, view in arrays:
                write_all(fd, view, start + place)
            os.ftruncate(fd, start + offset)
            os.fsync(fd)
        finally:
            os.close(fd)
        os.replace(draft, path)
    except OSError as error:
        with contextlib.suppress(OSError):
            draft.unlink(missing_ok=True)
        logger.warning("search tables could not be kept in %s: %s", path.parent, error)
        return False
    return True


def load(path: Path, facts: Mapping[str, Any]) -> Tables | None:
    """Tables mapped from a file; None, with a line in the log, where it does not hold them."""
    try:
        tables, found = read(path)
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        logger.warning("%s is damaged and will be made again: %s", path, error)
        return None
    if found != dict(facts):
        logger.info("%s is of another state and will be made again", path)
        return None
    return tables


def read(path: Path) -> tuple[Tables, dict[str, Any]]:
    """Tables and facts of a file whose checksums all hold.

    Raises:
        ValueError: they do not.
        OSError: it cannot be read.
    """
    with path.open("rb") as file:
        if file.read(len(_MAGIC)) != _MAGIC:
            raise ValueError("not a file of search tables")
        length, _, crc = file.read(22).decode("ascii", "replace").strip().partition(" ")
        if not length.isdecimal() or int(length) > path.stat().st_size:
            raise ValueError("its first lines changed")
        header = file.read(int(length))
    if f"{zlib.crc32(header):08x}" != crc:
        raise ValueError("its first lines changed")
    described = json.loads(header)
    start = -(-(len(_MAGIC) + 22 + len(header)) // _ALIGN) * _ALIGN
    size = start + described["size"]
    if path.stat().st_size != size:
        raise ValueError(f"{path.stat().st_size} bytes instead of {size}")
    tables: Tables = {}
    for place in described["arrays"]:
        shape = tuple(place["shape"])
        if 0 in shape:
            tables[place["name"]] = np.zeros(shape, dtype=place["type"])
            continue
        array = np.memmap(path, place["type"], "r", start + place["offset"], shape)
        view = _bytes(array)
        sums = crc_blocks(view[i : i + BLOCK] for i in range(0, len(view), BLOCK))
        if sums != place["sums"]:
            raise ValueError(f"the bytes of '{place['name']}' changed")
        tables[place["name"]] = array
    return tables, described["facts"]


def _bytes(array: NDArray[Any]) -> memoryview:
    return array.reshape(-1).view(np.uint8).data


def forget(folder: Path, numbers: set[int] | None, *, keep: Path | None = None) -> None:
    """Delete the tables of some code files (None: of all), and drafts that nobody finishes."""
    for path in (folder / FOLDER).glob("*"):
        with contextlib.suppress(OSError, ValueError):
            if path.suffix == ".new":
                if time.time() - path.stat().st_mtime > _DRAFT_SECONDS:
                    path.unlink()
            elif path != keep and path.suffix == ".table":
                number = int(path.name.partition("-")[0])
                if numbers is None or number in numbers:
                    path.unlink()
