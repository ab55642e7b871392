"""An index in a table of PostgreSQL: pgvector compares the codes, filters are SQL.

Every change is one transaction that first locks the row of its index, so several writers take turns
and ids are given once. Every read is one snapshot.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import ArrayLike
from psycopg import sql

from fisherhash.errors import FisherhashError, UsageError
from fisherhash.index.base import DamagedError, Index, SaveModel, Uri, Verb
from fisherhash.index.carried import check_model, pack_model, unpack_model, unpacked
from fisherhash.index.checks import (
    CheckedEntry,
    Notes,
    NoteTexts,
    as_ids,
    check_entries,
    check_notes,
    code_blocks,
)
from fisherhash.index.filters import All, Where, parse_filter, unknown_field
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
from fisherhash.index.postgres.bulk import bit_texts, read_codes
from fisherhash.index.postgres.change import Change
from fisherhash.index.postgres.connect import Connections, Cursor
from fisherhash.index.postgres.graph import build_graph, must_have_graph
from fisherhash.index.postgres.place import MAX_EF, Place, read_place
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
from fisherhash.index.postgres.texts import loaded_json, loaded_text, stored_text
from fisherhash.index.postgres.where import Sql, has_field_sql, where_sql

_COLUMNS = "id, code, key, path, size, mtime_ns, labels, metadata::text"
_ITEMS_STEP = 1 << 12


class PostgresIndex(Index):
    """An index in a table of PostgreSQL."""

    def __init__(self, place: Place, facts: Facts, connections: Connections, *, write: bool):
        self.uri, self.writable = place.uri, write
        self.bits, self.fingerprint, self.model = facts.bits, facts.fingerprint, facts.model
        self._place, self._connections = place, connections
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
    def _changing(self, fingerprint: str | None = None) -> Iterator[Change]:
        """One commit."""
        self._must_write()
        with self._connections.writing() as cursor:
            facts = read_facts(cursor, self._place, lock=True)
            if facts is None:
                raise FisherhashError(f"{self.uri} was deleted while it was open")
            self.fingerprint = facts.fingerprint
            self._check_model(fingerprint, unnamed_codes=facts.next_id > 0)
            change = Change(self._place, self.bits, cursor, facts)
            yield change
            change.finish(fingerprint)
        self.fingerprint = fingerprint or self.fingerprint

    def _put(
        self, verb: Verb, entries: list[CheckedEntry], notes: NoteTexts, fingerprint: str | None
    ) -> Ids:
        with self._changing(fingerprint) as change:
            known = change.ids_of([entry.key for entry in entries])
            self._check_entries(verb, entries, known)
            new = [entry for entry in entries if entry.key not in known]
            given = range(change.next_id, change.next_id + len(new))
            change.insert(given, new)
            change.update({known[e.key]: e for e in entries if e.key in known})
            known |= {entry.key: id_ for entry, id_ in zip(new, given, strict=True)}
            change.write_notes(notes)
        return as_ids(known[entry.key] for entry in entries)

    def add_codes(
        self, codes: ArrayLike | Iterable[ArrayLike], *, fingerprint: str | None = None
    ) -> range:
        """See :meth:`Index.add_codes`."""
        with self._changing(fingerprint) as change:
            first = change.next_id
            with change.copying_codes() as writer:
                for block in code_blocks(codes, self.bits):
                    ids = np.arange(change.next_id, change.next_id + len(block))
                    writer.write(ids, block)
                    change.next_id += len(block)
            return range(first, change.next_id)

    def add_items(
        self, items: Iterable[Item], *, notes: Notes = None, next_id: int | None = None
    ) -> None:
        """See :meth:`Index.add_items`; one commit."""
        self._must_write()
        given, texts = list(items), check_notes(notes)
        keyed = [item for item in given if item.key is not None]
        entries = check_entries((item.entry() for item in keyed), self.bits)
        plain = [item for item in given if item.key is None]
        codes = next(code_blocks(self._joined(item.code for item in plain), self.bits), None)
        with self._changing() as change:
            ids = as_ids(item.id for item in given)
            if len(ids) and (ids[0] < change.next_id or (np.diff(ids) <= 0).any()):
                raise UsageError(f"{self.uri}: the ids to load must ascend, and be new")
            self._check_entries("add", entries, change.ids_of([entry.key for entry in entries]))
            change.insert([item.id for item in keyed], entries)
            if codes is not None:
                with change.copying_codes() as writer:
                    writer.write(as_ids(item.id for item in plain), codes)
            last = int(ids[-1]) + 1 if len(ids) else 0
            change.next_id = max(change.next_id, last, next_id or 0)
            change.write_notes(texts)

    def _remove(self, keys: list[str], ids: Ids, notes: NoteTexts, *, missing_ok: bool) -> int:
        with self._changing() as change:
            gone = change.delete(keys, ids)
            if not missing_ok:
                known = {*gone.values()}
                missing = [key for key in keys if key not in known]
                missing += [id_ for id_ in ids.tolist() if id_ not in gone]
                if missing:
                    raise self._missing(missing[0], "; nothing was removed")
            change.write_notes(notes)
            return len(gone)

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

    def get_items(self, names: Sequence[str] | Ids) -> list[Item | None]:
        """See :meth:`Index.get_items`."""
        by_key = len(names) > 0 and isinstance(names[0], str)
        wanted: list[Any] = list(names) if by_key else as_ids(names).tolist()  # type: ignore[arg-type]
        test = "key = ANY(%s::text[])" if by_key else "id = ANY(%s::bigint[])"
        values = [_storable(name) for name in wanted] if by_key else wanted
        with self._connections.reading() as cursor:
            cursor.execute(
                self._place.sql(f"SELECT {_COLUMNS} FROM {{table}} WHERE {test}"), [values]
            )
            items = [_item(row) for row in cursor]
        found = {item.key if by_key else item.id: item for item in items}
        return [found.get(name) for name in wanted]

    def items(self, where: Where | None = None) -> Iterator[Item]:
        """See :meth:`Index.items`; the snapshot is that of the call."""
        test, values = self._where(parse_filter(where))
        query = self._place.sql(f"SELECT {_COLUMNS} FROM {{table}} WHERE {test} ORDER BY id")

        def rows(cursor: Cursor) -> Iterator[Item]:
            with cursor.connection.cursor("fisherhash_items", binary=True) as named:
                named.itersize = _ITEMS_STEP
                named.execute(query, values)
                yield from map(_item, named)

        return self._streaming(rows, parse_filter(where))

    def _scan(self, block: int) -> Iterator[tuple[Ids, Codes]]:
        query = self._place.sql(
            "COPY (SELECT id, code FROM {table} ORDER BY id) TO STDOUT (FORMAT BINARY)"
        )

        def rows(cursor: Cursor) -> Iterator[tuple[Ids, Codes]]:
            with cursor.copy(query) as copy:
                yield from read_codes(copy, self.bits, block)

        return self._streaming(rows, All())

    def _streaming(self, read: Callable[[Cursor], Iterator[Any]], where: All) -> Iterator[Any]:
        """What ``read`` yields, from a snapshot that is taken now."""

        def stream() -> Generator[Any]:
            with self._connections.reading() as cursor:
                cursor.execute("SELECT 1")
                self._refuse_unknown(cursor, where)
                yield None
                yield from read(cursor)

        started = stream()
        # The snapshot is taken here. A generator that runs also gives its connection back when
        # it is dropped, which one that never ran does not.
        next(started)
        return started

    def ids(self, where: Where | None = None) -> Ids:
        """See :meth:`Index.ids`."""
        rows = self._select("SELECT id FROM {table} WHERE {test} ORDER BY id", parse_filter(where))
        return as_ids(id_ for (id_,) in rows)

    def count(self, where: Where | None = None) -> int:
        """See :meth:`Index.count`."""
        return self._select("SELECT count(*) FROM {table} WHERE {test}", parse_filter(where))[0][0]

    def files(self) -> dict[str, FileState]:
        """See :meth:`Index.files`."""
        query = (
            "SELECT key, size, mtime_ns, id FROM {table} WHERE {test} AND key IS NOT NULL"
            " ORDER BY id"
        )
        rows = self._select(query, All())
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

    def _select(self, query: str, where: All) -> list[Any]:
        test, values = self._where(where)
        with self._connections.reading() as cursor:
            self._refuse_unknown(cursor, where)
            cursor.execute(self._place.sql(query.replace("{test}", test)), values)
            return cursor.fetchall()

    def _where(self, where: All) -> Sql:
        # Braces in the expression are no places of sql.SQL.
        test, values = where_sql(where)
        return test.replace("{", "{{").replace("}", "}}"), values

    def _refuse_unknown(self, cursor: Cursor, where: All) -> None:
        """A mistyped field would match no item, and with != every one."""
        named = [condition for condition in where.conditions if condition.paths]
        if not named:
            return
        exists = "SELECT EXISTS (SELECT 1 FROM {table} WHERE key IS NOT NULL AND %s)"
        for condition in named:
            test, values = has_field_sql(condition)
            cursor.execute(self._place.sql(exists.replace("%s", test)), values)
            if one_value(cursor):
                continue
            cursor.execute(self._place.sql(exists.replace("%s", "true")))
            if not one_value(cursor):
                return
            cursor.execute(
                self._place.sql("SELECT DISTINCT jsonb_object_keys(metadata) FROM {table}")
            )
            names = [loaded_text(name) for (name,) in cursor]
            raise unknown_field(self.uri, condition.field, names)

    # Search

    def _search(self, queries: Codes, k: int, where: All) -> Matches:
        hnsw = self._place.search == "hnsw" and not where and k <= MAX_EF
        # An expression that no index has: the graph would answer approximately.
        distance = f"code <~> %s::bit({self.bits})"
        order = distance if hnsw else f"({distance})::int"
        limits = "ORDER BY 2, 1 LIMIT %s"
        test, values = self._where(where)
        query = f"SELECT id, {order} FROM {{table}} WHERE {test} {limits}"
        if hnsw:
            near = f"SELECT id, code FROM {{table}} ORDER BY {distance} LIMIT %s"
            query = f"SELECT id, ({distance})::int FROM ({near}) AS near ORDER BY 2, 1"
        texts = bit_texts(queries, self.bits)
        with self._connections.reading() as cursor:
            self._refuse_unknown(cursor, where)
            if hnsw:
                must_have_graph(cursor, self._place)
                width = max(self._place.ef_search, k)
                cursor.execute("SELECT set_config('hnsw.ef_search', %s, true)", [str(width)])
            parameters = [[text, text, k] if hnsw else [text, *values, k] for text in texts]
            rows = _answers(cursor, self._place.sql(query), parameters)
        return matches_of(rows)

    def _within(self, queries: Codes, radius: int, where: All) -> Within:
        test, values = self._where(where)
        distance = f"(code <~> %s::bit({self.bits}))::int"
        query = (
            f"SELECT id, {distance} FROM {{table}} WHERE {distance} <= %s AND {test} ORDER BY 2, 1"
        )
        with self._connections.reading() as cursor:
            self._refuse_unknown(cursor, where)
            parameters = [[text, text, radius, *values] for text in bit_texts(queries, self.bits)]
            rows = _answers(cursor, self._place.sql(query), parameters)
        return within_of(rows)

    def _check_model(self, fingerprint: str | None, *, unnamed_codes: bool = False) -> None:
        if fingerprint is not None and self.fingerprint is None and not unnamed_codes:
            # Another process may have named the model meanwhile.
            with self._connections.reading() as cursor:
                self.fingerprint = self._facts(cursor).fingerprint
        super()._check_model(fingerprint, unnamed_codes=unnamed_codes)

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
            if facts.archive is not None:
                try:
                    check_model(self.uri, facts.archive, read_archive(cursor, self._place))
                except DamagedError as error:
                    todo = "copy the index from where it came"
                    problems.append(Problem("fisherhash_models", str(error), todo))
        return problems

    def model_folder(self) -> Path | None:
        """See :meth:`Index.model_folder`; the model is unpacked into the cache."""
        if self._archive is None:
            return None
        folder = unpacked(self._archive)
        if folder is None:
            with self._connections.reading() as cursor:
                data = read_archive(cursor, self._place)
            folder = unpack_model(self.uri, self._archive, data)
        return folder

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


def _answers(
    cursor: Cursor, query: sql.Composed, parameters: list[list[Any]]
) -> list[list[tuple[int, int]]]:
    """The rows of one query for every set of parameters; they are sent without waiting."""
    if not parameters:
        return []
    cursor.executemany(query, parameters, returning=True)
    rows = [cursor.fetchall()]
    while cursor.nextset():
        rows.append(cursor.fetchall())
    return rows


def _item(row: Sequence[Any]) -> Item:
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


def _storable(name: str) -> str:
    try:
        return stored_text(name)
    except UnicodeEncodeError:
        # No key can be such a text.
        return ""
