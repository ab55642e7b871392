"""Groups of items whose codes are equal or nearly so, the surest first, and what to do with them.

Near codes are candidates for duplicates, not a proof. Where their files are there, the pixels of
their thumbnails confirm them.
"""

from __future__ import annotations

import csv
import io
import os
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fisherhash.errors import counted, printable, printable_text
from fisherhash.index.images.options import Keep
from fisherhash.index.images.results import Hit


@dataclass(frozen=True)
class DuplicateGroup(Sequence[Hit]):
    """Items that are likely copies. The first is to be kept; the others' distances are from it.

    Attributes:
        hits: the items.
        span: the largest distance between any two of them.
        confirmed: whether their thumbnails show the same image; None if that was not compared.
    """

    hits: tuple[Hit, ...]
    span: int = 0
    confirmed: bool | None = None

    def __len__(self) -> int:
        return len(self.hits)

    def __getitem__(self, rank: Any) -> Any:
        return self.hits[rank]

    def rank(self) -> tuple[bool, int, int, int, int]:
        """What groups are ordered by: the surest first."""
        # Where many images have equal codes, the code is more likely to say too little.
        first, second = self.hits[:2]
        return self.confirmed is not True, self.span, len(self), first.id, second.id

    def to_json(self) -> dict[str, Any]:
        """The group as JSON can hold it."""
        rows = [hit.to_json() | {"same_bytes": hit.same_bytes} for hit in self.hits]
        facts = {"size": len(self), "span": self.span, "confirmed": self.confirmed}
        return facts | {"keep": self.hits[0].key, "items": rows}


@dataclass(frozen=True)
class Duplicates:
    """Groups of likely duplicates.

    Attributes:
        index: the name of the index.
        bits: length of the codes that were compared.
        count: items that have such a code.
        radius: bits in which any two items of a group may differ.
        groups: the surest first: those that are confirmed, then by span, then by size.
        folder: the folder that the index is in sync with.
        compared: whether files were compared, see :attr:`Hit.same_bytes`.
        comparisons: in how many comparisons one false pair is expected; None if it is not known.
        distinct: different codes among the items.
        keep: which item of a group comes first: the ``first`` added, or the ``best``.
        code: the built-in hasher of the codes that were compared; None for another one.
        without_code: items of the index that have no such code, because their files cannot be read.
    """

    index: str
    bits: int
    count: int
    radius: int
    groups: Sequence[DuplicateGroup]
    folder: str | None = None
    compared: bool = False
    comparisons: float | None = None
    distinct: int = 0
    keep: Keep = "first"
    code: str | None = None
    without_code: int = 0

    def __str__(self) -> str:
        lines = []
        for group in self.groups:
            state = {None: "", True: ", confirmed", False: ", not confirmed"}[group.confirmed]
            lines.append(f"{len(group)} items{state}")
            for number, hit in enumerate(group):
                same = "" if hit.same_bytes is None else f"  same bytes ({hit.same_bytes + 1})"
                kept = "  keep" if self.keep == "best" and not number else ""
                lines.append(f"{hit.distance:>6}  {printable(hit.name)}{same}{kept}")
            lines.append("")
        return "\n".join(lines)

    def summary(self) -> str:
        """The counts in one sentence."""
        items = len({hit.id for group in self.groups for hit in group})
        codes = f"codes within {counted(self.radius, 'bit')}" if self.radius else "equal codes"
        groups = counted(len(self.groups), "group")
        sentence = f"{groups} of {codes}, {items:,} of {self.count:,} items"
        if self.compared:
            copies = 0
            for group in self.groups:
                marks = [hit.same_bytes for hit in group if hit.same_bytes is not None]
                copies += len(marks) - len(set(marks))
            sentence += f"; byte for byte copies of another file: {copies:,}"
        sure = sum(group.confirmed is True for group in self.groups)
        if any(group.confirmed is not None for group in self.groups):
            sentence += f"; confirmed by their pixels: {sure:,}"
        if self.groups and sure < len(self.groups):
            alike = "Equal or near" if self.radius else "Equal"
            sentence += f". {alike} codes are candidates, not a proof: look before you delete"
        return sentence

    def expectation(self) -> str | None:
        """What the radius lets through by chance, in one sentence; None if it is not known."""
        if self.comparisons is None or self.distinct < 2:
            return None
        pairs = self.distinct * (self.distinct - 1) // 2
        expected = pairs / self.comparisons
        amount = "less than one" if expected < 1 else f"about {expected:,.0f}"
        return (
            f"Within {counted(self.radius, 'bit')} of {self.bits}, expect one false pair in about "
            f"{_rounded(self.comparisons)} comparisons: {amount} among the {pairs:,} pairs of "
            "different codes here"
        )

    def to_json(self) -> dict[str, Any]:
        """The groups as JSON can hold them."""
        facts = {"bits": self.bits, "radius": self.radius, "count": self.count}
        facts |= {"code": self.code, "comparisons": self.comparisons}
        return facts | {"groups": [group.to_json() for group in self.groups]}

    def to_csv(self) -> str:
        """One line per item: group, keep, distance, span, confirmed, same_bytes, key, path."""
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        names = ("group", "keep", "distance", "span", "confirmed", "same_bytes", "key", "path")
        writer.writerow(names)
        for number, group in enumerate(self.groups, start=1):
            sure = {None: "", True: "yes", False: "no"}[group.confirmed]
            for rank, hit in enumerate(group):
                same = "" if hit.same_bytes is None else hit.same_bytes + 1
                kept = "" if rank else "yes"
                key, path = printable_text(hit.name), printable_text(hit.path or "")
                writer.writerow((number, kept, hit.distance, group.span, sure, same, key, path))
        return text.getvalue()


