"""Fair tuning: every row of a table is searched in the same way, on held-out training images.

What is searched is declared with each hyper-parameter, in the method's own file and in
:class:`Settings` (:class:`~fisherhash.system.options.Tuned`); nothing here knows a method. The
learning rate has one range for all rows. The rounds are the lines of :meth:`Tuning.rounds`.

A fifth of the training images is held out. Each held-out image is queried against the others: like
most of a database, they were not trained on. The score is the mean over the code lengths of the
table's own metric. The queries are never used. Everything else is equal for all: network,
augmentation, epochs, batch size, optimiser.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from fisherhash import methods
from fisherhash.experiments.cells import Cell, Setup
from fisherhash.experiments.request import ROUNDS, Round
from fisherhash.experiments.runner import Runner
from fisherhash.experiments.specs import Options, Row
from fisherhash.experiments.trials import (
    EQUAL_FOR_ALL,
    Result,
    Trial,
    highest_score,
    in_turns,
    is_further,
    other_ways,
    parted,
    plain_score,
    ranked,
    search_space,
    step_score,
    trial_key,
)
from fisherhash.system.options import Option, Tuned
from fisherhash.training.settings import Settings

POINTS = 16
SHORTER = 4
"""The first round trains for 1/4 of the epochs, and 1/4 of its points reach the second round."""
NEAR = 0.1
"""The standard deviation of a point near another, as a share of the range."""
MOST_BEYOND = 2
"""Rounds beyond an edge at most: some have no end to find."""
HELD_OUT = 0.2
CLASSIFIER_WEIGHTS = (0.2, 0.5)
"""What the last round tries first."""
MOST_DOUBLED = 7
"""How often the largest weight is doubled at most, while it is the best."""


@dataclass(frozen=True)
class Tuning:
    """The search for one row's hyper-parameters on one setup.

    Attributes:
        row: what is searched: its method, without what the row fixes.
        setup: the images and the network.
        settings: how the trials of the last round are trained.
        bits: the code lengths.
        points: number of quasi-random points.
        last_round: one of ``ROUNDS``, the last that is run.
        recorded: results of an earlier search, by :func:`trial_key`; they are not run again.
        ranges: where the earlier search searched, by the name of the option, which this one goes
            on with; None for what is declared today.
        guess: the authors' values that it began with, likewise; None for those of the row.
    """

    row: Row
    setup: Setup
    settings: Settings
    bits: tuple[int, ...]
    points: int = POINTS
    last_round: Round = ROUNDS[-1]
    recorded: Mapping[str, Result] = dataclasses.field(default_factory=dict)
    ranges: Mapping[str, Tuned] | None = None
    guess: Options | None = None

    @functools.cached_property
    def space(self) -> tuple[Option, ...]:
        """What is searched, and where."""
        space = search_space(self.row, finetune=self.setup.finetune)
        if self.ranges is None:
            return space
        kept = [one for one in space if one.name in self.ranges]
        return tuple(dataclasses.replace(one, tuned=self.ranges[one.name]) for one in kept)

    @functools.cached_property
    def drawn(self) -> list[dict[str, Any]]:
        """The points: the same ones in every process, and more of them begin with fewer.

        Every second point leaves the method's own options at their defaults, so that a method with
        many options is not searched worse than one with few: its author's values count as a guess.
        A default that is not among the choices of a search does not.
        """
        # Two sequences: every second point of one lies in one half of the range of some options.
        engines = [
            torch.quasirandom.SobolEngine(len(self.space), scramble=True, seed=self._seed + part)
            for part in range(2)
        ]
        known = methods.hyper_parameters(methods.find(self.row.method))
        own = {**{key: one.default for key, one in known.items()}, **self._guess}
        points = []
        for number in range(self.points):
            shares = engines[number % 2].draw().clamp(0.0, 1.0 - 1e-6)[0].tolist()
            values = {one.name: one.drawn(at) for one, at in zip(self.space, shares, strict=True)}
            if number % 2 == 0:
                for one in self.space:
                    choices = one.tuned.choices if one.tuned else ()
                    if one.name in own and (not choices or own[one.name] in choices):
                        values[one.name] = own[one.name]
            points.append(values)
        return points

    def rounds(self, runner: Runner, *, guess: bool = False) -> Iterator[list[Trial]]:
        """Yield the trials of each round, as far as they are known by now.

        A round follows from the results of those before it. "Best" means best without and best
        with the class step, in turns.

        Args:
            runner: knows the results.
            guess: go on from any points while the best are unknown, to count the runs.
        """
        first = self._first
        yield first
        # The best quarter, for all epochs.
        second = self._long(one.point for one in self._best(first, runner, guess)[: self._most])
        yield second
        # As many again, near the best two of them; beyond the range where one lies at its edge.
        best = self._best(second, runner, guess)[:2]
        turns = range(self._most)
        third = self._long(self._near(best[n % len(best)].point, n) for n in turns if best)
        yield third
        # While a winner lies at an edge with nothing tried beyond it, more points near it.
        long = [*second, *third]
        for number in range(1, MOST_BEYOND + 1):
            if not self._done(long, runner):
                break
            edged = [one for one in self._winners(long, runner) if self._edges(one, long)]
            if not edged:
                break
            draws = [(edged[n % len(edged)].point, number * self._most + n) for n in turns]
            beyond = self._long(self._near(point, n) for point, n in draws)
            long += beyond
            yield beyond
        if self.last_round == "numbers":
            return
        # The best with every other way to make bits of outputs: sixteen points are too few to try
        # each of them beside a good learning rate.
        best = self._highest(long, runner, guess)
        ways = self._long(point for one in best for point in other_ways(self.space, one.point))
        yield ways
        # Last, a classifier beside the head; larger weights while the largest is the best.
        learns = methods.find(self.row.method).info.supervision != "none"
        if not (self.setup.finetune and learns and self.last_round == "classifier"):
            return
        long += ways
        best = self._highest(long, runner, guess)
        weights = list(CLASSIFIER_WEIGHTS)
        beside = self._long({**one.point, "classifier_weight": w} for one in best for w in weights)
        yield beside
        for _ in range(MOST_DOUBLED if beside and not guess else 0):
            if not self._done(beside, runner):
                break
            if beside[-1] not in self._winners([*long, *beside], runner):
                break
            weights.append(2 * weights[-1])
            doubled = self._long([{**best[0].point, "classifier_weight": weights[-1]}])
            beside = [*beside, *doubled]
            yield doubled

    def trials(self, runner: Runner, *, guess: bool = False) -> list[Trial]:
        """Return the trials of every round that is known by now; each result may add some."""
        return [trial for trials in self.rounds(runner, guess=guess) for trial in trials]

    def ended(self, runner: Runner) -> bool:
        """Return whether no trial is left: what is known is run, and adds nothing."""
        return self._done(self.trials(runner), runner)

    def summary(self, runner: Runner) -> dict[str, Any]:
        """Return the space, the result of every finished trial, and the winners, as JSON."""
        first, second, third, *later = self.rounds(runner)
        near = [*second, *third]
        long = [one for trials in (near, *later) for one in trials if self._done([one], runner)]
        results = [one.result(runner) for one in [*first, *long]]
        trials = [dict(result) for result in results if result is not None]
        entry: dict[str, Any] = {
            "method": self.row.method,
            "base": dict(self.row.base),
            "points": self.points,
            "last_round": self.last_round,
            "bits": list(self.bits),
            "space": {one.name: one.tuned.to_json() for one in self.space if one.tuned},
            "guess": dict(self._guess),
            "trials": trials,
            "without_score": sum(trial["plain"] is None for trial in trials),
        }
        if near and self._done(near, runner):
            # A winner at an edge is marked, and counts until the rounds beyond the edge are run.
            for trial, result in ranked(long, runner, plain_score)[:1]:
                entry["winner"] = self._winner(trial, result["plain"], long)
            for trial, result in ranked(long, runner, step_score)[:1]:
                step = dict(result["step"])
                entry["winner_step"] = self._winner(trial, step.pop("score"), long)
                entry["winner_step"]["class_step"] = step
                entry["winner_step"]["edges"] += result.get("step_edges", ())
        return entry

    @property
    def _guess(self) -> Options:
        return self.row.guess if self.guess is None else self.guess

    @property
    def _most(self) -> int:
        """Trials of each round after the first."""
        return max(1, self.points // SHORTER)

    @property
    def _seed(self) -> int:
        text = f"{self.setup.slug}\0{self.row.space}"
        return int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "big")

    @functools.cached_property
    def _first(self) -> list[Trial]:
        """Every point, for a quarter of the epochs."""
        shorter = {
            key: max(1, getattr(self.settings, key) // SHORTER)
            for key in ("epochs", "head_epochs")
            if getattr(self.settings, key)
        }
        settings = dataclasses.replace(self.settings, **shorter)
        return [self._trial(point, settings) for point in self.drawn]

    def _long(self, points: Iterable[Options]) -> list[Trial]:
        """Return the trials of points with all epochs."""
        return [self._trial(point, self.settings) for point in points]

    def _done(self, trials: Sequence[Trial], runner: Runner) -> bool:
        return all(one.result(runner) is not None for one in trials)

    def _best(self, trials: Sequence[Trial], runner: Runner, guess: bool) -> list[Trial]:
        """Return trials, the best without and with the class step in turns; none before all end."""
        if not self._done(trials, runner):
            return list(trials) if guess else []
        plain, step = (ranked(trials, runner, score) for score in (plain_score, step_score))
        return in_turns([one for one, _ in plain], [one for one, _ in step])

    def _highest(self, trials: Sequence[Trial], runner: Runner, guess: bool) -> list[Trial]:
        """Return the best of trials, without or with the class step; none before all end."""
        if not self._done([*self._first, *trials], runner):
            return self._first[:1] if guess else []
        return [one for one, _ in ranked(trials, runner, highest_score)[:1]]

    def _winners(self, trials: Sequence[Trial], runner: Runner) -> list[Trial]:
        """Return the best without the class step and the best with it; one where they are equal."""
        plain, step = (ranked(trials, runner, score)[:1] for score in (plain_score, step_score))
        return in_turns([one for one, _ in plain], [one for one, _ in step])

    def _near(self, point: Options, number: int) -> dict[str, Any]:
        """Return a point near another: its numbers moved a little, its choices as they are.

        A number at an edge of its range moves outwards.
        """
        rng = np.random.default_rng([self._seed, number])
        return {
            one.name: one.moved(point[one.name], by)
            for one, by in zip(self.space, rng.normal(0.0, NEAR, len(self.space)), strict=True)
        }

    def _winner(self, trial: Trial, score: float | None, others: Sequence[Trial]) -> dict[str, Any]:
        values = parted({**self._equal, **trial.point})
        return {**values, "score": score, "edges": self._edges(trial, others)}

    def _edges(self, trial: Trial, others: Sequence[Trial]) -> list[str]:
        """Return what lies at an edge of its range with nothing tried beyond it."""
        edges = [
            one.name
            for one in self.space
            if one.edge(trial.point[one.name])
            and not any(is_further(one, trial.point, other.point) for other in others)
        ]
        weight = trial.point.get("classifier_weight", 0.0)
        if 0.0 < weight == max(other.point.get("classifier_weight", 0.0) for other in others):
            edges.append("classifier_weight")
        return edges

    @property
    def _equal(self) -> Options:
        known = methods.hyper_parameters(methods.find(self.row.method))
        return {key: value for key, value in EQUAL_FOR_ALL.items() if key in known}

    def _trial(self, point: Options, settings: Settings) -> Trial:
        if (known := self.recorded.get(trial_key(point, settings.epochs))) is not None:
            return Trial(point, settings.epochs, recorded=known)
        own = parted({**self._equal, **point, **self.row.base})
        words = ", ".join(f"{key} {value}" for key, value in point.items())
        title = f"tuning {self.row.space}, {settings.epochs} epochs, {words}"
        held_out = {"validation": HELD_OUT, "validation_every": settings.epochs}
        trained = dataclasses.replace(settings, **{**own["settings"], **held_out})
        make = functools.partial(Cell, measured=False, title=title)
        cells = (
            make(self.setup, self.row.method, bits, trained, own["options"]) for bits in self.bits
        )
        return Trial(point, settings.epochs, tuple(cells))
