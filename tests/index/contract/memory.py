"""A toy back-end for ``memory://NAME``: the whole contract in a dictionary and brute force."""

import json
import tempfile
import threading
from dataclasses import dataclass, field, replace
from pathlib import Path

from fisherhash.errors import UsageError
from fisherhash.index.base import Index, Item, Matches, Within, as_ids, register_backend
from fisherhash.index.checks import code_pairs
from fisherhash.index.engine import small
from fisherhash.index.filters import select


@dataclass(frozen=True)
class Commit:
    """Everything an index holds; a change replaces it as a whole."""

    bits: int
    fingerprint: str | None
    model: dict
    folder: Path | None
    fine_bits: int = 0
    items: dict[int, Item] = field(default_factory=dict)
    notes: dict[tuple[str, str], str] = field(default_factory=dict)
    next_id: int = 0


COMMITS: dict[str, Commit] = {}


class MemoryIndex(Index):
    """An index that lives as long as its process."""

    fingerprint = property(lambda self: self._now().fingerprint)
    can_hold_fine = True

    def __init__(self, uri, *, write):
        if uri not in COMMITS:
            raise UsageError(f"{uri} does not exist")
        self.uri, self.writable, self._closed, self._lock = uri, write, False, threading.Lock()
        now = COMMITS[uri]
        self.bits, self.fine_bits, self.model = now.bits, now.fine_bits, now.model

    open_at = classmethod(lambda cls, uri, *, write: cls(uri, write=write))
    exists_at = classmethod(lambda cls, uri: uri in COMMITS)

    @classmethod
    def create_at(cls, uri, facts, save_model):
        if uri in COMMITS:
            raise UsageError(f"{uri} exists already")
        folder = Path(tempfile.mkdtemp()) / "model" if save_model else None
        if save_model:
            save_model(folder)
        COMMITS[uri] = Commit(**facts, folder=folder)
        return cls(uri, write=True)

    def _now(self):
        if self._closed:
            raise UsageError(f"{self.uri} was closed")
        return COMMITS[self.uri]

    def _put(self, verb, entries, notes, fingerprint):
        with self._lock:
            now = self._now()
            known = {item.key: item for item in now.items.values() if item.key is not None}
            self._check_entries(verb, entries, known)
            items, next_id, ids = dict(now.items), now.next_id, []
            for entry in entries:
                given = {name: v for name, v in entry._asdict().items() if v is not None}
                for name in ("labels", "metadata") & given.keys():
                    given[name] = json.loads(given[name])
                if "labels" in given:
                    given["labels"] = tuple(given["labels"])
                old = known.get(entry.key)
                item = Item(id=next_id, **given) if old is None else replace(old, **given)
                next_id += old is None
                items[item.id] = item
                ids.append(item.id)
            self._commit(now, items, next_id, notes, fingerprint)
            return as_ids(ids)

    def add_codes(self, codes, *, fine=None, fingerprint=None):
        self._must_write()
        with self._lock:
            now = self._now()
            pairs = code_pairs(codes, fine, self.bits, self.fine_bits)
            rows = [(a.tobytes(), b.tobytes()) for one in pairs for a, b in zip(*one, strict=True)]
            new = {i: Item(i, a, fine=b or None) for i, (a, b) in enumerate(rows, now.next_id)}
            ids = range(now.next_id, now.next_id + len(rows))
            self._commit(now, now.items | new, ids.stop, {}, fingerprint)
            return ids

    def _remove(self, keys, ids, notes, *, missing_ok):
        with self._lock:
            now = self._now()
            known = {item.key: item.id for item in now.items.values()}
            gone = {known.get(key, key) for key in keys} | set(ids.tolist())
            if not missing_ok and (missing := gone - now.items.keys()):
                raise self._missing(missing.pop(), "; nothing was removed")
            left = {id_: item for id_, item in now.items.items() if id_ not in gone}
            self._commit(now, left, now.next_id, notes, None)
            return len(now.items) - len(left)

    def _commit(self, now, items, next_id, notes, fingerprint):
        self._check_model(fingerprint, unnamed_codes=now.next_id > 0)
        written = {name: text for name, text in (now.notes | notes).items() if text is not None}
        changes = {"items": items, "next_id": next_id, "notes": written}
        COMMITS[self.uri] = replace(now, fingerprint=fingerprint or now.fingerprint, **changes)

    def compact(self, *, seconds=None):
        self._must_write()
        return {"dropped": 0, "bytes_before": 0, "bytes_after": 0, "left": 0}

    def get_items(self, names):
        items = self._now().items
        known = {item.key: item for item in items.values() if item.key is not None}
        return [known.get(n) if isinstance(n, str) else items.get(int(n)) for n in names]

    def items(self, where=None):
        return iter(select(self._now().items.values(), where, self.uri))

    def notes(self, kind):
        return {n: json.loads(text) for (own, n), text in self._now().notes.items() if own == kind}

    def _search(self, queries, k, where):
        ids = self.ids(where)
        places, distances = small.nearest_by_numpy(queries, self.codes(ids), self.bits, k)
        return Matches(ids[places], distances)

    def _within(self, queries, radius, where):
        ids = self.ids(where)
        found = small.within_by_numpy(queries, self.codes(ids), self.bits, radius)
        return Within(found[0], ids[found[1]], found[2])

    def verify(self):
        return []

    def model_folder(self):
        return self._now().folder

    def close(self):
        self._closed = True


backend = MemoryIndex
# By name: test tools may load this file a second time under another one.
register_backend("memory", "memory")
