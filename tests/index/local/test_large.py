"""An index larger than the memory, at small scale: limits are lowered, ids are high."""

import numpy as np
import pytest

from fisherhash.index import Entry, Index
from fisherhash.index.items import Item
from fisherhash.index.local import change, stored, subsets

BITS = 24
HIGH = (1 << 33) - 40


def codes_of(n, seed=0):
    return np.random.default_rng(seed).integers(0, 4, (n, BITS // 8), dtype=np.uint8)


def expected_nearest(codes, ids, query, k):
    distances = np.bitwise_count(codes ^ query).sum(1).astype(np.int64)
    order = np.lexsort((ids, distances))[:k]
    return ids[order].tolist(), distances[order].tolist()


@pytest.fixture
def low_limits(monkeypatch):
    """Files of 30 codes, all mapped."""
    monkeypatch.setattr(change, "MAX_LENGTH", 30)
    monkeypatch.setattr(stored, "most_in_memory", lambda: 0)


def test_ids_past_32_bits_in_many_mapped_files(tmp_path, low_limits):
    """Searches, filters, removals and compaction, with ids on both sides of 2**33."""
    codes, ids = codes_of(100), np.arange(HIGH, HIGH + 100)
    with Index.create(str(tmp_path / "x.index"), bits=BITS) as index:
        index.add_items(
            Item(id=int(i), key=f"k{i}", code=code.tobytes(), metadata={"even": int(i % 2 == 0)})
            for i, code in zip(ids, codes, strict=True)
        )
    with Index.open(str(tmp_path / "x.index"), write=True) as index:
        assert index.count() == 100
        query = codes_of(1, seed=1)
        found = index.search(query, 20)
        nearest = expected_nearest(codes, ids, query[0], 20)
        assert (found.ids[0].tolist(), found.distances[0].tolist()) == nearest
        even = ids % 2 == 0
        found = index.search(query, 20, where="even=1")
        assert found.ids[0].tolist() == expected_nearest(codes[even], ids[even], query[0], 20)[0]
        assert index.get(int(ids[77])).key == f"k{ids[77]}"
        index.remove([f"k{i}" for i in ids[10:50]])
        index.compact()
        left = np.r_[0:10, 50:100]
        found = index.search(query, 60)
        assert found.ids[0].tolist() == expected_nearest(codes[left], ids[left], query[0], 60)[0]
        (added,) = index.add([Entry("new", query[0])])
        assert added == HIGH + 100
        assert index.search(query, 1).ids.tolist()[0][0] in (added, nearest[0][0])


def test_large_subsets_are_not_all_kept(tmp_path, monkeypatch):
    codes = codes_of(90)
    with Index.create(str(tmp_path / "x.index"), bits=BITS) as index:
        index.add([Entry(f"k{i}", code, metadata={"a": i % 3}) for i, code in enumerate(codes)])
        for number in range(3):
            index.search(codes[:1], 5, where=f"a={number}")
        assert len(index._subsets._kept) == 3
        monkeypatch.setattr(subsets, "_SMALL_BYTES", 0)
        # 30 items of 8 + 2 * 3 bytes each: two subsets are a quarter of this, three are more.
        monkeypatch.setattr(subsets, "available_memory", lambda: 4 * 2 * 30 * 14)
        index.search(codes[:1], 5, where="a=0")
        assert len(index._subsets._kept) == 2
        monkeypatch.setattr(subsets, "available_memory", lambda: 0)
        assert index.search(codes[:1], 5, where="a=1").ids.shape == (1, 5)
        assert len(index._subsets._kept) == 1
        monkeypatch.setattr(subsets, "available_memory", lambda: None)
        index.search(codes[:1], 5, where="a=0")
        assert len(index._subsets._kept) == 2


def test_files_are_mapped_as_memory_fills_up(monkeypatch):
    for free, most in ((1 << 40, 1 << 30), (1 << 32, 1 << 29), (80, 10), (None, 1 << 30)):
        monkeypatch.setattr(stored, "available_memory", lambda free=free: free)
        assert stored.most_in_memory() == most
