"""The contract of every index, and the door to all of them: ``Index.open(uri)``.

Search is exact and deterministic: results are ordered by (distance, id). An index may hold a
second, finer code per item, which orders items of equal distance. Ids are whole numbers that the
index assigns when an item is added. They are never reused, stay with their item when it
is updated, and are kept by ``compact`` and by a copy to another index. A key is the user's own name
for an item. Each call that changes an index is one commit: all of it happens, or nothing does.

A back-end is a module with a class named ``backend`` that implements :class:`Index`. It is found by
the scheme of its URI (:data:`BACKEND_MODULES`, :func:`register_backend`), and imported when an
index of that scheme is first opened.
"""

from __future__ import annotations

import contextlib
import importlib
import itertools
import os
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Self, overload

import numpy as np
from numpy.typing import ArrayLike

from fisherhash.codes import check_bits, check_codes, code_bytes
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
    whole_number,
)
from fisherhash.index.filters import All, Where, parse_filter
from fisherhash.index.items import Codes, Entry, FileState, Ids, Item, Matches, Problem, Within
from fisherhash.index.ranking import (
    Ranked,
    Ranking,
    WeightedQueries,
    empty_ranked,
    merge_ranked,
    ranked_by_numpy,
    ranked_queries,
)

Uri = str | os.PathLike[str]
SaveModel = Callable[[Path], object]
"""Writes the folder of a model to a path."""
Verb = Literal["add", "update", "upsert"]
# items that a ranked search reads at once where a back-end has no way of its own
_RANK_BLOCK = 1 << 14


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


class UnknownOutcomeError(CannotWriteError):
    """The disk failed in such a way that the last change may or may not have been stored."""


class DamagedError(FisherhashError):
    """What is stored is not what was written."""


class CannotReadError(FisherhashError):
    """The system could not read a file just now; the file itself may be whole."""


