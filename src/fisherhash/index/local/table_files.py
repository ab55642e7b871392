"""Search tables on disk: derived from a code file, checked when opened, rebuilt when wrong."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import time
import zlib
from collections.abc import Container, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fisherhash.index.local.guards import array_bytes, crc_blocks, replace_file

logger = logging.getLogger(__name__)

TABLES_FOLDER = "tables"
_MAGIC = b"fisherhash tables 1\n"
_ALIGN = 64
_DRAFT_SECONDS = 3600.0

TableArrays = dict[str, NDArray[Any]]


def table_path(folder: Path, number: int, length: int) -> Path:
    """The file with the tables of the first ``length`` codes of a code file."""
    return folder / TABLES_FOLDER / f"{number:06d}-{length}.table"


def table_paths(folder: Path) -> Iterator[tuple[Path, int, int]]:
    """Files with tables, the number of their code file, and how many of its codes they cover."""
    for path in (folder / TABLES_FOLDER).glob("*.table"):
        number, _, covered = path.stem.partition("-")
        if number.isdecimal() and covered.isdecimal():
            yield path, int(number), int(covered)


def save_tables(path: Path, tables: Mapping[str, NDArray[Any]], facts: Mapping[str, Any]) -> bool:
    """Write tables so that the file is complete or absent; returns whether that was possible."""
    parts, places, offset = [], [], 0
    for name, array in tables.items():
        view = array_bytes(np.ascontiguousarray(array))
        place = {"name": name, "type": array.dtype.str, "shape": array.shape}
        places.append({**place, "offset": offset, "sums": crc_blocks(view)})
        parts += [view, bytes(-len(view) % _ALIGN)]
        offset += len(view) + len(parts[-1])
    header = json.dumps({"facts": facts, "arrays": places, "size": offset}).encode()
    head = _MAGIC + f"{len(header):012d} {zlib.crc32(header):08x}\n".encode() + header
    draft = path.with_name(f".{path.name}.{os.getpid()}.new")
    try:
        path.parent.mkdir(exist_ok=True)
        replace_file(path, head, bytes(-len(head) % _ALIGN), *parts, draft=draft)
    except OSError as error:
        with contextlib.suppress(OSError):
            draft.unlink(missing_ok=True)
        logger.warning("search tables could not be stored in %s: %s", path.parent, error)
        return False
    return True


def load_tables(path: Path, facts: Mapping[str, Any]) -> TableArrays | None:
    """Tables mapped from a file; None, with a line in the log, if it does not hold them."""
    try:
        tables, found = read_tables(path)
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        logger.warning("%s is damaged and will be built again: %s", path, error)
        return None
    if found != dict(facts):
        logger.info("%s belongs to another state and will be built again", path)
        return None
    return tables


def read_tables(path: Path) -> tuple[TableArrays, dict[str, Any]]:
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
    tables: TableArrays = {}
    for place in described["arrays"]:
        shape = tuple(place["shape"])
        if 0 in shape:
            tables[place["name"]] = np.zeros(shape, dtype=place["type"])
            continue
        array = np.memmap(path, place["type"], "r", start + place["offset"], shape)
        if crc_blocks(array_bytes(array)) != place["sums"]:
            raise ValueError(f"the bytes of '{place['name']}' changed")
        tables[place["name"]] = array
    return tables, described["facts"]


def delete_tables(folder: Path, numbers: Container[int], *, keep: Path | None = None) -> None:
    """Delete the tables of some code files, and drafts that nobody will finish."""
    for path in (folder / TABLES_FOLDER).glob("*"):
        with contextlib.suppress(OSError, ValueError):
            if path.suffix == ".new":
                if time.time() - path.stat().st_mtime > _DRAFT_SECONDS:
                    path.unlink()
            elif path != keep and path.suffix == ".table":
                number = int(path.name.partition("-")[0])
                if number in numbers:
                    path.unlink()
