"""A toy back-end for ``memory://NAME``: the whole contract in a dictionary."""

import json
import threading
from dataclasses import dataclass, field, replace

from fisherhash.errors import UsageError
from fisherhash.index.base import Index, Item, as_ids
from fisherhash.index.checks import code_rows
from fisherhash.index.filters import select


@dataclass(frozen=True)
class Commit:
    """Everything an index holds; a change replaces it as a whole."""

    bits: int
    fingerprint: str | None
    model: dict
    files: dict
    items: dict[int, Item] = field(default_factory=dict)
    notes: dict[tuple[str, str], str] = field(default_factory=dict)
    next_id: int = 0


COMMITS: dict[str, Commit] = {}


class MemoryIndex(Index):
    """An index that lives as long as its process."""

    fingerprint = property(lambda self: self._now().fingerprint)

    def __init__(self, uri, *, write):
        if uri not in COMMITS:
            raise UsageError(f"{uri} does not exist")
        self.uri, self.writable, self._closed, self._lock = uri, write, False, threading.Lock()
        self.bits, self.model = COMMITS[uri].bits, COMMITS[uri].model

    open_at = classmethod(lambda cls, uri, *, write, **_: cls(uri, write=write))
    exists_at = classmethod(lambda cls, uri: uri in COMMITS)

    @classmethod
    def create_at(cls, uri, facts, files):
        if uri in COMMITS:
            raise UsageError(f"{uri} exists already")
        COMMITS[uri] = Commit(**facts, files=files)
        return cls(uri, write=True)

    def _now(self):
        if self._closed:
            raise UsageError(f"{self.uri} was closed")
        return COMMITS[self.uri]

    def _put(self, verb, entries, notes, fingerprint):
        with self._lock:
            now, new, ids = self._now(), {}, []
            known = {item.key: item for item in now.items.values() if item.key is not None}
            self._check_entries(verb, entries, known)
            for entry in entries:
                given = {name: v for name, v in entry._asdict().items() if v is not None}
                given |= {n: json.loads(given[n]) for n in ("labels", "metadata") if n in given}
                given |= {"labels": tuple(given["labels"])} if "labels" in given else {}
                old = known.get(entry.key) or Item(now.next_id + len(new.keys() - now.items), b"")
                new[old.id] = replace(old, **given)
                ids.append(old.id)
            self._commit(now, now.items | new, notes, fingerprint)
            return as_ids(ids)

    def _put_codes(self, blocks, fingerprint):
        codes = [code for block in blocks for code in code_rows(block)]
        with self._lock:
            now = self._now()
            new = {i: Item(i, code) for i, code in enumerate(codes, now.next_id)}
            self._commit(now, now.items | new, {}, fingerprint)
            return range(now.next_id, now.next_id + len(new))

    def _load(self, items, notes, next_id):
        with self._lock:
            now, known = self._now(), {item.key for item in self._now().items.values()} - {None}
            if (items and items[0].id < now.next_id) or any(item.key in known for item in items):
                raise UsageError(f"{self.uri}: the ids and keys to load must be new, and ascend")
            self._commit(now, now.items | {i.id: i for i in items}, notes, None, next_id)

    def _remove(self, keys, ids, notes, *, missing_ok):
        with self._lock:
            now = self._now()
            known = {item.key: item.id for item in now.items.values()}
            gone = {known.get(key, key) for key in keys} | set(ids.tolist())
            if not missing_ok and (missing := gone - now.items.keys()):
                raise self._missing(missing.pop(), "; nothing was removed")
            self._commit(
                now, {i: item for i, item in now.items.items() if i not in gone}, notes, None
            )
            return len(gone & now.items.keys())

    def _commit(self, now, items, notes, fingerprint, next_id=0):
        self._check_model(fingerprint, unnamed_codes=now.next_id > 0)
        written = {name: text for name, text in (now.notes | notes).items() if text is not None}
        changes = {"items": items, "notes": written, "fingerprint": fingerprint or now.fingerprint}
        next_id = max(now.next_id, next_id, max(items, default=-1) + 1)
        COMMITS[self.uri] = replace(now, next_id=next_id, **changes)

    def get_items(self, names):
        items = self._now().items
        known = {item.key: item for item in items.values() if item.key is not None}
        return [known.get(n) if isinstance(n, str) else items.get(int(n)) for n in names]

    def items(self, where=None):
        return iter(select(self._now().items.values(), where, self.uri))

    def notes(self, kind):
        return {n: json.loads(text) for (own, n), text in self._now().notes.items() if own == kind}

    model_files = lambda self: dict(self._now().files)  # noqa: E731
    verify = lambda self: []  # noqa: E731

    def close(self):
        self._closed = True
