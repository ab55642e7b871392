"""Ranked searches on every back-end: real-valued queries, and second codes where it has those."""

import functools

import numpy as np
import pytest

from fisherhash.codes import pack, unpack
from fisherhash.errors import UsageError
from fisherhash.index import Entry, Index, Item
from fisherhash.index.copying import copy_index
from fisherhash.index.engine import PATHS, Engine
from fisherhash.index.local import records

BITS, FINE = 13, 20
COUNT = 60


def logits_of(count, seed, bits=BITS):
    # few directions, so that codes repeat and distances tie
    rng = np.random.default_rng(seed)
    return rng.choice([-2.0, -1.0, 0.5, 1.0], (3, bits))[rng.integers(0, 3, count)] + rng.choice(
        [-1.0, 0.0, 1.0], (count, bits), p=[0.1, 0.8, 0.1]
    )


CODES = pack(logits_of(COUNT, 0))
SECOND = pack(np.random.default_rng(1).standard_normal((COUNT, FINE)))
LOGITS = logits_of(4, 2)
QUERIES = pack(LOGITS)
QUERY_SECOND = pack(np.random.default_rng(3).standard_normal((4, FINE)))


def brute(items, k, *, real=False, fine=False, fine_weight=None):
    """Ids of the k best among {id: (code, second code)}, bit by bit."""
    found = []
    for q in range(len(QUERIES)):
        rows = []
        weights = np.abs(LOGITS[q]) if real else np.ones(BITS)
        for id_, (code, second) in items.items():
            apart = unpack(code[None], BITS)[0] != unpack(QUERIES[q : q + 1], BITS)[0]
            distance = float((apart * weights).sum()) / weights.mean()
            other = 0
            if fine:
                other = int(np.bitwise_count(second ^ QUERY_SECOND[q]).sum())
            rows.append((round(distance, 9), other, id_))
        if fine_weight is not None:
            rows.sort(key=lambda row: (round(row[0] + fine_weight * row[1], 9), row[0], row[2]))
        else:
            rows.sort()
        found.append([row[2] for row in rows[:k]])
    return found


@pytest.fixture
def plain(new_uri):
    with Index.create(new_uri(), bits=BITS) as index:
        labels = ["even", "odd"] * 15
        index.add(Entry(f"k{i}", CODES[i], labels=labels[i]) for i in range(30))
        index.add_codes(CODES[30:])
        yield index


@pytest.fixture
def double(new_uri):
    uri = new_uri()
    try:
        index = Index.create(uri, bits=BITS, fine_bits=FINE)
    except UsageError:
        with pytest.raises(UsageError, match="cannot hold second codes"):
            Index.create(uri, bits=BITS, fine_bits=FINE)
        pytest.skip("this back-end has no second codes")
    with index:
        labels = ["even", "odd"] * 15
        index.add(
            Entry(f"k{i}", CODES[i], labels=labels[i], fine=SECOND[i].tobytes()) for i in range(30)
        )
        index.add_codes(CODES[30:], fine=SECOND[30:])
        yield index


def everything():
    return {i: (CODES[i], SECOND[i]) for i in range(COUNT)}


def test_real_valued_queries_equal_brute_force(plain):
    items = everything()
    for k in (1, 7, 100):
        found = plain.search(QUERIES, k, ranking="real", logits=LOGITS)
        assert found.ids.tolist() == brute(items, k, real=True)
        assert found.fines is None
        # the codes are the signs of the logits
        assert plain.search(None, k, ranking="real", logits=LOGITS).to_list() == found.to_list()
    even = {i: items[i] for i in range(0, 30, 2)}
    found = plain.search(None, 5, ranking="real", logits=LOGITS, where="label=even")
    assert found.ids.tolist() == brute(even, 5, real=True)
    # in units of the mean weight
    weights = np.abs(LOGITS[0])
    apart = unpack(CODES[found.ids[0]], BITS) != unpack(QUERIES[:1], BITS)
    np.testing.assert_allclose(found.distances[0], (apart * weights).sum(axis=1) / weights.mean())
    assert plain.search(None, 5, ranking="real", logits=LOGITS, where="label=none").ids.size == 0


def test_removed_and_changed_items_are_ranked_as_they_are(plain):
    items = everything()
    plain.remove(["k3", "k4"], ids=[40, 41])
    plain.update([Entry("k0", CODES[50])])
    items = {i: v for i, v in items.items() if i not in (3, 4, 40, 41)}
    items[0] = (CODES[50], SECOND[0])
    for one in (plain, Index.open(plain.uri)):
        for k in (5, 100):
            found = one.search(None, k, ranking="real", logits=LOGITS)
            assert found.ids.tolist() == brute(items, k, real=True)


