"""One commit to an index on Milvus, in the making."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import replace

from fisherhash.codes import code_bytes
from fisherhash.errors import UsageError
from fisherhash.index.base import CannotWriteError
from fisherhash.index.checks import CheckedEntry, NoteTexts, code_rows
from fisherhash.index.items import Codes, Ids
from fisherhash.index.milvus.collection import (
    ALL_FIELDS,
    FOREVER,
    MAX_TEXT,
    NOTE,
    PAGE,
    STATE,
    MilvusException,
    MilvusRow,
    MilvusState,
    RowStore,
    key_hash,
    milvus_errors,
    one_of,
    state_row,
    visible,
)
from fisherhash.index.server import WriteCodes

_STEP = 1000
_BUFFER = 1 << 14


class Commit:
    """What a commit holds, and the rows of the next one."""

    def __init__(self, collection: RowStore, state: MilvusState) -> None:
        self._collection, self._state = collection, state
        self._width = code_bytes(state.bits)
        self._pending: list[MilvusRow] = []
        self._ended: list[MilvusRow] = []
        self._known: dict[int, MilvusRow] = {}
        self._next_row = state.next_row
        self.next_id = state.next_id

    # Reading

    def rows_of(self, keys: list[str]) -> dict[str, MilvusRow]:
        """The rows of those keys that exist."""
        found: dict[str, MilvusRow] = {}
        for start in range(0, len(keys), _STEP):
            hashes = {key_hash(key) for key in keys[start : start + _STEP] if _is_key(key)}
            rows = self._query(one_of("hash", hashes)) if hashes else []
            found |= {_key(row): row for row in rows}
        return {key: found[key] for key in keys if key in found}

    def rows_of_ids(self, ids: list[int]) -> dict[int, MilvusRow]:
        """The rows of those ids that exist."""
        wanted = [id_ for id_ in dict.fromkeys(ids) if id_ >= 0]
        parts = (wanted[start : start + _STEP] for start in range(0, len(wanted), _STEP))
        return {row.id: row for part in parts for row in self._query(one_of("id", part))}

    def notes(self) -> dict[tuple[str, str], tuple[MilvusRow, str]]:
        """All notes by kind and name: their rows and JSON texts."""
        found = {}
        for page in self._collection.pages(
            self._state.next_row, f"id == {NOTE} and {visible(self._state.commit)}", ALL_FIELDS
        ):
            for row in page:
                kind, name, text = json.loads(row.text)
                found[kind, name] = (row, text)
        return dict(sorted(found.items(), key=lambda one: ascii(one[0])))

    def _query(self, expression: str) -> list[MilvusRow]:
        return self._collection.query(
            f"id >= 0 and {visible(self._state.commit)} and {expression}", ALL_FIELDS
        )

    # Changing

    @contextlib.contextmanager
    def making(self) -> Iterator[Commit]:
        """Nothing of what is done inside is seen before the end, and then all of it."""
        uri = self._collection.place.uri
        try:
            yield self
            self._flush()
            number = self._state.commit + 1
            self._collection.replace([replace(row, died=number) for row in self._ended])
            new = replace(
                self._state,
                commit=number,
                next_row=self._next_row,
                next_id=self.next_id,
                dead=self._state.dead + len(self._ended),
            )
            self._collection.insert([state_row(new, self._width)])
        except MilvusException as error:
            with contextlib.suppress(Exception):
                recover(self._collection, self._state)
            what = str(error.message).splitlines()[0]
            raise CannotWriteError(f"{uri}: {what}", "see that the server runs") from error
        except BaseException:
            with contextlib.suppress(Exception):
                recover(self._collection, self._state)
            raise
        with contextlib.suppress(MilvusException):
            self._collection.delete([-1 - self._state.commit])

    def insert_row(self, id_: int, hash_: int, code: bytes, text: str) -> None:
        """Add a row."""
        if len(text) > MAX_TEXT:
            raise UsageError(
                f"{self._collection.place.uri}: an item or a note can have {MAX_TEXT:,} bytes at "
                f"most on Milvus, one has {len(text):,}. Nothing was added"
            )
        code = code or bytes(self._width)
        born = self._state.commit + 1
        self._pending.append(MilvusRow(self._next_row, id_, hash_, born, FOREVER, code, text))
        self._next_row += 1
        if len(self._pending) >= _BUFFER:
            self._flush()

    def ids_of(self, keys: list[str]) -> dict[str, int]:
        """The ids of those keys that exist."""
        self._known = {row.id: row for row in self.rows_of(keys).values()}
        return {_key(row): id_ for id_, row in self._known.items()}

    def insert(self, ids: Sequence[int], entries: list[CheckedEntry]) -> None:
        """Add items with keys."""
        for id_, entry in zip(ids, entries, strict=True):
            text = item_text(entry, {})
            self.insert_row(id_, key_hash(entry.key), entry.code or b"", text)

    def update(self, entries: dict[int, CheckedEntry]) -> None:
        """Change the fields that are given, of items that :meth:`ids_of` found."""
        for id_, entry in entries.items():
            old = self._known[id_]
            text = item_text(entry, json.loads(old.text))
            self._ended.append(old)
            self.insert_row(id_, key_hash(entry.key), entry.code or old.code, text)

    @contextlib.contextmanager
    def copying_codes(self) -> Iterator[WriteCodes]:
        """A bulk load of codes."""

        def write(ids: Ids, codes: Codes) -> None:
            for id_, code in zip(ids.tolist(), code_rows(codes), strict=True):
                self.insert_row(id_, 0, code, "")

        yield write

    def delete(self, keys: list[str], ids: Ids) -> dict[int, str | None]:
        """Remove items; returns the keys of those that were there, by id."""
        rows = [*self.rows_of(keys).values(), *self.rows_of_ids(ids.tolist()).values()]
        gone = {row.id: row for row in rows}
        self._ended += gone.values()
        return {id_: _key(row) if row.text else None for id_, row in gone.items()}

    def write_notes(self, notes: NoteTexts) -> None:
        """Write and remove notes."""
        known = self.notes() if notes else {}
        for (kind, name), text in notes.items():
            if (kind, name) in known:
                self._ended.append(known[kind, name][0])
            if text is not None:
                self.insert_row(NOTE, 0, b"", json.dumps([kind, name, text]))

    def _flush(self) -> None:
        self._collection.insert(self._pending)
        self._pending = []


def item_text(entry: CheckedEntry, old: dict[str, object]) -> str:
    """The fields of an item that has a key, after an entry."""
    given = {name: v for name, v in entry._asdict().items() if v is not None and name != "code"}
    for name in ("labels", "metadata") & given.keys():
        given[name] = json.loads(given[name])
    return json.dumps(old | given)


def _key(row: MilvusRow) -> str:
    return json.loads(row.text)["key"]


def _is_key(key: str) -> bool:
    try:
        key.encode(errors="surrogateescape")
    except UnicodeEncodeError:
        return False
    return True


def recover(collection: RowStore, state: MilvusState) -> None:
    """Remove what a commit that was never made left behind."""
    with milvus_errors(collection.place.uri):
        while rows := collection.query(f"born > {state.commit} and id != {STATE}", ["row"]):
            collection.delete([row["row"] for row in rows])
            if len(rows) < PAGE:
                break
        ended = f"died > {state.commit} and died < {FOREVER}"
        for page in collection.pages(state.next_row, ended, ALL_FIELDS):
            if page:
                collection.replace([replace(row, died=FOREVER) for row in page])
