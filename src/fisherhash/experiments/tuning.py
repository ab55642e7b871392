"""Fair tuning: every row of a table gets the same few trials, on held-out training images.

First learning rates, then other values of the method's own hyper-parameters at the best rate: four
and two on frozen features, three and two when the network is trained. Where a method's loss is
scaled, three scales stand for the rates; CNNH, which has little else to search, gets more rates,
DFH (ours), which has more ways to make its bits, fewer.
One code length, one seed; a fifth of the training images is held out, and after the last epoch its
mAP decides, each held-out image asking all others: like most of a database, they were not trained
on. Queries are never looked at. What is not searched is equal for all: network, augmentation,
epochs, batch size, optimiser.
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
from fisherhash.training.loop import Settings

BUDGET, FINETUNED_BUDGET = 6, 5
VALIDATION = 0.2
FILE = "tuning.json"
PACKAGED = "tunings"


@dataclass(frozen=True)
class Space:
    """What is searched for one row.

    Attributes:
        frozen: the first trials on frozen features; each is a change of settings or options.
        finetuned: the first trials when the network is trained.
        own: the second trials, tried on top of the best of the first; as many as the budget has.
        own_finetuned: the second trials when the network is trained, where they differ.
    """

    frozen: tuple[Options, ...]
    finetuned: tuple[Options, ...]
    own: tuple[Options, ...]
    own_finetuned: tuple[Options, ...] = ()

    def rates(self, bench: Bench) -> tuple[Options, ...]:
        """The first trials on a bench."""
        return self.finetuned if bench.finetune else self.frozen

    def others(self, bench: Bench) -> tuple[Options, ...]:
        """The second trials on a bench."""
        budget = FINETUNED_BUDGET if bench.finetune else BUDGET
        own = self.own_finetuned if bench.finetune and self.own_finetuned else self.own
        return own[: budget - len(self.rates(bench))]


# Common learning rates; a whole network wants smaller ones than a head.
FROZEN_RATES, LIVE_RATES = (
    tuple({"learning_rate": value} for value in values)
    for values in ((0.003, 0.01, 0.03, 0.1), (0.001, 0.003, 0.01))
)


def _rates(first: Options, second: Options) -> Space:
    """The common learning rates, then two other values."""
    return Space(FROZEN_RATES, LIVE_RATES, (first, second))


def _scales(values: tuple[float, float, float], *own: Options) -> Space:
    """Scales of the loss. With SGD that is a learning rate; these losses are means over pairs."""
    trials_ = tuple({"loss_scale": value} for value in values)
    return Space(trials_, trials_, own)


SPACES: dict[str, Space] = {
    "dfh-p": _rates({"quantization": 0.03}, {"quantization": 0.3}),
    "dfh-pm": _rates({"quantization": 0.03}, {"margin": 2.0}),
    "dfh-pmi": _rates({"margin": 0.5}, {"margin": 2.0}),
    "dfh-c": _rates({"inter": 0.2}, {"inter": 20.0}),
    "dfh-pc": _rates({"quantization": 0.03}, {"quantization": 0.3}),
    "dfh-paper": _rates({"margin": 0.5}, {"margin": 2.0}),
    "dfh-ours": Space(
        FROZEN_RATES,
        # Outputs collapse when the network is trained, and signs with them: there bits are cut.
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
    # It has next to nothing else to search: its targets are found before the training.
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
    """What a row is trained with, beyond what makes it a row.

    Attributes:
        options: of the method.
        settings: of the training.
        tuned: whether a search chose it; False for the defaults.
    """

    options: Mapping[str, Any]
    settings: Mapping[str, Any]
    tuned: bool = True


UNTUNED = Choice(NONE, NONE, tuned=False)


def tune(
    runner: Runner, bench: Bench, settings: Settings, rows: Sequence[Row], *, bits: int
) -> bool:
    """Search the rows' spaces on one bench; returns whether all of it is done."""
    names = spaces(rows)
    first = [cell for name in names for cell in trials(name, bench, settings, bits)]
    runner.run(first)
    if runner.left(first) and runner.late:
        return False
    second = [cell for name in names for cell in own_trials(name, bench, settings, bits, runner)]
    runner.run(second)
    return not (runner.left(second) and runner.late)


def spaces(rows: Sequence[Row]) -> list[str]:
    """The search spaces of some rows, each once."""
    return list(dict.fromkeys(row.space for row in rows if row.space in SPACES))


def trials(name: str, bench: Bench, settings: Settings, bits: int) -> list[Cell]:
    """The first trials of a space."""
    return [_trial(name, change, bench, settings, bits) for change in SPACES[name].rates(bench)]


def own_trials(
    name: str, bench: Bench, settings: Settings, bits: int, runner: Runner
) -> list[Cell]:
    """The second trials, on top of the best of the first; none before those have ended."""
    first = trials(name, bench, settings, bits)
    done = _scores(first, runner)
    if not done or not all(runner.ended(cell) for cell in first):
        return []
    rate = SPACES[name].rates(bench)[max(done, key=lambda number: done[number])]
    changes = [{**rate, **change} for change in SPACES[name].others(bench)]
    return [_trial(name, change, bench, settings, bits) for change in changes]


