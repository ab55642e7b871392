"""The last few filters with their items, kept over commits that do not touch these items.

Every commit stores, beside its state, the ids that it and the commits just before it touched. A
filter that was evaluated at an earlier commit is evaluated again for those ids only.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fisherhash.index.items import Codes, Ids
from fisherhash.index.local.runs import id_runs
from fisherhash.index.local.snapshot import Subset
from fisherhash.system.memory import available_memory

RECENT = "recent"
_MAX_SUBSETS = 8
_MAX_COMMITS = 64
_MAX_RUNS = 128
_SMALL_BYTES = 64 << 20

Touched = list[tuple[int, int]]
"""Ranges of ids, each from its first id to the one behind its last."""


def note_commit(recent: Mapping[str, Any] | None, commit: int, ids: Ids) -> dict[str, Any]:
    """The list of recent commits after one more, which touched ``ids``.

    >>> note_commit(None, 7, np.array([3, 4, 9]))
    {'commits': [[7, [[3, 5], [9, 10]]]]}
    """
    starts, lengths = id_runs(np.unique(ids))
    runs = np.stack([starts, starts + lengths], axis=1).tolist()
    entries = list(recent["commits"]) if recent and _follows(recent, commit) else []
    # Too many to be worth a list: what was known before cannot be carried over this commit.
    entries = [*entries, [commit, runs]] if len(runs) <= _MAX_RUNS else [[commit, None]]
    total = 0
    for number, (_, some) in enumerate(reversed(entries)):
        total += len(some or ())
        if total > _MAX_RUNS or number == _MAX_COMMITS:
            entries = entries[len(entries) - number :]
            break
    return {"commits": entries}


def _follows(recent: Mapping[str, Any], commit: int) -> bool:
    return bool(recent["commits"]) and recent["commits"][-1][0] == commit - 1


def touched_since(recent: Mapping[str, Any] | None, before: int, now: int) -> Touched | None:
    """Ids that the commits after ``before`` up to ``now`` touched; None if that is not known."""
    if before > now or not recent:
        return None
    try:
        entries = {int(commit): runs for commit, runs in recent["commits"]}
        found = [entries[commit] for commit in range(before + 1, now + 1)]
        if any(runs is None for runs in found):
            return None
        ranges = [(int(first), int(end)) for runs in found for first, end in runs]
        return ranges if len(ranges) <= _MAX_RUNS else None
    except (KeyError, TypeError, ValueError, OverflowError):
        return None


class _Kept(NamedTuple):
    commit: int
    subset: Subset


class SubsetCache:
    """Subsets by the text of their filters."""

    def __init__(self) -> None:
        self._kept: dict[str, _Kept] = {}

    def clear(self) -> None:
        """Forget all."""
        self._kept.clear()

    def get(
        self,
        name: str,
        commit: int,
        *,
        recent: Callable[[], Mapping[str, Any] | None],
        matching: Callable[[Touched | None], Ids],
        gather: Callable[[Ids], Codes],
        make: Callable[[Ids, Codes], Subset],
    ) -> Subset:
        """The items that match a filter at a commit.

        Args:
            name: the filter as text.
            commit: the commit.
            recent: reads the list of recent commits.
            matching: the ids that match; of these ranges only, if there are any given.
            gather: the codes of ids.
            make: a subset of ids and codes.
        """
        kept = self._kept.pop(name, None)
        if kept is None or kept.commit != commit:
            old = None if kept is None else kept.subset
            touched = None if kept is None else touched_since(recent(), kept.commit, commit)
            subset = self._after(old, touched, matching, gather, make)
            kept = _Kept(commit, subset)
        self._kept[name] = kept
        # The newest stays, whatever its size: it is about to be searched.
        while len(self._kept) > 1 and (len(self._kept) > _MAX_SUBSETS or self._is_large()):
            del self._kept[next(iter(self._kept))]
        return kept.subset

    def _is_large(self) -> bool:
        """Whether the subsets take more than a quarter of the memory that is free."""
        total = sum(one.subset.bytes for one in self._kept.values())
        # Asking the system takes as long as a small search.
        if total <= _SMALL_BYTES:
            return False
        free = available_memory()
        return free is not None and 4 * total > free

    @staticmethod
    def _after(
        old: Subset | None,
        touched: Touched | None,
        matching: Callable[[Touched | None], Ids],
        gather: Callable[[Ids], Codes],
        make: Callable[[Ids, Codes], Subset],
    ) -> Subset:
        if old is None or touched is None:
            ids = matching(None)
            return make(ids, gather(ids))
        new = matching(touched)
        stays = ~_inside(old.ids, touched)
        if stays.all() and not len(new):
            return old
        ids = np.union1d(old.ids[stays], new)
        return make(ids, gather(ids))


def _inside(ids: Ids, ranges: Sequence[tuple[int, int]]) -> NDArray[np.bool_]:
    found = np.zeros(len(ids), dtype=bool)
    for first, end in ranges:
        found[np.searchsorted(ids, first) : np.searchsorted(ids, end)] = True
    return found


def in_ranges(ranges: Touched) -> tuple[str, list[int]]:
    """A condition of SQL for ids in any of some ranges, with its values."""
    parts = " OR ".join(["id BETWEEN ? AND ?"] * len(ranges)) or "0"
    return f"({parts})", [value for first, end in ranges for value in (first, end - 1)]
