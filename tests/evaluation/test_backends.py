"""numpy, numba and torch give the same numbers; each runs without the others."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest

from fisherhash.errors import FisherhashError
from fisherhash.evaluation import evaluate, hamming

SHAPES = [(1, 5), (12, 3), (48, 10), (64, 70), (70, 130), (254, 3), (255, 3), (300, 2)]


def random_case(seed, queries, database, bits, classes, chance=0.2):
    rng = np.random.default_rng(seed)
    codes = [np.packbits(rng.random((n, bits)) < 0.3, axis=1) for n in (queries, database)]
    labels = [(rng.random((n, classes)) < chance).astype(int) for n in (queries, database)]
    labels[0][0, 0] = labels[1][0, 0] = 1
    return (*codes, *labels)


def compare(one, two, *, exact=None):
    """numpy and numba give the same bits; torch adds up the sums of the stable order otherwise."""
    if exact is None:
        exact = "torch" not in (one.backend, two.backend)
    left, right = one.to_json(), two.to_json()
    for side in (left, right):
        side.pop("backend")
    if exact:
        np.testing.assert_array_equal(one.average_precision, two.average_precision)
    else:
        np.testing.assert_allclose(one.average_precision, two.average_precision, atol=1e-13)
        for name in ("map", "map_stable", *(["weighted_map"] if one.weighted_map else ())):
            assert left.pop(name) == pytest.approx(right.pop(name), abs=1e-13)
    assert left == right


@pytest.mark.parametrize(("bits", "classes"), SHAPES)
@pytest.mark.parametrize("backend", ["numba", "torch"])
def test_backends_agree(backend, bits, classes):
    case = random_case(bits, 13, 301, bits, classes)
    own = np.where(np.arange(13) % 3 == 0, np.arange(13) * 7, -1)
    for options in ({}, {"top": 40, "self_index": own}, {"top": 301, "self_index": own}):
        options = {"bits": bits, **options}
        compare(
            evaluate(*case, **options, backend=backend), evaluate(*case, **options, backend="numpy")
        )


@pytest.mark.parametrize("backend", ["numpy", "numba", "torch"])
def test_blocks_do_not_change_the_result(monkeypatch, backend):
    case = random_case(3, 29, 211, 16, 4)
    whole = evaluate(*case, backend=backend)
    monkeypatch.setattr(hamming, "_BLOCK_PAIRS", 500)
    compare(evaluate(*case, backend=backend), whole)
    monkeypatch.setattr(hamming, "_BLOCK_COUNTS", 200)
    parts = evaluate(*case, backend=backend)
    assert parts.map == pytest.approx(whole.map, abs=1e-13)
    assert parts.precision_at == pytest.approx(whole.precision_at, abs=1e-13)


def test_auto_takes_numpy_for_small_inputs_and_numba_for_large_ones():
    assert hamming.choose_backend("auto", 10**6) == "numpy"
    assert hamming.choose_backend("auto", 10**8) == "numba"


def test_without_numba_auto_takes_torch(monkeypatch):
    monkeypatch.setitem(sys.modules, "numba", None)
    assert hamming.choose_backend("auto", 10**8) == "torch"
    with pytest.raises(FisherhashError, match="numba"):
        hamming.choose_backend("numba", 1)
    monkeypatch.setitem(sys.modules, "torch", None)
    assert hamming.choose_backend("auto", 10**8) == "numpy"


def test_a_small_evaluation_loads_neither_numba_nor_torch_nor_matplotlib():
    script = (
        "import sys; from fisherhash.evaluation import evaluate;"
        "evaluate([[0]], [[1]], [[1]], [[1]]);"
        "print([m for m in ('numba', 'torch', 'matplotlib') if m in sys.modules])"
    )
    out = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"


def test_kernels_compile_where_no_cache_can_be_written(monkeypatch):
    import numba

    real, case = numba.njit, random_case(1, 5, 60, 12, 3)
    expected = evaluate(*case, backend="numba")

    def refuses(*args, **options):
        if options.get("cache"):
            raise RuntimeError("cannot cache function: no locator available")
        return real(*args, **options)

    monkeypatch.setattr(numba, "njit", refuses)
    hamming._compiled.cache_clear()
    compare(evaluate(*case, backend="numba"), expected)
    hamming._compiled.cache_clear()


@pytest.mark.gpu
def test_the_gpu_gives_the_same_numbers():
    for bits, classes in SHAPES:
        case = random_case(bits, 40, 3001, bits, classes)
        compare(
            evaluate(*case, bits=bits, top=500, backend="torch", device="cuda"),
            evaluate(*case, bits=bits, top=500, backend="numpy"),
        )
