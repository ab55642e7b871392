"""Rows of items and notes as they are stored: texts, and checksums that SQLite helps to compare.

A row's checksum is the CRC-32 of one text of all its columns and their types. SQLite joins them
when a row is read, and Python sums up: so a million rows are checked in a second.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterable
from typing import Any, NamedTuple

from fisherhash.index.checks import CheckedEntry
from fisherhash.index.items import Ids, Item
from fisherhash.index.local.file import IndexFile
from fisherhash.index.local.schema import State

SUMMED = (
    "CAST(id || ' ' || coalesce(size, '-') || ' ' || coalesce(mtime_ns, '-') || ' ' || "
    "typeof(key) || typeof(path) || typeof(labels) || typeof(metadata) || ' ' || key || char(10) "
    "|| coalesce(path, '') || char(10) || labels || char(10) || metadata AS BLOB)"
)
"""What the checksum of a row of ``items`` covers."""
COLUMNS = f"id, key, path, size, mtime_ns, labels, metadata, crc, {SUMMED}"
_STEP = 4096
PUT_ITEM = "INSERT OR REPLACE INTO items VALUES (?, ?, ?, ?, ?, ?, ?, ?)"


class ItemRow(NamedTuple):
    """One item with a key; labels and metadata are JSON in ASCII."""

    id: int
    key: str
    path: str | None = None
    size: int | None = None
    mtime_ns: int | None = None
    labels: str = "[]"
    metadata: str = "{}"

    @classmethod
    def from_entry(cls, id_: int, entry: CheckedEntry) -> ItemRow:
        """The row of a new item."""
        return cls(id_, *entry[:4], entry.labels or "[]", entry.metadata or "{}")

    def updated(self, entry: CheckedEntry) -> ItemRow:
        """The row with the fields that an entry has; the others stay."""
        given = zip(self._fields[2:], entry[1:6], strict=True)
        return self._replace(**{name: value for name, value in given if value is not None})

    def stored(self) -> tuple[Any, ...]:
        """The columns as they are stored, with their checksum."""
        key, path = encode_text(self.key), None if self.path is None else encode_text(self.path)
        size, mtime = ("-" if number is None else number for number in self[3:5])
        kinds = f"{_KINDS[type(key)]}{_KINDS[type(path)]}texttext"
        head = f"{self.id} {size} {mtime} {kinds} ".encode()
        # As bytes, a text and the name of a file that is not UTF-8 look alike.
        texts = "\n".join((self.key, self.path or "", self.labels, self.metadata))
        crc = zlib.crc32(texts.encode(errors="surrogateescape"), zlib.crc32(head))
        return self.id, key, path, *self[3:], crc


def read_row(columns: Iterable[Any]) -> ItemRow:
    """A row from :data:`COLUMNS`.

    Raises:
        ValueError: it is not what was written; the message says what is wrong.
    """
    id_, key, path, size, mtime_ns, labels, metadata, crc, summed = columns
    if summed is None or zlib.crc32(summed) != crc:
        raise ValueError("does not match its checksum")
    path = None if path is None else decode_text(path)
    return ItemRow(id_, decode_text(key), path, size, mtime_ns, labels.decode(), metadata.decode())


def read_rows(file: IndexFile, ids: Ids, *, singly: bool = False) -> dict[int, ItemRow]:
    """The rows of items that have one, by id.

    Args:
        file: inside a transaction.
        ids: ascending.
        singly: find each row by its id, also where that is slower: then damage beside it is no
            obstacle.

    Raises:
        DamagedError: a row is missing, or it is not what was written.
    """
    found: dict[int, ItemRow] = {}
    for start in range(0, len(ids), _STEP):
        some = ids[start : start + _STEP].tolist()
        if some[-1] - some[0] < 2 * len(some) and not singly:
            which, values = "BETWEEN ? AND ?", [some[0], some[-1]]
        else:
            which, values = f"IN ({','.join('?' * len(some))})", some
        wanted = set(some)
        for row in file.db.execute(f"SELECT {COLUMNS} FROM items WHERE id {which}", values):
            if row[0] in wanted:
                try:
                    found[row[0]] = read_row(row)
                except ValueError as error:
                    raise file.damaged(row_problem(row[0], row[1], error)) from None
        if missing := wanted - found.keys():
            raise file.damaged(row_problem(min(missing), None, "is missing"))
    return found


def check_rows(file: IndexFile, named: Ids) -> None:
    """Check all rows, before a filter uses them for the first time.

    Raises:
        DamagedError: they are not what was written, or not those of the items in ``named``.
    """
    place = 0
    rows = file.db.execute(f"SELECT id, crc, {SUMMED} FROM items ORDER BY id")
    for part in iter(lambda: rows.fetchmany(_STEP), []):
        ids, sums, summed = zip(*part, strict=True)
        found = tuple(None if text is None else zlib.crc32(text) for text in summed)
        if found != sums:
            wrong = next(i for i, a, b in zip(ids, found, sums, strict=True) if a != b)
            raise file.damaged(row_problem(wrong, None, "does not match its checksum"))
        expected = named[place : place + len(ids)].tolist()
        if list(ids) != expected:
            raise file.damaged(other_rows(ids, expected))
        place += len(ids)
    if place < len(named):
        raise file.damaged(row_problem(int(named[place]), None, "is missing"))


def other_rows(found: Iterable[int], expected: Iterable[int]) -> str:
    """What is wrong with rows that are not those of the items."""
    rows, items = set(found), set(expected)
    if missing := items - rows:
        return row_problem(min(missing), None, "is missing")
    if more := rows - items:
        return row_problem(min(more), None, "belongs to no item")
    return "its rows of items are not in order"


def item_of(row: ItemRow, code: bytes) -> Item:
    """An item from its row and its code.

    Raises:
        ValueError: the row is none that a writer stored, though its checksum fits.
    """
    id_, key, path, size, mtime_ns, labels, metadata = row
    # Most items have neither, and a search fetches many items.
    names: Any = [] if labels == "[]" else json.loads(labels)
    fields: Any = {} if metadata == "{}" else json.loads(metadata)
    if not (isinstance(names, list) and all(isinstance(name, str) for name in names)):
        raise ValueError("holds no labels")
    if not isinstance(fields, dict):
        raise ValueError("holds no metadata")
    return Item(id_, code, key, path, size, mtime_ns, tuple(names), fields)


def key_hash(key: str) -> int:
    """What a block of codes knows about the key of an item."""
    return zlib.crc32(key.encode(errors="surrogateescape"))


def note_crc(kind: bytes, name: bytes, value: bytes) -> int:
    """Checksum of a note."""
    return zlib.crc32(b"\0".join((kind, name, value)))


def is_note(kind: Any, name: Any, value: Any, crc: Any) -> bool:
    """Whether a stored note is what was written."""
    are_texts = all(isinstance(cell, bytes) for cell in (kind, name, value))
    return are_texts and note_crc(kind, name, value) == crc


def read_notes(file: IndexFile, state: State, kind: str) -> dict[str, str]:
    """The notes of a kind as JSON texts, by name.

    Raises:
        DamagedError: they are not those that were written.
    """
    stored, found, total = encode_text(kind), {}, 0
    query = "SELECT name, value, crc FROM notes WHERE kind = ?"
    for name, value, crc in file.db.execute(query, (stored,)):
        if not is_note(text_bytes(stored), name, value, crc):
            shown = decode_text(name) if isinstance(name, bytes) else name
            raise file.damaged(f"the note {shown!r} of the kind {kind!r}")
        found[decode_text(name)], total = value.decode(), total + crc
    if [len(found), total] != state.notes.get(kind, [0, 0]):
        raise file.damaged(f"the notes of the kind {kind!r} are not complete")
    return found


def row_problem(id_: int, key: bytes | None, what: object) -> str:
    """What to say about the row of an item."""
    name = f" ({decode_text(key)!r})" if isinstance(key, bytes) else ""
    return f"the row of item {id_}{name} {what}"


def encode_text(text: str) -> str | bytes:
    """Text as SQLite stores it; the name of a file that is not UTF-8 is stored as its bytes.

    >>> encode_text("caf\\udce9")
    b'caf\\xe9'
    """
    try:
        text.encode()
        return text
    except UnicodeEncodeError:
        stored = text.encode(errors="surrogateescape")
    try:
        # Bytes that are UTF-8 after all are the same name, and stored the same way.
        return stored.decode()
    except UnicodeDecodeError:
        return stored


def decode_text(stored: bytes) -> str:
    """The inverse of :func:`encode_text`, as a connection returns it."""
    return stored.decode(errors="surrogateescape")


def text_bytes(stored: str | bytes) -> bytes:
    """The bytes of a stored text."""
    return stored.encode() if isinstance(stored, str) else stored


_KINDS = {str: "text", bytes: "blob", type(None): "null"}
