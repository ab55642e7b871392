"""A second copy of the catalogue's small tables, for repair only.

All that says how code files are read (the facts, the state, the files' rows with their checksums,
the removed bits) usually fits on a few pages of the catalogue, and without these pages the codes
would be worthless. ``catalogue.spare`` holds them again, as of the last time that a writer tidied
its log or closed. Nothing but ``repair`` reads it.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from fisherhash.index.local.files import open_inside, read_inside, unlink_inside, write_all
from fisherhash.index.local.schema import FileRow, RemovedRow, State

SPARE = "catalogue.spare"
_MAGIC = b"fisherhash spare 1 "
_MOST = 1 << 30


class Spare(NamedTuple):
    """What the file holds.

    Attributes:
        facts: what the index is.
        state: of the commit it was written at.
        files: the rows of the code files.
        removed: the removed bits.
    """

    facts: dict[str, Any]
    state: State
    files: list[FileRow]
    removed: list[RemovedRow]


def save_spare(folder: Path, spare: Spare) -> None:
    """Write the file; a failure is harmless."""
    text = json.dumps(
        {
            "facts": spare.facts,
            "state": spare.state._asdict(),
            "files": [_packed(row._asdict()) for row in spare.files],
            "removed": [_packed(row._asdict()) for row in spare.removed],
        }
    )
    data = zlib.compress(text.encode(), 1)
    head = _MAGIC + f"{zlib.crc32(data):08x}\n".encode()
    draft = f"{SPARE}.new"
    with contextlib.suppress(OSError):
        # Not flushed to the disk: after a power cut an old or broken spare does no harm.
        unlink_inside(folder, draft)
        fd = open_inside(folder, draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
        try:
            write_all(fd, head + data, 0)
        finally:
            os.close(fd)
        os.replace(folder / draft, folder / SPARE)


def read_spare(folder: Path) -> Spare | None:
    """What the file holds; None where it is missing or damaged."""
    try:
        data = read_inside(folder, SPARE, _MOST)
        head, _, packed = data.partition(b"\n")
        if head != _MAGIC + f"{zlib.crc32(packed):08x}".encode():
            return None
        found = json.loads(zlib.decompress(packed))
        return Spare(
            found["facts"],
            State(**found["state"]),
            list(_rows(found["files"], FileRow)),
            list(_rows(found["removed"], RemovedRow)),
        )
    except (OSError, ValueError, KeyError, TypeError, zlib.error, RecursionError):
        return None


def _packed(row: dict[str, Any]) -> dict[str, Any]:
    """A row with its bytes as text."""
    return {
        name: {"bytes": base64.b64encode(value).decode()} if isinstance(value, bytes) else value
        for name, value in row.items()
    }


def _rows(rows: Iterable[dict[str, Any]], kind: Any) -> Iterable[Any]:
    for row in rows:
        yield kind(
            **{
                name: base64.b64decode(value["bytes"]) if isinstance(value, dict) else value
                for name, value in row.items()
            }
        )
