"""The centre step of Deep Fisher Hashing in three variants; plain numpy, as matrices are small.

They minimise over C in {-1, 1}^(K x M)

    intra * sum_i ||b_i - C y_i||^2  +  inter * ||C^T C - A||_F^2,    A = K (2 I_M - J_M).

A may be another matrix of inner products: :func:`graded`. Of the training set only S = B Y^T
(K x M) and T = Y Y^T (M x M) are needed. Where every image has one label T is diagonal, and may be
passed as its diagonal (M,).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fisherhash.methods._codebooks import far_apart

Matrix = NDArray[np.float64]


@dataclass(frozen=True)
class CenterProblem:
    """The problem above for one training set.

    Attributes:
        S: B Y^T (K, M).
        T: Y Y^T (M, M), or its diagonal (M,).
        A: (M, M) wanted inner products of the centres.
        codes: N K, the constant ||B||^2.
        intra: Weight of the first term.
        inter: Weight of the second term.
        relaxation: Weight of ||V - sgn V||_F^2, where C is relaxed to a real V.
    """

    S: Matrix
    T: Matrix
    A: Matrix
    codes: int
    intra: float
    inter: float
    relaxation: float = 0.0

    def objective(self, C: Matrix) -> float:
        """Return the objective at C, which may be real (then it is V)."""
        spread = self.codes - 2.0 * np.sum(C * self.S) + np.sum(self._times_t(C) * C)
        return float(self.intra * spread + self.inter * np.sum((C.T @ C - self.A) ** 2))

    def relaxed_objective(self, V: Matrix) -> float:
        """Return the objective at a real V, plus relaxation * ||V - sgn V||_F^2."""
        return self.objective(V) + self.relaxation * float(np.sum((V - signs(V)) ** 2))

    def gradient(self, V: Matrix) -> Matrix:
        """Return the paper's gradient of the relaxed problem, with sgn(V) constant.

        2 intra (V Y - B) Y^T + 4 inter V (V^T V - A) + 2 relaxation (V - sgn V)
        """
        return (
            2.0 * self.intra * (self._times_t(V) - self.S)
            + 4.0 * self.inter * V @ (V.T @ V - self.A)
            + 2.0 * self.relaxation * (V - signs(V))
        )

    def exact_sweeps(self, C: Matrix, sweeps: int) -> tuple[Matrix, int]:
        """Run coordinate descent on binary centres; return the new C and the number of flips.

        Class by class, it flips the bit whose flip lowers the objective most, until none lowers it.
        Every flip strictly lowers the objective; after a sweep without a flip, no single flip
        improves C.

        Args:
            C: Where to start; not changed.
            sweeps: The most passes over the classes.
        """
        C = C.copy()
        M = C.shape[1]
        flips = 0
        for _ in range(sweeps):
            before = flips
            for i in range(M):
                c = C[:, i]  # a view, so the flips below change C
                own = self._pull(C, i)
                least = -1e-9 * (1.0 + abs(self.intra) * abs(own).max(initial=0.0))
                # c_i^T c_j - A_ij for every other class; zero for i, to leave it out of products.
                inner = C.T @ c - self.A[i]
                inner[i] = 0.0
                while True:
                    # The change of the objective when bit k of class i flips, for all k at once.
                    change = 4.0 * self.intra * c * own
                    change += self.inter * (8.0 * (M - 1) - 8.0 * c * (C @ inner))
                    k = int(np.argmin(change))
                    if not change[k] < least:  # not >=, which is false for NaN
                        break
                    inner -= 2.0 * c[k] * C[k]
                    inner[i] = 0.0
                    c[k] = -c[k]
                    flips += 1
            if flips == before:
                break
        return C, flips

    def descend(self, V: Matrix, steps: int) -> Matrix:
        """Run gradient descent on V with backtracking; the paper states no step size."""
        value = self.relaxed_objective(V)
        rate = 1.0
        for _ in range(steps):
            slope = self.gradient(V)
            decrease = float(np.sum(slope**2))
            if decrease == 0.0:
                break
            while rate > 1e-18:
                trial = V - rate * slope
                reached = self.relaxed_objective(trial)
                if reached <= value - 0.25 * rate * decrease:
                    V, value, rate = trial, reached, rate * 2.0
                    break
                rate *= 0.5
            else:
                break
        return V

    def linear_sweep(self, C: Matrix) -> Matrix:
        """Run one sweep of the released step: c_i = sgn(r_i - inter * sum of the other centres).

        Its inter-class term is linear, so any balanced C satisfies it, even a collapsed one. With
        the statistics of a batch, a class absent from the batch (r = 0) loses its centre.
        """
        C = C.copy()
        for i in range(C.shape[1]):
            others = C.sum(1) - C[:, i]
            C[:, i] = signs(self._pull(C, i) - self.inter * others)
        return C

    def _times_t(self, C: Matrix) -> Matrix:
        return C * self.T if self.T.ndim == 1 else C @ self.T

    def _pull(self, C: Matrix, i: int) -> Matrix:
        """Return column i of S, less the sum over the other classes j of c_j T_ij."""
        if self.T.ndim == 1:
            return self.S[:, i]
        return self.S[:, i] - (C @ self.T[i] - C[:, i] * self.T[i, i])


def signs(values: Matrix) -> Matrix:
    """Return -1 and +1, never 0, by the rule of a code's bit: +1 exactly where value > 0."""
    return np.where(values > 0, 1.0, -1.0)


def opposed(K: int, M: int) -> Matrix:
    """Return the paper's A = K (2 I - J): every centre is the opposite of every other."""
    return K * (2.0 * np.eye(M) - np.ones((M, M)))


def graded(means: Matrix, K: int, affinity: float) -> Matrix:
    """Return inner products A for K bits that follow the similarity of the classes.

    A is K on the diagonal. Elsewhere it is K times a mixture of the cosines between the class means
    (d, M), measured from their common mean, and of -1 / (M - 1), the least possible for M equally
    distant vectors.
    """
    away = means - means.mean(1, keepdims=True)
    away /= np.maximum(np.linalg.norm(away, axis=0), 1e-12)
    M = means.shape[1]
    A = K * (affinity * (away.T @ away) - (1.0 - affinity) / max(M - 1, 1))
    np.fill_diagonal(A, K)
    return A


def code_book(A: Matrix, means: Matrix, *, draws: int = 4, sweeps: int = 50) -> Matrix:
    """Return C in {-1, 1}^(K x M) with inner products near A, whose diagonal is K.

    It is the best result of coordinate descent from a far-apart code book, and from ``draws``
    random projections of the class means (d, M), which preserve their similarity and are always the
    same. After so many sweeps it is a local minimum unless there are hundreds of classes.
    """
    M, K = len(A), round(A[0, 0])
    rng = np.random.default_rng(0)
    away = means - means.mean(1, keepdims=True)
    starts = [signs(rng.standard_normal((K, len(away))) @ away) for _ in range(draws)]
    starts.append(far_apart(M, K).T.numpy().astype(np.float64))
    problem = CenterProblem(np.zeros((K, M)), np.zeros(M), A, codes=0, intra=0.0, inter=1.0)
    found = [problem.exact_sweeps(C, sweeps)[0] for C in starts]
    return min(found, key=lambda C: float(np.sum((C.T @ C - A) ** 2)))
