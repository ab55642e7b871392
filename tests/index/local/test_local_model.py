"""Random sequences of changes: after each the index answers like a dictionary and brute force."""

import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from fisherhash.codes import hamming
from fisherhash.index import LocalIndex
from fisherhash.index.local import segments, writing

BITS = 10
KEYS = st.lists(st.sampled_from([f"k{i}" for i in range(12)]), min_size=1, max_size=6, unique=True)
SEEDS = st.integers(0, 2**32 - 1)


class IndexMachine(RuleBasedStateMachine):
    """One writer, now and then opened again, and a reader that stays open."""

    @initialize(longest=st.sampled_from([4, 1000]), tail=st.sampled_from([2, 100_000]))
    def start(self, longest, tail):
        self.patch = pytest.MonkeyPatch()
        self.patch.setattr(writing, "MAX_LENGTH", longest)
        self.patch.setattr(segments, "TAIL", tail)
        self.folder = tempfile.TemporaryDirectory()
        self.path = Path(self.folder.name) / "index"
        self.index = LocalIndex.create(self.path, bits=BITS)
        self.reader = LocalIndex.open(self.path)
        self.codes = {}  # id -> code
        self.keys = {}  # key -> (id, label)
        self.next_id = 0

    def teardown(self):
        if hasattr(self, "index"):
            self.index.close()
            self.reader.close()
            self.folder.cleanup()
            self.patch.undo()

    def some_codes(self, count, seed):
        """Few different ones, so that ties are common."""
        bits = np.random.default_rng(seed).integers(0, 2, (count, BITS))
        bits[:, 3:] = 0
        return np.packbits(bits.astype(np.uint8), axis=1)

    def give_ids(self, codes):
        ids = list(range(self.next_id, self.next_id + len(codes)))
        self.next_id += len(codes)
        self.codes |= dict(zip(ids, codes, strict=True))
        return ids

    @rule(keys=KEYS, seed=SEEDS, label=st.sampled_from(["a", "b"]))
    def upsert(self, keys, seed, label):
        codes = self.some_codes(len(keys), seed)
        ids = self.index.upsert(keys, codes, labels=[label] * len(keys)).tolist()
        fresh = [i for i, key in enumerate(keys) if key not in self.keys]
        given = dict(zip(fresh, self.give_ids(codes[fresh]), strict=True))
        for i, key in enumerate(keys):
            id_ = given[i] if i in given else self.keys[key][0]
            self.codes[id_] = codes[i]
            self.keys[key] = (id_, label)
            assert ids[i] == id_

    @rule(count=st.integers(0, 9), seed=SEEDS)
    def add_codes(self, count, seed):
        codes = self.some_codes(count, seed)
        assert list(self.index.add_codes(codes)) == self.give_ids(codes)

    @precondition(lambda self: self.codes)
    @rule(data=st.data())
    def remove_ids(self, data):
        ids = data.draw(st.lists(st.sampled_from(sorted(self.codes)), max_size=8))
        assert self.index.remove(ids=ids) == len(set(ids))
        for id_ in set(ids):
            del self.codes[id_]
        self.keys = {key: item for key, item in self.keys.items() if item[0] in self.codes}

    @precondition(lambda self: self.keys)
    @rule(data=st.data())
    def remove_keys(self, data):
        keys = data.draw(st.lists(st.sampled_from(sorted(self.keys)), unique=True, min_size=1))
        assert self.index.remove(keys) == len(keys)
        for key in keys:
            del self.codes[self.keys.pop(key)[0]]

    @rule()
    def compact(self):
        self.index.compact()

    @rule()
    def build(self):
        self.index.build()

    @rule()
    def open_again(self):
        self.index.close()
        self.index = LocalIndex.open(self.path, write=True)

    @rule(seed=SEEDS, k=st.integers(1, 30), label=st.sampled_from([None, "a", "b"]))
    def search(self, seed, k, label):
        queries = self.some_codes(2, seed)
        kept = self.codes
        if label is not None:
            kept = {id_: self.codes[id_] for id_, own in self.keys.values() if own == label}
        where = None if label is None else {"label": label}
        ids = np.array(sorted(kept), dtype=np.int64)
        codes = np.array([kept[id_] for id_ in ids], dtype=np.uint8).reshape(-1, 2)
        distances = hamming(queries, codes).astype(np.int64)
        order = np.argsort(distances, axis=1, kind="stable")
        for one in (self.index, self.reader):
            found = one.search(queries, k, where=where)
            np.testing.assert_array_equal(found.ids, ids[order][:, :k])
            np.testing.assert_array_equal(
                found.distances, np.take_along_axis(distances, order, axis=1)[:, :k]
            )
            near = one.within(queries, 1, where=where)
            for number in range(2):
                inside = distances[number][order[number]] <= 1
                assert near.of(number)[0].tolist() == ids[order[number]][inside].tolist()

    @invariant()
    def tells_the_same(self):
        if not hasattr(self, "index"):
            return
        for one in (self.index, self.reader):
            assert len(one) == len(self.codes)
            assert {key: facts[2] for key, facts in one.files().items()} == {
                key: id_ for key, (id_, _) in self.keys.items()
            }
            scanned = list(one.scan(5))
            ids = [id_ for part, _ in scanned for id_ in part.tolist()]
            assert ids == sorted(self.codes)
            np.testing.assert_array_equal(
                one.codes(ids), np.array([self.codes[id_] for id_ in ids]).reshape(-1, 2)
            )
            for part, codes in scanned:
                np.testing.assert_array_equal(codes, [self.codes[id_] for id_ in part.tolist()])
            assert [item.key for item in one.items(ids)] == [
                next((key for key, own in self.keys.items() if own[0] == id_), None) for id_ in ids
            ]
        assert self.reader.verify() == []


TestIndexMachine = IndexMachine.TestCase
TestIndexMachine.settings = settings(max_examples=15, stateful_step_count=15, deadline=None)


@pytest.mark.slow
class TestLong(IndexMachine.TestCase):
    settings = settings(max_examples=80, stateful_step_count=25, deadline=None)
