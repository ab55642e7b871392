"""From a request to the grid of runs that answers it, planned once per call."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fisherhash import backbones
from fisherhash.errors import UsageError
from fisherhash.experiments.benches import Bench, Cell, locate
from fisherhash.experiments.request import Request
from fisherhash.experiments.runner import Runner
from fisherhash.experiments.specs import Part, Row, Source, Spec, find_spec
from fisherhash.experiments.tuning import (
    SPACES,
    TUNING_FILE,
    Choice,
    Search,
    Tuning,
    base_options,
    summarise,
)
from fisherhash.system.devices import choose_device
from fisherhash.training.settings import Settings

IMAGE_SIZE = 128
QUICK_EPOCHS = 15
REHEARSAL = {"epochs": 1, "head_epochs": 1, "batch_size": 32}
REHEARSAL_IMAGES = 240
DEFAULT_SEEDS = 3


@dataclass(frozen=True)
class Column:
    """A part of a table as it will be run.

    Attributes:
        part: as in the paper, with rows and bits reduced to the requested ones.
        source: the data set on this machine; None where there is none.
        bench: the images and the network; None without data.
        settings: how every row is trained.
        trial_settings: how the trials of a search are trained.
        seeds: number of seeds.
    """

    part: Part
    source: Source | None
    bench: Bench | None
    settings: Settings
    trial_settings: Settings
    seeds: int


@dataclass
class Plan:
    """The grid of one call.

    Attributes:
        spec: the table or figures.
        columns: its parts with the data of this machine.
        tuning: the hyper-parameters to train with; a search replaces them.
        searches: the searches to run first.
        grid: the runs of the table by column, row name, bits and seed, in the order they run.
    """

    spec: Spec
    columns: Sequence[Column]
    tuning: Tuning
    searches: Sequence[Search] = ()
    grid: dict[tuple[int, str, int, int], Cell] = field(init=False)

    def __post_init__(self) -> None:
        self.grid = self._grid()

    @property
    def benches(self) -> list[Bench]:
        """The benches of all columns, each once."""
        return list(dict.fromkeys(column.bench for column in self.columns if column.bench))

    def learn(self, runner: Runner) -> None:
        """Take the hyper-parameters that the searches found so far."""
        if self.searches:
            self.tuning = Tuning(summarise(self.searches, runner))
            self.grid = self._grid()

    def cells(self, bench: Bench | None = None) -> list[Cell]:
        """Return the runs of the table, each once; of one bench or of all."""
        cells: dict[str, Cell] = {}
        for cell in self.grid.values():
            if bench in (None, cell.bench):
                cells.setdefault(cell.file, cell)
        return list(cells.values())

    def all_cells(self, runner: Runner) -> list[Cell]:
        """Return the trials, as far as they are known by now, and the runs of the table."""
        trials = [
            cell
            for search in self.searches
            for _, cell in search.first() + search.second(runner, guess=True)
        ]
        return trials + self.cells()

    def _grid(self) -> dict[tuple[int, str, int, int], Cell]:
        """Bench by bench, all rows with the first seed, then with the next."""
        return {
            (number, row.name, bits, seed): self._cell(column, column.bench, row, bits, seed)
            for bench in self.benches
            for seed in range(max(c.seeds for c in self.columns if c.bench == bench))
            for number, column in enumerate(self.columns)
            if column.bench is not None and column.bench == bench and seed < column.seeds
            for bits in column.part.bits
            for row in column.part.rows
        }

    def _cell(self, column: Column, bench: Bench, row: Row, bits: int, seed: int) -> Cell:
        choice = self.tuning.choice(bench, row)
        return Cell(
            bench,
            row.method,
            bits,
            dataclasses.replace(column.settings, **{**choice.settings, "seed": seed}),
            row_options(row, choice),
            real_queries=row.real_queries,
            title=f"{bench.name}: {row.name}",
        )


def row_options(row: Row, choice: Choice) -> dict[str, Any]:
    """Return the options of a row: those its space starts from, the tuned ones, then its own."""
    return {**base_options(row.space), **choice.options, **row.options}


def make_plan(request: Request) -> Plan:
    """Plan the requested parts of a table with the data of this machine."""
    spec = find_spec(request.target)
    if request.trial_epochs is not None and not request.tune:
        raise UsageError("--trial-epochs needs a search; add --tune, or leave it out")
    live = request.finetune
    if live is None:
        live = not request.quick and choose_device(request.device).type == "cuda"
    changes = {**(REHEARSAL if request.rehearse else {}), **request.settings}
    if changes.get("fixed_layers", -1) < 0:
        changes["fixed_layers"] = fixed_layers(request.backbone, live and not request.rehearse)
    columns = []
    for part in _reduced(spec, request.only):
        source = next((s for s in part.sources if locate(s.data) is not None), None)
        own = {"epochs": QUICK_EPOCHS} if request.quick else {}
        own = {"epochs": (source or part.sources[0]).epochs} if live else own
        settings = Settings(**{**own, **changes})
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
        seeds = request.seeds or (1 if request.quick or request.rehearse else DEFAULT_SEEDS)
        columns.append(Column(part, source, bench, settings, trial, seeds))
    if request.tune:
        return Plan(spec, columns, Tuning(), _searches(columns))
    if request.tuning is not None:
        return Plan(spec, columns, Tuning.load(Path(request.tuning)))
    own_file = request.folder / TUNING_FILE
    found = Tuning.load(own_file) if own_file.is_file() else Tuning.packaged()
    return Plan(spec, columns, found)


def fixed_layers(backbone: str, live: bool) -> int:
    """Return how many first layers of a backbone keep their weights in a fine-tuned grid."""
    return backbones.early_layers(backbone) if live else 0


def _searches(columns: Sequence[Column]) -> list[Search]:
    """One search per bench and search space, for the rows of all parts."""
    found: dict[tuple[Bench, str], Search] = {}
    for column in columns:
        for row in column.part.rows:
            if column.bench is not None and row.space in SPACES:
                bits = column.part.tuning_bits
                search = Search(row.space, column.bench, column.trial_settings, bits)
                found.setdefault((column.bench, row.space), search)
    return list(found.values())


def _reduced(spec: Spec, only: Sequence[str]) -> list[Part]:
    """The parts of a table, reduced to some data sets, methods or rows, and code lengths."""
    known_data = {source.data for part in spec.parts for source in part.sources}
    known_rows = {name for part in spec.parts for row in part.rows for name in _names(row)}
    lengths = {int(word) for word in only if word.isdigit()}
    words = [word for word in only if not word.isdigit()]
    data = known_data & set(words)
    names = {word.lower() for word in words if word not in data}
    for word in words:
        if word not in data and word.lower() not in known_rows:
            known = ", ".join(sorted(known_data | known_rows))
            raise UsageError(
                f"--only does not know '{word}' in {spec.name}; it takes code lengths, {known}"
            )
    parts = []
    for part in spec.parts:
        kept = [n for n, bits in enumerate(part.bits) if not lengths or bits in lengths]
        reduced = Part(
            tuple(source for source in part.sources if not data or source.data in data),
            tuple(part.bits[n] for n in kept),
            tuple(
                dataclasses.replace(row, paper=tuple(row.paper[n] for n in kept if row.paper))
                for row in part.rows
                if not names or names & _names(row)
            ),
            part.tuning_bits,
        )
        if reduced.sources and reduced.bits and reduced.rows:
            parts.append(reduced)
    if not parts:
        raise UsageError(f"nothing of {spec.name} is left with --only {','.join(only)}")
    return parts


def _names(row: Row) -> set[str]:
    return {row.name.lower(), row.method, row.space}
