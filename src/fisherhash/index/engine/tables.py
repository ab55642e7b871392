"""Search tables: codes rearranged so that a search looks at few of them.

Equal codes become one *item* with the list of positions that hold it. The items' codes are laid
out in byte planes for the scan, and sorted into buckets by each of a few parts of their bits: one
part (direct addressing) while the codes are short, several (multi-index hashing) when they are
longer, because two codes at distance d agree up to d // parts bits in one part.
"""

from __future__ import annotations

import itertools
import math
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fisherhash.codes import code_bytes
from fisherhash.errors import FisherhashError
from fisherhash.index.engine.layout import MOST_TABLES, PLANE_BLOCK, TABLES_VERSION, WORD_GROUP
from fisherhash.index.engine.pool import run

# longer codes are scanned, because their buckets would take many times the memory of the codes
LONGEST_PROBED = 128
# below this many items a scan is always as fast
FEWEST_PROBED = 4096
_LONGEST_KEY = 24
# log2 of the bucket size at which scanning a bucket is worth the look-up
_FULL_BUCKET = 3
# lists of positions are used when they save this fraction of the items
_WORTHWHILE = 0.05
# rows per part while equal codes are grouped, so that a part stays in the cache
_PART_ROWS = 1 << 15
# blocks of planes that are compared at once
_PLANE_PART = 1 << 12
# look-ups per table for which bit patterns are prepared
_MOST_MASKS = 1 << 17

