"""Compaction in steps: each replaces neighbouring code files by one, in a commit of its own.

A step needs as much room as the files that it replaces, at most ``change.MAX_LENGTH`` codes. It is
skipped where the result would be larger. An interrupted compaction keeps the steps it made.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from fisherhash.index.items import Codes, Ids
from fisherhash.index.local import change as changes
from fisherhash.index.local.change import Change
from fisherhash.index.local.runs import RunsWriter
from fisherhash.index.local.segments import Segment
from fisherhash.index.local.snapshot import Snapshot

_STEP = 1 << 22
_LAST = 1 << 62


class Group(NamedTuple):
    """Neighbouring files that one step replaces.

    Attributes:
        base: the files, by ascending first id.
        first: ids from here on are in them, or in loose files with their updates.
        end: ids before this one.
    """

    base: tuple[Segment, ...]
    first: int
    end: int


def next_group(snapshot: Snapshot, first: int) -> Group | None:
    """The files from id ``first`` on that the next step looks at; None behind the last.

    Args:
        snapshot: the last commit.
        first: where the step before ended.
    """
    # Ids that the step before left belong to it, even if its file begins later now.
    left = [segment for segment in snapshot.base if segment.row.first_id >= first]
    if first and not left:
        return None
    base, length = [], 0
    for segment in left:
        if base and length + segment.row.length > changes.MAX_LENGTH:
            return Group(tuple(base), first, segment.row.first_id)
        base.append(segment)
        length += segment.row.length
    return Group(tuple(base), first, _LAST)


def group_blocks(snapshot: Snapshot, group: Group) -> Iterator[tuple[Ids, Codes]]:
    """Ids and codes of all items of a group, by ascending id."""
    return snapshot.scan_part(group.base, _STEP, group.first, group.end)


def plan_group(snapshot: Snapshot, group: Group, width: int) -> RunsWriter | None:
    """The ids that the group's new file will hold; None if it would be larger, or is not needed."""
    updates = sum(len(one.places_between(group.first, group.end)) for one in snapshot.loose)
    if not updates and len(group.base) < 2 and not any(one.row.removed for one in group.base):
        return None
    runs = RunsWriter()
    for ids, _ in group_blocks(snapshot, group):
        runs.add(ids)
    after = runs.count * width + (len(runs.encode()) if runs.has_gaps() else 0)
    before = sum(file.size for one in group.base for file, _ in one.files)
    return runs if after <= before + updates * (width + 8) else None


def rewrite_group(change: Change, group: Group, runs: RunsWriter) -> set[int]:
    """Do one step; returns the numbers of the files that are no longer needed after the commit."""
    snapshot = change.before
    change.rewrite(group.base, runs, group_blocks(snapshot, group))
    gone = {segment.row.number for segment in group.base}
    for segment in snapshot.loose:
        places = np.sort(segment.places_between(group.first, group.end))
        if len(places) == segment.live:
            change.drop(segment)
            gone.add(segment.row.number)
        elif len(places):
            change.mark(segment, places)
    return gone