def _rounded(number: float) -> str:
    """Two digits of a number say all that is known about it.

    >>> _rounded(12_345_678.0), _rounded(1.4), _rounded(3e22)
    ('12,000,000', '1.4', '3e+22')
    """
    if number >= 1e15 or number < 10:
        return f"{number:.2g}"
    return f"{float(f'{number:.2g}'):,.0f}"


_HEAD = """\
#!/bin/sh
# Moves duplicates to {target}
# The first image of each group stays. No file is deleted, and none is overwritten.
# Groups that are not confirmed are commented out. Read this file, then run it: sh {script}
set -eu
"""


def moves_script(found: Duplicates, target: str | os.PathLike[str], *, script: str = "FILE") -> str:
    """The moves as a POSIX shell script: all but the first image of each group.

    Nothing here moves or deletes a file. A file keeps its path inside the synced folder; one from
    elsewhere keeps its name and gets its id in front. An image that is in several groups is moved
    once. Groups that are not confirmed are commented out. Symbolic links stay, and so does the file
    that a kept one points to.

    Args:
        found: the groups.
        target: the folder to move to; the script creates it.
        script: the name of the script, for its own first lines.
    """
    root = Path(os.path.abspath(target))
    lines = [_HEAD.format(target=printable(str(root)), script=shlex.quote(printable(script)))]
    kept = {os.path.realpath(group[0].path) for group in found.groups if group[0].path}
    for number, group in enumerate(found.groups, start=1):
        sure = group.confirmed is not False
        state = "" if sure else ", not confirmed"
        lines.append(
            f"\n# group {number}: {counted(len(group), 'image')} within "
            f"{counted(int(max(hit.distance or 0 for hit in group)), 'bit')}{state}\n"
            f"# keep {printable(group[0].path or group[0].name)}\n"
        )
        for hit in group[1:]:
            if hit.path is None:
                continue
            if os.path.islink(hit.path) or os.path.realpath(hit.path) in kept:
                what = "a link, or what the kept link points to"
                lines.append(f"# not moved, {what}: {printable(hit.path)}\n")
                continue
            to = root / _inside(hit.path, found.folder, hit.id)
            here, there, above = map(shlex.quote, (hit.path, str(to), str(to.parent)))
            command = f"mkdir -p -- {above} && mv -n -- {here} {there}\n"
            # A name may hold a line break, which would end the comment.
            lines += [command] if sure else [f"# {line}\n" for line in command.splitlines()]
    return "".join(lines)


def _inside(path: str, folder: str | None, number: int) -> str:
    """Where a file goes inside the target folder."""
    if folder is not None:
        inside = os.path.relpath(path, folder)
        if not inside.startswith(os.pardir) and not os.path.isabs(inside):
            return inside
    return f"{number}-{os.path.basename(path)}"
