"""Groups of codes that are near each other, without chains, and how near codes come by chance.

Equal codes are put together first, so that thousands of copies of one image cost no more than one.
The pairs of distinct codes within a radius come from the engine. Complete linkage then builds the
groups: any two codes of a group are within the radius. A chain of near neighbours, whose ends have
nothing in common, is therefore never one group.

Nothing here is quadratic. Where a radius is so wide that most codes are near most others, the pairs
are counted from a sample, and :func:`near_pairs` refuses instead of listing them all.
"""

from __future__ import annotations

import contextlib
import functools
import io
import zipfile
from collections.abc import Callable
from statistics import NormalDist
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fisherhash.codes import code_bytes
from fisherhash.errors import FisherhashError, UsageError
from fisherhash.index.base import Index, Uri
from fisherhash.index.engine import Engine
from fisherhash.index.images.folders import cache_path
from fisherhash.index.items import Codes, Ids
from fisherhash.system.storage import write_file

MOST_PAIRS = 1 << 25
"""Pairs of distinct codes that are listed; about half a GiB of memory."""
RESULTS_AT_ONCE, MOST_QUERIES = 1 << 22, 1 << 12
FEWEST_REMEMBERED = 20_000
"""Distinct codes below which all pairs are found again in less than a second."""
SAMPLED_PAIRS = 1 << 20
FEWEST_SAMPLED = 5000
"""Pairs below which a sample says too little about how near codes come by chance."""
FALSE_PAIRS_PER_ITEM = 1e-3
"""The false pairs that the default radius allows for: one per thousand images."""
MOST_FALSE = 1e-6
"""The largest share of false pairs that it allows for, however few images there are."""

_SPREAD = 1.5
"""Standard deviation of distances, as a multiple of that of independent bits, if none is known."""
_TAIL = (1e-4, 2e-3)
"""The part of the distances from which rarer ones are extrapolated; copies are rarer than that."""
_VALLEY = 1 / 16
"""The width of the valley between the distances of copies and those of other images, as a share of
the bits."""
_IN_VALLEY = (10, 1 / 20)
"""The most pairs in it, and the most as a share of the pairs below it."""


class Chance:
    """How near two codes of a collection come by chance, from pairs drawn at random.

    Args:
        codes: (n, bytes) distinct codes; the same ones have the same pairs every time.
        bits: their length.
        measured: false pairs within a radius per million, as measured elsewhere for codes of this
            kind; stands in where a sample says too little.

    Attributes:
        sampled: pairs that were drawn.
        within: (bits + 1,) how many of them are within each distance.
        pairs: pairs of codes in the collection.
    """

    def __init__(
        self, codes: Codes, bits: int, measured: Callable[[int], float] | None = None
    ) -> None:
        self.bits, self.count, self.measured = bits, len(codes), measured
        self.pairs = self.count * (self.count - 1) // 2
        if self.pairs <= SAMPLED_PAIRS:
            left, right = np.triu_indices(self.count, 1)
        else:
            rng = np.random.default_rng(self.count)
            left = rng.integers(0, self.count, SAMPLED_PAIRS)
            right = (left + rng.integers(1, self.count, SAMPLED_PAIRS)) % self.count
        differ = np.bitwise_count(codes[left] ^ codes[right]).sum(axis=1, dtype=np.int64)
        self.sampled = len(left)
        self.within = np.cumsum(np.bincount(differ, minlength=bits + 1))

    @functools.cached_property
    def copies(self) -> int:
        """How many of the sampled pairs are copies: those below the valley of the distances.

        Copies are near each other and other images are far; between them hardly any distance
        occurs. Where distances only become rarer towards 0, there is no valley and none is told.
        """
        width = max(1, round(_VALLEY * self.bits))
        below, inside = self.within[:-width], self.within[width:] - self.within[:-width]
        most, share = _IN_VALLEY
        valleys = np.flatnonzero(inside <= np.minimum(most, share * below))
        # Those above the middle are on the other side of all distances.
        valleys = valleys[below[valleys] < self.within[-1] / 2]
        return int(below[valleys[-1]]) if len(valleys) else 0

    def rate(self, radius: int) -> float:
        """The share of pairs of different images that are within a radius.

        Where the sample holds too few of them, the rate is extrapolated from distances that it
        holds often enough: with each bit it falls by the same factor, as it does for codes of
        photos. For independent bits it falls faster, so it is rather too high than too low. Copies
        do not count, as far as they are told from the others.
        """
        sampled = self.sampled - self.copies
        if sampled < FEWEST_SAMPLED and self.measured is not None:
            return self.measured(radius) / 1e6
        if sampled < FEWEST_SAMPLED:
            spread = _SPREAD * self.bits**0.5 / 2
            return NormalDist(self.bits / 2, spread).cdf(radius + 0.5)
        share = np.maximum(self.within - self.copies, 0) / sampled
        low, high = max(_TAIL[0], 100 / sampled), _TAIL[1]
        if share[radius] >= low:
            return float(share[radius])
        usable = np.flatnonzero((share >= low) & (share <= high))
        if len(usable) < 2:
            # So few distances are in the tail that the next ones have to do.
            usable = np.flatnonzero(share >= low)[:3]
        if len(usable) < 2 or share[usable[0]] == share[usable[-1]]:
            return float(share[radius])
        slope, offset = np.polyfit(usable, np.log(share[usable]), 1)
        return float(np.exp(offset + slope * radius))

    def radius(self) -> int:
        """The largest radius with few false pairs: one per thousand images, one in a million."""
        allowed = min(MOST_FALSE, FALSE_PAIRS_PER_ITEM * self.count / max(1, self.pairs))
        radius = 0
        while radius < self.bits and self.rate(radius + 1) <= allowed:
            radius += 1
        return radius


