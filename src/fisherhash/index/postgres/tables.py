"""The tables on the server, and one commit to them: one per index, and three that all share."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from psycopg import errors as pg_errors

from fisherhash.codes import code_bytes
from fisherhash.errors import FisherhashError, UsageError
from fisherhash.index.base import Files
from fisherhash.index.checks import CheckedEntry, NoteTexts
from fisherhash.index.items import Codes, Ids, Item
from fisherhash.index.postgres.connect import Address, Cursor
from fisherhash.index.postgres.sql import loaded_json, loaded_text, stored_json, stored_text
from fisherhash.index.server import digest_of

FORMAT = 1
_LOCK = 7_235_421_908
"""Of the advisory lock that one process holds while it creates the tables that indexes share."""
_SHARED = """
CREATE TABLE IF NOT EXISTS fisherhash_indexes (
    name text PRIMARY KEY,
    format integer NOT NULL,
    bits integer NOT NULL,
    fingerprint text,
    model text NOT NULL,
    digest text,
    commit bigint NOT NULL DEFAULT 0,
    next_id bigint NOT NULL DEFAULT 0,
    graph text);
CREATE TABLE IF NOT EXISTS fisherhash_notes (
    index_name text NOT NULL REFERENCES fisherhash_indexes ON DELETE CASCADE,
    kind text COLLATE "C" NOT NULL,
    name text COLLATE "C" NOT NULL,
    value text NOT NULL,
    PRIMARY KEY (index_name, kind, name));
CREATE TABLE IF NOT EXISTS fisherhash_files (
    index_name text NOT NULL REFERENCES fisherhash_indexes ON DELETE CASCADE,
    name text NOT NULL,
    data bytea NOT NULL,
    PRIMARY KEY (index_name, name))"""
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


class Facts(NamedTuple):
    """What the shared table has about an index."""

    format: int
    bits: int
    fingerprint: str | None
    model: dict[str, Any]
    digest: str | None
    commit: int
    next_id: int
    graph: dict[str, Any] | None


def create_index(cursor: Cursor, address: Address, facts: dict[str, Any], files: Files) -> None:
    """Create the table of an index and what belongs to it."""
    if not exists(cursor, "fisherhash_indexes"):
        cursor.execute("SELECT pg_advisory_xact_lock(%s)", [_LOCK])
        try:
            cursor.execute("CREATE EXTENSION IF NOT EXISTS vector")
        except (pg_errors.InsufficientPrivilege, pg_errors.UndefinedFile) as error:
            raise FisherhashError(
                f"{address.uri} needs the extension pgvector ({error.diag.message_primary}). "
                "Install it on the server, then let an administrator run: CREATE EXTENSION vector"
            ) from error
        for statement in _SHARED.split(";"):
            cursor.execute(statement.encode())
    try:
        address.run(cursor, _TABLE % facts["bits"])
    except (pg_errors.DuplicateTable, pg_errors.UniqueViolation) as error:
        raise UsageError(
            f"{address.uri} exists already: there is a table {address.table}"
        ) from error
    # What is left of an index whose table was dropped by hand.
    cursor.execute("DELETE FROM fisherhash_indexes WHERE name = %s", [address.table])
    cursor.execute(
        "INSERT INTO fisherhash_indexes (name, format, bits, fingerprint, model, digest)"
        " VALUES (%s, %s, %s, %s, %s, %s)",
        [
            address.table,
            FORMAT,
            facts["bits"],
            facts["fingerprint"],
            json.dumps(facts["model"]),
            digest_of(files),
        ],
    )
    for name, data in files.items():
        cursor.execute(
            "INSERT INTO fisherhash_files VALUES (%s, %s, %s)", [address.table, name, data]
        )


def exists(cursor: Cursor, name: str) -> bool:
    """Whether there is a table or an index of that name."""
    row = cursor.execute("SELECT to_regclass(%s) IS NOT NULL", [f'"{name}"']).fetchone()
    return bool(row and row[0])


def read_facts(cursor: Cursor, address: Address, *, lock: bool = False) -> Facts | None:
    """What the shared table has about an index; ``lock`` lets no other process change it."""
    query = f"SELECT {', '.join(Facts._fields)} FROM fisherhash_indexes WHERE name = %s"
    row = cursor.execute((query + lock * " FOR UPDATE").encode(), [address.table]).fetchone()
    if row is None:
        return None
    facts = Facts(*row)
    graph = None if facts.graph is None else json.loads(str(facts.graph))
    return facts._replace(model=json.loads(str(facts.model)), graph=graph)


def bit_texts(codes: Codes, bits: int) -> list[str]:
    """Codes as PostgreSQL writes bit strings.

    >>> bit_texts(np.array([[160]], np.uint8), 3)
    ['101']
    """
    digits = (np.unpackbits(codes, axis=1, count=bits) + ord("0")).tobytes().decode()
    return [digits[start : start + bits] for start in range(0, len(digits), bits)]


class Change:
    """One commit in the making."""

    def __init__(self, address: Address, bits: int, cursor: Cursor, next_id: int) -> None:
        self._address, self._bits, self._cursor = address, bits, cursor
        self.next_id = next_id

    def ids_of(self, keys: list[str]) -> dict[str, int]:
        """Return the ids of those keys that exist."""
        query = "SELECT key, id FROM {table} WHERE key = ANY(%s::text[])"
        rows = self._address.run(self._cursor, query, [list(map(stored_text, keys))])
        return {loaded_text(key): id_ for key, id_ in rows}

    def insert(self, ids: Sequence[int], entries: list[CheckedEntry]) -> None:
        """Add items with keys."""
        if not entries:
            return
        columns = "id, key, path, size, mtime_ns, labels, metadata, code"
        query = self._address.sql(f"COPY {{table}} ({columns}) FROM STDIN")
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
            self._address.sql(f"UPDATE {{table}} SET {sets} WHERE id = %s"),
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
        query = self._address.sql("COPY {table} (id, code) FROM STDIN")
        with self._cursor.copy(query) as copy:
            for start in range(0, len(ids), STEP):
                part = slice(start, start + STEP)
                rows = zip(ids[part].tolist(), bit_texts(codes[part], self._bits), strict=True)
                copy.write("".join(f"{id_}\t{bits}\n" for id_, bits in rows))

    def delete(self, keys: list[str], ids: Ids) -> dict[int, str | None]:
        """Remove items; returns the keys of those that were there, by id."""
        rows = self._address.run(
            self._cursor,
            "DELETE FROM {table} WHERE key = ANY(%s::text[]) OR id = ANY(%s::bigint[])"
            " RETURNING id, key",
            [list(map(stored_text, keys)), ids.tolist()],
        )
        return {id_: None if key is None else loaded_text(key) for id_, key in rows}

    def write_notes(self, notes: NoteTexts) -> None:
        """Write and remove notes."""
        rows = [(self._address.table, *map(stored_text, name), v) for name, v in notes.items()]
        self._cursor.executemany(
            "DELETE FROM fisherhash_notes WHERE index_name = %s AND kind = %s AND name = %s",
            [row[:3] for row in rows],
        )
        self._cursor.executemany(
            "INSERT INTO fisherhash_notes VALUES (%s, %s, %s, %s)",
            [row for row in rows if row[3] is not None],
        )


def item_of(row: Sequence[Any]) -> Item:
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
