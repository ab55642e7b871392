"""A code file as it is searched: mapped, checked, without removed items, ids for positions."""

from __future__ import annotations

import logging
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fisherhash.errors import FisherhashError
from fisherhash.index.base import DamagedError
from fisherhash.index.engine import Engine
from fisherhash.index.items import Codes, Ids
from fisherhash.index.local.code_files import codes_name, damaged_blocks, ids_name
from fisherhash.index.local.guards import SUM_BLOCK
from fisherhash.index.local.records import RecordForm, Records
from fisherhash.index.local.runs import Runs, decode_runs
from fisherhash.index.local.schema import REMEDY, FileRow
from fisherhash.index.local.stored import StoredBytes, most_in_memory
from fisherhash.index.local.table_files import (
    delete_tables,
    load_tables,
    save_tables,
    table_name,
    table_names,
)
from fisherhash.index.ranking import Ranked, WeightedQueries

logger = logging.getLogger(__name__)

TAIL = 100_000
"""Codes added behind the search tables before those are built again (or a quarter of the file)."""
_MAX_RESULTS = 1 << 24
"""Results held at once while removed items are dropped from them."""

Found = tuple[Ids, NDArray[np.int64]]
Rows = slice | NDArray[np.int64]
Find = Callable[[Engine, Rows, int], tuple[NDArray[np.int64], ...]]
"""Searches an engine for some of the queries: positions, and what orders them."""
FoundWithin = tuple[NDArray[np.int64], Ids, NDArray[np.int64]]


