"""The trials of a search: what is searched for a row, one point each, and their scores."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product, zip_longest
from typing import Any

from fisherhash import methods
from fisherhash.experiments.cells import Cell
from fisherhash.experiments.runner import Runner
from fisherhash.experiments.specs import Options, Row
from fisherhash.system.options import Option, Tuned, options_of
from fisherhash.training.class_step import LIMIT
from fisherhash.training.settings import Settings

# By whether the network is trained. Wide, because a loss that is a mean over pairs has gradients
# ten times smaller than a cross-entropy: rates from 0.0005 to 0.2 won in results/tuning-seed1, the
# lowest where a network that knew the classes was best left alone, which backbone_rate does now.
LEARNING_RATES = {False: Tuned(0.001, 1.0, "log"), True: Tuned(0.0005, 0.2, "log")}
# A factor of the whole loss is a second learning rate. With 1, the rate means the same in all rows.
EQUAL_FOR_ALL: Options = {"loss_scale": 1.0}
OF_HAMMING_CODES = ("outputs", "cut")
"""The settings that say how bits are made of outputs: a late round tries every combination."""
SETTINGS = {one.name: one for one in options_of(Settings)}
Result = Mapping[str, Any]
"""What became of a trial, as it is stored: its point, its epochs and its scores. ``plain`` is the
score of the codes; None where a run has none. ``step`` is the best class step, with its score."""


@dataclass(frozen=True)
class Trial:
    """One point of a search, trained for some epochs at every code length of the search.

    Attributes:
        point: what the point changes, settings and options.
        epochs: passes over the training images.
        cells: one run per code length; none where an earlier search recorded the result.
        recorded: that result.
    """

    point: Options
    epochs: int
    cells: tuple[Cell, ...] = ()
    recorded: Result | None = None

    def result(self, runner: Runner) -> Result | None:
        """Return what became of it; None while a run has neither a result nor failed."""
        if self.recorded is not None:
            return self.recorded
        if not all(runner.ended(cell) for cell in self.cells):
            return None
        scores = [(runner.row(cell) or {}).get("validation") or {} for cell in self.cells]
        plain = _mean([one.get("plain") for one in scores])
        found = {**parted(self.point), "epochs": self.epochs, "plain": plain}
        if steps := _mean_steps(scores):
            found["step"] = best = max(steps, key=lambda step: step["score"])
            if edges := _step_edges(steps, best):
                found["step_edges"] = edges
        # A later search tries it again, where one that diverged has given its answer.
        if failures := [one["error"] for one in map(runner.failure, self.cells) if one]:
            found["failed"] = failures[0]
        return found


def search_space(row: Row, *, finetune: bool) -> tuple[Option, ...]:
    """Return what is searched for a row: what its method and the settings declare, and the rate.

    Without what the row fixes or does not use. A method with a closed form has no settings to
    search, and codes without a Hamming distance are not cut.
    """
    kind = methods.find(row.method)
    own = [one for one in options_of(kind) if one.tuned]
    shared: list[Option] = []
    if issubclass(kind, methods.HashMethod):
        left_out = {"learning_rate"} if finetune else {"learning_rate", "backbone_rate"}
        if not kind(bits=8, classes=2).head(1).hamming:
            left_out |= {*OF_HAMMING_CODES}
        rate = dataclasses.replace(SETTINGS["learning_rate"], tuned=LEARNING_RATES[finetune])
        others = [one for one in SETTINGS.values() if one.tuned and one.name not in left_out]
        shared = [rate, *others]
    return tuple(one for one in [*shared, *own] if one.name not in {*row.base, *row.idle})


def parted(values: Options) -> dict[str, dict[str, Any]]:
    """Split values into options of a method and settings of the training.

    >>> parted({"margin": 2.0, "learning_rate": 0.1})
    {'options': {'margin': 2.0}, 'settings': {'learning_rate': 0.1}}
    """
    return {
        "options": {key: value for key, value in values.items() if key not in SETTINGS},
        "settings": {key: value for key, value in values.items() if key in SETTINGS},
    }


def other_ways(space: Sequence[Option], point: Options) -> list[dict[str, Any]]:
    """Return a point with every other combination of the settings that make bits of outputs.

    >>> space = search_space(Row("", "dpsh"), finetune=True)
    >>> for other in other_ways(space, {"outputs": 0, "cut": "first"}):
    ...     print(other)
    {'outputs': 64, 'cut': 'between'}
    {'outputs': 64, 'cut': 'first'}
    {'outputs': 128, 'cut': 'between'}
    {'outputs': 128, 'cut': 'first'}
    """
    choices = {
        one.name: one.tuned.choices for one in space if one.name in OF_HAMMING_CODES and one.tuned
    }
    combined = product(*choices.values())
    others = [{**point, **dict(zip(choices, values, strict=True))} for values in combined]
    # Bits that are the outputs themselves are not cut, whatever the cut.
    uncut = [other for other in others if other.get("outputs") == 0]
    cut = [other for other in others if other.get("outputs") != 0 and other != dict(point)]
    return [*([] if point.get("outputs") == 0 else uncut[:1]), *cut]


def trial_key(point: Options, epochs: int) -> str:
    """Return a name for a point that was trained for some epochs.

    >>> trial_key({"b": 1, "a": 0.5}, 20)
    '[20, {"a": 0.5, "b": 1}]'
    """
    return json.dumps([epochs, dict(point)], sort_keys=True)


def cells_of(trials: Iterable[Trial]) -> list[Cell]:
    """Return the runs of some trials, each once."""
    return list({cell.file: cell for trial in trials for cell in trial.cells}.values())


def plain_score(result: Result) -> float | None:
    """Return the score without the class step."""
    return result["plain"]


def step_score(result: Result) -> float | None:
    """Return the score with the best class step."""
    return result["step"]["score"] if result.get("step") else None


def highest_score(result: Result) -> float | None:
    """Return the score without or with the class step, whichever is higher."""
    scores = (plain_score(result), step_score(result))
    return max((score for score in scores if score is not None), default=None)


def ranked(
    trials: Sequence[Trial], runner: Runner, score: Callable[[Result], float | None]
) -> list[tuple[Trial, Result]]:
    """Return the trials that have a score, the best first; equal ones stay in order."""
    results = [(trial, result) for trial in trials if (result := trial.result(runner))]
    known = [(own, one) for one in results if (own := score(one[1])) is not None]
    return [one for _, one in sorted(known, key=lambda pair: -pair[0])]


def in_turns(first: Sequence[Trial], second: Sequence[Trial]) -> list[Trial]:
    """Return the trials of two rankings, alternately, each once."""
    pairs = zip_longest(first, second)
    return list({id(one): one for pair in pairs for one in pair if one is not None}.values())


def _mean(scores: Sequence[float | None]) -> float | None:
    """Return the mean; None where a score is missing or not finite."""
    known = [score for score in scores if score is not None and math.isfinite(score)]
    return math.fsum(known) / len(known) if scores and len(known) == len(scores) else None


def _mean_steps(scores: Sequence[Mapping[str, Any]]) -> list[dict[str, float]]:
    """Return weight, sharpness and mean score of each class step that every run measured."""
    kinds: dict[tuple[float, float], list[float | None]] = {}
    for one in scores:
        for step in one.get("steps", ()):
            kinds.setdefault((step["weight"], step["sharpness"]), []).append(step["score"])
    means = {kind: _mean(own) for kind, own in kinds.items() if len(own) == len(scores)}
    return [
        {"weight": weight, "sharpness": sharpness, "score": score}
        for (weight, sharpness), score in means.items()
        if score is not None
    ]


def _step_edges(steps: Sequence[Mapping[str, float]], best: Mapping[str, float]) -> list[str]:
    """Return which numbers of the best class step lie at an end of those that were measured.

    The least weight is no end: without the step, the weight is 0, and that was measured, too. Nor
    is a sharpness of 0, or a number so large that a larger one changes hardly a bit.
    """
    found = []
    for name in ("weight", "sharpness"):
        values = {step[name] for step in steps}
        ends = {max(values)} if name == "weight" else {min(values), max(values)}
        found += [f"step_{name}"] if best[name] in ends - {0.0, LIMIT} else []
    return found


def is_further(option: Option, point: Options, other: Options) -> bool:
    """Return whether another point lies beyond a point at an edge of an option's range."""
    if option.tuned is None:
        return False
    share, beyond = (option.tuned.share(one[option.name]) for one in (point, other))
    return beyond > share if share > 0.5 else beyond < share
