"""Reads of an index in PostgreSQL: items, codes and searches, each from one snapshot."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from typing import Any

from psycopg import sql

from fisherhash.index.filters import All, unknown_field
from fisherhash.index.items import Codes, Ids, Item
from fisherhash.index.postgres.bulk import bit_texts, read_codes
from fisherhash.index.postgres.connect import Connections, Cursor
from fisherhash.index.postgres.graph import must_have_graph
from fisherhash.index.postgres.place import MAX_EF, Place
from fisherhash.index.postgres.schema import one_value
from fisherhash.index.postgres.texts import loaded_json, loaded_text, stored_text
from fisherhash.index.postgres.where import Sql, has_field_sql, where_sql

Hits = list[list[tuple[int, int]]]
"""Ids and distances per query."""

_COLUMNS = "id, code, key, path, size, mtime_ns, labels, metadata::text"
_ITEMS_STEP = 1 << 12


class TableReader:
    """Reads the table of one index."""

    def __init__(self, place: Place, connections: Connections, bits: int) -> None:
        self._place, self._connections, self._bits = place, connections, bits

    def named(self, keys: list[str], ids: list[int]) -> dict[str | int, Item]:
        """Those items that exist, by key or by id."""
        test = "key = ANY(%s::text[]) OR id = ANY(%s::bigint[])"
        with self._connections.reading() as cursor:
            cursor.execute(
                self._place.sql(f"SELECT {_COLUMNS} FROM {{table}} WHERE {test}"),
                [[_storable(key) for key in keys], ids],
            )
            items = [_item(row) for row in cursor]
        by_key = {item.key: item for item in items if item.key is not None}
        return {**by_key, **{item.id: item for item in items}}

    def items(self, where: All) -> Iterator[Item]:
        """Items that match, by ascending id; the snapshot is that of the call."""
        test, values = _where(where)
        query = self._place.sql(f"SELECT {_COLUMNS} FROM {{table}} WHERE {test} ORDER BY id")

        def rows(cursor: Cursor) -> Iterator[Item]:
            with cursor.connection.cursor("fisherhash_items", binary=True) as named:
                named.itersize = _ITEMS_STEP
                named.execute(query, values)
                yield from map(_item, named)

        return self._streaming(rows, where)

    def codes(self, block: int) -> Iterator[tuple[Ids, Codes]]:
        """Ids and codes of all items, ``block`` at a time."""
        query = self._place.sql(
            "COPY (SELECT id, code FROM {table} ORDER BY id) TO STDOUT (FORMAT BINARY)"
        )

        def rows(cursor: Cursor) -> Iterator[tuple[Ids, Codes]]:
            with cursor.copy(query) as copy:
                yield from read_codes(copy, self._bits, block)

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

    def select(self, query: str, where: All) -> list[Any]:
        """The rows of a query, in which ``{test}`` is the filter."""
        test, values = _where(where)
        with self._connections.reading() as cursor:
            self._refuse_unknown(cursor, where)
            cursor.execute(self._place.sql(query.replace("{test}", test)), values)
            return cursor.fetchall()

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
            raise unknown_field(self._place.uri, condition.field, names)

    def search(self, queries: Codes, k: int, where: All) -> Hits:
        """The k nearest, by (distance, id)."""
        hnsw = self._place.search == "hnsw" and not where and k <= MAX_EF
        # An expression that no index has: the graph would answer approximately.
        distance = f"code <~> %s::bit({self._bits})"
        order = distance if hnsw else f"({distance})::int"
        limits = "ORDER BY 2, 1 LIMIT %s"
        test, values = _where(where)
        query = f"SELECT id, {order} FROM {{table}} WHERE {test} {limits}"
        if hnsw:
            near = f"SELECT id, code FROM {{table}} ORDER BY {distance} LIMIT %s"
            query = f"SELECT id, ({distance})::int FROM ({near}) AS near ORDER BY 2, 1"
        texts = bit_texts(queries, self._bits)
        with self._connections.reading() as cursor:
            self._refuse_unknown(cursor, where)
            if hnsw:
                must_have_graph(cursor, self._place)
                width = max(self._place.ef_search, k)
                cursor.execute("SELECT set_config('hnsw.ef_search', %s, true)", [str(width)])
            parameters = [[text, text, k] if hnsw else [text, *values, k] for text in texts]
            return _answers(cursor, self._place.sql(query), parameters)

    def within(self, queries: Codes, radius: int, where: All) -> Hits:
        """Everything up to a distance, by (distance, id)."""
        test, values = _where(where)
        distance = f"(code <~> %s::bit({self._bits}))::int"
        query = (
            f"SELECT id, {distance} FROM {{table}} WHERE {distance} <= %s AND {test} ORDER BY 2, 1"
        )
        with self._connections.reading() as cursor:
            self._refuse_unknown(cursor, where)
            parameters = [[text, text, radius, *values] for text in bit_texts(queries, self._bits)]
            return _answers(cursor, self._place.sql(query), parameters)


def _where(where: All) -> Sql:
    # Braces in the expression are no places of sql.SQL.
    test, values = where_sql(where)
    return test.replace("{", "{{").replace("}", "}}"), values


def _answers(cursor: Cursor, query: sql.Composed, parameters: list[list[Any]]) -> Hits:
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
