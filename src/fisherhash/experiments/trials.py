"""The trials of a search: one point each, with their scores on held-out images."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fisherhash.experiments.benches import Cell
from fisherhash.experiments.runner import Runner
from fisherhash.experiments.search_space import parted
from fisherhash.experiments.specs import Options
from fisherhash.training.class_step import LIMIT


@dataclass(frozen=True)
class Trial:
    """One point of a search, trained for some epochs at every code length of the search.

    Attributes:
        point: what the point changes, settings and options.
        epochs: passes over the training images.
        cells: one run per code length; none where an earlier search recorded the scores.
        recorded: what the earlier search recorded, as :meth:`to_json` returns it.
    """

    point: Options
    epochs: int
    cells: tuple[Cell, ...] = ()
    recorded: Mapping[str, Any] | None = None

    def plain(self, runner: Runner) -> float | None:
        """Return the mean score of the codes; None where a run has none."""
        if self.recorded is not None:
            return self.recorded["plain"]
        found = self._found(runner)
        return _mean([one.get("plain") for one in found])

    def steps(self, runner: Runner) -> list[dict[str, float]]:
        """Return weight, sharpness and mean score of each class step that every run measured."""
        kinds: dict[tuple[float, float], list[float | None]] = {}
        found = self._found(runner)
        for one in found:
            for step in one.get("steps", ()):
                kinds.setdefault((step["weight"], step["sharpness"]), []).append(step["score"])
        means = {kind: _mean(s) for kind, s in kinds.items() if len(s) == len(found)}
        return [
            {"weight": weight, "sharpness": sharpness, "score": score}
            for (weight, sharpness), score in means.items()
            if score is not None
        ]

    def step(self, runner: Runner) -> dict[str, float] | None:
        """Return the best class step with its score; the first of equal ones."""
        if self.recorded is not None:
            return self.recorded.get("step")
        return max(self.steps(runner), key=lambda step: step["score"], default=None)

    def step_edges(self, runner: Runner) -> list[str]:
        """Return which numbers of the best class step lie at an end of those that were measured.

        The least weight is no end: without the step, the weight is 0, and that was measured, too.
        Nor is a sharpness of 0, or a number so large that a larger one changes hardly a bit.
        """
        if self.recorded is not None:
            return list(self.recorded.get("step_edges", ()))
        steps, best = self.steps(runner), self.step(runner)
        if best is None:
            return []
        found = []
        for name in ("weight", "sharpness"):
            values = {step[name] for step in steps}
            ends = {max(values)} if name == "weight" else {min(values), max(values)}
            found += [f"step_{name}"] if best[name] in ends - {0.0, LIMIT} else []
        return found

    def highest(self, runner: Runner) -> float | None:
        """Return the mean score without or with the class step, whichever is higher."""
        step = self.step(runner)
        scores = (self.plain(runner), None if step is None else step["score"])
        return max((score for score in scores if score is not None), default=None)

    def ended(self, runner: Runner) -> bool:
        """Return whether every run has a result or failed."""
        return all(runner.ended(cell) for cell in self.cells)

    def to_json(self, runner: Runner) -> dict[str, Any]:
        """Return the point with its scores."""
        if self.recorded is not None:
            return dict(self.recorded)
        found = {**parted(self.point), "epochs": self.epochs, "plain": self.plain(runner)}
        if step := self.step(runner):
            found["step"] = step
        if edges := self.step_edges(runner):
            found["step_edges"] = edges
        # A later search tries it again, where one that diverged has given its answer.
        if failures := [one["error"] for one in map(runner.failure, self.cells) if one]:
            found["failed"] = failures[0]
        return found

    def _found(self, runner: Runner) -> list[Mapping[str, Any]]:
        return [(runner.row(cell) or {}).get("validation") or {} for cell in self.cells]


def recorded_trials(entry: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """Return the trials that a search recorded and that need not be repeated, by point and epochs.

    Those that an error ended are tried again. So is the winner with the class step, if its step lay
    at a border of its grid, which was smaller than today's: beyond it may lie a better one.

    Args:
        entry: what :meth:`Search.summary` returned.
    """
    winner = entry.get("winner_step", {})
    score, edges = winner.get("score"), {*winner.get("edges", ())}
    return {
        trial_key(point, one["epochs"]): one
        for one in entry["trials"]
        for point in [{**one["settings"], **one["options"]}]
        if "failed" not in one
        if not (edges & {*one.get("step_edges", ())} and one["step"]["score"] == score)
    }


def trial_key(point: Options, epochs: int) -> str:
    """Return a name for a point that was trained for some epochs.

    >>> trial_key({"b": 1, "a": 0.5}, 20)
    '[20, {"a": 0.5, "b": 1}]'
    """
    return json.dumps([epochs, dict(point)], sort_keys=True)


def cells_of(trials: Any) -> list[Cell]:
    """Return the runs of some trials, each once."""
    return list({cell.file: cell for trial in trials for cell in trial.cells}.values())


def _mean(scores: Sequence[float | None]) -> float | None:
    known = [score for score in scores if score is not None and math.isfinite(score)]
    return math.fsum(known) / len(known) if scores and len(known) == len(scores) else None


def by_plain(trials: Sequence[Trial], runner: Runner) -> list[Trial]:
    """Return the trials that have a score without the class step, the best first."""
    return ranked([(trial.plain(runner), trial) for trial in trials])


def by_step(trials: Sequence[Trial], runner: Runner) -> list[Trial]:
    """Return the trials that have a score with the class step, the best first."""
    return ranked([((trial.step(runner) or {}).get("score"), trial) for trial in trials])


def ranked(scored: Sequence[tuple[float | None, Trial]]) -> list[Trial]:
    """Return the trials that have a score, the best first; equal ones stay in order."""
    known = [(score, trial) for score, trial in scored if score is not None]
    return [trial for _, trial in sorted(known, key=lambda one: -one[0])]


def in_turns(first: Sequence[Trial], second: Sequence[Trial]) -> list[Trial]:
    """Return the trials of two rankings, alternately, each once."""
    found: dict[int, Trial] = {}
    for place in range(max(len(first), len(second))):
        for ranking in (first, second):
            if place < len(ranking):
                found.setdefault(id(ranking[place]), ranking[place])
    return list(found.values())
