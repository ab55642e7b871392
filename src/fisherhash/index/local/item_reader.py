"""Items of a local index: read from the catalogue once per commit, then kept in memory."""

from __future__ import annotations

from typing import Any

from fisherhash.index.checks import as_ids, code_rows
from fisherhash.index.items import Item
from fisherhash.index.local.catalogue import Catalogue, Columns
from fisherhash.index.local.rows import decode_text, encode_text, item_of
from fisherhash.index.local.snapshot import Snapshot

MOST_ITEMS = 1 << 16
"""Items that are kept; each may be there by id and by key."""
SINGLE_READS = 64
"""Calls that had to read before more is read than they need."""
ITEMS_AHEAD, ROWS_AHEAD = 1 << 10, 1 << 13
"""Ids whose items are read, or whose rows are brought into SQLite's cache, with each later call."""


class ItemReader:
    """Reads items, and more than was requested once an index is used for many searches.

    A process that searches once reads what it needs. One that stays open would read item by item
    for a long time, because similar images have ids all over the index. So after a while each call
    that has to read also reads the next ids: their items in a small index, else their pages.

    Args:
        catalogue: has the rows.
    """

    def __init__(self, catalogue: Catalogue) -> None:
        self._catalogue = catalogue
        self._commit = self._reads = self._next = 0

    def read(self, snapshot: Snapshot, names: list[Any], *, by_key: bool) -> list[Item | None]:
        """Items by key or by id, inside a view of the snapshot's commit; None where none is."""
        found = list(map(snapshot.items.get, names))
        if all(found):
            return found
        new = list({name: None for name, item in zip(names, found, strict=True) if item is None})
        if by_key:
            stored = self._catalogue.rows("key", [encode_text(key) for key in new])
            rows = {decode_text(row[1]): row for row in stored}
            ids = {name: row[0] for name, row in rows.items()}
        else:
            rows = {row[0]: row for row in self._catalogue.rows("id", new)}
            ids = dict(zip(new, new, strict=True))
        read = _items(snapshot, ids, rows)
        if len(snapshot.items) + len(read) <= 2 * MOST_ITEMS:
            snapshot.items.update(read)
        self._read_ahead(snapshot)
        known = dict(zip(names, found, strict=True)) | read
        return list(map(known.get, names))

    def _read_ahead(self, snapshot: Snapshot) -> None:
        state = snapshot.state
        if self._commit != state.commit:
            self._commit, self._reads, self._next = state.commit, 0, 0
        self._reads += 1
        if self._reads <= SINGLE_READS or self._next >= state.next_id:
            return
        small, first = state.rows <= MOST_ITEMS, self._next
        self._next += ITEMS_AHEAD if small else ROWS_AHEAD
        if not small:
            self._catalogue.warm(first, self._next)
            return
        rows = self._catalogue.rows_where("id >= ? AND id < ?", (first, self._next))
        items = _items(snapshot, dict(zip(rows, rows, strict=True)), rows)
        snapshot.items.update(items)
        snapshot.items.update({item.key: item for item in items.values() if item.key is not None})


def _items(snapshot: Snapshot, ids: dict[Any, int], rows: dict[Any, Columns]) -> dict[Any, Item]:
    """Items under their names, from their checked rows; without those that are not there."""
    exists, records = snapshot.gather(as_ids(list(ids.values())))
    parts = zip(ids.items(), code_rows(records), exists.tolist(), strict=True)
    split = snapshot.form.split
    return {
        name: item_of(id_, rows.get(name), *split(record))
        for (name, id_), record, here in parts
        if here
    }
