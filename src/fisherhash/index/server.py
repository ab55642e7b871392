"""What indexes on a server have in common: how a commit is made, and the model that they carry."""

from __future__ import annotations

import contextlib
import hashlib
import json
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol

import numpy as np

from fisherhash.errors import FisherhashError, UsageError
from fisherhash.index.base import DamagedError, Files, Index, Verb
from fisherhash.index.checks import CheckedEntry, NoteTexts, as_ids, check_entries
from fisherhash.index.engine import Engine
from fisherhash.index.filters import All
from fisherhash.index.items import Codes, Ids, Item, Problem

FORMAT = 1


@dataclass(frozen=True)
class Facts:
    """What a server stores about an index beside its items, as JSON.

    Attributes:
        bits: length of the codes.
        fingerprint: of the model that made them.
        model: a description of that model.
        digest: of the files of that model, if the index carries it; see :func:`digest_of`.
        format: of what is stored.
        commit: the number of the last commit.
        next_id: the id of the next item.
        graph: PostgreSQL: how the graph of ``search=hnsw`` was built, and its recall.
        next_row: Milvus: the first row number that was never used.
        cleaned: Milvus: how often rows that ended were removed.
    """

    bits: int
    fingerprint: str | None
    model: dict[str, Any]
    digest: str | None
    format: int = FORMAT
    commit: int = 0
    next_id: int = 0
    graph: dict[str, Any] | None = None
    next_row: int = 0
    cleaned: int = 0

    def to_json(self) -> str:
        """The facts as they are stored."""
        return json.dumps(asdict(self))


class ServerChange(Protocol):
    """One commit in the making."""

    next_id: int

    def ids_of(self, keys: list[str]) -> dict[str, int]:
        """Return the ids of those keys that exist."""
        ...

    def insert(self, ids: Sequence[int], entries: list[CheckedEntry]) -> None:
        """Add items with keys."""
        ...

    def insert_codes(self, ids: Ids, codes: Codes) -> None:
        """Add codes without keys."""
        ...

    def update(self, entries: dict[int, CheckedEntry]) -> None:
        """Change the fields that are given, of items that :meth:`ids_of` found."""
        ...

    def delete(self, keys: list[str], ids: Ids) -> dict[int, str | None]:
        """Remove items; returns the keys of those that were there, by id."""
        ...

    def write_notes(self, notes: NoteTexts) -> None:
        """Write and remove notes."""
        ...


class ServerIndex(Index):
    """An index on a server, which makes each change as one commit."""

    _loaded: tuple[int, tuple[Ids, Engine]] | None = None

    def _read_facts(self, text: str | bytes | None, *, opening: bool = False) -> Facts:
        """Read the facts as they are stored; None where there are none."""
        if text is None and opening:
            raise UsageError(f"{self.uri} does not exist")
        if text is None:
            raise FisherhashError(f"{self.uri} was deleted while it was open")
        known = json.loads(text)
        if known["format"] != FORMAT:
            raise FisherhashError(
                f"{self.uri} was written by another version of fisherhash (format "
                f"{known['format']}, this one reads format {FORMAT}); use that version"
            )
        facts = Facts(**known)
        self.bits, self.fingerprint, self.model = facts.bits, facts.fingerprint, facts.model
        return facts

    @abstractmethod
    def _changing(
        self, fingerprint: str | None = None
    ) -> contextlib.AbstractContextManager[ServerChange]:
        """One commit, made at the end; nothing is written if an error ends it."""

    @abstractmethod
    def _facts(self) -> Facts:
        """Read the facts as of the last commit."""

    @abstractmethod
    def _existing(self, keys: list[str], ids: list[int]) -> Iterable[Item]:
        """Read the items of those keys and ids that exist."""

    @abstractmethod
    def _stored_files(self) -> dict[str, bytes]:
        """Read the files of the model that the index carries."""

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

    def _put_codes(self, blocks: Iterator[Codes], fingerprint: str | None) -> range:
        with self._changing(fingerprint) as change:
            first = change.next_id
            for block in blocks:
                ids = np.arange(change.next_id, change.next_id + len(block))
                change.insert_codes(ids, block)
                change.next_id += len(block)
            return range(first, change.next_id)

    def _load(self, items: list[Item], notes: NoteTexts, next_id: int) -> None:
        keyed = [item for item in items if item.key is not None]
        plain = [item for item in items if item.key is None]
        entries = check_entries((item.entry() for item in keyed), self.bits)
        with self._changing() as change:
            if items and items[0].id < change.next_id:
                raise UsageError(
                    f"{self.uri} has given the id {items[0].id} before; nothing was loaded"
                )
            self._check_entries("add", entries, change.ids_of([entry.key for entry in entries]))
            change.insert([item.id for item in keyed], entries)
            ids = as_ids(item.id for item in plain)
            change.insert_codes(ids, self._joined(item.code for item in plain))
            change.next_id = max(change.next_id, items[-1].id + 1 if items else 0, next_id)
            change.write_notes(notes)

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
            self._facts()  # another process may have named the model meanwhile
        super()._check_model(fingerprint, unnamed_codes=unnamed_codes)

    # Content

    def get_items(self, names: Sequence[str] | Ids) -> list[Item | None]:
        """The items of some keys or ids, all from one commit; None where there is none."""
        if len(names) and isinstance(names[0], str):
            keys = [str(name) for name in names]
            by_key = {item.key: item for item in self._existing(list(filter(_is_text, keys)), [])}
            return [by_key.get(key) for key in keys]
        ids: list[int] = as_ids(names).tolist()  # type: ignore[arg-type]
        by_id = {item.id: item for item in self._existing([], ids)}
        return [by_id.get(id_) for id_ in ids]

    def model_files(self) -> dict[str, bytes]:
        """The files of the model that the index carries; empty if it carries none.

        Raises:
            DamagedError: they are not what was stored.
        """
        files = self._stored_files()
        if self._facts().digest != digest_of(files):
            raise DamagedError(f"the model that {self.uri} carries is damaged")
        return files

    def _engine(self, where: All) -> tuple[Ids, Engine]:
        """All codes stay in memory until the next commit; those that match a filter do not."""
        if where:
            return super()._engine(where)
        commit, loaded = self._facts().commit, self._loaded
        if loaded is None or loaded[0] != commit:
            parts = [(as_ids(()), self._joined(())), *self.scan()]
            ids, codes = (np.concatenate(part) for part in zip(*parts, strict=True))
            self._loaded = loaded = commit, (ids, Engine(codes, self.bits))
        return loaded[1]

    def _model_problems(self) -> list[Problem]:
        """What is wrong with the model that the index carries."""
        try:
            self.model_files()
        except DamagedError as error:
            return [Problem("the model", str(error), "copy the index from where it came")]
        return []


def digest_of(files: Files) -> str | None:
    """A checksum of the files of a model; None of no files."""
    digest = hashlib.sha256()
    for name, data in sorted(files.items()):
        digest.update(f"{name}\0{len(data)}\0".encode() + data)
    return digest.hexdigest() if files else None


def _is_text(key: str) -> bool:
    """Whether it is a text or the name of a file; nothing else can be a key."""
    try:
        return bool(key.encode(errors="surrogateescape"))
    except UnicodeEncodeError:
        return False
