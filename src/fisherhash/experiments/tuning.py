"""Fair tuning: every row of a table gets the same few trials, on held-out training images.

The first trials are learning rates; the second ones change the method's own hyper-parameters at
the best rate: four and two on frozen features, three and two when the network is trained. Methods
whose loss is scaled search three scales instead of rates. CNNH has little else to search and gets
more rates; DFH (ours) has more ways to make its bits and gets fewer.
All trials use one code length and one seed. A fifth of the training images is held out, and the mAP
after the last epoch decides, each held-out image queried against the others: like most of a
database, they were not trained on. The queries are never used. Everything else is equal for all:
network, augmentation, epochs, batch size, optimiser.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fisherhash.errors import FisherhashError
from fisherhash.experiments.benches import Bench, Cell
from fisherhash.experiments.runner import Runner
from fisherhash.experiments.specs import Options, Row
from fisherhash.experiments.tables import dump_results
from fisherhash.system import storage
from fisherhash.training.settings import Settings

BUDGET, FINETUNED_BUDGET = 6, 5
HELD_OUT = 0.2
TUNING_FILE = "tuning.json"
PACKAGED_TUNING = Path(__file__).parent / "tunings" / "quick.json"
"""The winners that are part of the package."""


@dataclass(frozen=True)
class Space:
    """What is searched for one row.

    Attributes:
        frozen: the first trials on frozen features; each changes settings or options.
        finetuned: the first trials when the network is trained.
        own: the second trials, on top of the best first trial; cut to the budget.
        own_finetuned: the second trials when the network is trained, where they differ.
    """

    frozen: tuple[Options, ...]
    finetuned: tuple[Options, ...]
    own: tuple[Options, ...]
    own_finetuned: tuple[Options, ...] = ()

    def rates(self, bench: Bench) -> tuple[Options, ...]:
        """Return the first trials on a bench."""
        return self.finetuned if bench.finetune else self.frozen

    def others(self, bench: Bench) -> tuple[Options, ...]:
        """Return the second trials on a bench."""
        budget = FINETUNED_BUDGET if bench.finetune else BUDGET
        own = self.own_finetuned if bench.finetune and self.own_finetuned else self.own
        return own[: budget - len(self.rates(bench))]


def _each(name: str, *values: float, **others: Any) -> tuple[Options, ...]:
    """Return one trial per value of a setting or option, with the same others."""
    return tuple({name: value, **others} for value in values)


# Common learning rates; a whole network needs smaller ones than a head.
FROZEN_RATES = _each("learning_rate", 0.003, 0.01, 0.03, 0.1)
LIVE_RATES = _each("learning_rate", 0.001, 0.003, 0.01)


def _rates(*own: Options) -> Space:
    """Return a space of the common learning rates, then two other values."""
    return Space(FROZEN_RATES, LIVE_RATES, own)


def _scales(values: Sequence[float], *own: Options) -> Space:
    """Return a space of loss scales, which act as rates under SGD; such losses are pair means."""
    trials = _each("loss_scale", *values)
    return Space(trials, trials, own)


SPACES: dict[str, Space] = {
    "dfh-p": _rates(*_each("quantization", 0.03, 0.3)),
    "dfh-pm": _rates({"quantization": 0.03}, {"margin": 2.0}),
    "dfh-pmi": _rates(*_each("margin", 0.5, 2.0)),
    "dfh-c": _rates(*_each("inter", 0.2, 20.0)),
    "dfh-pc": _rates(*_each("quantization", 0.03, 0.3)),
    "dfh-paper": _rates(*_each("margin", 0.5, 2.0)),
    "dfh-ours": Space(
        FROZEN_RATES,
        # When the network is trained, outputs collapse and signs with them: bits are cut instead.
        _each("learning_rate", 0.003, 0.01, width=64, quantization=0.2),
        ({"affinity": 0.2}, {"width": 24, "quantization": 0.2}),
        ({"width": 24}, {"width": 128, "quantization": 0.1}, {"cut": "outputs", "affinity": 0.2}),
    ),
    "dsdh": _scales(
        (2.0, 5.0, 12.0),
        {"quantization": 0.1, "classification": 0.2},
        {"quantization": 0.1, "classification": 2.0},
        {"classification": 0.02},
    ),
    "greedyhash": _rates(*_each("quantization", 0.01, 1.0)),
    "dpsh": _scales((2.0, 5.0, 12.0), *_each("quantization", 0.001, 0.1, 1.0)),
    "dqn": _rates({"quantization": 0.001}, {"width": 128}),
    "dtsh": _rates({"margin": 0.25}, {"quantization": 0.01}),
    "ninh": _rates({"margin": 2.0}, {"threshold": 0.5}),
    # Little else to search: its targets are computed before training.
    "cnnh": Space(
        _each("learning_rate", 0.003, 0.01, 0.03, 0.06, 0.1),
        _each("learning_rate", 0.0003, 0.001, 0.003, 0.01),
        ({"sweeps": 30},),
    ),
    "dhn": _scales((3.0, 10.0, 30.0), *_each("quantization", 0.01, 1.0), {"scale": 1.0}),
    "hashnet": _scales((1.0, 3.0, 10.0), *_each("scale", 5.0, 20.0), {"final_sharpness": 3.0}),
    "mihash": _scales((3.0, 10.0, 30.0), {"bins": 8}, *_each("sharpness", 0.5, 2.0)),
}
_SETTINGS = {field.name for field in dataclasses.fields(Settings)}


@dataclass(frozen=True)
class Choice:
    """What a row is trained with, beyond what defines the row.

    Attributes:
        options: hyper-parameters of the method.
        settings: training settings.
        tuned: whether a search chose them; False for the defaults.
    """

    options: Mapping[str, Any]
    settings: Mapping[str, Any]
    tuned: bool = True


UNTUNED = Choice({}, {}, tuned=False)
Trial = tuple[Options, Cell]
"""What a trial changes, and its run."""


@dataclass(frozen=True)
class Search:
    """The search for one row's hyper-parameters on one bench.

    Attributes:
        row: a row whose search space is in ``SPACES``.
        bench: the images and the network.
        settings: how every trial is trained.
        bits: the code length.
    """

    row: Row
    bench: Bench
    settings: Settings
    bits: int

    def first(self) -> list[Trial]:
        """Return the first trials."""
        return self._trials(SPACES[self.row.space].rates(self.bench))

    def second(self, runner: Runner, *, guess: bool = False) -> list[Trial]:
        """Return the second trials, on top of the best first one.

        Args:
            runner: knows the results.
            guess: build on any first trial while the best is unknown, to count the runs.
        """
        first = self.first()
        best = _best(first, runner)
        if not all(runner.ended(cell) for _, cell in first):
            best = first[0][0] if guess else None
        if best is None:
            return []
        others = SPACES[self.row.space].others(self.bench)
        return self._trials([{**best, **change} for change in others])

    def summary(self, runner: Runner) -> dict[str, Any]:
        """Return the space, the result of every finished trial, and the winner, as JSON."""
        second = self.second(runner)
        trials = self.first() + second
        ended = [trial for trial in trials if runner.ended(trial[1])]
        space = SPACES[self.row.space]
        entry: dict[str, Any] = {
            "base": dict(self.row.base),
            "space": {
                "first": list(space.rates(self.bench)),
                "then": list(space.others(self.bench)),
            },
            "trials": [
                {**change, "validation_map": _score(cell, runner)} for change, cell in ended
            ],
        }
        winner = _best(trials, runner)
        if second and winner is not None and len(ended) == len(trials):
            entry["winner"] = _parted(winner)
        return entry

    def _trials(self, changes: Sequence[Options]) -> list[Trial]:
        trials = []
        for change in changes:
            own = _parted(change)
            words = ", ".join(f"{key} {value}" for key, value in change.items())
            cell = Cell(
                self.bench,
                self.row.method,
                self.bits,
                dataclasses.replace(_held_out(self.settings), **own["settings"]),
                {**self.row.base, **own["options"]},
                measured=False,
                title=f"tuning {self.row.space} {words}",
            )
            trials.append((change, cell))
        return trials


def tune(runner: Runner, searches: Sequence[Search]) -> bool:
    """Run the trials of some searches; returns whether all of them are done."""
    for trials in (Search.first, lambda search: search.second(runner)):
        cells = [cell for search in searches for _, cell in trials(search)]
        runner.run(cells)
        if runner.left(cells) and runner.late:
            return False
    return True


def summarise(searches: Sequence[Search], runner: Runner) -> dict[str, Any]:
    """Return what was searched on each bench, by its slug, as JSON."""
    found: dict[str, Any] = {}
    for search in searches:
        settings = _held_out(search.settings)
        entry = {
            "bench": search.bench.to_json(),
            "bits": search.bits,
            "seed": settings.seed,
            "settings": dataclasses.asdict(settings),
            "rows": {},
        }
        rows = found.setdefault(search.bench.slug, entry)["rows"]
        rows[search.row.space] = search.summary(runner)
    return found


@dataclass(frozen=True)
class Tuning:
    """The winners by bench and row.

    Attributes:
        benches: what was searched, by the slug of the bench.
    """

    benches: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def load(cls, path: Path) -> Tuning:
        """Read a file."""
        benches = storage.read_json(path).get("benches")
        if not isinstance(benches, dict):
            raise FisherhashError(f"{path} is not a tuning file: it has no 'benches'")
        return cls(benches)

    def save(self, path: Path) -> None:
        """Write the winners into a file; other searches' entries in it stay."""
        benches = Tuning.load(path).benches if path.is_file() else {}
        for slug, bench in self.benches.items():
            rows = benches.get(slug, {}).get("rows", {})
            benches[slug] = {**bench, "rows": {**rows, **bench["rows"]}}
        storage.write_file(path, dump_results({"benches": benches}))

    def choice(self, bench: Bench, row: Row) -> Choice:
        """Return what a row is trained with on a bench; the defaults where nothing was searched.

        A winner found on top of other base options than the row has now does not count.
        """
        entry = self.benches.get(bench.slug, {}).get("rows", {}).get(row.space, {})
        if "winner" not in entry or entry.get("base", {}) != row.base:
            return UNTUNED
        return Choice(entry["winner"]["options"], entry["winner"]["settings"])


def _held_out(settings: Settings) -> Settings:
    """Hold out a part of the training images, measured once, after the last epoch."""
    return dataclasses.replace(settings, validation=HELD_OUT, validation_every=settings.epochs)


def _parted(change: Options) -> dict[str, dict[str, Any]]:
    """Split a change into options of the method and settings of the training."""
    return {
        "options": {key: value for key, value in change.items() if key not in _SETTINGS},
        "settings": {key: value for key, value in change.items() if key in _SETTINGS},
    }


def _score(cell: Cell, runner: Runner) -> float | None:
    return (runner.row(cell) or {}).get("validation_map")


def _best(trials: Sequence[Trial], runner: Runner) -> Options | None:
    """Return the change with the highest validation mAP; None where no trial has one."""
    scores = [(_score(cell, runner), change) for change, cell in trials]
    known = [(score, change) for score, change in scores if score is not None]
    return max(known, key=lambda one: one[0])[1] if known else None
