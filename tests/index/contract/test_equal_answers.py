"""Every exact back-end returns the same ids and distances for the same codes, ties included."""

import numpy as np
import pytest

from fisherhash.codes import hamming
from fisherhash.index import Entry, Index
from fisherhash.index.copying import copy_index

BITS = 48


def learned_codes(count, seed=0):
    """Codes as training makes them: most images of a class share one of few codes."""
    rng = np.random.default_rng(seed)
    centres = rng.integers(0, 2, (50, BITS), dtype=np.uint8)
    chosen = centres[rng.integers(0, len(centres), count)]
    return np.packbits(chosen ^ (rng.random(chosen.shape) < 0.01), axis=1)


def fill(place, codes, keyed):
    with Index.create(place, bits=BITS) as index:
        index.add(
            Entry(f"k{i}", code, labels=f"l{i % 7}", metadata={"year": 1990 + i % 40})
            for i, code in enumerate(codes[:keyed])
        )
        index.add_codes(codes[keyed:])
        index.remove(ids=range(5, len(codes), 11))


def check_equal(source, target, codes, keyed):
    queries = codes[:: len(codes) // 6][:6]
    kept = np.array([i for i in range(len(codes)) if i < 5 or (i - 5) % 11])
    with Index.open(source) as local, Index.open(target) as other:
        for where, among in {
            None: kept,
            "label=l3": kept[(kept < keyed) & (kept % 7 == 3)],
            "year>=2020": kept[(kept < keyed) & (1990 + kept % 40 >= 2020)],
        }.items():
            distances = hamming(queries, codes[among]).astype(int)
            order = np.argsort(distances, axis=1, kind="stable")[:, :100]
            for index in (local, other):
                found = index.search(queries, 100, where=where)
                np.testing.assert_array_equal(found.ids, among[order])
                np.testing.assert_array_equal(
                    found.distances, np.take_along_axis(distances, order, axis=1)
                )
            near = local.within(queries[:2], 2, where=where)
            # The codes repeat, so that even the nearest are many.
            assert where or len(near.ids) > len(codes) / 100
            assert other.within(queries[:2], 2, where=where).to_list() == near.to_list()


def run(tmp_path, new_uri, count, keyed):
    codes = learned_codes(count)
    fill(tmp_path / "source", codes, keyed)
    target = new_uri()
    copy_index(tmp_path / "source", target)
    check_equal(tmp_path / "source", target, codes, keyed)


def test_the_same_answers(tmp_path, new_uri):
    run(tmp_path, new_uri, 3000, 600)


@pytest.mark.slow
def test_the_same_answers_of_many_codes(tmp_path, new_uri, request):
    if request.node.callspec.params["new_uri"] == "memory":
        pytest.skip("a toy")
    run(tmp_path, new_uri, 200_000, 3000)
