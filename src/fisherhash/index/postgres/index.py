"""An index in a table of PostgreSQL: pgvector compares the codes, filters are SQL.

Every change is one transaction that first locks the row of its index, so several writers take turns
and ids are given once. Every read is one snapshot.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping
from typing import Any, Self

from fisherhash.errors import FisherhashError, UsageError
from fisherhash.index.base import SaveModel, Uri
from fisherhash.index.carried import pack_model
from fisherhash.index.checks import as_ids
from fisherhash.index.filters import All, Where, parse_filter
from fisherhash.index.items import (
    Codes,
    FileState,
    Ids,
    Item,
    Matches,
    Problem,
    Within,
    matches_of,
    within_of,
)
from fisherhash.index.postgres.change import TableChange
from fisherhash.index.postgres.connect import Connections, Cursor
from fisherhash.index.postgres.graph import build_graph
from fisherhash.index.postgres.place import Place, read_place
from fisherhash.index.postgres.reading import TableReader
from fisherhash.index.postgres.schema import (
    Facts,
    check_version,
    create_index,
    ensure_schema,
    one_value,
    read_archive,
    read_facts,
    schema_version,
)
from fisherhash.index.postgres.texts import loaded_text, stored_text
from fisherhash.index.server import ServerIndex


class PostgresIndex(ServerIndex):
    """An index in a table of PostgreSQL."""

    def __init__(self, place: Place, facts: Facts, connections: Connections, *, write: bool):
        self.uri, self.writable = place.uri, write
        self.bits, self.fingerprint, self.model = facts.bits, facts.fingerprint, facts.model
        self._place, self._connections = place, connections
        self._table = TableReader(place, connections, facts.bits)
        self._archive = facts.archive
        self.approximate = place.search == "hnsw"

    # Opening

    @classmethod
    def open_at(cls, uri: Uri, *, write: bool) -> Self:
        """See :meth:`Index.open`."""
        place = read_place(uri)
        connections = Connections(place)
        try:
            if write:
                with connections.writing() as cursor:
                    ensure_schema(cursor, place.uri, create=False)
            facts = _facts(connections, place)
            return cls(place, facts, connections, write=write)
        except BaseException:
            connections.close()
            raise

    @classmethod
    def create_at(cls, uri: Uri, facts: dict[str, Any], save_model: SaveModel | None) -> Self:
        """See :meth:`Index.create`."""
        place = read_place(uri)
        connections = Connections(place)
        try:
            if _is_taken(connections, place):
                raise UsageError(f"{place.uri} exists already: there is a table {place.table}")
            model = pack_model(save_model)
            with connections.writing() as cursor:
                create_index(cursor, place, facts, model)
        finally:
            connections.close()
        return cls.open_at(uri, write=True)

    @classmethod
    def exists_at(cls, uri: Uri) -> bool:
        """See :meth:`Index.exists`."""
        place = read_place(uri)
        with contextlib.closing(Connections(place)) as connections:
            return _is_taken(connections, place)

    @classmethod
    def is_index_at(cls, uri: Uri) -> bool:
        """See :meth:`Index.is_index`."""
        place = read_place(uri)
        with contextlib.closing(Connections(place)) as connections, connections.reading() as cursor:
            known = schema_version(cursor) is not None
            return known and read_facts(cursor, place) is not None

    def close(self) -> None:
        """See :meth:`Index.close`."""
        self._connections.close()

    # Changes

    @contextlib.contextmanager
    def _changing(self, fingerprint: str | None = None) -> Iterator[TableChange]:
        """One commit."""
        self._must_write()
        with self._connections.writing() as cursor:
            facts = read_facts(cursor, self._place, lock=True)
            if facts is None:
                raise FisherhashError(f"{self.uri} was deleted while it was open")
            self.fingerprint = facts.fingerprint
            self._check_model(fingerprint, unnamed_codes=facts.next_id > 0)
            change = TableChange(self._place, self.bits, cursor, facts)
            yield change
            change.finish(fingerprint)
        self.fingerprint = fingerprint or self.fingerprint

    def compact(self, *, seconds: float | None = None) -> dict[str, int]:
        """See :meth:`Index.compact`; a VACUUM, during which others may read and write."""
        self._must_write()
        with self._connections.reading() as cursor:
            dropped, before = self._facts(cursor).removed, self._table_bytes(cursor)
        with self._connections.connection() as connection:
            connection.read_only = None
            connection.autocommit = True
            try:
                connection.execute(self._place.sql("VACUUM (ANALYZE) {table}"))
            finally:
                if not connection.closed:
                    connection.autocommit = False
        with self._connections.writing() as cursor:
            cursor.execute(
                "UPDATE fisherhash_indexes SET removed = greatest(0, removed - %s) WHERE name = %s",
                [dropped, self._place.table],
            )
            after = self._table_bytes(cursor)
        return {"dropped": dropped, "bytes_before": before, "bytes_after": after, "left": 0}

    def _table_bytes(self, cursor: Cursor) -> int:
        cursor.execute("SELECT pg_relation_size(%s::regclass)", [self._place.quoted])
        return int(one_value(cursor))

    # Content

    def _found(self, keys: list[str], ids: list[int]) -> Mapping[str | int, Item]:
        return self._table.named(keys, ids)

    def items(self, where: Where | None = None) -> Iterator[Item]:
        """See :meth:`Index.items`; the snapshot is that of the call."""
        return self._table.items(parse_filter(where))

    def _scan(self, block: int) -> Iterator[tuple[Ids, Codes]]:
        return self._table.codes(block)

    def ids(self, where: Where | None = None) -> Ids:
        """See :meth:`Index.ids`."""
        rows = self._table.select(
            "SELECT id FROM {table} WHERE {test} ORDER BY id", parse_filter(where)
        )
        return as_ids(id_ for (id_,) in rows)

    def count(self, where: Where | None = None) -> int:
        """See :meth:`Index.count`."""
        return self._table.select("SELECT count(*) FROM {table} WHERE {test}", parse_filter(where))[
            0
        ][0]

    def files(self) -> dict[str, FileState]:
        """See :meth:`Index.files`."""
        query = (
            "SELECT key, size, mtime_ns, id FROM {table} WHERE {test} AND key IS NOT NULL"
            " ORDER BY id"
        )
        rows = self._table.select(query, All())
        return {loaded_text(key): FileState(*rest) for key, *rest in rows}

    def notes(self, kind: str) -> dict[str, Any]:
        """See :meth:`Index.notes`."""
        with self._connections.reading() as cursor:
            cursor.execute(
                "SELECT name, value FROM fisherhash_notes WHERE index_name = %s AND kind = %s"
                " ORDER BY name",
                [self._place.table, stored_text(kind)],
            )
            return {loaded_text(name): json.loads(value) for name, value in cursor}

    def info(self) -> dict[str, Any]:
        """See :meth:`Index.info`."""
        with self._connections.reading() as cursor:
            facts = self._facts(cursor)
            self.fingerprint = facts.fingerprint
            cursor.execute(self._place.sql("SELECT count(*), count(key) FROM {table}"))
            count, keyed = cursor.fetchone() or (0, 0)
            cursor.execute(
                "SELECT pg_total_relation_size(%s::regclass), current_setting('server_version')",
                [self._place.quoted],
            )
            size, server = cursor.fetchone() or (0, "")
        return {
            "uri": self.uri,
            "bits": self.bits,
            "fingerprint": self.fingerprint,
            "model": self.model,
            "count": count,
            "keyed": keyed,
            "next_id": facts.next_id,
            "removed": facts.removed,
            "bytes": {"table": size},
            "server": f"PostgreSQL {server}",
            "search": self._place.search,
            "graph": facts.graph,
        }

    # Search

    def _search(self, queries: Codes, k: int, where: All) -> Matches:
        return matches_of(self._table.search(queries, k, where))

    def _within(self, queries: Codes, radius: int, where: All) -> Within:
        return within_of(self._table.within(queries, radius, where))

    def _refresh(self) -> None:
        with self._connections.reading() as cursor:
            self.fingerprint = self._facts(cursor).fingerprint

    def build(self) -> None:
        """Build the graph that ``search=hnsw`` needs, and measure its recall on these codes."""
        if self._place.search == "hnsw":
            self._must_write()
            build_graph(self._connections, self._place, self.bits)

    # Health

    def verify(self) -> list[Problem]:
        """See :meth:`Index.verify`; the server itself checks the pages it reads."""
        problems = []
        with self._connections.reading() as cursor:
            facts = self._facts(cursor)
            cursor.execute(
                self._place.sql(
                    "SELECT count(code), coalesce(max(id), -1), max(length(code)) FROM {table}"
                )
            )
            _, last, bits = cursor.fetchone() or (0, -1, None)
            if last >= facts.next_id or (bits is not None and bits != facts.bits):
                problems.append(
                    Problem(
                        f"table {self._place.table}",
                        "holds items that fisherhash did not write",
                        "remove them, or copy the index from where it came",
                    )
                )
        return problems + self._model_problems("fisherhash_models")

    def _model_digest(self) -> str | None:
        return self._archive

    def _model_archive(self) -> bytes:
        with self._connections.reading() as cursor:
            return read_archive(cursor, self._place)

    # Helpers

    def _facts(self, cursor: Cursor) -> Facts:
        facts = read_facts(cursor, self._place)
        if facts is None:
            raise FisherhashError(f"{self.uri} was deleted while it was open")
        return facts


def _facts(connections: Connections, place: Place) -> Facts:
    with connections.reading() as cursor:
        version = schema_version(cursor)
        facts = None
        if version is not None:
            check_version(version, place.uri)
            facts = read_facts(cursor, place)
        if facts is None:
            raise UsageError(f"{place.uri} does not exist: there is no index {place.table}")
        return facts


def _is_taken(connections: Connections, place: Place) -> bool:
    with connections.reading() as cursor:
        cursor.execute("SELECT to_regclass(%s) IS NOT NULL", [place.quoted])
        return bool(one_value(cursor))
