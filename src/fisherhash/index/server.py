"""What indexes on a server have in common: how a commit is made, and the model that they carry."""

from __future__ import annotations

import contextlib
from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import ArrayLike

from fisherhash.errors import UsageError
from fisherhash.index.base import DamagedError, Index, Verb
from fisherhash.index.carried import check_model, unpack_model, unpacked
from fisherhash.index.checks import (
    CheckedEntry,
    Notes,
    NoteTexts,
    as_ids,
    check_entries,
    check_notes,
    code_pairs,
)
from fisherhash.index.items import Codes, Ids, Item, Problem

WriteCodes = Callable[[Ids, Codes], None]
"""Adds codes with their ids, without keys."""


class ServerChange(Protocol):
    """One commit in the making."""

    next_id: int

    def ids_of(self, keys: list[str]) -> dict[str, int]:
        """The ids of those keys that exist."""
        ...

    def insert(self, ids: Sequence[int], entries: list[CheckedEntry]) -> None:
        """Add items with keys."""
        ...

    def update(self, entries: dict[int, CheckedEntry]) -> None:
        """Change the fields that are given, of items that :meth:`ids_of` found."""
        ...

    def copying_codes(self) -> contextlib.AbstractContextManager[WriteCodes]:
        """A bulk load of codes."""
        ...

    def delete(self, keys: list[str], ids: Ids) -> dict[int, str | None]:
        """Remove items; returns the keys of those that were there, by id."""
        ...

    def write_notes(self, notes: NoteTexts) -> None:
        """Write and remove notes."""
        ...


class ServerIndex(Index):
    """An index on a server, which makes each change as one commit."""

    @abstractmethod
    def _changing(
        self, fingerprint: str | None = None
    ) -> contextlib.AbstractContextManager[ServerChange]:
        """One commit, made at the end; nothing is written if an error ends it."""

    @abstractmethod
    def _refresh(self) -> None:
        """Read what another process may have changed about the index itself."""

    @abstractmethod
    def _found(self, keys: list[str], ids: list[int]) -> Mapping[str | int, Item]:
        """Those items that exist, by the name they were asked by."""

    @abstractmethod
    def _model_digest(self) -> str | None:
        """The digest of the model that the index carries, if it does."""

    @abstractmethod
    def _model_archive(self) -> bytes:
        """That model, packed."""

    # Changes

    def _put(
        self, verb: Verb, entries: list[CheckedEntry], notes: NoteTexts, fingerprint: str | None
    ) -> Ids:
        with self._changing(fingerprint) as change:
            known = change.ids_of([entry.key for entry in entries])
            self._check_entries(verb, entries, known)
            new = [entry for entry in entries if entry.key not in known]
            given = range(change.next_id, change.next_id + len(new))
            change.insert(given, new)
            change.update({known[e.key]: e for e in entries if e.key in known})
            known |= {entry.key: id_ for entry, id_ in zip(new, given, strict=True)}
            change.next_id = given.stop
            change.write_notes(notes)
        return as_ids(known[entry.key] for entry in entries)

    def add_codes(
        self,
        codes: ArrayLike | Iterable[ArrayLike],
        *,
        fine: ArrayLike | Iterable[ArrayLike] | None = None,
        fingerprint: str | None = None,
    ) -> range:
        """See :meth:`Index.add_codes`."""
        with self._changing(fingerprint) as change:
            first = change.next_id
            with change.copying_codes() as write:
                for block, _ in code_pairs(codes, fine, self.bits, self.fine_bits):
                    write(np.arange(change.next_id, change.next_id + len(block)), block)
                    change.next_id += len(block)
            return range(first, change.next_id)

    def add_items(
        self, items: Iterable[Item], *, notes: Notes = None, next_id: int | None = None
    ) -> None:
        """See :meth:`Index.add_items`; one commit."""
        self._must_write()
        given, texts = list(items), check_notes(notes)
        keyed = [item for item in given if item.key is not None]
        plain = [item for item in given if item.key is None]
        entries = check_entries((item.entry() for item in keyed), self.bits)
        with self._changing() as change:
            ids = as_ids(item.id for item in given)
            if len(ids) and (ids[0] < change.next_id or (np.diff(ids) <= 0).any()):
                raise UsageError(f"{self.uri}: the ids to load must ascend, and be new")
            self._check_entries("add", entries, change.ids_of([entry.key for entry in entries]))
            change.insert([item.id for item in keyed], entries)
            if plain:
                with change.copying_codes() as write:
                    codes = self._joined(item.code for item in plain)
                    write(as_ids(item.id for item in plain), codes)
            last = int(ids[-1]) + 1 if len(ids) else 0
            change.next_id = max(change.next_id, last, next_id or 0)
            change.write_notes(texts)

    def _remove(self, keys: list[str], ids: Ids, notes: NoteTexts, *, missing_ok: bool) -> int:
        with self._changing() as change:
            gone = change.delete(keys, ids)
            if not missing_ok:
                known = {*gone.values()}
                missing: list[str | int] = [key for key in keys if key not in known]
                missing += [id_ for id_ in ids.tolist() if id_ not in gone]
                if missing:
                    raise self._missing(missing[0], "; nothing was removed")
            change.write_notes(notes)
            return len(gone)

    def _check_model(self, fingerprint: str | None, *, unnamed_codes: bool = False) -> None:
        if fingerprint is not None and self.fingerprint is None and not unnamed_codes:
            # Another process may have named the model meanwhile.
            self._refresh()
        super()._check_model(fingerprint, unnamed_codes=unnamed_codes)

    # Content

    def get_items(self, names: Sequence[str] | Ids) -> list[Item | None]:
        """See :meth:`Index.get_items`."""
        by_key = len(names) > 0 and isinstance(names[0], str)
        wanted: list[Any] = list(names) if by_key else as_ids(names).tolist()  # type: ignore[arg-type]
        found = self._found(wanted, []) if by_key else self._found([], wanted)
        return [found.get(name) for name in wanted]

    def model_folder(self) -> Path | None:
        """See :meth:`Index.model_folder`; the model is unpacked into the cache."""
        digest = self._model_digest()
        if digest is None:
            return None
        return unpacked(digest) or unpack_model(self.uri, digest, self._model_archive())

    def _model_problems(self, place: str) -> list[Problem]:
        """What is wrong with the model that the index carries."""
        digest = self._model_digest()
        if digest is None:
            return []
        try:
            check_model(self.uri, digest, self._model_archive())
        except DamagedError as error:
            return [Problem(place, str(error), "copy the index from where it came")]
        return []
