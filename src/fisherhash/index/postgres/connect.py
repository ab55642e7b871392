"""Connections to PostgreSQL: a few are kept, each call uses one, and errors say what to do."""

from __future__ import annotations

import contextlib
import os
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

import psycopg
from psycopg import errors as pg_errors
from psycopg import pq
from psycopg.adapt import Buffer, Loader

from fisherhash.errors import FisherhashError, UsageError
from fisherhash.index.base import CannotWriteError, Uri
from fisherhash.index.uris import Option, read_uri

Cursor = psycopg.Cursor
# The numbers are pgvector's own defaults, but for ef_search, which it has at 40.
_OPTIONS: dict[str, Option] = {
    "index": "",
    "search": ("exact", "hnsw"),
    "m": 16,
    "ef_construction": 64,
    "ef_search": 200,
}
_RESERVED = "fisherhash_"
"""Tables with names that begin like this hold what is not an item."""
MAX_EF = 1000
_MAX_IDLE = 4
_BIT = 1560
_REFUSED = (
    pg_errors.InsufficientPrivilege,
    pg_errors.InvalidPassword,
    pg_errors.InvalidAuthorizationSpecification,
    pg_errors.InvalidCatalogName,
)
_LOST = (psycopg.OperationalError, psycopg.InterfaceError)


class _BitLoader(Loader):
    """Codes as our packed bytes: the binary form of a bit string is its length and these bytes."""

    format = pq.Format.BINARY

    def load(self, data: Buffer) -> bytes:
        return bytes(data[4:])


class Database:
    """Connections to the database of an index; threads and open iterators have one each.

    Attributes:
        uri: of the index, as messages show it, without the password.
        conninfo: what psycopg connects to.
        table: the table of the index.
        options: the other options of the URI that are ours.
    """

    def __init__(self, uri: Uri) -> None:
        self.uri, self.conninfo, self.options = read_uri(str(uri), _OPTIONS, strict=False)
        self.table = self.options["index"]
        if self.table.startswith(_RESERVED):
            raise UsageError(f"the name of an index cannot begin with {_RESERVED}: {self.table}")
        if self.options["ef_search"] > MAX_EF:
            raise UsageError(f"ef_search can be {MAX_EF} at most: {self.uri}")
        self._idle: deque[psycopg.Connection] = deque()
        self._closed = False
        self._process = os.getpid()

    def sql(self, query: str) -> bytes:
        """Return a query with the table for ``{table}``; its name needs no escapes."""
        return query.replace("{table}", f'"{self.table}"').encode()

    def run(self, cursor: Cursor, query: str, values: Sequence[Any] = ()) -> Cursor:
        """Execute a query with ``{table}`` in it; values are parameters, never part of it."""
        return cursor.execute(self.sql(query), values)

    def close(self) -> None:
        """Close those that nobody uses; the others are closed when they are given back."""
        self._closed = True
        while self._process == os.getpid() and self._idle:
            self._idle.pop().close()

    @contextlib.contextmanager
    def transaction(self, *, write: bool = False) -> Iterator[Cursor]:
        """One snapshot for all that is read inside; with ``write``, one commit at the end."""
        with _explained(self.uri, write=write):
            connection = self._take()
            level = psycopg.IsolationLevel
            try:
                connection.isolation_level = (
                    level.READ_COMMITTED if write else level.REPEATABLE_READ
                )
                connection.read_only = not write
                with connection.cursor(binary=True) as cursor:
                    yield cursor
                try:
                    connection.commit()
                except _LOST as error:
                    raise CannotWriteError(
                        f"{self.uri}: no answer to a commit ({_first_line(error)})",
                        "look at the index",
                        done="The change may or may not have been stored",
                    ) from error
            finally:
                self._give_back(connection)

    def _take(self) -> psycopg.Connection:
        if self._closed:
            raise UsageError(f"{self.uri} was closed")
        if self._process != os.getpid():
            raise UsageError(
                f"{self.uri} was opened before this process was forked; open it again here"
            )
        with contextlib.suppress(IndexError):
            return self._idle.pop()
        connection = psycopg.connect(self.conninfo, application_name="fisherhash")
        connection.adapters.register_loader(_BIT, _BitLoader)
        # Searches look expensive to the planner, and compiling them costs more than they do.
        connection.execute("SET jit = off")
        connection.commit()
        return connection

    def _give_back(self, connection: psycopg.Connection) -> None:
        with contextlib.suppress(psycopg.Error):
            connection.rollback()
        if connection.closed or self._closed or len(self._idle) >= _MAX_IDLE:
            connection.close()
        else:
            self._idle.append(connection)


@contextlib.contextmanager
def _explained(uri: str, *, write: bool) -> Iterator[None]:
    """Turn errors of the server into errors that say what to do."""
    try:
        yield
    except pg_errors.UndefinedTable as error:
        raise FisherhashError(
            f"{uri} was deleted while it was open, or never was complete: {_first_line(error)}"
        ) from error
    except _REFUSED as error:
        raise UsageError(f"{uri} refuses: {_first_line(error)}") from error
    except _LOST as error:
        if write:
            raise CannotWriteError(
                f"{uri}: {_first_line(error)}", "see that the server runs"
            ) from error
        raise FisherhashError(
            f"{uri} cannot be reached: {_first_line(error)}. Is the server running?"
        ) from error
    except psycopg.Error as error:
        raise FisherhashError(f"{uri}: {_first_line(error)}") from error


def _first_line(error: psycopg.Error) -> str:
    return (error.diag.message_primary or str(error)).strip().splitlines()[0]
