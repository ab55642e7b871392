"""Statistics of the bits of codes."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fisherhash.codes import check_codes, unpack
from fisherhash.errors import UsageError
from fisherhash.evaluation.groups import over
from fisherhash.evaluation.inputs import as_words
from fisherhash.evaluation.results import BitStatistics


def describe_bits(codes: ArrayLike, bits: int) -> BitStatistics:
    """Return balance, entropy and correlation of the bits of codes (n, bytes).

    It also counts the distinct codes.

    >>> stats = describe_bits([[0b11000000], [0b00000000]], bits=3)
    >>> stats.balance, stats.constant_bits, stats.max_correlation, stats.distinct_codes
    ([0.5, 0.5, 0.0], 1, 1.0, 2)
    """
    array = check_codes(codes, bits)
    if not len(array):
        raise UsageError("there are no codes to describe")
    both = np.zeros((bits, bits))
    for start in range(0, len(array), 1 << 16):
        # counts up to 65,536 are exact in float32
        block = unpack(array[start : start + (1 << 16)], bits).astype(np.float32)
        both += block.T @ block
    share = np.diagonal(both) / len(array)
    spread = np.sqrt(share * (1 - share))
    covariance = both / len(array) - np.outer(share, share)
    correlation = np.abs(over(covariance, np.outer(spread, spread)))
    pairs = correlation[~np.eye(bits, dtype=bool)]
    with np.errstate(divide="ignore", invalid="ignore"):
        terms = [np.where(p > 0, -p * np.log2(p), 0.0) for p in (share, 1 - share)]
    return BitStatistics(
        balance=share.tolist(),
        entropy=(terms[0] + terms[1]).tolist(),
        mean_correlation=float(pairs.mean()) if len(pairs) else 0.0,
        max_correlation=float(pairs.max(initial=0.0)),
        constant_bits=int((spread == 0).sum()),
        distinct_codes=_distinct(array),
    )


def _distinct(codes: NDArray[np.uint8]) -> int:
    words = as_words(codes)
    if words.shape[1] == 1:
        return len(np.unique(words))
    ordered = words[np.lexsort(words.T)]
    return 1 + int((ordered[1:] != ordered[:-1]).any(axis=1).sum())
