"""From a request to the grid of runs that answers it, planned once per call."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any

from fisherhash import backbones
from fisherhash.errors import UsageError
from fisherhash.experiments.benches import Bench, Cell, locate
from fisherhash.experiments.request import Request
from fisherhash.experiments.runner import Runner
from fisherhash.experiments.search_space import parted, search_space
from fisherhash.experiments.specs import Part, Row, Source, Spec, find_spec
from fisherhash.experiments.trials import cells_of
from fisherhash.experiments.tuning import POINTS, Search
from fisherhash.experiments.winners import PACKAGED_TUNING, TUNING_FILE, Choice, Tuning, summarise
from fisherhash.system.devices import choose_device
from fisherhash.training.settings import Settings

IMAGE_SIZE = 128
QUICK_EPOCHS = 15
REHEARSAL = {"epochs": 1, "head_epochs": 1, "batch_size": 32}
REHEARSAL_IMAGES = 240
DEFAULT_STEP = {"weight": 1.0, "sharpness": 1.0}
DEFAULT_SEEDS, DEFAULT_FIRST_SEEDS = 3, 5


@dataclass(frozen=True)
class Column:
    """A part of a table as it will be run.

    Attributes:
        part: as in the paper, with rows and bits reduced to the requested ones.
        source: the data set.
        bench: the images and the network.
        settings: how every row is trained.
        seeds: number of seeds.
        first_seeds: number of seeds of the best rows.
        missing: whether this machine has none of the data sets, so that nothing is run.
    """

    part: Part
    source: Source
    bench: Bench
    settings: Settings
    seeds: int
    first_seeds: int = 0
    missing: bool = False


@dataclass
class Plan:
    """The grid of one call.

    Attributes:
        spec: the table or figures.
        columns: its parts with the data of this machine.
        tuning: the hyper-parameters to train with; a search replaces them.
        searches: the searches to run first.
        recorded: the images and weights of earlier searches whose trials count, by bench.
        tune_only: whether nothing but the searches is run.
    """

    spec: Spec
    columns: Sequence[Column]
    tuning: Tuning
    searches: Sequence[Search] = ()
    recorded: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    tune_only: bool = False

    @property
    def benches(self) -> list[Bench]:
        """The benches of all columns with data, each once."""
        return list(dict.fromkeys(column.bench for column in self.columns if not column.missing))

    def learn(self, runner: Runner) -> None:
        """Take the hyper-parameters that the searches found so far."""
        if self.searches:
            self.tuning = Tuning(summarise(self.searches, runner))

    def cell(self, column: Column, row: Row, bits: int, seed: int) -> Cell:
        """Return one run of the table.

        A row and the same row with the class step share their runs where both train alike.
        """
        choice = self.tuning.choice(column.bench, row)
        values = row_values(row, choice)
        twin = row if row.class_step else row.stepped()
        if twin in column.part.rows:
            other = self.tuning.choice(column.bench, twin)
            if not other.tuned:
                other = dataclasses.replace(other, class_step=DEFAULT_STEP)
            if row_values(row, other) == values:
                choice = other
        step = {f"step_{key}": value for key, value in (choice.class_step or {}).items()}
        own = parted({**values, **step})
        return Cell(
            column.bench,
            row.method,
            bits,
            dataclasses.replace(column.settings, **{**own["settings"], "seed": seed}),
            own["options"],
            title=f"{column.bench.name}: {row.name}",
        )

    def cells(self, bench: Bench | None = None, *, without: Collection[str] = ()) -> list[Cell]:
        """Return the runs of the table, each once; of one bench or of all.

        Bench by bench, all rows with the first seed, then with the next.

        Args:
            bench: leave out the others.
            without: leave out the rows of these searches.
        """
        cells: dict[str, Cell] = {}
        for one in self.benches if bench is None else [bench]:
            columns = [column for column in self.columns if column.bench == one]
            for seed, column in product(range(max(c.seeds for c in columns)), columns):
                for bits, row in product(column.part.bits, column.part.rows):
                    if seed < column.seeds and row.space not in without:
                        cell = self.cell(column, row, bits, seed)
                        cells.setdefault(cell.file, cell)
        return list(cells.values())

    def all_cells(self, runner: Runner) -> list[Cell]:
        """Return the trials, as far as they are known by now, and the runs of the table."""
        trials = [
            trial
            for search in self.searches
            for trial in (
                *search.first(),
                *search.second(runner, guess=True),
                *search.third(runner, guess=True),
                *search.beyond(runner),
                *search.ways(runner, guess=True),
                *search.beside(runner, guess=True),
            )
        ]
        return cells_of(trials) + ([] if self.tune_only else self.cells())


def open_cells(plan: Plan, bench: Bench, runner: Runner) -> list[Cell]:
    """Return what can be run on a bench by now: trials, then the rows whose search has ended."""
    searches = [search for search in plan.searches if search.bench == bench]
    trials = cells_of(trial for search in searches for trial in search.known(runner))
    if plan.tune_only:
        return trials
    plan.learn(runner)
    waiting = {search.row.space for search in searches if not search.ended(runner)}
    return trials + plan.cells(bench, without=waiting)


def row_values(row: Row, choice: Choice) -> dict[str, Any]:
    """Return a row's options and settings: what its search fixes, the tuned ones, then its own."""
    return {**row.base, **choice.options, **choice.settings, **row.options}


