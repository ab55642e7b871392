"""Where an index is on a server, and how it is searched: what its URI says."""

from __future__ import annotations

from typing import NamedTuple

from psycopg import sql

from fisherhash.errors import UsageError
from fisherhash.index.base import Uri
from fisherhash.index.uris import read_choice, read_count, read_index_name, read_uri

_READERS = {
    "index": read_index_name,
    "search": read_choice("exact", "hnsw"),
    "m": read_count,
    "ef_construction": read_count,
    "ef_search": read_count,
}
# The numbers are pgvector's own defaults, but for ef_search, which it has at 40.
_DEFAULTS = {"search": "exact", "m": 16, "ef_construction": 64, "ef_search": 200}
RESERVED = "fisherhash_"
"""Tables with names that begin like this hold what is not an item."""
MAX_EF = 1000


class Place(NamedTuple):
    """An index on a PostgreSQL server.

    Attributes:
        uri: as messages show it, without the password.
        conninfo: what psycopg connects to.
        table: the table of the index.
        search: ``exact``, or ``hnsw`` for the approximate graph of pgvector.
        m: neighbours per node of the graph.
        ef_construction: candidates per node while the graph is built.
        ef_search: candidates per query.
    """

    uri: str
    conninfo: str
    table: str
    search: str
    m: int
    ef_construction: int
    ef_search: int

    @property
    def graph(self) -> str:
        """The name of the graph, if there is one."""
        return f"{self.table}_hnsw"

    @property
    def quoted(self) -> str:
        """The table's name as a text that PostgreSQL parses."""
        return f'"{self.table}"'

    def sql(self, query: str) -> sql.Composed:
        """A query with ``{table}`` in it; values are parameters, never part of it."""
        return sql.SQL(query).format(table=sql.Identifier(self.table))  # type: ignore[arg-type]


def read_place(uri: Uri) -> Place:
    """Parse ``postgresql://USER@HOST/DATABASE?index=NAME``; other options go to PostgreSQL."""
    shown, rest, options = read_uri(str(uri), _READERS, _DEFAULTS, strict=False)
    if "index" not in options:
        raise UsageError(f"{shown} does not say which index: end it with ?index=NAME")
    place = Place(shown, rest, options.pop("index"), **options)
    if place.table.startswith(RESERVED):
        raise UsageError(f"the name of an index cannot begin with {RESERVED}, got {place.table}")
    if place.ef_search > MAX_EF:
        raise UsageError(f"ef_search can be {MAX_EF} at most, got {place.ef_search}")
    return place
