"""One commit to an index in PostgreSQL, in the making."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from fisherhash.index.checks import CheckedEntry, NoteTexts
from fisherhash.index.items import Ids
from fisherhash.index.postgres.bulk import CodeWriter, bit_texts
from fisherhash.index.postgres.connect import Cursor
from fisherhash.index.postgres.place import Place
from fisherhash.index.postgres.schema import Facts
from fisherhash.index.postgres.texts import loaded_text, stored_json, stored_text
from fisherhash.index.server import WriteCodes


class TableChange:
    """One commit in the making."""

    def __init__(self, place: Place, bits: int, cursor: Cursor, facts: Facts) -> None:
        self._place, self._bits, self._cursor = place, bits, cursor
        self.next_id = facts.next_id
        self._removed = 0

    def ids_of(self, keys: list[str]) -> dict[str, int]:
        """The ids of those keys that exist."""
        self._execute(
            "SELECT key, id FROM {table} WHERE key = ANY(%s::text[])",
            [list(map(stored_text, keys))],
        )
        return {loaded_text(key): id_ for key, id_ in self._cursor}

    def insert(self, ids: Sequence[int], entries: list[CheckedEntry]) -> None:
        """Add items with keys."""
        if not entries:
            return
        bits = _bits_of(entries, self._bits)
        columns = "id, code, key, path, size, mtime_ns, labels, metadata"
        with self._cursor.copy(self._place.sql(f"COPY {{table}} ({columns}) FROM STDIN")) as copy:
            for id_, entry, code in zip(ids, entries, bits, strict=True):
                labels = _labels(entry.labels) or []
                copy.write_row(
                    (
                        id_,
                        code,
                        stored_text(entry.key),
                        None if entry.path is None else stored_text(entry.path),
                        entry.size,
                        entry.mtime_ns,
                        labels,
                        stored_json(entry.metadata or "{}"),
                    )
                )

    def update(self, entries: dict[int, CheckedEntry]) -> None:
        """Change the fields that are given."""
        if not entries:
            return
        codes = _bits_of([e for e in entries.values() if e.code is not None], self._bits)
        self._cursor.executemany(
            self._place.sql(
                f"UPDATE {{table}} SET code = coalesce(%s::bit({self._bits}), code),"
                " path = coalesce(%s, path), size = coalesce(%s::bigint, size),"
                " mtime_ns = coalesce(%s::bigint, mtime_ns),"
                " labels = coalesce(%s::text[], labels),"
                " metadata = coalesce(%s::jsonb, metadata) WHERE id = %s"
            ),
            [
                (
                    None if entry.code is None else next(codes),
                    None if entry.path is None else stored_text(entry.path),
                    entry.size,
                    entry.mtime_ns,
                    _labels(entry.labels),
                    None if entry.metadata is None else stored_json(entry.metadata),
                    id_,
                )
                for id_, entry in entries.items()
            ],
        )
        self._removed += len(entries)

    @contextlib.contextmanager
    def copying_codes(self) -> Iterator[WriteCodes]:
        """A bulk load of codes."""
        query = self._place.sql("COPY {table} (id, code) FROM STDIN (FORMAT BINARY)")
        with self._cursor.copy(query) as copy:
            writer = CodeWriter(copy, self._bits)
            yield writer.write
            writer.finish()

    def delete(self, keys: list[str], ids: Ids) -> dict[int, str | None]:
        """Remove items; returns the keys of those that were there, by id."""
        self._execute(
            "DELETE FROM {table} WHERE key = ANY(%s::text[]) OR id = ANY(%s::bigint[])"
            " RETURNING id, key",
            [list(map(stored_text, keys)), ids.tolist()],
        )
        gone = {id_: None if key is None else loaded_text(key) for id_, key in self._cursor}
        self._removed += len(gone)
        return gone

    def write_notes(self, notes: NoteTexts) -> None:
        """Write and remove notes."""
        rows = [(self._place.table, *map(stored_text, name), v) for name, v in notes.items()]
        written = [row for row in rows if row[3] is not None]
        if written:
            self._cursor.executemany(
                "INSERT INTO fisherhash_notes VALUES (%s, %s, %s, %s)"
                " ON CONFLICT (index_name, kind, name) DO UPDATE SET value = excluded.value",
                written,
            )
        if len(written) < len(rows):
            self._cursor.executemany(
                "DELETE FROM fisherhash_notes WHERE index_name = %s AND kind = %s AND name = %s",
                [row[:3] for row in rows if row[3] is None],
            )

    def finish(self, fingerprint: str | None) -> None:
        """Write what changed about the index itself."""
        self._cursor.execute(
            "UPDATE fisherhash_indexes SET next_id = %s, removed = removed + %s,"
            " fingerprint = coalesce(%s, fingerprint) WHERE name = %s",
            [self.next_id, self._removed, fingerprint, self._place.table],
        )

    def _execute(self, query: str, values: list[Any]) -> None:
        self._cursor.execute(self._place.sql(query), values)


def _labels(labels: str | None) -> list[str] | None:
    return None if labels is None else list(map(stored_text, json.loads(labels)))


def _bits_of(entries: list[CheckedEntry], bits: int) -> Iterator[str]:
    if not entries:
        return iter(())
    rows = b"".join(entry.code or b"" for entry in entries)
    codes = np.frombuffer(rows, np.uint8).reshape(len(entries), -1)
    return iter(bit_texts(codes, bits))
