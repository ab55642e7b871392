"""What is asked for, and the grid that answers it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fisherhash import backbones
from fisherhash.errors import FisherhashError, UsageError, unknown_name
from fisherhash.experiments import specs, tuning
from fisherhash.experiments.benches import Bench, Cell, locate
from fisherhash.experiments.runner import Runner
from fisherhash.experiments.specs import Part, Row, Source, Spec
from fisherhash.experiments.tuning import Choice, Tuning
from fisherhash.system.devices import choose_device
from fisherhash.training.loop import Settings

IMAGE_SIZE = 128
QUICK = Settings(epochs=15)
FROZEN = Settings()
REHEARSAL = {"epochs": 1, "head_epochs": 1, "batch_size": 32}
REHEARSAL_IMAGES = 240
SEEDS = 3


@dataclass(frozen=True)
class Request:
    """What is asked for; plain values, so that it travels between processes as JSON.

    Attributes:
        target: name of the table or figure.
        out: folder for all results.
        quick: frozen features, one seed, few epochs: minutes on two cores.
        backbone: one for all.
        weights: its weights file.
        image_size: side of the images.
        finetune: train the whole network; None for yes on CUDA and no elsewhere.
        seeds: how many; None for three, or one when quick.
        only: names of data sets, methods or rows, and code lengths to keep.
        settings: what differs from the usual training, equal for all.
        tune: search the hyper-parameters first.
        trial_epochs: of a search; None for as many as in the table.
        tuning_file: take the winners of an earlier search from here.
        rehearse: a tiny network on few images, to see that everything works.
        device: where.
    """

    target: str
    out: str
    quick: bool = False
    backbone: str = backbones.DEFAULT
    weights: str | None = None
    image_size: int | None = None
    finetune: bool | None = None
    seeds: int | None = None
    only: Sequence[str] = ()
    settings: Mapping[str, Any] = field(default_factory=dict)
    tune: bool = False
    trial_epochs: int | None = None
    tuning_file: str | None = None
    rehearse: bool = False
    device: str | None = None


@dataclass(frozen=True)
class Column:
    """A part of a table as it will be run.

    Attributes:
        part: as in the paper, rows and bits reduced to those asked for.
        source: the data set that is there; None where none is.
        bench: where it runs; None without data.
        settings: how every row is trained.
        trial_settings: how it is trained in a search.
        seeds: how many.
    """

    part: Part
    source: Source | None
    bench: Bench | None
    settings: Settings
    trial_settings: Settings
    seeds: int


def parse_settings(pairs: Sequence[str]) -> dict[str, Any]:
    """NAME=VALUE texts as values of :class:`Settings`.

    >>> parse_settings(["epochs=30", "dropout=0.5"])
    {'epochs': 30, 'dropout': 0.5}
    """
    defaults = {one.name: one.default for one in dataclasses.fields(Settings)}
    values: dict[str, Any] = {}
    for pair in pairs:
        name, mark, text = pair.partition("=")
        name = name.strip().replace("-", "_")
        if not mark:
            raise UsageError(f"a setting is given as NAME=VALUE, got '{pair}'")
        if name not in defaults or name == "seed":
            raise unknown_name("setting", name, [known for known in defaults if known != "seed"])
        try:
            values[name] = type(defaults[name])(text)
        except ValueError:
            raise UsageError(f"{name} must be a number, got '{text}'") from None
    Settings(**values)
    return values


def plan(request: Request) -> list[Column]:
    """The table's parts with the data that is there, reduced to what was asked for."""
    spec = specs.find(request.target)
    live = request.finetune
    if live is None:
        live = not request.quick and choose_device(request.device).type == "cuda"
    base = QUICK if request.quick and not live else FROZEN
    if request.trial_epochs is not None and not request.tune:
        raise UsageError("--trial-epochs is for a search; give --tune too, or leave it out")
    changes = {**(REHEARSAL if request.rehearse else {}), **request.settings}
    if changes.get("fixed_layers", -1) < 0:
        early = backbones.early_layers(request.backbone)
        changes["fixed_layers"] = early if live and not request.rehearse else 0
    seeds = request.seeds or (1 if request.quick or request.rehearse else SEEDS)
    only = _Only(request.only, spec)
    columns = []
    for part in spec.parts:
        sources = [source for source in part.sources if only.source(source)]
        rows = tuple(row for row in part.rows if only.row(row))
        bits = tuple(length for length in part.bits if only.length(length))
        if not (sources and rows and bits):
            continue
        source = next((s for s in sources if locate(s.data) is not None), None)
        own = {"epochs": (source or sources[0]).epochs} if live else {}
        settings = dataclasses.replace(base, **{**own, **changes})
        trial = settings
        if request.trial_epochs is not None:
            trial = dataclasses.replace(settings, epochs=request.trial_epochs)
        bench = None
        if source is not None:
            bench = Bench(
                source.data,
                source.protocol,
                "tiny" if request.rehearse else request.backbone,
                request.weights,
                32 if request.rehearse else request.image_size or IMAGE_SIZE,
                live,
                REHEARSAL_IMAGES if request.rehearse else 0,
            )
        kept = [part.bits.index(length) for length in bits]
        reduced = dataclasses.replace(
            part,
            bits=bits,
            rows=tuple(
                dataclasses.replace(row, paper=tuple(row.paper[k] for k in kept if row.paper))
                for row in rows
            ),
        )
        columns.append(Column(reduced, source, bench, settings, trial, seeds))
    if not columns:
        raise UsageError(f"nothing of {spec.name} is left with --only {','.join(request.only)}")
    return columns


