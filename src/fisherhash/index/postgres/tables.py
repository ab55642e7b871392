"""One table per index, one of documents that all indexes of a database share, and changes."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from psycopg import errors as pg_errors

from fisherhash.codes import code_bytes
from fisherhash.errors import FisherhashError, UsageError
from fisherhash.index.base import Files
from fisherhash.index.checks import CheckedEntry, NoteTexts
from fisherhash.index.items import Codes, Ids, Item
from fisherhash.index.postgres.connect import Cursor, Database
from fisherhash.index.postgres.sql import loaded_json, loaded_text, stored_json, stored_text
from fisherhash.index.server import Facts

_LOCK = 7_235_421_908
"""Of the advisory lock that one process holds while it creates the table that indexes share."""
_DOCUMENTS = """CREATE TABLE IF NOT EXISTS fisherhash_documents (
    index_name text NOT NULL,
    kind text COLLATE "C" NOT NULL,
    name text COLLATE "C" NOT NULL,
    value bytea NOT NULL,
    PRIMARY KEY (index_name, kind, name))"""
_TABLE = """CREATE TABLE {table} (
    id bigint PRIMARY KEY,
    code bit(%d) NOT NULL,
    key text COLLATE "C" UNIQUE,
    path text COLLATE "C",
    size bigint,
    mtime_ns bigint,
    labels text[] NOT NULL DEFAULT '{}',
    metadata jsonb NOT NULL DEFAULT '{}')"""
COLUMNS = "id, code, key, path, size, mtime_ns, labels, metadata::text"
STEP = 1 << 12
FACTS, FILE = "facts", "file"
"""Kinds of documents beside notes, whose kinds begin with a slash."""


def create_index(cursor: Cursor, database: Database, facts: Facts, files: Files) -> None:
    """Create the table of an index, and its documents."""
    if not exists(cursor, "fisherhash_documents"):
        cursor.execute("SELECT pg_advisory_xact_lock(%s)", [_LOCK])
        try:
            cursor.execute("CREATE EXTENSION IF NOT EXISTS vector")
        except (pg_errors.InsufficientPrivilege, pg_errors.UndefinedFile) as error:
            raise FisherhashError(
                f"{database.uri} needs the extension pgvector ({error.diag.message_primary}). "
                "Install it on the server, then let an administrator run: CREATE EXTENSION vector"
            ) from error
        cursor.execute(_DOCUMENTS)
    try:
        database.run(cursor, _TABLE % facts.bits)
    except (pg_errors.DuplicateTable, pg_errors.UniqueViolation) as error:
        raise UsageError(
            f"{database.uri} exists already: there is a table {database.table}"
        ) from error
    # What is left of an index whose table was dropped by hand.
    cursor.execute("DELETE FROM fisherhash_documents WHERE index_name = %s", [database.table])
    documents = {(FACTS, ""): facts.to_json().encode()}
    documents |= {(FILE, name): data for name, data in files.items()}
    write_documents(cursor, database.table, documents)


def read_documents(cursor: Cursor, table: str, kind: str) -> dict[str, bytes]:
    """The documents of a kind by name."""
    query = (
        "SELECT name, value FROM fisherhash_documents WHERE index_name = %s AND kind = %s"
        " ORDER BY name"
    )
    return dict(cursor.execute(query, [table, kind]).fetchall())


def write_documents(
    cursor: Cursor, table: str, documents: Mapping[tuple[str, str], bytes | None]
) -> None:
    """Write documents by (kind, name); None removes one."""
    rows = [(table, *name, value) for name, value in documents.items()]
    cursor.executemany(
        "INSERT INTO fisherhash_documents VALUES (%s, %s, %s, %s)"
        " ON CONFLICT (index_name, kind, name) DO UPDATE SET value = excluded.value",
        [row for row in rows if row[3] is not None],
    )
    cursor.executemany(
        "DELETE FROM fisherhash_documents WHERE index_name = %s AND kind = %s AND name = %s",
        [row[:3] for row in rows if row[3] is None],
    )


def exists(cursor: Cursor, name: str) -> bool:
    """Whether there is a table or an index of that name."""
    row = cursor.execute("SELECT to_regclass(%s) IS NOT NULL", [f'"{name}"']).fetchone()
    return bool(row and row[0])


def bit_texts(codes: Codes, bits: int) -> list[str]:
    """Codes as PostgreSQL writes bit strings.

    >>> bit_texts(np.array([[160]], np.uint8), 3)
    ['101']
    """
    digits = (np.unpackbits(codes, axis=1, count=bits) + ord("0")).tobytes().decode()
    return [digits[start : start + bits] for start in range(0, len(digits), bits)]


class PostgresChange:
    """One commit in the making."""

    def __init__(self, database: Database, cursor: Cursor, facts: Facts) -> None:
        self._database, self._cursor, self._bits = database, cursor, facts.bits
        self.next_id = facts.next_id

    def ids_of(self, keys: list[str]) -> dict[str, int]:
        """Return the ids of those keys that exist."""
        query = "SELECT key, id FROM {table} WHERE key = ANY(%s::text[])"
        rows = self._database.run(self._cursor, query, [list(map(stored_text, keys))])
        return {loaded_text(key): id_ for key, id_ in rows}

    def insert(self, ids: Sequence[int], entries: list[CheckedEntry]) -> None:
        """Add items with keys."""
        if not entries:
            return
        columns = "id, key, path, size, mtime_ns, labels, metadata, code"
        query = self._database.sql(f"COPY {{table}} ({columns}) FROM STDIN")
        with self._cursor.copy(query) as copy:
            for id_, entry, row in zip(ids, entries, self._rows(entries), strict=True):
                path, size, mtime_ns, labels, metadata, code = row
                row = (path, size, mtime_ns, labels or [], metadata or "{}", code)
                copy.write_row((id_, stored_text(entry.key), *row))

    def update(self, entries: dict[int, CheckedEntry]) -> None:
        """Change the fields that are given."""
        types = {"path": "text", "size": "bigint", "mtime_ns": "bigint", "labels": "text[]"}
        types |= {"metadata": "jsonb", "code": f"bit({self._bits})"}
        sets = ", ".join(f"{name} = coalesce(%s::{t}, {name})" for name, t in types.items())
        rows = zip(self._rows(list(entries.values())), entries, strict=True)
        self._cursor.executemany(
            self._database.sql(f"UPDATE {{table}} SET {sets} WHERE id = %s"),
            [(*row, id_) for row, id_ in rows],
        )

    def _rows(self, entries: list[CheckedEntry]) -> Iterator[tuple[Any, ...]]:
        """The fields of entries after their keys, as they are stored."""
        data = b"".join(entry.code or b"" for entry in entries)
        codes = np.frombuffer(data, np.uint8).reshape(-1, code_bytes(self._bits))
        bits = iter(bit_texts(codes, self._bits))
        for entry in entries:
            yield (
                None if entry.path is None else stored_text(entry.path),
                entry.size,
                entry.mtime_ns,
                None if entry.labels is None else list(map(stored_text, json.loads(entry.labels))),
                None if entry.metadata is None else stored_json(entry.metadata),
                None if entry.code is None else next(bits),
            )

    def insert_codes(self, ids: Ids, codes: Codes) -> None:
        """Add codes without keys."""
        query = self._database.sql("COPY {table} (id, code) FROM STDIN")
        with self._cursor.copy(query) as copy:
            for start in range(0, len(ids), STEP):
                part = slice(start, start + STEP)
                rows = zip(ids[part].tolist(), bit_texts(codes[part], self._bits), strict=True)
                copy.write("".join(f"{id_}\t{bits}\n" for id_, bits in rows))

    def delete(self, keys: list[str], ids: Ids) -> dict[int, str | None]:
        """Remove items; returns the keys of those that were there, by id."""
        rows = self._database.run(
            self._cursor,
            "DELETE FROM {table} WHERE key = ANY(%s::text[]) OR id = ANY(%s::bigint[])"
            " RETURNING id, key",
            [list(map(stored_text, keys)), ids.tolist()],
        )
        return {id_: None if key is None else loaded_text(key) for id_, key in rows}

    def write_notes(self, notes: NoteTexts) -> None:
        """Write and remove notes."""
        documents = {
            (note_kind(kind), stored_text(name)): None if text is None else text.encode()
            for (kind, name), text in notes.items()
        }
        write_documents(self._cursor, self._database.table, documents)


def note_kind(kind: str) -> str:
    """The kind of documents that holds the notes of a kind."""
    return "/" + stored_text(kind)


def item_of_postgres(row: Sequence[Any]) -> Item:
    """The item of a row of :data:`COLUMNS`."""
    id_, code, key, path, size, mtime_ns, labels, metadata = row
    if key is None:
        return Item(id_, code)
    return Item(
        id_,
        code,
        loaded_text(key),
        None if path is None else loaded_text(path),
        size,
        mtime_ns,
        tuple(map(loaded_text, labels)),
        {} if metadata == "{}" else loaded_json(metadata),
    )
