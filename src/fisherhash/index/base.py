"""The contract of every index, and the door to all of them: ``Index.open(uri)``.

Search is exact and deterministic: results are ordered by (distance, id). Ids are whole numbers that
the index assigns when an item is added. They are never reused, and stay with their item when it is
changed and in a copy to another index. A key is the user's own name for an item. Each call that
changes an index is one commit: all of it happens, or nothing does.

A back-end is a class that implements :class:`Index`, found by the scheme of its URI: those of this
package in :data:`BACKENDS`, those of other packages through the entry point
``fisherhash.backends`` (``scheme = "module:Class"``). Its module is imported when an index of that
scheme is first opened.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.metadata
import itertools
import os
import re
from abc import ABC, abstractmethod
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Self, overload

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fisherhash.codes import check_bits, check_codes, code_bytes, pack
from fisherhash.errors import FisherhashError, UsageError
from fisherhash.index.checks import (
    CheckedEntry,
    Notes,
    NoteTexts,
    as_ids,
    as_json,
    check_entries,
    check_keys,
    check_notes,
    code_blocks,
    whole_number,
)
from fisherhash.index.engine import Engine, real_distances, real_weights
from fisherhash.index.filters import All, Where, parse_filter
from fisherhash.index.items import Codes, Entry, FileState, Ids, Item, Matches, Problem, Within
from fisherhash.system.cache import cache_dir
from fisherhash.system.storage import draft_folder

Uri = str | os.PathLike[str]
Files = Mapping[str, bytes]
"""Files that an index carries, by their names: the folder of the model that made its codes."""
Verb = Literal["add", "upsert"]


class CannotWriteError(FisherhashError):
    """A change could not be stored: the disk is full, or it fails.

    Args:
        what: what failed.
        todo: what to do before running the same command again.
        done: what was changed before.
        then: what the same command will then do.
    """

    def __init__(
        self, what: str, todo: str, done: str = "Nothing was added or changed", then: str = ""
    ) -> None:
        again = "then run the same command again" + (f": {then}" if then else "")
        super().__init__(f"{what}. {done}; {todo}, {again}")
        self.what, self.todo = what, todo


class DamagedError(FisherhashError):
    """What is stored is not what was written."""


class CannotReadError(FisherhashError):
    """The system could not read a file just now; the file itself may be whole."""


class Index(ABC):
    """A collection of codes that can be searched by Hamming distance. A context manager.

    Several threads may use one object. ``where`` arguments take the filters of
    :mod:`fisherhash.index.filters`; only items with a key can match a filter.

    Attributes:
        uri: what the index was opened by, without passwords.
        bits: length of its codes.
        fingerprint: of the model that made its codes, if known; codes of another are refused.
        model: a description of that model that JSON can hold.
        writable: whether it was opened for writing.
        approximate: whether searches may miss items; only where the URI asks for it.
    """

    uri: str
    bits: int
    fingerprint: str | None
    model: dict[str, Any]
    writable: bool
    approximate: bool = False

    # The door

    @staticmethod
    def open(uri: Uri, *, write: bool = False, skip_damaged: bool = False) -> Index:
        """Open an index for reading or, with ``write=True``, for reading and writing.

        Args:
            uri: the path of a file, or the URI of another back-end.
            write: allow changes; most back-ends admit one writer at a time.
            skip_damaged: leave out items that are damaged, instead of raising an error;
                :attr:`unavailable` counts them. For reading only.

        Raises:
            UsageError: there is no such index.
            FisherhashError: it is damaged, of another format, or locked by another writer.
        """
        if skip_damaged and write:
            raise UsageError("an index is only read with skip_damaged; repair it to change it")
        return _backend(uri).open_at(uri, write=write, skip_damaged=skip_damaged)

    @staticmethod
    def create(
        uri: Uri,
        *,
        bits: int,
        fingerprint: str | None = None,
        model: Mapping[str, Any] | None = None,
        files: Files | None = None,
    ) -> Index:
        """Create an empty index, complete or not at all, and open it for writing.

        Args:
            uri: where; there must be nothing yet.
            bits: length of its codes, 1 to 1024.
            fingerprint: of the model that makes its codes.
            model: a description of that model that JSON can hold.
            files: the files of the model's folder; the index then carries its model.
        """
        about = dict(model or {})
        as_json(about, "the model's description")
        facts = {"bits": check_bits(bits), "fingerprint": fingerprint, "model": about}
        return _backend(uri).create_at(uri, facts, dict(files or {}))

    @staticmethod
    def exists(uri: Uri) -> bool:
        """Whether there is anything at ``uri`` that only ``open`` may touch."""
        return _backend(uri).exists_at(uri)

    @staticmethod
    def examine(uri: Uri) -> list[Problem]:
        """Check an index that may be too damaged to be opened; see :meth:`verify`.

        Raises:
            UsageError: there is no index.
        """
        return _backend(uri).examine_at(uri)

    # What a back-end implements: opening

    @classmethod
    @abstractmethod
    def open_at(cls, uri: Uri, *, write: bool, skip_damaged: bool = False) -> Self:
        """Open the index; a back-end that cannot leave out damaged items opens as usual."""

    @classmethod
    @abstractmethod
    def create_at(cls, uri: Uri, facts: dict[str, Any], files: Files) -> Self:
        """Create an index; the facts are ``bits``, ``fingerprint`` and ``model``."""

    @classmethod
    @abstractmethod
    def exists_at(cls, uri: Uri) -> bool:
        """Whether there is anything at the URI."""

    @classmethod
    def examine_at(cls, uri: Uri) -> list[Problem]:
        """Open the index and verify it."""
        with cls.open_at(uri, write=False) as index:
            return index.verify()

    @property
    def unavailable(self) -> int | None:
        """How many items were left out because they are damaged; None where none may be."""
        return None

    # Changes, each call one commit

    def add(
        self, entries: Iterable[Entry], *, notes: Notes = None, fingerprint: str | None = None
    ) -> Ids:
        """Add items under new keys. If a key exists already, nothing is added.

        Args:
            entries: the items; each needs a code.
            notes: documents that are stored in the same commit, see :meth:`write_notes`.
            fingerprint: of the model that made the codes.

        Returns:
            Their ids.
        """
        return self._put_checked("add", entries, notes, fingerprint)

    def upsert(
        self, entries: Iterable[Entry], *, notes: Notes = None, fingerprint: str | None = None
    ) -> Ids:
        """Add items under new keys, and change those whose keys exist; returns their ids.

        A field that is None stays as it is, the code too; a new item needs a code.
        """
        return self._put_checked("upsert", entries, notes, fingerprint)

    def _put_checked(
        self, verb: Verb, entries: Iterable[Entry], notes: Notes, fingerprint: str | None
    ) -> Ids:
        self._must_write()
        given, texts = check_entries(entries, self.bits), check_notes(notes)
        return self._put(verb, given, texts, fingerprint)

    def add_codes(
        self, codes: ArrayLike | Iterable[ArrayLike], *, fingerprint: str | None = None
    ) -> range:
        """Add codes in bulk, without keys: fast, and in little memory.

        Args:
            codes: (n, bytes) packed codes, perhaps a memory map, or an iterator of such blocks.
            fingerprint: of the model that made them.

        Returns:
            Their ids.
        """
        self._must_write()
        return self._put_codes(code_blocks(codes, self.bits), fingerprint)

    def load(
        self, items: Iterable[Item], *, notes: Notes = None, next_id: int | None = None
    ) -> None:
        """Add items of another index; they keep their ids.

        Args:
            items: by ascending id, each above every id that was ever given here.
            notes: documents that are stored in the same commit.
            next_id: the least id that a new item gets afterwards.
        """
        self._must_write()
        given, texts = list(items), check_notes(notes)
        check_entries((item.entry() for item in given if item.key is not None), self.bits)
        ids = as_ids(item.id for item in given)
        if len(ids) and (np.diff(ids) <= 0).any():
            raise UsageError(f"{self.uri}: the ids to load must ascend")
        self._load(given, texts, next_id or 0)

    def remove(
        self,
        keys: Iterable[str] | None = None,
        *,
        ids: Iterable[int] | Ids | None = None,
        notes: Notes = None,
        missing_ok: bool = False,
    ) -> int:
        """Remove items by key, by id, or both; returns how many were removed.

        Raises:
            UsageError: a key or an id does not exist (unless ``missing_ok``); nothing is removed.
        """
        self._must_write()
        names, numbers = check_keys(keys), as_ids(() if ids is None else ids)
        return self._remove(names, numbers, check_notes(notes), missing_ok=missing_ok)

    def write_notes(self, notes: Notes) -> None:
        """Store small JSON documents beside the items; a value of None removes a document.

        >>> notes = {"sync": {"folder": {"folder": "/data"}}, "skipped": {"a.jpg": None}}
        """
        self._put_checked("upsert", [], notes, None)

    # What a back-end implements: changes

    @abstractmethod
    def _put(
        self, verb: Verb, entries: list[CheckedEntry], notes: NoteTexts, fingerprint: str | None
    ) -> Ids:
        """Add or upsert items and write notes, all in one commit.

        It must refuse what :meth:`_check_entries` and :meth:`_check_model` refuse.
        """

    @abstractmethod
    def _put_codes(self, blocks: Iterator[Codes], fingerprint: str | None) -> range:
        """Add checked blocks of codes without keys, in one commit; returns their ids."""

    @abstractmethod
    def _load(self, items: list[Item], notes: NoteTexts, next_id: int) -> None:
        """Add items under their own ids, in one commit.

        It must refuse ids that were given before, and keys that exist.
        """

    @abstractmethod
    def _remove(self, keys: list[str], ids: Ids, notes: NoteTexts, *, missing_ok: bool) -> int:
        """Remove items and write notes, all in one commit; keys and ids may repeat each other."""

    # Content

    @abstractmethod
    def get_items(self, names: Sequence[str] | Ids) -> list[Item | None]:
        """The items of some keys or ids, all from one commit; None where there is none."""

    @abstractmethod
    def items(self, where: Where | None = None) -> Iterator[Item]:
        """All items that match a filter by ascending id, from one commit."""

    @abstractmethod
    def notes(self, kind: str) -> dict[str, Any]:
        """The documents of a kind by name, see :meth:`write_notes`."""

    @abstractmethod
    def model_files(self) -> dict[str, bytes]:
        """The files of the model that the index carries; empty if it carries none."""

    @overload
    def get(self, name: str | int) -> Item: ...
    @overload
    def get(self, name: Iterable[str] | Iterable[int] | Ids) -> list[Item]: ...
    def get(self, name: str | int | Iterable[str] | Iterable[int] | Ids) -> Item | list[Item]:
        """The item of a key or an id, or the items of several, in the order given.

        Raises:
            UsageError: one does not exist.
        """
        if isinstance(name, str | int | np.integer):
            return self.get([name])[0]  # type: ignore[list-item]
        names: Any = list(name)
        if names and not isinstance(names[0], str):
            names = as_ids(names)
        found = self.get_items(names)
        for one, item in zip(names, found, strict=True):
            if item is None:
                raise self._missing(one)
        return found  # type: ignore[return-value]

    def model_folder(self) -> Path | None:
        """A folder with the model that the index carries, in this user's cache, or None."""
        files = self.model_files()
        if not files:
            return None
        digest = hashlib.sha256()
        for name, data in sorted(files.items()):
            digest.update(f"{name}\0{len(data)}\0".encode() + data)
        folder = cache_dir() / "carried-models" / digest.hexdigest()
        if not folder.is_dir():
            folder.parent.mkdir(parents=True, exist_ok=True)
            try:
                with draft_folder(folder) as draft:
                    for name, data in files.items():
                        if Path(name).name != name:
                            raise DamagedError(f"{self.uri} carries a file named {name!r}")
                        (draft / name).write_bytes(data)
            except FileExistsError:
                pass  # another process was faster
        return folder

    # These follow from the methods above; a back-end replaces those that it can do faster.

    def ids(self, where: Where | None = None) -> Ids:
        """Ids of all items that match a filter, ascending; of all items without one."""
        return as_ids(item.id for item in self.items(where))

    def count(self, where: Where | None = None) -> int:
        """How many items match a filter; all items without one."""
        return len(self.ids(where))

    def codes(self, ids: Iterable[int] | Ids) -> Codes:
        """(n, bytes) codes of items, in the order of the ids."""
        return self._joined(item.code for item in self.get(as_ids(ids)))

    def scan(self, block: int = 1 << 16) -> Iterator[tuple[Ids, Codes]]:
        """Ids and codes of everything by ascending id, about ``block`` at a time, of one commit."""
        return self._scan(self.items(), whole_number("block", block, 1))

    def _scan(self, items: Iterator[Item], block: int) -> Iterator[tuple[Ids, Codes]]:
        parts = iter(lambda: list(itertools.islice(items, block)), [])
        return ((as_ids(i.id for i in part), self._joined(i.code for i in part)) for part in parts)

    def _joined(self, codes: Iterable[bytes]) -> Codes:
        return np.frombuffer(b"".join(codes), np.uint8).reshape(-1, code_bytes(self.bits))

    def files(self) -> dict[str, FileState]:
        """What is known about the file of every item that has a key, by ascending id."""
        return {
            item.key: FileState(item.size, item.mtime_ns, item.id)
            for item in self.items()
            if item.key is not None
        }

    def keys(self) -> list[str]:
        """Keys of all items that have one, by ascending id."""
        return list(self.files())

    def info(self) -> dict[str, Any]:
        """Facts that JSON can hold; a back-end may add its own."""
        return {
            "uri": self.uri,
            "bits": self.bits,
            "fingerprint": self.fingerprint,
            "model": self.model,
            "count": self.count(),
            "keyed": len(self.files()),
        }

    # Search

    def search(
        self,
        codes: ArrayLike | None = None,
        k: int = 10,
        *,
        where: Where | None = None,
        logits: ArrayLike | None = None,
        fingerprint: str | None = None,
    ) -> Matches:
        """The k nearest items of each query by (distance, id).

        Args:
            codes: (n_queries, bytes) packed codes; may be left out where there are logits.
            k: how many; reduced to the number of items that can be found.
            where: only items that match this filter.
            logits: (n_queries, bits) the queries' real outputs: a bit that differs from the sign of
                its logit then costs the absolute value of the logit, instead of 1.
            fingerprint: of the model that made the codes, to make sure that it is the index's.
        """
        k = whole_number("k", k, 1)
        self._check_model(fingerprint)
        if logits is None:
            if codes is None:
                raise UsageError("a search needs the queries' codes or their logits")
            return self._search(check_codes(codes, self.bits), None, k, parse_filter(where))
        real = np.asarray(logits)
        if real.ndim != 2 or real.shape[1] != self.bits:
            raise UsageError(f"logits must have shape (n, {self.bits}), got {real.shape}")
        queries, weights = check_codes(pack(real), self.bits), real_weights(real)
        if codes is not None and not np.array_equal(check_codes(codes, self.bits), queries):
            raise UsageError("the queries' codes are not the signs of their logits")
        found = self._search(queries, weights, k, parse_filter(where))
        return Matches(found.ids, real_distances(found.distances, weights))

    def within(
        self,
        codes: ArrayLike,
        radius: int,
        *,
        where: Where | None = None,
        fingerprint: str | None = None,
    ) -> Within:
        """Every item within a Hamming distance of each query, by (distance, id)."""
        radius = min(whole_number("radius", radius, 0), self.bits)
        self._check_model(fingerprint)
        return self._within(check_codes(codes, self.bits), radius, parse_filter(where))

    def _search(
        self, queries: Codes, weights: NDArray[np.int64] | None, k: int, where: All
    ) -> Matches:
        """The k nearest; with weights (n_queries, bits), distances are sums of whole numbers.

        The default reads all codes; a back-end replaces it if it can do better.
        """
        ids, engine = self._engine(where)
        positions, distances = engine.search(queries, k, weights=weights)
        return Matches(ids[positions], distances)

    def _within(self, queries: Codes, radius: int, where: All) -> Within:
        """See :meth:`within`; the radius is at most :attr:`bits`."""
        ids, engine = self._engine(where)
        offsets, positions, distances = engine.within(queries, radius)
        return Within(offsets, ids[positions], distances)

    def _engine(self, where: All) -> tuple[Ids, Engine]:
        none: tuple[Ids, Codes] = (as_ids(()), self._joined(()))
        parts = [none, *self._scan(self.items(where), 1 << 16)]
        ids, codes = (np.concatenate(part) for part in zip(*parts, strict=True))
        return ids, Engine(codes, self.bits)

    # What a back-end implements: health

    @abstractmethod
    def verify(self) -> list[Problem]:
        """Read and check everything; an empty list means that nothing is wrong."""

    @abstractmethod
    def close(self) -> None:
        """Release the index; a writer admits the next one. Closing again does nothing."""

    # Checks for back-ends

    def _must_write(self) -> None:
        """Refuse to change an index that was opened for reading."""
        if not self.writable:
            raise UsageError(f"{self.uri} is open for reading only; open it with write=True")

    def _check_model(self, fingerprint: str | None, *, unnamed_codes: bool = False) -> None:
        """Refuse codes of another model.

        Args:
            fingerprint: of the model that made the codes, if known.
            unnamed_codes: the codes are to be added, and the index may have codes already.
        """
        if fingerprint is None or fingerprint == self.fingerprint:
            return
        if self.fingerprint is not None:
            raise UsageError(
                f"{self.uri} holds codes of model {self.fingerprint[:12]}, these are of model "
                f"{fingerprint[:12]}. Codes of different models cannot be compared: use the "
                "index's model, or create a new index"
            )
        if unnamed_codes:
            raise UsageError(
                f"{self.uri} holds codes whose model was not named, so it is unknown whether "
                f"codes of model {fingerprint[:12]} fit; create a new index for them"
            )

    def _missing(self, name: object, then: str = "") -> UsageError:
        """The error for a key or an id that does not exist."""
        what = "key" if isinstance(name, str) else "id"
        name = name if isinstance(name, str) else int(name)  # type: ignore[call-overload]
        return UsageError(f"{self.uri} has no item with the {what} {name!r}{then}")

    def _check_entries(
        self, verb: Verb, entries: Iterable[CheckedEntry], known: Container[str]
    ) -> None:
        """Refuse entries that :meth:`_put` must not store; ``known`` holds the existing keys."""
        for entry in entries:
            if entry.key in known:
                if verb == "add":
                    raise UsageError(
                        f"{self.uri} already has an item with the key {entry.key!r}; "
                        "update it, or remove it first. Nothing was added"
                    )
            elif entry.code is None:
                raise UsageError(f"the new item {entry.key!r} has no code. Nothing was added")

    def __len__(self) -> int:
        return self.count()

    def __contains__(self, key: object) -> bool:
        return isinstance(key, str) and self.get_items([key]) != [None]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.uri!r}, bits={self.bits})"


BACKENDS: dict[str, str] = {
    "": "fisherhash.index.local:LocalIndex",
    "milvus": "fisherhash.index.milvus:MilvusIndex",
    "postgresql": "fisherhash.index.postgres:PostgresIndex",
    "ray": "fisherhash.index.cluster:ClusterIndex",
}
"""``module:Class`` of each back-end of this package by the scheme of its URIs; a path has none."""

_SCHEME = re.compile(r"([a-zA-Z][a-zA-Z0-9+.-]+)://")


def _backend(uri: Uri) -> type[Index]:
    match = _SCHEME.match(uri) if isinstance(uri, str) else None
    scheme = match[1] if match else ""
    known = dict(BACKENDS)
    if scheme not in known:
        others = importlib.metadata.entry_points(group="fisherhash.backends")
        known |= {entry.name: entry.value for entry in others}
    if scheme not in known:
        names = "".join(f" or {name}://…" for name in sorted(known) if name)
        raise UsageError(
            f"there is no index of the kind {scheme}://; give the path of a file{names}"
        )
    module, _, name = known[scheme].partition(":")
    try:
        return getattr(importlib.import_module(module), name)
    except ImportError as error:
        raise FisherhashError(f"indexes of the kind {scheme}:// cannot be used: {error}") from error
