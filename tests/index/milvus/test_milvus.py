"""What only the back-end on Milvus has: its URI, ties beyond one page, commits never made."""

import numpy as np
import pytest

from fisherhash.codes import hamming
from fisherhash.errors import FisherhashError, UsageError
from fisherhash.index import Entry, Index
from fisherhash.index.milvus import collection as collections
from fisherhash.index.milvus import nearest
from fisherhash.index.milvus.collection import RowStore, read_milvus_place

pytestmark = pytest.mark.xdist_group("milvus")


def test_the_uri_says_where():
    place = read_milvus_place(
        "milvus://host:19530/photos?index=all&search=ivf&nprobe=8&token=secret"
    )
    assert (place.server, place.database, place.name) == ("http://host:19530", "photos", "all")
    assert (place.search, place.nprobe, place.token) == ("ivf", 8, "secret")
    assert "secret" not in place.uri
    for uri, message in {
        "milvus://host:19530/db": "does not say which index",
        "milvus:///tmp/a?index=b": "must end in .db",
        "milvus:///tmp/a.db?index=b&search=ivf": "needs a Milvus server",
        "milvus:///tmp/a.db?index=b&nprob=8": "Did you mean 'nprobe'",
        "milvus:///nowhere/at/all.db?index=b": "there is no folder",
    }.items():
        with pytest.raises(UsageError, match=message):
            Index.open(uri)


def test_ties_that_fill_more_than_a_page(milvus, monkeypatch):
    """With a page of 16 rows, nearly every search has to split its range."""
    monkeypatch.setattr(nearest, "PAGE", 16)
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
        near = index.within(queries, 3)
        assert [len(hits) for hits in near] == (distances <= 3).sum(axis=1).tolist()


def test_a_commit_that_was_never_made_is_undone(milvus):
    uri = milvus.new_uri()
    with Index.create(uri, bits=16) as index:
        index.add([Entry("a", [0, 1]), Entry("b", [0, 2])], notes={"n": {"x": 1}})
    collection = RowStore(read_milvus_place(uri))
    state = collection.state()
    # A process that ended just before its commit: a new row, and an old one that is to end.
    rows = collection.query(f"row >= 0 and born <= {state.commit} and id >= 0")
    ended = rows[0]
    ended.died = state.commit + 1
    collection.replace([ended])
    new = collections.MilvusRow(99, 7, 0, state.commit + 1, collections.FOREVER, b"\0\3")
    collection.insert([new])
    with Index.open(uri) as reader:
        assert [item.key for item in reader.items()] == ["a", "b"]
    with Index.open(uri, write=True) as index:
        assert index.add_codes([[0, 5]]) == range(2, 3)
        assert [item.id for item in index.items()] == [0, 1, 2]
        assert index.get(["a", "b"]) == list(index.items())[:2]
        assert index.verify() == []


def test_what_is_too_long_is_refused(milvus):
    with Index.create(milvus.new_uri(), bits=16) as index:
        with pytest.raises(UsageError, match="65,535 bytes at most"):
            index.add([Entry("a", [0, 0], metadata={"text": "x" * 70_000})])
        assert index.count() == 0


def test_a_server_that_is_not_there():
    with pytest.raises(FisherhashError, match="Is the server running"):
        Index.open("milvus://127.0.0.1:1/db?index=a")
