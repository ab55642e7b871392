"""Rows of the catalogue's tables of items and notes, as they are stored, with their checksums."""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from fisherhash.index.base import DamagedError
from fisherhash.index.checks import CheckedEntry
from fisherhash.index.items import Item
from fisherhash.index.local.schema import REMEDY


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


def decode_text(value: str | bytes) -> str:
    """The inverse of :func:`encode_text`."""
    return value if isinstance(value, str) else value.decode(errors="surrogateescape")


def row_crc(numbers: Sequence[Any], texts: Sequence[Any]) -> int:
    """Checksum of a row as stored: its numbers, then its texts."""
    first = " ".join(map(str, numbers))
    try:
        # The usual row, and a search checks many.
        return zlib.crc32("\0".join((first, *texts)).encode())
    except TypeError:
        parts = ("\1" if text is None else text for text in (first, *texts))
        encoded = (part.encode() if isinstance(part, str) else part for part in parts)
        return zlib.crc32(b"\0".join(encoded))


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

    def stored_columns(self) -> tuple[Any, ...]:
        """The row as it is stored, with its checksum."""
        path = None if self.path is None else encode_text(self.path)
        columns = (self.id, encode_text(self.key), path, *self[3:])
        return *columns, item_crc(columns)

    @classmethod
    def from_stored(cls, columns: Sequence[Any]) -> ItemRow:
        """A row from the columns of a stored row that was checked."""
        id_, key, path, *rest = columns[:7]
        return cls(id_, decode_text(key), None if path is None else decode_text(path), *rest)


def item_of(
    id_: int, columns: Sequence[Any] | None, code: bytes, fine: bytes | None = None
) -> Item:
    """An item from its stored row that was checked, if it has one, and its codes."""
    if columns is None:
        return Item(id_, code, fine=fine)
    _, key, path, size, mtime_ns, labels, metadata, _ = columns
    return Item(
        id_,
        code,
        decode_text(key),
        None if path is None else decode_text(path),
        size,
        mtime_ns,
        # Most items have neither, and a search fetches many items.
        () if labels == "[]" else tuple(parsed(id_, labels, list)),
        {} if metadata == "{}" else parsed(id_, metadata, dict),
        fine,
    )


def item_crc(columns: Sequence[Any]) -> int:
    """Checksum of (id, key, path, size, mtime_ns, labels, metadata) as stored."""
    id_, key, path, size, mtime_ns, labels, metadata = columns
    return row_crc((id_, size, mtime_ns), (key, path, labels, metadata))


def wrong_item(rows: Iterable[Sequence[Any]]) -> Sequence[Any] | None:
    """The first stored row of an item that is not what was written."""
    for row in rows:
        id_, key, path, size, mtime_ns, labels, metadata, crc = row
        try:
            # The usual row, at once: a search checks many.
            text = "\0".join((f"{id_} {size} {mtime_ns}", key, path, labels, metadata))
            if zlib.crc32(text.encode()) == crc:
                continue
        except (TypeError, UnicodeEncodeError):
            pass
        try:
            if item_crc(row[:-1]) == crc:
                continue
        except (TypeError, ValueError, AttributeError, OverflowError):
            pass
        return row
    return None


def note_columns(kind: str, name: str, value: str) -> tuple[Any, ...]:
    """The row of a note as it is stored, with its checksum."""
    columns = (encode_text(kind), encode_text(name), value)
    return *columns, row_crc((), columns)


def parsed(id_: int, text: Any, kind: type[list[Any]] | type[dict[str, Any]]) -> Any:
    """The JSON of a stored row; a checksum does not prove that it is JSON."""
    try:
        value = json.loads(text)
    except (ValueError, TypeError, RecursionError):
        value = None
    if not isinstance(value, kind) or (kind is list and not all(isinstance(v, str) for v in value)):
        raise DamagedError(
            f"the row of item {id_} in the catalogue is damaged: it holds no labels or no "
            f"metadata. {REMEDY}"
        )
    return value