def winners(request: Request, columns: Sequence[Column], runner: Runner) -> Tuning:
    """The hyper-parameters to train with: of this search, of a file, or of the package."""
    if request.tune:
        found = {
            bench.slug: tuning.summary(runner, bench, settings, rows, bits=bits)
            for bench, settings, rows, bits in tunings(columns)
        }
        return Tuning(found)
    if request.tuning_file is not None:
        return Tuning.load(Path(request.tuning_file))
    own = runner.folder / tuning.FILE
    return Tuning.load(own) if own.is_file() else Tuning.packaged()


def table_cells(columns: Sequence[Column], found: Tuning) -> list[Cell]:
    """The runs of a table, a bench after the other: all rows with the first seed, then the next."""
    cells: dict[str, Cell] = {}
    for bench in dict.fromkeys(column.bench for column in columns if column.bench):
        own = [column for column in columns if column.bench == bench]
        for seed in range(max(column.seeds for column in own)):
            for column in own:
                for length in column.part.bits:
                    for row in column.part.rows:
                        cell = row_cell(column, row, length, seed, found)
                        cells.setdefault(cell.file, cell)
    return list(cells.values())


def row_cell(column: Column, row: Row, bits: int, seed: int, found: Tuning) -> Cell:
    """One run of a table."""
    if column.bench is None:
        raise FisherhashError(f"there is no data for {row.name}")
    choice = found.choice(column.bench, row)
    how = {**choice.settings, **row.settings, "seed": seed}
    return Cell(
        column.bench,
        row.method,
        bits,
        dataclasses.replace(column.settings, **how),
        row_options(row, choice),
        real_queries=row.real_queries,
        title=f"{column.bench.data}: {row.name}",
    )


def row_options(row: Row, choice: Choice) -> dict[str, Any]:
    """What a space starts from, then what was tuned, then what makes the row."""
    return {**tuning.base_options(row.space), **choice.options, **row.options}


def all_cells(request: Request, columns: Sequence[Column], runner: Runner) -> list[Cell]:
    """The trials, as far as they are known by now, and the runs of the table."""
    cells: list[Cell] = []
    if request.tune:
        for bench, settings, rows, bits in tunings(columns):
            for name in tuning.spaces(rows):
                cells += tuning.all_trials(name, bench, settings, bits, runner)
    return cells + table_cells(columns, winners(request, columns, runner))


def tunings(columns: Sequence[Column]) -> list[tuple[Bench, Settings, list[Row], int]]:
    """What is searched: one search a bench, for the rows of all its parts."""
    found: dict[Bench, tuple[Bench, Settings, list[Row], int]] = {}
    for column in columns:
        if column.bench is not None:
            start = (column.bench, column.trial_settings, [], column.part.tuning_bits)
            found.setdefault(column.bench, start)[2].extend(column.part.rows)
    return list(found.values())


class _Only:
    """Words that reduce a table: data sets, methods or rows, code lengths; each kind by itself."""

    def __init__(self, words: Sequence[str], spec: Spec) -> None:
        sources = {source.data for part in spec.parts for source in part.sources}
        rows = {
            key.lower()
            for part in spec.parts
            for row in part.rows
            for key in (row.name, row.method, row.space)
        }
        self.sources: set[str] = set()
        self.rows: set[str] = set()
        self.bits: set[int] = set()
        for word in words:
            if word.isdigit():
                self.bits.add(int(word))
            elif word in sources:
                self.sources.add(word)
            elif word.lower() in rows:
                self.rows.add(word.lower())
            else:
                known = ", ".join(sorted(sources | rows))
                raise UsageError(
                    f"--only does not know '{word}' in {spec.name}; it takes code lengths, {known}"
                )

    def source(self, source: Source) -> bool:
        return not self.sources or source.data in self.sources

    def row(self, row: Row) -> bool:
        names = {row.name.lower(), row.method, row.space}
        return not self.rows or bool(names & self.rows)

    def length(self, bits: int) -> bool:
        return not self.bits or bits in self.bits
