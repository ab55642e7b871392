"""The tables on the server: one per index, and three that all indexes of a database share.

``fisherhash_schema`` has the version of all of them. Another version is migrated when an index is
opened for writing or created: every step of :data:`MIGRATIONS` between the two is executed, all in
one transaction.
"""

from __future__ import annotations

import json
from typing import Any, NamedTuple

from psycopg import errors as pg_errors
from psycopg import sql

from fisherhash.errors import FisherhashError, UsageError
from fisherhash.index.carried import CarriedModel
from fisherhash.index.postgres.connect import Cursor
from fisherhash.index.postgres.place import Place


class Migration(NamedTuple):
    """Statements from one version of the tables to the next.

    Attributes:
        shared: for the tables that all indexes share.
        each: for the table of each index, which is named ``{table}``.
    """

    shared: tuple[str, ...] = ()
    each: tuple[str, ...] = ()


VERSION = 1
MIGRATIONS: dict[int, Migration] = {}
"""By the version that they start from."""

_LOCK = 7_235_421_908
"""Of the advisory lock that one process holds while it creates or migrates tables."""
_PART = 1 << 23
_SHARED = (
    "CREATE TABLE fisherhash_schema (version integer NOT NULL)",
    """CREATE TABLE fisherhash_indexes (
        name text PRIMARY KEY,
        bits integer NOT NULL,
        fingerprint text,
        model text NOT NULL,
        archive text,
        next_id bigint NOT NULL DEFAULT 0,
        removed bigint NOT NULL DEFAULT 0,
        graph text)""",
    """CREATE TABLE fisherhash_notes (
        index_name text NOT NULL REFERENCES fisherhash_indexes ON DELETE CASCADE,
        kind text COLLATE "C" NOT NULL,
        name text COLLATE "C" NOT NULL,
        value text NOT NULL,
        PRIMARY KEY (index_name, kind, name))""",
    """CREATE TABLE fisherhash_models (
        index_name text NOT NULL REFERENCES fisherhash_indexes ON DELETE CASCADE,
        part integer NOT NULL,
        data bytea NOT NULL,
        PRIMARY KEY (index_name, part))""",
)
_TABLE = """CREATE TABLE {table} (
    id bigint PRIMARY KEY,
    code bit({bits}) NOT NULL,
    key text COLLATE "C" UNIQUE,
    path text COLLATE "C",
    size bigint,
    mtime_ns bigint,
    labels text[] NOT NULL DEFAULT '{{}}',
    metadata jsonb NOT NULL DEFAULT '{{}}')"""


class Facts(NamedTuple):
    """What the shared table has about an index."""

    bits: int
    fingerprint: str | None
    model: dict[str, Any]
    archive: str | None
    next_id: int
    removed: int
    graph: dict[str, Any] | None


def schema_version(cursor: Cursor) -> int | None:
    """The version of the tables; None where there are none."""
    cursor.execute("SELECT to_regclass('fisherhash_schema') IS NOT NULL")
    if not one_value(cursor):
        return None
    cursor.execute("SELECT version FROM fisherhash_schema")
    return int(one_value(cursor))


def one_value(cursor: Cursor) -> Any:
    """The only value of a result."""
    row = cursor.fetchone()
    return None if row is None else row[0]


def ensure_schema(cursor: Cursor, uri: str, *, create: bool) -> None:
    """Create or migrate the shared tables and those of all indexes; for a transaction that writes.

    Raises:
        FisherhashError: the tables are of a newer version.
    """
    version = schema_version(cursor)
    if version == VERSION or (version is None and not create):
        return
    cursor.execute("SELECT pg_advisory_xact_lock(%s)", [_LOCK])
    version = schema_version(cursor)
    if version is None:
        _create_shared(cursor, uri)
        return
    check_version(version, uri, migrate=True)
    while version < VERSION:
        step = MIGRATIONS[version]
        for statement in step.shared:
            cursor.execute(sql.SQL(statement))  # type: ignore[arg-type]
        # A table that somebody dropped has nothing to migrate.
        cursor.execute(
            "SELECT name FROM fisherhash_indexes WHERE to_regclass(quote_ident(name)) IS NOT NULL"
        )
        for (name,) in cursor.fetchall():
            for statement in step.each:
                table = sql.Identifier(name)
                cursor.execute(sql.SQL(statement).format(table=table))  # type: ignore[arg-type]
        version += 1
    cursor.execute("UPDATE fisherhash_schema SET version = %s", [version])


def check_version(version: int, uri: str, *, migrate: bool = False) -> None:
    """Refuse tables of a newer version and, unless they are about to be migrated, of an older."""
    if version > VERSION:
        raise FisherhashError(
            f"{uri} was written by a newer fisherhash (tables of version {version}, this one knows "
            f"{VERSION}); install that one"
        )
    if version < VERSION and not migrate:
        raise FisherhashError(
            f"{uri} has tables of version {version}, this fisherhash uses version {VERSION}. Open "
            "it once for writing, and they are migrated: for example fisherhash index compact"
        )


def _create_shared(cursor: Cursor, uri: str) -> None:
    try:
        cursor.execute("CREATE EXTENSION IF NOT EXISTS vector")
    except (pg_errors.InsufficientPrivilege, pg_errors.UndefinedFile) as error:
        raise FisherhashError(
            f"{uri} needs the extension pgvector ({error.diag.message_primary}). "
            "Install it on the server, then let an administrator run: CREATE EXTENSION vector"
        ) from error
    for statement in _SHARED:
        cursor.execute(sql.SQL(statement))
    cursor.execute("INSERT INTO fisherhash_schema VALUES (%s)", [VERSION])


def create_index(
    cursor: Cursor, place: Place, facts: dict[str, Any], model: CarriedModel | None
) -> None:
    """Create the table of an index and what belongs to it."""
    ensure_schema(cursor, place.uri, create=True)
    try:
        cursor.execute(
            sql.SQL(_TABLE).format(
                table=sql.Identifier(place.table), bits=sql.Literal(facts["bits"])
            )
        )
        cursor.execute(
            "INSERT INTO fisherhash_indexes (name, bits, fingerprint, model, archive)"
            " VALUES (%s, %s, %s, %s, %s)",
            [
                place.table,
                facts["bits"],
                facts["fingerprint"],
                json.dumps(facts["model"]),
                model.digest if model else None,
            ],
        )
    except (pg_errors.DuplicateTable, pg_errors.UniqueViolation) as error:
        raise UsageError(f"{place.uri} exists already: there is a table {place.table}") from error
    for part, data in enumerate(model.parts(_PART) if model else ()):
        cursor.execute(
            "INSERT INTO fisherhash_models VALUES (%s, %s, %s)", [place.table, part, data]
        )


def read_facts(cursor: Cursor, place: Place, *, lock: bool = False) -> Facts | None:
    """What the shared table has about an index; ``lock`` lets no other process change it."""
    cursor.execute(
        "SELECT bits, fingerprint, model, archive, next_id, removed, graph FROM fisherhash_indexes"
        " WHERE name = %s" + (" FOR UPDATE" if lock else ""),
        [place.table],
    )
    row = cursor.fetchone()
    if row is None:
        return None
    bits, fingerprint, model, archive, next_id, removed, graph = row
    known = None if graph is None else json.loads(graph)
    return Facts(bits, fingerprint, json.loads(model), archive, next_id, removed, known)


def read_archive(cursor: Cursor, place: Place) -> bytes:
    """The packed model of an index."""
    cursor.execute(
        "SELECT data FROM fisherhash_models WHERE index_name = %s ORDER BY part", [place.table]
    )
    return b"".join(data for (data,) in cursor)
