"""Items that are read ahead are those that single reads return, from the same commit."""

import numpy as np
import pytest

from fisherhash.index import Entry, Index
from fisherhash.index.base import DamagedError
from fisherhash.index.local import item_reader

COUNT = 200


@pytest.fixture
def path(tmp_path, monkeypatch):
    monkeypatch.setattr(item_reader, "SINGLE_READS", 3)
    monkeypatch.setattr(item_reader, "ITEMS_AHEAD", 64)
    monkeypatch.setattr(item_reader, "ROWS_AHEAD", 64)
    codes = np.random.default_rng(0).integers(0, 256, (COUNT, 4), dtype=np.uint8)
    with Index.create(tmp_path / "a.index", bits=32) as index:
        index.add(Entry(f"k{i}", row, metadata={"n": i}) for i, row in enumerate(codes))
        index.remove(["k70"])
    return tmp_path / "a.index"


def executed(index):
    """The statements about items that a call runs, as they come."""
    seen = []

    def trace(sql):
        if "items" in sql:
            seen.append(sql)

    index._catalogue._db.set_trace_callback(trace)
    return seen


def test_after_some_reads_the_rest_comes_from_memory(path):
    with Index.open(path) as index:
        expected = {item.id: item for item in index.items()}
        for number in (0, 1, 2, 3, 100, 150, 199):
            assert index.get(number) == expected[number]
        seen = executed(index)
        for number in range(COUNT):
            assert index.get_items([number]) == [expected.get(number)]
            key = f"k{number}"
            assert index.get_items([key]) == [expected.get(number)]
        # What does not exist is looked up every time.
        assert {sql.partition(" IN ")[2] for sql in seen} == {"(70)", "('k70')"}


def test_a_large_index_warms_the_pages_only(path, monkeypatch):
    monkeypatch.setattr(item_reader, "MOST_ITEMS", 100)
    with Index.open(path) as index:
        for number in range(3):
            index.get(number)
        seen = executed(index)
        index.get(3)
        assert [sql for sql in seen if "max(crc)" in sql] == [
            "SELECT max(crc) FROM items WHERE id >= 0 AND id < 64"
        ]
        for number in range(4, 20):
            index.get(number)
        assert sum("max(crc)" in sql for sql in seen) == -(-COUNT // 64)
        assert index.get(150).metadata == {"n": 150}


def test_a_new_commit_is_read_anew(path):
    with Index.open(path) as reader:
        for number in range(20):
            reader.get(number)
        with Index.open(path, write=True) as writer:
            writer.update([Entry("k5", metadata={"n": -5})])
        assert reader.get(5).metadata == {"n": -5}
        assert reader.get("k5").metadata == {"n": -5}
        assert reader.get(150).metadata == {"n": 150}


def test_damage_is_found_in_what_is_read_ahead(path):
    with Index.open(path) as index:
        for number in range(3):
            index.get(number)
        rows = index._catalogue.rows_where

        def damaged(condition, values):
            first = next(iter(rows(condition, values).values()))
            return index._catalogue._checked_items([(*first[:6], '{"n": 9}', first[7])])

        index._catalogue.rows_where = damaged
        with pytest.raises(DamagedError, match=r"the row of item 0 is not what was written"):
            index.get(3)
