"""Iterative quantisation in numpy, for installations without torch.

The method is ``itq`` of :mod:`fisherhash.methods.shallow.itq`: PCA to as many dimensions as bits,
then the rotation that brings the data closest to binary codes.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from fisherhash.errors import NotDefinedError

ITERATIONS = 50
_ROWS_AT_ONCE = 4096


def fit_itq(
    features: NDArray[np.float32], bits: int, *, seed: int = 0
) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Fit a linear head to features, without labels.

    Args:
        features: (n, d).
        bits: length of the codes, below n and at most d.
        seed: draws the rotation it starts from.

    Returns:
        weight (d, bits) and offset (bits,): a bit is 1 where f @ weight + offset > 0.

    Raises:
        NotDefinedError: there are too few images or dimensions.
    """
    count, width = features.shape
    if bits > min(width, count - 1):
        raise NotDefinedError(
            f"{bits} bits need at least {bits} feature dimensions and {bits + 1} images, there are "
            f"{width} and {count}; take fewer bits, or a built-in hasher with --model"
        )
    mean = features.mean(axis=0, dtype=np.float64)
    scatter = np.zeros((width, width))
    blocks = range(0, count, _ROWS_AT_ONCE)
    for start in blocks:
        centred = features[start : start + _ROWS_AT_ONCE] - mean
        scatter += centred.T @ centred
    directions = np.linalg.eigh(scatter)[1][:, : -bits - 1 : -1]
    projected = np.concatenate(
        [(features[start : start + _ROWS_AT_ONCE] - mean) @ directions for start in blocks]
    )
    drawn = np.random.default_rng(seed).normal(size=(bits, bits))
    rotation = np.linalg.qr(drawn)[0]
    for _ in range(ITERATIONS):
        signs = np.where(projected @ rotation > 0, 1.0, -1.0)
        left, _, right = np.linalg.svd(projected.T @ signs)
        rotation = left @ right
    weight = directions @ rotation
    return weight.astype(np.float32), (-mean @ weight).astype(np.float32)
