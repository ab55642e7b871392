"""New files: complete or not there at all, with the tables and the model of an index."""

from __future__ import annotations

import contextlib
import os
import shutil
import sqlite3
import time
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from fisherhash.errors import UsageError
from fisherhash.index.base import Files
from fisherhash.index.local.file import IndexFile, cannot_write
from fisherhash.index.local.schema import APPLICATION, FORMAT, SCHEMA, State
from fisherhash.system.storage import NEW, fsync_file, fsync_folder, make_folder, remove_old_drafts

_PART = 1 << 24


@contextlib.contextmanager
def new_file(path: Path) -> Iterator[Path]:
    """Make a file that is complete or absent: yields where to write it, then moves it to ``path``.

    Raises:
        UsageError: there is something at ``path``.
        CannotWriteError: the system cannot store the file.
    """
    place = Path(os.path.abspath(path))
    draft = place.with_name(f".{place.name}.{os.getpid()}-{time.time_ns():x}{NEW}")
    try:
        if os.path.lexists(place):
            raise FileExistsError
        make_folder(place.parent)
        remove_old_drafts(place)
        draft.mkdir()
        try:
            inside = draft / "index"
            yield inside
            fsync_file(inside)
            try:
                os.link(inside, place)
            except FileExistsError:
                raise
            except OSError:
                # Not every file system has links.
                if os.path.lexists(place):
                    raise FileExistsError from None
                os.rename(inside, place)
        finally:
            shutil.rmtree(draft, ignore_errors=True)
        fsync_folder(place.parent)
    except FileExistsError:
        raise UsageError(f"{path} exists already; give another name, or remove it first") from None
    except OSError as error:
        raise cannot_write(path, error) from None


def create_tables(path: Path, facts: Mapping[str, Any], files: Files) -> None:
    """Write an empty index with the files that it carries to a file that does not exist yet."""
    db = sqlite3.connect(path, isolation_level=None)
    try:
        db.execute("PRAGMA journal_mode = WAL")
        db.executescript(SCHEMA)
        db.execute(f"PRAGMA application_id = {APPLICATION}")
        db.execute(f"PRAGMA user_version = {FORMAT}")
    except sqlite3.Error as error:
        raise cannot_write(path, error) from None
    finally:
        db.close()
    file = IndexFile(path, write=True)
    try:
        with file.explained():
            file.begin(write=True)
            total = [0, 0]
            for name, data in files.items():
                # At least one part, so that an empty file is there.
                for part in range(max(1, -(-len(data) // _PART))):
                    piece = data[part * _PART : (part + 1) * _PART]
                    crc = _part_crc(name.encode(), part, piece)
                    file.db.execute(
                        "INSERT INTO files VALUES (?, ?, ?, ?)", (name, part, piece, crc)
                    )
                    total = [total[0] + 1, total[1] + crc]
            file.put_meta(facts=dict(facts), state=State(files=total))
            file.db.execute("COMMIT")
    finally:
        file.close()


def read_files(file: IndexFile, state: State) -> dict[str, bytes]:
    """The files that an index carries.

    Raises:
        DamagedError: one is not what was written.
    """
    found: dict[str, list[bytes]] = {}
    total = [0, 0]
    for name, part, data, crc in file.db.execute(
        "SELECT name, part, bytes, crc FROM files ORDER BY name, part"
    ):
        right = all(isinstance(cell, bytes) for cell in (name, data)) and isinstance(part, int)
        if not right or crc != _part_crc(name, part, data):
            shown = name.decode(errors="replace") if isinstance(name, bytes) else name
            raise file.damaged(f"the file {shown!r} that it carries is not what was written")
        parts = found.setdefault(name.decode(), [])
        if part != len(parts):
            raise file.damaged(f"the file {name.decode()!r} that it carries is not complete")
        parts.append(data)
        total = [total[0] + 1, total[1] + crc]
    if total != state.files:
        raise file.damaged("a file that it carries is not complete")
    return {name: b"".join(parts) for name, parts in found.items()}


def _part_crc(name: bytes, part: int, data: bytes) -> int:
    return zlib.crc32(data, zlib.crc32(b"%s %d " % (name, part)))
