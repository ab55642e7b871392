"""The tables of an index, and the rows that say what it is and what its last commit left."""

from __future__ import annotations

import functools
import sqlite3
from typing import Any, NamedTuple

APPLICATION = 0x46484958  # "FHIX"
FORMAT = 1
REMEDY = "Restore it from a copy, or save what is left with: fisherhash index repair INDEX"
"""What to do about damage: the end of many a message."""
SCHEMA = """
CREATE TABLE meta (name TEXT PRIMARY KEY, value TEXT NOT NULL, crc INTEGER NOT NULL) WITHOUT ROWID;
CREATE TABLE items (id INTEGER PRIMARY KEY, key TEXT NOT NULL, path TEXT, size INTEGER,
    mtime_ns INTEGER, labels TEXT NOT NULL, metadata TEXT NOT NULL, crc INTEGER NOT NULL);
CREATE TABLE blocks (block INTEGER PRIMARY KEY, changed INTEGER NOT NULL, crc INTEGER NOT NULL,
    present BLOB NOT NULL, named BLOB NOT NULL, hashes BLOB NOT NULL, codes BLOB NOT NULL);
CREATE INDEX blocks_changed ON blocks (changed);
CREATE TABLE notes (kind TEXT NOT NULL, name TEXT NOT NULL, value TEXT NOT NULL,
    crc INTEGER NOT NULL, PRIMARY KEY (kind, name)) WITHOUT ROWID;
CREATE TABLE files (name TEXT NOT NULL, part INTEGER NOT NULL, bytes BLOB NOT NULL,
    crc INTEGER NOT NULL, PRIMARY KEY (name, part));
"""
_MOST = 1 << 62


class State(NamedTuple):
    """What the last commit left.

    Attributes:
        commit: its number.
        next_id: the id of the next new item.
        live: items.
        blocks: rows of the table of blocks.
        blocks_sum: sum of their checksums.
        notes: number and sum of the checksums of the notes of each kind.
        files: number and sum of the checksums of the parts of files.
    """

    commit: int = 1
    next_id: int = 0
    live: int = 0
    blocks: int = 0
    blocks_sum: int = 0
    notes: dict[str, list[int]] = {}  # noqa: RUF012 (never changed, only replaced)
    files: list[int] = [0, 0]  # noqa: RUF012

    @classmethod
    def read(cls, value: Any) -> State:
        """A state from JSON; a checksum does not prove that a writer stored it."""
        state = cls(**value)
        numbers = [*state[:5], *state.files, *(n for pair in state.notes.values() for n in pair)]
        if not all(type(number) is int and 0 <= number < _MOST for number in numbers):
            raise ValueError("a number is out of range")
        if {len(state.files), *map(len, state.notes.values())} != {2}:
            raise ValueError("a sum is missing")
        return state


def check_facts(value: Any) -> dict[str, Any]:
    """What an index is: ``bits``, ``fingerprint`` and ``model``, if a writer could store it."""
    bits, fingerprint, model = (value[name] for name in ("bits", "fingerprint", "model"))
    if type(bits) is not int or not 1 <= bits <= 1024:
        raise ValueError("bits is out of range")
    if not isinstance(fingerprint, str | None) or not isinstance(model, dict):
        raise ValueError("the fingerprint or the model is none")
    return value


@functools.cache
def expected_schema() -> frozenset[tuple[str, ...]]:
    """The schema of every index."""
    db = sqlite3.connect(":memory:")
    try:
        db.text_factory = bytes
        db.executescript(SCHEMA)
        return schema_of(db)
    finally:
        db.close()


def schema_of(db: sqlite3.Connection) -> frozenset[tuple[str, ...]]:
    """The tables, indexes and more of a file, with the SQL that made them."""
    rows = db.execute("SELECT type, name, tbl_name, sql FROM sqlite_master LIMIT 100")
    cells = (tuple((cell or b"").decode(errors="replace") for cell in row) for row in rows)
    return frozenset(tuple(" ".join(cell.split()) for cell in row) for row in cells)