class Segment:
    """The committed part of one code file at one commit.

    Attributes:
        row: the file as committed.
        removed: one bit per position, or None where nothing is removed.
        files: the committed content and the checksums of each of its files.
        unavailable: items that are left out because they are damaged, by explicit wish.
    """

    unavailable: int = 0

    def __init__(
        self,
        folder: Path,
        row: FileRow,
        form: RecordForm,
        removed: NDArray[np.uint8] | None,
        before: Segment | None,
    ) -> None:
        self.folder, self.row, self.form, self.removed = folder, row, form, removed
        # Bytes are only ever added, so what was checked or prepared before still holds.
        names: list[tuple[str, int | None, bytes]] = [
            (codes_name(row.number), form.width * row.length, row.code_sums)
        ]
        if row.kind != "implied":
            # A file of runs is written once, so all of it counts.
            size = None if row.kind == "runs" else 8 * row.length
            names.append((ids_name(row.number, row.kind), size, row.id_sums))
        self.files: list[tuple[StoredBytes, NDArray[np.uint32]]] = []
        for number, (name, size, sums) in enumerate(names):
            old = before.files[number][0] if before else None
            file = StoredBytes(folder, name, size, old)
            self.files.append((file, np.frombuffer(sums, dtype="<u4")))
        if row.kind == "runs" and self.files[1][0].size > 18 * row.length + 18:
            raise DamagedError(f"{self.files[1][0].path} is too long. {REMEDY}")
        self._records: Records | None = None
        self._ids: Ids | Runs | None = None
        self._base = before._base if before else None
        self._base_length = before._base_length if before else 0
        self._kept = before._kept if before else False
        self._table_file = before._table_file if before else None
        self._tail: Engine | None = None
        self._order: NDArray[np.int64] | None = None
        self._gathered: Engine | None = None
        if self.live == 0:
            self._base, self._base_length = None, 0

    @property
    def live(self) -> int:
        """Items that can be found."""
        return self.row.length - self.row.removed

    @property
    def marks(self) -> NDArray[np.uint8] | None:
        """The removed bits of the whole file."""
        return self.removed

    # Ids and positions

    @property
    def records(self) -> Records:
        """(length, bytes) records, checked."""
        if self._records is None:
            self.check()
        return self._records  # type: ignore[return-value]

    @property
    def ids(self) -> Ids | Runs | None:
        """Their ids where they are not implied, checked."""
        if self._records is None:
            self.check()
        return self._ids

    def ids_at(self, positions: NDArray[np.int64]) -> Ids:
        """Ids of positions."""
        ids = self.ids
        if ids is None:
            return positions + self.row.first_id
        return ids.at(positions) if isinstance(ids, Runs) else ids[positions].astype(np.int64)

    def is_removed(self, positions: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Which positions no longer count."""
        if self.removed is None:
            return np.zeros(positions.shape, dtype=bool)
        return (self.removed[positions >> 3] >> (positions & 7).astype(np.uint8) & 1).astype(bool)

    def _alive(self) -> NDArray[np.bool_]:
        if self.removed is None:
            return np.ones(self.row.length, dtype=bool)
        return np.unpackbits(self.removed, count=self.row.length, bitorder="little") == 0

    def live_positions(self) -> NDArray[np.int64]:
        """Positions that count, ascending."""
        return np.flatnonzero(self._alive())

    def locate(self, ids: Ids) -> NDArray[np.int64]:
        """Positions of ids; -1 for those that are not in this file or no longer count."""
        own = self.ids
        if isinstance(own, Runs):
            positions, inside = own.locate(ids)
        elif own is None:
            positions = ids - self.row.first_id
            inside = (positions >= 0) & (positions < self.row.length)
            positions = np.where(inside, positions, 0)
        else:
            loose = self.row.kind == "loose"
            ordered = own[self.order()] if loose else own
            if not len(ordered):
                return np.full(ids.shape, -1, dtype=np.int64)
            places = np.minimum(np.searchsorted(ordered, ids), len(ordered) - 1)
            positions = self.order()[places] if loose else places
            inside = ordered[places] == ids
        if self.removed is not None:
            inside &= ~self.is_removed(positions)
        return np.where(inside, positions, -1)

    def order(self) -> NDArray[np.int64]:
        """Positions that count, by ascending id."""
        if self._order is None:
            self._order = self.live_positions()
            if self.row.kind == "loose" and isinstance(self.ids, np.ndarray):
                self._order = self._order[np.argsort(self.ids[self._order], kind="stable")]
        return self._order

    def between(self, first: int, end: int) -> tuple[Ids, Records]:
        """Ids and records of a loose file that count, from one id to another, by ascending id."""
        positions = self.places_between(first, end)
        return self.ids_at(positions), self.records[positions]

    def places_between(self, first: int, end: int) -> NDArray[np.int64]:
        """Their positions."""
        order = self.order()
        ids = self.ids_at(order)
        return order[np.searchsorted(ids, first) : np.searchsorted(ids, end)]

    def blocks(self, step: int) -> Iterator[tuple[Ids, Records]]:
        """Ids and records of all that count, by ascending id."""
        if self.row.kind == "loose":
            order = self.order()
            for start in range(0, len(order), step):
                part = order[start : start + step]
                yield self.ids_at(part), self.records[part]
            return
        for start in range(0, self.row.length, step):
            positions = np.arange(start, min(start + step, self.row.length), dtype=np.int64)
            records = self.records[start : start + step]
            if self.removed is not None:
                alive = ~self.is_removed(positions)
                positions, records = positions[alive], records[alive]
            if len(positions):
                yield self.ids_at(positions), np.asarray(records)

    # Checks

    def check(self) -> None:
        """Read bytes that were not read before, and compare them with their checksums.

        Raises:
            DamagedError: they differ; the message names the file.
            CannotReadError: the system refuses to read them.
        """
        for file, sums in self.files:
            bad = file.check(sums)
            if bad:
                raise damaged_blocks(file.path, bad)
        if self._records is not None:
            return
        if len(self.files) > 1:
            self._ids = self._read_ids(self.files[1][0])
        self._records = self.files[0][0].data.reshape(self.row.length, self.form.width)

    def _read_ids(self, file: StoredBytes) -> Ids | Runs:
        if self.row.kind != "runs":
            return file.data.view("<i8")
        try:
            return decode_runs(file.data, self.row.first_id, self.row.length)
        except ValueError as error:
            raise DamagedError(f"{file.path} is damaged: {error}. {REMEDY}") from None

    # Search

    def prepare(self, queries: int, *, build: bool = False) -> None:
        """Check the bytes and prepare what a search needs, unless that was done before."""
        self.check()
        if self.live == 0:
            return
        if self.row.kind == "loose" or 2 * self.row.removed > self.row.length:
            if self._gathered is None:
                self._gathered = self.form.engine(np.asarray(self.records[self.order()]))
            if build:
                self._gathered.build()
            return
        length = self.row.length
        if self._table_file is not None and not self._table_file.is_whole():
            self._base, self._table_file = None, None
        if self._base is None or _is_long(length - self._base_length, self._base_length):
            self._base, self._base_length, self._kept = self._open_tables(length)
            self._tail = None
        if build:
            self._base.build()
            self.keep_tables()
        if self._base_length < length and self._tail is None:
            self._tail = self.form.engine(self.records[self._base_length :])

    def _open_tables(self, length: int) -> tuple[Engine, int, bool]:
        """An engine with the stored tables, if they cover nearly all codes."""
        stored = table_names(self.folder)
        kept = [(covered, name) for name, file, covered in stored if file == self.row.number]
        for covered, name in sorted(kept, reverse=True):
            if covered > length or _is_long(length - covered, covered):
                continue
            found = load_tables(self.folder, name, self._table_facts(covered))
            if found is not None:
                try:
                    engine = self.form.engine(self.records[:covered], found.arrays)
                except FisherhashError as error:
                    logger.warning("%s will be built again: %s", self.folder / name, error)
                else:
                    self._table_file = found.file
                    return engine, covered, True
        return self.form.engine(self.records), length, False

    def keep_tables(self) -> None:
        """Store tables that the engine has built meanwhile, for this process and later ones."""
        base = self._base
        if base is None or self._base_length < TAIL or not base.describe()["tables"]:
            return
        if self._kept and not base.rejected:
            return
        self._kept, base.rejected = True, False
        name = table_name(self.row.number, self._base_length)
        facts = self._table_facts(self._base_length)
        tables = base.tables()
        if not save_tables(self.folder, name, tables, facts):
            return
        delete_tables(self.folder, {self.row.number}, keep=name)
        if sum(array.nbytes for array in tables.values()) <= most_in_memory():
            return
        mapped = load_tables(self.folder, name, facts)
        if mapped is not None:
            # The mapped ones instead of those in memory: the system may evict their pages.
            self._table_file = mapped.file
            self._base = self.form.engine(self.records[: self._base_length], mapped.arrays)

    def _table_facts(self, covered: int) -> dict[str, Any]:
        """What stored tables must match: exactly these bytes."""
        size = covered * self.form.width
        whole = size // SUM_BLOCK
        crc = zlib.crc32(self.row.code_sums[: 4 * whole])
        rest = self.records.reshape(-1).data[whole * SUM_BLOCK : size]
        return {
            "file": self.row.number,
            "bits": self.form.bits,
            "codes": covered,
            "crc": zlib.crc32(rest, crc),
        }

    def _parts(self) -> list[tuple[int, int, Engine]]:
        """Start, end and engine of each part that is searched; none if nothing counts."""
        if self._gathered is not None:
            return [(0, self.live, self._gathered)]
        base, tail = (0, self._base_length), (self._base_length, self.row.length)
        parts = ((*base, self._base), (*tail, self._tail))
        return [(start, end, engine) for start, end, engine in parts if engine is not None]

    def search(self, queries: Codes, k: int) -> list[Found]:
        """The k nearest that count, as parts to be merged; after :meth:`prepare`."""

        def find(engine: Engine, rows: Rows, fetch: int) -> tuple[NDArray[np.int64], ...]:
            return engine.search(queries[rows], fetch)

        return [(ids, distances) for ids, distances in self._best(len(queries), k, find)]

    def rank(self, queries: WeightedQueries, k: int) -> list[Ranked]:
        """The k best that count, as parts to be merged, ids for positions."""

        def find(engine: Engine, rows: Rows, fetch: int) -> Ranked:
            return engine.rank(queries.part(rows), fetch)

        return [Ranked(*part) for part in self._best(len(queries.codes), k, find)]

    def _best(self, queries: int, k: int, find: Find) -> Iterator[list[NDArray[np.int64]]]:
        """What a search of each part finds that counts, ids for positions."""
        for start, end, engine in self._parts():
            removed = 0
            if self.removed is not None and self._gathered is None:
                removed = _ones(self.removed, end) - _ones(self.removed, start)
            want = min(k, end - start - removed)
            if want and removed:
                positions, *rest = self._best_alive(queries, want, start, engine, find)
            elif want:
                places, *rest = find(engine, slice(None), want)
                positions = self._positions(places, start)
            else:
                continue
            yield [self.ids_at(positions), *rest]

    def _positions(self, places: NDArray[np.int64], start: int) -> NDArray[np.int64]:
        """Positions in the file of places in a part that begins at ``start``."""
        return places + start if self._gathered is None else self.order()[places]

    def _best_alive(
        self, queries: int, want: int, start: int, engine: Engine, find: Find
    ) -> list[NDArray[np.int64]]:
        """Search for more than needed, drop removed items, and go on where too few are left."""
        results: list[NDArray[np.int64]] = []
        alive_share = 1 - self.row.removed / self.row.length
        fetch = min(len(engine), int(1.2 * want / alive_share) + 16)
        left = np.arange(queries)
        while len(left):
            again = []
            step = max(1, _MAX_RESULTS // fetch)
            for some in (left[i : i + step] for i in range(0, len(left), step)):
                found, *rest = find(engine, some, fetch)
                found = found + start
                dead = self.is_removed(found)
                enough = (~dead).sum(axis=1) >= want
                order = np.argsort(dead[enough], axis=1, kind="stable")[:, :want]
                if not results:
                    results = [np.empty((queries, want), dtype=np.int64) for _ in (found, *rest)]
                for result, values in zip(results, (found, *rest), strict=True):
                    result[some[enough]] = np.take_along_axis(values[enough], order, axis=1)
                again.append(some[~enough])
            left = np.concatenate(again)
            fetch = min(len(engine), 4 * fetch)
        return results

    def within(self, queries: Codes, radius: int) -> list[FoundWithin]:
        """All that count within a radius: (query numbers, ids, distances) of each part."""
        found = []
        for start, _end, engine in self._parts():
            offsets, places, distances = engine.within(queries, radius)
            numbers = np.repeat(np.arange(len(queries)), np.diff(offsets))
            positions = self._positions(places, start)
            if self.removed is not None and self._gathered is None:
                alive = ~self.is_removed(positions)
                numbers, positions, distances = numbers[alive], positions[alive], distances[alive]
            found.append((numbers, self.ids_at(positions), distances))
        return found

    def describe(self) -> dict[str, Any]:
        """What is prepared for searches."""
        if self._gathered is not None:
            return {"path": "gathered", **self._gathered.describe()}
        return self._base.describe() if self._base is not None else {}


def _ones(bits: NDArray[np.uint8], end: int) -> int:
    """Set bits before a position."""
    whole = int(np.bitwise_count(bits[: end >> 3]).sum())
    return whole + (int(bits[end >> 3] & (1 << (end & 7)) - 1).bit_count() if end & 7 else 0)


def _is_long(tail: int, base: int) -> bool:
    return tail > max(TAIL, base // 4)


def merge_nearest(parts: list[Found], queries: int, k: int) -> Found:
    """The k best of several lists by (distance, id)."""
    none = np.zeros((queries, 0), dtype=np.int64)
    ids = np.concatenate([none, *(part[0] for part in parts)], axis=1)
    distances = np.concatenate([none, *(part[1] for part in parts)], axis=1)
    if len(parts) < 2:
        return ids[:, :k], distances[:, :k]
    order = np.argsort(ids, axis=1)
    by_distance = np.argsort(np.take_along_axis(distances, order, axis=1), axis=1, kind="stable")
    order = np.take_along_axis(order, by_distance, axis=1)[:, :k]
    return np.take_along_axis(ids, order, axis=1), np.take_along_axis(distances, order, axis=1)


def merge_within(parts: list[FoundWithin], queries: int) -> FoundWithin:
    """Offsets, ids and distances of several lists, each query's by (distance, id)."""
    none = np.zeros(0, dtype=np.int64)
    numbers, ids, distances = (np.concatenate([none, *(p[i] for p in parts)]) for i in range(3))
    if len(parts) > 1:
        order = np.lexsort((ids, distances, numbers))
        numbers, ids, distances = numbers[order], ids[order], distances[order]
    counts = np.bincount(numbers, minlength=queries)
    return np.concatenate([[0], np.cumsum(counts)]), ids, distances