class Index(ABC):
    """A collection of codes that can be searched by Hamming distance. A context manager.

    Several threads may use one object. ``where`` arguments take the filters of
    :mod:`fisherhash.index.filters`; only items with a key can match a filter.

    Attributes:
        uri: what the index was opened by.
        bits: length of its codes.
        fine_bits: length of its second codes; 0 where items have none.
        can_hold_fine: whether indexes of this kind may have second codes.
        fingerprint: of the model that made its codes, if known; codes of another are refused.
        model: a description of that model that JSON can hold.
        writable: whether it was opened for writing.
        approximate: whether searches may miss items; only where the URI asks for it.
    """

    uri: str
    bits: int
    fine_bits: int = 0
    can_hold_fine: bool = False
    fingerprint: str | None
    model: dict[str, Any]
    writable: bool
    approximate: bool = False

    # The door

    @staticmethod
    def open(uri: Uri, *, write: bool = False, skip_damaged: bool = False) -> Index:
        """Open an index for reading or, with ``write=True``, for reading and writing.

        Args:
            uri: the path of a folder, or the URI of another back-end.
            write: allow changes; most back-ends admit one writer at a time.
            skip_damaged: leave out items whose codes are damaged, instead of raising an error;
                :attr:`unavailable` counts them. For reading only.

        Raises:
            UsageError: there is no such index.
            FisherhashError: it is damaged, of a newer format, or locked by another writer.
        """
        backend = _backend(uri)
        if skip_damaged and write:
            raise UsageError("an index is only read with skip_damaged; repair it to change it")
        return backend.open_damaged_at(uri) if skip_damaged else backend.open_at(uri, write=write)

    @staticmethod
    def create(
        uri: Uri,
        *,
        bits: int,
        fine_bits: int = 0,
        fingerprint: str | None = None,
        model: Mapping[str, Any] | None = None,
        save_model: SaveModel | None = None,
    ) -> Index:
        """Create an empty index, complete or not at all, and open it for writing.

        Args:
            uri: where; there must be nothing yet.
            bits: length of its codes, 1 to 1024.
            fine_bits: length of the second code of every item; 0 for none.
            fingerprint: of the model that makes its codes.
            model: a description of that model that JSON can hold.
            save_model: writes the model's folder to a path; the index then carries its model.
        """
        backend, about = _backend(uri), dict(model or {})
        as_json(about, "the model's description")
        facts = {"bits": check_bits(bits), "fingerprint": fingerprint, "model": about}
        if fine_bits:
            if not backend.can_hold_fine:
                raise UsageError(
                    f"{uri}: an index of this kind cannot hold second codes; create it in a "
                    "folder, or with fine_bits=0"
                )
            facts["fine_bits"] = check_bits(fine_bits)
        return backend.create_at(uri, facts, save_model)

    @staticmethod
    def exists(uri: Uri) -> bool:
        """Whether there is anything at ``uri`` that only ``open`` may touch."""
        return _backend(uri).exists_at(uri)

    @staticmethod
    def may_hold_fine(uri: Uri) -> bool:
        """Whether an index at ``uri`` could have second codes, see :meth:`create`."""
        return _backend(uri).can_hold_fine

    @staticmethod
    def is_index(uri: Uri) -> bool:
        """Whether there is an index at ``uri``, even a damaged one."""
        return _backend(uri).is_index_at(uri)

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
    def open_at(cls, uri: Uri, *, write: bool) -> Self:
        """See :meth:`open`."""

    @classmethod
    def open_damaged_at(cls, uri: Uri) -> Self:
        """See :meth:`open`; a back-end that cannot leave out damaged items opens as usual."""
        return cls.open_at(uri, write=False)

    @property
    def unavailable(self) -> int | None:
        """How many items were left out because they are damaged; None where none may be."""
        return None

    @classmethod
    @abstractmethod
    def create_at(cls, uri: Uri, facts: dict[str, Any], save_model: SaveModel | None) -> Self:
        """See :meth:`create`; the facts are ``bits``, ``fingerprint`` and ``model``.

        With :attr:`can_hold_fine`, ``fine_bits`` may be among them.
        """

    @classmethod
    @abstractmethod
    def exists_at(cls, uri: Uri) -> bool:
        """See :meth:`exists`."""

    @classmethod
    def is_index_at(cls, uri: Uri) -> bool:
        """See :meth:`is_index`."""
        return cls.exists_at(uri)

    @classmethod
    def examine_at(cls, uri: Uri) -> list[Problem]:
        """See :meth:`examine`."""
        with cls.open_at(uri, write=False) as index:
            return index.verify()

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
        given, texts = self._checked(entries, notes)
        return self._put("add", given, texts, fingerprint)

    def update(
        self, entries: Iterable[Entry], *, notes: Notes = None, fingerprint: str | None = None
    ) -> Ids:
        """Change items and return their ids. If a key does not exist, nothing is changed."""
        given, texts = self._checked(entries, notes)
        return self._put("update", given, texts, fingerprint)

    def upsert(
        self, entries: Iterable[Entry], *, notes: Notes = None, fingerprint: str | None = None
    ) -> Ids:
        """Add items under new keys, update those whose keys exist, and return their ids."""
        given, texts = self._checked(entries, notes)
        return self._put("upsert", given, texts, fingerprint)

    def _checked(
        self, entries: Iterable[Entry], notes: Notes
    ) -> tuple[list[CheckedEntry], NoteTexts]:
        self._must_write()
        return check_entries(entries, self.bits, self.fine_bits), check_notes(notes)

    @abstractmethod
    def add_codes(
        self,
        codes: ArrayLike | Iterable[ArrayLike],
        *,
        fine: ArrayLike | Iterable[ArrayLike] | None = None,
        fingerprint: str | None = None,
    ) -> range:
        """Add codes in bulk, without keys: fast, and in little memory.

        Args:
            codes: (n, bytes) packed codes, perhaps a memory map, or an iterator of such blocks.
            fine: (n, fine bytes) their second codes, in the same form, where the index has those.
            fingerprint: of the model that made them.

        Returns:
            Their ids.
        """

    def add_items(
        self, items: Iterable[Item], *, notes: Notes = None, next_id: int | None = None
    ) -> None:
        """Add items of another index; they keep their ids.

        A back-end that can does all of it in one commit. The default fills gaps between the ids
        with codes that it removes again.

        Args:
            items: by ascending id, each above every id that was ever given here.
            notes: documents that are stored with the last of them.
            next_id: the least id that a new item gets afterwards.
        """
        self._must_write()
        ids = self.ids()
        free = int(ids[-1]) + 1 if len(ids) else 0
        for run in _runs(items):
            self._fill(free, run[0].id)
            if run[0].key is None:
                given = list(self._add_bulk(run))
            else:
                given = self.add(item.entry() for item in run).tolist()
            free = run[-1].id + 1
            if given != [item.id for item in run]:
                raise FisherhashError(f"{self.uri} gave other ids than those to be kept")
        self._fill(free, free if next_id is None else next_id)
        if notes:
            self.write_notes(notes)

    def _fill(self, first: int, end: int) -> None:
        """Use up ids."""
        code = bytes(code_bytes(self.bits))
        fine = bytes(code_bytes(self.fine_bits)) if self.fine_bits else None
        if end > first:
            self.remove(ids=self._add_bulk([Item(0, code, fine=fine)] * (end - first)))

    def _add_bulk(self, items: Sequence[Item]) -> range:
        codes = self._joined(item.code for item in items)
        if not self.fine_bits:
            return self.add_codes(codes)
        return self.add_codes(codes, fine=self._joined_fine(item.fine or b"" for item in items))

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
        self._put("update", *self._checked([], notes), None)

    @abstractmethod
    def compact(self, *, seconds: float | None = None) -> dict[str, int]:
        """Free the space of removed items; ids stay.

        Args:
            seconds: begin no further step after that time; the next call continues.

        Returns:
            ``dropped``, the number of codes freed, ``bytes_before`` and ``bytes_after``, and
            ``left``, the number of steps that there was no time for.
        """

    # What a back-end implements: changes

    @abstractmethod
    def _put(
        self, verb: Verb, entries: list[CheckedEntry], notes: NoteTexts, fingerprint: str | None
    ) -> Ids:
        """Add, update or upsert items and write notes, all in one commit.

        It must refuse what :meth:`_check_entries` and :meth:`_check_model` refuse.
        """

    @abstractmethod
    def _remove(self, keys: list[str], ids: Ids, notes: NoteTexts, *, missing_ok: bool) -> int:
        """Remove items and write notes, all in one commit; keys and ids may repeat each other."""

    # Content

    def reading(self) -> contextlib.AbstractContextManager[None]:
        """Calls of this thread inside may skip the look for commits after that of the first call.

        A back-end whose calls are cheap needs nothing here.
        """
        return contextlib.nullcontext()

    @abstractmethod
    def get_items(self, names: Sequence[str] | Ids) -> list[Item | None]:
        """The items of some keys or ids, all from one commit; None where there is none."""

    @abstractmethod
    def items(self, where: Where | None = None) -> Iterator[Item]:
        """All items that match a filter by ascending id, from one commit."""

    @abstractmethod
    def notes(self, kind: str) -> dict[str, Any]:
        """The documents of a kind by name, see :meth:`write_notes`."""

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
        return self._scan(whole_number("block", block, 1))

    def _scan(self, block: int) -> Iterator[tuple[Ids, Codes]]:
        items = self.items()
        parts = iter(lambda: list(itertools.islice(items, block)), [])
        return ((as_ids(i.id for i in part), self._joined(i.code for i in part)) for part in parts)

    def _joined(self, codes: Iterable[bytes]) -> Codes:
        return np.frombuffer(b"".join(codes), np.uint8).reshape(-1, code_bytes(self.bits))

    def _joined_fine(self, codes: Iterable[bytes]) -> Codes:
        return np.frombuffer(b"".join(codes), np.uint8).reshape(-1, code_bytes(self.fine_bits))

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
        """Facts that JSON can hold; ``uri bits fingerprint model count keyed`` at least."""
        return {
            "uri": self.uri,
            "bits": self.bits,
            "fine_bits": self.fine_bits,
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
        fingerprint: str | None = None,
        ranking: Ranking = "hamming",
        logits: ArrayLike | None = None,
        fine: ArrayLike | None = None,
        fine_weight: float | None = None,
    ) -> Matches:
        """The k nearest items of each query by (distance, fine distance, id), or by a sum.

        Args:
            codes: (n_queries, bytes) packed codes; in the ranking ``real`` the signs of the logits.
            k: how many; reduced to the number of items that can be found.
            where: only items that match this filter.
            fingerprint: of the model that made the codes, to make sure that it is the index's.
            ranking: ``hamming`` counts the bits that differ; in ``real`` each of them costs the
                absolute value of its logit.
            logits: (n_queries, bits) the queries' real outputs, for ``real``.
            fine: (n_queries, fine bytes) the queries' second codes, where the index has those;
                without them, items of equal distance are ordered by id alone.
            fine_weight: order by the sum of the distance and this weight times the fine distance
                instead, then by distance and id. A weight of 1 makes a bit of the second code count
                as much as one of the first.
        """
        k = whole_number("k", k, 1)
        self._check_model(fingerprint)
        queries = ranked_queries(
            *(codes, self.bits),
            ranking=ranking,
            logits=logits,
            fine=fine,
            fine_bits=self.fine_bits,
            fine_weight=fine_weight,
        )
        if queries.weights is None and fine is None:
            return self._search(queries.codes, k, parse_filter(where))
        found = self._rank(queries, k, parse_filter(where))
        fines = None if fine is None else found.fines
        return Matches(found.positions, queries.distances(found.costs), fines)

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

    def build(self) -> None:  # noqa: B027 (a back-end may have nothing to prepare)
        """Prepare what searches need now, instead of at the first search that profits from it."""

    @abstractmethod
    def _search(self, queries: Codes, k: int, where: All) -> Matches:
        """See :meth:`search`; k is at least 1."""

    def _rank(self, queries: WeightedQueries, k: int, where: All) -> Ranked:
        """The k best items of each query, with ids as positions; k is at least 1.

        The default reads all items; a back-end replaces it if it can do better.
        """
        best = empty_ranked(len(queries.codes), 0)
        items = self.items(where)
        for part in iter(lambda: list(itertools.islice(items, _RANK_BLOCK)), []):
            ids, codes = as_ids(i.id for i in part), self._joined(i.code for i in part)
            second = None
            if queries.fine is not None:
                second = self._joined_fine(i.fine or b"" for i in part)
            found = ranked_by_numpy(queries, codes, k, second)
            found = found._replace(positions=ids[found.positions])
            best = merge_ranked([best, found], queries, k)
        return best

    @abstractmethod
    def _within(self, queries: Codes, radius: int, where: All) -> Within:
        """See :meth:`within`; the radius is at most :attr:`bits`."""

    # What a back-end implements: health

    @abstractmethod
    def verify(self) -> list[Problem]:
        """Read and check everything; an empty list means that nothing is wrong."""

    @abstractmethod
    def model_folder(self) -> Path | None:
        """A folder with the model that the index carries, or None if it carries none."""

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
            elif verb == "update":
                raise self._missing(entry.key, "; nothing was changed")
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


