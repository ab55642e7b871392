"""The embedded index: a folder with a catalogue and code files.

    photos.index/
      catalogue.sqlite      what is in the index; a change is true when it is committed here
      catalogue.sums        checksums of the catalogue's bytes
      head                  number of the last commit
      codes/NNNNNN.codes    packed codes, only appended to; NNNNNN.ids where ids are not implied
      tables/               search tables, made when they help; may be deleted at any time
      lock                  held by the one writer

A commit first brings the new codes to the disk, then commits the catalogue, then notes the number
in ``head``. A process that ends in between leaves bytes that nobody reads. Searching checks every
byte it uses once, so a damaged file gives an error that names it and never a wrong answer.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import sqlite3
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from fisherhash.codes import check_bits, check_codes, code_bytes
from fisherhash.errors import FisherhashError, UsageError
from fisherhash.index.local import table_files
from fisherhash.index.local.catalogue import Catalogue
from fisherhash.index.local.catalogue_writer import CatalogueWriter, create_catalogue
from fisherhash.index.local.change import Change
from fisherhash.index.local.code_files import FOLDER as CODES
from fisherhash.index.local.guards import Head, cannot_write
from fisherhash.index.local.lock import WriterLock
from fisherhash.index.local.reader import Reader, as_ids
from fisherhash.index.local.rows import changed_rows, make_columns, new_rows
from fisherhash.index.local.schema import NAME, State
from fisherhash.index.local.snapshot import Ids, Snapshot, scan
from fisherhash.index.local.writing import delete_files

logger = logging.getLogger(__name__)

_PARTS = {"head", "lock", CODES, table_files.FOLDER, "catalogue.sums"}
_STEP = 1 << 22


class LocalIndex(Reader):
    """An embedded index; see :meth:`create` and :meth:`open`. A context manager.

    Any number of processes may read while one writes; a reader sees the last commit at every call.
    One object may be used by several threads. Do not carry it over a ``fork``.

    Attributes:
        path: the folder.
        bits: length of its codes.
        fingerprint: of the model that made its codes, where it was given.
        model: a free description of that model.
        writable: whether it was opened to be changed.
        first_query_seconds: time of this object's first search: checks, tables and the answer.
    """

    def __init__(self, path: Path, *, write: bool) -> None:
        self.writable = write
        lock = WriterLock(path / "lock") if write else None
        super().__init__(path, lock)
        if write:
            try:
                self._clean()
            except BaseException:
                self.close()
                raise

    def _open_catalogue(self) -> Catalogue:
        """The reader's way first: it changes nothing in an index that is to be refused."""
        catalogue = super()._open_catalogue()
        if not self.writable:
            return catalogue
        try:
            catalogue.trust()
        finally:
            catalogue.close()
        writer = CatalogueWriter(self.path)
        try:
            commit = writer.state().commit
            if self._head.read() != (commit, None):
                self._head.start(commit)
        except BaseException:
            writer.close()
            raise
        return writer

    @classmethod
    def create(
        cls,
        path: str | os.PathLike[str],
        *,
        bits: int,
        fingerprint: str | None = None,
        model: dict[str, Any] | None = None,
    ) -> LocalIndex:
        """Make an empty index in a new or empty folder, and open it for writing.

        Args:
            path: the folder.
            bits: length of its codes, 1 to 1024.
            fingerprint: of the model that makes them; codes of another one are refused.
            model: a description of it that JSON can hold.
        """
        folder = Path(path)
        bits = check_bits(bits)
        facts = {"bits": bits, "fingerprint": fingerprint, "model": dict(model or {})}
        try:
            json.dumps(facts)
        except (TypeError, ValueError) as error:
            raise UsageError(
                f"the model's description cannot be written as JSON: {error}"
            ) from None
        if (folder / NAME).exists():
            raise UsageError(f"{folder} is an index already; open it instead")
        if folder.exists() and not folder.is_dir():
            raise UsageError(f"{folder} is a file; give the name of a folder that does not exist")
        try:
            folder.mkdir(parents=True, exist_ok=True)
            foreign = _foreign(folder)
            if foreign:
                raise UsageError(
                    f"{folder} holds other files ({foreign}); "
                    "give the name of a folder that does not exist"
                )
            lock = WriterLock(folder / "lock")
            try:
                if (folder / NAME).exists():
                    raise UsageError(f"{folder} is an index already; open it instead")
                (folder / CODES).mkdir(exist_ok=True)
                (folder / table_files.FOLDER).mkdir(exist_ok=True)
                Head(folder / "head").start(State().commit)
                create_catalogue(folder, facts)
            finally:
                lock.release()
        except (OSError, sqlite3.Error) as error:
            raise cannot_write(folder, error) from None
        return cls.open(folder, write=True)

    @classmethod
    def open(cls, path: str | os.PathLike[str], *, write: bool = False) -> LocalIndex:
        """Open an index, to search it or (``write=True``) also to change it.

        Raises:
            UsageError: there is no index.
            FisherhashError: it is damaged, of a newer format, or being written by another process.
        """
        folder = Path(path)
        try:
            _must_be_index(folder)
            return cls(folder, write=write)
        except OSError as error:
            place = error.filename or folder
            raise FisherhashError(f"{place} cannot be read: {error.strerror or error}") from None

    def _clean(self) -> None:
        """Delete code files that no commit knows: an ended writer left them."""
        _, files, _ = self._catalogue.load()
        known = {row.number for row in files}
        for path in (self.path / CODES).glob("*"):
            ours = path.suffix in (".codes", ".ids") and path.stem.isdecimal()
            if ours and int(path.stem) not in known:
                delete_files(self.path, [int(path.stem)])
        stale = {
            int(path.name.partition("-")[0])
            for path in (self.path / table_files.FOLDER).glob("*.table")
            if path.name.partition("-")[0].isdecimal()
        }
        table_files.forget(self.path, stale - known)

    # Changes: each call is one commit

    def add(
        self,
        keys: Sequence[str],
        codes: ArrayLike,
        *,
        paths: Sequence[Any] | None = None,
        sizes: Sequence[int | None] | None = None,
        mtimes_ns: Sequence[int | None] | None = None,
        labels: Sequence[Any] | None = None,
        metadata: Sequence[Any] | None = None,
        fingerprint: str | None = None,
    ) -> Ids:
        """Add items under new keys; their ids. A key that is there already: nothing is added.

        Args:
            keys: the user's names for the items.
            codes: (n, bytes) packed codes.
            paths: files they were made from.
            sizes: bytes of those files.
            mtimes_ns: their times of change.
            labels: of each item a label or a list of labels.
            metadata: of each item a mapping that JSON can hold.
            fingerprint: of the model that made the codes.
        """
        columns = make_columns(keys, paths, sizes, mtimes_ns, labels, metadata)
        return self._put(list(keys), codes, columns, fingerprint, add=True, update=False)

    def update(
        self,
        keys: Sequence[str],
        codes: ArrayLike | None = None,
        *,
        paths: Sequence[Any] | None = None,
        sizes: Sequence[int | None] | None = None,
        mtimes_ns: Sequence[int | None] | None = None,
        labels: Sequence[Any] | None = None,
        metadata: Sequence[Any] | None = None,
        fingerprint: str | None = None,
    ) -> Ids:
        """Change items; their ids, which stay. What is not given stays as it is, codes too."""
        columns = make_columns(keys, paths, sizes, mtimes_ns, labels, metadata)
        return self._put(list(keys), codes, columns, fingerprint, add=False, update=True)

    def upsert(
        self,
        keys: Sequence[str],
        codes: ArrayLike,
        *,
        paths: Sequence[Any] | None = None,
        sizes: Sequence[int | None] | None = None,
        mtimes_ns: Sequence[int | None] | None = None,
        labels: Sequence[Any] | None = None,
        metadata: Sequence[Any] | None = None,
        fingerprint: str | None = None,
    ) -> Ids:
        """Add items under new keys and update those whose keys are there; their ids."""
        columns = make_columns(keys, paths, sizes, mtimes_ns, labels, metadata)
        return self._put(list(keys), codes, columns, fingerprint, add=True, update=True)

    def _put(
        self,
        keys: list[str],
        codes: ArrayLike | None,
        columns: dict[str, list[Any]],
        fingerprint: str | None,
        *,
        add: bool,
        update: bool,
    ) -> Ids:
        packed = None if codes is None else check_codes(codes, self.bits)
        if packed is not None and len(packed) != len(keys):
            raise UsageError(f"{len(keys)} keys, but {len(packed)} codes")
        with self._guard, self._commit(fingerprint) as change:
            known = self._catalogue.rows_of_keys(keys)
            if known and not update:
                raise UsageError(
                    f"{self.path} already has an item with the key {next(iter(known))!r}; "
                    "update it, or remove it first. Nothing was added"
                )
            if len(known) < len(keys) and not add:
                missing = next(key for key in keys if key not in known)
                raise UsageError(
                    f"{self.path} has no item with the key {missing!r}; nothing was changed"
                )
            fresh = [i for i, key in enumerate(keys) if key not in known]
            old = [i for i, key in enumerate(keys) if key in known]
            ids = np.empty(len(keys), dtype=np.int64)
            if old:
                rows = [known[keys[i]] for i in old]
                ids[old] = [row.id for row in rows]
                change.replace_rows(rows, changed_rows(rows, _pick(columns, old)))
                if packed is not None:
                    change.move(ids[old], packed[old])
            if fresh and packed is not None:
                first = change.state.next_id
                ids[fresh] = np.arange(first, first + len(fresh))
                change.insert_rows(new_rows(first, [keys[i] for i in fresh], _pick(columns, fresh)))
                change.append(packed[fresh])
        return ids

    def add_codes(
        self, codes: ArrayLike | Iterable[ArrayLike], *, fingerprint: str | None = None
    ) -> range:
        """Add codes in bulk, without keys: fast, in little memory, in one commit.

        Args:
            codes: (n, bytes) packed codes, perhaps a memory map, or an iterator of such blocks.
            fingerprint: of the model that made them.

        Returns:
            Their ids.
        """
        with self._guard, self._commit(fingerprint) as change:
            first = change.state.next_id
            for block in _code_blocks(codes):
                change.append(check_codes(block, self.bits))
            return range(first, change.state.next_id)

    def remove(
        self,
        keys: Iterable[str] | None = None,
        *,
        ids: Iterable[int] | Ids | None = None,
        missing_ok: bool = False,
    ) -> int:
        """Remove items by key, by id, or both; how many were removed.

        Raises:
            UsageError: a key or an id is not there (unless ``missing_ok``); nothing is removed.
        """
        if isinstance(keys, str):
            raise UsageError("keys must be a list of texts, got one text")
        names = list(dict.fromkeys(keys or ()))
        given = np.zeros(0, dtype=np.int64) if ids is None else as_ids(ids)
        with self._guard, self._commit(None) as change:
            rows = self._catalogue.rows_of_keys(names)
            if len(rows) < len(names) and not missing_ok:
                missing = next(name for name in names if name not in rows)
                raise UsageError(
                    f"{self.path} has no item with the key {missing!r}; nothing was removed"
                )
            named = np.array([row.id for row in rows.values()], dtype=np.int64)
            wanted = np.unique(np.concatenate([named, given]))
            which, _ = change.before.locate(wanted)
            if (which < 0).any() and not missing_ok:
                raise UsageError(
                    f"{self.path} has no item with the id {wanted[which < 0][0]}; "
                    "nothing was removed"
                )
            wanted = wanted[which >= 0]
            change.remove(wanted)
            return len(wanted)

    def compact(self) -> dict[str, int]:
        """Write all that counts into new code files, drop the rest; ids stay.

        Returns:
            Codes dropped, and bytes of the code files before and after.
        """
        with self._guard:
            catalogue = self._must_write()
            snapshot = self._current()
            rows = [segment.row for segment in snapshot.segments]
            before = self._code_bytes(snapshot)
            dropped = sum(row.removed for row in rows)
            if dropped or len(rows) > 1:
                for segment in snapshot.segments:
                    segment.check()
                with self._commit(None) as change:
                    change.rewrite(scan(snapshot, _STEP, code_bytes(self.bits)))
                numbers = {row.number for row in rows}
                self._snapshot = None
                delete_files(self.path, numbers)
                table_files.forget(self.path, numbers)
                catalogue.vacuum()
            return {
                "dropped": dropped,
                "bytes_before": before,
                "bytes_after": self._code_bytes(self._current()),
            }

    def _must_write(self) -> CatalogueWriter:
        catalogue = self._catalogue
        if not isinstance(catalogue, CatalogueWriter):
            raise UsageError(f"{self.path} is open for reading only; open it with write=True")
        if catalogue.uncertain:
            raise FisherhashError(
                f"{self.path}: the disk failed during the last change. Check the disk, then close "
                "the index and open it again"
            )
        return catalogue

    @contextlib.contextmanager
    def _commit(self, fingerprint: str | None) -> Iterator[Change]:
        """One commit: all that is done to the change becomes true together, or nothing does."""
        catalogue = self._must_write()
        snapshot = self._current()
        self._check_model(fingerprint, snapshot)
        change = Change(catalogue, snapshot, self.path, self.bits)
        catalogue.begin()
        try:
            yield change
            if change.is_empty():
                catalogue.rollback()
                return
            if fingerprint is not None and self.fingerprint is None:
                catalogue.put_facts({**catalogue.facts, "fingerprint": fingerprint})
            change.finish()
        except BaseException:
            self._take_back(catalogue, change)
            raise
        finally:
            change.draft.close()
        if fingerprint is not None:
            self.fingerprint = fingerprint
        # Here it is true; what follows is for those who come later.
        with contextlib.suppress(OSError):
            self._head.write(change.state.commit)
        catalogue.tidy()

    def _take_back(self, catalogue: CatalogueWriter, change: Change) -> None:
        catalogue.rollback()
        try:
            # An interruption may come just behind the commit; then the bytes count.
            unchanged = catalogue.state().commit == change.before.state.commit
            if unchanged and not catalogue.uncertain:
                change.draft.undo()
        except FisherhashError as error:
            logger.warning("%s: %s", self.path, error)

    def _check_model(self, fingerprint: str | None, snapshot: Snapshot) -> None:
        if fingerprint is None or fingerprint == self.fingerprint:
            return
        if self.fingerprint is not None:
            raise self._other_model(fingerprint)
        if snapshot.state.next_id:
            raise UsageError(
                f"{self.path} holds codes whose model was not named, so codes of model "
                f"{fingerprint[:12]} cannot be told to fit; make a new index for them"
            )


