"""The back-end for ``postgresql://``: one table per index, searched by pgvector."""

from fisherhash.system.extras import require_package

require_package("psycopg", "postgres", "an index on PostgreSQL")

from fisherhash.index.postgres.index import PostgresIndex  # noqa: E402 (needs psycopg)

__all__ = ["PostgresIndex"]
