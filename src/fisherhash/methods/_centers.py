"""The centre step of Deep Fisher Hashing, three ways; small matrices, so plain numpy.

Minimise over C in {-1, 1}^(K x M)

    intra * sum_i ||b_i - C y_i||^2  +  inter * ||C^T C - A||_F^2,    A = K (2 I_M - J_M).

A may be another matrix of inner products: :func:`graded`. Only S = B Y^T (K x M) and T = Y Y^T
(M x M) of the training set enter. Where every image has one label T is diagonal, and may be given
as its diagonal (M,).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from fisherhash.methods._codebooks import far_apart

Matrix = NDArray[np.float64]


def objective(
    C: Matrix,
    S: Matrix,
    T: Matrix,
    *,
    codes: int,
    intra: float,
    inter: float,
    A: Matrix | None = None,
) -> float:
    """The value above; ``codes`` = N K is the constant ||B||^2. C may be real (then it is V)."""
    spread = codes - 2.0 * np.sum(C * S) + np.sum(_times(C, T) * C)
    A = opposed(*C.shape) if A is None else A
    return float(intra * spread + inter * np.sum((C.T @ C - A) ** 2))


def exact_sweeps(
    C: Matrix,
    S: Matrix,
    T: Matrix,
    *,
    intra: float,
    inter: float,
    sweeps: int,
    A: Matrix | None = None,
) -> tuple[Matrix, int]:
    """Coordinate descent on the binary problem itself; returns the new C and the number of flips.

    Class by class, the bit whose flip lowers the objective most is flipped until none lowers it.
    Every flip strictly lowers the objective; a sweep without a flip ends at a C that no single
    flip improves.
    """
    C = C.copy()
    M = C.shape[1]
    A = opposed(*C.shape) if A is None else A
    flips = 0
    least = -1e-9 * (1.0 + abs(intra) * abs(S).max(initial=0.0))
    for _ in range(sweeps):
        before = flips
        for i in range(M):
            c = C[:, i]  # a view: flips below land in C
            pull = S[:, i] - _others(C, T, i)
            # c_i^T c_j - A_ij for every other class; zero for i itself, to keep it out of products.
            inner = C.T @ c - A[i]
            inner[i] = 0.0
            while True:
                # The change of the objective when bit k of class i flips, for all k at once.
                change = 4.0 * intra * c * pull
                change += inter * (8.0 * (M - 1) - 8.0 * c * (C @ inner))
                k = int(np.argmin(change))
                if not change[k] < least:  # not >=, which a NaN would pass by
                    break
                inner -= 2.0 * c[k] * C[k]
                inner[i] = 0.0
                c[k] = -c[k]
                flips += 1
        if flips == before:
            break
    return C, flips


def gradient(
    V: Matrix,
    S: Matrix,
    T: Matrix,
    *,
    intra: float,
    inter: float,
    relaxation: float,
    A: Matrix | None = None,
) -> Matrix:
    """The paper's gradient of the relaxed problem, sgn(V) held constant.

    2 intra (V Y - B) Y^T + 4 inter V (V^T V - A) + 2 relaxation (V - sgn V)
    """
    A = opposed(*V.shape) if A is None else A
    return (
        2.0 * intra * (_times(V, T) - S)
        + 4.0 * inter * V @ (V.T @ V - A)
        + 2.0 * relaxation * (V - signs(V))
    )


def relaxed_objective(
    V: Matrix,
    S: Matrix,
    T: Matrix,
    *,
    codes: int,
    intra: float,
    inter: float,
    relaxation: float,
    A: Matrix | None = None,
) -> float:
    """The objective at a real V, plus relaxation * ||V - sgn V||_F^2."""
    value = objective(V, S, T, codes=codes, intra=intra, inter=inter, A=A)
    return value + relaxation * float(np.sum((V - signs(V)) ** 2))


def descend(
    V: Matrix,
    S: Matrix,
    T: Matrix,
    *,
    codes: int,
    intra: float,
    inter: float,
    relaxation: float,
    steps: int,
    A: Matrix | None = None,
) -> Matrix:
    """Gradient descent on V with backtracking: the paper names no step size."""
    weights = {"intra": intra, "inter": inter, "relaxation": relaxation}
    value = relaxed_objective(V, S, T, codes=codes, A=A, **weights)
    rate = 1.0
    for _ in range(steps):
        slope = gradient(V, S, T, A=A, **weights)
        decrease = float(np.sum(slope**2))
        if decrease == 0.0:
            break
        while rate > 1e-18:
            trial = V - rate * slope
            reached = relaxed_objective(trial, S, T, codes=codes, A=A, **weights)
            if reached <= value - 0.25 * rate * decrease:
                V, value, rate = trial, reached, rate * 2.0
                break
            rate *= 0.5
        else:
            break
    return V


def linear_sweep(C: Matrix, S: Matrix, T: Matrix, *, inter: float) -> Matrix:
    """One sweep of the authors' released step: c_i = sgn(r_i - inter * sum of the other centres).

    Its inter-class term is linear, so it is content with any balanced C, however collapsed; and
    with statistics of a batch a class absent from the batch (r = 0) loses its centre.
    """
    C = C.copy()
    for i in range(C.shape[1]):
        others = C.sum(1) - C[:, i]
        C[:, i] = signs(S[:, i] - _others(C, T, i) - inter * others)
    return C


def signs(values: Matrix) -> Matrix:
    """-1 and +1, never 0, by the rule of a code's bit: +1 exactly where value > 0."""
    return np.where(values > 0, 1.0, -1.0)