def _must_be_index(folder: Path) -> None:
    if not folder.exists():
        raise UsageError(f"{folder} does not exist. Make an index first: index sync or index add")
    if not folder.is_dir():
        raise UsageError(f"{folder} is a file; an index is a folder")
    if (folder / NAME).is_file():
        return
    if (folder / "head").exists():
        if not _foreign(folder):
            raise UsageError(
                f"{folder} is an index whose making was interrupted. Make it again; "
                "that works in this folder"
            )
        if (folder / CODES).is_dir():
            raise FisherhashError(
                f"{folder / NAME} is missing. Restore the index from a copy, or make it again"
            )
    raise UsageError(f"{folder} is not an index: it holds no {NAME}")


def _foreign(folder: Path) -> str:
    """The name of something in a folder that no interrupted making of an index left."""
    for entry in sorted(folder.iterdir()):
        ours = entry.name in _PARTS or entry.name.startswith((NAME + ".new", "head.new"))
        if not ours or (entry.is_dir() and any(entry.iterdir())):
            return entry.name
    return ""


def _pick(columns: dict[str, list[Any]], numbers: list[int]) -> dict[str, list[Any]]:
    return {name: [values[i] for i in numbers] for name, values in columns.items()}


def _code_blocks(codes: Any) -> Iterator[Any]:
    if isinstance(codes, list | tuple):
        codes = np.asarray(codes)
    if isinstance(codes, np.ndarray):
        if codes.ndim != 2:
            yield codes
        for start in range(0, len(codes), _STEP):
            yield codes[start : start + _STEP]
        return
    yield from codes