# types and number of sides
_KINDS = {
    "layout": (("i8",), 1),
    "planes": (("u1",), 1),
    "starts": (("u4",), 1),
    "positions": (("u4",), 1),
    "directory": (("u4",), 2),
    "words": (("u4", "u8"), 3),
    "bucket_items": (("u4",), 2),
}
_NAMES = tuple(_KINDS)


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

        patterns = (math.comb(self.length, ones) for ones in range(self.length + 1))
        totals = itertools.accumulate(patterns, initial=0)
        offsets = np.array([total for total in totals if total <= _MOST_MASKS], dtype=np.int64)
        masks = np.zeros(offsets[-1], dtype=np.uint32)
        kernels.fill_masks(self.length, offsets, masks)
        return offsets, masks

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
            kind, (kinds, sides) = arrays[name].dtype, _KINDS[name]
            if kind.str[1:] not in kinds or not kind.isnative or arrays[name].ndim != sides:
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

    def disprove(self, codes: NDArray[np.uint8], threads: int) -> str:
        """Which of the arrays is not what :func:`build` makes of these codes; "" if none.

        Tables may come from a file of somebody else, with right checksums. Everything that a
        kernel uses as a place is compared with its range here. That every code is where it belongs
        is shown by sums of hashes with a random key, which reads the arrays once and in order.
        """
        from fisherhash.index.engine import kernels

        key = np.uint64(secrets.randbits(64))
        firsts = np.zeros(0, dtype=np.uint32)
        if len(self.starts):
            sizes = np.diff(self.starts.astype(np.int64))
            if self.starts[0] or (sizes < 1).any() or (self.positions >= self.total).any():
                return "starts" if self.starts[0] or (sizes < 1).any() else "positions"
            firsts = self.positions[self.starts[:-1]]
            if (np.diff(firsts.astype(np.int64)) < 1).any():
                return "positions"
            if not kernels.lists_hold(codes, self.starts, self.positions, key):
                return "positions"
        if not all(run(self._planes_hold(codes, firsts), self._plane_parts(threads), threads)):
            return "planes"
        if not self.length:
            return ""
        words = np.zeros((self.words.shape[1], self.items), dtype=self.words.dtype)
        kernels.fill_words(codes, firsts, words)
        total = np.uint64(kernels.hash_words(words, key))

        def holds(table: int) -> bool:
            own = (self.directory[table], self.words[table], self.bucket_items[table])
            return kernels.table_holds(table, self.length, *own, total, key)

        tables = [(table,) for table in range(len(self.directory))]
        return "" if all(run(holds, tables, threads)) else "buckets"

    def _plane_parts(self, threads: int) -> list[tuple[int, int]]:
        blocks = -(-self.items // PLANE_BLOCK)
        return split(blocks, max(2 * threads, blocks // _PLANE_PART))

    def _planes_hold(
        self, codes: NDArray[np.uint8], firsts: NDArray[np.uint32]
    ) -> Callable[[int, int], bool]:
        width = codes.shape[1]

        def holds(first: int, last: int) -> bool:
            own = self.planes[first * PLANE_BLOCK * width : last * PLANE_BLOCK * width]
            right = np.zeros(len(own), dtype=np.uint8)
            fill_part(codes, firsts, first, last, right)
            return bool((own == right).all())

        return holds

    def _problem(self) -> str:
        blocks, listed, count = -(-self.items // PLANE_BLOCK), len(self.starts), len(self.directory)
        fewest = 0 if listed else self.total
        wrong = {
            f"{self.items} items": not fewest <= self.items <= self.total,
            f"{self.length} bits": not 0 <= self.length <= _LONGEST_KEY,
            "planes": self.planes.shape != (blocks * PLANE_BLOCK * code_bytes(self.bits),),
            "starts": listed and (listed != self.items + 1 or self.starts[-1] != self.total),
            "positions": len(self.positions) != (self.total if listed else 0),
        }
        if 0 < self.length <= _LONGEST_KEY:
            per_code = -(-self.bits // (8 * self.words.itemsize))
            wrong |= {
                "directory": not 1 <= count <= MOST_TABLES
                or count * self.length > self.bits
                or self.directory.shape != (count, (1 << self.length) + 1)
                or np.any(self.directory[:, -1] != self.items),
                "words": self.words.shape != (count, per_code, self.items + WORD_GROUP),
                "bucket_items": self.bucket_items.shape != (count, self.items),
            }
        return next((name for name, found in wrong.items() if found), "")


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
    from fisherhash.index.engine import kernels

    starts = positions = firsts = np.zeros(0, dtype=np.uint32)
    if lists is not False and len(codes):
        most = len(codes) if lists else int((1 - _WORTHWHILE) * len(codes))
        starts, positions = _lists(codes, threads, most)
        firsts = positions[starts[:-1]]
    items = len(firsts) if len(starts) else len(codes)
    if buckets is None:
        buckets = items >= FEWEST_PROBED and bits <= LONGEST_PROBED
    blocks = -(-items // PLANE_BLOCK)
    width = codes.shape[1]
    planes = np.zeros(blocks * PLANE_BLOCK * width, dtype=np.uint8)

    def fill(first: int, last: int) -> None:
        into = planes[first * PLANE_BLOCK * width : last * PLANE_BLOCK * width]
        fill_part(codes, firsts, first, last, into)

    run(fill, split(blocks, 2 * threads), threads)
    size = np.dtype(np.uint32 if bits <= 32 else np.uint64)
    count = length = entries = room = per_code = 0
    if buckets and items:
        count, length = _tables_and_length(bits, items)
        entries, room = (1 << length) + 1, items + WORD_GROUP
        per_code = -(-bits // (8 * size.itemsize))
    directory = np.zeros((count, entries), dtype=np.uint32)
    words = np.zeros((count, per_code, room), dtype=size)
    bucket_items = np.zeros((count, items if count else 0), dtype=np.uint32)
    if count:
        plain_words = np.zeros((per_code, items), dtype=size)
        kernels.fill_words(codes, firsts, plain_words)

        def sort(table: int) -> None:
            into = (directory[table], words[table], bucket_items[table])
            kernels.fill_table(plain_words, table, length, *into)

        run(sort, [(table,) for table in range(count)], threads)
    arrays = (planes, starts, positions, directory, words, bucket_items)
    return Tables(len(codes), bits, items, length, *arrays)


def fill_part(
    codes: NDArray[np.uint8],
    firsts: NDArray[np.uint32],
    first: int,
    last: int,
    into: NDArray[np.uint8],
) -> None:
    """Fill the planes of some blocks; without ``firsts`` every position is an item."""
    from fisherhash.index.engine import kernels

    part = slice(first * PLANE_BLOCK, last * PLANE_BLOCK)
    if len(firsts):
        kernels.fill_planes(codes, firsts[part], into)
    else:
        kernels.fill_planes(codes[part], firsts, into)


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

    def count(part: tuple[int, int], row: NDArray[np.int64]) -> None:
        kernels.count_parts(codes, *part, shift, row)

    run(count, zip(ranges, counts, strict=True), threads)
    bounds = np.concatenate([[0], np.cumsum(counts.sum(axis=0))])
    places = bounds[:-1] + np.cumsum(counts, axis=0) - counts
    keys = np.empty(n, dtype=np.uint64)
    rows = np.empty(n, dtype=np.uint32)

    def fill(part: tuple[int, int], row: NDArray[np.int64]) -> None:
        kernels.fill_parts(codes, *part, shift, row, keys, rows)

    run(fill, zip(ranges, places, strict=True), threads)
    begins = np.zeros(n, dtype=np.uint8)

    def group(first: int, last: int) -> bool:
        return kernels.group_parts(codes, bounds, first, last, keys, rows, begins)

    grouped = run(group, split(1 << split_bits, 8 * threads), threads)
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
    count = min(max(2, count), MOST_TABLES)
    return count, min(bits // count, _LONGEST_KEY, int(size) + _FULL_BUCKET)
