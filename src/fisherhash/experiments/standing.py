"""The scores of a table's rows, which row is best, and sentences about it."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise, product
from typing import Any

from fisherhash.errors import counted

HAMMING_RANKING = "Hamming distance"
WITHIN = "within the combined standard error"


@dataclass(frozen=True)
class Score:
    """A row's runs at one code length.

    Attributes:
        values: mAP per seed, expected over tie order.
        stable: mean mAP with ties in database order; None where there is none.
        lower: mean of the smallest mAP that ties allow; None where there is none.
        upper: mean of the largest.
        paper: the paper's number.
        defined: False where the method is not defined for the data.
        hamming: False where codes were not ranked by Hamming distance.
        failed: the errors of its failed runs.
    """

    values: tuple[float, ...] = ()
    stable: float | None = None
    lower: float | None = None
    upper: float | None = None
    paper: float | None = None
    defined: bool = True
    hamming: bool = True
    failed: tuple[str, ...] = ()

    @property
    def mean(self) -> float:
        """Mean over the seeds; NaN where nothing ran."""
        return statistics.mean(self.values) if self.values else math.nan

    @property
    def error(self) -> float:
        """Standard error of the mean; 0 with fewer than two seeds."""
        many = len(self.values)
        return statistics.stdev(self.values) / math.sqrt(many) if many > 1 else 0.0

    @property
    def gap_to_paper(self) -> float:
        """Points above the paper's number; NaN where either is missing."""
        return math.nan if self.paper is None else 100 * (self.mean - self.paper)

    def near(self, other: Score) -> bool:
        """Return whether it has several seeds and is within the error of another."""
        return bool(self.error) and self.within_error(other)

    def within_error(self, other: Score) -> bool:
        """Return whether the two means differ by at most their combined standard error."""
        return abs(self.mean - other.mean) <= math.hypot(self.error, other.error)


