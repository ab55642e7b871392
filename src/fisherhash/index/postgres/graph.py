"""The HNSW graph of pgvector: faster than a scan and approximate, so its recall is measured.

Learned codes repeat. Items with equal codes are neighbours of each other first, and a graph of
them may lose its way to the others; how much is lost depends on the codes. After the graph was
built, a sample of the stored codes is searched with and without it.
"""

from __future__ import annotations

import json
import logging
from typing import Any

from psycopg import sql

from fisherhash.errors import UsageError
from fisherhash.index.postgres.connect import Connections, Cursor
from fisherhash.index.postgres.place import Place
from fisherhash.index.postgres.schema import one_value

logger = logging.getLogger(__name__)

_SAMPLE = 100
_K = 10


def must_have_graph(cursor: Cursor, place: Place) -> None:
    """Refuse to search by a graph that was never built: it would be a scan."""
    cursor.execute("SELECT to_regclass(%s) IS NOT NULL", [f'"{place.graph}"'])
    if not one_value(cursor):
        raise UsageError(
            f"{place.uri} has no HNSW graph yet; build it with: fisherhash index build INDEX, or "
            "search without search=hnsw"
        )


def build_graph(connections: Connections, place: Place, bits: int) -> dict[str, Any]:
    """Build the graph if there is none, measure its recall, and store the result.

    Returns:
        ``m``, ``ef_construction``, ``ef_search``, ``recall``, ``k`` and ``queries``.
    """
    with connections.writing() as cursor:
        cursor.execute(
            sql.SQL(
                "CREATE INDEX IF NOT EXISTS {graph} ON {table} USING hnsw (code bit_hamming_ops)"
                " WITH (m = {m}, ef_construction = {ef})"
            ).format(
                graph=sql.Identifier(place.graph),
                table=sql.Identifier(place.table),
                m=sql.Literal(place.m),
                ef=sql.Literal(place.ef_construction),
            )
        )
    with connections.reading() as cursor:
        recall, queries = _measure(cursor, place, bits)
    known = {
        "m": place.m,
        "ef_construction": place.ef_construction,
        "ef_search": place.ef_search,
        "recall": recall,
        "k": _K,
        "queries": queries,
    }
    with connections.writing() as cursor:
        cursor.execute(
            "UPDATE fisherhash_indexes SET graph = %s WHERE name = %s",
            [json.dumps(known), place.table],
        )
    logger.info(
        "%s: searches by the HNSW graph are approximate; recall at %d of %d of its own codes is "
        "%.3f with ef_search=%d",
        place.uri,
        _K,
        queries,
        recall,
        place.ef_search,
    )
    return known


def _measure(cursor: Cursor, place: Place, bits: int) -> tuple[float, int]:
    """Recall over ties: a result counts if it is as near as the k-th of the exact search."""
    cursor.execute(
        place.sql("SELECT code::text FROM {table} ORDER BY hashint8(id), id LIMIT %s"), [_SAMPLE]
    )
    codes = [code for (code,) in cursor.fetchall()]
    if not codes:
        return 1.0, 0
    cursor.execute("SELECT set_config('hnsw.ef_search', %s, true)", [str(place.ef_search)])
    distance = f"code <~> %s::bit({bits})"
    by_scan = place.sql(f"SELECT ({distance})::int FROM {{table}} ORDER BY 1 LIMIT {_K}")
    by_graph = place.sql(f"SELECT {distance} FROM {{table}} ORDER BY 1 LIMIT {_K}")
    found = wanted = 0
    for code in codes:
        cursor.execute(by_scan, [code])
        exact = [int(one) for (one,) in cursor.fetchall()]
        # On a small table the planner would scan.
        cursor.execute("SET LOCAL enable_seqscan = off")
        cursor.execute(by_graph, [code])
        found += sum(int(one) <= exact[-1] for (one,) in cursor.fetchall())
        cursor.execute("SET LOCAL enable_seqscan = on")
        wanted += len(exact)
    return found / wanted, len(codes)
