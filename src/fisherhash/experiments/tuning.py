"""Fair tuning: every row of a table is searched in the same way, on held-out training images.

What is searched is declared with each hyper-parameter, in the method's own file and in
:class:`Settings` (:class:`~fisherhash.system.options.Tuned`); nothing here knows a method. The
learning rate has one range for all rows. Every row gets the same number of quasi-random points.
All of them are trained for a quarter of the epochs, and the best quarter for all epochs, each at
several code lengths. As many points again are then drawn near the best ones, beyond the range where
the best lies at its edge. While a winner still lies at an edge with nothing tried beyond it, its
row gets another such round, at most twice. Then the best point is tried with every other way to
make bits of outputs: sixteen points are too few to try each of them beside a good learning rate.
Last, where the network is trained and the method knows labels, what is best by then is tried with a
classifier beside the head, with larger weights while the largest is the best.

A fifth of the training images is held out. Each held-out image is queried against the others: like
most of a database, they were not trained on. The score is the mean over the code lengths of the
table's own metric. The queries are never used. Everything else is equal for all: network,
augmentation, epochs, batch size, optimiser.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from fisherhash import methods
from fisherhash.experiments.benches import Bench, Cell
from fisherhash.experiments.request import ROUNDS, Round
from fisherhash.experiments.runner import Runner
from fisherhash.experiments.search_space import (
    EQUAL_FOR_ALL,
    OF_HAMMING_CODES,
    is_further,
    is_tried,
    other_ways,
    parted,
    search_space,
)
from fisherhash.experiments.specs import Options, Row
from fisherhash.experiments.trials import (
    Trial,
    by_plain,
    by_step,
    in_turns,
    ranked,
    trial_key,
)
from fisherhash.system.options import Option, Tuned
from fisherhash.training.settings import Settings

POINTS = 16
SHORTER = 4
"""The first round trains for 1/4 of the epochs, and 1/4 of its points reach the second round."""
NEAR = 0.1
"""The standard deviation of a point of the third round, as a share of the range."""
MOST_BEYOND = 2
"""Rounds beyond an edge at most: some have no end to find."""
HELD_OUT = 0.2

CLASSIFIER_WEIGHTS = (0.2, 0.5)
"""What the last round tries first where the network is trained and the method knows labels."""
MOST_DOUBLED = 7
"""How often the largest weight is doubled at most, while it is the best."""


@dataclass(frozen=True)
class Search:
    """The search for one row's hyper-parameters on one bench.

    Attributes:
        row: what is searched: its method, without what the row fixes.
        bench: the images and the network.
        settings: how the trials of the last round are trained.
        bits: the code lengths.
        points: number of quasi-random points.
        last_round: one of ``ROUNDS``, the last that is run.
        recorded: trials of an earlier search, by :func:`trial_key`; they are not run again.
        ranges: where the earlier search searched, by the name of the option, which this one goes
            on with; None for what is declared today.
        guess: the authors' values that it began with, likewise; None for those of the row.
    """

    row: Row
    bench: Bench
    settings: Settings
    bits: tuple[int, ...]
    points: int = POINTS
    last_round: Round = ROUNDS[-1]
    recorded: Mapping[str, Mapping[str, Any]] = dataclasses.field(default_factory=dict)
    ranges: Mapping[str, Tuned] | None = None
    guess: Options | None = None

    @functools.cached_property
    def space(self) -> tuple[Option, ...]:
        """What is searched, and where."""
        space = search_space(self.row, finetune=self.bench.finetune)
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
        shares = [
            engines[number % 2].draw().clamp(0.0, 1.0 - 1e-6)[0].tolist()
            for number in range(self.points)
        ]
        known = methods.hyper_parameters(methods.find(self.row.method))
        own = {**{key: one.default for key, one in known.items()}, **self._guess}
        points = []
        for number, point in enumerate(shares):
            values = {one.name: one.drawn(at) for one, at in zip(self.space, point, strict=True)}
            if number % 2 == 0:
                guessed = [one for one in self.space if one.name in own]
                values |= {
                    one.name: own[one.name] for one in guessed if is_tried(one, own[one.name])
                }
            points.append(values)
        return points

    @property
    def _guess(self) -> Options:
        return self.row.guess if self.guess is None else self.guess

    def first(self) -> list[Trial]:
        """Return the trials of the first round: every point, for a quarter of the epochs."""
        return self._first

    @functools.cached_property
    def _first(self) -> list[Trial]:
        shorter = {
            key: max(1, getattr(self.settings, key) // SHORTER)
            for key in ("epochs", "head_epochs")
            if getattr(self.settings, key)
        }
        settings = dataclasses.replace(self.settings, **shorter)
        return [self._trial(point, settings) for point in self.drawn]

    def second(self, runner: Runner, *, guess: bool = False) -> list[Trial]:
        """Return the trials of the second round: the best quarter, for all epochs.

        Half of them are the best without the class step and half the best with it, in turns.

        Args:
            runner: knows the results.
            guess: take the first points while the best are unknown, to count the runs.
        """
        best = self._best(self.first(), runner, guess=guess)
        return [self._trial(trial.point, self.settings) for trial in best[: self._most]]

    def third(self, runner: Runner, *, guess: bool = False) -> list[Trial]:
        """Return the trials of the third round: as many as in the second, near its best ones.

        In turns near the best without the class step and the best with it.

        Args:
            runner: knows the results.
            guess: take other points while the best are unknown, to count the runs.
        """
        second = self.second(runner, guess=guess)
        best = self._best(second, runner, guess=guess)[:2]
        points = [self._near(best[n % len(best)].point, n) for n in range(self._most) if best]
        return [self._trial(point, self.settings) for point in points]

    def beyond(self, runner: Runner) -> list[Trial]:
        """Return the trials beyond the edges at which winners lie; none before the third round.

        As many per round as in the second, in turns near each winner that lies at an edge.
        """
        found: list[Trial] = []
        for number in range(MOST_BEYOND):
            long = [*self.second(runner), *self.third(runner), *found]
            if not long or not all(trial.ended(runner) for trial in long):
                break
            edged = [trial for trial in self._firsts(long, runner) if self._edges(trial, long)]
            if not edged:
                break
            turns = range(self._most)
            draws = [(edged[n % len(edged)], (number + 1) * self._most + n) for n in turns]
            found += [self._trial(self._near(one.point, n), self.settings) for one, n in draws]
        return found

    def ways(self, runner: Runner, *, guess: bool = False) -> list[Trial]:
        """Return the trials of a late round: the best point with every other way to make bits.

        The best of all points, without or with the class step, so that every row gets as many.

        Args:
            runner: knows the results.
            guess: take some point while the best is unknown, to count the runs.
        """
        cut = any(one.name in OF_HAMMING_CODES for one in self.space)
        if not cut or self.last_round == "numbers":
            return []
        best = self._highest(self._numbers(runner), runner, guess=guess)
        points = [point for trial in best for point in other_ways(self.space, trial.point)]
        return [self._trial(point, self.settings) for point in points]

    def beside(self, runner: Runner, *, guess: bool = False) -> list[Trial]:
        """Return the trials of the last round: the best of all with a classifier beside the head.

        While the largest weight is the best without the class step or with it, one twice as large
        follows, at most seven times.

        Args:
            runner: knows the results.
            guess: as for :meth:`ways`.
        """
        learns = methods.find(self.row.method).info.supervision != "none"
        if not (self.bench.finetune and learns and self.last_round == "classifier"):
            return []
        trials = [*self._numbers(runner), *self.ways(runner)]
        best = self._highest(trials, runner, guess=guess)
        found = [self._beside(trial, weight) for trial in best for weight in CLASSIFIER_WEIGHTS]
        for doubled in range(1, 1 if guess else MOST_DOUBLED + 1):
            ended = bool(found) and all(trial.ended(runner) for trial in found)
            if not ended or found[-1] not in self._firsts([*trials, *found], runner):
                break
            found.append(self._beside(best[0], CLASSIFIER_WEIGHTS[-1] * 2**doubled))
        return found

    def _beside(self, trial: Trial, weight: float) -> Trial:
        """Return a trial of the same point with a classifier beside the head."""
        return self._trial({**trial.point, "classifier_weight": weight}, self.settings)

    def known(self, runner: Runner) -> list[Trial]:
        """Return the trials of every round that is known by now; each result may add some."""
        return [*self.first(), *self.long(runner)]

    def ended(self, runner: Runner) -> bool:
        """Return whether no trial is left: what is known is run, and adds nothing."""
        return all(trial.ended(runner) for trial in self.known(runner))

    def long(self, runner: Runner) -> list[Trial]:
        """Return the trials with all epochs, as far as they are known by now."""
        return [*self._numbers(runner), *self.ways(runner), *self.beside(runner)]

    def _numbers(self, runner: Runner) -> list[Trial]:
        """The same without the last two rounds: the rounds that look for numbers."""
        return [*self.second(runner), *self.third(runner), *self.beyond(runner)]

    @property
    def _most(self) -> int:
        return max(1, self.points // SHORTER)

    @property
    def _seed(self) -> int:
        text = f"{self.bench.slug}\0{self.row.space}"
        return int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "big")

    def _best(self, trials: Sequence[Trial], runner: Runner, *, guess: bool) -> list[Trial]:
        """Return trials, the best without and with the class step in turns; none before all end."""
        if not all(trial.ended(runner) for trial in trials):
            return list(trials) if guess else []
        return in_turns(by_plain(trials, runner), by_step(trials, runner))

    def _highest(self, trials: Sequence[Trial], runner: Runner, *, guess: bool) -> list[Trial]:
        """Return the best of trials, without or with the class step; none before all end."""
        if not all(trial.ended(runner) for trial in [*self.first(), *trials]):
            return self.first()[:1] if guess else []
        return ranked([(trial.highest(runner), trial) for trial in trials])[:1]

    def _near(self, point: Options, number: int) -> dict[str, Any]:
        """Return a point near another: its numbers moved a little, its choices as they are.

        A number at an edge of its range moves outwards.
        """
        rng = np.random.default_rng([self._seed, number])
        return {
            one.name: one.moved(point[one.name], by)
            for one, by in zip(self.space, rng.normal(0.0, NEAR, len(self.space)), strict=True)
        }

    def summary(self, runner: Runner) -> dict[str, Any]:
        """Return the space, the result of every finished trial, and the winners, as JSON."""
        near = [*self.second(runner), *self.third(runner)]
        ended = [trial for trial in self.known(runner) if trial.ended(runner)]
        trials = [trial.to_json(runner) for trial in ended]
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
        if near and all(trial.ended(runner) for trial in near):
            # A winner at an edge is marked, and counts until the rounds beyond the edge are run.
            long = [trial for trial in self.long(runner) if trial.ended(runner)]
            for plain in by_plain(long, runner)[:1]:
                entry["winner"] = self._winner(plain, plain.plain(runner), long)
            for stepped in by_step(long, runner)[:1]:
                step = dict(stepped.step(runner) or {})
                entry["winner_step"] = self._winner(stepped, step.pop("score"), long)
                entry["winner_step"]["class_step"] = step
                entry["winner_step"]["edges"] += stepped.step_edges(runner)
        return entry

    def _winner(self, trial: Trial, score: float | None, others: Sequence[Trial]) -> dict[str, Any]:
        values = parted({**self._equal(), **trial.point})
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

    def _firsts(self, trials: Sequence[Trial], runner: Runner) -> list[Trial]:
        """Return the best without the class step and the best with it; one where they are equal."""
        return in_turns(by_plain(trials, runner)[:1], by_step(trials, runner)[:1])

    def _equal(self) -> Options:
        known = methods.hyper_parameters(methods.find(self.row.method))
        return {key: value for key, value in EQUAL_FOR_ALL.items() if key in known}

    def _trial(self, point: Options, settings: Settings) -> Trial:
        if (known := self.recorded.get(trial_key(point, settings.epochs))) is not None:
            return Trial(point, settings.epochs, recorded=known)
        own = parted({**self._equal(), **point, **self.row.base})
        words = ", ".join(f"{key} {value}" for key, value in point.items())
        settings = dataclasses.replace(
            settings,
            **{**own["settings"], "validation": HELD_OUT, "validation_every": settings.epochs},
        )
        cells = tuple(
            Cell(
                self.bench,
                self.row.method,
                bits,
                settings,
                own["options"],
                measured=False,
                title=f"tuning {self.row.space}, {settings.epochs} epochs, {words}",
            )
            for bits in self.bits
        )
        return Trial(point, settings.epochs, cells)
