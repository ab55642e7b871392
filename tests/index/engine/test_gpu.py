"""The engine of the GPU returns what the other one returns; on a CPU it runs without Triton."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from fisherhash.errors import UsageError
from fisherhash.index.engine import Engine, gpu
from fisherhash.index.engine.gpu import GpuEngine

NO_TRITON = importlib.util.find_spec("triton") is None


def codes_of(kind: str, n: int, bits: int, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    if kind == "uniform":
        return np.packbits(rng.random((n, bits)) < 0.5, axis=1)
    centres = np.random.default_rng(99).random((7, bits)) < 0.5
    return np.packbits(centres[rng.integers(0, 7, n)] ^ (rng.random((n, bits)) < 0.02), axis=1)


def assert_same(engine: GpuEngine, codes: np.ndarray, bits: int, queries: np.ndarray) -> None:
    other = Engine(codes, bits, path="numpy")
    for k in (1, 10, 300, len(codes) + 5):
        for found, expected in zip(
            engine.search(queries, k), other.search(queries, k), strict=True
        ):
            assert found.dtype == np.int64
            np.testing.assert_array_equal(found, expected)
    for radius in (0, bits // 8, bits // 2, bits):
        found, expected = engine.within(queries, radius), other.within(queries, radius)
        for one, two in zip(found, expected, strict=True):
            assert one.dtype == np.int64
            np.testing.assert_array_equal(one, two)


@pytest.mark.parametrize("kind", ["uniform", "ties"])
@pytest.mark.parametrize("bits", [1, 12, 32, 48, 64, 100, 300])
def test_results_are_those_of_the_processor(kind, bits):
    codes = codes_of(kind, 1500, bits)
    engine = GpuEngine(codes, bits, device="cpu")
    assert_same(engine, codes, bits, codes_of(kind, 9, bits, seed=1))


@pytest.mark.parametrize("n", [1, 127, 128, 129, 4096, 4097])
def test_whole_and_broken_groups(n):
    codes = codes_of("ties", n, 24)
    assert_same(GpuEngine(codes, 24, device="cpu"), codes, 24, codes_of("ties", 3, 24, seed=1))


def test_in_small_pieces(monkeypatch):
    monkeypatch.setattr(gpu, "MOST_PAIRS", 1000)
    monkeypatch.setattr(gpu, "UPLOADED", 100)
    codes = codes_of("ties", 1500, 48)
    assert_same(GpuEngine(codes, 48, device="cpu"), codes, 48, codes_of("ties", 9, 48, seed=1))


def test_all_codes_equal():
    codes = np.full((1000, 4), 7, dtype=np.uint8)
    positions, distances = GpuEngine(codes, 32, device="cpu").search(codes[:1], 5)
    assert positions.tolist() == [[0, 1, 2, 3, 4]]
    assert distances.tolist() == [[0] * 5]


def test_nothing_to_search():
    empty = GpuEngine(np.zeros((0, 4), dtype=np.uint8), 32, device="cpu")
    assert empty.search(np.zeros((2, 4), dtype=np.uint8), 3)[0].shape == (2, 0)
    offsets, positions, distances = empty.within(np.zeros((2, 4), dtype=np.uint8), 3)
    assert offsets.tolist() == [0, 0, 0]
    assert len(positions) == len(distances) == 0
    some = GpuEngine(np.zeros((5, 4), dtype=np.uint8), 32, device="cpu")
    assert some.search(np.zeros((0, 4), dtype=np.uint8), 3)[0].shape == (0, 3)
    assert some.within(np.zeros((0, 4), dtype=np.uint8), 3)[0].tolist() == [0]


def test_wrong_arguments():
    codes = np.zeros((5, 4), dtype=np.uint8)
    with pytest.raises(UsageError, match=r"codes of 24 bits must be uint8 of shape \(n, 3\)"):
        GpuEngine(codes, 24, device="cpu")
    with pytest.raises(UsageError, match="unknown way 'fast'"):
        GpuEngine(codes, 32, device="cpu", way="fast")
    with pytest.raises(UsageError, match="'dot' needs a CUDA device"):
        GpuEngine(codes, 32, device="cpu", way="dot")
    engine = GpuEngine(codes, 32, device="cpu")
    with pytest.raises(UsageError, match="k must"):
        engine.search(codes, 0)
    with pytest.raises(UsageError):
        engine.search(codes[:, :3], 1)
    assert engine.describe()["codes"] == len(engine) == 5
    assert engine.tables() == {}


INTERPRETED = """
import numpy as np, torch
from fisherhash.index.engine import gpu
rng = np.random.default_rng(1)
for bits in (8, 48, 100):
    codes = np.packbits(rng.random((700, bits)) < 0.5, axis=1)
    engine = gpu.GpuEngine(codes, bits, device="cpu")
    queries, size, groups = engine._queries(codes[:9]), 128, 6
    expected = engine._minima_by_matmul(queries, size, groups)
    for way in ("count", "dot"):
        found = gpu._scanned(way, engine._words, queries, size, groups, native=False)
        assert torch.equal(found, expected), (way, bits)
    pairs = torch.tensor([0, 3, 8]), torch.tensor([0, 5, 1])
    found = gpu._distances(engine._words, queries, *pairs, size, native=False)
    assert torch.equal(found, engine._in_groups(queries, *pairs, size)), bits
"""


@pytest.mark.skipif(NO_TRITON, reason="needs Triton")
def test_the_kernels_in_tritons_interpreter():
    source = str(Path(gpu.__file__).parents[3])
    path = os.pathsep.join([source, os.environ.get("PYTHONPATH", "")])
    environment = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": path}
    done = subprocess.run(
        [sys.executable, "-c", INTERPRETED], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.gpu
@pytest.mark.parametrize("way", gpu.GPU_WAYS)
@pytest.mark.parametrize("kind", ["uniform", "ties"])
@pytest.mark.parametrize("bits", [12, 48, 64, 100])
def test_every_way_on_a_gpu(way, kind, bits):
    codes = codes_of(kind, 20_001, bits)
    engine = GpuEngine(codes, bits, device="cuda", way=way)
    for count in (1, 5, 70, 200):
        assert_same(engine, codes, bits, codes_of(kind, count, bits, seed=1))
    assert gpu._works("count", torch.device("cuda"))
    assert gpu._works("dot", torch.device("cuda"))
