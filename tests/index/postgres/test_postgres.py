"""What only the back-end on PostgreSQL has: its URI, its tables, its graph, a server that fails."""

import logging

import numpy as np
import psycopg
import pytest

from fisherhash.errors import FisherhashError, UsageError
from fisherhash.index import Entry, Index
from fisherhash.index.base import DamagedError
from fisherhash.index.postgres.connect import Database

pytestmark = pytest.mark.xdist_group("postgres")


def repeated_codes(count, bits=48, seed=0):
    """Codes as learned ones are: few centres, each many times, with a few bits flipped."""
    rng = np.random.default_rng(seed)
    centres = rng.integers(0, 2, (20, bits), dtype=np.uint8)
    chosen = centres[rng.integers(0, len(centres), count)]
    return np.packbits(chosen ^ (rng.random(chosen.shape) < 0.03), axis=1)


def table_of(uri):
    return Database(uri).table


def test_passwords_are_not_shown():
    uri = "postgresql://me:very%40secret@localhost:1/db?index=a&sslpassword=hidden&password=hidden"
    database = Database(uri)
    assert "secret" not in database.uri
    assert "hidden" not in database.uri
    assert "very%40secret" in database.conninfo
    assert "index=" not in database.conninfo
    with pytest.raises(FisherhashError, match="cannot be reached") as caught:
        Index.open(uri)
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize(
    ("query", "message"),
    [
        ("", "does not say which index"),
        ("?index=a;drop table b", "the name of an index"),
        ('?index=a"b', "the name of an index"),
        ("?index=" + "a" * 60, "at most 48"),
        ("?index=fisherhash_documents", "cannot begin with"),
        ("?index=a&search=fast", "unknown value of the option search 'fast'"),
        ("?index=a&search=hnsw&ef_search=2000", "1000 at most"),
        ("?index=a&m=x", "must be a whole number"),
    ],
)
def test_bad_uris_are_refused_before_a_connection(query, message):
    with pytest.raises(UsageError, match=message):
        Index.open("postgresql://localhost:1/db" + query)


def test_values_are_no_sql(postgres):
    evil = "x'); DROP TABLE fisherhash_documents; --"
    with Index.create(postgres.new_uri(), bits=16) as index:
        index.add([Entry(evil, [0, 0], evil, labels=[evil, "%s", "{}"], metadata={evil: evil})])
        for where in (
            {"key": evil},
            {"path": evil},
            {"label": evil},
            {evil.replace("=", ""): evil},
            {"label": "%s"},
            {"label": "{}"},
        ):
            assert index.ids(where).tolist() == [0]
            assert index.search([[0, 0]], where=where).ids.tolist() == [[0]]
            assert index.count({"label": "none"}) == 0
        index.write_notes({evil: {evil: evil}})
        assert index.notes(evil) == {evil: evil}
        index.remove([evil])
        assert index.count() == 0


def test_a_foreign_table_is_left_alone(postgres):
    uri = postgres.new_uri()
    with psycopg.connect(postgres.uri) as connection:
        connection.execute(f"CREATE TABLE {table_of(uri)} (a integer)")
    assert Index.exists(uri)
    with pytest.raises(UsageError, match="exists already"):
        Index.create(uri, bits=16)
    with pytest.raises(UsageError, match="does not exist"):
        Index.open(uri)


def test_two_writers_take_turns(postgres):
    uri = postgres.new_uri()
    with Index.create(uri, bits=16) as first, Index.open(uri, write=True) as second:
        assert first.add([Entry("a", [0, 0])]).tolist() == [0]
        assert second.add([Entry("b", [0, 0])], fingerprint=None).tolist() == [1]
        assert first.add_codes([[0, 0]]) == range(2, 3)
        with pytest.raises(UsageError, match="already has an item with the key 'b'"):
            first.add([Entry("b", [0, 0])])


def test_a_deleted_index_says_so(postgres):
    with Index.create(postgres.new_uri(), bits=16) as index:
        with psycopg.connect(postgres.uri) as connection:
            connection.execute(f"DROP TABLE {table_of(index.uri)}")
        with pytest.raises(FisherhashError, match="was deleted while it was open"):
            index.count()


def test_another_format_is_refused(postgres):
    with Index.create(postgres.new_uri(), bits=16) as index:
        with psycopg.connect(postgres.uri) as connection:
            query = "UPDATE fisherhash_documents SET value = %s WHERE index_name = %s"
            connection.execute(query, [b'{"format": 99}', table_of(index.uri)])
        with pytest.raises(FisherhashError, match="another version of fisherhash"):
            Index.open(index.uri)


def test_foreign_items_and_a_damaged_model_are_reported(postgres):
    with Index.create(postgres.new_uri(), bits=16, files={"config.json": b"{}"}) as index:
        index.add_codes([[0, 0]])
        assert index.verify() == []
        with psycopg.connect(postgres.uri) as connection:
            connection.execute("UPDATE fisherhash_documents SET value = 'x' WHERE kind = 'file'")
            connection.execute(
                f"INSERT INTO {table_of(index.uri)} (id, code) VALUES (9, B'{0:016}')"
            )
        assert [problem.file for problem in index.verify()] == [
            "the model",
            f"table {table_of(index.uri)}",
        ]
        with pytest.raises(DamagedError, match=r"the model that .* is damaged"):
            index.model_folder()


def test_a_writer_builds_the_graph_and_measures_its_recall(postgres, caplog):
    codes = repeated_codes(3000)
    uri = postgres.new_uri()
    graph = f"{uri}&search=hnsw&ef_search=100"
    with Index.create(uri, bits=48) as index:
        index.add_codes(codes)
        exact = index.search(codes[:20], 10)
    with Index.open(graph) as reader, pytest.raises(UsageError, match="no HNSW graph yet"):
        reader.search(codes[:1], 10)
    with caplog.at_level(logging.INFO):
        Index.open(graph, write=True).close()
        Index.open(graph, write=True).close()
    assert caplog.text.count("recall at 10") == 1
    with Index.open(graph) as reader:
        known = reader.info()["graph"]
    assert (known["queries"], known["k"], known["ef_search"]) == (100, 10, 100)
    assert 0 < known["recall"] <= 1
    with Index.open(graph) as near, Index.open(uri) as scanning:
        found = near.search(codes[:20], 10)
        # What a graph returns is ordered like any result, with true distances.
        for hits, code in zip(found, codes[:20], strict=True):
            assert hits == sorted(hits, key=lambda hit: (hit.distance, hit.id))
            own = near.codes([hit.id for hit in hits])
            distances = np.bitwise_count(own ^ code).sum(axis=1).tolist()
            assert distances == [hit.distance for hit in hits]
        # Without the option, the graph that is there changes nothing; nor do radius and filters.
        assert scanning.search(codes[:20], 10).to_list() == exact.to_list()
        assert near.within(codes[:2], 3).to_list() == scanning.within(codes[:2], 3).to_list()
