"""An index in a table of PostgreSQL: pgvector compares the codes, filters are SQL.

Every change is one transaction that first locks the row of its index, so several writers take turns
and ids are given once. Every read is one snapshot.

``search=hnsw`` searches by the HNSW graph of pgvector, which is faster than a scan and approximate.
Learned codes repeat. Items with equal codes are neighbours of each other first, and a graph of
them may not lead to the others; how much is lost depends on the codes. So the recall of a sample of
the stored codes is measured when the graph is built, which a writer does when it is closed.
"""

from __future__ import annotations

import contextlib
import json
import logging
import sys
from collections.abc import Generator, Iterator, Mapping, Sequence
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from fisherhash.errors import FisherhashError, UsageError
from fisherhash.index.base import Files, Uri
from fisherhash.index.checks import whole_number
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
from fisherhash.index.postgres.connect import MAX_EF, Address, Connections, Cursor, read_address
from fisherhash.index.postgres.sql import (
    Sql,
    has_field_sql,
    loaded_text,
    stored_text,
    where_sql,
)
from fisherhash.index.postgres.tables import (
    COLUMNS,
    FORMAT,
    STEP,
    Change,
    Facts,
    bit_texts,
    create_index,
    exists,
    item_of,
    read_facts,
)
from fisherhash.index.server import ServerIndex

logger = logging.getLogger(__name__)

_SAMPLE, _K = 100, 10


