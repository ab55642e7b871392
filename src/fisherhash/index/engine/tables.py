"""Search tables: codes rearranged so that a search looks at few of them.

Equal codes become one *item* with the list of positions that hold it. The items' codes are laid
out in byte planes for the scan, and sorted into buckets by each of a few parts of their bits: one
part (direct addressing) while the codes are short, several (multi-index hashing) when they are
longer, because two codes at distance d agree up to d // parts bits in one part.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fisherhash.codes import code_bytes
from fisherhash.errors import FisherhashError
from fisherhash.index.engine.layout import PLANE_BLOCK, TABLES_VERSION, WORD_GROUP
from fisherhash.index.engine.pool import run

# longer codes are scanned, because their buckets would take many times the memory of the codes
LONGEST_PROBED = 128
# below this many items a scan is always as fast
FEWEST_PROBED = 4096
_MOST_TABLES = 6
_LONGEST_KEY = 24
# log2 of the bucket size at which scanning a bucket is worth the look-up
_FULL_BUCKET = 3
# lists of positions are used when they save this fraction of the items
_WORTHWHILE = 0.05
# rows per part while equal codes are grouped, so that a part stays in the cache
_PART_ROWS = 1 << 15
# look-ups per table for which bit patterns are prepared
_MOST_MASKS = 1 << 17

_NAMES = ("layout", "planes", "starts", "positions", "directory", "words", "bucket_items")
_KINDS = {
    "layout": ("i8",),
    "planes": ("u1",),
    "starts": ("u4",),
    "positions": ("u4",),
    "directory": ("u4",),
    "words": ("u4", "u8"),
    "bucket_items": ("u4",),
}


@dataclass(frozen=True)
class Tables:
    """Codes of ``total`` positions, ready to be searched.

    Attributes:
        total: positions.
        bits: length of a code.
        items: distinct codes, or ``total`` if equal codes were not grouped.
        length: bits of a bucket number; 0 without buckets.
        planes: (blocks * bytes * 256,) the items' codes for the scan.
        starts: (items + 1,) where each item's list begins; empty if item = position.
        positions: (total,) the lists, ascending; empty if item = position.
        directory: (tables, 2 ** length + 1) where each bucket begins.
        words: (tables, words of a code, room) the codes in the buckets.
        bucket_items: (tables, items) the items in the buckets.
    """

    total: int
    bits: int
    items: int
    length: int
    planes: NDArray[np.uint8]
    starts: NDArray[np.uint32]
    positions: NDArray[np.uint32]
    directory: NDArray[np.uint32]
    words: NDArray[Any]
    bucket_items: NDArray[np.uint32]

    @property
    def bytes(self) -> int:
        """Size of all arrays in bytes."""
        return sum(array.nbytes for array in self.arrays().values())

    @cached_property
    def masks(self) -> tuple[NDArray[np.int64], NDArray[np.uint32]]:
        """Offsets by number of bits, and the bit patterns of bucket numbers to look up."""
        from fisherhash.index.engine import kernels

        offsets = [0]
        for ones in range(self.length + 1):
            more = offsets[-1] + math.comb(self.length, ones)
            if more > _MOST_MASKS:
                break
            offsets.append(more)
        patterns = np.zeros(offsets[-1], dtype=np.uint32)
        places = np.array(offsets, dtype=np.int64)
        kernels.fill_masks(self.length, places, patterns)
        return places, patterns

    def arrays(self) -> dict[str, NDArray[Any]]:
        """Everything as plain arrays; the inverse of ``from_arrays``."""
        layout = [TABLES_VERSION, self.total, self.bits, self.items, self.length]
        arrays = {name: getattr(self, name) for name in _NAMES[1:]}
        return {"layout": np.array(layout, dtype=np.int64), **arrays}

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, NDArray[Any]], total: int, bits: int) -> Tables:
        """Check that arrays are tables of ``total`` codes, without reading all of them."""
        missing = sorted(set(_NAMES) - set(arrays))
        if missing:
            raise FisherhashError(f"search tables lack {', '.join(missing)}; build them again")
        for name in _NAMES:
            kind = arrays[name].dtype
            if kind.str[1:] not in _KINDS[name] or not kind.isnative:
                raise FisherhashError(f"search table '{name}' holds {kind}; build them again")
        layout = [int(value) for value in arrays["layout"]]
        if len(layout) != 5 or layout[0] != TABLES_VERSION:
            raise FisherhashError(
                f"search tables have the layout {layout[:1]}, this version reads "
                f"[{TABLES_VERSION}]; build them again"
            )
        _, table_total, table_bits, items, length = layout
        if (table_total, table_bits) != (total, bits):
            raise FisherhashError(
                f"search tables are of {table_total} codes of {table_bits} bits, "
                f"the codes are {total} of {bits} bits; build them again"
            )
        tables = cls(total, bits, items, length, **{n: arrays[n] for n in _NAMES[1:]})
        problem = tables._problem()
        if problem:
            raise FisherhashError(f"search tables are damaged ({problem}); build them again")
        return tables

    def _problem(self) -> str:
        blocks = -(-self.items // PLANE_BLOCK)
        listed = len(self.starts) > 0
        if not 0 <= self.items <= self.total or (not listed and self.items != self.total):
            return f"{self.items} items"
        if self.planes.shape != (blocks * PLANE_BLOCK * code_bytes(self.bits),):
            return "planes"
        if listed and (len(self.starts) != self.items + 1 or self.starts[-1] != self.total):
            return "starts"
        if len(self.positions) != (self.total if listed else 0):
            return "positions"
        if not self.length:
            return ""
        count = len(self.directory)
        if self.directory.shape != (count, (1 << self.length) + 1) or count == 0:
            return "directory"
        if count * self.length > self.bits or np.any(self.directory[:, -1] != self.items):
            return "directory"
        per_code = -(-self.bits // (8 * self.words.itemsize))
        if self.words.shape != (count, per_code, self.items + WORD_GROUP):
            return "words"
        if self.bucket_items.shape != (count, self.items):
            return "bucket_items"
        return ""


def plain(codes: NDArray[np.uint8], bits: int, threads: int) -> Tables:
    """Only the planes, with every position an item: quick to build, enough for a scan."""
    none = np.zeros(0, dtype=np.uint32)
    return _assemble(codes, bits, none, none, none, False, threads)


def build(
    codes: NDArray[np.uint8],
    bits: int,
    threads: int,
    *,
    lists: bool | None = None,
    buckets: bool | None = None,
) -> Tables:
    """All tables of codes (n, bytes).

    Args:
        codes: may be memory-mapped; read twice or more, never changed.
        bits: length of a code.
        threads: the most threads to use.
        lists: group equal codes never, always, or (None) if it saves enough.
        buckets: build buckets never, always, or (None) if there are enough items.
    """
    none = np.zeros(0, dtype=np.uint32)
    starts, positions = none, none
    if lists is not False and len(codes):
        most = len(codes) if lists else int((1 - _WORTHWHILE) * len(codes))
        starts, positions = _lists(codes, threads, most)
    firsts = positions[starts[:-1]] if len(starts) else none
    items = len(firsts) if len(starts) else len(codes)
    if buckets is None:
        buckets = items >= FEWEST_PROBED and bits <= LONGEST_PROBED
    return _assemble(codes, bits, starts, positions, firsts, buckets and items > 0, threads)


def split(total: int, pieces: int) -> list[tuple[int, int]]:
    """Cut range(total) into at most ``pieces`` pieces of about equal size, none of them empty."""
    bounds = [total * i // pieces for i in range(pieces + 1)]
    return [(a, b) for a, b in itertools.pairwise(bounds) if a < b]


def _lists(
    codes: NDArray[np.uint8], threads: int, most: int
) -> tuple[NDArray[np.uint32], NDArray[np.uint32]]:
    """Starts and positions of the distinct codes.

    Both are empty if there are more than ``most`` of them, or if two of them have the same hash.
    """
    from fisherhash.index.engine import kernels

    n = len(codes)
    split_bits = max(1, (n // _PART_ROWS).bit_length())
    shift = 64 - split_bits
    ranges = split(n, threads)
    counts = np.zeros((len(ranges), 1 << split_bits), dtype=np.int64)
    run(
        [
            lambda a=a, b=b, row=row: kernels.count_parts(codes, a, b, shift, row)
            for (a, b), row in zip(ranges, counts, strict=True)
        ],
        threads,
    )
    bounds = np.zeros((1 << split_bits) + 1, dtype=np.int64)
    np.cumsum(counts.sum(axis=0), out=bounds[1:])
    places = bounds[:-1] + np.cumsum(counts, axis=0) - counts
    keys = np.empty(n, dtype=np.uint64)
    rows = np.empty(n, dtype=np.uint32)
    run(
        [
            lambda a=a, b=b, row=row: kernels.fill_parts(codes, a, b, shift, row, keys, rows)
            for (a, b), row in zip(ranges, places, strict=True)
        ],
        threads,
    )
    begins = np.zeros(n, dtype=np.uint8)
    grouped = run(
        [
            lambda a=a, b=b: kernels.group_parts(codes, bounds, a, b, keys, rows, begins)
            for a, b in split(1 << split_bits, 8 * threads)
        ],
        threads,
    )
    none = np.zeros(0, dtype=np.uint32)
    if not all(grouped):
        return none, none
    marks = np.zeros(-(-n // 64), dtype=np.uint64)
    before = np.zeros(len(marks), dtype=np.uint32)
    items = kernels.number_items(rows, begins, marks, before)
    if items > most:
        return none, none
    starts = np.zeros(items + 1, dtype=np.uint32)
    positions = np.empty(n, dtype=np.uint32)
    kernels.fill_lists(rows, begins, marks, before, starts, positions)
    return starts, positions


def _tables_and_length(bits: int, items: int) -> tuple[int, int]:
    """How many tables, and how many bits a bucket number has.

    >>> [_tables_and_length(bits, 1_000_000) for bits in (16, 24, 32, 48, 64)]
    [(1, 16), (2, 12), (2, 16), (3, 16), (4, 16)]
    """
    size = max(2.0, math.log2(max(2, items)))
    if bits <= min(_LONGEST_KEY, size + _FULL_BUCKET):
        return 1, bits
    count = math.ceil(bits / max(4.0, size - _FULL_BUCKET))
    count = min(max(2, count), _MOST_TABLES)
    return count, min(bits // count, _LONGEST_KEY, int(size) + _FULL_BUCKET)


def _assemble(
    codes: NDArray[np.uint8],
    bits: int,
    starts: NDArray[np.uint32],
    positions: NDArray[np.uint32],
    firsts: NDArray[np.uint32],
    buckets: bool,
    threads: int,
) -> Tables:
    from fisherhash.index.engine import kernels

    items = len(firsts) if len(starts) else len(codes)
    blocks = -(-items // PLANE_BLOCK)
    width = codes.shape[1]
    planes = np.zeros(blocks * PLANE_BLOCK * width, dtype=np.uint8)

    def fill(first: int, last: int) -> None:
        part = slice(first * PLANE_BLOCK, last * PLANE_BLOCK)
        into = planes[part.start * width : part.stop * width]
        if len(starts):
            kernels.fill_planes(codes, firsts[part], into)
        else:
            kernels.fill_planes(codes[part], firsts, into)

    jobs = [lambda a=a, b=b: fill(a, b) for a, b in split(blocks, 2 * threads)]
    run(jobs, threads)
    count, length = _tables_and_length(bits, items) if buckets else (0, 0)
    size = np.uint32 if bits <= 32 else np.uint64
    per_code = -(-bits // (32 if size is np.uint32 else 64)) if buckets else 0
    directory = np.zeros((count, (1 << length) + 1 if buckets else 0), dtype=np.uint32)
    words = np.zeros((count, per_code, items + WORD_GROUP if buckets else 0), dtype=size)
    bucket_items = np.zeros((count, items if buckets else 0), dtype=np.uint32)
    if buckets:
        plain_words = np.zeros((per_code, items), dtype=size)
        kernels.fill_words(codes, firsts, plain_words)
        run(
            [
                lambda t=t: kernels.fill_table(
                    plain_words, t, length, directory[t], words[t], bucket_items[t]
                )
                for t in range(count)
            ],
            threads,
        )
    return Tables(
        total=len(codes),
        bits=bits,
        items=items,
        length=length,
        planes=planes,
        starts=starts,
        positions=positions,
        directory=directory,
        words=words,
        bucket_items=bucket_items,
    )
