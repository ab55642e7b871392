"""What an embedded index answers; ``local.LocalIndex`` adds the changes."""

from __future__ import annotations

import contextlib
import logging
import operator
import os
import threading
import time
import weakref
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fisherhash.codes import check_codes, code_bytes
from fisherhash.errors import FisherhashError, UsageError
from fisherhash.index.base import Item, Matches, Within
from fisherhash.index.engine import Engine
from fisherhash.index.local import table_files
from fisherhash.index.local.catalogue import Catalogue
from fisherhash.index.local.code_files import codes_path
from fisherhash.index.local.filters import (
    Condition,
    Where,
    conditions,
    is_metadata,
    metadata_paths,
    to_sql,
    unknown_field,
)
from fisherhash.index.local.guards import Head
from fisherhash.index.local.lock import WriterLock
from fisherhash.index.local.schema import FORMAT, NAME
from fisherhash.index.local.segments import merge, merge_within
from fisherhash.index.local.snapshot import Codes, Ids, Snapshot, load_snapshot, scan
from fisherhash.index.local.verify import Problem, verify_index

logger = logging.getLogger(__name__)

_SUBSETS = 8
SLOW = 0.5
"""Seconds above which the first search says how long it took."""


class Reader:
    """An open index that can be searched.

    Attributes:
        path: the folder.
        bits: length of its codes.
        fingerprint: of the model that made its codes, where it was given.
        model: a free description of that model.
        first_query_seconds: time of this object's first search: checks, tables and the answer.
    """

    def __init__(self, path: Path, lock: WriterLock | None) -> None:
        self.path = path
        self.first_query_seconds: float | None = None
        self._guard = threading.RLock()
        self._snapshot: Snapshot | None = None
        self._subsets: dict[tuple[int, str], tuple[Ids, Engine]] = {}
        self._head = Head(path / "head")
        try:
            self._catalogue = self._open_catalogue()
        except BaseException:
            if lock is not None:
                lock.release()
            raise
        # Also without close(): else SQLite moves its log at exit behind the checksums' back.
        self._closing = weakref.finalize(self, _close, self._catalogue, lock)
        self._place = _place(self.path)
        facts = self._catalogue.facts
        self.bits: int = facts["bits"]
        self.fingerprint: str | None = facts["fingerprint"]
        self.model: dict[str, Any] = facts["model"]

    def _open_catalogue(self) -> Catalogue:
        # Before the catalogue: a commit that happens in between must not look lost.
        head, wrong = self._head.read()
        catalogue = Catalogue(self.path)
        try:
            self._check_head(catalogue, head, wrong)
        except BaseException:
            catalogue.close()
            raise
        return catalogue

    def _check_head(self, catalogue: Catalogue, head: int | None, wrong: str | None) -> None:
        state = catalogue.state()
        if head is not None and state.commit < head:
            raise FisherhashError(
                f"{catalogue.path} (or its log, {NAME}-wal) has lost commits: it holds "
                f"commit {state.commit}, {self._head.path.name} says {head}. Restore the whole "
                "index from a copy, or make it again"
            )
        if head is None and catalogue.noted_commit() != state.commit:
            raise FisherhashError(
                f"{self._head.path} {wrong}, so that lost commits would not be noticed. Restore "
                "the index from a copy, or make it again"
            )
        if wrong:
            logger.warning("%s %s; the next writer makes it again", self._head.path, wrong)

    def close(self) -> None:
        """Let go of the index; a writer lets the next one in."""
        with self._guard:
            self._snapshot = None
            self._subsets.clear()
            self._closing()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({str(self.path)!r}, bits={self.bits})"

    # The last commit

    def refresh(self) -> int:
        """Look for a newer commit (every call does) and return the number of the last one."""
        return self._current().state.commit

    @property
    def commit(self) -> int:
        """Number of the last commit."""
        return self.refresh()

    def _current(self) -> Snapshot:
        with self._guard:
            if not self._closing.alive:
                raise UsageError(f"{self.path} was closed")
            if _place(self.path) != self._place:
                raise FisherhashError(
                    f"{self.path} was deleted, or another index was put in its place, while it was "
                    "open; open it again"
                )
            tries = 0
            while True:
                state = self._catalogue.state()
                if self._snapshot is not None and self._snapshot.state == state:
                    return self._snapshot
                try:
                    self._snapshot = load_snapshot(
                        self.path, self.bits, self._catalogue, self._snapshot
                    )
                    self._subsets.clear()
                    return self._snapshot
                except FileNotFoundError as error:
                    # Gone because another process compacted the index in between?
                    tries += 1
                    if self._catalogue.state().commit == state.commit or tries > 100:
                        raise FisherhashError(
                            f"{error.filename} is missing. Restore the index from a copy, or "
                            "make it again"
                        ) from None

    @contextlib.contextmanager
    def _view(self) -> Iterator[Snapshot]:
        """The last commit, code files and rows alike: another process may commit in between."""
        with self._guard:
            while True:
                snapshot = self._current()
                with self._catalogue.view() as commit:
                    if commit == snapshot.state.commit:
                        yield snapshot
                        return

    def count(self) -> int:
        """Items that can be found."""
        return self._current().state.live

    def __len__(self) -> int:
        return self.count()

    # Search

    def search(
        self,
        codes: ArrayLike,
        k: int = 10,
        *,
        where: Where | None = None,
        fingerprint: str | None = None,
    ) -> Matches:
        """The k nearest items of each code, by (distance, id).

        Args:
            codes: (n_queries, bytes) packed codes.
            k: how many; cut to the number of items that may be found.
            where: only items for which this holds, see :mod:`fisherhash.index.local.filters`.
            fingerprint: of the model that made the codes, to be sure that it is the index's.
        """
        k = whole("k", k, 1)
        start, queries = self._query(codes, fingerprint)
        snapshot, subset = self._prepare(queries, where)
        if subset is not None:
            ids, engine = subset
            places, distances = engine.search(queries, k)
            found = (ids[places], distances.astype(np.int64, copy=False))
        else:
            parts = [part for one in snapshot.segments for part in one.search(queries, k)]
            found = merge(parts, len(queries), k)
        self._after(snapshot, start)
        return Matches(*found)

    def within(
        self,
        codes: ArrayLike,
        radius: int,
        *,
        where: Where | None = None,
        fingerprint: str | None = None,
    ) -> Within:
        """Every item within a Hamming distance of each code, by (distance, id)."""
        radius = min(whole("radius", radius, 0), self.bits)
        start, queries = self._query(codes, fingerprint)
        snapshot, subset = self._prepare(queries, where)
        if subset is not None:
            ids, engine = subset
            offsets, places, distances = engine.within(queries, radius)
            found = (offsets, ids[places], distances)
        else:
            parts = [part for one in snapshot.segments for part in one.within(queries, radius)]
            found = merge_within(parts, len(queries))
        self._after(snapshot, start)
        return Within(*(array.astype(np.int64, copy=False) for array in found))

    def _query(self, codes: ArrayLike, fingerprint: str | None) -> tuple[float, Codes]:
        if None not in (fingerprint, self.fingerprint) and fingerprint != self.fingerprint:
            raise self._other_model(fingerprint)
        return time.monotonic(), check_codes(codes, self.bits)

    def _prepare(
        self, queries: Codes, where: Where | None
    ) -> tuple[Snapshot, tuple[Ids, Engine] | None]:
        found = () if where is None else conditions(where)
        if found:
            with self._view() as snapshot:
                return snapshot, self._subset(snapshot, found)
        with self._guard:
            snapshot = self._current()
            for segment in snapshot.segments:
                segment.prepare(len(queries))
            return snapshot, None

    def _subset(self, snapshot: Snapshot, found: tuple[Condition, ...]) -> tuple[Ids, Engine]:
        """Ids and codes of the items for which conditions hold; the last few are kept."""
        # As text: 1 and True are equal, but find different items.
        name = (snapshot.state.commit, repr(found))
        if name not in self._subsets:
            ids = np.array(self._catalogue.ids_where(*to_sql(found)), dtype=np.int64)
            if snapshot.state.rows:
                self._refuse_unknown(found)
            while len(self._subsets) >= _SUBSETS:
                del self._subsets[next(iter(self._subsets))]
            self._subsets[name] = ids, Engine(self._gather(snapshot, ids), self.bits)
        return self._subsets[name]

    def _refuse_unknown(self, found: tuple[Condition, ...]) -> None:
        """A mistyped field would hold for no item, and with != for every one."""
        for condition in found:
            if is_metadata(condition.field) and not any(
                map(self._catalogue.has_field, metadata_paths(condition.field))
            ):
                own = self._catalogue.metadata_fields()
                raise unknown_field(self.path, condition.field, own)

    def _after(self, snapshot: Snapshot, start: float) -> None:
        with self._guard:
            for segment in snapshot.segments:
                segment.keep_tables()
        if self.first_query_seconds is None:
            self.first_query_seconds = time.monotonic() - start
            if self.first_query_seconds > SLOW:
                logger.info("first search of %s: %.1f s", self.path, self.first_query_seconds)

    def build(self) -> None:
        """Make the search tables now instead of at the first search that profits from them."""
        with self._guard:
            for segment in self._current().segments:
                segment.prepare(1, build=True)

    # What is in it

    def items(self, ids: Iterable[int] | Ids) -> list[Item]:
        """What is known about items, in the order of the ids."""
        with self._view() as snapshot:
            return self._items(snapshot, as_ids(ids))

    def _items(self, snapshot: Snapshot, ids: Ids) -> list[Item]:
        wanted = ids.tolist()
        rows = self._catalogue.rows_of_ids(wanted)
        self._find(snapshot, np.array([i for i in wanted if i not in rows], dtype=np.int64))
        return [rows[i].item() if i in rows else Item(i) for i in wanted]

    def still_there(self, ids: Iterable[int] | Ids) -> tuple[NDArray[np.bool_], list[Item], Codes]:
        """Which of some ids an index still has, and the items and the codes of those.

        For ids of an earlier search: a writer may have removed some meanwhile.
        """
        with self._view() as snapshot:
            wanted = as_ids(ids)
            there = snapshot.locate(wanted)[0] >= 0
            left = wanted[there]
            return there, self._items(snapshot, left), self._gather(snapshot, left)

    def item(self, key: str) -> Item:
        """What is known about the item with a key."""
        with self._guard:
            self._current()
            rows = self._catalogue.rows_of_keys([key])
        if key not in rows:
            raise UsageError(f"{self.path} has no item with the key {key!r}")
        return rows[key].item()

    def keys(self) -> list[str]:
        """Keys of all keyed items, by ascending id."""
        facts = self.files()
        return sorted(facts, key=lambda key: facts[key][2])

    def files(self) -> dict[str, tuple[int | None, int | None, int]]:
        """Key -> (size, mtime_ns, id) of every keyed item."""
        with self._guard:
            self._current()
            return self._catalogue.file_facts()

    def codes(self, ids: Iterable[int] | Ids) -> Codes:
        """(n, bytes) codes of items, in the order of the ids."""
        with self._guard:
            wanted = as_ids(ids)
            return self._gather(self._current(), wanted)

    def scan(self, block: int = 1 << 16) -> Iterator[tuple[Ids, Codes]]:
        """Ids and codes of everything, by ascending id, about ``block`` at a time.

        Shows the commit at which it began, whatever is written meanwhile.
        """
        with self._guard:
            snapshot = self._current()
            for segment in snapshot.segments:
                segment.check()
        return scan(snapshot, whole("block", block, 1), code_bytes(self.bits))

    def _find(self, snapshot: Snapshot, ids: Ids) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        which, places = snapshot.locate(ids)
        if (which < 0).any():
            raise UsageError(f"{self.path} has no item with the id {ids[which < 0][0]}")
        return which, places

    def _gather(self, snapshot: Snapshot, ids: Ids) -> Codes:
        which, places = self._find(snapshot, ids)
        codes = np.empty((len(ids), code_bytes(self.bits)), dtype=np.uint8)
        for number in np.unique(which).tolist():
            here = which == number
            codes[here] = snapshot.segments[number].codes[places[here]]
        return codes

    def _code_bytes(self, snapshot: Snapshot) -> int:
        width = code_bytes(self.bits)
        return sum(
            segment.row.length * (width + (8 if segment.ids is not None else 0))
            for segment in snapshot.segments
        )

    def _other_model(self, fingerprint: str | None) -> UsageError:
        return UsageError(
            f"{self.path} holds codes of model {str(self.fingerprint)[:12]}, these are of model "
            f"{str(fingerprint)[:12]}. Codes of different models cannot be compared: use the "
            "index's model, or make a new index"
        )

    # Health

    def verify(self) -> list[Problem]:
        """Read and check everything; what is wrong, file by file (nothing: all is well)."""
        with self._guard:
            while True:
                snapshot = self._current()
                problems = verify_index(self.path, self._catalogue, snapshot, self._head)
                # A commit in between may have taken away what was being looked at.
                if not problems or self._catalogue.state() == snapshot.state:
                    return problems

    def info(self) -> dict[str, Any]:
        """Facts about the index that JSON can hold."""
        with self._guard:
            snapshot = self._current()
            state = snapshot.state
            files = [
                {
                    "file": str(codes_path(self.path, one.row.number).relative_to(self.path)),
                    "kind": one.row.kind,
                    "codes": one.row.length,
                    "removed": one.row.removed,
                    "engine": one.describe(),
                }
                for one in snapshot.segments
            ]
            return {
                "path": str(self.path),
                "format": FORMAT,
                "bits": self.bits,
                "fingerprint": self.fingerprint,
                "model": self.model,
                "count": state.live,
                "keyed": state.rows,
                "commit": state.commit,
                "next_id": state.next_id,
                "removed": sum(one.row.removed for one in snapshot.segments),
                "bytes": {
                    "codes": self._code_bytes(snapshot),
                    "catalogue": self._catalogue.path.stat().st_size,
                    "tables": _size(self.path / table_files.FOLDER),
                },
                "files": files,
                "first_query_seconds": self.first_query_seconds,
            }


