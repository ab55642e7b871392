"""Real-valued queries: what each bit costs, in whole numbers that add up exactly everywhere."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fisherhash.errors import UsageError

COST_BITS = 31
"""Distances of a weighted search are below 2 ** COST_BITS."""


def real_weights(logits: ArrayLike) -> NDArray[np.int64]:
    """What each bit costs: the absolute value of its logit (n, bits), as a whole number.

    The sum over the bits that differ is, up to a constant and a factor, the inner product of the
    logits and the stored bits as -1 and 1. Values are rounded to about a 2 ** 30th of their sum,
    so that every back-end computes the same sums and agrees on ties.

    >>> real_weights([[0.5, -2.0, 1.0]]).tolist()
    [[134217728, 536870912, 268435456]]
    """
    array = np.abs(np.asarray(logits, dtype=np.float64))
    if not np.isfinite(array).all():
        raise UsageError("logits must be finite numbers")
    # in two steps, since the sum of large numbers may be infinite
    scaled = np.ldexp(array, -np.frexp(array.max(axis=1, initial=0.0))[1][:, None])
    power = COST_BITS - 1 - np.frexp(scaled.sum(axis=1))[1]
    return np.rint(np.ldexp(scaled, power[:, None])).astype(np.int64)


def real_distances(
    costs: NDArray[np.int64], weights: NDArray[np.int64]
) -> NDArray[np.int64] | NDArray[np.float64]:
    """Costs (n_queries, k) in units of the queries' mean weight; ``weights`` are (n_queries, bits).

    Where all bits of every query weigh the same, these are the Hamming distances.

    >>> weights = real_weights([[0.5, -2.0, 0.5]])
    >>> real_distances(weights[:, :2], weights).tolist()
    [[0.5, 2.0]]
    """
    scale = weights.shape[1] / np.maximum(weights.sum(axis=1, keepdims=True), 1)
    distances = costs * scale
    equal = (weights == weights[:, :1]).all()
    return np.rint(distances).astype(np.int64) if equal else distances


def check_weights(weights: ArrayLike, queries: int, bits: int) -> NDArray[np.int64]:
    """Return weights (queries, bits) as whole numbers, or raise a :class:`UsageError`."""
    array = np.asarray(weights)
    if array.shape != (queries, bits) or array.dtype.kind not in "iu":
        raise UsageError(
            f"weights must be whole numbers of shape ({queries}, {bits}), "
            f"got {array.dtype} of shape {array.shape}"
        )
    array = np.ascontiguousarray(array, dtype=np.int64)
    if array.size and (array.min() < 0 or array.sum(axis=1).max() >= 1 << COST_BITS):
        raise UsageError(f"weights must not be negative, and their sum less than 2**{COST_BITS}")
    return array
