"""The centre step: brute force, monotone decrease, finite differences."""

import itertools

import numpy as np
import pytest

from fisherhash.methods import _centers


def center(C, S, T, A=None, **weights):
    """The problem of these statistics; A is the paper's unless another one is given."""
    weights = {"codes": 0, **weights}
    return _centers.CenterProblem(
        S, T, _centers.opposed(*np.shape(C)) if A is None else A, **weights
    )


def objective(C, *data, **weights):
    return center(C, *data, **weights).objective(C)


def relaxed_objective(V, *data, **weights):
    return center(V, *data, **weights).relaxed_objective(V)


def gradient(V, *data, **weights):
    return center(V, *data, **weights).gradient(V)


def exact_sweeps(C, *data, sweeps, **weights):
    return center(C, *data, **weights).exact_sweeps(C, sweeps)


def descend(V, *data, steps, **weights):
    return center(V, *data, **weights).descend(V, steps)


def linear_sweep(C, *data, inter):
    return center(C, *data, intra=1.0, inter=inter).linear_sweep(C)


def problem(bits, classes, images, seed, multilabel=False):
    rng = np.random.default_rng(seed)
    Y = np.zeros((classes, images))
    for i in range(images):
        count = rng.integers(1, classes + 1) if multilabel else 1
        Y[rng.choice(classes, count, replace=False), i] = 1.0 / count
    B = rng.choice([-1.0, 1.0], (bits, images))
    C = rng.choice([-1.0, 1.0], (bits, classes))
    return B, Y, C


def loop_objective(C, B, Y, intra, inter):
    """The paper's sums, term by term, with the sums over classes running to M."""
    bits, classes = C.shape
    value = 0.0
    for i in range(B.shape[1]):
        value += intra * sum((B[k, i] - C[k] @ Y[:, i]) ** 2 for k in range(bits))
    for i, j in itertools.product(range(classes), repeat=2):
        target = bits if i == j else -bits
        value += inter * (C[:, i] @ C[:, j] - target) ** 2
    return value


@pytest.mark.parametrize("multilabel", [False, True])
def test_objective_equals_the_printed_sums(multilabel):
    B, Y, C = problem(5, 3, 11, 0, multilabel)
    for values in (C, C + 0.3):
        got = objective(values, B @ Y.T, Y @ Y.T, codes=B.size, intra=0.7, inter=0.2)
        assert got == pytest.approx(loop_objective(values, B, Y, 0.7, 0.2))


def likeness(classes, seed):
    """A symmetric matrix of inner products that no rule has made."""
    A = np.random.default_rng(seed).normal(0, 3, (classes, classes))
    return A + A.T


def loop_distance(C, A):
    """||C^T C - A||^2, cell by cell."""
    cells = itertools.product(range(C.shape[1]), repeat=2)
    return sum((C[:, i] @ C[:, j] - A[i, j]) ** 2 for i, j in cells)


def no_flip_helps(C, value):
    """Whether no single flip takes ``value`` of C lower."""
    lowest = value(C)
    for k, i in itertools.product(range(C.shape[0]), range(C.shape[1])):
        flipped = C.copy()
        flipped[k, i] *= -1
        if value(flipped) < lowest - 1e-6:
            return False
    return True


@pytest.mark.parametrize(("bits", "classes"), [(5, 2), (4, 3), (3, 4)])
def test_exact_sweeps_towards_any_products_against_brute_force(bits, classes):
    B, Y, _ = problem(bits, classes, 12, 1, multilabel=True)
    S, T, A = B @ Y.T, Y @ Y.T, likeness(classes, 2)
    weights = {"intra": 1.0, "inter": 0.3, "A": A}
    every = [
        np.array(cells).reshape(bits, classes)
        for cells in itertools.product([-1.0, 1.0], repeat=bits * classes)
    ]
    values = [objective(C, S, T, codes=B.size, **weights) for C in every]
    reached = []
    for start in np.random.default_rng(0).choice(len(every), 200):
        C, _ = exact_sweeps(every[start], S, T, sweeps=100, **weights)
        reached.append(objective(C, S, T, codes=B.size, **weights))
        assert reached[-1] <= values[start] + 1e-9
    assert min(reached) == pytest.approx(min(values))


def test_gradient_towards_any_products_is_the_finite_difference():
    B, Y, _ = problem(5, 4, 20, 11, multilabel=True)
    S, T = B @ Y.T, Y @ Y.T
    V = np.random.default_rng(6).normal(size=(5, 4)) + 0.05
    weights = {"intra": 0.8, "inter": 0.3, "relaxation": 0.6, "A": likeness(4, 3)}
    got = gradient(V, S, T, **weights)
    step = 1e-6
    for k, i in itertools.product(range(5), range(4)):
        up, down = V.copy(), V.copy()
        up[k, i] += step
        down[k, i] -= step
        difference = relaxed_objective(up, S, T, codes=B.size, **weights)
        difference -= relaxed_objective(down, S, T, codes=B.size, **weights)
        assert got[k, i] == pytest.approx(difference / (2 * step), rel=1e-5, abs=1e-5)


def class_means(width=10, classes=6, seed=0):
    """Means of classes; the first two are alike, and so are the next two."""
    means = np.random.default_rng(seed).normal(size=(width, classes))
    means[:, 1] = means[:, 0] + 0.3 * means[:, 1]
    means[:, 3] = means[:, 2] + 0.3 * means[:, 3]
    return means + 5.0  # far from the origin, which must not matter


@pytest.mark.parametrize("affinity", [0.0, 0.3, 1.0])
def test_graded_products_are_the_formula(affinity):
    means = class_means()
    away = means - means.mean(1, keepdims=True)
    A = _centers.graded(means, 12, affinity)
    for i, j in itertools.product(range(6), repeat=2):
        cosine = away[:, i] @ away[:, j] / np.linalg.norm(away[:, i]) / np.linalg.norm(away[:, j])
        expected = 12.0 if i == j else 12 * (affinity * cosine - (1 - affinity) / 5)
        assert A[i, j] == pytest.approx(expected)


def book(means, bits, affinity):
    A = _centers.graded(means, bits, affinity)
    return _centers.code_book(A, means), A


@pytest.mark.parametrize("affinity", [0.0, 0.5, 1.0])
@pytest.mark.parametrize(("bits", "classes"), [(1, 2), (12, 6), (16, 5), (48, 10)])
def test_no_flip_improves_a_code_book(bits, classes, affinity):
    C, A = book(class_means(classes=max(classes, 4))[:, :classes], bits, affinity)
    assert C.shape == (bits, classes)
    assert set(np.unique(C)) <= {-1.0, 1.0}
    assert no_flip_helps(C, lambda C: loop_distance(C, A))


def test_classes_that_look_alike_have_nearer_codes():
    off = np.triu(np.ones((6, 6), dtype=bool), 1)
    alike = np.zeros((6, 6), dtype=bool)
    alike[0, 1] = alike[2, 3] = True
    C, _ = book(class_means(), 48, 0.5)
    distances = (48 - C.T @ C) / 2
    assert distances[alike].max() < distances[off & ~alike].min()
    C, _ = book(class_means(), 48, 0.0)
    even = (48 - C.T @ C) / 2
    assert even[off].max() - even[off].min() <= 4
    assert even[alike].min() > distances[alike].max()
