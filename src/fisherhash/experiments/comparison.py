"""The rows of a table against each other: scores, tests, and where the rows of DFH stand."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise, product
from typing import Any

from fisherhash.errors import counted
from fisherhash.experiments.significance import Difference, Floats, difference, t_interval

HAMMING_RANKING = "Hamming distance"
RANKINGS = {"evaluation": "Hamming distance", "real_queries": "real-valued queries"}
"""The keys of a run's measurements, and what they are called."""
OURS = "dfh"
"""The method whose place among the others a report tells."""
QueryValues = dict[tuple[str, int, str], list[Floats]]
"""Average precision per query, one array per seed, by row, code length and ranking."""


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
    def half(self) -> float:
        """Half of the width of the 95 % t-interval over the seeds; infinite with one seed."""
        return t_interval(self.values)

    @property
    def gap_to_paper(self) -> float:
        """Points above the paper's number; NaN where either is missing."""
        return math.nan if self.paper is None else 100 * (self.mean - self.paper)


@dataclass(frozen=True)
class Verdict:
    """Where a row stands among those of other methods, at one code length in one ranking.

    Attributes:
        ranking: the key of the ranking in a run.
        bits: the code length.
        row: the row, among several of one method the one that held-out images prefer.
        rival: the row of another method with the highest mean.
        gap: how far the row is ahead of the rival.
        ahead: rows of other methods that a test says are ahead of it.
        level: rows of other methods that no test tells from it.
        untested: rows with one seed, which no test compares.
        tested: whether there are enough seeds for a test at all.
    """

    ranking: str
    bits: int
    row: str
    rival: str
    gap: Difference
    ahead: tuple[str, ...] = ()
    level: tuple[str, ...] = ()
    untested: tuple[str, ...] = ()
    tested: bool = True

    @property
    def word(self) -> str:
        """One word: first, level or behind; highest or lower where no test can say."""
        if self.ahead:
            return "behind"
        if not self.tested or self.rival in self.untested:
            return "highest" if self.gap.mean >= 0 else "lower"
        return "level" if self.level else "first"

    @property
    def sentence(self) -> str:
        """Where the row stands, with every row that is ahead of it or else level with it."""
        words = {
            "first": "is first",
            "behind": f"is behind {', '.join(self.ahead)}",
            "level": f"is level with {', '.join(self.level)}",
            "highest": "has the higher mean",
            "lower": "has the lower mean",
        }
        alone = f"; one seed, no test: {', '.join(self.untested)}" if self.untested else ""
        note = alone if self.tested else "; one seed, no test"
        where = "" if self.ranking == "evaluation" else f", {RANKINGS[self.ranking]}"
        gap = f"{signed(self.gap)} points against {self.rival}"
        return f"{self.bits} bits{where}: {self.row} {words[self.word]} ({gap}{note})."


