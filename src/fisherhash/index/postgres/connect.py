"""Connections to PostgreSQL: a few are kept, each call uses one, and errors say what to do."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator

import psycopg
from psycopg import errors as pg_errors
from psycopg import pq
from psycopg.adapt import Buffer, Loader

from fisherhash.errors import FisherhashError, UsageError
from fisherhash.index.base import CannotWriteError, UnknownOutcomeError
from fisherhash.index.postgres.place import Place

Connection = psycopg.Connection
Cursor = psycopg.Cursor
_MAX_IDLE = 4
_BIT = 1560
_REFUSED = (
    pg_errors.InsufficientPrivilege,
    pg_errors.InvalidPassword,
    pg_errors.InvalidAuthorizationSpecification,
    pg_errors.InvalidCatalogName,
)


class _BitLoader(Loader):
    """Codes as our packed bytes: the binary form of a bit string is its length and these bytes."""

    format = pq.Format.BINARY

    def load(self, data: Buffer) -> bytes:
        return bytes(data[4:])


class Connections:
    """Connections to the server of an index; threads and open iterators have one each."""

    def __init__(self, place: Place) -> None:
        self._place = place
        self._idle: list[Connection] = []
        self._lock = threading.Lock()
        self._closed = False
        self._process = os.getpid()

    def close(self) -> None:
        """Close those that nobody uses; the others are closed when they are given back."""
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, []
        if self._process == os.getpid():
            for connection in idle:
                connection.close()

    def _take(self) -> Connection:
        uri = self._place.uri
        if self._closed:
            raise UsageError(f"{uri} was closed")
        if self._process != os.getpid():
            raise UsageError(f"{uri} was opened before this process was forked; open it again here")
        with self._lock:
            if self._idle:
                return self._idle.pop()
        connection = psycopg.connect(self._place.conninfo, application_name="fisherhash")
        connection.adapters.register_loader(_BIT, _BitLoader)
        # Searches look expensive to the planner, and compiling them costs more than they do.
        connection.execute("SET jit = off")
        connection.commit()
        return connection

    def _give_back(self, connection: Connection) -> None:
        usable = not connection.closed
        if usable and connection.info.transaction_status != pq.TransactionStatus.IDLE:
            with contextlib.suppress(psycopg.Error):
                connection.rollback()
            usable = not connection.closed
        with self._lock:
            if usable and not self._closed and len(self._idle) < _MAX_IDLE:
                self._idle.append(connection)
                return
        connection.close()

    @contextlib.contextmanager
    def connection(self) -> Iterator[Connection]:
        """A connection; errors of the server become ours."""
        with explained(self._place.uri):
            connection = self._take()
            try:
                yield connection
            finally:
                self._give_back(connection)

    @contextlib.contextmanager
    def reading(self) -> Iterator[Cursor]:
        """One snapshot for all that is read inside."""
        with self.connection() as connection:
            connection.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
            connection.read_only = True
            yield connection.cursor(binary=True)
            connection.rollback()

    @contextlib.contextmanager
    def writing(self) -> Iterator[Cursor]:
        """One transaction: all that is done inside is committed at the end, or nothing is."""
        with self.connection() as connection:
            connection.isolation_level = psycopg.IsolationLevel.READ_COMMITTED
            connection.read_only = False
            try:
                yield connection.cursor(binary=True)
            except (psycopg.OperationalError, psycopg.InterfaceError) as error:
                raise CannotWriteError(
                    f"{self._place.uri}: {_first_line(error)}", "see that the server runs"
                ) from error
            try:
                connection.commit()
            except (psycopg.OperationalError, psycopg.InterfaceError) as error:
                raise UnknownOutcomeError(
                    f"{self._place.uri}: the connection was lost during a commit "
                    f"({_first_line(error)})",
                    "look at the index",
                    done="The change may or may not have been stored",
                ) from error


@contextlib.contextmanager
def explained(uri: str) -> Iterator[None]:
    """Turn errors of the server into errors that say what to do."""
    try:
        yield
    except pg_errors.UndefinedTable as error:
        raise FisherhashError(
            f"{uri} was deleted while it was open, or never was complete: {_first_line(error)}"
        ) from error
    except _REFUSED as error:
        raise UsageError(f"{uri} refuses: {_first_line(error)}") from error
    except (psycopg.OperationalError, psycopg.InterfaceError) as error:
        raise FisherhashError(
            f"{uri} cannot be reached: {_first_line(error)}. Is the server running?"
        ) from error
    except psycopg.Error as error:
        raise FisherhashError(f"{uri}: {_first_line(error)}") from error


def _first_line(error: psycopg.Error) -> str:
    return (error.diag.message_primary or str(error)).strip().splitlines()[0]
