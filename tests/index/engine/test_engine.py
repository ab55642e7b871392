"""Every path through the engine returns the results of brute force, positions included."""

from __future__ import annotations

import itertools
import logging
import os
import subprocess
import sys
import textwrap
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from fisherhash.codes import pack, unpack
from fisherhash.errors import UsageError
from fisherhash.index.engine import Engine, planner, real_distances, real_weights, threads
from fisherhash.index.engine import buckets as buckets_module
from fisherhash.index.engine import engine as engine_module
from fisherhash.index.engine.engine import PATHS

Codes = NDArray[np.uint8]
Numbers = NDArray[np.int64]
LENGTHS = [1, 7, 12, 16, 24, 32, 33, 48, 64, 65, 128, 176, 254, 255, 256, 1024]


def make(
    rng: np.random.Generator, n: int, bits: int, centres: int = 0, flips: float = 0.05
) -> Codes:
    """Random codes, or codes around centres, of which many are equal if few bits are flipped."""
    if centres:
        middle = np.random.default_rng(bits).random((centres, bits)) < 0.5
        values = middle[rng.integers(0, centres, n)] ^ (rng.random((n, bits)) < flips)
    else:
        values = rng.random((n, bits)) < 0.5
    return np.packbits(values, axis=1).reshape(n, -(-bits // 8))


def brute(queries: Codes, codes: Codes, bits: int, weights: Numbers | None = None) -> Numbers:
    """All distances, bit by bit; exact, because doubles hold these whole numbers."""
    left, right = unpack(queries, bits).astype(np.float64), unpack(codes, bits).astype(np.float64)
    costs = np.ones_like(left) if weights is None else weights
    ones = (left * costs).sum(axis=1)[:, None] + costs @ right.T
    return np.rint(ones - 2 * (left * costs) @ right.T).astype(np.int64)


def assert_nearest(
    engine: Engine, queries: Codes, distances: Numbers, k: int, **options: Any
) -> None:
    positions, near = engine.search(queries, k, **options)
    order = np.argsort(distances, axis=1, kind="stable")[:, :k]
    assert positions.dtype == near.dtype == np.int64
    np.testing.assert_array_equal(near, np.take_along_axis(distances, order, axis=1))
    np.testing.assert_array_equal(positions, order)


def assert_within(engine: Engine, queries: Codes, distances: Numbers, radius: int) -> None:
    offsets, positions, near = engine.within(queries, radius)
    assert offsets.dtype == positions.dtype == near.dtype == np.int64
    assert offsets.shape == (len(queries) + 1,)
    assert offsets[0] == 0
    assert offsets[-1] == len(positions) == len(near)
    for q, row in enumerate(distances):
        inside = np.flatnonzero(row <= radius)
        order = inside[np.argsort(row[inside], kind="stable")]
        part = slice(offsets[q], offsets[q + 1])
        np.testing.assert_array_equal(positions[part], order)
        np.testing.assert_array_equal(near[part], row[order])


# Equal to brute force


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("centres", [0, 5])
@pytest.mark.parametrize("bits", LENGTHS)
def test_every_path_equals_brute_force(path: str, centres: int, bits: int) -> None:
    rng = np.random.default_rng(bits + centres)
    codes = make(rng, 2000, bits, centres)
    queries = np.concatenate([make(rng, 30, bits, centres), codes[:4]])
    distances = brute(queries, codes, bits)
    engine = Engine(codes, bits, path=path, threads=2)
    for k in (1, 10, 300, 2000, 5000):
        assert_nearest(engine, queries, distances, k)
    assert_nearest(engine, queries[:1], distances[:1], 300)
    for radius in sorted({0, 2, bits // 3, bits // 2, bits + 7}):
        assert_within(engine, queries, distances, radius)
    assert_within(engine, queries[-1:], distances[-1:], bits // 3)
    weights = real_weights(rng.standard_normal((len(queries), bits)))
    weights[1], weights[2] = 1, 0
    costs = brute(queries, codes, bits, weights)
    for k in (1, 10, 5000):
        assert_nearest(engine, queries, costs, k, weights=weights)
    assert_nearest(engine, queries[:1], costs[:1], 300, weights=weights[:1])


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_any_small_collection(data: st.DataObject) -> None:
    bits = data.draw(st.integers(1, 1024) | st.sampled_from(LENGTHS))
    rng = np.random.default_rng(data.draw(st.integers(0, 1000)))
    centres = data.draw(st.sampled_from([0, 1, 3]))
    flips = data.draw(st.sampled_from([0.0, 0.02, 0.1]))
    codes = make(rng, data.draw(st.integers(1, 700)), bits, centres, flips)
    queries = make(rng, data.draw(st.integers(1, 40)), bits, centres)
    k = data.draw(st.integers(1, 900))
    radius = data.draw(st.integers(0, bits) | st.integers(0, 3))
    weights = rng.integers(0, data.draw(st.sampled_from([2, 5, 1 << 20])), (len(queries), bits))
    among = np.flatnonzero(rng.random(len(codes)) < data.draw(st.sampled_from([0.0, 0.1, 0.9])))
    distances = brute(queries, codes, bits)
    costs = brute(queries, codes, bits, weights)
    for path in PATHS:
        engine = Engine(codes, bits, path=path, threads=data.draw(st.integers(1, 3)))
        assert_nearest(engine, queries, distances, k)
        assert_nearest(engine, queries, costs, k, weights=weights)
        assert_within(engine, queries, distances, radius)
        chosen = Engine(codes[among], bits, path="numpy")
        found, near = chosen.search(queries, k)
        got = engine.search(queries, k, among=among)
        np.testing.assert_array_equal(got[0], among[found])
        np.testing.assert_array_equal(got[1], near)


@pytest.mark.parametrize("bits", [16, 32, 48, 64])
@pytest.mark.parametrize("centres", [0, 20])
def test_large_collections_agree_between_paths(bits: int, centres: int) -> None:
    rng = np.random.default_rng(bits)
    codes = make(rng, 120_000, bits, centres)
    queries = make(rng, 32, bits, centres)
    plain = Engine(codes, bits, path="numpy")
    want = {k: plain.search(queries, k) for k in (1, 100, 3000)}
    within = plain.within(queries, bits // 6)
    weights = real_weights(rng.standard_normal((32, bits)))
    weighted = plain.search(queries, 100, weights=weights)
    for path in ("auto", "scan", "buckets"):
        engine = Engine(codes, bits, path=path)
        if path == "auto":
            # so many that buckets pay
            engine.search(np.repeat(queries, 40, axis=0), 1)
            assert engine._buckets is not None
        for k, (positions, distances) in want.items():
            got = engine.search(queries, k)
            np.testing.assert_array_equal(got[0], positions)
            np.testing.assert_array_equal(got[1], distances)
            single = engine.search(queries[3:4], k)
            np.testing.assert_array_equal(single[0], positions[3:4])
        for got, expected in zip(engine.within(queries, bits // 6), within, strict=True):
            np.testing.assert_array_equal(got, expected)
        got = engine.search(queries, 100, weights=weights)
        np.testing.assert_array_equal(got, weighted)
        single = engine.search(queries[3:4], 100, weights=weights[3:4])
        np.testing.assert_array_equal(single[0], weighted[0][3:4])


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("bits", [12, 32, 64])
def test_ties_of_thousands_come_in_the_order_of_positions(path: str, bits: int) -> None:
    rng = np.random.default_rng(5)
    distinct = make(rng, 6, bits)
    near = np.repeat(distinct[:1], bits, axis=0)
    near[np.arange(bits), np.arange(bits) // 8] ^= (128 >> (np.arange(bits) % 8)).astype(np.uint8)
    # thousands of equal codes, and all codes one bit from the query in lists of hundreds
    codes = np.concatenate([distinct, near])[rng.integers(0, 6 + bits, 20_000)]
    queries = distinct
    distances = brute(queries, codes, bits)
    engine = Engine(codes, bits, path=path)
    for k in (1, 50, 1000, 7000, 20_000):
        assert_nearest(engine, queries, distances, k)
    for radius in (0, 1, 2, bits):
        assert_within(engine, queries, distances, radius)
    weights = rng.integers(0, 3, (6, bits))
    for k in (1, 1000, 20_000):
        assert_nearest(engine, queries, brute(queries, codes, bits, weights), k, weights=weights)


@pytest.mark.parametrize("path", PATHS)
def test_ties_of_thousands_of_distinct_codes(path: str) -> None:
    ones = list(itertools.combinations(range(32), 3)) + list(itertools.combinations(range(32), 4))
    numbers = np.array([sum(1 << i for i in chosen) for chosen in ones], dtype=">u4")
    codes = np.random.default_rng(6).permutation(numbers).view(np.uint8).reshape(-1, 4)
    queries = np.concatenate([np.zeros((2, 4), dtype=np.uint8), codes[:3]])
    distances = brute(queries, codes, 32)
    engine = Engine(codes, 32, path=path)
    for k in (1, 50, 4960, 6000):
        assert_nearest(engine, queries, distances, k)
        assert_nearest(engine, queries[:1], distances[:1], k)
    assert_within(engine, queries, distances, 3)


@pytest.mark.parametrize("path", PATHS)
def test_only_one_distinct_code(path: str) -> None:
    codes = np.full((9000, 5), 7, dtype=np.uint8)
    engine = Engine(codes, 40, path=path)
    positions, distances = engine.search(codes[:2] ^ 1, 8999)
    np.testing.assert_array_equal(positions, np.tile(np.arange(8999), (2, 1)))
    assert (distances == 5).all()
    assert np.diff(engine.within(codes[:2], 0)[0]).tolist() == [9000, 9000]
    assert np.diff(engine.within(codes[:2] ^ 1, 4)[0]).tolist() == [0, 0]


@pytest.mark.parametrize("path", PATHS)
def test_no_codes_and_no_queries(path: str) -> None:
    none = np.zeros((0, 4), dtype=np.uint8)
    some = np.arange(40, dtype=np.uint8).reshape(10, 4)
    weights = np.ones((10, 32), dtype=np.int64)
    for engine, options in (
        (Engine(none, 32, path=path), {}),
        (Engine(some, 32, path=path), {"among": []}),
    ):
        for extra in ({}, {"weights": weights}):
            positions, distances = engine.search(some, 5, **options, **extra)
            assert positions.shape == distances.shape == (10, 0)
        offsets, positions, _ = engine.within(some, 32, **options)
        assert offsets.tolist() == [0] * 11
        assert positions.shape == (0,)
    engine = Engine(some, 32, path=path)
    assert engine.search(none, 5)[0].shape == (0, 5)
    assert engine.search(none, 5, weights=weights[:0])[0].shape == (0, 5)
    assert engine.within(none, 5)[0].tolist() == [0]
    assert len(engine) == 10


@pytest.mark.parametrize("path", PATHS)
def test_only_chosen_positions_are_searched(path: str) -> None:
    rng = np.random.default_rng(1)
    codes, queries = make(rng, 5000, 48, 3), make(rng, 20, 48, 3)
    weights = rng.integers(0, 9, (20, 48))
    engine = Engine(codes, 48, path=path)
    for share in (0.002, 0.3, 1.0):
        among = np.flatnonzero(rng.random(5000) < share)
        # what was not chosen is farther than everything else
        far = np.setdiff1d(np.arange(5000), among)
        for options in ({}, {"weights": weights}):
            distances = brute(queries, codes, 48, options.get("weights"))
            distances[:, far] = 1 << 40
            k = min(30, len(among))
            assert_nearest(engine, queries, distances, k, among=among.tolist(), **options)
        offsets, positions, near = engine.within(queries, 9, among=among)
        inside = brute(queries, codes, 48)[:, among] <= 9
        assert np.diff(offsets).tolist() == inside.sum(axis=1).tolist()
        assert np.isin(positions, among).all()
        assert (near <= 9).all()


def test_codes_may_be_mapped_read_only_and_of_any_layout(tmp_path) -> None:
    rng = np.random.default_rng(0)
    codes, queries = make(rng, 9000, 64, 3), make(rng, 40, 64, 3)
    (tmp_path / "codes").write_bytes(b"x" + codes.tobytes())
    mapped = np.memmap(tmp_path / "codes", np.uint8, "r", offset=1, shape=codes.shape)
    frozen = np.frombuffer(codes.tobytes(), np.uint8).reshape(codes.shape)
    held = np.asfortranarray(codes)
    queries.flags.writeable = False
    distances = brute(queries, codes, 64)
    for given_codes in (mapped, frozen, held):
        for path in PATHS:
            engine = Engine(given_codes, 64, path=path)
            assert_nearest(engine, queries, distances, 100)
            assert_within(engine, queries, distances, 16)
            weights = np.ones((40, 64), dtype=np.int32)
            weights.flags.writeable = False
            assert_nearest(engine, queries, distances, 10, weights=weights)


# Weights of real-valued queries


def test_weights_order_codes_as_inner_products_do() -> None:
    rng = np.random.default_rng(2)
    logits = rng.standard_normal((5, 40))
    codes = make(rng, 3000, 40)
    weights = real_weights(logits)
    positions, costs = Engine(codes, 40).search(pack(logits), 50, weights=weights)
    products = logits @ (2.0 * unpack(codes, 40) - 1).T
    best = np.take_along_axis(products, positions, axis=1)
    np.testing.assert_allclose(best, -np.sort(-products, axis=1)[:, :50], rtol=1e-6)
    # a bit of mean weight counts 1
    distances = real_distances(costs, weights)
    want = (np.abs(logits).sum(axis=1)[:, None] - best) / 2 / np.abs(logits).mean(axis=1)[:, None]
    np.testing.assert_allclose(distances, want, rtol=1e-6)


def test_equal_weights_give_hamming_distances() -> None:
    rng = np.random.default_rng(3)
    for scale in (1e-300, 1.0, 3.7e300):
        logits = scale * np.sign(rng.standard_normal((4, 33)))
        codes, weights = make(rng, 500, 33), real_weights(logits)
        positions, costs = Engine(codes, 33).search(pack(logits), 20, weights=weights)
        want = Engine(codes, 33).search(pack(logits), 20)
        np.testing.assert_array_equal(positions, want[0])
        distances = real_distances(costs, weights)
        assert distances.dtype == np.int64
        np.testing.assert_array_equal(distances, want[1])
    assert real_weights(np.zeros((2, 8))).tolist() == [[0] * 8] * 2
    assert real_weights(np.zeros((0, 8))).shape == (0, 8)


@settings(max_examples=50, deadline=None)
@given(
    values=st.lists(
        st.floats(allow_nan=False, allow_infinity=False, width=64), min_size=1, max_size=40
    )
)
def test_weights_are_whole_numbers_that_fit(values: list[float]) -> None:
    weights = real_weights([values])[0]
    assert weights.min() >= 0
    assert weights.sum() < 2**31
    order = np.argsort(np.abs(values), kind="stable")
    assert (np.diff(weights[order]) >= 0).all()
    if max(map(abs, values)) > 0:
        assert weights.sum() >= 2**28


# Wrong requests


def test_wrong_requests_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    codes = np.zeros((4, 2), dtype=np.uint8)
    engine = Engine(codes, 16)
    wrong: list[Any] = [0, -1, 1.5, True]
    for k in wrong:
        with pytest.raises(UsageError, match="k must be"):
            engine.search(codes, k)
    with pytest.raises(UsageError, match="radius must be"):
        engine.within(codes, -1)
    with pytest.raises(UsageError, match="shape"):
        engine.search(codes[:, :1], 1)
    with pytest.raises(UsageError, match="shape"):
        Engine(codes, 24)
    with pytest.raises(UsageError, match="unknown path"):
        Engine(codes, 16, path="fast")
    for weights in (np.ones((4, 15), int), np.ones((3, 16), int), np.ones((4, 16))):
        with pytest.raises(UsageError, match="weights must be whole numbers"):
            engine.search(codes, 1, weights=weights)
    for weight in (-1, 2**27):
        with pytest.raises(UsageError, match="weights must not be negative"):
            engine.search(codes, 1, weights=np.full((4, 16), weight))
    unknown: list[Any] = [[4], [-1], [1, 0], [2, 2]]
    for among in unknown:
        with pytest.raises(UsageError, match="ascending positions from 0 to 3"):
            engine.within(codes, 1, among=among)
    for among in ([True, False, True, True], [[1]], [0.0]):
        with pytest.raises(UsageError, match="list of positions"):
            engine.search(codes, 1, among=among)
    for logits in ([[np.nan]], [[np.inf]]):
        with pytest.raises(UsageError, match="finite"):
            real_weights(logits)
    monkeypatch.setattr(engine_module, "MOST_CODES", 3)
    with pytest.raises(UsageError, match="at most 3 codes"):
        Engine(codes, 16)


# With numba and without


def in_python(script: str, *, numba: bool = True) -> subprocess.CompletedProcess[str]:
    """Run a script in a process of its own, perhaps one that finds no numba."""
    hidden = (
        ""
        if numba
        else (
            "import importlib.util, sys\n"
            "sys.modules['numba'] = None\n"
            "find = importlib.util.find_spec\n"
            "importlib.util.find_spec = lambda n, p=None: None if n == 'numba' else find(n, p)\n"
        )
    )
    command = [sys.executable, "-c", hidden + textwrap.dedent(script)]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)


def test_small_searches_do_not_import_numba() -> None:
    done = in_python(
        """
        import sys, numpy as np
        from fisherhash.index.engine import Engine
        codes = np.random.default_rng(0).integers(0, 256, (20_000, 6), dtype=np.uint8)
        engine = Engine(codes, 48)
        engine.search(codes[:20], 10); engine.within(codes[:20], 5)
        engine.search(codes[:2], 10, weights=np.ones((2, 48), int))
        sys.exit('numba' in sys.modules)
        """
    )
    assert done.returncode == 0, done.stderr


def test_without_numba_numpy_answers_and_one_line_says_what_is_missing() -> None:
    script = """
        import logging, numpy as np
        logging.basicConfig(format="%(message)s")
        from fisherhash.index.engine import Engine
        rng = np.random.default_rng(0)
        codes = rng.integers(0, 256, (2_100_000, 2), dtype=np.uint8)
        engine, small = Engine(codes, 16), Engine(codes[:90_000], 16)
        parts = [*small.search(codes[:40], 9), *small.within(codes[:40], 1)]
        print("small")
        for path in ("auto", "scan", "buckets"):
            for _ in range(2):
                parts += Engine(codes, 16, path=path).search(codes[:4], 1000)
        weights = rng.integers(0, 99, (4, 16))
        parts += engine.search(codes[:4], 1000, weights=weights)
        print([int((part * np.arange(1, part.size + 1).reshape(part.shape)).sum())
               for part in parts])
    """
    with_numba, without = in_python(script), in_python(script, numba=False)
    assert with_numba.returncode == without.returncode == 0, without.stderr
    assert with_numba.stdout == without.stdout
    assert with_numba.stderr == ""
    assert without.stderr.count("\n") == 1
    assert "pip install 'fisherhash[fast]'" in without.stderr


def test_a_large_batch_without_numba_is_noticed_too(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(planner, "has_numba", lambda: False)
    planner._suggest_numba.cache_clear()
    caplog.set_level(logging.INFO)
    assert planner.use_numpy(1000, 100_000, 8, "search", weighted=False)
    assert not caplog.records
    for _ in range(2):
        assert planner.use_numpy(100_000, 100_000, 8, "search", weighted=False)
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    planner._suggest_numba.cache_clear()


def test_many_small_searches_turn_to_the_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planner, "loaded", {"within"})
    monkeypatch.setattr(planner, "_numpy_done", 0)

    def small(total: int, kind: str, *, weighted: bool = False) -> bool:
        return planner.use_numpy(1, total, 8, kind, weighted=weighted)

    chosen = [small(10_000_000, "search") for _ in range(100)]
    assert chosen[0]
    assert not chosen[-1]
    assert not small(10**9, "search")
    assert small(1000, "within")
    assert not small(10_000_000, "within")


def test_the_first_few_searches_do_not_copy_the_codes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planner, "loaded", {"search in 8 bits"})
    codes = make(np.random.default_rng(4), 50_000, 64)
    distances = brute(codes[:1], codes, 64)
    engine = Engine(codes, 64)
    copied = []
    for _ in range(10):
        assert_nearest(engine, codes[:1], distances, 10)
        copied.append(engine._planes is not None)
    assert copied == sorted(copied)
    assert not copied[3]
    assert copied[-1]


# Buckets


def test_buckets_pay_for_large_collections_and_many_queries() -> None:
    assert not planner.Planner(1000, 8, 2).buckets_pay(64, 10**9)
    plan = planner.Planner(200_000, 8, 2)
    assert not plan.buckets_pay(64, 1)
    assert not plan.buckets_pay(176, 10_000)
    assert plan.buckets_pay(64, 10_000)
    singles = planner.Planner(200_000, 8, 2)
    assert 10 < next(i for i in range(10_000) if singles.buckets_pay(64, 1)) < 5000


def test_a_tight_budget_falls_back_to_the_scan(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(3)
    codes = np.concatenate([make(rng, 60_000, 64), make(rng, 60_000, 64, 2)])
    queries = np.concatenate([make(rng, 40, 64), make(rng, 40, 64, 2)])[rng.permutation(80)]
    distances = brute(queries, codes, 64)
    monkeypatch.setattr(planner.Planner, "buckets_pay", lambda *rest: True)
    for budget in (0, 1, 3_000, 30_000, 10**9):
        monkeypatch.setattr(planner.Planner, "budget", lambda *rest, b=budget: b)
        engine = Engine(codes, 64)
        assert_nearest(engine, queries, distances, 20)
        assert_within(engine, queries, distances, 12)
        assert engine._buckets is not None


def test_buckets_that_fail_are_tried_again_only_now_and_then() -> None:
    plan = planner.Planner(1_000_000, 8, 2)
    assert plan.budget(100, 10) > plan.budget(100, 10) // 2 > 0
    plan.learn(10, 100, 90, 30)
    tried = [plan.budget(100, 10) > 0 for _ in range(64)]
    assert 0 < sum(tried) <= 8
    assert plan.guess(10) == 30
    # another k fares on its own
    assert plan.budget(100, 1000) > 0


def test_buckets_that_do_not_fit_into_memory_are_not_built(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rng = np.random.default_rng(3)
    codes, queries = make(rng, 100_000, 64, 2), make(rng, 20, 64, 2)
    monkeypatch.setattr(planner.Planner, "buckets_pay", lambda *rest: True)
    monkeypatch.setattr(engine_module, "available_memory", lambda: 1 << 20)
    engine = Engine(codes, 64)
    assert_nearest(engine, queries, brute(queries, codes, 64), 20)
    assert engine._buckets is None
    assert buckets_module.bytes_needed(64, 100_000) > 100_000 * 8


# Threads


def test_threads_pass_errors_on_and_begin_nothing_after_one() -> None:
    begun = []

    def fail(number: int) -> None:
        begun.append(number)
        if number == 2:
            raise ValueError("here")

    with pytest.raises(ValueError, match="here"):
        threads.run(fail, [(i,) for i in range(1000)], threads=1)
    assert begun == [0, 1, 2]
    with pytest.raises(ValueError, match="here"):
        threads.run(fail, [(2,)] * 4, threads=2)
    assert threads.run(fail, [], threads=2) == []


def test_several_callers_at_once_and_a_forked_child() -> None:
    rng = np.random.default_rng(8)
    codes, queries = make(rng, 30_000, 48, 4), make(rng, 40, 48, 4)
    want = Engine(codes, 48, path="numpy").search(queries, 30)[0]
    for path in ("scan", "buckets"):
        engine = Engine(codes, 48, path=path, threads=3)
        with ThreadPoolExecutor(4) as callers:
            answers = list(callers.map(lambda _, e=engine: e.search(queries, 30)[0], range(8)))
        assert all(np.array_equal(answer, want) for answer in answers)
        if hasattr(os, "fork"):
            child = os.fork()
            if child == 0:
                code = 1
                try:
                    code = 0 if np.array_equal(engine.search(queries, 30)[0], want) else 2
                finally:
                    os._exit(code)
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_buckets_are_built_once_while_others_scan(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(9)
    codes, queries = make(rng, 100_000, 64, 4), make(rng, 40, 64, 4)
    want = Engine(codes, 64, path="numpy").search(queries, 30)[0]
    monkeypatch.setattr(planner.Planner, "buckets_pay", lambda *rest: True)
    monkeypatch.setattr(planner, "use_numpy", lambda *rest, **more: False)
    built, go_on = threading.Event(), threading.Event()

    class SlowBuckets(buckets_module.Buckets):
        def __init__(self, *args: Any) -> None:
            assert not built.is_set()
            built.set()
            assert go_on.wait(60)
            super().__init__(*args)

    monkeypatch.setattr(buckets_module, "Buckets", SlowBuckets)
    engine = Engine(codes, 64)
    with ThreadPoolExecutor(1) as callers:
        first = callers.submit(engine.search, queries, 30)
        assert built.wait(60)
        np.testing.assert_array_equal(engine.search(queries, 30)[0], want)
        go_on.set()
        np.testing.assert_array_equal(first.result()[0], want)
    np.testing.assert_array_equal(engine.search(queries, 30)[0], want)
    assert isinstance(engine._buckets, SlowBuckets)


@pytest.mark.skipif(os.name != "posix", reason="sends SIGINT")
@pytest.mark.parametrize("path", ["numpy", "scan"])
def test_control_c_interrupts_a_long_search(path: str) -> None:
    # In a process of its own: hypothesis may swallow the interrupt in a callback of this one.
    script = """
        import os, signal, threading, numpy as np
        from fisherhash.index.engine import Engine
        codes = np.random.default_rng(0).integers(0, 256, (100_000, 8), dtype=np.uint8)
        engine = Engine(codes, 64, path=PATH)
        engine.search(codes[:1], 10)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
        try:
            engine.search(np.tile(codes, (50, 1)), 10)
        except KeyboardInterrupt:
            print("interrupted", engine.search(codes[:1], 1)[0])
    """
    done = in_python(script.replace("PATH", repr(path)))
    assert done.stdout == "interrupted [[0]]\n", done.stderr
