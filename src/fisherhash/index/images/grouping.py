"""Groups of codes that are near each other, without chains, through the search engine.

Equal codes are put together first, so that thousands of copies of one image cost no more than one.
The pairs of distinct codes within a radius come from the engine. Complete linkage then builds the
groups: any two codes of a group are within the radius. A chain of near neighbours, whose ends have
nothing in common, is therefore never one group.

Nothing here is quadratic. Where a radius is so wide that most codes are near most others, the pairs
are counted from a sample, and :func:`near_pairs` refuses instead of listing them all.
"""

from __future__ import annotations

import contextlib
import io
import zipfile
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fisherhash.codes import code_bytes
from fisherhash.errors import FisherhashError, UsageError
from fisherhash.index.base import Index, Uri
from fisherhash.index.engine import Engine
from fisherhash.index.images.chance import Chance
from fisherhash.index.images.known import cache_place
from fisherhash.index.items import Codes, Ids
from fisherhash.system.storage import write_file

MOST_PAIRS = 1 << 25
"""Pairs of distinct codes that are listed; about half a GiB of memory."""
RESULTS_AT_ONCE = 1 << 22
MOST_QUERIES = 1 << 12
FEWEST_REMEMBERED = 20_000
"""Distinct codes below which all pairs are found again in less than a second."""
CODES_AT_ONCE = 1 << 18


class NearPairs(NamedTuple):
    """Pairs of distinct codes within a radius, ordered by (left, right).

    Attributes:
        left: (pairs,) numbers of codes.
        right: (pairs,) numbers of codes, each above ``left``.
        distances: (pairs,) in bits.
    """

    left: NDArray[np.int64]
    right: NDArray[np.int64]
    distances: NDArray[np.uint16]

    @classmethod
    def joined(cls, parts: list[NearPairs]) -> NearPairs:
        """Several lists as one, in order and without repetitions."""
        left = np.concatenate([np.empty(0, np.int64), *(part.left for part in parts)])
        right = np.concatenate([np.empty(0, np.int64), *(part.right for part in parts)])
        distances = np.concatenate([np.empty(0, np.uint16), *(part.distances for part in parts)])
        order = np.lexsort((right, left))
        left, right, distances = left[order], right[order], distances[order]
        new = np.ones(len(left), dtype=bool)
        new[1:] = (left[1:] != left[:-1]) | (right[1:] != right[:-1])
        return cls(left[new], right[new], distances[new])


def all_codes(index: Index) -> tuple[Ids, Codes]:
    """The ids and the codes of all items."""
    none = np.empty(0, dtype=np.int64), np.empty((0, code_bytes(index.bits)), dtype=np.uint8)
    ids, codes = zip(none, *index.scan(CODES_AT_ONCE), strict=True)
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
        return NearPairs.joined([])
    chance = Chance.of(codes, bits)
    share = chance.within[radius] / chance.sampled
    if chance.pairs * share > MOST_PAIRS:
        raise _too_wide(radius, chance)
    # Near codes are neighbours in their order; far steps spread them evenly over the blocks.
    queries = queries[_spread(len(queries))]
    at_once = int(np.clip(RESULTS_AT_ONCE / (1 + len(codes) * share), 16, MOST_QUERIES))
    engine, parts, listed = Engine(codes, bits), [], 0
    for start in range(0, len(queries), at_once):
        block = queries[start : start + at_once]
        offsets, near, distances = engine.within(codes[block], radius)
        own = np.repeat(block, np.diff(offsets))
        near = np.asarray(near)
        # Among old and new codes, a pair is found from its new one only.
        keep = own != near if new is not None else own < near
        own, near = own[keep], near[keep]
        part = NearPairs(np.minimum(own, near), np.maximum(own, near), distances[keep].astype("u2"))
        parts.append(part)
        listed += len(own)
        if listed > 2 * MOST_PAIRS:
            raise _too_wide(radius, chance)
    return NearPairs.joined(parts)


def _spread(count: int) -> NDArray[np.int64]:
    """All numbers below ``count``, in steps of about its golden section."""
    step = max(1, int(count * 0.6180339887))
    while np.gcd(step, count) != 1:
        step += 1
    return np.arange(count, dtype=np.int64) * step % count


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
    place = cache_place(uri, "pairs", ".npz")
    old, before = _read_pairs(place, codes.shape[1], bits, radius)
    both = np.intersect1d(_rows(codes), _rows(old), assume_unique=True, return_indices=True)
    # Numbers of the old codes among those of today; -1 for those that are gone.
    now = np.full(len(old), -1)
    now[both[2]] = both[1]
    left, right = now[before.left], now[before.right]
    keep = (left >= 0) & (right >= 0) & (before.distances <= radius)
    left, right = left[keep], right[keep]
    ends = np.minimum(left, right), np.maximum(left, right)
    known = NearPairs(*ends, before.distances[keep])
    new = np.setdiff1d(np.arange(len(codes)), both[1])
    if not len(new):
        return NearPairs.joined([known])
    pairs = NearPairs.joined([known, near_pairs(codes, bits, radius, new=new)])
    data, about = io.BytesIO(), np.array([bits, radius])
    lists = {"left": pairs.left, "right": pairs.right, "distances": pairs.distances}
    np.savez(data, allow_pickle=False, codes=codes, about=about, **lists)
    with contextlib.suppress(FisherhashError, OSError):
        write_file(place, data.getvalue())
    return pairs


def _read_pairs(place: Path, width: int, bits: int, radius: int) -> tuple[Codes, NearPairs]:
    """The codes and pairs of an earlier search of at least this radius; none if unusable."""
    try:
        with np.load(place, allow_pickle=False) as file:
            codes, (was_bits, was_radius) = file["codes"], file["about"].tolist()
            pairs = NearPairs(file["left"], file["right"], file["distances"])
        fits = was_bits == bits and was_radius >= radius and codes.shape[1] == width
        if fits and len(pairs.left) == len(pairs.distances):
            return codes, pairs
    except (OSError, ValueError, KeyError, TypeError, IndexError, EOFError, zipfile.BadZipFile):
        pass
    return np.empty((0, width), dtype=np.uint8), NearPairs.joined([])


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
