"""Where the rows of a table stand: their scores, who is best, and sentences about it."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

HAMMING = "Hamming distance"


@dataclass(frozen=True)
class Score:
    """A row's runs at one code length.

    Attributes:
        values: mAP of each seed, expected over tie order.
        stable: mean mAP with ties in database order.
        lower: mean of the least value ties allow; None where there is none.
        upper: mean of the greatest.
        paper: the paper's number.
        defined: False where the method is not defined for the data.
        hamming: False where codes were ranked by another distance than Hamming's.
        failed: what its failed runs ended with.
    """

    values: tuple[float, ...] = ()
    stable: float = math.nan
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

    def level_with(self, other: Score) -> bool:
        """Whether the two means are closer than their standard errors together."""
        return abs(self.mean - other.mean) <= math.hypot(self.error, other.error)


def scores(part: Mapping[str, Any]) -> dict[tuple[str, int], Score]:
    """The scores of a part by the names of its rows and the code lengths."""
    found = {}
    for row in part["rows"]:
        for number, bits in enumerate(part["bits"]):
            runs = [r for r in part["runs"] if r["row"] == row["name"] and r["bits"] == bits]
            measured = [run["evaluation"] for run in runs if "evaluation" in run]
            paper = row["paper"][number] if row["paper"] else None
            found[row["name"], bits] = Score(
                tuple(one["map"] for one in measured),
                statistics.mean(one["map_stable"] for one in measured) if measured else math.nan,
                _mean_of(measured, "map_lower"),
                _mean_of(measured, "map_upper"),
                paper,
                defined=not any("not_defined" in run for run in runs),
                hamming=all(one.get("ranking", HAMMING) == HAMMING for one in measured),
                failed=tuple(run["failed"] for run in runs if "failed" in run),
            )
    return found


def _mean_of(measured: Sequence[Mapping[str, Any]], key: str) -> float | None:
    values = [one[key] for one in measured if one[key] is not None]
    return statistics.mean(values) if values and len(values) == len(measured) else None


def contest(
    part: Mapping[str, Any], found: Mapping[tuple[str, int], Score]
) -> dict[tuple[str, int], Score]:
    """The scores without rows that are another's codes asked with real-valued queries."""
    beside = {row["name"] for row in part["rows"] if row.get("real_queries_of")}
    return {key: score for key, score in found.items() if key[0] not in beside}


def best(found: Mapping[tuple[str, int], Score], bits: int, *, hamming: bool = False) -> str | None:
    """The name of the first row at a code length; of those ranked by Hamming distance, if asked."""
    there = {
        name: s.mean
        for (name, length), s in found.items()
        if length == bits and s.values and (s.hamming or not hamming)
    }
    return max(there, key=lambda name: there[name]) if there else None


def verdicts(results: Mapping[str, Any], part: Mapping[str, Any]) -> list[str]:
    """Sentences: is DFH first, is the paper's number reached, is table 1's order the paper's."""
    found = scores(part)
    rivals = contest(part, found)
    said = []
    if any(score.values for score in rivals.values()):
        if results["target"] == "table1":
            said = [_order(part, rivals, bits) for bits in part["bits"]]
        else:
            said = _standing(part, found, rivals)
    for (name, bits), score in rivals.items():
        if score.failed:
            said.append(f"{name}, {bits} bits: {len(score.failed)} failed, {score.failed[0]}.")
    return said


def _standing(
    part: Mapping[str, Any],
    every: Mapping[tuple[str, int], Score],
    found: Mapping[tuple[str, int], Score],
) -> list[str]:
    """Where DFH stands at each code length, and which rows are below the paper's numbers."""
    said = []
    names = {name for name, _ in found}
    own = [row["name"] for row in part["rows"] if row["method"] == "dfh" and row["name"] in names]
    others = [row for row in part["rows"] if row["method"] != "dfh"]
    if not own or not others:
        return []
    for bits in part["bits"]:
        first = best(found, bits)
        ours = {name: found[name, bits] for name in own if found[name, bits].values}
        if first is None or not ours:
            continue
        top = max(ours, key=lambda name: ours[name].mean)
        if first in ours:
            text = f"{bits} bits: {first} is first"
            level = [row["name"] for row in others if is_level(found, row["name"], first, bits)]
            text += f", level with {', '.join(level)}" if level else ""
        elif ours[top].level_with(found[first, bits]) and ours[top].error:
            text = f"{bits} bits: {top} is level with the first, {first}"
        else:
            gap = 100 * (found[first, bits].mean - ours[top].mean)
            text = f"{bits} bits: {top} is {gap:.1f} points behind {first}"
        if not found[first, bits].hamming and best(found, bits, hamming=True) == top:
            text += ", and first of those ranked by Hamming distance"
        if len(ours[top].values) < part["seeds"]:
            text += f", by {len(ours[top].values)} of {part['seeds']} seeds"
        text += _asked_alike(part, every, found, top, bits)
        paper = ours[top].paper
        if paper is not None and not part["stands_in"]:
            distance = 100 * (ours[top].mean - paper)
            text += (
                f"; it reaches the paper's {paper:.3f}"
                if distance >= 0
                else f"; it MISSES the paper's {paper:.3f} by {-distance:.1f} points"
            )
        said.append(text + ".")
    missed = [
        f"{row['name']} at {bits} bits ({100 * (score.mean - score.paper):+.1f} points)"
        for row in others
        for bits in part["bits"]
        if (score := found[row["name"], bits]).values
        and score.paper is not None
        and score.mean < score.paper
    ]
    if missed and not part["stands_in"]:
        said.append(f"Below the paper's number for it: {', '.join(missed)}.")
    return said


def _asked_alike(
    part: Mapping[str, Any],
    every: Mapping[tuple[str, int], Score],
    found: Mapping[tuple[str, int], Score],
    name: str,
    bits: int,
) -> str:
    """What a row has with real-valued queries, beside the best that asks with those."""
    names = [row["name"] for row in part["rows"] if row.get("real_queries_of") == name]
    rivals = {k[0]: s for k, s in found.items() if k[1] == bits and s.values and not s.hamming}
    mine = every[names[0], bits] if names else Score()
    if not mine.values or not rivals:
        return ""
    first = max(rivals, key=lambda rival: rivals[rival].mean)
    gap = 100 * (mine.mean - rivals[first].mean)
    where = f"{abs(gap):.1f} points {'ahead of' if gap > 0 else 'behind'} it"
    if mine.error and mine.level_with(rivals[first]):
        where = "level with it"
    return f"; with real-valued queries, as {first} asks, it has {mine.mean:.3f}, {where}"


def is_level(found: Mapping[tuple[str, int], Score], name: str, first: str, bits: int) -> bool:
    """Whether a row of several seeds is level with the first."""
    score = found[name, bits]
    return bool(score.values and score.error and score.level_with(found[first, bits]))


def _order(part: Mapping[str, Any], found: Mapping[tuple[str, int], Score], bits: int) -> str:
    names = [row["name"] for row in part["rows"]]
    ranked = [found[name, bits] for name in names]
    if not all(score.values for score in ranked):
        return f"{bits} bits: not all of it was run."
    steps = [100 * (b.mean - a.mean) for a, b in pairwise(ranked)]
    verdict = "is reproduced" if all(step > 0 for step in steps) else "is NOT reproduced"
    level = any(b.level_with(a) for a, b in pairwise(ranked))
    doubt = ", though a step is within the standard errors" if level else ""
    moves = ", then ".join(f"{step:+.1f}" for step in steps)
    return f"{bits} bits: the paper's order {verdict}{doubt} (steps of {moves} points)."
