"""Ranked searches return the result of brute force on every way through the engine."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from fisherhash.codes import unpack
from fisherhash.errors import FisherhashError, UsageError
from fisherhash.index.engine import PATHS, Engine, kernels, planner, ranking, sum_kernels, sums
from fisherhash.index.engine.engine import UNLIMITED
from fisherhash.index.ranking import (
    COST_BITS,
    Ranked,
    WeightedQueries,
    merge_ranked,
    ranked_by_numpy,
    ranked_queries,
    real_weights,
)

Codes = NDArray[np.uint8]
Numbers = NDArray[np.int64]


def make(rng: np.random.Generator, n: int, bits: int, centres: int) -> NDArray[np.float64]:
    """Vectors whose signs are the codes; without centres there is no structure."""
    noise = rng.standard_normal((n, bits))
    if not centres:
        return noise
    middle = np.sign(np.random.default_rng(bits).standard_normal((centres, bits)))
    return middle[rng.integers(0, centres, n)] + 0.5 * noise


def real_queries(logits: NDArray[np.float64]) -> WeightedQueries:
    return ranked_queries(None, logits.shape[1], ranking="real", logits=logits)


def brute(
    queries: Codes,
    codes: Codes,
    weights: Numbers,
    k: int,
    fine_queries: Codes | None = None,
    fine: Codes | None = None,
    fine_weight: Numbers | None = None,
) -> Ranked:
    """Every cost bit by bit, every order by sorting tuples."""
    bits = weights.shape[1]
    apart = unpack(queries, bits)[:, None] != unpack(codes, bits)[None]
    costs = (apart * weights[:, None]).sum(axis=2)
    fines = np.zeros_like(costs)
    if fine_queries is not None and fine is not None:
        fines = np.bitwise_count(fine_queries[:, None] ^ fine[None]).astype(int).sum(axis=2)
    rows = []
    for q in range(len(queries)):
        extra = 0 if fine_weight is None else fine_weight[q]
        one = list(zip(costs[q], fines[q], range(len(codes)), strict=True))
        if fine_weight is None:
            one.sort()
        else:
            one.sort(key=lambda found: (found[0] + extra * found[1], found[2]))
        rows.append(one[:k])
    found = np.array(rows, dtype=np.int64).reshape(len(queries), -1, 3)
    return Ranked(found[:, :, 2], found[:, :, 0], found[:, :, 1])


def assert_ranked(got: Ranked, want: Ranked) -> None:
    for name, one, other in zip(Ranked._fields, got, want, strict=True):
        assert one.dtype == np.int64
        np.testing.assert_array_equal(one, other, err_msg=name)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("centres", [0, 4])
@pytest.mark.parametrize("bits", [1, 7, 12, 24, 33, 64, 65, 128, 256])
def test_every_path_equals_brute_force(path: str, centres: int, bits: int) -> None:
    rng = np.random.default_rng(bits + centres)
    codes = np.packbits(make(rng, 600, bits, centres) > 0, axis=1)
    # a few codes that occur hundreds of times
    codes[rng.random(600) < 0.4] = codes[rng.integers(0, 4)]
    fine = rng.integers(0, 256, (600, 5), dtype=np.uint8)
    own = real_queries(make(rng, 6, bits, centres))
    second = rng.integers(0, 256, (6, 5), dtype=np.uint8)
    engine = Engine(codes, bits, path=path, threads=2, fine=fine)
    ones = np.ones((6, bits), dtype=np.int64)
    for k in (1, 40, 700):
        for weights in (None, own.weights):
            costs = ones if weights is None else weights
            got = engine.rank(WeightedQueries(own.codes, weights), k)
            assert_ranked(got, brute(own.codes, codes, costs, k))
            got = engine.rank(WeightedQueries(own.codes, weights, second), k)
            assert_ranked(got, brute(own.codes, codes, costs, k, second, fine))
    for extra in (np.zeros(6, int), np.arange(6), own.weights.max(axis=1) // 3):
        weights = None if extra.max() < 6 else own.weights
        got = engine.rank(WeightedQueries(own.codes, weights, second, extra), 20)
        costs = ones if weights is None else weights
        assert_ranked(got, brute(own.codes, codes, costs, 20, second, fine, extra))


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_any_small_collection(data: st.DataObject) -> None:
    bits = data.draw(st.sampled_from([1, 2, 8, 16, 24, 31, 32, 33, 48, 64, 72, 128, 200, 256]))
    rng = np.random.default_rng(data.draw(st.integers(0, 1000)))
    n = data.draw(st.integers(1, 400))
    centres = data.draw(st.sampled_from([0, 1, 3]))
    codes = np.packbits(make(rng, n, bits, centres) > 0, axis=1)
    if data.draw(st.booleans()):
        codes[:] = codes[rng.integers(0, min(n, 3), n)]
    count = data.draw(st.integers(1, 5))
    queries = np.packbits(make(rng, count, bits, centres) > 0, axis=1)
    # few values and zeros: costs tie between different codes
    kinds = data.draw(st.sampled_from([(0, 1), (1, 2), (0, 1, 2, 100), (5,), (0,), (1, 10**6)]))
    weights = rng.choice(np.array(kinds), (count, bits)).astype(np.int64)
    fine_bytes = data.draw(st.sampled_from([0, 1, 8, 16, 17]))
    fine = rng.integers(0, 256, (n, fine_bytes), dtype=np.uint8) if fine_bytes else None
    second = rng.integers(0, 256, (count, fine_bytes), dtype=np.uint8) if fine_bytes else None
    if fine is not None and data.draw(st.booleans()):
        fine[:] = fine[:1]
    k = data.draw(st.integers(1, 500))
    want = brute(queries, codes, weights, k, second, fine)
    extra = rng.choice(np.array(data.draw(st.sampled_from([(0,), (1, 2), (1, 10**7)]))), count)
    for path in PATHS:
        threads = data.draw(st.integers(1, 3))
        engine = Engine(codes, bits, path=path, threads=threads, fine=fine)
        assert_ranked(engine.rank(WeightedQueries(queries, weights, second), k), want)
        if fine is not None:
            sums = brute(queries, codes, weights, k, second, fine, extra)
            assert_ranked(engine.rank(WeightedQueries(queries, weights, second, extra), k), sums)


@pytest.mark.parametrize("path", ["auto", "scan", "unique", "buckets"])
@pytest.mark.parametrize(("bits", "centres"), [(32, 0), (48, 20), (64, 0), (64, 20)])
def test_large_collections_agree_between_paths(path: str, bits: int, centres: int) -> None:
    rng = np.random.default_rng(bits)
    n = 30_000
    codes = np.packbits(make(rng, n, bits, centres) > 0, axis=1)
    fine = rng.integers(0, 256, (n, 16), dtype=np.uint8)
    own = real_queries(make(rng, 12, bits, centres))
    second = fine[:12]
    plain = Engine(codes, bits, path="numpy", fine=fine)
    engine = Engine(codes, bits, path=path, fine=fine)
    if path == "auto":
        engine.build()
    for k in (1, 100, 3000):
        for weights in (None, own.weights):
            for fine_queries in (None, second):
                queries = WeightedQueries(own.codes, weights, fine_queries)
                assert_ranked(engine.rank(queries, k), plain.rank(queries, k))
        one = WeightedQueries(own.codes[:1], own.weights[:1], second[:1])
        assert_ranked(engine.rank(one, k), plain.rank(one, k))
        # a third of the mean weight of a bit
        summed = WeightedQueries(*own[:2], second, own.weights.sum(axis=1) // (3 * bits))
        for queries in (summed, summed.part(slice(0, 1))):
            assert_ranked(engine.rank(queries, k), plain.rank(queries, k))


@pytest.mark.parametrize("path", PATHS)
def test_thousands_of_ties_are_ordered_by_the_second_code(path: str) -> None:
    rng = np.random.default_rng(1)
    codes = np.full((9000, 5), 7, dtype=np.uint8)
    fine = rng.integers(0, 256, (9000, 2), dtype=np.uint8)
    engine = Engine(codes, 40, path=path, fine=fine)
    got = engine.rank(WeightedQueries(codes[:2] ^ 1, fine=fine[:2]), 50)
    assert (got.costs == 5).all()
    assert got.positions[0, 0] == np.flatnonzero((fine == fine[0]).all(axis=1))[0]
    want = np.bitwise_count(fine[None] ^ fine[:2, None]).astype(int).sum(axis=2)
    order = np.argsort(want, axis=1, kind="stable")[:, :50]
    np.testing.assert_array_equal(got.positions, order)
    # without it, by position
    np.testing.assert_array_equal(
        engine.rank(WeightedQueries(codes[:1]), 5).positions, [[0, 1, 2, 3, 4]]
    )


@pytest.mark.parametrize("path", PATHS)
def test_equal_weights_are_the_hamming_distance(path: str) -> None:
    rng = np.random.default_rng(2)
    codes = rng.integers(0, 256, (3000, 4), dtype=np.uint8)
    engine = Engine(codes, 32, path=path)
    positions, distances = engine.search(codes[:9], 70)
    for logits in (0.25, 1.0, 3e30, 1e-300):
        own = real_queries(np.where(unpack(codes[:9], 32), logits, -logits))
        got = engine.rank(own, 70)
        np.testing.assert_array_equal(got.positions, positions)
        np.testing.assert_array_equal(own.distances(got.costs), distances)


@pytest.mark.parametrize("path", PATHS)
def test_one_weight_stands_for_all_bits(path: str) -> None:
    rng = np.random.default_rng(8)
    codes, fine = rng.integers(0, 256, (2, 3000, 3), dtype=np.uint8)
    engine = Engine(codes, 24, path=path, fine=fine)
    each = np.array([[0], [1], [5], [1 << 26]])
    for second, extra in ((None, None), (fine[4:8], None), (fine[4:8], np.array([0, 2, 3, 9]))):
        queries = WeightedQueries(codes[:4], each, second, extra)
        got = engine.rank(queries, 40)
        every = np.repeat(each, 24, axis=1)
        assert_ranked(got, brute(codes[:4], codes, every, 40, second, fine, extra))
        np.testing.assert_array_equal(
            queries.distances(got.costs), queries._replace(weights=every).distances(got.costs)
        )


def test_whole_weights_keep_the_order_of_real_ones() -> None:
    rng = np.random.default_rng(3)
    logits = rng.standard_normal((8, 64)) * 10.0 ** rng.integers(-200, 200, (8, 1))
    codes = rng.integers(0, 256, (500, 8), dtype=np.uint8)
    own = real_queries(logits)
    assert own.weights.sum(axis=1).max() < 1 << COST_BITS
    assert own.weights.sum(axis=1).min() > 1 << (COST_BITS - 3)
    got = Engine(codes, 64).rank(own, 500)
    products = (logits / np.abs(logits).max(axis=1, keepdims=True)) @ (
        2.0 * unpack(codes, 64).T.astype(float) - 1
    )
    ranked = np.take_along_axis(products, got.positions, axis=1)
    assert (np.diff(ranked, axis=1) <= 1e-6).all()
    # a distance is half the difference to the best inner product, in mean weights
    best = np.abs(logits).sum(axis=1, keepdims=True) / np.abs(logits).max(axis=1, keepdims=True)
    np.testing.assert_allclose(own.distances(got.costs), 32 * (1 - ranked / best), rtol=1e-6)


def test_weights_may_all_be_zero() -> None:
    assert not real_weights(np.zeros((2, 5))).any()
    own = real_queries(np.zeros((1, 5)))
    codes = np.array([[8], [16], [24]], dtype=np.uint8)
    got = Engine(codes, 5).rank(own, 3)
    assert own.distances(got.costs).tolist() == [[0, 0, 0]]
    assert got.positions.tolist() == [[0, 1, 2]]


@pytest.mark.slow
def test_processors_without_the_shuffle_return_the_same(monkeypatch) -> None:
    rng = np.random.default_rng(4)
    codes = np.packbits(make(rng, 2000, 64, 3) > 0, axis=1)
    own = real_queries(make(rng, 3, 64, 3))
    costs = kernels._half_byte_costs
    monkeypatch.setattr(
        kernels, "_half_byte_costs", lambda *args, shuffle: costs(*args, shuffle=False)
    )
    # compiled again, and not taken from the cache
    compiled = kernels.numba.njit(nogil=True, error_model="numpy")(kernels.scan_ranked.py_func)
    monkeypatch.setattr(kernels, "scan_ranked", compiled)
    got = Engine(codes, 64, path="scan").rank(own, 50)
    want = Engine(codes, 64, path="numpy").rank(own, 50)
    assert_ranked(got, want)


@pytest.mark.parametrize("path", PATHS)
def test_sums_are_ranked_in_parts(monkeypatch, path: str) -> None:
    rng = np.random.default_rng(7)
    codes, fine = rng.integers(0, 4, (2, 500, 1), dtype=np.uint8)
    weight = np.array([0, 1, 5, 1, 0, 2])
    queries = WeightedQueries(codes[:6], None, fine[:6], weight)
    want = brute(codes[:6], codes, np.ones((6, 8), int), 30, fine[:6], fine, weight)
    monkeypatch.setattr(ranking, "_ENTRIES", 200)
    monkeypatch.setattr(sums, "_ENTRIES", 200)
    assert_ranked(Engine(codes, 8, path=path, fine=fine).rank(queries, 30), want)


def summed(
    data: st.DataObject, rng: np.random.Generator, count: int, bits: int, second: Codes
) -> WeightedQueries:
    """Queries by sums: equal, few or real weights, and second codes that weigh nothing or all."""
    logits = make(rng, count, bits, 3)
    kind = data.draw(st.sampled_from(["none", "plain", "few", "real"]))
    weights = None
    if kind == "plain":
        weights = rng.choice(np.array([0, 1, 6]), (count, 1)).astype(np.int64)
    elif kind == "few":
        # with zeros: costs and sums tie between different codes
        weights = rng.choice(np.array([0, 1, 2, 6]), (count, bits)).astype(np.int64)
    elif kind == "real":
        weights = real_weights(logits)
    mean = 1 if weights is None else max(1, int(weights.mean()))
    extra = data.draw(st.sampled_from([0, 1, mean, max(1, mean // 3), 1000 * mean, (1 << 52) - 1]))
    each = rng.permutation(count) if data.draw(st.booleans()) else np.zeros(count, int)
    extras = np.minimum(extra + each, (1 << 52) - 1)
    return WeightedQueries(np.packbits(logits > 0, axis=1), weights, second, extras)


@settings(max_examples=80, deadline=None)
@given(data=st.data())
def test_sums_of_any_collection_on_every_path(data: st.DataObject) -> None:
    bits = data.draw(st.sampled_from([1, 8, 16, 24, 33, 48, 64, 65, 128]))
    rng = np.random.default_rng(data.draw(st.integers(0, 1000)))
    n, count = data.draw(st.integers(1, 500)), data.draw(st.integers(1, 5))
    codes = np.packbits(make(rng, n, bits, 3) > 0, axis=1)
    if data.draw(st.booleans()):
        codes[rng.random(n) < 0.5] = codes[rng.integers(0, n)]
    fine_bits = data.draw(st.sampled_from([1, 8, 64, 100, 136]))
    fine = np.packbits(make(rng, n, fine_bits, 3) > 0, axis=1)
    second = np.packbits(make(rng, count, fine_bits, 3) > 0, axis=1)
    queries = summed(data, rng, count, bits, second)
    k = data.draw(st.sampled_from([1, 2, 10, n - 1, n, n + 50]).filter(bool))
    # in the middle of a search, some queries have too little budget left
    budget = data.draw(st.sampled_from([1, 3_000, 30_000, UNLIMITED]))
    want = ranked_by_numpy(queries, codes, k, fine)
    for path in PATHS:
        engine = Engine(codes, bits, path=path, threads=data.draw(st.integers(1, 2)), fine=fine)
        assert_ranked(engine.rank(queries, k), want)
        if path == "buckets":
            engine._budget = lambda *_: budget
            assert_ranked(engine.rank(queries, k), want)
            # too many codes for entries in the buckets
            engine._bucket_entries = lambda _: None
            assert_ranked(engine.rank(queries, k), want)


def no_scan(*_: object) -> None:
    raise AssertionError("scanned")


@pytest.mark.parametrize("distinct", [False, True])
@pytest.mark.parametrize(("bits", "fine_bits"), [(32, 64), (48, 100), (64, 128), (128, 128)])
def test_buckets_alone_find_the_best_sums(
    monkeypatch, bits: int, fine_bits: int, distinct: bool
) -> None:
    monkeypatch.setattr(sums, "summed_by_scan", no_scan)
    monkeypatch.setattr(ranking, "ranked_by_scan", no_scan)
    rng = np.random.default_rng(bits)
    n = 20_000
    near = rng.integers(0, 20, n + 8)
    codes, fine = (
        np.packbits(np.sign(rng.standard_normal((20, width)))[near] + noise > 0, axis=1)
        for width in (bits, fine_bits)
        for noise in [0.6 * rng.standard_normal((n + 8, width))]
    )
    if distinct:
        # each code occurs once, so that there are no lists of positions
        codes, first = np.unique(codes, axis=0, return_index=True)
        codes, fine = codes[np.argsort(first)], fine[np.sort(first)]
    own, second = codes[-8:], fine[-8:]
    engine = Engine(codes, bits, path="auto" if distinct else "buckets", fine=fine)
    engine.build()
    engine._budget = lambda *_: UNLIMITED
    assert (len(engine.tables()["starts"]) == 0) is distinct
    # the code itself: a logit of 1 or more per bit
    logits = np.where(unpack(own, bits), 1, -1) * (1 + rng.random((8, bits)))
    for weights in (np.full((8, 1), 3), np.full((8, bits), 3), real_weights(logits)):
        mean = int(weights.mean())
        for extra in (0, mean // 3, mean):
            queries = WeightedQueries(own, weights, second, np.full(8, extra))
            for k in (1, 50):
                want = ranked_by_numpy(queries, codes, k, fine)
                assert_ranked(engine.rank(queries, k), want)
                assert_ranked(
                    engine.rank(queries.part(slice(0, 1)), k), Ranked(*(v[:1] for v in want))
                )


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_sketches_bound_the_distance_of_second_codes(data: st.DataObject) -> None:
    rng = np.random.default_rng(data.draw(st.integers(0, 1000)))
    width = data.draw(st.sampled_from([1, 2, 3, 16]))
    share = data.draw(st.sampled_from([0.0, 0.05, 0.5, 1.0]))
    bits = rng.random((2, 64 * width)) < share
    words = np.packbits(bits, axis=1).view(np.uint64)
    entry, sketches = np.zeros(1, np.uint64), np.zeros(1, np.uint32)
    none, begin = np.zeros(0, np.uint32), np.zeros(1, int)
    sum_kernels.fill_entries(begin.astype(np.uint32), begin, none, words[:1], sketches, entry)
    assert entry[0] >> np.uint64(32) == sketches[0] == sum_kernels._sketch(words[0])
    bound = int(sketches[0] ^ np.uint32(sum_kernels._sketch(words[1]))).bit_count()
    assert bound <= (bits[0] != bits[1]).sum()
    # an even number of differences in 32 steps is all that is not seen
    folded = words.view(np.uint32).reshape(2, -1)
    assert bound == int(np.bitwise_xor.reduce(folded[0] ^ folded[1])).bit_count()


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_second_codes_are_laid_out_by_buckets(data: st.DataObject) -> None:
    rng = np.random.default_rng(data.draw(st.integers(0, 1000)))
    n, width = data.draw(st.integers(1, 300)), data.draw(st.sampled_from([1, 8, 13, 16]))
    codes = rng.integers(0, data.draw(st.sampled_from([2, 256])), (n, 4), dtype=np.uint8)
    fine = rng.integers(0, 256, (n, width), dtype=np.uint8)
    engine = Engine(codes, 32, path=data.draw(st.sampled_from(["buckets", "scan"])), fine=fine)
    tables = engine._ready(1)
    layout = engine._sum_layout(tables)
    assert sorted(layout.places) == list(range(n))
    stored = layout.fine[:n].view(np.uint8)[:, :width]
    np.testing.assert_array_equal(stored, fine[layout.places])
    begins = layout.entries.astype(np.int64) & ((1 << 31) - 1)
    listed = (layout.entries >> np.uint64(31)) & np.uint64(1)
    sizes = np.where(listed, layout.entries >> np.uint64(32), 1).astype(int)
    starts = tables.starts if len(tables.starts) else np.arange(n + 1)
    positions = tables.positions if len(tables.starts) else np.arange(n)
    np.testing.assert_array_equal(sizes, np.diff(starts.astype(int)))
    for item, (begin, size) in enumerate(zip(begins, sizes, strict=True)):
        own = positions[starts[item] : starts[item + 1]]
        np.testing.assert_array_equal(layout.places[begin : begin + size], own)
    if tables.length:
        entries = engine._bucket_entries(tables)
        assert entries is not None
        np.testing.assert_array_equal(entries, layout.entries[tables.bucket_items])
    assert engine.describe()["sum_bytes"] >= layout.bytes


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_planes_never_overrate_a_weight(data: st.DataObject) -> None:
    rng = np.random.default_rng(data.draw(st.integers(0, 1000)))
    largest = data.draw(st.sampled_from([0, 1, 20, 10**9]))
    weights = rng.integers(0, largest + 1, 64)
    limit = data.draw(st.integers(0, 64 * largest))
    planes = np.zeros((4, 1), np.uint64)
    unit = sum_kernels._fill_planes(weights, limit, planes)
    marks = (planes >> np.arange(64, dtype=np.uint64)) & np.uint64(1)
    levels = (marks.astype(np.int64) << np.arange(4)[:, None]).sum(axis=0)
    rated = np.minimum(weights, limit + 1)
    assert (levels * unit <= rated).all()
    assert (rated < (levels + 1) * unit).all()


@pytest.mark.parametrize("path", ["buckets", "scan", "unique"])
@pytest.mark.parametrize("fine_bytes", [1, 8, 16, 17])
def test_thousands_of_equal_sums_are_ordered_by_position(path: str, fine_bytes: int) -> None:
    rng = np.random.default_rng(fine_bytes)
    # more rows of one sum than there is room for
    codes = np.repeat(rng.integers(0, 256, (3, 5), dtype=np.uint8), 3000, axis=0)
    fine = np.zeros((9000, fine_bytes), dtype=np.uint8)
    fine[::7] = 1
    order = rng.permutation(9000)
    codes, fine = codes[order], fine[order]
    engine = Engine(codes, 40, path=path, fine=fine)
    for weights in (None, np.tile(np.arange(40), (2, 1))):
        for extra in (0, 1, 2**40):
            queries = WeightedQueries(codes[:2], weights, fine[:2] ^ 1, np.full(2, extra))
            for k in (1, 50, 2000):
                want = ranked_by_numpy(queries, codes, k, fine)
                assert_ranked(engine.rank(queries, k), want)


def test_sum_kernels_are_compiled_again_when_the_kernels_change() -> None:
    stamps = [
        kernel._cache._cache_file._source_stamp
        for kernel in (sum_kernels.probe_equal_sums, kernels.fill_planes)
        if hasattr(kernel, "_cache") and hasattr(kernel._cache, "_cache_file")
    ]
    if len(stamps) < 2:
        pytest.skip("numba has no folder for its cache")
    assert stamps[0][1] == stamps[1]


def test_sums_that_the_buckets_cannot_bound_are_scanned(monkeypatch) -> None:
    monkeypatch.setattr(planner, "is_small", lambda *_: False)
    rng = np.random.default_rng(11)
    codes, fine = rng.integers(0, 256, (2, 20_000, 8), dtype=np.uint8)
    engine = Engine(codes, 64, fine=fine)
    engine.build()
    # unrelated second codes, which decide: no first code is too far away
    queries = WeightedQueries(codes[:30], None, fine[5:35], np.full(30, 50))
    want = ranked_by_numpy(queries, codes, 20, fine)
    for _ in range(3):
        assert_ranked(engine.rank(queries, 20), want)
    tables = engine._ready(30)
    # after so many failures, they are not tried again for a while
    assert engine._budget(tables, 30, 20, engine._sum_plan) == 0
    assert engine._budget(tables, 30, 20, engine._rank_plan) > 0


def test_nothing_to_find_and_nothing_queried() -> None:
    none = np.zeros((0, 4), dtype=np.uint8)
    some = np.arange(40, dtype=np.uint8).reshape(10, 4)
    for path in PATHS:
        assert Engine(none, 32, path=path).rank(WeightedQueries(some), 5).positions.shape == (10, 0)
        assert Engine(some, 32, path=path).rank(WeightedQueries(none), 5).positions.shape == (0, 5)
        queries = WeightedQueries(some, None, some, np.ones(10, int))
        engine = Engine(none, 32, path=path, fine=none)
        assert engine.rank(queries, 5).fines.shape == (10, 0)


def test_bad_arguments() -> None:
    codes = np.zeros((3, 1), dtype=np.uint8)
    one = codes[:1]
    engine = Engine(codes, 8, fine=codes)
    ones = np.ones((1, 8), dtype=np.int64)
    for bad in (ones.astype(float), ones[:, :7], -ones, ones << 30, ones[:, :1] << 28):
        with pytest.raises(UsageError, match="weights must"):
            engine.rank(WeightedQueries(one, bad), 1)
    with pytest.raises(UsageError, match="second codes must be uint8 of shape"):
        engine.rank(WeightedQueries(one, fine=np.zeros((1, 2), np.uint8)), 1)
    with pytest.raises(UsageError, match="no second codes"):
        Engine(codes, 8).rank(WeightedQueries(one, fine=one), 1)
    with pytest.raises(UsageError, match="fine_weight needs"):
        engine.rank(WeightedQueries(one, fine_weight=np.ones(1, int)), 1)
    with pytest.raises(UsageError, match="fine_weight must not be negative"):
        engine.rank(WeightedQueries(one, None, one, np.array([-1])), 1)
    with pytest.raises(UsageError, match="must be uint8 of shape"):
        Engine(codes, 8, fine=codes[:2])
    with pytest.raises(UsageError, match="finite"):
        real_queries(np.array([[np.inf]]))
    with pytest.raises(FisherhashError, match="NaN"):
        real_queries(np.array([[np.nan]]))


def test_bad_queries() -> None:
    one, logits = np.zeros((1, 1), np.uint8), -np.ones((1, 8))
    bad = {
        "unknown ranking 'best'": {"codes": one, "ranking": "best"},
        "needs the queries' logits": {"codes": one, "ranking": "real"},
        "needs the queries' codes": {"codes": None},
        "must have 8 columns, got 7": {"codes": None, "ranking": "real", "logits": logits[:, :7]},
        "not the signs": {"codes": one + 1, "ranking": "real", "logits": logits},
        "fine_weight needs": {"codes": one, "fine_weight": 0.5},
        "holds no second codes": {"codes": one, "fine": one},
        "1 queries have 2": {"codes": one, "fine": np.repeat(one, 2, axis=0), "fine_bits": 8},
        "from 0 to 1024": {"codes": one, "fine": one, "fine_bits": 8, "fine_weight": -1},
    }
    for text, args in bad.items():
        with pytest.raises(UsageError, match=text):
            ranked_queries(args.pop("codes"), 8, **args)
    same = ranked_queries(one, 8, ranking="real", logits=logits)
    assert (same.weights == same.weights[0, 0]).all()


def test_parts_are_merged_in_the_order_of_the_ranking() -> None:
    rng = np.random.default_rng(5)
    codes = rng.integers(0, 4, (60, 1), dtype=np.uint8)
    fine = rng.integers(0, 4, (60, 1), dtype=np.uint8)
    for weight in (None, 0.5):
        args = {"fine": fine[:4], "fine_bits": 8, "fine_weight": weight}
        queries = ranked_queries(codes[:4], 8, **args)
        parts = []
        for numbers in (np.arange(0, 60, 2), np.arange(1, 60, 2)):
            found = ranked_by_numpy(queries, codes[numbers], 20, fine[numbers])
            parts.append(found._replace(positions=numbers[found.positions]))
        want = ranked_by_numpy(queries, codes, 20, fine)
        assert_ranked(merge_ranked(parts, queries, 20), want)
    assert merge_ranked([], queries, 5).positions.shape == (4, 0)