class NearPairs(NamedTuple):
    """Pairs of distinct codes within a radius, each once, in no particular order.

    Attributes:
        left: (pairs,) numbers of codes.
        right: (pairs,) numbers of codes, each above ``left``.
        distances: (pairs,) in bits.
    """

    left: NDArray[np.int64]
    right: NDArray[np.int64]
    distances: NDArray[np.uint16]

    def where(self, keep: NDArray[np.bool_]) -> NearPairs:
        """Some of them."""
        return NearPairs(self.left[keep], self.right[keep], self.distances[keep])


NO_PAIRS = NearPairs(np.empty(0, np.int64), np.empty(0, np.int64), np.empty(0, np.uint16))


def _joined(parts: list[NearPairs]) -> NearPairs:
    columns: Any = zip(NO_PAIRS, *parts, strict=True)
    return NearPairs(*map(np.concatenate, columns))


def all_codes(index: Index) -> tuple[Ids, Codes]:
    """The ids and the codes of all items."""
    none = np.empty(0, dtype=np.int64), np.empty((0, code_bytes(index.bits)), dtype=np.uint8)
    ids, codes = zip(none, *index.scan(1 << 18), strict=True)
    return np.concatenate(ids), np.concatenate(codes)


def distinct_codes(codes: Codes) -> tuple[Codes, NDArray[np.int64]]:
    """The distinct codes in a fixed order, and for each row the number of its code."""
    _, first, number = np.unique(_rows(codes), return_index=True, return_inverse=True)
    return np.ascontiguousarray(codes[first]), number.ravel().astype(np.int64)


def _rows(codes: Codes) -> NDArray[Any]:
    """Each code as one value; numpy sorts numbers much faster than strings of bytes."""
    width = codes.shape[1]
    if width <= 8:
        return np.pad(codes, ((0, 0), (0, 8 - width))).view(np.uint64).ravel()
    return np.ascontiguousarray(codes).view(f"V{width}").ravel()


