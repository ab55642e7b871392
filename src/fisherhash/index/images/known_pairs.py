"""Near pairs that an earlier search for duplicates found, in this user's cache.

A pair is remembered by its two codes, not by its items, so it stays true whatever happens to the
index. The next search queries only codes that are new, and compares them with all others.
"""

from __future__ import annotations

import contextlib
import io
import zipfile

import numpy as np

from fisherhash.errors import FisherhashError
from fisherhash.index.base import Uri
from fisherhash.index.images.grouping import NearPairs, distinct_codes, near_pairs
from fisherhash.index.images.known import cache_place
from fisherhash.index.items import Codes
from fisherhash.system.storage import write_file

FEWEST_REMEMBERED = 20_000
"""Distinct codes below which all pairs are found again in less than a second."""


def remembered_pairs(uri: Uri, codes: Codes, bits: int, radius: int) -> NearPairs:
    """All pairs of distinct codes within a radius; only what is new is searched for.

    Args:
        uri: the index; its pairs are remembered under this name.
        codes: (n, bytes) its distinct codes.
        bits: their length.
        radius: the most bits in which a pair may differ.
    """
    if len(codes) < FEWEST_REMEMBERED or not radius:
        return near_pairs(codes, bits, radius)
    before = _read(uri, codes, bits, radius)
    if before is None:
        pairs = near_pairs(codes, bits, radius)
    else:
        known, old = before
        new = np.flatnonzero(~known)
        if not len(new):
            return old
        pairs = NearPairs.joined([old, near_pairs(codes, bits, radius, new=new)])
    _write(uri, codes, bits, radius, pairs)
    return pairs


def _read(uri: Uri, codes: Codes, bits: int, radius: int) -> tuple[np.ndarray, NearPairs] | None:
    """Which codes were searched before, and their pairs; None if there is nothing to use."""
    try:
        with np.load(cache_place(uri, "pairs", ".npz"), allow_pickle=False) as file:
            stored = {name: file[name] for name in file.files}
        old, (was_bits, was_radius) = stored["codes"], stored["about"].tolist()
        ends, distances = stored["pairs"].astype(np.int64), stored["distances"]
        if was_bits != bits or was_radius < radius or old.shape[1] != codes.shape[1]:
            return None
        if ends.shape != (2, len(distances)) or ends.max(initial=-1) >= len(old):
            return None
    except (OSError, ValueError, KeyError, TypeError, IndexError, EOFError, zipfile.BadZipFile):
        return None
    # Numbers of old codes among the codes of today; -1 for those that are gone.
    _, number = distinct_codes(np.concatenate([codes, old]))
    today = np.full(len(codes) + len(old), -1)
    today[number[: len(codes)]] = np.arange(len(codes))
    now = today[number[len(codes) :]]
    known = np.zeros(len(codes), dtype=bool)
    known[now[now >= 0]] = True
    left, right = now[ends]
    keep = (left >= 0) & (right >= 0) & (distances <= radius)
    left, right = left[keep], right[keep]
    found = NearPairs(np.minimum(left, right), np.maximum(left, right), distances[keep])
    return known, NearPairs.joined([found])


def _write(uri: Uri, codes: Codes, bits: int, radius: int, pairs: NearPairs) -> None:
    data = io.BytesIO()
    ends = np.stack([pairs.left, pairs.right]).astype(np.uint32)
    np.savez(
        data,
        codes=codes,
        about=np.array([bits, radius]),
        pairs=ends,
        distances=pairs.distances,
    )
    with contextlib.suppress(FisherhashError, OSError):
        write_file(cache_place(uri, "pairs", ".npz"), data.getvalue())