class Standing:
    """The scores of one part of a table.

    Args:
        part: the part's content, from a table's JSON.

    Attributes:
        scores: by row name and code length.
        rivals: the scores of the rows that compete; a row that repeats another row's codes with
            real-valued queries does not.
    """

    def __init__(self, part: Mapping[str, Any]) -> None:
        self.part = part
        self.scores = {
            (row["name"], bits): _score(part, row, number)
            for row in part["rows"]
            for number, bits in enumerate(part["bits"])
        }
        beside = {row["name"] for row in part["rows"] if row.get("real_queries_of")}
        self.rivals = {key: score for key, score in self.scores.items() if key[0] not in beside}

    def best(self, bits: int, *, hamming: bool | None = None) -> str | None:
        """Return the best row at a code length.

        Args:
            bits: the code length.
            hamming: True for the best of the rows that are ranked by Hamming distance, False for
                the best of the others.
        """
        means = {
            name: score.mean
            for (name, length), score in self.rivals.items()
            if length == bits and score.values and hamming in (None, score.hamming)
        }
        return max(means, key=lambda name: means[name], default=None)

    def near_best(self, name: str, bits: int) -> bool:
        """Return whether a competing row of several seeds is within the error of the best."""
        score, first = self.rivals.get((name, bits)), self.best(bits)
        return score is not None and first is not None and score.near(self.rivals[first, bits])

    def verdicts(self, target: str) -> list[str]:
        """Return sentences: is DFH best, are the paper's numbers and its order reached."""
        said = []
        if target != "compare" and any(score.values for score in self.rivals.values()):
            order = target == "table1"
            said = [self._order(bits) for bits in self.part["bits"]] if order else self._contest()
        return said + [
            f"{name}, {bits} bits: {counted(len(score.failed), 'run')} failed: {score.failed[0]}."
            for (name, bits), score in self.rivals.items()
            if score.failed
        ]

    def _contest(self) -> list[str]:
        """Where DFH stands at each code length, and which rows are below the paper's numbers."""
        rows = [row for row in self.part["rows"] if not row.get("real_queries_of")]
        own = [row["name"] for row in rows if row["method"] == "dfh"]
        others = [row["name"] for row in rows if row["method"] != "dfh"]
        if not own or not others:
            return []
        said = [
            self._place(own, others, bits)
            for bits in self.part["bits"]
            if any(self.rivals[name, bits].values for name in own)
        ]
        missed = [
            f"{name} at {bits} bits ({gap:+.1f} points)"
            for name, bits in product(others, self.part["bits"])
            if (gap := self.rivals[name, bits].gap_to_paper) < 0
        ]
        if missed and not self.part["stands_in"]:
            said.append(f"Below the paper's own number: {', '.join(missed)}.")
        return said

    def _place(self, own: Sequence[str], others: Sequence[str], bits: int) -> str:
        """Where the best row of DFH stands at a code length at which one was run."""
        ran = [name for name in own if self.rivals[name, bits].values]
        top = max(ran, key=lambda name: self.rivals[name, bits].mean)
        best = self.best(bits) or top
        score, first = self.rivals[top, bits], self.rivals[best, bits]
        if best == top:
            near = [name for name in others if self.near_best(name, bits)]
            text = "is best" + (f"; {WITHIN}: {', '.join(near)}" if near else "")
        elif self.near_best(top, bits):
            text = f"is {WITHIN} of the best, {best}"
        else:
            text = f"is {100 * (first.mean - score.mean):.1f} points behind {best}"
        if not first.hamming and self.best(bits, hamming=True) == top:
            text += ", and best of the rows ranked by Hamming distance"
        if len(score.values) < self.part["seeds"]:
            text += f" ({len(score.values)} of {self.part['seeds']} seeds)"
        text += self._real_queries(top, bits)
        if score.paper is not None and not self.part["stands_in"]:
            gap, number = score.gap_to_paper, f"the paper's {score.paper:.3f}"
            missed = f"; it MISSES {number} by {-gap:.1f} points"
            text += missed if gap < 0 else f"; it reaches {number}"
        return f"{bits} bits: {top} {text}."

    def _real_queries(self, name: str, bits: int) -> str:
        """How a row with real-valued queries compares with the best row that uses those."""
        first = self.best(bits, hamming=False)
        for row in self.part["rows"]:
            score = self.scores[row["name"], bits]
            if row.get("real_queries_of") == name and score.values and first is not None:
                rival = self.rivals[first, bits]
                gap = 100 * (score.mean - rival.mean)
                where = f"{abs(gap):.1f} points {'ahead of' if gap > 0 else 'behind'}"
                where = f"{WITHIN} of" if score.near(rival) else where
                said = f"as in {first}, it has {score.mean:.3f}, {where} {first}"
                return f"; with real-valued queries, {said}"
        return ""

    def _order(self, bits: int) -> str:
        """Whether the rows of table 1 grow in the paper's order."""
        ranked = [self.rivals[row["name"], bits] for row in self.part["rows"]]
        if not all(score.values for score in ranked):
            return f"{bits} bits: not all rows were run."
        steps = [100 * (b.mean - a.mean) for a, b in pairwise(ranked)]
        verdict = "is reproduced" if all(step > 0 for step in steps) else "is NOT reproduced"
        close = any(b.within_error(a) for a, b in pairwise(ranked))
        doubt = f", though one step is {WITHIN}" if close else ""
        moves = ", then ".join(f"{step:+.1f}" for step in steps)
        return f"{bits} bits: the paper's order {verdict}{doubt} (steps of {moves} points)."


def _score(part: Mapping[str, Any], row: Mapping[str, Any], number: int) -> Score:
    """The score of a row at the code length of that number."""
    bits = part["bits"][number]
    runs = [run for run in part["runs"] if run["row"] == row["name"] and run["bits"] == bits]
    measured = [run["evaluation"] for run in runs if "evaluation" in run]
    stable, lower, upper = (
        statistics.mean(values) if values and None not in values else None
        for key in ("map_stable", "map_lower", "map_upper")
        for values in [[one[key] for one in measured]]
    )
    return Score(
        tuple(one["map"] for one in measured),
        stable,
        lower,
        upper,
        row["paper"][number] if row["paper"] else None,
        defined=not any("not_defined" in run for run in runs),
        hamming=all(one.get("ranking", HAMMING_RANKING) == HAMMING_RANKING for one in measured),
        failed=tuple(run["failed"] for run in runs if "failed" in run),
    )
