"""An index at one commit."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fisherhash.index.engine import Engine
from fisherhash.index.items import Codes, Ids, Item, Matches, Within
from fisherhash.index.local.catalogue import Catalogue
from fisherhash.index.local.damaged import rest_of
from fisherhash.index.local.records import RecordForm, Records
from fisherhash.index.local.schema import REMOVED_BLOCK, RemovedRow, State
from fisherhash.index.local.segments import Segment, merge_nearest, merge_within
from fisherhash.index.ranking import Ranked, WeightedQueries, merge_ranked


@dataclass(frozen=True)
class Snapshot:
    """An index at one commit: what a search goes over.

    Attributes:
        state: the commit.
        form: what a record holds.
        base: code files with ascending ids, by ascending first id.
        loose: code files of updated items.
        notes: the notes that were read, as JSON, by kind and name.
        items: items that were read, by id and by key.
    """

    state: State
    form: RecordForm
    base: tuple[Segment, ...]
    loose: tuple[Segment, ...]
    notes: dict[str, dict[str, str]] = field(default_factory=dict)
    items: dict[int | str, Item] = field(default_factory=dict)

    @property
    def segments(self) -> tuple[Segment, ...]:
        """All code files."""
        return self.base + self.loose

    def check(self) -> None:
        """Check all bytes that were not checked before."""
        for segment in self.segments:
            segment.check()

    def prepare(self, queries: int, *, build: bool = False) -> None:
        """Check the bytes and prepare what a search needs."""
        for segment in self.segments:
            segment.prepare(queries, build=build)

    def search(self, queries: Codes, k: int) -> Matches:
        """The k nearest items of each query; after :meth:`prepare`."""
        parts = [part for segment in self.segments for part in segment.search(queries, k)]
        return Matches(*merge_nearest(parts, len(queries), k))

    def rank(self, queries: WeightedQueries, k: int) -> Ranked:
        """The k best items of each query, ids for positions; after :meth:`prepare`."""
        parts = [part for segment in self.segments for part in segment.rank(queries, k)]
        return merge_ranked(parts, queries, k)

    def within(self, queries: Codes, radius: int) -> Within:
        """Every item within a radius of each query; after :meth:`prepare`."""
        parts = [part for segment in self.segments for part in segment.within(queries, radius)]
        return Within(*merge_within(parts, len(queries)))

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

    def gather(self, ids: Ids) -> tuple[NDArray[np.bool_], Records]:
        """Which ids are in the index, and the records of all (zeros for those that are not)."""
        exists = np.zeros(ids.shape, dtype=bool)
        records = self.form.empty(len(ids))
        for segment in self.segments:
            segment.check()
            places = segment.locate(ids)
            here = places >= 0
            if here.all():
                return here, segment.records[places]
            records[here] = segment.records[places[here]]
            exists |= here
        return exists, records

    def ids(self) -> Ids:
        """Ids of everything, ascending."""
        self.check()
        parts = [segment.ids_at(segment.live_positions()) for segment in self.segments]
        ids = np.concatenate([np.zeros(0, dtype=np.int64), *parts])
        return np.sort(ids) if self.loose else ids

    def scan(self, block: int) -> Iterator[tuple[Ids, Records]]:
        """Everything by ascending id, with updated items in their places; after :meth:`check`."""
        return self.scan_part(self.base, block, 0, 1 << 62)

    def scan_part(
        self, base: Sequence[Segment], block: int, first: int, end: int
    ) -> Iterator[tuple[Ids, Records]]:
        """The same of some files with ascending ids, and of updated items from first to end."""
        none = (np.zeros(0, dtype=np.int64), self.form.empty())
        loose = (segment.between(first, end) for segment in self.loose)
        ids, records = _by_id(none, *loose)
        done = 0
        for part in (part for segment in base for part in segment.blocks(block)):
            end = int(np.searchsorted(ids, part[0][-1]))
            yield part if end <= done else _by_id(part, (ids[done:end], records[done:end]))
            done = max(done, end)
        for start in range(done, len(ids), block):
            yield ids[start : start + block], records[start : start + block]

    def length(self) -> int:
        """Positions of all code files."""
        return sum(segment.row.length for segment in self.segments)

    def removed(self) -> int:
        """Positions that no longer count."""
        return sum(segment.row.removed for segment in self.segments)

    @property
    def unavailable(self) -> int:
        """Items that are left out because they are damaged."""
        return sum(segment.unavailable for segment in self.segments)

    def code_bytes(self) -> int:
        """Committed bytes of the code files."""
        return sum(file.size for segment in self.segments for file, _ in segment.files)


@dataclass(frozen=True)
class Subset:
    """Items that match a filter, searched like a :class:`Snapshot`.

    Attributes:
        ids: their ids, ascending.
        engine: over their codes.
    """

    ids: Ids
    engine: Engine

    @property
    def bytes(self) -> int:
        """Memory for the ids, the codes, and the copy of the codes that is scanned."""
        return self.ids.nbytes + 2 * self.engine.codes.nbytes

    def search(self, queries: Codes, k: int) -> Matches:
        """The k nearest items of each query."""
        places, distances = self.engine.search(queries, k)
        return Matches(self.ids[places], distances)

    def rank(self, queries: WeightedQueries, k: int) -> Ranked:
        """The k best items of each query, ids for positions."""
        found = self.engine.rank(queries, k)
        return found._replace(positions=self.ids[found.positions])

    def within(self, queries: Codes, radius: int) -> Within:
        """Every item within a radius of each query."""
        offsets, places, distances = self.engine.within(queries, radius)
        return Within(offsets, self.ids[places], distances)


def load_snapshot(
    folder: Path,
    form: RecordForm,
    catalogue: Catalogue,
    before: Snapshot | None,
    *,
    skip_damaged: bool = False,
) -> Snapshot:
    """The last commit; it takes over what ``before`` has mapped, checked and prepared.

    With ``skip_damaged``, items whose codes are damaged are left out.

    Raises:
        FileNotFoundError: a code file is gone, perhaps because the index was compacted meanwhile.
    """
    known = {segment.row.number: segment for segment in before.segments} if before else {}
    state, files, removed = catalogue.load(before.state.commit if before else 0)
    base, loose = [], []
    for row in files:
        old = known.get(row.number)
        marks = None
        if row.removed:
            rows = [marked for marked in removed if marked.file == row.number]
            marks = _apply_removed(old.marks if old else None, rows, row.length)
            if row.removed != np.bitwise_count(marks).sum():
                raise catalogue.damaged("rows of removed positions are missing or old")
        segment = (rest_of if skip_damaged else Segment)(folder, row, form, marks, old)
        (loose if row.kind == "loose" else base).append(segment)
    base.sort(key=lambda segment: segment.row.first_id)
    return Snapshot(state, form, tuple(base), tuple(loose))


def _by_id(*parts: tuple[Ids, Records]) -> tuple[Ids, Records]:
    """Several parts as one, by ascending id."""
    ids, records = map(np.concatenate, zip(*parts, strict=True))
    order = np.argsort(ids)
    return ids[order], records[order]


def _apply_removed(
    old: NDArray[np.uint8] | None, rows: Sequence[RemovedRow], length: int
) -> NDArray[np.uint8]:
    """The removed bits of a file of ``length`` codes after some blocks changed."""
    bits = np.zeros(-(-length // 8), dtype=np.uint8)
    if old is not None:
        bits[: len(old)] = old
    for row in rows:
        start = row.block * (REMOVED_BLOCK // 8)
        part = np.frombuffer(row.bits, dtype=np.uint8)[: max(0, len(bits) - start)]
        bits[start : start + len(part)] = part
    return bits