def all_trials(
    name: str, bench: Bench, settings: Settings, bits: int, runner: Runner
) -> list[Cell]:
    """First and second trials; before the first have ended, the second on top of any of them."""
    first = trials(name, bench, settings, bits)
    if all(runner.ended(cell) for cell in first):
        return first + own_trials(name, bench, settings, bits, runner)
    rate = SPACES[name].rates(bench)[0]
    guessed = [{**rate, **change} for change in SPACES[name].others(bench)]
    return first + [_trial(name, change, bench, settings, bits) for change in guessed]


def summary(
    runner: Runner, bench: Bench, settings: Settings, rows: Sequence[Row], *, bits: int
) -> dict[str, Any]:
    """What was searched on a bench, what each trial gave, and the winners, as JSON."""
    found = {}
    for name in spaces(rows):
        first = trials(name, bench, settings, bits)
        second = own_trials(name, bench, settings, bits, runner)
        cells = first + second
        scores = _scores(cells, runner)
        changes = [dict(change) for change in SPACES[name].rates(bench)]
        if second:
            rate = changes[max(range(len(first)), key=lambda n: scores.get(n, -1.0))]
            changes += [{**rate, **change} for change in SPACES[name].others(bench)]
        entry: dict[str, Any] = {
            "base": dict(base_options(name)),
            "space": {
                "first": [dict(change) for change in SPACES[name].rates(bench)],
                "then": [dict(change) for change in SPACES[name].others(bench)],
            },
            "trials": [
                changes[number] | {"validation_map": scores.get(number)}
                for number, cell in enumerate(cells)
                if runner.ended(cell)
            ],
        }
        if second and all(runner.ended(cell) for cell in cells):
            winner = changes[max(scores, key=lambda number: scores[number])]
            entry["winner"] = {
                "options": {k: v for k, v in winner.items() if k not in _SETTINGS},
                "settings": {k: v for k, v in winner.items() if k in _SETTINGS},
            }
        found[name] = entry
    held = _held(settings)
    return {
        "bench": {k: v for k, v in dataclasses.asdict(bench).items() if k != "weights"},
        "bits": bits,
        "seed": held.seed,
        "settings": dataclasses.asdict(held),
        "rows": found,
    }


class Tuning:
    """Winners by bench and row, from one or several files."""

    def __init__(self, benches: Mapping[str, Any] | None = None) -> None:
        self.benches = dict(benches or {})

    @classmethod
    def load(cls, *paths: Path) -> Tuning:
        """Read files; where several name a bench the first one counts."""
        benches: dict[str, Any] = {}
        for path in paths:
            content = storage.read_json(path)
            if not isinstance(content.get("benches"), dict):
                raise FisherhashError(f"{path} is no tuning file: it has no 'benches'")
            benches = {**content["benches"], **benches}
        return cls(benches)

    @classmethod
    def packaged(cls) -> Tuning:
        """What was searched for --quick and is part of the package."""
        folder = resources.files("fisherhash.experiments").joinpath(PACKAGED)
        items = folder.iterdir() if folder.is_dir() else ()
        paths = [Path(str(item)) for item in items if item.name.endswith(".json")]
        return cls.load(*sorted(paths))

    def save(self, path: Path) -> None:
        """Write it into a file, which keeps what other searches wrote there."""
        benches = Tuning.load(path).benches if path.is_file() else {}
        for slug, bench in self.benches.items():
            rows = benches.get(slug, {}).get("rows", {})
            benches[slug] = {**bench, "rows": {**rows, **bench["rows"]}}
        text = storage.dump_json({"benches": benches})
        storage.write_files(path.parent, {path.name: storage.write_text(text)})

    def choice(self, bench: Bench, row: Row) -> Choice:
        """What a row is trained with on a bench; the defaults where nothing was searched.

        A winner that was found on top of other options than the row has today counts as nothing.
        """
        entry = self.benches.get(bench.slug, {}).get("rows", {}).get(row.space, {})
        found = entry.get("winner")
        if found is None or entry.get("base", {}) != base_options(row.space):
            return UNTUNED
        return Choice(found["options"], found["settings"])


def base_options(name: str) -> Options:
    """The options a space starts from."""
    return BASES.get(name, (name, NONE))[1]


def _held(settings: Settings) -> Settings:
    """A part of the training images held out, and measured once, at the end."""
    return dataclasses.replace(settings, validation=VALIDATION, validation_every=settings.epochs)


def _trial(name: str, change: Options, bench: Bench, settings: Settings, bits: int) -> Cell:
    method, base = BASES.get(name, (name, NONE))
    own = {k: v for k, v in change.items() if k not in _SETTINGS}
    how = {k: v for k, v in change.items() if k in _SETTINGS}
    return Cell(
        bench,
        method,
        bits,
        dataclasses.replace(_held(settings), **how),
        {**base, **own},
        measured=False,
        title=f"tuning {name} {_words(change)}",
    )


def _scores(cells: Sequence[Cell], runner: Runner) -> dict[int, float]:
    """Validation mAP of the finished trials by their number."""
    rows = {number: runner.row(cell) for number, cell in enumerate(cells)}
    return {
        number: row["validation_map"]
        for number, row in rows.items()
        if row is not None and row.get("validation_map") is not None
    }


def _words(change: Options) -> str:
    return ", ".join(f"{key} {value}" for key, value in change.items())
