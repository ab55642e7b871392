"""What only the back-end on Milvus has: its URI, ties beyond one page, commits never made."""

import json

import numpy as np
import pytest

from fisherhash.codes import hamming
from fisherhash.errors import FisherhashError, UsageError
from fisherhash.index import Entry, Index
from fisherhash.index.base import CannotWriteError, DamagedError
from fisherhash.index.milvus import index as milvus_index
from fisherhash.index.milvus import rows as milvus_rows
from fisherhash.index.milvus.rows import (
    FOREVER,
    MODEL,
    MilvusException,
    MilvusRow,
    MilvusRows,
    read_milvus_uri,
)

pytestmark = pytest.mark.xdist_group("milvus")


def test_the_uri_says_where():
    address = read_milvus_uri(
        "milvus://host:19530/photos?index=all&search=ivf&nprobe=8&token=secret"
    )
    assert address.rest == "http://host:19530"
    expected = {"index": "all", "search": "ivf", "nlist": 1024, "nprobe": 8, "token": "secret"}
    assert address.options == expected | {"database": "photos"}
    assert "secret" not in address.shown
    for uri, message in {
        "milvus://host:19530/db": "does not say which index",
        "milvus:///tmp/a?index=b": "must end in .db",
        "milvus:///tmp/a.db?index=b&search=ivf": "needs a Milvus server",
        "milvus:///tmp/a.db?index=b&nprob=8": "Did you mean 'nprobe'",
        "milvus:///nowhere/at/all.db?index=b": "there is no folder",
    }.items():
        with pytest.raises(UsageError, match=message):
            Index.open(uri)


@pytest.mark.parametrize("page", [8, 16, 200, 16_384])
def test_ties_that_fill_more_than_a_page(milvus, monkeypatch, page):
    monkeypatch.setattr(milvus_index, "PAGE", page)
    monkeypatch.setattr(milvus_rows, "PAGE", page)
    monkeypatch.setattr(milvus_index, "_MORE", 4)
    monkeypatch.setattr(milvus_rows, "_NAMES", page)
    rng = np.random.default_rng(0)
    codes = np.repeat(rng.integers(0, 256, (4, 2), dtype=np.uint8), 75, axis=0)
    codes = codes[rng.permutation(len(codes))]
    with Index.create(milvus.new_uri(), bits=16) as index:
        index.add_codes(codes)
        index.remove(ids=range(0, 300, 7))
        kept = np.array([i for i in range(300) if i % 7])
        queries = codes[:3]
        distances = hamming(queries, codes[kept]).astype(int)
        order = np.argsort(distances, axis=1, kind="stable")
        for k in (1, 5, 16, 40, 300):
            found = index.search(queries, k)
            np.testing.assert_array_equal(found.ids, kept[order[:, :k]])
        for radius in (0, 3, 16):
            near = index.within(queries, radius)
            assert [len(hits) for hits in near] == (distances <= radius).sum(axis=1).tolist()


def test_what_a_killed_writer_leaves_is_undone(milvus):
    uri = milvus.new_uri()
    with Index.create(uri, bits=16) as index:
        index.add([Entry("a", [0, 1]), Entry("b", [0, 2])], notes={"n": {"x": 1}})
    rows = MilvusRows(uri)
    commit = json.loads(rows.facts())["commit"]
    # A process that ended just before its commit: a new row, and an old one that is to end.
    ended = rows.query(f"born <= {commit} and id >= 0")[0]
    ended.died = commit + 1
    rows.replace([ended])
    rows.insert([MilvusRow(99, 7, 0, commit + 1, FOREVER, b"\0\3", "")])
    with Index.open(uri) as reader:
        assert [item.key for item in reader.items()] == ["a", "b"]
    with Index.open(uri, write=True) as index:
        assert index.add_codes([[0, 5]]) == range(2, 3)
        assert [item.id for item in index.items()] == [0, 1, 2]
        assert index.get(["a", "b"]) == list(index.items())[:2]
        assert index.verify() == []
    assert len(rows.query("row >= 0")) == 4


def test_the_next_writer_removes_rows_that_ended(milvus):
    uri = milvus.new_uri()
    with Index.create(uri, bits=16) as index, Index.open(uri) as reader:
        index.add_codes([[0, 1], [0, 2], [0, 3]])
        index.remove(ids=[1])
        rows = MilvusRows(uri)
        assert len(rows.query("row >= 0")) == 3
        Index.open(uri, write=True).close()
        assert len(rows.query("row >= 0")) == 2
        assert len(rows.query("row < 0")) == 1
        assert reader.ids().tolist() == index.ids().tolist() == [0, 2]


@pytest.mark.parametrize("stored", [False, True])
def test_a_commit_that_fails_says_what_became_of_it(milvus, monkeypatch, stored):
    with Index.create(milvus.new_uri(), bits=16) as index:
        index.add([Entry("a", [0, 1])])
        real = MilvusRows.commit

        def fail(self, *given):
            if stored:
                real(self, *given)
            raise MilvusException(message="no connection")

        monkeypatch.setattr(MilvusRows, "commit", fail)
        done = "may or may not have been stored" if stored else "Nothing was added or changed"
        with pytest.raises(CannotWriteError, match=done):
            index.upsert([Entry("a", [0, 2]), Entry("b", [0, 3])])
        monkeypatch.undo()
        assert index.keys() == (["a", "b"] if stored else ["a"])
        assert index.add_codes([[0, 1]]) == range(1 + stored, 2 + stored)
        assert index.verify() == []


def test_a_damaged_model_is_reported(milvus):
    files = {"config.json": b"{}", "model": bytes(100_000)}
    with Index.create(milvus.new_uri(), bits=16, files=files) as index:
        assert index.verify() == []
        rows = MilvusRows(index.uri)
        rows.delete([rows.query(f"id == {MODEL}")[1].row])
        assert [problem.file for problem in index.verify()] == ["the model"]
        with pytest.raises(DamagedError, match=r"the model that .* is damaged"):
            index.model_folder()


def test_what_is_too_long_is_refused(milvus):
    with Index.create(milvus.new_uri(), bits=16) as index:
        with pytest.raises(UsageError, match="65,535 bytes at most"):
            index.add([Entry("a", [0, 0], metadata={"text": "x" * 70_000})])
        assert index.count() == 0


def test_a_server_that_is_not_there():
    with pytest.raises(FisherhashError, match="Is the server running"):
        Index.open("milvus://127.0.0.1:1/db?index=a")
