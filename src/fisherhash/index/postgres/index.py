"""An index in a table of PostgreSQL: pgvector compares the codes, filters are SQL.

Every change is one transaction that first locks the facts of its index, so several writers take
turns and ids are given once. Every read is one snapshot. Searches by a radius or with logits read
all codes once per commit, and search them in memory.

``search=hnsw`` searches by the HNSW graph of pgvector, which is faster than a scan and approximate.
Learned codes repeat. Items with equal codes are neighbours of each other first, and a graph of
them may not lead to the others; how much is lost depends on the codes. So the recall of a sample of
the stored codes is measured when the graph is built, which a writer does when it is closed.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import sys
from collections.abc import Generator, Iterator, Sequence
from dataclasses import replace
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from fisherhash.errors import UsageError
from fisherhash.index.base import Files, Uri
from fisherhash.index.checks import as_ids, whole_number
from fisherhash.index.filters import All, Where, parse_filter, unknown_field
from fisherhash.index.items import (
    Codes,
    FileState,
    Ids,
    Item,
    Matches,
    Problem,
    matches_of,
)
from fisherhash.index.postgres.connect import MAX_EF, Cursor, Database
from fisherhash.index.postgres.sql import (
    Sql,
    has_field_sql,
    loaded_text,
    stored_text,
    where_sql,
)
from fisherhash.index.postgres.tables import (
    COLUMNS,
    FACTS,
    FILE,
    STEP,
    PostgresChange,
    bit_texts,
    create_index,
    exists,
    item_of_postgres,
    note_kind,
    read_documents,
    write_documents,
)
from fisherhash.index.server import Facts, ServerIndex, digest_of

logger = logging.getLogger(__name__)

_SAMPLE, _K = 100, 10


class PostgresIndex(ServerIndex):
    """An index in a table of PostgreSQL."""

    def __init__(self, uri: Uri, *, write: bool) -> None:
        self._database = Database(uri)
        self.uri, self.writable = self._database.uri, write
        self._options = self._database.options
        self.approximate = self._options["search"] == "hnsw"
        self._builds = write and self.approximate
        try:
            with self._database.transaction() as cursor:
                stored = None
                if exists(cursor, "fisherhash_documents"):
                    stored = read_documents(cursor, self._database.table, FACTS).get("")
                self._read_facts(stored, opening=True)
        except BaseException:
            self._database.close()
            raise

    # Opening

    @classmethod
    def open_at(cls, uri: Uri, *, write: bool, skip_damaged: bool = False) -> Self:
        """Open the index; the server itself checks the pages that it reads."""
        return cls(uri, write=write)

    @classmethod
    def create_at(cls, uri: Uri, facts: dict[str, Any], files: Files) -> Self:
        """Create an empty index, complete or not at all."""
        database = Database(uri)
        with contextlib.closing(database), database.transaction(write=True) as cursor:
            create_index(cursor, database, Facts(**facts, digest=digest_of(files)), files)
        return cls(uri, write=True)

    @classmethod
    def exists_at(cls, uri: Uri) -> bool:
        """Whether the name of the index is taken on the server."""
        database = Database(uri)
        with contextlib.closing(database), database.transaction() as cursor:
            return exists(cursor, database.table)

    def close(self) -> None:
        """Release the index; a writer with ``search=hnsw`` builds the graph if there is none."""
        builds, self._builds = self._builds, False
        try:
            # After an error the user waits for its message, not for a graph.
            if builds and sys.exception() is None:
                self._build_graph()
        finally:
            self._database.close()

    # Changes

    @contextlib.contextmanager
    def _changing(self, fingerprint: str | None = None) -> Iterator[PostgresChange]:
        self._must_write()
        with self._database.transaction(write=True) as cursor:
            facts = self._locked_facts(cursor)
            self._check_model(fingerprint, unnamed_codes=facts.next_id > 0)
            change = PostgresChange(self._database, cursor, facts)
            yield change
            named = fingerprint or facts.fingerprint
            self._write_facts(
                cursor,
                replace(facts, commit=facts.commit + 1, next_id=change.next_id, fingerprint=named),
            )
        self.fingerprint = named

    def _locked_facts(self, cursor: Cursor) -> Facts:
        """The facts; whoever has locked them makes the next commit."""
        query = (
            "SELECT value FROM fisherhash_documents WHERE index_name = %s AND kind = %s FOR UPDATE"
        )
        row = cursor.execute(query, [self._database.table, FACTS]).fetchone()
        return self._read_facts(None if row is None else row[0])

    def _write_facts(self, cursor: Cursor, facts: Facts) -> None:
        write_documents(cursor, self._database.table, {(FACTS, ""): facts.to_json().encode()})

    # Content

    def _existing(self, keys: list[str], ids: list[int]) -> list[Item]:
        test = "key = ANY(%s::text[]) OR id = ANY(%s::bigint[])"
        with self._database.transaction() as cursor:
            query = f"SELECT {COLUMNS} FROM {{table}} WHERE {test}"
            rows = self._database.run(cursor, query, [list(map(stored_text, keys)), ids])
            return [item_of_postgres(row) for row in rows]

    def items(self, where: Where | None = None) -> Iterator[Item]:
        """All items that match a filter by ascending id, from one commit."""
        return map(item_of_postgres, self._stream(COLUMNS, parse_filter(where)))

    def scan(self, block: int = 1 << 16) -> Iterator[tuple[Ids, Codes]]:
        """Ids and codes of everything by ascending id, from one commit."""
        whole_number("block", block, 1)
        rows = self._stream("id, code", All())
        parts = iter(lambda: list(itertools.islice(rows, block)), [])
        return ((as_ids(i for i, _ in part), self._joined(c for _, c in part)) for part in parts)

    def _stream(self, columns: str, where: All) -> Iterator[Any]:
        """Rows that match, by ascending id, from a snapshot that is taken now."""

        def rows() -> Generator[Any]:
            with self._database.transaction() as cursor:
                test, values = self._test(cursor, where)
                query = f"SELECT {columns} FROM {{table}} WHERE {test} ORDER BY id"
                with cursor.connection.cursor("fisherhash", binary=True) as named:
                    named.itersize = STEP
                    named.execute(self._database.sql(query), values)
                    yield None
                    yield from named

        started = rows()
        # The snapshot is taken here. A generator that runs also gives its connection back when
        # it is dropped, which one that never ran does not.
        next(started)
        return started

    def count(self, where: Where | None = None) -> int:
        """How many items match a filter; all items without one."""
        with self._database.transaction() as cursor:
            test, values = self._test(cursor, parse_filter(where))
            return self._one(cursor, f"SELECT count(*) FROM {{table}} WHERE {test}", values)[0]

    def files(self) -> dict[str, FileState]:
        """What is known about the file of every item that has a key, by ascending id."""
        query = "SELECT key, size, mtime_ns, id FROM {table} WHERE key IS NOT NULL ORDER BY id"
        with self._database.transaction() as cursor:
            rows = self._database.run(cursor, query)
            return {loaded_text(key): FileState(*rest) for key, *rest in rows}

    def notes(self, kind: str) -> dict[str, Any]:
        """The documents of a kind by name."""
        with self._database.transaction() as cursor:
            known = read_documents(cursor, self._database.table, note_kind(kind))
        return {loaded_text(name): json.loads(value) for name, value in known.items()}

    def _stored_files(self) -> dict[str, bytes]:
        with self._database.transaction() as cursor:
            return read_documents(cursor, self._database.table, FILE)

    def _facts(self) -> Facts:
        with self._database.transaction() as cursor:
            return self._facts_of(cursor)

    def _facts_of(self, cursor: Cursor) -> Facts:
        return self._read_facts(read_documents(cursor, self._database.table, FACTS).get(""))

    def info(self) -> dict[str, Any]:
        """Facts that JSON can hold, with those of the server."""
        with self._database.transaction() as cursor:
            facts = self._facts_of(cursor)
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
            "search": self._options["search"],
            "graph": facts.graph,
        }

    # Search

    def _search(
        self, queries: Codes, weights: NDArray[np.int64] | None, k: int, where: All
    ) -> Matches:
        if weights is not None:
            return super()._search(queries, weights, k, where)
        graph = self.approximate and not where and k <= MAX_EF
        with self._database.transaction() as cursor:
            if graph and not exists(cursor, self._graph):
                raise UsageError(
                    f"{self.uri} has no HNSW graph yet: a writer with search=hnsw builds it when "
                    "it is closed. Or search without search=hnsw"
                )
            return self._nearest(cursor, queries, k, where, graph=graph)

    def _nearest(
        self, cursor: Cursor, queries: Codes, k: int, where: All, *, graph: bool
    ) -> Matches:
        distance = f"code <~> %s::bit({self.bits})"
        texts = bit_texts(queries, self.bits)
        if graph:
            width = max(self._options["ef_search"], k)
            cursor.execute("SELECT set_config('hnsw.ef_search', %s, true)", [str(width)])
            near = f"SELECT id, code FROM {{table}} ORDER BY {distance} LIMIT %s"
            query = f"SELECT id, ({distance})::int FROM ({near}) AS near ORDER BY 2, 1"
            return matches_of(self._answers(cursor, query, [[text, text, k] for text in texts]))
        test, values = self._test(cursor, where)
        # An expression that no index has: the graph would answer approximately.
        query = f"SELECT id, ({distance})::int FROM {{table}} WHERE {test} ORDER BY 2, 1 LIMIT %s"
        return matches_of(self._answers(cursor, query, [[text, *values, k] for text in texts]))

    def _answers(
        self, cursor: Cursor, query: str, parameters: list[list[Any]]
    ) -> list[list[tuple[int, int]]]:
        """The rows of one query for every set of parameters; they are sent without waiting."""
        if not parameters:
            return []
        cursor.executemany(self._database.sql(query), parameters, returning=True)
        rows = [cursor.fetchall()]
        while cursor.nextset():
            rows.append(cursor.fetchall())
        return rows

    def _test(self, cursor: Cursor, where: All) -> Sql:
        """The filter as SQL; a mistyped field would match no item, and with != every one."""
        some = "SELECT EXISTS (SELECT 1 FROM {table} WHERE key IS NOT NULL AND %s)"
        for condition in where.conditions:
            if not condition.paths:
                continue
            test, values = has_field_sql(condition)
            if self._one(cursor, some.replace("%s", test), values)[0]:
                continue
            if not self._one(cursor, some.replace("%s", "true"))[0]:
                break  # there are no items with keys
            rows = self._database.run(
                cursor, "SELECT DISTINCT jsonb_object_keys(metadata) FROM {table}"
            )
            names = [loaded_text(name) for (name,) in rows]
            raise unknown_field(self.uri, condition.field, names)
        return where_sql(where)

    # The graph

    @property
    def _graph(self) -> str:
        return f"{self._database.table}_hnsw"

    def _build_graph(self) -> None:
        """Build the graph if there is none, measure its recall, and store the result."""
        options = self._options
        with self._database.transaction(write=True) as cursor:
            if exists(cursor, self._graph):
                return
            self._database.run(
                cursor,
                f'CREATE INDEX IF NOT EXISTS "{self._graph}" ON {{table}} USING hnsw'
                f" (code bit_hamming_ops) WITH (m = {options['m']},"
                f" ef_construction = {options['ef_construction']})",
            )
        with self._database.transaction() as cursor:
            recall, queries = self._recall(cursor)
        known = {name: options[name] for name in ("m", "ef_construction", "ef_search")}
        known |= {"recall": recall, "k": _K, "queries": queries}
        with self._database.transaction(write=True) as cursor:
            self._write_facts(cursor, replace(self._locked_facts(cursor), graph=known))
        logger.info(
            "%s: searches by the HNSW graph are approximate; recall at %d of %d of its own codes "
            "is %.3f with ef_search=%d",
            *(self.uri, _K, queries, recall, options["ef_search"]),
        )

    def _recall(self, cursor: Cursor) -> tuple[float, int]:
        """Recall over ties: a result counts if it is as near as the k-th of the exact search."""
        query = f"SELECT code FROM {{table}} ORDER BY hashint8(id), id LIMIT {_SAMPLE}"
        codes = self._joined(code for (code,) in self._database.run(cursor, query).fetchall())
        exact = self._nearest(cursor, codes, _K, All(), graph=False).distances
        # On a small table the planner would scan.
        cursor.execute("SET LOCAL enable_seqscan = off")
        near = self._nearest(cursor, codes, _K, All(), graph=True).distances
        found = (near <= exact[:, -1:]).sum()
        return float(found / exact.size) if exact.size else 1.0, len(codes)

    # Health

    def verify(self) -> list[Problem]:
        """Check that ids and lengths of codes are ours; the server checks the pages it reads."""
        problems = self._model_problems()
        with self._database.transaction() as cursor:
            facts = self._facts_of(cursor)
            query = "SELECT count(code), coalesce(max(id), -1), max(length(code)) FROM {table}"
            _, last, bits = self._one(cursor, query)
            if last >= facts.next_id or bits not in (None, facts.bits):
                problems.append(
                    Problem(
                        f"table {self._database.table}",
                        "holds items that fisherhash did not write",
                        "remove them, or copy the index from where it came",
                    )
                )
        return problems

    def _one(self, cursor: Cursor, query: str, values: Sequence[Any] = ()) -> Any:
        return self._database.run(cursor, query, values).fetchone()
