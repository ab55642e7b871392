"""Where DFH stands in a column of a table, and the sentence that says so."""

from __future__ import annotations

import math
from dataclasses import dataclass

from fisherhash.experiments.significance import Difference


@dataclass(frozen=True)
class ColumnPlace:
    """Where a row of DFH stands at one code length, in one ranking.

    Attributes:
        ranking: the key of the ranking in a run.
        bits: the code length.
        row: the row of DFH that held-out images prefer.
        rival: the row of another method with the highest mean.
        gap: how far the row is ahead of the rival.
        highest: whether the row has the highest mean of all.
        rows_ahead: rows of other methods that a test says are ahead of it.
        rows_level: rows of other methods that no test tells from it.
        untested: rows with one seed, which no test compares.
        tested: whether there are enough seeds for a test at all.
        seeds: how many seeds there are, where some are missing.
        paper: the number that the paper prints, where it is comparable.
        gap_to_paper: points above that number.
    """

    ranking: str
    bits: int
    row: str
    rival: str
    gap: Difference
    highest: bool = False
    rows_ahead: tuple[str, ...] = ()
    rows_level: tuple[str, ...] = ()
    untested: tuple[str, ...] = ()
    tested: bool = True
    seeds: str = ""
    paper: float | None = None
    gap_to_paper: float = math.nan

    @property
    def verdict(self) -> str:
        """One word: first, level or behind; highest or lower where no test can say."""
        if self.rows_ahead:
            return "behind"
        if not self.tested or self.rival in self.untested:
            return "highest" if self.gap.mean >= 0 else "lower"
        return "level" if self.rows_level else "first"

    @property
    def sentence(self) -> str:
        """Where the row stands, with every row that is ahead of it and every one that is level."""
        text = self._if_higher if self.gap.mean >= 0 else self._if_lower
        text += f" ({self.seeds})" if self.seeds else ""
        if self.paper is not None:
            number = f"the paper's {self.paper:.3f}"
            missed = f"; it MISSES {number} by {-self.gap_to_paper:.1f} points"
            text += missed if self.gap_to_paper < 0 else f"; it reaches {number}"
        where = "" if self.ranking == "evaluation" else ", real-valued queries"
        return f"{self.bits} bits{where}: {self.row} {text}."

    @property
    def _if_higher(self) -> str:
        ahead = f"{points(self.gap)} ahead of {self.rival}"
        if not self.tested:
            text = f"has the highest mean, {ahead}" if self.highest else f"is {ahead}"
            return f"{text} (one seed, no test)"
        text = f"is first, {ahead}"
        if self.rows_level:
            text = "has the highest mean and " * self.highest
            text += f"is level with {', '.join(self.rows_level)} ({ahead})"
        return text + self._rest

    @property
    def _if_lower(self) -> str:
        if not self.tested:
            return f"is {points(self.gap)} behind {self.rival} (one seed, no test)"
        places = [f"behind {', '.join(self.rows_ahead)}"] * bool(self.rows_ahead)
        places += [f"level with {', '.join(self.rows_level)}"] * bool(self.rows_level)
        places += ["ahead of all rows that have more than one seed"] * (not places)
        higher = f"the mean of {self.rival} is {points(self.gap)} higher"
        return f"is {' and '.join(places)}; {higher}{self._rest}"

    @property
    def _rest(self) -> str:
        return f" ({', '.join(self.untested)}: one seed, no test)" if self.untested else ""


def points(gap: Difference) -> str:
    """Return the size of a difference in points, with its interval.

    >>> points(Difference(-0.0123, 0.004))
    '1.2 ± 0.4 points'
    """
    size = f"{100 * abs(gap.mean):.1f}"
    return f"{size} ± {100 * gap.half:.1f} points" if math.isfinite(gap.half) else f"{size} points"


def signed(gap: Difference) -> str:
    """Return a difference in points with its sign and its interval.

    >>> signed(Difference(0.0123, 0.004))
    '+1.2 ± 0.4'
    """
    interval = f" ± {100 * gap.half:.1f}" if math.isfinite(gap.half) else ""
    return f"{100 * gap.mean:+.1f}{interval}"