def test_second_codes_order_ties(double):
    items = everything()
    assert double.fine_bits == FINE
    assert double.info()["fine_bits"] == FINE
    with Index.open(double.uri) as reader:
        for one in (double, reader):
            assert one.fine_bits == FINE
            for k in (1, 8, 100):
                for real in (False, True):
                    args = {"ranking": "real", "logits": LOGITS} if real else {}
                    found = one.search(QUERIES, k, fine=QUERY_SECOND, **args)
                    assert found.ids.tolist() == brute(items, k, real=real, fine=True)
                    for weight in (0.0, 0.25, 3.0):
                        found = one.search(
                            QUERIES, k, fine=QUERY_SECOND, fine_weight=weight, **args
                        )
                        want = brute(items, k, real=real, fine=True, fine_weight=weight)
                        assert found.ids.tolist() == want
            # without those of the queries, as always
            assert one.search(QUERIES, 9).ids.tolist() == brute(items, 9)
            odd = {i: items[i] for i in range(1, 30, 2)}
            found = one.search(QUERIES, 6, fine=QUERY_SECOND, where="label=odd")
            assert found.ids.tolist() == brute(odd, 6, fine=True)
            apart = np.bitwise_count(SECOND[found.ids[0]] ^ QUERY_SECOND[0]).sum(axis=1)
            assert found.fines[0].tolist() == apart.tolist()
            assert one.within(QUERIES, 2).ids.size


@pytest.mark.parametrize("path", PATHS)
def test_sums_of_filtered_and_removed_items(monkeypatch, double, path):
    monkeypatch.setattr(records, "Engine", functools.partial(Engine, path=path))
    items = everything()
    double.remove(["k5", "k6"], ids=[33])
    items = {i: v for i, v in items.items() if i not in (5, 6, 33)}
    odd = {i: v for i, v in items.items() if i < 30 and i % 2}
    with Index.open(double.uri) as reader:
        for k in (1, 6, 100):
            for weight in (0.0, 1 / 4, 1000.0):
                for real in (False, True):
                    args = {"ranking": "real", "logits": LOGITS} if real else {}
                    args |= {"fine": QUERY_SECOND, "fine_weight": weight}
                    want = brute(items, k, real=real, fine=True, fine_weight=weight)
                    assert reader.search(QUERIES, k, **args).ids.tolist() == want
                    found = reader.search(QUERIES, k, where="label=odd", **args)
                    want = brute(odd, k, real=real, fine=True, fine_weight=weight)
                    assert found.ids.tolist() == want


def test_second_codes_stay_with_their_items(double):
    items = everything()
    double.remove(["k5", "k6"], ids=[33])
    double.update([Entry("k1", CODES[9], fine=SECOND[8]), Entry("k2", labels="odd")])
    double.upsert([Entry("new", CODES[7], fine=SECOND[7])])
    items = {i: v for i, v in items.items() if i not in (5, 6, 33)}
    items |= {1: (CODES[9], SECOND[8]), COUNT: (CODES[7], SECOND[7])}
    for _ in range(2):
        assert {i.id: (i.code, i.fine) for i in double.items()} == {
            id_: (code.tobytes(), second.tobytes()) for id_, (code, second) in items.items()
        }
        assert double.get("k2") == Item(
            2, CODES[2].tobytes(), "k2", labels=("odd",), fine=SECOND[2].tobytes()
        )
        np.testing.assert_array_equal(double.codes([1, 40]), [CODES[9], CODES[40]])
        ids, codes = (np.concatenate(parts) for parts in zip(*double.scan(7), strict=True))
        np.testing.assert_array_equal(codes, [items[i][0] for i in ids.tolist()])
        found = double.search(QUERIES, 20, fine=QUERY_SECOND)
        assert found.ids.tolist() == brute(items, 20, fine=True)
        double.compact()
    assert double.verify() == []


def test_a_copy_has_the_second_codes_too(double, new_uri):
    double.remove(["k5"], ids=[COUNT - 1])
    target = new_uri()
    copy_index(double.uri, target)
    with Index.open(target) as copy:
        assert copy.fine_bits == FINE
        assert list(copy.items()) == list(double.items())
        found, want = (i.search(QUERIES, 9, fine=QUERY_SECOND) for i in (copy, double))
        assert found.to_list() == want.to_list()


def test_what_does_not_fit_is_refused(double, plain):
    before = list(double.items())
    with pytest.raises(UsageError, match="has one code only"):
        double.add([Entry("x", CODES[0])])
    with pytest.raises(UsageError, match="has one code only"):
        double.update([Entry("k1", fine=SECOND[0])])
    with pytest.raises(UsageError, match="needs second codes of 20 bits"):
        double.add_codes(CODES)
    with pytest.raises(UsageError, match="one second code for every code"):
        double.add_codes(CODES, fine=SECOND[1:])
    with pytest.raises(UsageError, match=r"shape \(n, 3\)"):
        double.add_codes(CODES, fine=CODES)
    with pytest.raises(UsageError, match=r"3 bytes|shape"):
        double.add([Entry("x", CODES[0], fine=CODES[0])])
    assert list(double.items()) == before
    with pytest.raises(UsageError, match="has a second code, but the index holds none"):
        plain.add([Entry("x", CODES[0], fine=SECOND[0])])
    with pytest.raises(UsageError, match="holds no second codes"):
        plain.add_codes(CODES, fine=SECOND)
    with pytest.raises(UsageError, match="holds no second codes"):
        plain.search(QUERIES, fine=QUERY_SECOND)
    with pytest.raises(UsageError, match="needs the queries' logits"):
        plain.search(QUERIES, ranking="real")


def test_an_empty_index_with_second_codes(new_uri, double):
    with Index.create(new_uri(), bits=BITS, fine_bits=FINE) as empty:
        assert empty.search(QUERIES, 3, fine=QUERY_SECOND).ids.shape == (4, 0)
        assert list(empty.items()) == []
