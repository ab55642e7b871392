"""An index at one commit."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fisherhash.errors import FisherhashError
from fisherhash.index.local.catalogue import Catalogue
from fisherhash.index.local.schema import RemovedRow, State
from fisherhash.index.local.segments import Segment
from fisherhash.index.local.writing import apply_removed

Codes = NDArray[np.uint8]
Ids = NDArray[np.int64]


@dataclass(frozen=True)
class Snapshot:
    """An index at one commit: what a search goes over.

    Attributes:
        state: the commit.
        base: code files with ascending ids, by ascending first id.
        loose: code files of updated items.
    """

    state: State
    base: tuple[Segment, ...]
    loose: tuple[Segment, ...]

    @property
    def segments(self) -> tuple[Segment, ...]:
        """All code files."""
        return self.base + self.loose

    def locate(self, ids: Ids) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Number of the segment and position of each id; -1 where it is not in the index."""
        which = np.full(ids.shape, -1, dtype=np.int64)
        places = np.full(ids.shape, -1, dtype=np.int64)
        for number, segment in enumerate(self.segments):
            left = np.flatnonzero(which < 0)
            if not len(left):
                break
            segment.check()
            found = segment.locate(ids[left])
            here = left[found >= 0]
            which[here], places[here] = number, found[found >= 0]
        return which, places


def load_snapshot(
    folder: Path, bits: int, catalogue: Catalogue, before: Snapshot | None
) -> Snapshot:
    """The last commit; what ``before`` has mapped, checked and prepared is taken over.

    Raises:
        FileNotFoundError: a code file is gone, perhaps because the index was compacted meanwhile.
    """
    known = {segment.row.number: segment for segment in before.segments} if before else {}
    state, files, removed = catalogue.load(before.state.commit if before else 0)
    by_file: dict[int, list[RemovedRow]] = {}
    for row in removed:
        by_file.setdefault(row.file, []).append(row)
    base, loose = [], []
    for row in files:
        old = known.get(row.number)
        marks = None
        if row.removed:
            marks = apply_removed(
                old.removed if old else None, by_file.get(row.number, []), row.length
            )
        if row.removed != (0 if marks is None else int(np.bitwise_count(marks).sum())):
            raise FisherhashError(
                f"{catalogue.path} is damaged: rows of removed positions are missing or "
                "old. Restore the index from a copy, or make it again"
            )
        segment = Segment(folder, row, bits, marks, old)
        (loose if row.kind == "loose" else base).append(segment)
    base.sort(key=lambda segment: segment.row.first_id)
    return Snapshot(state, tuple(base), tuple(loose))


def scan(snapshot: Snapshot, block: int, width: int) -> Iterator[tuple[Ids, Codes]]:
    """Everything by ascending id: updated items come back to their places on the way."""
    loose = [part for segment in snapshot.loose for part in segment.blocks(1 << 62)]
    ids = np.concatenate([np.zeros(0, dtype=np.int64), *(part[0] for part in loose)])
    codes = np.concatenate([np.zeros((0, width), dtype=np.uint8), *(part[1] for part in loose)])
    order = np.argsort(ids)
    ids, codes = ids[order], codes[order]
    done = 0
    for segment in snapshot.base:
        for some_ids, some_codes in segment.blocks(block):
            end = int(np.searchsorted(ids, some_ids[-1]))
            if end > done:
                some_ids = np.concatenate([some_ids, ids[done:end]])
                some_codes = np.concatenate([some_codes, codes[done:end]])
                order = np.argsort(some_ids)
                some_ids, some_codes = some_ids[order], some_codes[order]
                done = end
            yield some_ids, some_codes
    for start in range(done, len(ids), block):
        yield ids[start : start + block], codes[start : start + block]


def id_range(snapshot: Snapshot) -> tuple[int, int] | None:
    """Smallest and largest id."""
    ends = []
    for segment in snapshot.segments:
        if segment.live:
            ends += segment.ids_at(segment.ends()).tolist()
    return (min(ends), max(ends)) if ends else None
