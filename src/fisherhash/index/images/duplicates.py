"""Groups of items whose codes are equal or nearly so, the surest first.

Near codes are candidates for duplicates, not a proof. Where their files are there, the pixels of
their thumbnails confirm them.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from fisherhash.errors import counted, printable, printable_text
from fisherhash.index.images.results import Match

Keep = Literal["first", "best"]
KEEP: tuple[Keep, ...] = ("first", "best")


class DuplicateGroup(list[Match]):
    """The items of a group. The first is the one to keep; the others have their distance from it.

    Attributes:
        span: the largest distance between any two of them.
        confirmed: whether their thumbnails show the same image; None if that was not compared.
    """

    def __init__(
        self, matches: Sequence[Match], *, span: int = 0, confirmed: bool | None = None
    ) -> None:
        super().__init__(matches)
        self.span, self.confirmed = span, confirmed

    def pairs(self) -> Iterator[DuplicateGroup]:
        """The first item with each of the others."""
        for match in self[1:]:
            span = int(match.distance)
            yield DuplicateGroup([self[0], match], span=span, confirmed=self.confirmed)

    def rank(self) -> tuple[bool, int, int, int, int]:
        """What groups are ordered by: the surest first."""
        # Where many images have equal codes, the code is more likely to say too little.
        ids = self[0].item.id, self[1].item.id
        return self.confirmed is not True, self.span, len(self), *ids


@dataclass(frozen=True)
class Duplicates:
    """Groups of likely duplicates.

    Attributes:
        index: the name of the index.
        bits: length of the codes that were compared.
        count: items in it.
        radius: bits in which any two items of a group may differ.
        groups: the items of each group, the surest group first: those that are confirmed, then by
            the largest distance in the group, then by its size. The first item of a group is the
            one to keep, and the others have their distance from it.
        compared: whether files were compared, see :attr:`Match.same_bytes`.
        pairs: whether the groups are pairs, of which several may share an item.
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
    groups: Sequence[Sequence[Match]]
    compared: bool = False
    pairs: bool = False
    comparisons: float | None = None
    distinct: int = 0
    keep: Keep = "first"
    code: str | None = None
    without_code: int = 0

    def __str__(self) -> str:
        lines = []
        for group in self.groups:
            sure = confirmed(group)
            state = "" if sure is None else ", confirmed" if sure else ", not confirmed"
            lines.append(f"{len(group)} items{state}")
            for number, match in enumerate(group):
                mark = match.same_bytes
                same = "" if mark is None else f"  same bytes ({mark + 1})"
                kept = "  keep" if self.keep == "best" and not number else ""
                lines.append(f"{match.distance:>6}  {printable(match.name)}{same}{kept}")
            lines.append("")
        return "\n".join(lines)

    def summary(self) -> str:
        """The counts in one sentence."""
        items = len({match.item.id for group in self.groups for match in group})
        codes = f"codes within {counted(self.radius, 'bit')}" if self.radius else "equal codes"
        groups = counted(len(self.groups), "pair" if self.pairs else "group")
        sentence = f"{groups} of {codes}, {items:,} of {self.count:,} items"
        if self.compared:
            copies = 0
            for group in self.groups:
                marks = [match.same_bytes for match in group if match.same_bytes is not None]
                copies += len(marks) - len(set(marks))
            sentence += f"; byte for byte copies of another file: {copies:,}"
        sure = sum(confirmed(group) is True for group in self.groups)
        if any(confirmed(group) is not None for group in self.groups):
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
        groups = []
        for group in self.groups:
            rows = [match.to_json() for match in group]
            if self.compared:
                rows = [match.to_json() | {"same_bytes": match.same_bytes} for match in group]
            about = {"size": len(group), "span": _span(group), "confirmed": confirmed(group)}
            groups.append(about | {"keep": rows[0]["key"] if rows else None, "items": rows})
        facts = {"bits": self.bits, "radius": self.radius, "count": self.count}
        facts |= {"code": self.code, "pairs": self.pairs, "comparisons": self.comparisons}
        return facts | {"groups": groups}

    def to_csv(self) -> str:
        """One line per item: group, keep, distance, span, confirmed, same_bytes, key, path."""
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        names = ("group", "keep", "distance", "span", "confirmed", "same_bytes", "key", "path")
        writer.writerow(names)
        for number, group in enumerate(self.groups, start=1):
            sure = {None: "", True: "yes", False: "no"}[confirmed(group)]
            for place, match in enumerate(group):
                same = "" if match.same_bytes is None else match.same_bytes + 1
                kept = "" if place else "yes"
                facts = (number, kept, match.distance, _span(group), sure, same)
                key, path = printable_text(match.name), printable_text(match.path or "")
                writer.writerow((*facts, key, path))
        return text.getvalue()


def confirmed(group: Sequence[Match]) -> bool | None:
    """Whether thumbnails show that a group is one image; None if they were not compared."""
    return group.confirmed if isinstance(group, DuplicateGroup) else None


def _span(group: Sequence[Match]) -> int:
    if isinstance(group, DuplicateGroup):
        return group.span
    return int(max((match.distance for match in group), default=0))


def _rounded(number: float) -> str:
    """Two digits of a number say all that is known about it.

    >>> _rounded(12_345_678.0), _rounded(1.4), _rounded(3e22)
    ('12,000,000', '1.4', '3e+22')
    """
    if number >= 1e15 or number < 10:
        return f"{number:.2g}"
    return f"{float(f'{number:.2g}'):,.0f}"
