"""Tables and rows of the catalogue.

``facts`` holds what the index is and the state of the last commit, ``files`` the code files with
their committed lengths and checksums, ``removed`` one bit per removed position, ``items`` one row
per item with a key, and ``notes`` small JSON documents. Every row carries a checksum of its
content. The state holds the number and the sum of these checksums, so that a row that changed,
vanished or is an old one is noticed.

Format 1 had no notes: it kept them in two files beside the catalogue, see format_1.py. Format 2 had
no code files of the kind "runs". Format 4 has a second code behind every code of a code file; an
index without second codes stays in format 3, which earlier versions can read.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping
from typing import Any, NamedTuple

CATALOGUE = "catalogue.sqlite"
SUMS = "catalogue.sums"
CATALOGUE_FORMAT = 4
PLAIN_FORMAT = 3
"""Of an index without second codes."""
APPLICATION = 0x46484958  # "FHIX"
REMEDY = "Restore the index from a copy, or save what is left with: fisherhash index repair INDEX"
"""What to do about damage: the end of many a message."""
REMOVED_BLOCK = 1 << 16
"""Positions whose removed bits are stored in one row."""

NOTES_SCHEMA = """
CREATE TABLE notes (kind TEXT NOT NULL, name TEXT NOT NULL, value TEXT NOT NULL,
    crc INTEGER NOT NULL, PRIMARY KEY (kind, name)) WITHOUT ROWID;
"""
SCHEMA = (
    """
CREATE TABLE facts (name TEXT PRIMARY KEY, value TEXT NOT NULL, crc INTEGER NOT NULL);
CREATE TABLE files (number INTEGER PRIMARY KEY, kind TEXT NOT NULL, first_id INTEGER NOT NULL,
    length INTEGER NOT NULL, removed INTEGER NOT NULL, code_sums BLOB NOT NULL,
    id_sums BLOB NOT NULL, crc INTEGER NOT NULL);
CREATE TABLE removed (file INTEGER NOT NULL, block INTEGER NOT NULL, changed INTEGER NOT NULL,
    bits BLOB NOT NULL, crc INTEGER NOT NULL, PRIMARY KEY (file, block)) WITHOUT ROWID;
CREATE TABLE items (id INTEGER PRIMARY KEY, key TEXT NOT NULL UNIQUE, path TEXT, size INTEGER,
    mtime_ns INTEGER, labels TEXT NOT NULL, metadata TEXT NOT NULL, crc INTEGER NOT NULL);
"""
    + NOTES_SCHEMA
)
_MOST = 1 << 62
KINDS = ("implied", "runs", "sorted", "loose")
MOST_CODES = (1 << 31) - 1
"""Codes in one file, as many as a search takes."""
ITEM_COLUMNS = "id, key, path, size, mtime_ns, labels, metadata, crc"
INSERT_ITEM = f"INSERT INTO items ({ITEM_COLUMNS}) VALUES (?, ?, ?, ?, ?, ?, ?, ?)"
DELETE_ITEM = "DELETE FROM items WHERE id = ?"
PUT_FACT = "INSERT OR REPLACE INTO facts (name, value, crc) VALUES (?, ?, ?)"
PUT_FILE = """
INSERT OR REPLACE INTO files (number, kind, first_id, length, removed, code_sums, id_sums, crc)
    VALUES (?, ?, ?, ?, ?, ?, ?, ?)
