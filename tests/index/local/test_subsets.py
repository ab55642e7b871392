"""Subsets of filters: kept over commits that do not touch them, right after those that do."""

import random

import numpy as np
import pytest

from fisherhash.errors import UsageError
from fisherhash.index import Entry, Index
from fisherhash.index.local import subsets
from fisherhash.index.local.catalogue import Catalogue

ZERO = np.zeros((1, 2), np.uint8)
FILTERS = ["label=cat", "label!=cat", "v>=5", ["label=dog", "v<50"], "label="]


def code(number):
    return [number * 37 % 256, number * 91 % 256]


@pytest.fixture
def index(tmp_path):
    with Index.create(tmp_path / "a.index", bits=16) as index:
        index.add(
            Entry(f"k{i}", code(i), labels=["cat", "dog"][i % 2], metadata={"v": i})
            for i in range(60)
        )
        yield index


@pytest.fixture
def scans(monkeypatch):
    """Conditions that were evaluated over all rows."""
    seen, ids_where = [], Catalogue.ids_where

    def note(self, condition, values):
        if "BETWEEN" not in condition and condition != "(0) AND (1)":
            seen.append(condition)
        return ids_where(self, condition, values)

    monkeypatch.setattr(Catalogue, "ids_where", note)
    return seen


def test_commits_that_do_not_touch_a_filter_leave_its_subset(index, scans):
    with Index.open(index.path) as reader:
        for one in (index, reader):
            one.search(ZERO, where="label=cat")
        kept = [one._subsets._kept for one in (index, reader)]
        engines = [next(iter(k.values())).subset.engine for k in kept]
        assert len(scans) == 2
        index.add([Entry("new", code(1), labels="bird", metadata={"v": 1})])
        index.update([Entry("k1", code(2))])
        index.remove(["k3"])
        index.add_codes(np.zeros((5, 2), np.uint8))
        index.write_notes({"skipped": {"a": 1}})
        index.compact()
        for one, engine in zip((index, reader), engines, strict=True):
            found = one.search(ZERO, 100, where="label=cat")
            assert sorted(found.ids[0].tolist()) == list(range(0, 60, 2))
            (entry,) = one._subsets._kept.values()
            assert entry.subset.engine is engine
        assert len(scans) == 2
        index.update([Entry("k2", labels="bird"), Entry("k5", labels="cat")])
        index.remove(["k4"])
        for one in (index, reader):
            found = one.search(ZERO, 100, where="label=cat")
            assert sorted(found.ids[0].tolist()) == sorted({*range(0, 60, 2), 5} - {2, 4})
        assert len(scans) == 2


def test_a_field_that_no_item_has_any_more_is_an_error(index):
    index.add([Entry("only", code(1), metadata={"rare": 1})])
    assert index.search(ZERO, 100, where="rare!=2").ids.shape[1] == 61
    index.remove(["only"])
    with pytest.raises(UsageError, match="rare"):
        index.search(ZERO, where="rare!=2")


def test_many_changes_are_looked_up_anew(index, scans):
    index.search(ZERO, where="label=cat")
    for number in range(200):
        index.add([Entry(f"new {number}", code(number), labels="cat")])
    assert index.search(ZERO, 1000, where="label=cat").ids.shape[1] == 230
    assert len(scans) == 2
    (entry,) = index._subsets._kept.values()
    assert entry.commit == index.info()["commit"]


@pytest.mark.parametrize("seed", range(3))
def test_subsets_are_right_after_any_changes(index, seed):
    rng = random.Random(seed)
    with Index.open(index.path) as reader:
        for number in range(60):
            keys = index.keys()
            kind = rng.randrange(6)
            if kind == 0:
                index.add([Entry(f"n{seed}-{number}", code(number), labels="cat")])
            elif kind == 1 and keys:
                index.update([Entry(rng.choice(keys), labels=rng.choice(["cat", "dog", []]))])
            elif kind == 2 and keys:
                index.update([Entry(rng.choice(keys), code(rng.randrange(99)))])
            elif kind == 3 and len(keys) > 30:
                index.remove(rng.sample(keys, 3))
            elif kind == 4:
                index.compact()
            else:
                index.update([Entry(rng.choice(keys), metadata={"v": rng.randrange(99)})])
            if rng.random() < 0.6:
                where = rng.choice(FILTERS)
                with Index.open(index.path) as fresh:
                    right = fresh.search(ZERO, 500, where=where)
                for one in (index, reader):
                    found = one.search(ZERO, 500, where=where)
                    np.testing.assert_array_equal(found.ids, right.ids)
                    np.testing.assert_array_equal(found.distances, right.distances)


def test_the_list_of_commits_stays_short():
    recent = None
    for commit in range(1, 500):
        recent = subsets.note_commit(recent, commit, np.arange(commit, commit + 3))
        assert len(recent["commits"]) <= 64
        assert recent["commits"][-1][0] == commit
    assert subsets.touched_since(recent, 499, 499) == []
    assert subsets.touched_since(recent, 498, 499) == [(499, 502)]
    assert subsets.touched_since(recent, 100, 499) is None
    assert subsets.touched_since(recent, 499, 500) is None
    recent = subsets.note_commit(recent, 500, np.arange(0, 10_000, 2))
    assert subsets.touched_since(recent, 499, 500) is None
    # A writer that notes nothing leaves a gap.
    recent = subsets.note_commit(recent, 502, np.arange(2))
    assert subsets.touched_since(recent, 500, 502) is None
    assert subsets.touched_since({"commits": "x"}, 1, 2) is None