class Comparison:
    """The rows of one part of a table in one ranking.

    Args:
        part: the part's content, from a table's JSON.
        ranking: a key of ``RANKINGS``.
        queries: average precision per query; without it the stored tests are used, or the seeds
            alone.

    Attributes:
        scores: of every row, by name and code length.
        rivals: of the rows that compete.
    """

    def __init__(
        self,
        part: Mapping[str, Any],
        ranking: str = "evaluation",
        queries: QueryValues | None = None,
    ) -> None:
        self.ranking = ranking
        self.part = part
        self._queries = queries or {}
        self._tests = {
            (test["bits"], test["row"], test["other"]): Difference(
                test["ahead"], math.inf if test["half"] is None else test["half"], test["queries"]
            )
            for test in part.get("tests", ())
            if test["ranking"] == ranking
        }
        self.scores = {
            (row["name"], bits): _score(part, row, number, ranking)
            for row in part["rows"]
            for number, bits in enumerate(part["bits"])
        }
        # Codes without a Hamming distance compete with the others' real-valued queries.
        self.rivals = {
            key: score
            for key, score in self.scores.items()
            if score.values and (score.hamming or ranking != "evaluation")
        }

    def best(self, bits: int) -> str | None:
        """Return the row with the highest mean at a code length."""
        means = {name: score.mean for (name, own), score in self.rivals.items() if own == bits}
        return max(means, key=lambda name: means[name], default=None)

    def gap(self, name: str, other: str, bits: int) -> Difference:
        """Return how far a row is ahead of another, as tested on the runs or as stored."""
        if (known := self._tests.get((bits, name, other))) is not None:
            return known
        if (known := self._tests.get((bits, other, name))) is not None:
            return dataclasses.replace(known, mean=-known.mean)
        one, two = (self.rivals[row, bits].values for row in (name, other))
        values = [self._queries.get((row, bits, self.ranking), []) for row in (name, other)]
        shapes = {array.shape for arrays in values for array in arrays}
        paired = (values[0], values[1]) if all(values) and len(shapes) == 1 else None
        return difference(one, two, paired)

    def chosen(self, names: Sequence[str], bits: int) -> str | None:
        """Return the one of some rows that held-out images prefer; None where none was run.

        The queries must not choose among them; where nothing was searched, their means do.
        """
        ran = [name for name in names if (name, bits) in self.rivals]
        held_out = {row["name"]: row.get("held_out") for row in self.part["rows"]}
        if all(held_out[name] is not None for name in ran):
            return max(ran, key=lambda name: held_out[name], default=None)
        return max(ran, key=lambda name: self.rivals[name, bits].mean, default=None)

    def others(self, name: str, bits: int) -> list[str]:
        """Return the competing rows at a code length, except one."""
        return [row for row, length in self.rivals if length == bits and row != name]

    def tested(self, bits: int) -> bool:
        """Return whether any two rows at a code length have the seeds that a test needs."""
        return sum(len(s.values) > 1 for (_, own), s in self.rivals.items() if own == bits) > 1

    def level(self, bits: int) -> list[str]:
        """Return the rows that no test tells from the best of the column, which is not among them.

        Empty if the best is first; all rows where each has one seed.
        """
        top = self.best(bits)
        if top is None:
            return []
        return [row for row in self.others(top, bits) if not self.gap(top, row, bits).ahead]

    def leaders(self) -> set[tuple[str, int]]:
        """Return the rows and code lengths that are best, or not told from the best."""
        return {
            (name, bits)
            for bits in self.part["bits"]
            if (top := self.best(bits)) is not None
            for name in (top, *self.level(bits))
        }

    def rows_of(self, method: str) -> list[str]:
        """Return the names of a method's rows."""
        return [row["name"] for row in self.part["rows"] if row["method"] == method]

    def tests(self, target: str = "") -> list[dict[str, Any]]:
        """Return the tests that a report needs, as JSON.

        The best row and DFH's row are compared with every other one.

        Args:
            target: the table; that of the parts of DFH compares neighbouring rows, that of its
                additions every row with the first.
        """
        found = []
        for bits in self.part["bits"]:
            known = [name for name, own in self.rivals if own == bits]
            tops = [self.best(bits), self.chosen(self.rows_of(OURS), bits)]
            pairs = [(top, one) for top in tops if top for one in self.others(top, bits)]
            if target == "table1":
                pairs += [(b, a) for a, b in pairwise(known)]
            elif target == "ablation":
                pairs += [(name, known[0]) for name in known[1:]]
            for name, other in dict.fromkeys(pairs):
                gap = self.gap(name, other, bits)
                found.append(
                    {
                        "ranking": self.ranking,
                        "bits": bits,
                        "row": name,
                        "other": other,
                        "ahead": round(gap.mean, 6),
                        "half": round(gap.half, 6) if math.isfinite(gap.half) else None,
                        "queries": gap.queries,
                    }
                )
        return found

    def verdict(self, bits: int, method: str = OURS) -> Verdict | None:
        """Return where a method's row stands; None if it or all others have no number."""
        own = self.rows_of(method)
        top = self.chosen(own, bits)
        rivals = [name for name in self.others(top or "", bits) if name not in own]
        if top is None or not rivals:
            return None
        rival = max(rivals, key=lambda name: self.rivals[name, bits].mean)
        alone = [name for name in rivals if len(self.rivals[name, bits].values) < 2]
        gaps = {name: self.gap(top, name, bits) for name in rivals if name not in alone}
        return Verdict(
            self.ranking,
            bits,
            top,
            rival,
            self.gap(top, rival, bits),
            ahead=tuple(name for name, one in gaps.items() if one.behind),
            level=tuple(n for n, one in gaps.items() if not one.ahead and not one.behind),
            untested=tuple(alone),
            tested=self.tested(bits),
        )


def comparisons(
    part: Mapping[str, Any], queries: QueryValues | None = None
) -> dict[str, Comparison]:
    """Return the comparison of a part's rows in each ranking, by its key."""
    return {key: Comparison(part, key, queries) for key in RANKINGS}


