"""Copies of an index from any back-end to any other: ids, keys, fields, notes and the model."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from fisherhash.errors import FisherhashError, UsageError
from fisherhash.index.base import Index, Uri
from fisherhash.index.items import Item
from fisherhash.system.progress import progress

NOTE_KINDS = ("sync", "skipped", "ctime")
"""Kinds of notes that are copied: those of an index of images."""
STEP = 1 << 15
"""Items in one commit of a copy."""
_SAMPLE = 64
_KIND = "copy"


@dataclass(frozen=True)
class CopyReport:
    """What a copy did.

    Attributes:
        target: the copy.
        count: items in it.
        copied: those that this run copied; the others were there already.
        checked: items and searches that were compared with the original.
    """

    target: str
    count: int
    copied: int
    checked: int

    def to_json(self) -> dict[str, Any]:
        """The report as JSON can hold it."""
        return asdict(self)


def copy_index(source: Uri, target: Uri, *, kinds: Sequence[str] = NOTE_KINDS) -> CopyReport:
    """Copy an index, between back-ends too; ids stay. If interrupted, the same call continues.

    Args:
        source: the index, as of its last commit.
        target: where; there must be nothing yet, or an unfinished copy of the same index.
        kinds: kinds of notes to copy.

    Raises:
        UsageError: there is no index, or ``target`` holds something else.
        FisherhashError: the copy is not what it was copied from, or one of both failed.
    """
    with Index.open(source) as old, _opened(old, target) as new:
        noted = new.notes(_KIND)["progress"]
        last, before, sample = int(noted["last"]), len(new), _Sample()
        with progress(f"copying {source}", len(old)) as advance:
            advance(before)
            items = (item for item in old.items() if item.id > last)
            for part in iter(lambda: list(itertools.islice(items, STEP)), []):
                new.load(part, notes={_KIND: {"progress": noted | {"last": part[-1].id}}})
                sample.add(part)
                advance(len(part))
        notes = {kind: old.notes(kind) for kind in kinds}
        new.load([], notes=notes, next_id=old.info().get("next_id"))
        checked = _compare(old, new, before + sample.seen, sample.items)
        # Last: a copy that ends before this point is continued.
        new.write_notes({_KIND: {"progress": None}})
        return CopyReport(new.uri, len(new), sample.seen, checked)


def _opened(old: Index, target: Uri) -> Index:
    """A new index like the old one, or an unfinished copy of it."""
    about = {"from": old.uri, "count": len(old), "fingerprint": old.fingerprint}
    if not Index.exists(target):
        facts = {"fingerprint": old.fingerprint, "model": old.model, "files": old.model_files()}
        new = Index.create(target, bits=old.bits, **facts)
        new.write_notes({_KIND: {"progress": about | {"last": -1}}})
        return new
    new = Index.open(target, write=True)
    noted = new.notes(_KIND).get("progress")
    if noted is None or {name: noted.get(name) for name in about} != about:
        new.close()
        what = "exists already" if noted is None else f"holds an unfinished copy of {noted['from']}"
        raise UsageError(
            f"{target} {what}, or {old.uri} changed since that copy began; give another target, "
            "or remove it first"
        )
    return new


class _Sample:
    """Some of many items, evenly: every item has the same chance."""

    def __init__(self) -> None:
        self.seen = 0
        self.items: list[Item] = []
        self._rng = np.random.default_rng(0)

    def add(self, items: list[Item]) -> None:
        for item in items:
            self.seen += 1
            if len(self.items) < _SAMPLE:
                self.items.append(item)
            elif (chosen := int(self._rng.integers(self.seen))) < _SAMPLE:
                self.items[chosen] = item


def _compare(old: Index, new: Index, expected: int, sample: list[Item]) -> int:
    """Compare counts, a sample of items, and answers to a sample of searches."""
    wrong = FisherhashError(
        f"{new.uri} is not what was copied from {old.uri}; remove it and copy again"
    )
    if len(new) != expected or new.get_items(np.array([i.id for i in sample])) != sample:
        raise wrong
    approximate = old.approximate or new.approximate
    if not sample or approximate or not np.array_equal(old.ids(), new.ids()):
        # Or another process changed the original meanwhile; the copy holds what it was.
        return len(sample)
    codes = np.frombuffer(b"".join(item.code for item in sample), np.uint8)
    queries = codes.reshape(len(sample), -1)
    if old.search(queries, 10).to_list() != new.search(queries, 10).to_list():
        raise wrong
    return 2 * len(sample)
