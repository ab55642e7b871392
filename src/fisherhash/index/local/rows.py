"""Rows of the catalogue: a keyed item as it is stored, with its checksum."""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Mapping, Sequence
from itertools import repeat
from typing import Any, NamedTuple

from fisherhash.errors import UsageError
from fisherhash.index.base import Item


def encode_text(text: str) -> str | bytes:
    """Text as SQLite stores it; a file's name that is not UTF-8 is stored as its bytes.

    >>> encode_text("caf\\udce9")
    b'caf\\xe9'
    """
    try:
        text.encode()
        return text
    except UnicodeEncodeError:
        pass
    try:
        return text.encode(errors="surrogateescape")
    except UnicodeEncodeError:
        raise UsageError(f"{text!r} is neither text nor the name of a file") from None


def decode_text(value: str | bytes) -> str:
    """The inverse of :func:`encode_text`."""
    return value if isinstance(value, str) else value.decode(errors="surrogateescape")


def row_crc(columns: Sequence[Any]) -> int:
    """Checksum of (id, key, path, size, mtime_ns, labels, metadata) as stored."""
    id_, key, path, size, mtime_ns, labels, metadata = columns
    parts = [f"{id_} {size} {mtime_ns}".encode()]
    parts += [
        b"\1" if text is None else text.encode() if isinstance(text, str) else text
        for text in (key, path, labels, metadata)
    ]
    return zlib.crc32(b"\0".join(parts))


class Row(NamedTuple):
    """One keyed item; labels and metadata are JSON in ASCII."""

    id: int
    key: str
    path: str | None = None
    size: int | None = None
    mtime_ns: int | None = None
    labels: str = "[]"
    metadata: str = "{}"

    def stored_columns(self) -> tuple[Any, ...]:
        """As stored, with the checksum."""
        path = None if self.path is None else encode_text(self.path)
        columns = (self.id, encode_text(self.key), path, *self[3:])
        return *columns, row_crc(columns)

    def crc(self) -> int:
        """Checksum of the row."""
        return self.stored_columns()[-1]

    @classmethod
    def from_stored(cls, columns: Sequence[Any]) -> Row:
        """From the columns of a row that was read (and checked)."""
        id_, key, path, *rest = columns[:7]
        return cls(id_, decode_text(key), None if path is None else decode_text(path), *rest)

    def item(self) -> Item:
        """What the user sees."""
        return Item(
            self.id,
            self.key,
            self.path,
            self.size,
            self.mtime_ns,
            tuple(json.loads(self.labels)),
            json.loads(self.metadata),
        )


_NUMBERS = range(-(2**63), 2**63)
_COLUMNS = ("path", "size", "mtime_ns", "labels", "metadata")


def make_columns(
    keys: Sequence[str],
    paths: Sequence[Any] | None,
    sizes: Sequence[Any] | None,
    mtimes_ns: Sequence[Any] | None,
    labels: Sequence[Any] | None,
    metadata: Sequence[Any] | None,
) -> dict[str, list[Any]]:
    """Check what the user gave about items; only the columns that were given are in the answer."""
    if isinstance(keys, str):
        raise UsageError("keys must be a list of texts, got one text")
    seen: set[str] = set()
    for key in keys:
        if not isinstance(key, str) or not key:
            raise UsageError(f"a key must be a text that is not empty, got {key!r}")
        if key in seen:
            raise UsageError(f"the key {key!r} is there twice in one call")
        seen.add(key)
    makers = (_path, _number, _number, _labels, _metadata)
    columns: dict[str, list[Any]] = {}
    given = (paths, sizes, mtimes_ns, labels, metadata)
    for name, values, make in zip(_COLUMNS, given, makers, strict=True):
        if values is None:
            continue
        if isinstance(values, str | Mapping) or len(values) != len(keys):
            raise UsageError(f"{name} must be a list with one entry a key ({len(keys)})")
        columns[name] = [make(name, key, value) for key, value in zip(keys, values, strict=True)]
    return columns


def new_rows(first_id: int, keys: Sequence[str], columns: Mapping[str, list[Any]]) -> list[Row]:
    """Rows of new items with ids from ``first_id`` on."""
    empty = [repeat(value) for value in (None, None, None, "[]", "{}")]
    values = [columns.get(name, nothing) for name, nothing in zip(_COLUMNS, empty, strict=True)]
    return list(map(Row, range(first_id, first_id + len(keys)), keys, *values))


def changed_rows(rows: Sequence[Row], columns: Mapping[str, list[Any]]) -> list[Row]:
    """The rows with the columns that were given; the others stay."""
    return [
        row._replace(**{name: values[i] for name, values in columns.items()})
        for i, row in enumerate(rows)
    ]


def _path(_name: str, key: str, value: Any) -> str | None:
    if value is None or isinstance(value, str):
        return value
    try:
        return os.fsdecode(value)
    except TypeError:
        raise UsageError(f"the path of {key!r} must be a path, got {value!r}") from None


def _number(name: str, key: str, value: Any) -> int | None:
    if value is None:
        return None
    try:
        number = int(value)
    except (TypeError, ValueError):
        raise UsageError(f"the {name} of {key!r} must be a whole number, got {value!r}") from None
    if number not in _NUMBERS:
        raise UsageError(f"the {name} of {key!r} is too large: {value!r}")
    return number


def _labels(_name: str, key: str, value: Any) -> str:
    names = [] if value is None else [value] if isinstance(value, str) else list(value)
    for name in names:
        if not isinstance(name, str):
            raise UsageError(f"a label of {key!r} must be a text, got {name!r}")
    return json.dumps(names)


def _metadata(_name: str, key: str, value: Any) -> str:
    if value is not None and not isinstance(value, Mapping):
        raise UsageError(f"the metadata of {key!r} must be a mapping, got {value!r}")
    try:
        return json.dumps(dict(value or {}), allow_nan=False)
    except (TypeError, ValueError) as error:
        raise UsageError(f"the metadata of {key!r} cannot be written as JSON: {error}") from None
