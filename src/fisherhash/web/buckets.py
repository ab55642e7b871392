"""Buckets: groups of items with the same code."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fisherhash.index.base import Index
from fisherhash.index.images.candidates import all_codes
from fisherhash.index.images.grouping import distinct_codes

MOST_BUCKETS = 200
BUCKET_SHOWN = 12
"""Items of a bucket that are shown."""


@dataclass(frozen=True)
class Bucket:
    """Items with the same code."""

    code: bytes
    count: int
    ids: list[int]


def largest_buckets(index: Index) -> list[Bucket]:
    """The largest groups of equal codes, the largest first."""
    ids, codes = all_codes(index)
    unique, number = distinct_codes(codes)
    counts = np.bincount(number, minlength=len(unique))
    by_bucket = np.argsort(number, kind="stable")
    starts = np.concatenate([[0], np.cumsum(counts)])
    return [
        Bucket(
            unique[one].tobytes(),
            int(counts[one]),
            ids[by_bucket[starts[one] :][: min(BUCKET_SHOWN, counts[one])]].tolist(),
        )
        for one in np.argsort(-counts, kind="stable")[:MOST_BUCKETS].tolist()
        if counts[one] > 1
    ]