def as_ids(ids: Iterable[int] | Ids) -> Ids:
    """Ids as an array, or a :class:`UsageError` where they are not whole numbers."""
    array = np.asarray(ids if isinstance(ids, np.ndarray | range) else list(ids))
    if array.size and (array.dtype.kind not in "iu" or array.ndim != 1):
        raise UsageError(f"ids must be a list of whole numbers, got {ids!r}")
    return array.reshape(-1).astype(np.int64)


def whole(name: str, value: Any, least: int) -> int:
    """``value`` if it is a whole number of at least ``least``, else a :class:`UsageError`."""
    try:
        number = operator.index(value)
    except TypeError:
        number = None
    if number is None or isinstance(value, bool) or number < least:
        raise UsageError(f"{name} must be a whole number of at least {least}, got {value!r}")
    return number


def _size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.glob("*") if path.is_file())


def _place(path: Path) -> tuple[int, int] | None:
    """Which file the catalogue is, whatever its name; None where there is none."""
    try:
        found = os.stat(path / NAME)
    except OSError:
        return None
    return found.st_dev, found.st_ino


def _close(catalogue: Catalogue, lock: WriterLock | None) -> None:
    try:
        catalogue.close()
        if lock is not None:
            lock.settle()
    finally:
        if lock is not None:
            lock.release()
