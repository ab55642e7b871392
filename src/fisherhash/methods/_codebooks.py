"""Far-apart code books: one fixed binary code per class, for the methods that use them as targets.

Everything here is integer arithmetic on draws of numpy's PCG64, so a code book depends only on
(classes, bits, seed), not on the machine, the threads or the version of torch.
"""

from __future__ import annotations

import logging
import math
from functools import cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fisherhash.codes import check_bits
from fisherhash.errors import UsageError

logger = logging.getLogger(__name__)

Signs = NDArray[np.int8]
Words = NDArray[np.uint64]

MAX_ORDER = 2048
"""Order of the largest Hadamard matrix that is built; codes have at most 1,024 bits."""
LINEAR_WORK = 2**21
"""Most distances computed at once while a linear code grows."""
DRAWS = 16
"""Number of sets of Hadamard rows that are compared."""
ATTEMPTS = 4
"""Number of attempts to grow a linear code for one distance."""
SEARCH_WORK = 2**24
"""Most distances computed by the local search for one more unit of minimum distance."""


def far_apart(classes: int, bits: int, *, seed: int = 0) -> Tensor:
    """Return codes in {-1, 1} (classes, bits) whose smallest pairwise Hamming distance is large.

    * Up to four classes: the largest possible distance, two thirds of the bits or more.
    * Else, where a Hadamard matrix of order ``bits`` is easily built and has enough rows: its rows
      and their negatives, with every distance at least bits / 2. The all-ones row, the only
      unbalanced one, comes last. Up to bits - 1 classes the codes are orthogonal.
    * Else the better of a larger Hadamard matrix with columns cut off and a linear code grown
      greedily. A coordinate search then flips single bits as long as that raises the minimum
      distance, within a fixed amount of work: seconds for 10,000 classes.

    With fewer codes than classes (2^bits < classes) codes repeat evenly, and a warning is logged.

    >>> codes = far_apart(5, 8)
    >>> torch.equal(codes @ codes.T, 8 * torch.eye(5))
    True
    """
    check_bits(bits)
    if classes < 1:
        raise UsageError(f"a code book needs at least one class, got {classes}")
    rng = np.random.default_rng(seed)
    if bits < 63 and 2**bits < classes:
        logger.warning(
            "%d bits have only %d codes and cannot tell %d classes apart: some share a code",
            *(bits, 2**bits, classes),
        )
        words = np.resize(_shuffled(2**bits, rng), classes).astype(np.uint64)
        return _tensor(_signs(words[:, None], bits))
    if classes <= 4:
        return _tensor(_few(classes, bits, rng))
    if classes <= 2 * bits and is_hadamard_order(bits):
        return _tensor(_hadamard_rows(classes, bits, rng))
    starts = [_linear_code(classes, bits, rng)]
    order = next((n for n in range(bits + 1, MAX_ORDER) if is_hadamard_order(n)), MAX_ORDER)
    if classes <= order:
        # The first column is constant, so the distance stays order / 2 without it.
        rows = np.append(1 + _shuffled(order - 1, rng), 0)[:classes]
        columns = 1 + _shuffled(order - 1, rng)[:bits]
        starts.append(hadamard(order)[np.ix_(rows, columns)])
    elif classes <= 2 * order:
        starts.append(_hadamard_rows(classes, order, rng)[:, :bits])
    starts = [_use_every_bit(start, rng) for start in starts]
    best = max(starts, key=minimum_distance) if len(starts) > 1 else starts[0]
    return _tensor(_search(best, rng))


def minimum_distance(codes: Signs) -> int:
    """Return the smallest Hamming distance of two rows of codes in {-1, 1} (n, bits).

    >>> minimum_distance(np.array([[1, 1, 1], [1, -1, -1], [-1, 1, -1]], dtype=np.int8))
    2
    """
    # float32 represents these inner products exactly, and multiplies far faster than integers.
    rows = codes.astype(np.float32)
    largest = -rows.shape[1]
    for first in range(0, len(rows), 1024):
        inner = rows[first : first + 1024] @ rows.T
        np.fill_diagonal(inner[:, first:], -rows.shape[1])
        largest = max(largest, int(inner.max()))
    return (rows.shape[1] - largest) // 2


