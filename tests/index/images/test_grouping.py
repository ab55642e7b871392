"""Complete linkage over near pairs, compared with brute force."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fisherhash import codes
from fisherhash.errors import UsageError
from fisherhash.index.images import grouping
from fisherhash.index.images.grouping import (
    Chance,
    complete_groups,
    distinct_codes,
    near_pairs,
    remembered_pairs,
)


def clustered(bits, count, centres, seed, noise=0.04):
    rng = np.random.default_rng(seed)
    middle = rng.random((centres, bits)) < 0.5
    flips = rng.random((count, bits)) < noise
    return codes.pack(middle[rng.integers(0, centres, count)] ^ flips)


def all_pairs(rows, radius):
    distances = codes.hamming(rows, rows)
    left, right = np.nonzero(np.triu(distances <= radius, 1))
    return {
        (a, b): int(distances[a, b]) for a, b in zip(left.tolist(), right.tolist(), strict=True)
    }


def listed(pairs):
    ends = zip(pairs.left.tolist(), pairs.right.tolist(), strict=True)
    return dict(zip(ends, pairs.distances.tolist(), strict=True))


collections = {
    "bits": st.sampled_from([1, 5, 8, 12, 24, 33, 64, 70, 200]),
    "count": st.integers(1, 60),
    "centres": st.integers(1, 12),
    "radius": st.integers(0, 6),
    "seed": st.integers(0, 2**32 - 1),
}


@settings(max_examples=60, deadline=None)
@given(**collections, old=st.floats(0, 1))
def test_pairs_are_those_of_brute_force(bits, count, centres, radius, seed, old):
    radius = min(radius, bits)
    rows, _ = distinct_codes(clustered(bits, count, centres, seed))
    expected = all_pairs(rows, radius)
    assert listed(near_pairs(rows, bits, radius)) == {p: d for p, d in expected.items() if radius}
    new = np.flatnonzero(np.random.default_rng(seed).random(len(rows)) > old)
    chosen = set(new.tolist())
    found = listed(near_pairs(rows, bits, radius, new=new))
    assert found == {p: d for p, d in expected.items() if radius and chosen.intersection(p)}


@settings(max_examples=80, deadline=None)
@given(**collections)
def test_groups_are_complete_and_as_large_as_they_can_be(bits, count, centres, radius, seed):
    radius = min(radius, bits)
    rows, _ = distinct_codes(clustered(bits, count, centres, seed))
    group, widest = complete_groups(np.arange(len(rows)), near_pairs(rows, bits, radius))
    distances = codes.hamming(rows, rows)
    parts = [np.flatnonzero(group == first) for first in np.unique(group)]
    for part in parts:
        span = distances[np.ix_(part, part)].max()
        assert span <= radius
        assert widest[part[0]] == span
        assert group[part[0]] == part[0]
    for one, other in itertools.combinations(parts, 2):
        assert distances[np.ix_(one, other)].max() > radius
    # Two codes that are nearer to each other than to any third are together.
    np.fill_diagonal(distances, bits + 1)
    for left, right in all_pairs(rows, radius):
        nearest = distances[left, right]
        others = np.delete(distances[[left, right]], [left, right], axis=1)
        if others.size == 0 or nearest < others.min():
            assert group[left] == group[right]


@settings(max_examples=30, deadline=None)
@given(**collections)
def test_the_order_of_the_codes_does_not_matter(bits, count, centres, radius, seed):
    rows, _ = distinct_codes(clustered(bits, count, centres, seed))
    radius, rng = min(radius, bits), np.random.default_rng(seed)
    names, order = np.arange(len(rows)) * 3 + 7, rng.permutation(len(rows))
    plain, _ = complete_groups(names, near_pairs(rows, bits, radius))
    mixed, _ = complete_groups(names[order], near_pairs(rows[order], bits, radius))

    def together(groups, named):
        return {frozenset(named[groups == one].tolist()) for one in np.unique(groups)}

    assert together(plain, names) == together(mixed, names[order])


def test_a_radius_that_is_too_wide_is_refused(monkeypatch):
    monkeypatch.setattr(grouping, "MOST_PAIRS", 1000)
    rows, _ = distinct_codes(clustered(64, 2000, 4, 0))
    with pytest.raises(UsageError, match=r"12 bits is too wide.*about \d+ others.*at most \d"):
        near_pairs(rows, 64, 12)
    far = np.random.default_rng(0).integers(0, 256, (2000, 8), dtype=np.uint8)
    assert len(near_pairs(far, 64, 5).left) == 0


def test_chance_is_measured_and_extrapolated():
    bits, rng = 64, np.random.default_rng(0)
    rows = rng.integers(0, 256, (4000, 8), dtype=np.uint8)
    chance = Chance(rows, bits)
    assert chance.sampled == grouping.SAMPLED_PAIRS
    from math import comb

    exact = [sum(comb(bits, d) for d in range(r + 1)) / 2**bits for r in range(bits + 1)]
    assert chance.rate(24) == pytest.approx(exact[24], rel=0.1)
    # Independent bits are rarer than that: the estimate may be too high, not too low.
    for radius in (10, 14):
        assert 0.5 < chance.rate(radius) / exact[radius] < 100
    radius = chance.radius()
    assert chance.rate(radius) <= grouping.MOST_FALSE < chance.rate(radius + 1)
    # Real copies are no chance: a hundred of them change nothing.
    copies = np.concatenate([rows, rows[:100]])
    assert Chance(copies, bits).radius() == pytest.approx(radius, abs=1)


@pytest.mark.parametrize(("images", "versions"), [(300, 1), (100, 3), (8, 15)])
def test_many_copies_are_no_chance(images, versions):
    """A folder of uploads in which every photo has its thumbnails."""
    rng = np.random.default_rng(1)
    rows = np.packbits(rng.random((300, 256)) < 0.5, axis=1)
    flips = np.packbits(rng.random((versions, images, 256)) < 0.12, axis=2)
    copies = (rows[:images] ^ flips).reshape(-1, 32)
    alone, chance = Chance(rows, 256), Chance(np.concatenate([rows, copies]), 256)
    assert alone.copies == 0
    assert chance.copies == images * versions * (versions + 1) // 2
    assert chance.radius() == pytest.approx(alone.radius(), abs=12)
    assert chance.radius() > 60


def test_distances_without_a_valley_tell_no_copies():
    """Drawings of one kind: some are as near as copies, and more are a little farther."""
    rng = np.random.default_rng(2)
    flips = np.packbits(rng.random((600, 256)) < rng.beta(0.7, 3, (600, 1)) / 2, axis=1)
    assert Chance(flips, 256).copies == 0


@pytest.mark.parametrize("count", [2, 30])
def test_chance_in_few_codes_has_a_careful_guess(count):
    chance = Chance(np.zeros((count, 8), np.uint8), 64)
    assert 0 < chance.rate(4) < 1e-3
    assert 0 < chance.radius() < 8


def test_pairs_are_remembered_and_only_new_codes_are_searched(tmp_path, monkeypatch):
    monkeypatch.setenv("FISHERHASH_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(grouping, "FEWEST_REMEMBERED", 10)
    searched = []
    search = near_pairs

    def spy(rows, bits, radius, *, new=None):
        searched.append(len(rows) if new is None else len(new))
        return search(rows, bits, radius, new=new)

    monkeypatch.setattr(grouping, "near_pairs", spy)
    rows, _ = distinct_codes(clustered(70, 300, 9, 1))
    some, more = rows[::2], rows[5:]

    def check(part, radius, queried):
        found = remembered_pairs("i", part, 70, radius)
        assert listed(found) == all_pairs(part, radius)
        assert searched == queried
        searched.clear()

    check(some, 5, [len(some)])
    check(some, 5, [])
    check(some, 3, [])
    new = len(more) - sum(row.tobytes() in {r.tobytes() for r in some} for row in more)
    check(more, 5, [new])
    check(more, 6, [len(more)])
    (stored,) = (tmp_path / "cache" / "pairs").iterdir()
    stored.write_bytes(stored.read_bytes()[:-100])
    check(more, 6, [len(more)])