def make_plan(request: Request) -> Plan:
    """Plan the requested parts of a table with the data of this machine."""
    spec = find_spec(request.target)
    for name in ("trial_epochs", "points", "last_round", "tune_only"):
        if getattr(request, name) != getattr(Request, name) and not request.tune:
            flag = f"--{name.replace('_', '-')}"
            raise UsageError(f"{flag} needs a search; add --tune, or leave it out")
    live, rehearse = request.finetune, request.rehearse
    if live is None:
        live = not request.quick and choose_device(request.device).type == "cuda"
    changes = {**(REHEARSAL if rehearse else {}), **request.settings}
    if changes.get("fixed_layers", -1) < 0:
        changes["fixed_layers"] = fixed_layers(request.backbone, live and not rehearse)
    columns = []
    for part in _reduced(spec, request.only, ends=request.quick):
        present = [source for source in part.sources if locate(source.data) is not None]
        source = (present or part.sources)[0]
        epochs = source.epochs if live else QUICK_EPOCHS if request.quick else Settings.epochs
        bench = Bench(
            source.data,
            source.protocol,
            "tiny" if rehearse else request.backbone,
            None if rehearse else request.weights,
            32 if rehearse else request.image_size or IMAGE_SIZE,
            live,
            REHEARSAL_IMAGES if rehearse else 0,
            request.split_seed,
        )
        settings = Settings(**{"epochs": epochs, **changes})
        few = request.quick or rehearse
        seeds = request.seeds or (1 if few else DEFAULT_SEEDS)
        more = request.first_seeds or (0 if few or request.seeds else DEFAULT_FIRST_SEEDS)
        columns.append(Column(part, source, bench, settings, seeds, more, missing=not present))
    if request.tune:
        earlier = Tuning.load(Path(request.tuning)) if request.tuning else Tuning()
        searches = _searches(columns, request, earlier)
        return Plan(spec, columns, Tuning(), searches, earlier.identities, request.tune_only)
    own = request.folder / TUNING_FILE
    path = request.tuning or (own if own.is_file() else PACKAGED_TUNING)
    return Plan(spec, columns, Tuning.load(Path(path)))


def fixed_layers(backbone: str, live: bool) -> int:
    """Return how many first layers of a backbone keep their weights in a fine-tuned grid."""
    return backbones.early_layers(backbone) if live else 0


def _searches(columns: Sequence[Column], request: Request, earlier: Tuning) -> list[Search]:
    """One search per bench and space, for the rows of all parts; trials of earlier ones count."""
    epochs, points = request.trial_epochs, request.points or POINTS
    found: dict[tuple[Bench, str], Search] = {}
    for column in columns:
        settings = column.settings
        if epochs is not None:
            settings = dataclasses.replace(settings, epochs=epochs)
        for row in column.part.rows:
            if column.missing or not search_space(row, finetune=column.bench.finetune):
                continue
            bits, last = column.part.tuning_bits, request.last_round
            search = earlier.continued(Search(row, column.bench, settings, bits, points, last))
            found.setdefault((column.bench, row.space), search)
    return list(found.values())


def _reduced(spec: Spec, only: Sequence[str], *, ends: bool = False) -> list[Part]:
    """The parts of a table, reduced to some data sets, methods or rows, and code lengths.

    Args:
        spec: the table.
        only: what is wanted; all if empty.
        ends: take the shortest and the longest code length where none is named, and only the rows
            of a quick run where none is named.
    """
    known_data = {source.data for part in spec.parts for source in part.sources}
    known_rows = {name for part in spec.parts for row in part.rows for name in _names(row)}
    lengths = {int(word) for word in only if word.isdigit()}
    data = known_data.intersection(only)
    names = known_rows.intersection(word.lower() for word in only)
    for word in only:
        if not (word.isdigit() or word in data or word.lower() in names):
            known = ", ".join(sorted(known_data | known_rows))
            raise UsageError(
                f"--only does not know '{word}' in {spec.name}; it takes code lengths, {known}"
            )
    parts = []
    for part in spec.parts:
        wanted = lengths or set(part.bits[:: max(1, len(part.bits) - 1)] if ends else part.bits)
        kept = [n for n, bits in enumerate(part.bits) if bits in wanted]
        if names:
            rows = [row for row in part.rows if names & _names(row)]
        else:
            rows = [row for row in part.rows if row.quick or not ends]
        sources = tuple(source for source in part.sources if not data or source.data in data)
        if kept and rows and sources:
            bits = tuple(part.bits[n] for n in kept)
            rows = tuple(
                dataclasses.replace(row, paper=tuple(row.paper[n] for n in kept if row.paper))
                for row in rows
            )
            parts.append(Part(sources, bits, rows, part.tuning_bits))
    if not parts:
        raise UsageError(f"nothing of {spec.name} is left with --only {','.join(only)}")
    return parts


def _names(row: Row) -> set[str]:
    return {row.name.lower(), row.method, row.space}
