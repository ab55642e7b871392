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
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from fisherhash.errors import FisherhashError
from fisherhash.experiments.benches import Bench, Cell
from fisherhash.experiments.runner import Runner
from fisherhash.experiments.specs import BASES, NONE, Options, Row
from fisherhash.system import storage
from fisherhash.training.settings import Settings

BUDGET, FINETUNED_BUDGET = 6, 5
HELD_OUT = 0.2
TUNING_FILE = "tuning.json"


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


# Common learning rates; a whole network needs smaller ones than a head.
FROZEN_RATES, LIVE_RATES = (
    tuple({"learning_rate": value} for value in values)
    for values in ((0.003, 0.01, 0.03, 0.1), (0.001, 0.003, 0.01))
)


def _rates(first: Options, second: Options) -> Space:
    """Return a space of the common learning rates, then two other values."""
    return Space(FROZEN_RATES, LIVE_RATES, (first, second))


def _scales(values: tuple[float, float, float], *own: Options) -> Space:
    """Return a space of loss scales, which act as rates under SGD; such losses are pair means."""
    trials = tuple({"loss_scale": value} for value in values)
    return Space(trials, trials, own)


SPACES: dict[str, Space] = {
    "dfh-p": _rates({"quantization": 0.03}, {"quantization": 0.3}),
    "dfh-pm": _rates({"quantization": 0.03}, {"margin": 2.0}),
    "dfh-pmi": _rates({"margin": 0.5}, {"margin": 2.0}),
    "dfh-c": _rates({"inter": 0.2}, {"inter": 20.0}),
    "dfh-pc": _rates({"quantization": 0.03}, {"quantization": 0.3}),
    "dfh-paper": _rates({"margin": 0.5}, {"margin": 2.0}),
    "dfh-ours": Space(
        FROZEN_RATES,
        # When the network is trained, outputs collapse and signs with them: bits are cut instead.
        tuple({"learning_rate": rate, "width": 64, "quantization": 0.2} for rate in (0.003, 0.01)),
        ({"affinity": 0.2}, {"width": 24, "quantization": 0.2}),
        ({"width": 24}, {"width": 128, "quantization": 0.1}, {"cut": "outputs", "affinity": 0.2}),
    ),
    "dsdh": _scales(
        (2.0, 5.0, 12.0),
        {"quantization": 0.1, "classification": 0.2},
        {"quantization": 0.1, "classification": 2.0},
        {"classification": 0.02},
    ),
    "greedyhash": _rates({"quantization": 0.01}, {"quantization": 1.0}),
    "dpsh": _scales(
        (2.0, 5.0, 12.0), {"quantization": 0.001}, {"quantization": 0.1}, {"quantization": 1.0}
    ),
    "dqn": _rates({"quantization": 0.001}, {"width": 128}),
    "dtsh": _rates({"margin": 0.25}, {"quantization": 0.01}),
    "ninh": _rates({"margin": 2.0}, {"threshold": 0.5}),
    # Little else to search: its targets are computed before training.
    "cnnh": Space(
        tuple({"learning_rate": value} for value in (0.003, 0.01, 0.03, 0.06, 0.1)),
        tuple({"learning_rate": value} for value in (0.0003, 0.001, 0.003, 0.01)),
        ({"sweeps": 30},),
    ),
    "dhn": _scales(
        (3.0, 10.0, 30.0), {"quantization": 0.01}, {"quantization": 1.0}, {"scale": 1.0}
    ),
    "hashnet": _scales((1.0, 3.0, 10.0), {"scale": 5.0}, {"scale": 20.0}, {"final_sharpness": 3.0}),
    "dch": _scales((3.0, 10.0, 30.0), {"gamma": 5.0}, {"gamma": 10.0}, {"quantization": 1.0}),
    "mihash": _scales((3.0, 10.0, 30.0), {"bins": 8}, {"sharpness": 0.5}, {"sharpness": 2.0}),
    "orthohash": _rates({"scale": 4.0}, {"scale": 16.0}),
    "csq": _rates({"quantization": 0.001}, {"quantization": 0.5}),
    "dpn": _rates({"margin": 2.0}, {"margin": 4.0}),
    "dsh": _rates({"margin": 1.0}, {"quantization": 0.1}),
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


UNTUNED = Choice(NONE, NONE, tuned=False)


@dataclass(frozen=True)
class Search:
    """The search for one row's hyper-parameters on one bench.

    Attributes:
        name: the search space, a key of ``SPACES``.
        bench: the images and the network.
        settings: how every trial is trained.
        bits: the code length.
    """

    name: str
    bench: Bench
    settings: Settings
    bits: int

    def first(self) -> list[tuple[Options, Cell]]:
        """Return the first trials: what each changes, and its run."""
        return self._trials(SPACES[self.name].rates(self.bench))

    def second(self, runner: Runner, *, guess: bool = False) -> list[tuple[Options, Cell]]:
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
        others = SPACES[self.name].others(self.bench)
        return self._trials([{**best, **change} for change in others])

    def summary(self, runner: Runner) -> dict[str, Any]:
        """Return the space, the result of every finished trial, and the winner, as JSON."""
        second = self.second(runner)
        trials = self.first() + second
        space = SPACES[self.name]
        entry: dict[str, Any] = {
            "base": dict(base_options(self.name)),
            "space": {
                "first": [dict(change) for change in space.rates(self.bench)],
                "then": [dict(change) for change in space.others(self.bench)],
            },
            "trials": [
                {**change, "validation_map": _score(cell, runner)}
                for change, cell in trials
                if runner.ended(cell)
            ],
        }
        winner = _best(trials, runner)
        if second and winner is not None and all(runner.ended(cell) for _, cell in trials):
            options, settings = _parted(winner)
            entry["winner"] = {"options": options, "settings": settings}
        return entry

    def _trials(self, changes: Sequence[Options]) -> list[tuple[Options, Cell]]:
        method, base = BASES.get(self.name, (self.name, NONE))
        trials = []
        for change in changes:
            options, settings = _parted(change)
            words = ", ".join(f"{key} {value}" for key, value in change.items())
            cell = Cell(
                self.bench,
                method,
                self.bits,
                dataclasses.replace(_held_out(self.settings), **settings),
                {**base, **options},
                measured=False,
                title=f"tuning {self.name} {words}",
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
        bench = {k: v for k, v in dataclasses.asdict(search.bench).items() if k != "weights"}
        entry = {
            "bench": bench,
            "bits": search.bits,
            "seed": settings.seed,
            "settings": dataclasses.asdict(settings),
            "rows": {},
        }
        rows = found.setdefault(search.bench.slug, entry)["rows"]
        rows[search.name] = search.summary(runner)
    return found


class Tuning:
    """The winners by bench and row, from one or several files."""

    def __init__(self, benches: Mapping[str, Any] | None = None) -> None:
        self.benches = dict(benches or {})

    @classmethod
    def load(cls, *paths: Path) -> Tuning:
        """Read files; where several describe a bench, the first one counts."""
        benches: dict[str, Any] = {}
        for path in paths:
            content = storage.read_json(path)
            if not isinstance(content.get("benches"), dict):
                raise FisherhashError(f"{path} is not a tuning file: it has no 'benches'")
            benches = {**content["benches"], **benches}
        return cls(benches)

    @classmethod
    def packaged(cls) -> Tuning:
        """Return the winners that are part of the package."""
        folder = Path(str(resources.files("fisherhash.experiments"))) / "tunings"
        return cls.load(*sorted(folder.glob("*.json")))

    def save(self, path: Path) -> None:
        """Write the winners into a file; other searches' entries in it stay."""
        benches = Tuning.load(path).benches if path.is_file() else {}
        for slug, bench in self.benches.items():
            rows = benches.get(slug, {}).get("rows", {})
            benches[slug] = {**bench, "rows": {**rows, **bench["rows"]}}
        text = storage.dump_json({"benches": benches})
        storage.write_file(path, text)

    def choice(self, bench: Bench, row: Row) -> Choice:
        """Return what a row is trained with on a bench; the defaults where nothing was searched.

        A winner found on top of other base options than the row has now does not count.
        """
        entry = self.benches.get(bench.slug, {}).get("rows", {}).get(row.space, {})
        found = entry.get("winner")
        if found is None or entry.get("base", {}) != base_options(row.space):
            return UNTUNED
        return Choice(found["options"], found["settings"])


def base_options(name: str) -> Options:
    """Return the options a search space starts from."""
    return BASES.get(name, (name, NONE))[1]


def _held_out(settings: Settings) -> Settings:
    """Hold out a part of the training images, measured once, after the last epoch."""
    return dataclasses.replace(settings, validation=HELD_OUT, validation_every=settings.epochs)


def _parted(change: Options) -> tuple[dict[str, Any], dict[str, Any]]:
    """Split a change into options of the method and settings of the training."""
    options = {key: value for key, value in change.items() if key not in _SETTINGS}
    return options, {key: value for key, value in change.items() if key in _SETTINGS}


def _score(cell: Cell, runner: Runner) -> float | None:
    return (runner.row(cell) or {}).get("validation_map")


def _best(trials: Sequence[tuple[Options, Cell]], runner: Runner) -> Options | None:
    """Return the change with the highest validation mAP; None where no trial has one."""
    scores = [(_score(cell, runner), change) for change, cell in trials]
    known = [(score, change) for score, change in scores if score is not None]
    return max(known, key=lambda one: one[0])[1] if known else None
