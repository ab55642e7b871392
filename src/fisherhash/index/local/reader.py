"""Reading a local index: a folder with a catalogue and code files, see folder.py.

Each search checks every byte that it is the first to use, so a damaged file causes an error that
names it and never a wrong result.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import threading
import time
import weakref
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Self

import numpy as np

from fisherhash.errors import FisherhashError, UsageError
from fisherhash.index.base import CannotReadError, DamagedError, Index, Uri
from fisherhash.index.checks import (
    as_ids,
    code_rows,
)
from fisherhash.index.filters import All, Where, parse_filter, unknown_field
from fisherhash.index.items import Codes, FileState, Ids, Item, Matches, Problem, Within
from fisherhash.index.local.catalogue import Catalogue
from fisherhash.index.local.catalogue_writer import CatalogueWriter
from fisherhash.index.local.code_files import codes_name
from fisherhash.index.local.folder import MODEL_FOLDER, is_taken, open_catalogue
from fisherhash.index.local.format_1 import read_old_notes
from fisherhash.index.local.guards import CommitWatch
from fisherhash.index.local.item_reader import ItemReader
from fisherhash.index.local.lock import WriterLock
from fisherhash.index.local.records import RecordForm, Records
from fisherhash.index.local.rows import item_of
from fisherhash.index.local.schema import CATALOGUE, REMEDY, State
from fisherhash.index.local.snapshot import Snapshot, Subset, load_snapshot
from fisherhash.index.local.sql import json_path, to_sql
from fisherhash.index.local.subsets import SubsetCache, Touched, in_ranges
from fisherhash.index.local.table_files import table_bytes
from fisherhash.index.local.verify import RESTORE, unreadable, verify_index
from fisherhash.index.ranking import Ranked, WeightedQueries

logger = logging.getLogger(__name__)

_ITEMS_STEP = 1 << 12
SLOW_SECONDS = 0.5
"""A first search that takes longer is logged with its time."""


class _Seen(threading.local):
    """What a thread saw inside :meth:`LocalReader.reading`.

    Attributes:
        reading: whether it is inside.
        snapshot: the commit that its first call saw.
    """

    reading = False
    snapshot: Snapshot | None = None


class LocalReader(Index):
    """An index in a folder, to be read; :class:`LocalIndex` adds the changes.

    Any number of processes may read while one writes; a reader sees the last commit at every call,
    and within a second one whose writer was killed before it could say so. Do not carry an object
    over a ``fork``.

    Attributes:
        path: the folder.
        first_query_seconds: time of this object's first search: checks, tables and results.
    """

    can_hold_fine = True

    def __init__(self, uri: Uri, *, write: bool, skip_damaged: bool = False) -> None:
        self.uri, self.path, self.writable = os.fspath(uri), Path(uri), write
        self.first_query_seconds: float | None = None
        self._skip_damaged = skip_damaged
        self._guard = threading.RLock()
        self._seen = _Seen()
        self._snapshot: Snapshot | None = None
        self._subsets = SubsetCache()
        self._catalogue, self._lock = open_catalogue(self.path, write=write)
        self._items = ItemReader(self._catalogue)
        self._watch = CommitWatch(self.path)
        self._process = os.getpid()
        # Also without close(): else SQLite moves its log at exit, and the checksums are wrong.
        self._closing = weakref.finalize(self, _close, self._catalogue, self._lock, self._process)
        self._place = os.fspath(self._catalogue.path)
        self._identity = _identity(self._place)
        facts = self._catalogue.facts
        self.bits, self.fingerprint = facts["bits"], facts["fingerprint"]
        self._form = RecordForm.from_facts(facts)
        self.fine_bits = self._form.fine_bits
        self.model = facts["model"]

    @classmethod
    def open_damaged_at(cls, uri: Uri) -> Self:
        """See :meth:`Index.open`."""
        return cls.open_at(uri, write=False, skip_damaged=True)

    @classmethod
    def open_at(cls, uri: Uri, *, write: bool, skip_damaged: bool = False) -> Self:
        """See :meth:`Index.open`."""
        try:
            return cls(uri, write=write, skip_damaged=skip_damaged)
        except OSError as error:
            place = error.filename or uri
            raise FisherhashError(f"{place} cannot be read: {error.strerror or error}") from None

    @classmethod
    def exists_at(cls, uri: Uri) -> bool:
        """See :meth:`Index.exists`."""
        return is_taken(Path(uri))

    @classmethod
    def is_index_at(cls, uri: Uri) -> bool:
        """See :meth:`Index.is_index`."""
        return (Path(uri) / CATALOGUE).is_file()

    @classmethod
    def examine_at(cls, uri: Uri) -> list[Problem]:
        """See :meth:`Index.examine`."""
        path = Path(uri)
        try:
            return super().examine_at(uri)
        except FisherhashError as error:
            if isinstance(error, UsageError) and not (path / CATALOGUE).exists():
                raise
            # The message begins with the damaged file.
            file = str(error).removeprefix(f"{path}{os.sep}").split(" ", 1)[0]
            if isinstance(error, CannotReadError):
                return [unreadable(path, file, error)]
            todo = RESTORE if isinstance(error, DamagedError) else "see above, then try again"
            return [Problem(file, f"cannot be opened: {error}", todo)]

    def close(self) -> None:
        """See :meth:`Index.close`."""
        with self._guard:
            self._snapshot = None
            self._subsets.clear()
            self._watch.close()
            self._closing()

    # The last commit

    @contextlib.contextmanager
    def reading(self) -> Iterator[None]:
        """See :meth:`Index.reading`."""
        self._seen.reading = True
        try:
            yield
        finally:
            self._seen.reading, self._seen.snapshot = False, None

    def _must_be_open(self) -> None:
        if not self._closing.alive:
            raise UsageError(f"{self.uri} was closed")
        if self._process != os.getpid():
            raise UsageError(
                f"{self.uri} was opened before this process was forked; open it again here"
            )
        if _identity(self._place) != self._identity:
            raise FisherhashError(
                f"{self.uri} was deleted, or another index took its place, while it was "
                "open; open it again"
            )

    def _heal(self) -> None:
        """End what an interrupted call left unfinished, unless this call is inside another."""
        if _depth(self._guard) == 1:
            self._catalogue.heal()

    def _current(self) -> Snapshot:
        with self._view() as snapshot:
            return snapshot

    def _known(self) -> Snapshot | None:
        """The last commit, for a call that reads no rows; None where only SQLite can tell."""
        if self._seen.snapshot is not None:
            return self._seen.snapshot
        with self._guard:
            snapshot = self._snapshot
            if snapshot is None or not self._watch.is_last(snapshot.state.commit):
                return None
            self._must_be_open()
            if self._seen.reading:
                self._seen.snapshot = snapshot
            return snapshot

    @contextlib.contextmanager
    def _view(self) -> Iterator[Snapshot]:
        """The last commit, code files and rows alike: another process may commit in between."""
        with self._guard:
            self._must_be_open()
            self._heal()
            failed = None
            while True:
                with self._catalogue.view() as state:
                    try:
                        snapshot = self._load(state)
                    except FileNotFoundError as error:
                        # Gone because another process compacted the index in between?
                        if failed == state.commit:
                            raise FisherhashError(
                                f"{error.filename} is missing. {REMEDY}"
                            ) from None
                        failed = state.commit
                    else:
                        self._watch.saw(state.commit)
                        if self._seen.reading:
                            self._seen.snapshot = snapshot
                        yield snapshot
                        return

    def _load(self, state: State) -> Snapshot:
        if self._snapshot is None or self._snapshot.state != state:
            self._snapshot = load_snapshot(
                self.path,
                self._form,
                self._catalogue,
                self._snapshot,
                skip_damaged=self._skip_damaged,
            )
            # The first codes with a model name it, perhaps in a call that was interrupted.
            self.fingerprint = self._catalogue.read_facts()["fingerprint"]
        return self._snapshot

    @property
    def unavailable(self) -> int | None:
        """See :attr:`Index.unavailable`."""
        return self._current().unavailable if self._skip_damaged else None

    # Search

    def _search(self, queries: Codes, k: int, where: All) -> Matches:
        with self._searching(queries, where) as target:
            return target.search(queries, k)

    def _rank(self, queries: WeightedQueries, k: int, where: All) -> Ranked:
        with self._searching(queries.codes, where) as target:
            return target.rank(queries, k)

    def _within(self, queries: Codes, radius: int, where: All) -> Within:
        with self._searching(queries, where) as target:
            return target.within(queries, radius)

    @contextlib.contextmanager
    def _searching(self, queries: Codes, where: All) -> Iterator[Snapshot | Subset]:
        """What a search goes over; threads search at the same time."""
        start = time.monotonic()
        if where:
            with self._view() as snapshot:
                target = self._subset(snapshot, where)
        else:
            with self._guard:
                self._heal()
                snapshot = target = self._known() or self._current()
                snapshot.prepare(len(queries))
        yield target
        with self._guard:
            for segment in snapshot.segments:
                segment.keep_tables()
        if self.first_query_seconds is None:
            self.first_query_seconds = time.monotonic() - start
            if self.first_query_seconds > SLOW_SECONDS:
                logger.info("first search of %s: %.1f s", self.uri, self.first_query_seconds)

    def _subset(self, snapshot: Snapshot, where: All) -> Subset:
        """The items that match a filter; the last few subsets are kept."""
        return self._subsets.get(
            # As text: 1 and True are equal, but match different items.
            repr(where),
            snapshot.state.commit,
            recent=self._catalogue.recent,
            matching=lambda touched: self._matching(snapshot, where, touched),
            gather=lambda ids: self._gather(snapshot, ids),
            make=lambda ids, records: Subset(ids, self._form.engine(records)),
        )

    def _matching(self, snapshot: Snapshot, where: All, touched: Touched | None = None) -> Ids:
        condition, values = to_sql(where)
        if touched is not None:
            ranges, bounds = in_ranges(touched)
            condition, values = f"{ranges} AND ({condition})", [*bounds, *values]
        ids = as_ids(self._catalogue.ids_where(condition, values))
        self._refuse_unknown(snapshot, where)
        return ids[snapshot.locate(ids)[0] >= 0] if snapshot.unavailable else ids

    def _refuse_unknown(self, snapshot: Snapshot, where: All) -> None:
        """A mistyped field would match no item, and with != every one."""
        for condition in where.conditions if snapshot.state.rows else ():
            paths = map(json_path, condition.paths)
            if condition.paths and not any(map(self._catalogue.has_field, paths)):
                known = self._catalogue.metadata_fields()
                raise unknown_field(self.uri, condition.field, known)

    def build(self) -> None:
        """See :meth:`Index.build`."""
        with self._guard:
            self._heal()
            self._current().prepare(1, build=True)

    # Content

    def get_items(self, names: Sequence[str] | Ids) -> list[Item | None]:
        """See :meth:`Index.get_items`."""
        by_key = len(names) > 0 and isinstance(names[0], str)
        wanted: list[Any] = list(names) if by_key else as_ids(names).tolist()  # type: ignore[arg-type]
        if known := self._known():
            found = list(map(known.items.get, wanted))
            if all(found):
                return found
        with self._view() as snapshot:
            return self._items.read(snapshot, wanted, by_key=by_key)

    def items(self, where: Where | None = None) -> Iterator[Item]:
        """See :meth:`Index.items`."""
        found = parse_filter(where)
        with self._view() as snapshot:
            rows = self._catalogue.rows_where(*to_sql(found))
            self._refuse_unknown(snapshot, found)
            snapshot.check()
        if found:
            ids = as_ids(rows)
            if snapshot.unavailable:
                ids = ids[snapshot.locate(ids)[0] >= 0]
            parts = (ids[i : i + _ITEMS_STEP] for i in range(0, len(ids), _ITEMS_STEP))
            blocks = ((part, self._gather(snapshot, part)) for part in parts)
        else:
            blocks = snapshot.scan(_ITEMS_STEP)
        return (
            item_of(id_, rows.get(id_), *self._form.split(record))
            for part, records in blocks
            for id_, record in zip(part.tolist(), code_rows(records), strict=True)
        )

    def ids(self, where: Where | None = None) -> Ids:
        """See :meth:`Index.ids`."""
        found = parse_filter(where)
        with self._view() as snapshot:
            return self._matching(snapshot, found) if found else snapshot.ids()

    def count(self, where: Where | None = None) -> int:
        """See :meth:`Index.count`."""
        if parse_filter(where):
            return len(self.ids(where))
        snapshot = self._current()
        return snapshot.state.live - snapshot.unavailable

    def files(self) -> dict[str, FileState]:
        """See :meth:`Index.files`."""
        with self._view():
            return self._catalogue.files()

    def notes(self, kind: str) -> dict[str, Any]:
        """See :meth:`Index.notes`."""
        while True:
            snapshot = self._seen.snapshot
            if snapshot is None or kind not in snapshot.notes:
                with self._view() as snapshot:
                    texts = snapshot.notes.get(kind) or self._catalogue.notes(kind)
                if texts is None:
                    old = read_old_notes(self.path)
                    # The first write deletes the files; then look again.
                    if self._catalogue.format() == 1:
                        return old.get(kind, {})
                    continue
                snapshot.notes[kind] = texts
            return {name: json.loads(text) for name, text in snapshot.notes[kind].items()}

    def codes(self, ids: Iterable[int] | Ids) -> Codes:
        """See :meth:`Index.codes`."""
        with self._guard:
            self._heal()
            records = self._gather(self._current(), as_ids(ids))
        return np.ascontiguousarray(self._form.codes(records))

    def _scan(self, block: int) -> Iterator[tuple[Ids, Codes]]:
        with self._guard:
            self._heal()
            snapshot = self._current()
            snapshot.check()
        form = self._form
        return ((ids, np.asarray(form.codes(rows))) for ids, rows in snapshot.scan(block))

    def _gather(self, snapshot: Snapshot, ids: Ids) -> Records:
        exists, records = snapshot.gather(ids)
        if not exists.all():
            raise self._missing(ids[~exists][0])
        return records

    # Health

    def verify(self) -> list[Problem]:
        """See :meth:`Index.verify`."""
        with self._guard:
            self._heal()
            while True:
                snapshot = self._current()
                problems = verify_index(self.path, self._catalogue, snapshot)
                # A commit in between may have deleted what was being read.
                if not problems or self._catalogue.state() == snapshot.state:
                    return problems

    def info(self) -> dict[str, Any]:
        """See :meth:`Index.info`."""
        with self._guard:
            self._heal()
            snapshot = self._current()
            state = snapshot.state
            return {
                "uri": self.uri,
                "path": str(self.path),
                "format": self._catalogue.format(),
                "bits": self.bits,
                "fine_bits": self.fine_bits,
                "fine_bytes": (self._form.width - self._form.code_width) * snapshot.length(),
                "fingerprint": self.fingerprint,
                "model": self.model,
                "count": state.live,
                "keyed": state.rows,
                "commit": state.commit,
                "next_id": state.next_id,
                "removed": snapshot.removed(),
                "bytes": {
                    "codes": snapshot.code_bytes(),
                    "catalogue": self._catalogue.path.stat().st_size,
                    "tables": table_bytes(self.path),
                },
                "files": [
                    {
                        "file": codes_name(one.row.number),
                        "kind": one.row.kind,
                        "codes": one.row.length,
                        "removed": one.row.removed,
                        "engine": one.describe(),
                    }
                    for one in snapshot.segments
                ],
                "first_query_seconds": self.first_query_seconds,
            }

    def model_folder(self) -> Path | None:
        """See :meth:`Index.model_folder`."""
        folder = self.path / MODEL_FOLDER
        return folder if folder.is_dir() else None


def _identity(path: str) -> tuple[int, int] | None:
    """Which file the catalogue is, whatever its name; None where there is none."""
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_dev, found.st_ino


def _depth(lock: Any) -> int:
    """How often this thread holds a lock; 2 where Python cannot say."""
    return lock._recursion_count() if hasattr(lock, "_recursion_count") else 2


_INHERITED: list[Catalogue] = []


def _close(catalogue: Catalogue, lock: WriterLock | None, process: int) -> None:
    if process != os.getpid():
        # A forked child: the files are the parent's, and SQLite must not tidy them up here.
        _INHERITED.append(catalogue)
        return
    try:
        if lock is not None and isinstance(catalogue, CatalogueWriter) and not lock.is_ours():
            catalogue.abandoned = True
        catalogue.close()
        if lock is not None:
            lock.settle()
    finally:
        if lock is not None:
            lock.release()