def _times(C: Matrix, T: Matrix) -> Matrix:
    return C * T if T.ndim == 1 else C @ T


def _others(C: Matrix, T: Matrix, i: int) -> Matrix | float:
    """The sum over the other classes j of c_j T_ij."""
    return 0.0 if T.ndim == 1 else C @ T[i] - C[:, i] * T[i, i]


def opposed(K: int, M: int) -> Matrix:
    """The paper's A = K (2 I - J): every centre the opposite of every other."""
    return K * (2.0 * np.eye(M) - np.ones((M, M)))


def graded(means: Matrix, K: int, affinity: float) -> Matrix:
    """Inner products A for K bits that follow how alike the classes of ``means`` (d, M) are.

    K on the diagonal; elsewhere K times a mixture of the cosines between the classes, measured
    from their common mean, and of -1 / (M - 1), the least that M equally far vectors can have.
    """
    away = means - means.mean(1, keepdims=True)
    away /= np.maximum(np.linalg.norm(away, axis=0), 1e-12)
    M = means.shape[1]
    A = K * (affinity * (away.T @ away) - (1.0 - affinity) / max(M - 1, 1))
    np.fill_diagonal(A, K)
    return A


def code_book(A: Matrix, means: Matrix, *, draws: int = 4, sweeps: int = 50) -> Matrix:
    """C in {-1, 1}^(K x M) with inner products near A, whose diagonal is K.

    The best of what coordinate descent finds from a far-apart code book, and from ``draws`` random
    projections of the class means (d, M), which keep their likeness; always the same ones. Within
    so many sweeps that is a local minimum unless there are hundreds of classes.
    """
    M, K = len(A), round(A[0, 0])
    rng = np.random.default_rng(0)
    away = means - means.mean(1, keepdims=True)
    starts = [signs(rng.standard_normal((K, len(away))) @ away) for _ in range(draws)]
    starts.append(far_apart(M, K).T.numpy().astype(np.float64))
    nothing = np.zeros((K, M))
    found = [
        exact_sweeps(C, nothing, np.zeros(M), intra=0.0, inter=1.0, sweeps=sweeps, A=A)[0]
        for C in starts
    ]
    return min(found, key=lambda C: float(np.sum((C.T @ C - A) ** 2)))
