"""The scores of a table's rows in both rankings, which row is first, and sentences about it."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise, product
from typing import Any

from fisherhash.errors import counted
from fisherhash.experiments.places import ColumnPlace, signed
from fisherhash.experiments.significance import Difference, Floats, difference, t_interval

HAMMING_RANKING = "Hamming distance"
RANKINGS = {"evaluation": "Hamming distance", "real_queries": "real-valued queries"}
"""The keys of a run's measurements, and what they are called."""
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


class Contest:
    """The rows of one part in one ranking.

    Attributes:
        ranking: its key in a run.
        scores: of every row, by name and code length.
        rivals: of the rows that compete.
    """

    def __init__(
        self, part: Mapping[str, Any], ranking: str, queries: QueryValues | None = None
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
        rows = [row for row in part["rows"] if not row.get("real_queries_of")]
        self.scores = {
            (row["name"], bits): _score(part, row, number, ranking)
            for row in rows
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
            dfh = [row["name"] for row in self.part["rows"] if row["method"] == "dfh"]
            tops = dict.fromkeys([self.best(bits), self.chosen(dfh, bits)])
            pairs = [
                (top, one) for top in tops if top is not None for one in self.others(top, bits)
            ]
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


class Standing:
    """The scores of one part of a table.

    Args:
        part: the part's content, from a table's JSON.
        queries: average precision per query; without it the stored tests are used, or the seeds
            alone.

    Attributes:
        contests: one per ranking.
    """

    def __init__(self, part: Mapping[str, Any], queries: QueryValues | None = None) -> None:
        self.part = part
        self.contests = {key: Contest(part, key, queries) for key in RANKINGS}
        self.hamming, self.real = self.contests.values()
        self.scores = self.hamming.scores

    def tests(self, target: str = "") -> list[dict[str, Any]]:
        """Return the tests of both rankings that the report of a table needs, as JSON."""
        return [test for contest in self.contests.values() for test in contest.tests(target)]

    def leaders(self) -> set[tuple[str, int]]:
        """Return the rows and code lengths that are best, or not told from the best, in either."""
        found = set()
        for contest in self.contests.values():
            for bits in self.part["bits"]:
                if (top := contest.best(bits)) is not None:
                    found |= {(name, bits) for name in (top, *contest.level(bits))}
        return found

    def verdicts(self, target: str) -> list[str]:
        """Return sentences: is DFH first, are the paper's numbers and its order reached."""
        said = []
        if target != "compare" and any(score.values for score in self.scores.values()):
            if target == "table1":
                said = [self._order(bits) for bits in self.part["bits"]]
            elif target == "ablation":
                said = [self._additions(bits) for bits in self.part["bits"]]
            else:
                said = self._contest()
        return said + [
            f"{name}, {bits} bits: {counted(len(score.failed), 'run')} failed: {score.failed[0]}."
            for (name, bits), score in self.scores.items()
            if score.failed
        ]

    def _contest(self) -> list[str]:
        """Where DFH stands at each code length, and which rows are below the paper's numbers."""
        rows = [row for row in self.part["rows"] if not row.get("real_queries_of")]
        own = [row["name"] for row in rows if row["method"] == "dfh"]
        others = [row["name"] for row in rows if row["method"] != "dfh"]
        if not own or not others:
            return []
        said = [place.sentence for place in self.places()]
        missed = [
            f"{name} at {bits} bits ({gap:+.1f} points)"
            for name, bits in product([*own, *others], self.part["bits"])
            if (gap := self.scores[name, bits].gap_to_paper) < 0
        ]
        if missed and not self.part["stands_in"]:
            said.append(f"Below the paper's own number, no class step: {', '.join(missed)}.")
        return said

    def places(self) -> list[ColumnPlace]:
        """Return where DFH's row, as held-out images choose it, stands in every column."""
        own = [row["name"] for row in self.part["rows"] if row["method"] == "dfh"]
        found = [
            self._place(contest, own, bits)
            for contest in self.contests.values()
            for bits in self.part["bits"]
        ]
        return [place for place in found if place is not None]

    def _place(self, contest: Contest, own: Sequence[str], bits: int) -> ColumnPlace | None:
        top = contest.chosen(own, bits)
        rivals = [name for name in contest.others(top or "", bits) if name not in own]
        if top is None or not rivals:
            return None
        rival = max(rivals, key=lambda name: contest.rivals[name, bits].mean)
        alone = [name for name in rivals if len(contest.rivals[name, bits].values) < 2]
        gaps = {name: contest.gap(top, name, bits) for name in rivals if name not in alone}
        score = contest.rivals[top, bits]
        few = len(score.values) < self.part["seeds"]
        printed = contest is self.hamming and not self.part["stands_in"]
        return ColumnPlace(
            contest.ranking,
            bits,
            top,
            rival,
            contest.gap(top, rival, bits),
            highest=contest.best(bits) == top,
            rows_ahead=tuple(name for name, one in gaps.items() if one.behind),
            rows_level=tuple(n for n, one in gaps.items() if not one.ahead and not one.behind),
            untested=tuple(alone),
            tested=contest.tested(bits),
            seeds=f"{len(score.values)} of {self.part['seeds']} seeds" if few else "",
            paper=score.paper if printed else None,
            gap_to_paper=score.gap_to_paper,
        )

    def _order(self, bits: int) -> str:
        """Whether the rows of table 1 grow in the paper's order."""
        names = [row["name"] for row in self.part["rows"] if not row.get("real_queries_of")]
        if not all((name, bits) in self.hamming.rivals for name in names):
            return f"{bits} bits: not all rows were run."
        steps = [self.hamming.gap(b, a, bits) for a, b in pairwise(names)]
        verdict = "are" if all(step.mean > 0 for step in steps) else "are NOT"
        close = any(abs(step.mean) <= step.half for step in steps)
        doubt = ", though a step is within its 95 % interval" if close else ""
        moves = ", then ".join(signed(step) for step in steps)
        return f"{bits} bits: the means {verdict} in the paper's order{doubt} ({moves} points)."

    def _additions(self, bits: int) -> str:
        """What each row adds to the first one."""
        first, *names = [row["name"] for row in self.part["rows"]]
        known = [name for name in (first, *names) if (name, bits) in self.hamming.rivals]
        if first not in known or len(known) < 2:
            return f"{bits} bits: not all rows were run."
        gaps = {name: self.hamming.gap(name, first, bits) for name in known if name != first}
        words = [f"{name} {signed(gap)}" for name, gap in gaps.items()]
        return f"{bits} bits, against {first}, in points: {'; '.join(words)}."


def _score(part: Mapping[str, Any], row: Mapping[str, Any], number: int, ranking: str) -> Score:
    """The score of a row at the code length of that number."""
    bits = part["bits"][number]
    runs = [run for run in part["runs"] if run["row"] == row["name"] and run["bits"] == bits]
    plain = [run["evaluation"] for run in runs if "evaluation" in run]
    hamming = all(one.get("ranking", HAMMING_RANKING) == HAMMING_RANKING for one in plain)
    measured = plain
    if ranking == "real_queries" and hamming:
        # In older tables, real-valued queries were a row of their own.
        beside = {r["name"] for r in part["rows"] if r.get("real_queries_of") == row["name"]}
        measured = [run["real_queries"] for run in runs if "real_queries" in run] or [
            run["evaluation"]
            for run in part["runs"]
            if run["row"] in beside and run["bits"] == bits and "evaluation" in run
        ]
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