def near_pairs(
    codes: Codes, bits: int, radius: int, *, new: NDArray[np.int64] | None = None
) -> NearPairs:
    """All pairs of distinct codes within a radius, through the engine.

    Args:
        codes: (n, bytes) distinct codes.
        bits: their length.
        radius: the most bits in which a pair may differ.
        new: only the pairs of these codes, with each other and with all others.

    Raises:
        UsageError: the radius is so wide that there are more than ``MOST_PAIRS``.
    """
    queries = np.arange(len(codes)) if new is None else new
    if not radius or len(codes) < 2 or not len(queries):
        return NO_PAIRS
    chance = Chance(codes, bits)
    share = chance.within[radius] / chance.sampled
    if chance.pairs * share > MOST_PAIRS:
        raise _too_wide(radius, chance)
    is_query = np.zeros(len(codes), dtype=bool)
    is_query[queries] = True
    # Near codes are neighbours in their order; mixed, they are spread evenly over the blocks.
    queries = np.random.default_rng(0).permutation(queries)
    at_once = int(np.clip(RESULTS_AT_ONCE / (1 + len(codes) * share), 16, MOST_QUERIES))
    engine, parts, listed = Engine(codes, bits), [], 0
    for start in range(0, len(queries), at_once):
        block = queries[start : start + at_once]
        offsets, near, distances = engine.within(codes[block], radius)
        own, near = np.repeat(block, np.diff(offsets)), np.asarray(near)
        # Of two queries, the smaller one finds the pair.
        keep = (own < near) | ~is_query[near]
        own, near = own[keep], near[keep]
        ends = np.minimum(own, near), np.maximum(own, near)
        parts.append(NearPairs(*ends, distances[keep].astype(np.uint16)))
        listed += len(own)
        if listed > MOST_PAIRS:
            raise _too_wide(radius, chance)
    return _joined(parts)


def _too_wide(radius: int, chance: Chance) -> UsageError:
    expected = chance.pairs * chance.within / chance.sampled
    fits = np.flatnonzero(expected <= MOST_PAIRS)
    best = f"a radius of at most {fits[-1]}" if len(fits) else "codes of more bits"
    mean = 2 * expected[radius] / chance.count
    return UsageError(
        f"a radius of {radius} bits is too wide for these codes: a code has about {mean:,.0f} "
        f"others within it. Take {best}"
    )


def remembered_pairs(uri: Uri, codes: Codes, bits: int, radius: int) -> NearPairs:
    """All pairs of distinct codes within a radius; only what is new is searched for.

    Pairs that an earlier search found are in this user's cache. A pair is remembered by its two
    codes, not by its items, so it stays true whatever happens to the index.

    Args:
        uri: the index; its pairs are remembered under this name.
        codes: (n, bytes) its distinct codes.
        bits: their length.
        radius: the most bits in which a pair may differ.
    """
    if len(codes) < FEWEST_REMEMBERED or not radius:
        return near_pairs(codes, bits, radius)
    file, about = cache_path(uri, "pairs", ".npz"), [bits, radius]
    old, known = np.empty((0, codes.shape[1]), dtype=np.uint8), NO_PAIRS
    unreadable = (OSError, ValueError, KeyError, TypeError, EOFError, zipfile.BadZipFile)
    with contextlib.suppress(*unreadable), np.load(file, allow_pickle=False) as stored:
        was_bits, was_radius = stored["about"].tolist()
        if was_bits == bits and was_radius >= radius:
            lists = (stored[name] for name in NearPairs._fields)
            old, known = stored["codes"], NearPairs(*lists)
    _, now, before = np.intersect1d(
        _rows(codes), _rows(old), assume_unique=True, return_indices=True
    )
    # The numbers of the old codes among those of today; -1 for those that are gone.
    number = np.full(len(old), -1)
    number[before] = now
    left, right = number[known.left], number[known.right]
    keep = (left >= 0) & (right >= 0) & (known.distances <= radius)
    known = NearPairs(left, right, known.distances).where(keep)
    new = np.setdiff1d(np.arange(len(codes)), now, assume_unique=True)
    if not len(new):
        return known
    pairs, data = _joined([known, near_pairs(codes, bits, radius, new=new)]), io.BytesIO()
    np.savez(data, allow_pickle=False, codes=codes, about=np.array(about), **pairs._asdict())
    with contextlib.suppress(FisherhashError, OSError):
        write_file(file, data.getvalue())
    return pairs