def _runs(items: Iterable[Item]) -> Iterator[list[Item]]:
    """Items whose ids follow each other, those with a key apart from those without."""
    run: list[Item] = []
    for item in items:
        last = run[-1] if run else None
        if last and (item.id != last.id + 1 or (item.key is None) != (last.key is None)):
            yield run
            run = []
        run.append(item)
    if run:
        yield run


BACKEND_MODULES: dict[str, str] = {
    "": "fisherhash.index.local",
    "milvus": "fisherhash.index.milvus",
    "postgresql": "fisherhash.index.postgres",
    "ray": "fisherhash.index.cluster",
}
"""The module of each back-end by the scheme of its URIs; a path has none."""

_SCHEME = re.compile(r"([a-zA-Z][a-zA-Z0-9+.-]+)://")


def register_backend(scheme: str, module: str) -> None:
    """Let ``Index.open("scheme://…")`` use the class ``backend`` of a module."""
    BACKEND_MODULES[scheme] = module


def _backend(uri: Uri) -> type[Index]:
    match = _SCHEME.match(uri) if isinstance(uri, str) else None
    scheme = match[1] if match else ""
    if scheme not in BACKEND_MODULES:
        others = "".join(f" or {name}://…" for name in sorted(BACKEND_MODULES) if name)
        raise UsageError(
            f"there is no index of the kind {scheme}://; give the path of a folder{others}"
        )
    try:
        return importlib.import_module(BACKEND_MODULES[scheme]).backend
    except ImportError as error:
        raise FisherhashError(f"indexes of the kind {scheme}:// cannot be used: {error}") from error
