"""Real-valued queries on every back-end, against sums bit by bit."""

import numpy as np
import pytest

from fisherhash.codes import pack, unpack
from fisherhash.errors import UsageError
from fisherhash.index import Entry, Index

BITS, COUNT = 13, 60


def logits_of(count, seed):
    # few directions, so that codes repeat and distances tie
    rng = np.random.default_rng(seed)
    return rng.choice([-2.0, -1.0, 0.5, 1.0], (3, BITS))[rng.integers(0, 3, count)] + rng.choice(
        [-1.0, 0.0, 1.0], (count, BITS), p=[0.1, 0.8, 0.1]
    )


CODES = pack(logits_of(COUNT, 0))
LOGITS = logits_of(4, 2)
QUERIES = pack(LOGITS)


def brute(items, k):
    """Ids of the k best among {id: code}, bit by bit."""
    found = []
    for logits, query in zip(LOGITS, unpack(QUERIES, BITS), strict=True):
        weights = np.abs(logits)
        apart = {i: query != unpack(code[None], BITS)[0] for i, code in items.items()}
        rows = sorted((round(float((a * weights).sum()), 9), i) for i, a in apart.items())
        found.append([id_ for _, id_ in rows[:k]])
    return found


@pytest.fixture
def index(new_uri):
    with Index.create(new_uri(), bits=BITS) as index:
        labels = ["even", "odd"] * 15
        index.add(Entry(f"k{i}", CODES[i], labels=labels[i]) for i in range(30))
        index.add_codes(CODES[30:])
        yield index


def test_real_valued_queries_equal_brute_force(index):
    items = dict(enumerate(CODES))
    for k in (1, 7, 100):
        found = index.search(QUERIES, k, logits=LOGITS)
        assert found.ids.tolist() == brute(items, k)
        # the codes are the signs of the logits
        assert index.search(None, k, logits=LOGITS).to_list() == found.to_list()
    even = {i: items[i] for i in range(0, 30, 2)}
    found = index.search(None, 5, logits=LOGITS, where="label=even")
    assert found.ids.tolist() == brute(even, 5)
    # in units of the mean weight
    weights = np.abs(LOGITS[0])
    apart = unpack(CODES[found.ids[0]], BITS) != unpack(QUERIES[:1], BITS)
    expected = (apart * weights).sum(axis=1) / weights.mean()
    np.testing.assert_allclose(found.distances[0], expected, rtol=1e-3)
    assert index.search(None, 5, logits=LOGITS, where="label=none").ids.size == 0


def test_removed_and_changed_items_are_ranked_as_they_are(index):
    index.remove(["k3", "k4"], ids=[40, 41])
    index.upsert([Entry("k0", CODES[50])])
    items = {i: code for i, code in enumerate(CODES) if i not in (3, 4, 40, 41)}
    items[0] = CODES[50]
    with Index.open(index.uri) as reader:
        for one in (index, reader):
            for k in (5, 100):
                assert one.search(None, k, logits=LOGITS).ids.tolist() == brute(items, k)


def test_what_does_not_fit_is_refused(index):
    for message, codes, logits in (
        ("needs the queries' codes or their logits", None, None),
        ("logits must have shape", None, LOGITS[:, 1:]),
        ("are not the signs of their logits", QUERIES[::-1], LOGITS),
    ):
        with pytest.raises(UsageError, match=message):
            index.search(codes, logits=logits)
