"""Which differences between rows are real: intervals over seeds, and a test over seeds and queries.

A mean average precision depends on two draws: the seed of the training and the queries. A row is
ahead of another only if it would be so with other seeds and with other queries. With A and B the
rows, S_a and S_b their seeds, and Q the queries, the squared error of the difference of their means
is

    s_a^2 / S_a + s_b^2 / S_b + s_q^2 / Q,

where s_a and s_b are the deviations of the mean average precision over the seeds, and s_q is the
deviation, over the queries, of the difference of average precision, averaged over the seeds. Both
rows answer the same queries, so the test is paired over them. Seeds are not paired: a seed means
other initial weights in every method. s_q contains some of the noise of the seeds. The difference
over its error follows Student's t with the degrees of freedom of Welch and Satterthwaite. Three
seeds alone have so few of them that the interval of the seeds can be the wider one; then it counts,
because a further source of chance makes nothing more certain.

A row is first if it is ahead of every other one at 95 %. No correction for the number of rows is
needed for that, because all of these tests must succeed. That a row is behind the best is not
corrected either, though the best of many equal rows is ahead of some of them by luck.
"""

from __future__ import annotations

import base64
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

CONFIDENCE = 0.95
_NONE = 2**16 - 1
_POINTS, _WEIGHTS = np.polynomial.legendre.leggauss(96)
_NODES = (_POINTS + 1) / 2
"""Gauss-Legendre quadrature over 0 to 1; the weights sum to 2, for both halves of a density."""
Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Difference:
    """How far one row is ahead of another.

    Attributes:
        mean: difference of the mean average precisions.
        half: half of the width of its interval; infinite where nothing can be said, because one of
            the rows has a single seed.
        queries: number of queries whose values were compared; 0 where only the seeds were.
    """

    mean: float
    half: float
    queries: int = 0

    @property
    def ahead(self) -> bool:
        """Whether the first row is ahead at the level of confidence."""
        return self.mean - self.half > 0

    @property
    def behind(self) -> bool:
        """Whether the first row is behind the other at the level of confidence."""
        return self.mean + self.half < 0


def t_interval(values: Sequence[float], confidence: float = CONFIDENCE) -> float:
    """Return half of the width of the interval of a mean; infinite with fewer than two values.

    >>> round(t_interval([0.80, 0.82, 0.84]), 4)
    0.0497
    """
    if len(values) < 2:
        return math.inf
    return t_quantile(confidence, len(values) - 1) * statistics.stdev(values) / len(values) ** 0.5


def difference(
    one: Sequence[float],
    other: Sequence[float],
    queries: tuple[Sequence[Floats], Sequence[Floats]] | None = None,
    confidence: float = CONFIDENCE,
) -> Difference:
    """Return how far one row is ahead of another, with its interval.

    Args:
        one: mean average precision per seed.
        other: the same of the other row.
        queries: average precision per query, (n_queries,) for each seed, of both rows; NaN for
            queries without a relevant item.
        confidence: of the interval.
    """
    mean = statistics.mean(one) - statistics.mean(other)
    if min(len(one), len(other)) < 2:
        return Difference(mean, math.inf)
    # Each part: a variance, the number of values it was computed from.
    parts = [(statistics.variance(values), len(values)) for values in (one, other)]
    half, count = _half(parts, confidence), 0
    if queries is not None:
        gaps = np.mean(queries[0], axis=0) - np.mean(queries[1], axis=0)
        gaps = gaps[~np.isnan(gaps)]
        count = len(gaps)
        if count > 1:
            half = max(half, _half([*parts, (float(gaps.var(ddof=1)), count)], confidence))
    return Difference(mean, half, count)


def _half(parts: Sequence[tuple[float, int]], confidence: float) -> float:
    """Return half of the width of an interval from variances and their numbers of values."""
    shares = [variance / number for variance, number in parts]
    total = sum(shares)
    if total == 0:
        return 0.0
    freedom = total**2 / sum(
        share**2 / (number - 1) for share, (_, number) in zip(shares, parts, strict=True)
    )
    return t_quantile(confidence, freedom) * math.sqrt(total)


def t_quantile(confidence: float, freedom: float) -> float:
    """Return t such that Student's distribution has this share of its mass between -t and t.

    >>> [round(t_quantile(0.95, freedom), 3) for freedom in (2, 4, 1000)]
    [4.303, 2.776, 1.962]
    """
    # With t = sqrt(freedom) tan(angle), the density is proportional to cos(angle)**(freedom - 1).
    scale = math.exp(math.lgamma((freedom + 1) / 2) - math.lgamma(freedom / 2)) / math.sqrt(math.pi)

    def mass(t: float) -> float:
        angle = math.atan(t / math.sqrt(freedom))
        return scale * angle * float(_WEIGHTS @ np.cos(angle * _NODES) ** (freedom - 1))

    low, high = 0.0, 1.0
    while mass(high) < confidence:
        low, high = high, 2 * high
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (middle, high) if mass(middle) < confidence else (low, middle)
    return (low + high) / 2


def pack_shares(values: Floats) -> str:
    """Return numbers from 0 to 1, or NaN, as text: two bytes each, precise to 8e-6.

    >>> unpack_shares(pack_shares(np.array([0.0, 0.5, np.nan]))).round(4).tolist()
    [0.0, 0.5, nan]
    """
    whole = np.where(np.isnan(values), _NONE, np.round(np.nan_to_num(values) * (_NONE - 1)))
    return base64.b64encode(whole.astype("<u2").tobytes()).decode()


def unpack_shares(text: str) -> Floats:
    """Return the numbers that ``pack_shares`` packed."""
    whole = np.frombuffer(base64.b64decode(text), dtype="<u2")
    return np.where(whole == _NONE, np.nan, whole / (_NONE - 1))