def verdicts_of(part: Mapping[str, Any], method: str = OURS) -> list[Verdict]:
    """Return where a method's row stands in every column, ranking by ranking."""
    found = [
        comparison.verdict(bits, method)
        for comparison in comparisons(part).values()
        for bits in part["bits"]
    ]
    return [verdict for verdict in found if verdict is not None]


def verdicts(part: Mapping[str, Any], target: str) -> list[str]:
    """Return sentences: is DFH first, are the paper's numbers and its order reached."""
    comparison = Comparison(part)
    said = []
    if target != "compare" and any(score.values for score in comparison.scores.values()):
        sentence = {"table1": _order, "ablation": _additions}.get(target)
        if sentence is not None:
            said = [sentence(comparison, bits) for bits in part["bits"]]
        else:
            said = _standing(comparison)
    return said + [
        f"{name}, {bits} bits: {counted(len(score.failed), 'run')} failed: {score.failed[0]}."
        for (name, bits), score in comparison.scores.items()
        if score.failed
    ]


def _standing(comparison: Comparison) -> list[str]:
    """Where DFH stands at each code length, and which rows are below the paper's numbers."""
    part, own = comparison.part, comparison.rows_of(OURS)
    others = [row["name"] for row in part["rows"] if row["name"] not in own]
    if not own or not others:
        return []
    said = [verdict.sentence for verdict in verdicts_of(part)]
    missed = [
        f"{name} at {bits} bits ({gap:+.1f})"
        for name, bits in product([*own, *others], part["bits"])
        if (gap := comparison.scores[name, bits].gap_to_paper) < 0
    ]
    if missed and not part["stands_in"]:
        said.append(f"Below the paper's own number, in points: {', '.join(missed)}.")
    return said


def _order(comparison: Comparison, bits: int) -> str:
    """Whether the rows of table 1 grow in the paper's order."""
    names = [row["name"] for row in comparison.part["rows"]]
    if not all((name, bits) in comparison.rivals for name in names):
        return f"{bits} bits: not all rows were run."
    steps = [comparison.gap(b, a, bits) for a, b in pairwise(names)]
    verdict = "are" if all(step.mean > 0 for step in steps) else "are NOT"
    close = any(abs(step.mean) <= step.half for step in steps)
    doubt = ", though a step is within its 95 % interval" if close else ""
    moves = ", then ".join(signed(step) for step in steps)
    return f"{bits} bits: the means {verdict} in the paper's order{doubt} ({moves} points)."


def _additions(comparison: Comparison, bits: int) -> str:
    """What each row adds to the first one."""
    first, *names = [row["name"] for row in comparison.part["rows"]]
    known = [name for name in names if (name, bits) in comparison.rivals]
    if (first, bits) not in comparison.rivals or not known:
        return f"{bits} bits: not all rows were run."
    words = [f"{name} {signed(comparison.gap(name, first, bits))}" for name in known]
    return f"{bits} bits, against {first}, in points: {'; '.join(words)}."


def signed(gap: Difference) -> str:
    """Return a difference in points with its sign and its interval.

    >>> signed(Difference(0.0123, 0.004))
    '+1.2 ± 0.4'
    """
    interval = f" ± {100 * gap.half:.1f}" if math.isfinite(gap.half) else ""
    return f"{100 * gap.mean:+.1f}{interval}"


def _score(part: Mapping[str, Any], row: Mapping[str, Any], number: int, ranking: str) -> Score:
    """Return the score of a row at the code length of that number."""
    bits = part["bits"][number]
    runs = [run for run in part["runs"] if run["row"] == row["name"] and run["bits"] == bits]
    measured = [run["evaluation"] for run in runs if "evaluation" in run]
    hamming = all(one.get("ranking", HAMMING_RANKING) == HAMMING_RANKING for one in measured)
    if ranking == "real_queries" and hamming:
        measured = [run["real_queries"] for run in runs if "real_queries" in run]
    stable, lower, upper = (
        statistics.mean(values) if values and None not in values else None
        for key in ("map_stable", "map_lower", "map_upper")
        for values in [[one.get(key) for one in measured]]
    )
    return Score(
        tuple(one["map"] for one in measured),
        stable,
        lower,
        upper,
        row["paper"][number] if row["paper"] else None,
        defined=not any("not_defined" in run for run in runs),
        hamming=hamming,
        failed=tuple(run["failed"] for run in runs if "failed" in run),
    )
