"""Every way through the engine returns the result of brute force, positions included."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from fisherhash.codes import unpack
from fisherhash.errors import FisherhashError, UsageError
from fisherhash.index.engine import PATHS, Engine, planner, pool
from fisherhash.index.engine import engine as engine_module

Codes = NDArray[np.uint8]


def make(
    rng: np.random.Generator, n: int, bits: int, centres: int = 0, flips: float = 0.05
) -> Codes:
    if centres:
        middle = np.random.default_rng(bits).random((centres, bits)) < 0.5
        return np.packbits(
            middle[rng.integers(0, centres, n)] ^ (rng.random((n, bits)) < flips), axis=1
        )
    return np.packbits(rng.random((n, bits)) < 0.5, axis=1)


def brute_distances(queries: Codes, codes: Codes, bits: int) -> NDArray[np.int64]:
    left, right = unpack(queries, bits).astype(np.float32), unpack(codes, bits).astype(np.float32)
    both = left @ right.T
    distances = left.sum(axis=1)[:, None] + right.sum(axis=1)[None] - 2 * both
    return np.rint(distances).astype(np.int64)


def brute_nearest(distances: NDArray[np.int64], k: int) -> tuple[NDArray[np.int64], ...]:
    n = distances.shape[1]
    order = np.argsort(distances * n + np.arange(n), axis=1)[:, :k]
    return order, np.take_along_axis(distances, order, axis=1)


def assert_nearest(engine: Engine, queries: Codes, distances: NDArray[np.int64], k: int) -> None:
    positions, near = engine.search(queries, k)
    want_positions, want_near = brute_nearest(distances, k)
    assert positions.dtype == near.dtype == np.int64
    np.testing.assert_array_equal(near, want_near)
    np.testing.assert_array_equal(positions, want_positions)


def assert_within(engine: Engine, queries: Codes, distances: NDArray[np.int64], r: int) -> None:
    offsets, positions, near = engine.within(queries, r)
    assert offsets.shape == (len(queries) + 1,)
    assert offsets[0] == 0
    assert offsets[-1] == len(positions) == len(near)
    for q, row in enumerate(distances):
        inside = np.flatnonzero(row <= r)
        order = inside[np.argsort(row[inside] * len(row) + inside)]
        part = slice(offsets[q], offsets[q + 1])
        np.testing.assert_array_equal(positions[part], order)
        np.testing.assert_array_equal(near[part], row[order])


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("centres", [0, 5])
@pytest.mark.parametrize("bits", [1, 7, 12, 16, 24, 32, 33, 48, 64, 65, 128, 254, 255, 1024])
def test_every_path_equals_brute_force(path: str, centres: int, bits: int) -> None:
    rng = np.random.default_rng(bits + centres)
    codes = make(rng, 2000, bits, centres)
    queries = np.concatenate([make(rng, 30, bits, centres), codes[:4]])
    distances = brute_distances(queries, codes, bits)
    engine = Engine(codes, bits, path=path, threads=2)
    for k in (1, 10, 300, 2000, 5000):
        assert_nearest(engine, queries, distances, k)
    assert_nearest(engine, queries[:1], distances[:1], 300)
    for radius in sorted({0, 2, bits // 3, bits // 2, bits + 7}):
        assert_within(engine, queries, distances, radius)
    assert_within(engine, queries[-1:], distances[-1:], bits // 3)


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_any_small_collection(data: st.DataObject) -> None:
    bits = data.draw(st.integers(1, 1024) | st.sampled_from([1, 8, 16, 24, 31, 32, 33, 64, 72]))
    rng = np.random.default_rng(data.draw(st.integers(0, 1000)))
    n = data.draw(st.integers(1, 700))
    centres = data.draw(st.sampled_from([0, 1, 3]))
    codes = make(rng, n, bits, centres, flips=data.draw(st.sampled_from([0.0, 0.02, 0.1])))
    queries = make(rng, data.draw(st.integers(1, 40)), bits, centres)
    k = data.draw(st.integers(1, 900))
    radius = data.draw(st.integers(0, bits) | st.integers(0, 3))
    threads = data.draw(st.integers(1, 3))
    distances = brute_distances(queries, codes, bits)
    for path in PATHS:
        if path == "buckets" and bits > 128:
            continue
        engine = Engine(codes, bits, path=path, threads=threads)
        assert_nearest(engine, queries, distances, k)
        assert_within(engine, queries, distances, radius)


@pytest.mark.parametrize("bits", [16, 32, 48, 64])
@pytest.mark.parametrize("centres", [0, 20])
def test_large_collections_agree_between_paths(bits: int, centres: int) -> None:
    rng = np.random.default_rng(bits)
    codes = make(rng, 80_000, bits, centres)
    queries = make(rng, 32, bits, centres)
    want = {k: Engine(codes, bits, path="numpy").search(queries, k) for k in (1, 100, 3000)}
    within = Engine(codes, bits, path="numpy").within(queries, bits // 6)
    for path in ("auto", "scan", "unique", "buckets"):
        engine = Engine(codes, bits, path=path)
        if path == "auto":
            engine.build()
        for k, (positions, distances) in want.items():
            got = engine.search(queries, k)
            np.testing.assert_array_equal(got[0], positions)
            np.testing.assert_array_equal(got[1], distances)
            single = engine.search(queries[3:4], k)
            np.testing.assert_array_equal(single[0], positions[3:4])
        for got, expected in zip(engine.within(queries, bits // 6), within, strict=True):
            np.testing.assert_array_equal(got, expected)


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
    distances = brute_distances(queries, codes, bits)
    engine = Engine(codes, bits, path=path)
    for k in (1, 50, 1000, 7000, 20_000):
        assert_nearest(engine, queries, distances, k)
    for radius in (0, 1, 2, bits):
        assert_within(engine, queries, distances, radius)


@pytest.mark.parametrize("path", PATHS)
def test_ties_of_thousands_of_distinct_codes(path: str) -> None:
    rng = np.random.default_rng(6)
    ones = list(itertools.combinations(range(32), 3)) + list(itertools.combinations(range(32), 4))
    numbers = np.array([sum(1 << i for i in chosen) for chosen in ones], dtype=">u4")
    codes = rng.permutation(numbers).view(np.uint8).reshape(-1, 4)
    queries = np.concatenate([np.zeros((2, 4), dtype=np.uint8), codes[:3]])
    distances = brute_distances(queries, codes, 32)
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
def test_nothing_to_find_and_nothing_asked(path: str) -> None:
    none = np.zeros((0, 4), dtype=np.uint8)
    some = np.arange(40, dtype=np.uint8).reshape(10, 4)
    positions, distances = Engine(none, 32, path=path).search(some, 5)
    assert positions.shape == distances.shape == (10, 0)
    offsets, positions, _ = Engine(none, 32, path=path).within(some, 32)
    assert offsets.tolist() == [0] * 11
    assert positions.shape == (0,)
    assert Engine(some, 32, path=path).search(none, 5)[0].shape == (0, 5)
    assert Engine(some, 32, path=path).within(none, 5)[0].tolist() == [0]
    empty = Engine(none, 32, path=path)
    empty.build()
    assert len(empty) == 0
    assert Engine(none, 32, tables=empty.tables() or None).search(some, 1)[0].shape == (10, 0)


@pytest.mark.parametrize("centres", [0, 3])
@pytest.mark.parametrize("bits", [20, 48, 100, 300])
def test_tables_come_back_from_disk(tmp_path, bits: int, centres: int) -> None:
    rng = np.random.default_rng(0)
    codes = make(rng, 9000, bits, centres)
    queries = make(rng, 40, bits, centres)
    (tmp_path / "codes").write_bytes(b"x" + codes.tobytes())
    mapped = np.memmap(tmp_path / "codes", np.uint8, "r", offset=1, shape=codes.shape)
    built = Engine(mapped, bits)
    built.build()
    tables = {}
    for name, array in built.tables().items():
        np.save(tmp_path / f"{name}.npy", array)
        tables[name] = np.load(tmp_path / f"{name}.npy", mmap_mode="r" if array.size else None)
    again = Engine(mapped, bits, tables=tables, path="unique" if bits == 300 else "auto")
    distances = brute_distances(queries, codes, bits)
    for engine in (built, again):
        assert_nearest(engine, queries, distances, 100)
        assert_within(engine, queries, distances, bits // 4)
    assert again.describe()["tables"]
    assert (mapped == codes).all()


def test_tables_of_something_else_are_refused() -> None:
    codes = make(np.random.default_rng(0), 6000, 32)
    tables = Engine(codes, 32, path="buckets").tables()
    with pytest.raises(FisherhashError, match="6000 codes of 32 bits"):
        Engine(codes[:-1], 32, tables=tables)
    with pytest.raises(FisherhashError, match="6000 codes of 32 bits"):
        Engine(codes, 31, tables=tables)
    with pytest.raises(FisherhashError, match="lack words"):
        Engine(codes, 32, tables={name: a for name, a in tables.items() if name != "words"})
    with pytest.raises(FisherhashError, match="layout"):
        Engine(codes, 32, tables={**tables, "layout": tables["layout"] + 1})
    for name in ("planes", "starts", "positions", "directory", "words", "bucket_items"):
        with pytest.raises(FisherhashError, match="damaged"):
            Engine(codes, 32, tables={**tables, name: tables[name][:-1]})
        with pytest.raises(FisherhashError, match="holds float"):
            Engine(codes, 32, tables={**tables, name: tables[name].astype(np.float32)})


def test_wrong_requests_are_refused() -> None:
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


def test_a_tight_budget_falls_back_to_the_scan(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(3)
    codes = np.concatenate([make(rng, 20_000, 64), make(rng, 20_000, 64, 2)])
    queries = np.concatenate([make(rng, 40, 64), make(rng, 40, 64, 2)])
    queries = queries[rng.permutation(80)]
    distances = brute_distances(queries, codes, 64)
    for budget in (1, 3_000, 30_000, 10**9):
        monkeypatch.setattr(planner.Planner, "budget", lambda self, *rest, b=budget: b)
        engine = Engine(codes, 64)
        engine.build()
        assert_nearest(engine, queries, distances, 20)
        assert_within(engine, queries, distances, 12)


def test_buckets_that_wait_for_the_disk_give_way_to_the_scan(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from fisherhash.index.engine import multi_index

    rng = np.random.default_rng(4)
    codes = make(rng, 200_000, 64)
    queries = codes[:3]
    distances = brute_distances(queries, codes, 64)
    engine = Engine(codes, 64)
    engine.build()
    used: list[int] = []
    by_buckets = multi_index.nearest_by_buckets
    monkeypatch.setattr(
        multi_index, "nearest_by_buckets", lambda *args: used.append(1) or by_buckets(*args)
    )
    monkeypatch.setattr(planner, "is_small", lambda *args: False)
    monkeypatch.setattr(planner, "_LATE_RETRY", 16)
    slow = True
    monkeypatch.setattr(planner, "is_late", lambda *args: slow)

    def searches(count: int) -> int:
        used.clear()
        for _ in range(count):
            assert_nearest(engine, queries, distances, 1)
        return len(used)

    first = searches(1)
    assert first > 0
    searches(5)
    # late again and again: one in sixteen is still tried
    assert searches(16) <= 2 * first
    slow = False
    searches(16)
    assert searches(16) == 16 * first


def test_buckets_are_late_beside_what_a_scan_would_take() -> None:
    engine = Engine(make(np.random.default_rng(5), 100_000, 64), 64)
    engine.build()
    tables = engine._ready(1)
    assert not planner.is_late(0.001, tables, 1, 2)
    assert planner.is_late(0.5, tables, 1, 2)
    # so many scans take longer than that
    assert not planner.is_late(0.5, tables, 100_000, 2)


def test_equal_hashes_of_different_codes_are_not_brought_together() -> None:
    from fisherhash.index.engine import kernels

    codes = make(np.random.default_rng(0), 4, 128)
    same = np.zeros(4, dtype=np.uint64)
    rows = np.arange(4, dtype=np.uint32)
    begins = np.zeros(4, dtype=np.uint8)
    bounds = np.array([0, 4])
    assert not kernels.group_parts(codes, bounds, 0, 1, same, rows, begins)


def test_small_searches_do_not_import_numba() -> None:
    script = (
        "import sys, numpy as np\n"
        "from fisherhash.index.engine import Engine\n"
        "codes = np.random.default_rng(0).integers(0, 256, (20_000, 6), dtype=np.uint8)\n"
        "engine = Engine(codes, 48)\n"
        "engine.search(codes[:20], 10); engine.within(codes[:20], 5); engine.describe()\n"
        "sys.exit('numba' in sys.modules)\n"
    )
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0


def test_many_small_searches_turn_to_the_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planner, "loaded", {"within"})
    monkeypatch.setattr(planner, "_numpy_done", 0)
    asked = [planner.is_small(3_000_000, "search") for _ in range(100)]
    assert asked[0]
    assert not asked[-1]
    assert not planner.is_small(10**9, "search")
    assert planner.is_small(1000, "within")
    assert not planner.is_small(3_000_000, "within")


def test_tables_pay_for_large_collections_and_many_queries() -> None:
    assert not planner.tables_pay(1000, 64, 10**9)
    assert not planner.tables_pay(200_000, 64, 1)
    assert planner.tables_pay(200_000, 64, 10_000)


def test_threads_pass_errors_on() -> None:
    def fail() -> None:
        raise ValueError("here")

    with pytest.raises(ValueError, match="here"):
        pool.run(fail, [()] * 4, threads=2)
    assert pool.run(fail, [], threads=2) == []


def test_too_many_codes_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_module, "MOST_CODES", 3)
    with pytest.raises(UsageError, match="at most 3 codes"):
        Engine(np.zeros((4, 2), dtype=np.uint8), 16)


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