class PostgresIndex(ServerIndex):
    """An index in a table of PostgreSQL."""

    def __init__(self, address: Address, connections: Connections, *, write: bool) -> None:
        self.uri, self.writable = address.uri, write
        self.approximate = address.search == "hnsw"
        self._address, self._connections = address, connections
        self._builds = write and self.approximate
        with self._connections.transaction() as cursor:
            facts = None
            if exists(cursor, "fisherhash_indexes"):
                facts = read_facts(cursor, address)
        if facts is None:
            raise UsageError(f"{self.uri} does not exist: there is no index {address.table}")
        if facts.format != FORMAT:
            raise FisherhashError(
                f"{self.uri} was written by another version of fisherhash (format {facts.format}, "
                f"this one reads format {FORMAT}); use that version"
            )
        self.bits, self.fingerprint, self.model = facts.bits, facts.fingerprint, facts.model

    # Opening

    @classmethod
    def open_at(cls, uri: Uri, *, write: bool, skip_damaged: bool = False) -> Self:
        """See :meth:`Index.open`; the server itself checks the pages that it reads."""
        address = read_address(uri)
        connections = Connections(address)
        try:
            return cls(address, connections, write=write)
        except BaseException:
            connections.close()
            raise

    @classmethod
    def create_at(cls, uri: Uri, facts: dict[str, Any], files: Files) -> Self:
        """See :meth:`Index.create`."""
        address = read_address(uri)
        connections = Connections(address)
        with contextlib.closing(connections), connections.transaction(write=True) as cursor:
            create_index(cursor, address, facts, files)
        return cls.open_at(uri, write=True)

    @classmethod
    def exists_at(cls, uri: Uri) -> bool:
        """See :meth:`Index.exists`."""
        address = read_address(uri)
        connections = Connections(address)
        with contextlib.closing(connections), connections.transaction() as cursor:
            return exists(cursor, address.table)

    def close(self) -> None:
        """See :meth:`Index.close`; a writer with ``search=hnsw`` builds the graph if it lacks."""
        builds, self._builds = self._builds, False
        try:
            # After an error the user waits for its message, not for a graph.
            if builds and sys.exception() is None:
                self._build_graph()
        finally:
            self._connections.close()

    # Changes

    @contextlib.contextmanager
    def _changing(self, fingerprint: str | None = None) -> Iterator[Change]:
        self._must_write()
        with self._connections.transaction(write=True) as cursor:
            facts = self._facts(cursor, lock=True)
            self._check_model(fingerprint, unnamed_codes=facts.next_id > 0)
            change = Change(self._address, self.bits, cursor, facts.next_id)
            yield change
            cursor.execute(
                "UPDATE fisherhash_indexes SET next_id = %s, commit = commit + 1,"
                " fingerprint = coalesce(%s, fingerprint) WHERE name = %s",
                [change.next_id, fingerprint, self._address.table],
            )
        self.fingerprint = fingerprint or self.fingerprint

    # Content

    def _found(self, keys: list[str], ids: list[int]) -> Mapping[str | int, Item]:
        test = "key = ANY(%s::text[]) OR id = ANY(%s::bigint[])"
        with self._connections.transaction() as cursor:
            query = f"SELECT {COLUMNS} FROM {{table}} WHERE {test}"
            rows = self._address.run(cursor, query, [list(map(_key_text, keys)), ids])
            items = [item_of(row) for row in rows]
        by_key = {item.key: item for item in items if item.key is not None}
        return {**by_key, **{item.id: item for item in items}}

    def items(self, where: Where | None = None) -> Iterator[Item]:
        """See :meth:`Index.items`."""
        return map(item_of, self._stream(COLUMNS, parse_filter(where)))

    def scan(self, block: int = 1 << 16) -> Iterator[tuple[Ids, Codes]]:
        """See :meth:`Index.scan`."""
        whole_number("block", block, 1)
        bare = (Item(id_, code) for id_, code in self._stream("id, code", All()))
        return self._scan(bare, block)

    def _stream(self, columns: str, where: All) -> Iterator[Any]:
        """Rows that match, by ascending id, from a snapshot that is taken now."""

        def rows() -> Generator[Any]:
            with self._connections.transaction() as cursor:
                test, values = self._test(cursor, where)
                query = f"SELECT {columns} FROM {{table}} WHERE {test} ORDER BY id"
                with cursor.connection.cursor("fisherhash", binary=True) as named:
                    named.itersize = STEP
                    named.execute(self._address.sql(query), values)
                    yield None
                    yield from named

        started = rows()
        # The snapshot is taken here. A generator that runs also gives its connection back when
        # it is dropped, which one that never ran does not.
        next(started)
        return started

    def count(self, where: Where | None = None) -> int:
        """See :meth:`Index.count`."""
        with self._connections.transaction() as cursor:
            test, values = self._test(cursor, parse_filter(where))
            return self._one(cursor, f"SELECT count(*) FROM {{table}} WHERE {test}", values)[0]

    def files(self) -> dict[str, FileState]:
        """See :meth:`Index.files`."""
        query = "SELECT key, size, mtime_ns, id FROM {table} WHERE key IS NOT NULL ORDER BY id"
        with self._connections.transaction() as cursor:
            rows = self._address.run(cursor, query)
            return {loaded_text(key): FileState(*rest) for key, *rest in rows}

    def notes(self, kind: str) -> dict[str, Any]:
        """See :meth:`Index.notes`."""
        with self._connections.transaction() as cursor:
            cursor.execute(
                "SELECT name, value FROM fisherhash_notes WHERE index_name = %s AND kind = %s"
                " ORDER BY name",
                [self._address.table, stored_text(kind)],
            )
            return {loaded_text(name): json.loads(value) for name, value in cursor}

    def info(self) -> dict[str, Any]:
        """See :meth:`Index.info`."""
        with self._connections.transaction() as cursor:
            facts = self._facts(cursor)
            query = (
                "SELECT count(*), count(key), pg_total_relation_size('{table}'::regclass),"
                " current_setting('server_version') FROM {table}"
            )
            count, keyed, size, server = self._one(cursor, query)
        return {
            "uri": self.uri,
            "bits": self.bits,
            "fingerprint": self.fingerprint,
            "model": self.model,
            "count": count,
            "keyed": keyed,
            "commit": facts.commit,
            "next_id": facts.next_id,
            "bytes": {"table": size},
            "server": f"PostgreSQL {server}",
            "search": self._address.search,
            "graph": facts.graph,
        }

    def _stored_model(self) -> tuple[str | None, dict[str, bytes]]:
        with self._connections.transaction() as cursor:
            digest = self._facts(cursor).digest
            query = "SELECT name, data FROM fisherhash_files WHERE index_name = %s"
            return digest, dict(cursor.execute(query, [self._address.table]).fetchall())

    def _commit(self) -> int:
        with self._connections.transaction() as cursor:
            return self._facts(cursor).commit

    # Search

    def _search(
        self, queries: Codes, weights: NDArray[np.int64] | None, k: int, where: All
    ) -> Matches:
        if weights is not None:
            return super()._search(queries, weights, k, where)
        graph = self.approximate and not where and k <= MAX_EF
        with self._connections.transaction() as cursor:
            if graph and not exists(cursor, self._graph):
                raise UsageError(
                    f"{self.uri} has no HNSW graph yet: a writer with search=hnsw builds it when "
                    "it is closed. Or search without search=hnsw"
                )
            return self._nearest(cursor, queries, k, where, graph=graph)

    def _nearest(
        self, cursor: Cursor, queries: Codes, k: int, where: All, *, graph: bool
    ) -> Matches:
        distance = self._distance
        texts = bit_texts(queries, self.bits)
        if graph:
            width = max(self._address.ef_search, k)
            cursor.execute("SELECT set_config('hnsw.ef_search', %s, true)", [str(width)])
            near = f"SELECT id, code FROM {{table}} ORDER BY {distance} LIMIT %s"
            query = f"SELECT id, ({distance})::int FROM ({near}) AS near ORDER BY 2, 1"
            return matches_of(self._answers(cursor, query, [[text, text, k] for text in texts]))
        test, values = self._test(cursor, where)
        # An expression that no index has: the graph would answer approximately.
        query = f"SELECT id, ({distance})::int FROM {{table}} WHERE {test} ORDER BY 2, 1 LIMIT %s"
        return matches_of(self._answers(cursor, query, [[text, *values, k] for text in texts]))

    def _within(self, queries: Codes, radius: int, where: All) -> Within:
        distance = f"({self._distance})::int"
        with self._connections.transaction() as cursor:
            test, values = self._test(cursor, where)
            query = (
                f"SELECT id, {distance} FROM {{table}} WHERE {distance} <= %s AND {test}"
                " ORDER BY 2, 1"
            )
            texts = bit_texts(queries, self.bits)
            parameters = [[text, text, radius, *values] for text in texts]
            return within_of(self._answers(cursor, query, parameters))

    @property
    def _distance(self) -> str:
        return f"code <~> %s::bit({self.bits})"

    def _answers(
        self, cursor: Cursor, query: str, parameters: list[list[Any]]
    ) -> list[list[tuple[int, int]]]:
        """The rows of one query for every set of parameters; they are sent without waiting."""
        if not parameters:
            return []
        cursor.executemany(self._address.sql(query), parameters, returning=True)
        rows = [cursor.fetchall()]
        while cursor.nextset():
            rows.append(cursor.fetchall())
        return rows

    def _test(self, cursor: Cursor, where: All) -> Sql:
        """The filter as SQL; a mistyped field would match no item, and with != every one."""
        exists = "SELECT EXISTS (SELECT 1 FROM {table} WHERE key IS NOT NULL AND %s)"
        for condition in where.conditions:
            if not condition.paths:
                continue
            test, values = has_field_sql(condition)
            if self._one(cursor, exists.replace("%s", test), values)[0]:
                continue
            if not self._one(cursor, exists.replace("%s", "true"))[0]:
                break  # there are no items with keys
            rows = self._address.run(
                cursor, "SELECT DISTINCT jsonb_object_keys(metadata) FROM {table}"
            )
            names = [loaded_text(name) for (name,) in rows]
            raise unknown_field(self.uri, condition.field, names)
        return where_sql(where)

    # The graph

    @property
    def _graph(self) -> str:
        return f"{self._address.table}_hnsw"

    def _build_graph(self) -> None:
        """Build the graph if there is none, measure its recall, and store the result."""
        address = self._address
        with self._connections.transaction(write=True) as cursor:
            if exists(cursor, self._graph):
                return
            address.run(
                cursor,
                f'CREATE INDEX IF NOT EXISTS "{self._graph}" ON {{table}} USING hnsw'
                f" (code bit_hamming_ops) WITH (m = {address.m},"
                f" ef_construction = {address.ef_construction})",
            )
        with self._connections.transaction() as cursor:
            recall, queries = self._recall(cursor)
        known = {name: getattr(address, name) for name in ("m", "ef_construction", "ef_search")}
        with self._connections.transaction(write=True) as cursor:
            cursor.execute(
                "UPDATE fisherhash_indexes SET graph = %s WHERE name = %s",
                [
                    json.dumps({**known, "recall": recall, "k": _K, "queries": queries}),
                    address.table,
                ],
            )
        logger.info(
            "%s: searches by the HNSW graph are approximate; recall at %d of %d of its own codes "
            "is %.3f with ef_search=%d",
            *(self.uri, _K, queries, recall, address.ef_search),
        )

    def _recall(self, cursor: Cursor) -> tuple[float, int]:
        """Recall over ties: a result counts if it is as near as the k-th of the exact search."""
        query = f"SELECT code FROM {{table}} ORDER BY hashint8(id), id LIMIT {_SAMPLE}"
        codes = self._joined(code for (code,) in self._address.run(cursor, query).fetchall())
        exact = self._nearest(cursor, codes, _K, All(), graph=False).distances
        # On a small table the planner would scan.
        cursor.execute("SET LOCAL enable_seqscan = off")
        near = self._nearest(cursor, codes, _K, All(), graph=True).distances
        found = (near <= exact[:, -1:]).sum()
        return float(found / exact.size) if exact.size else 1.0, len(codes)

    # Health

    def verify(self) -> list[Problem]:
        """See :meth:`Index.verify`; the server itself checks the pages that it reads."""
        problems = self._model_problems()
        with self._connections.transaction() as cursor:
            facts = self._facts(cursor)
            query = "SELECT count(code), coalesce(max(id), -1), max(length(code)) FROM {table}"
            _, last, bits = self._one(cursor, query)
            if last >= facts.next_id or bits not in (None, facts.bits):
                problems.append(
                    Problem(
                        f"table {self._address.table}",
                        "holds items that fisherhash did not write",
                        "remove them, or copy the index from where it came",
                    )
                )
        return problems

    # Helpers

    def _facts(self, cursor: Cursor, *, lock: bool = False) -> Facts:
        facts = read_facts(cursor, self._address, lock=lock)
        if facts is None:
            raise FisherhashError(f"{self.uri} was deleted while it was open")
        self.fingerprint = facts.fingerprint
        return facts

    def _one(self, cursor: Cursor, query: str, values: Sequence[Any] = ()) -> Any:
        return self._address.run(cursor, query, values).fetchone()


def _key_text(key: str) -> str:
    """A key as it is stored; the empty text for what no key can be."""
    try:
        return stored_text(key)
    except UnicodeEncodeError:
        return ""