def distance_bound(classes: int, bits: int) -> int:
    """Return Plotkin's bound: no code book of this size has a larger minimum distance.

    >>> distance_bound(2, 12), distance_bound(3, 12), distance_bound(10, 12)
    (12, 8, 6)
    """
    if classes < 2:
        return bits
    # A bit separates at most floor(M^2 / 4) of the M (M - 1) / 2 pairs.
    return bits * (classes**2 // 4) * 2 // (classes * (classes - 1))


def promised_distance(classes: int, bits: int) -> int:
    """Return the Gilbert-Varshamov distance: the smallest d with sum_(i<d) C(K, i) >= 2^K / M.

    M codes of K bits exist whose pairwise distances are all at least d - 1; in practice d is
    reached (``far_apart`` does, see its tests).

    >>> [promised_distance(100, bits) for bits in (12, 16, 24, 32, 48, 64)]
    [3, 4, 7, 10, 17, 24]
    """
    total = 0
    for distance in range(bits + 1):
        # Whole numbers: 2^K / M need not be one.
        if total * classes >= 2**bits:
            return distance
        total += math.comb(bits, distance)
    return bits


@cache
def is_hadamard_order(order: int) -> bool:
    """Return whether :func:`hadamard` can build a matrix of this order.

    It can for Sylvester's 2^n, for Paley's q + 1 and 2 (q + 1) with q a prime or the square of one,
    and for products of these: up to 100 all multiples of four except 92.

    >>> [n for n in range(1, 60) if is_hadamard_order(n)]
    [1, 2, 4, 8, 12, 16, 20, 24, 28, 32, 36, 40, 44, 48, 52, 56]
    """
    return order in (1, 2) or (order % 4 == 0 and _construction(order) is not None)


def hadamard(order: int) -> Signs:
    """Return a Hadamard matrix (order, order) whose first row and column are all ones.

    >>> hadamard(4).tolist()
    [[1, 1, 1, 1], [1, -1, 1, -1], [1, 1, -1, -1], [1, -1, -1, 1]]
    """
    if not is_hadamard_order(order):
        raise UsageError(f"there is no easy construction of a Hadamard matrix of order {order}")
    matrix = _hadamard(order)
    matrix = matrix * matrix[0]
    return matrix * matrix[:, :1]


def _hadamard(order: int) -> Signs:
    pair = np.array([[1, 1], [1, -1]], dtype=np.int8)
    if order <= 2:
        return pair[:order, :order]
    kind, number = _construction(order) or ("", 0)
    if kind == "product":
        return np.kron(_hadamard(number), _hadamard(order // number))
    identity = np.eye(number + 1, dtype=np.int8)
    conference = np.zeros((number + 1, number + 1), dtype=np.int8)
    conference[0, 1:] = 1
    conference[1:, 0] = -1 if kind == "paley1" else 1
    conference[1:, 1:] = _jacobsthal(number)
    if kind == "paley1":
        return identity + conference
    other = np.array([[1, -1], [-1, -1]], dtype=np.int8)
    return np.kron(conference, pair) + np.kron(identity, other)


@cache
def _construction(order: int) -> tuple[str, int] | None:
    """Return how a matrix of this order, a multiple of four, is built, and from which number."""
    if order & (order - 1) == 0:
        return "product", 2
    if _prime_of(order - 1):
        return "paley1", order - 1
    q = order // 2 - 1
    if q % 4 == 1 and _prime_of(q):
        return "paley2", q
    for factor in range(2, order // 2 + 1):
        rest = order // factor
        if order % factor == 0 and is_hadamard_order(factor) and is_hadamard_order(rest):
            return "product", factor
    return None


def _prime_of(q: int) -> int:
    """Return p if q is the prime p or its square, else 0."""
    root = math.isqrt(q)
    p = root if root * root == q else q
    return p if p > 1 and all(p % d for d in range(2, math.isqrt(p) + 1)) else 0


def _jacobsthal(q: int) -> Signs:
    """Return (q, q): whether the difference of two elements of the field of q elements is a square.

    Entries are 1, -1, or 0 on the diagonal; q is an odd prime or the square of one.
    """
    p = _prime_of(q)
    legendre = np.full(p, -1, dtype=np.int8)
    legendre[np.arange(1, p) ** 2 % p] = 1
    legendre[0] = 0
    if p == q:
        elements = np.arange(q)
        return legendre[(elements[:, None] - elements) % q]
    # a + b w, where w^2 = n is not a square, is one where its norm a^2 - n b^2 is one modulo p.
    n = int(np.flatnonzero(legendre == -1)[0])
    a, b = np.divmod(np.arange(q), p)
    a, b = a[:, None] - a, b[:, None] - b
    return legendre[(a * a - n * b * b) % p]


def _shuffled(count: int, rng: np.random.Generator) -> NDArray[np.int64]:
    """Return 0 … count - 1 in random order; unlike numpy's shuffle, the same in every version."""
    return np.argsort(rng.integers(0, 2**63, count), kind="stable")


def _few(count: int, bits: int, rng: np.random.Generator) -> Signs:
    """Return up to four codes at the largest possible distance: a few repeated class splits.

    Every other repetition is negated, which balances the codes.
    """
    splits = hadamard(2 if count <= 2 else 4)[:count, 1:]
    number = np.arange(bits)
    tiled = splits[:, number % splits.shape[1]]
    tiled = tiled * (1 - 2 * (number // splits.shape[1] % 2)).astype(np.int8)
    return tiled[:, _shuffled(bits, rng)]


def _hadamard_rows(count: int, order: int, rng: np.random.Generator) -> Signs:
    """Return rows of a Hadamard matrix in random order, then their negatives, all-ones row last.

    Every other row is negated; otherwise the first bit would be the same for all classes. Of a few
    draws it returns the one whose least balanced bit is most balanced: a constant bit is useless.
    """
    matrix = hadamard(order)

    def draw() -> Signs:
        rows = matrix[1 + _shuffled(order - 1, rng)]
        rows[1::2] *= -1
        return np.concatenate([rows, -rows, matrix[:1], -matrix[:1]])[:count]

    return min((draw() for _ in range(DRAWS)), key=lambda rows: abs(rows.sum(0)).max())


def _linear_code(count: int, bits: int, rng: np.random.Generator) -> Signs:
    """Return the most balanced words of a binary linear code with a large minimum distance.

    It bisects the distance: growing a code for it succeeds or fails.
    """
    dimension = (count - 1).bit_length()
    if dimension == bits:
        best = _candidates(2**bits, bits, rng)
    else:
        # With unit vectors as generators, distance 1 is always possible.
        best = np.zeros((2**dimension, (bits + 63) // 64), dtype=np.uint64)
        best[:, 0] = np.arange(2**dimension, dtype=np.uint64)
    low, high = 1, distance_bound(count, bits)
    while low <= high:
        distance = (low + high + 1) // 2
        grown = (_grow(dimension, bits, distance, rng) for _ in range(ATTEMPTS))
        found = next((words for words in grown if words is not None), None)
        if found is None:
            high = distance - 1
        else:
            best, low = found, distance + 1
    unbalance = np.abs(2 * np.bitwise_count(best).sum(1, dtype=np.int32) - bits)
    return _signs(best[np.sort(np.argsort(unbalance, kind="stable")[:count])], bits)


def _grow(dimension: int, bits: int, distance: int, rng: np.random.Generator) -> Words | None:
    """Return all words of a linear code, or None where no candidate keeps the distance.

    The minimum distance of a linear code is the smallest weight of its words. Among the generators
    that keep it, the one with most words of exactly that weight leaves most room for others.
    """
    width = (bits + 63) // 64
    words: Words = np.zeros((1, width), dtype=np.uint64)
    for _ in range(dimension):
        tried = min(max(LINEAR_WORK // (len(words) * width), 32), 4096)
        candidates = _candidates(tried, bits, rng)
        if distance % 2 == 0:
            odd = np.bitwise_count(candidates).sum(1, dtype=np.int32) % 2
            candidates[:, 0] ^= odd.astype(np.uint64)
        weights = np.zeros((len(candidates), len(words)), dtype=np.int16)
        for part in range(width):
            weights += np.bitwise_count(candidates[:, None, part] ^ words[:, part])
        fit = np.flatnonzero(weights.min(1) >= distance)
        if not len(fit):
            return None
        tight = (weights[fit] == distance).sum(1)
        words = np.concatenate([words, words ^ candidates[fit[np.argmax(tight)]]])
    return words


def _candidates(count: int, bits: int, rng: np.random.Generator) -> Words:
    """Return words (n, width) to choose a generator from: all of them where there are few."""
    if 2**bits <= count:
        return _shuffled(2**bits, rng).astype(np.uint64)[:, None]
    width = (bits + 63) // 64
    words = rng.integers(0, 2**64, (count, width), dtype=np.uint64)
    words[:, -1] >>= np.uint64(64 * width - bits)
    return words


def _signs(words: Words, bits: int) -> Signs:
    """Return words (n, width) of 64 bits as codes in {-1, 1} (n, bits)."""
    parts = words.astype("<u8").view(np.uint8)
    return 2 * np.unpackbits(parts, axis=1, count=bits, bitorder="little").astype(np.int8) - 1


def _use_every_bit(codes: Signs, rng: np.random.Generator) -> Signs:
    """Redraw bits that are the same for all codes, half and half; no distance shrinks."""
    codes = codes.copy()
    for k in np.flatnonzero(abs(codes.sum(0, dtype=np.int64)) == len(codes)):
        codes[:, k] = 1 - 2 * (_shuffled(len(codes), rng) % 2)
    return codes


def _search(codes: Signs, rng: np.random.Generator) -> Signs:
    """Flip bits until no two codes are nearer than a goal, and raise the goal while that works.

    A step takes a code of a pair that is too near and flips the bit that leaves the smallest sum
    of squared shortfalls. A flipped bit then rests for a few steps, so that the search can leave a
    dead end. The result is at least as far apart as the start.
    """
    count, bits = codes.shape
    steps = min(SEARCH_WORK // (count * bits), 3000)
    if steps < count:
        return codes
    while (goal := minimum_distance(codes) + 1) <= distance_bound(count, bits):
        found = _reach(codes, goal, steps, rng)
        if found is None:
            break
        codes = found
    return codes


def _reach(codes: Signs, goal: int, steps: int, rng: np.random.Generator) -> Signs | None:
    """Return codes at least ``goal`` apart, or None if ``steps`` flips did not find them."""
    C = codes.astype(np.int32)
    count, bits = C.shape
    distances = (bits - C @ C.T) // 2
    np.fill_diagonal(distances, bits)
    resting = np.zeros((count, bits), dtype=np.int64)
    for step in range(1, steps + 1):
        near = np.flatnonzero((distances < goal).any(1))
        if not len(near):
            return C.astype(np.int8)
        i = near[rng.integers(len(near))]
        # Flipping a bit moves code i away from the codes that agree in it, towards the others.
        moved = distances[i] + C[i, :, None] * C.T
        shortfall = np.maximum(goal - moved, 0)
        shortfall[:, i] = 0
        cost = (shortfall * shortfall).sum(1) + np.where(resting[i] > step, 2**40, 0)
        lowest = np.flatnonzero(cost == cost.min())
        k = lowest[rng.integers(len(lowest))]
        distances[i] = moved[k]
        distances[i, i] = bits
        distances[:, i] = distances[i]
        C[i, k] = -C[i, k]
        resting[i, k] = step + 1 + min(bits // 4, 10)
    return None


def _tensor(codes: Signs) -> Tensor:
    return torch.from_numpy(codes.astype(np.float32))