def complete_groups(names: Ids, pairs: NearPairs) -> tuple[NDArray[np.int64], NDArray[np.uint16]]:
    """Complete linkage over near pairs: any two codes of a group are one of the pairs.

    The nearest two groups are joined first, as long as all of their codes are pairwise near. All
    groups that are each other's nearest are joined in one round. A fixed mixture of their names
    decides between equal distances, so that long rows of equal distances take few rounds.

    Args:
        names: (codes,) a number for each code that stays the same when codes are added.
        pairs: the pairs of codes that are near.

    Returns:
        For each code the number of its group's first code, and for each such code the largest
        distance inside its group.
    """
    count = len(names)
    group, size = np.arange(count), np.ones(count, dtype=np.int64)
    names, widest = names.copy(), np.zeros(count, dtype=np.uint16)
    left, right, distance = pairs
    between = np.ones(len(left), dtype=np.int64)
    while True:
        # A pair of groups with a missing pair of codes can never be joined.
        whole = between == size[left] * size[right]
        left, right, distance = left[whole], right[whole], distance[whole]
        between = between[whole]
        if not len(left):
            break
        order = distance.astype(np.uint64) << np.uint64(48) | _mixed(names[left], names[right])
        nearest = np.full(count, np.iinfo(np.uint64).max, dtype=np.uint64)
        np.minimum.at(nearest, left, order)
        np.minimum.at(nearest, right, order)
        joins = np.flatnonzero((nearest[left] == order) & (nearest[right] == order))
        joins = joins[_disjoint(left[joins], right[joins])]
        into, gone = left[joins], right[joins]
        widest[into] = np.maximum(np.maximum(widest[into], widest[gone]), distance[joins])
        names[into] = np.minimum(names[into], names[gone])
        size[into] += size[gone]
        target = np.arange(count)
        target[gone] = into
        group = target[group]
        changed = np.zeros(count, dtype=bool)
        changed[into] = changed[gone] = True
        touched = changed[left] | changed[right]
        ends = target[left[touched]], target[right[touched]]
        new = _combined(*ends, distance[touched], between[touched], count)
        left = np.concatenate([left[~touched], new[0]])
        right = np.concatenate([right[~touched], new[1]])
        distance = np.concatenate([distance[~touched], new[2]])
        between = np.concatenate([between[~touched], new[3]])
    return group, widest


def _mixed(left: Ids, right: Ids) -> NDArray[np.uint64]:
    """48 bits that two names decide, whichever comes first."""
    low = np.minimum(left, right).astype(np.uint64)
    high = np.maximum(left, right).astype(np.uint64)
    mixed = low * np.uint64(0x9E3779B97F4A7C15) ^ high * np.uint64(0xC2B2AE3D27D4EB4F)
    mixed ^= mixed >> np.uint64(29)
    mixed *= np.uint64(0xBF58476D1CE4E5B9)
    return mixed >> np.uint64(16)


def _disjoint(left: Ids, right: Ids) -> NDArray[np.int64]:
    """Which joins share no group with an earlier one; they do only if two mixtures are equal."""
    both = np.stack([left, right], axis=1).ravel()
    _, first = np.unique(both, return_index=True)
    alone = np.zeros(len(both), dtype=bool)
    alone[first] = True
    return np.flatnonzero(alone.reshape(-1, 2).all(axis=1))


def _combined(
    left: Ids, right: Ids, distance: NDArray[np.uint16], between: Ids, count: int
) -> tuple[Ids, Ids, NDArray[np.uint16], Ids]:
    """One row per pair of groups: the largest distance, the number of near pairs."""
    apart = left != right
    left, right = np.minimum(left, right)[apart], np.maximum(left, right)[apart]
    distance, between = distance[apart], between[apart]
    key = left * count + right
    order = np.argsort(key, kind="stable")
    starts = np.flatnonzero(np.diff(key[order], prepend=-1))
    if not len(starts):
        return left, right, distance, between
    first = order[starts]
    return (
        left[first],
        right[first],
        np.maximum.reduceat(distance[order], starts),
        np.add.reduceat(between[order], starts),
    )
