"""More codes than one engine holds: the results of one, past 2**31 too."""

import numpy as np
import pytest

from fisherhash.errors import UsageError
from fisherhash.index.engine import Engine, engine
from fisherhash.index.engine.parted import PartedEngine, open_engine


def codes_of(n, bits=16, seed=0):
    """Many equal ones, so that ties lie on both sides of every border."""
    return np.random.default_rng(seed).integers(0, 3, (n, bits // 8), dtype=np.uint8)


@pytest.mark.parametrize("most", [1, 7, 100, 499, 500])
def test_parts_return_what_one_engine_returns(monkeypatch, most):
    codes, queries = codes_of(500), codes_of(6, seed=1)
    whole = Engine(codes, 16)
    monkeypatch.setattr(engine, "MOST_CODES", most)
    parted = PartedEngine(codes, 16)
    assert len(parted) == 500
    assert len(parted.parts) == -(-500 // most)
    for k in (1, 10, 500, 700):
        for one, two in zip(parted.search(queries, k), whole.search(queries, k), strict=True):
            np.testing.assert_array_equal(one, two)
            assert one.dtype == np.int64
    for radius in (0, 2, 16):
        found, expected = parted.within(queries, radius), whole.within(queries, radius)
        for one, two in zip(found, expected, strict=True):
            np.testing.assert_array_equal(one, two)
            assert one.dtype == np.int64


def test_the_limit_decides(monkeypatch):
    assert isinstance(open_engine(codes_of(10), 16), Engine)
    monkeypatch.setattr(engine, "MOST_CODES", 9)
    with pytest.raises(UsageError, match="at most 9 codes"):
        Engine(codes_of(10), 16)
    parted = open_engine(codes_of(10), 16)
    assert isinstance(parted, PartedEngine)
    parted.build()
    assert parted.describe()["codes"] == 10
    assert parted.describe()["parts"] == 2


def test_positions_past_two_to_the_31st():
    """Two parts that lie far apart, as the first and the last of a long array do."""
    parted = object.__new__(PartedEngine)
    parted.bits, parted._total = 16, (1 << 32) + 3
    ends = np.array([[1, 1], [1, 1], [7, 7]], dtype=np.uint8)
    parted.parts = [(0, Engine(ends[:1], 16)), (1 << 32, Engine(ends, 16))]
    positions, distances = parted.search(np.array([[1, 1]], dtype=np.uint8), 4)
    big = 1 << 32
    assert positions.tolist() == [[0, big, big + 1, big + 2]]
    assert distances.tolist() == [[0, 0, 0, 4]]
    offsets, positions, distances = parted.within(np.array([[1, 1], [7, 7]], np.uint8), 0)
    assert offsets.tolist() == [0, 3, 4]
    assert positions.tolist() == [0, big, big + 1, big + 2]


def test_wrong_arguments_are_refused(monkeypatch):
    monkeypatch.setattr(engine, "MOST_CODES", 9)
    parted = PartedEngine(codes_of(20), 16)
    with pytest.raises(UsageError, match="k must"):
        parted.search(codes_of(1), 0)
    with pytest.raises(UsageError, match="radius"):
        parted.within(codes_of(1), -1)
