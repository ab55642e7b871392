"""A map of a collection: codes laid out in two dimensions, so that near codes are near each other.

A few hundred landmarks are laid out by a neighbour embedding (t-SNE over Hamming distances, from
the principal components of their bits). Every other code lies among its nearest landmarks. Nothing
is left to chance, so the same collection has the same map. A million codes take some seconds.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fisherhash.codes import hamming, unpack
from fisherhash.index.items import Codes, Ids

LANDMARKS = 600
_SAMPLE = 20_000
_STEPS = 250
_PERPLEXITY = 20.0
_NEAREST = 3
"""Landmarks among which a code lies."""
_AT_ONCE = 1 << 14
_SIDE = 65_535
_MARGIN = 0.03


@dataclass(frozen=True)
class MapLayout:
    """Where each item is on the map.

    Attributes:
        ids: (n,) their ids, ascending.
        points: (n, 2) from 0 to 65,535, across and down.
    """

    ids: Ids
    points: NDArray[np.uint16]

    def to_bytes(self) -> bytes:
        """The number of points, then all ids, then all points, in little-endian order."""
        head = np.array([len(self.ids)], "<f8").tobytes()
        # As floats: JavaScript has no array of 64-bit integers that converts by itself.
        return head + self.ids.astype("<f8").tobytes() + self.points.astype("<u2").tobytes()


def lay_out(ids: Ids, codes: Codes, bits: int) -> MapLayout:
    """Lay out packed codes (n, bytes) of some ids."""
    if not len(ids):
        return MapLayout(ids, np.zeros((0, 2), dtype=np.uint16))
    marks = _landmarks(codes)
    laid = _embed(marks, bits)
    points = np.empty((len(codes), 2), dtype=np.float32)
    for start in range(0, len(codes), _AT_ONCE):
        block = slice(start, start + _AT_ONCE)
        points[block] = _among(codes[block], marks, laid)
    # A small offset, so that equal codes do not hide each other.
    size = float(np.ptp(laid, axis=0).max()) * 0.003
    points += np.random.default_rng(0).normal(scale=size, size=points.shape).astype(np.float32)
    low, high = np.quantile(points, [0.0005, 0.9995], axis=0)
    scaled = (points - low) / np.maximum(high - low, 1e-9)
    scaled = _MARGIN + (1 - 2 * _MARGIN) * scaled
    return MapLayout(ids, np.rint(np.clip(scaled, 0, 1) * _SIDE).astype(np.uint16))


def _landmarks(codes: Codes) -> Codes:
    """Distinct codes that cover the collection: each far from those chosen before it."""
    step = max(1, len(codes) // _SAMPLE)
    sample = np.unique(codes[::step][:_SAMPLE], axis=0)
    if len(sample) <= LANDMARKS:
        return sample
    # Half of them spread over the sorted codes, as densely as the collection is; half far apart.
    chosen = np.linspace(0, len(sample) - 1, LANDMARKS // 2).astype(np.int64).tolist()
    away = np.full(len(sample), np.iinfo(np.uint16).max, dtype=np.uint16)
    for number in chosen:
        np.minimum(away, hamming(sample[number : number + 1], sample)[0], out=away)
    while len(chosen) < LANDMARKS:
        number = int(away.argmax())
        if not away[number]:
            break
        chosen.append(number)
        np.minimum(away, hamming(sample[number : number + 1], sample)[0], out=away)
    return sample[np.sort(chosen)]


def _embed(marks: Codes, bits: int) -> NDArray[np.float64]:
    """Points (n, 2) of the landmarks, which begin at the principal components of their bits."""
    signs = unpack(marks, bits).astype(np.float64) * 2 - 1
    signs -= signs.mean(axis=0)
    left, sizes, _ = np.linalg.svd(np.pad(signs, ((0, 2), (0, 2))), full_matrices=False)
    points = (left * sizes)[: len(marks), :2]
    # The sign of a component is arbitrary: make its largest part positive.
    points *= np.where(points[np.abs(points).argmax(axis=0), [0, 1]] < 0, -1, 1)
    points *= 1e-2 / max(float(points.std()), 1e-9)
    return points if len(marks) < 5 else _neighbour_embedding(_affinities(marks), points)


def _affinities(marks: Codes) -> NDArray[np.float64]:
    """How strongly each pair attracts: the same number of effective neighbours for every point."""
    squared = hamming(marks, marks).astype(np.float64) ** 2
    np.fill_diagonal(squared, np.inf)
    squared -= squared.min(axis=1, keepdims=True)
    entropy = np.log(min(_PERPLEXITY, (len(marks) - 1) / 3))
    low, high = np.full(len(marks), -12.0), np.full(len(marks), 4.0)
    weights = squared
    for _ in range(40):
        middle = (low + high) / 2
        weights = np.exp(-np.exp(middle)[:, None] * squared)
        weights /= weights.sum(axis=1, keepdims=True)
        found = -(weights * np.log(np.maximum(weights, 1e-300))).sum(axis=1)
        low, high = np.where(found > entropy, (middle, high), (low, middle))
    return np.maximum((weights + weights.T) / (2 * len(weights)), 1e-12)


def _neighbour_embedding(
    near: NDArray[np.float64], points: NDArray[np.float64]
) -> NDArray[np.float64]:
    """t-SNE by gradient descent, for some hundreds of points."""
    speed, gains = np.zeros_like(points), np.ones_like(points)
    rate = max(len(points) / 12.0, 20.0)
    for step in range(_STEPS):
        pull, momentum = (12.0, 0.5) if step < 80 else (1.0, 0.8)
        squared = (points**2).sum(axis=1)
        kernel = 1 / (1 + np.maximum(squared[:, None] + squared - 2 * points @ points.T, 0))
        np.fill_diagonal(kernel, 0)
        force = (pull * near - kernel / kernel.sum()) * kernel
        slope = 4 * (force.sum(axis=1)[:, None] * points - force @ points)
        same = np.sign(slope) == np.sign(speed)
        gains = np.maximum(np.where(same, gains * 0.8, gains + 0.2), 0.01)
        speed = momentum * speed - rate * gains * slope
        points = points + speed
        points -= points.mean(axis=0)
    return points


def _among(codes: Codes, marks: Codes, laid: NDArray[np.float64]) -> NDArray[np.float32]:
    """Points of codes between their nearest landmarks."""
    distances = hamming(codes, marks)
    few = min(_NEAREST, len(marks))
    nearest = np.argpartition(distances, few - 1, axis=1)[:, :few]
    apart = np.take_along_axis(distances, nearest, axis=1).astype(np.float32)
    # A code that is a landmark stays on it.
    weights = 1 / (apart + 0.02) ** 2
    weights /= weights.sum(axis=1, keepdims=True)
    return np.einsum("ij,ijk->ik", weights, laid[nearest].astype(np.float32))
