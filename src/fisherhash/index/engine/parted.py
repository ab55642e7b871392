"""Engines for arrays of any length: beyond what one engine holds, one per part of the array."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fisherhash.codes import check_codes
from fisherhash.index.checks import whole_number
from fisherhash.index.engine import engine as engines
from fisherhash.index.engine.engine import Engine


class PartedEngine:
    """Exact search over more codes than one :class:`Engine` holds, with the same results.

    The parts are consecutive, so that a merge of their results by distance alone, which leaves
    equal ones in the order of the parts, is ordered by (distance, position). Positions are of
    64 bits.

    Args:
        codes: (n, bytes) packed codes, possibly memory-mapped; they are not copied.
        bits: length of a code.
        threads: the most threads to use; all cores if None.
    """

    def __init__(self, codes: NDArray[np.uint8], bits: int, *, threads: int | None = None) -> None:
        starts = range(0, max(1, len(codes)), engines.MOST_CODES)
        ends = [min(start + engines.MOST_CODES, len(codes)) for start in starts]
        self.parts = [
            (start, Engine(codes[start:end], bits, threads=threads))
            for start, end in zip(starts, ends, strict=True)
        ]
        self.bits = bits
        self._total = len(codes)

    def __len__(self) -> int:
        return self._total

    def search(self, queries: ArrayLike, k: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Positions and distances (n_queries, min(k, n)) of the nearest codes."""
        given, k = check_codes(queries, self.bits), whole_number("k", k, 1)
        positions = distances = np.zeros((len(given), 0), dtype=np.int64)
        for start, engine in self.parts:
            places, near = engine.search(given, k)
            # Only the best so far are held, whatever the number of parts.
            positions = np.concatenate([positions, places + start], axis=1)
            distances = np.concatenate([distances, near], axis=1)
            order = np.argsort(distances, axis=1, kind="stable")[:, :k]
            positions = np.take_along_axis(positions, order, axis=1)
            distances = np.take_along_axis(distances, order, axis=1)
        return positions, distances

    def within(
        self, queries: ArrayLike, radius: int
    ) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
        """Offsets (n_queries + 1,), positions and distances of everything up to the radius."""
        given = check_codes(queries, self.bits)
        found = [(start, *engine.within(given, radius)) for start, engine in self.parts]
        counts = [np.diff(offsets) for _, offsets, _, _ in found]
        numbers = np.concatenate([np.repeat(np.arange(len(given)), count) for count in counts])
        positions = np.concatenate([places + start for start, _, places, _ in found])
        distances = np.concatenate([near for _, _, _, near in found])
        order = np.lexsort((distances, numbers))
        offsets = np.concatenate([[0], np.cumsum(sum(counts))])
        return offsets.astype(np.int64), positions[order], distances[order]

    def build(self) -> None:
        """Build the search tables of all parts now."""
        for _, engine in self.parts:
            engine.build()

    def describe(self) -> dict[str, Any]:
        """Which way a search goes, of the first part, and how many parts there are."""
        about = self.parts[0][1].describe()
        return {**about, "codes": len(self), "parts": len(self.parts)}


def open_engine(codes: NDArray[np.uint8], bits: int) -> Engine | PartedEngine:
    """An engine over codes (n, bytes), of as many parts as are needed."""
    if len(codes) > engines.MOST_CODES:
        return PartedEngine(codes, bits)
    return Engine(codes, bits)