"""
PUT_REMOVED = (
    "INSERT OR REPLACE INTO removed (file, block, changed, bits, crc) VALUES (?, ?, ?, ?, ?)"
)
DELETE_FILE = ("DELETE FROM files WHERE number = ?", "DELETE FROM removed WHERE file = ?")
"""A code file goes with its removed bits."""


class State(NamedTuple):
    """What the last commit left.

    Attributes:
        commit: its number.
        next_id: the id of the next new item.
        next_file: the number of the next code file.
        live: items that can be found.
        rows: items with a key.
        rows_sum: sum of their rows' checksums, modulo 2**64.
        files: code files.
        files_sum: sum of their rows' checksums.
        notes: notes.
        notes_sum: sum of their rows' checksums.
    """

    commit: int = 1
    next_id: int = 0
    next_file: int = 1
    live: int = 0
    rows: int = 0
    rows_sum: int = 0
    files: int = 0
    files_sum: int = 0
    notes: int = 0
    notes_sum: int = 0


class FileRow(NamedTuple):
    """A code file as it was committed.

    Attributes:
        number: part of its name; never used again.
        kind: "implied" (ids are first_id + position), "runs" (ascending ids as runs, see runs.py),
            "sorted" (ascending ids, as formats 1 and 2 stored them) or "loose" (explicit ids in
            the order of the updates).
        first_id: id of position 0, where ids are implied.
        length: number of codes.
        removed: how many of them no longer count.
        code_sums: little-endian CRC-32 of each block of the file of codes.
        id_sums: the same of the file of ids.
    """

    number: int
    kind: str
    first_id: int
    length: int
    removed: int = 0
    code_sums: bytes = b""
    id_sums: bytes = b""

    def crc(self) -> int:
        """Checksum of the row."""
        text = f"{self.number} {self.kind} {self.first_id} {self.length} {self.removed} "
        return zlib.crc32(self.id_sums, zlib.crc32(self.code_sums, zlib.crc32(text.encode())))

    def problem(self) -> str | None:
        """What no writer would have stored, if anything; checksums can be computed by anybody."""
        numbers = (self.number, self.first_id, self.length, self.removed)
        if not all(isinstance(number, int) and 0 <= number <= _MOST for number in numbers):
            return "a number is out of range"
        if self.kind not in KINDS:
            return f"its kind is {str(self.kind)[:20]!r}"
        if self.length > MOST_CODES or self.removed > self.length:
            return f"{self.length} codes, of which {self.removed} are removed"
        if len(self.code_sums) % 4 or len(self.id_sums) % 4:
            return "its checksums are cut off"
        return None


class RemovedRow(NamedTuple):
    """Removed bits of one block of a file's positions: bit p % 8 of byte p // 8."""

    file: int
    block: int
    changed: int
    bits: bytes

    def crc(self) -> int:
        """Checksum of the row."""
        text = f"{self.file} {self.block} {self.changed}"
        return zlib.crc32(self.bits, zlib.crc32(text.encode()))


def format_of(facts: Mapping[str, Any]) -> int:
    """The format in which an index with these facts is stored."""
    return CATALOGUE_FORMAT if facts.get("fine_bits") else PLAIN_FORMAT


def fact_columns(name: str, facts: Mapping[str, Any]) -> tuple[str, str, int]:
    """The row of facts as it is stored, with its checksum."""
    text = json.dumps(facts)
    return name, text, zlib.crc32(text.encode())


def check_facts(name: str, facts: Any) -> dict[str, Any]:
    """The facts of a row ("index" or "state"), if a writer could have stored them.

    Raises:
        ValueError: none could; checksums can be computed by anybody.
    """
    if not isinstance(facts, Mapping):
        raise ValueError("it holds no JSON object")
    facts = dict(facts)
    if name == "state":
        if not set(facts) <= set(State._fields):
            raise ValueError("it has unknown fields")
        for field, value in facts.items():
            most = 1 << 64 if field.endswith("_sum") else _MOST
            if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < most:
                raise ValueError(f"{field} is out of range")
    elif name == "index":
        bits, fingerprint = facts.get("bits"), facts.get("fingerprint")
        if isinstance(bits, bool) or not isinstance(bits, int) or not 1 <= bits <= 1024:
            raise ValueError("bits is out of range")
        fine = facts.get("fine_bits", 0)
        if isinstance(fine, bool) or not isinstance(fine, int) or not 0 <= fine <= 1024:
            raise ValueError("fine_bits is out of range")
        known = "fingerprint" in facts and isinstance(facts.get("model"), dict)
        if not (known and isinstance(fingerprint, str | None)):
            raise ValueError("fingerprint or model is missing")
    elif not isinstance(facts.get("commits"), list):
        raise ValueError("it holds no list of commits")
    return facts
