"""From a request to the grid of runs that answers it, and from the finished runs to its table."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any

from fisherhash import backbones
from fisherhash.errors import UsageError
from fisherhash.experiments.cells import Cell, Setup, locate
from fisherhash.experiments.comparison import (
    HAMMING_RANKING,
    RANKINGS,
    QueryValues,
    comparisons,
)
from fisherhash.experiments.request import Request
from fisherhash.experiments.runner import Runner
from fisherhash.experiments.significance import unpack_shares
from fisherhash.experiments.specs import Part, Row, Source, Spec, find_spec
from fisherhash.experiments.trials import cells_of, parted, search_space
from fisherhash.experiments.tuning import POINTS, Tuning
from fisherhash.experiments.winners import PACKAGED_TUNING, TUNING_FILE, UNTUNED, Choice, Winners
from fisherhash.system.devices import choose_device
from fisherhash.training.settings import Settings

IMAGE_SIZE = 128
QUICK_EPOCHS = 15
REHEARSAL = {"epochs": 1, "head_epochs": 1, "batch_size": 32}
REHEARSAL_IMAGES = 240
DEFAULT_STEP = {"weight": 1.0, "sharpness": 1.0}
DEFAULT_SEEDS, DEFAULT_FIRST_SEEDS = 3, 5
# Parts of a run that its table stores once for all runs, or not at all.
DROPPED = ("config", "protocol", "method", "images", "weights", "class_step")
DROPPED_METRICS = ("distances", "bit_statistics", "pr_by_radius", "average_precision")


@dataclass(frozen=True)
class TableColumn:
    """A part of a table as it will be run.

    Attributes:
        part: as in the paper, with rows and bits reduced to the requested ones.
        source: the data set.
        setup: the images and the network.
        settings: how every row is trained.
        seeds: number of seeds.
        first_seeds: number of seeds of the best rows.
        missing: whether this machine has none of the data sets, so that nothing is run.
    """

    part: Part
    source: Source
    setup: Setup
    settings: Settings
    seeds: int
    first_seeds: int = 0
    missing: bool = False

    def to_json(self, winners: Winners) -> dict[str, Any]:
        """Return the column without its runs."""
        entry: dict[str, Any] = {
            "data": self.source.data,
            "title": self.source.title,
            "stands_in": self.source.stands_in and not self.missing,
            "bits": list(self.part.bits),
            "settings": self.settings.to_json(),
            "seeds": self.seeds,
            "rows": [],
            "runs": [],
        }
        if not self.missing:
            entry["bench"] = self.setup.to_json() | {"slug": self.setup.slug}
        for row in self.part.rows:
            choice = UNTUNED if self.missing else winners.choice(self.setup, row)
            line = {
                "name": row.name,
                "method": row.method,
                **parted(row_values(row, choice)),
                "tuned": choice.tuned,
                "paper": list(row.paper),
            }
            if row.class_step:
                line["class_step"] = choice.class_step
            if choice.score is not None:
                line["held_out"] = round(choice.score, 6)
            if choice.edges:
                line["edges"] = list(choice.edges)
            entry["rows"].append(line)
        return entry


@dataclass
class Plan:
    """The grid of one call.

    Attributes:
        spec: the table or figures.
        columns: its parts with the data of this machine.
        winners: the hyper-parameters to train with; searches replace them.
        tunings: the searches to run first.
        recorded: the images and weights of earlier searches whose trials count, by setup.
        tune_only: whether nothing but the searches is run.
    """

    spec: Spec
    columns: Sequence[TableColumn]
    winners: Winners
    tunings: Sequence[Tuning] = ()
    recorded: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    tune_only: bool = False

    @property
    def setups(self) -> list[Setup]:
        """The setups of all columns with data, each once."""
        return list(dict.fromkeys(column.setup for column in self.columns if not column.missing))

    def learn(self, runner: Runner) -> None:
        """Take the hyper-parameters that the searches found so far."""
        if self.tunings:
            self.winners = Winners.of(self.tunings, runner)

    def cell(self, column: TableColumn, row: Row, bits: int, seed: int) -> Cell:
        """Return one run of the table.

        A row and the same row with the class step share their runs where both train alike.
        """
        choice = self.winners.choice(column.setup, row)
        values = row_values(row, choice)
        twin = row if row.class_step else row.stepped()
        if twin in column.part.rows:
            other = self.winners.choice(column.setup, twin)
            if not other.tuned:
                other = dataclasses.replace(other, class_step=DEFAULT_STEP)
            if row_values(row, other) == values:
                choice = other
        step = {f"step_{key}": value for key, value in (choice.class_step or {}).items()}
        own = parted({**values, **step})
        return Cell(
            column.setup,
            row.method,
            bits,
            dataclasses.replace(column.settings, **{**own["settings"], "seed": seed}),
            own["options"],
            title=f"{column.setup.name}: {row.name}",
        )

    def cells(self, setup: Setup | None = None, *, without: Collection[str] = ()) -> list[Cell]:
        """Return the runs of the table, each once; of one setup or of all.

        Setup by setup, all rows with the first seed, then with the next.

        Args:
            setup: leave out the others.
            without: leave out the rows of these searches.
        """
        cells: dict[str, Cell] = {}
        for one in self.setups if setup is None else [setup]:
            columns = [column for column in self.columns if column.setup == one]
            for seed, column in product(range(max(c.seeds for c in columns)), columns):
                for bits, row in product(column.part.bits, column.part.rows):
                    if seed < column.seeds and row.space not in without:
                        cell = self.cell(column, row, bits, seed)
                        cells.setdefault(cell.file, cell)
        return list(cells.values())

    def open_cells(self, setup: Setup, runner: Runner) -> list[Cell]:
        """Return what can be run by now: trials, then the rows whose search has ended."""
        tunings = [tuning for tuning in self.tunings if tuning.setup == setup]
        trials = cells_of(trial for tuning in tunings for trial in tuning.trials(runner))
        if self.tune_only:
            return trials
        self.learn(runner)
        waiting = {tuning.row.space for tuning in tunings if not tuning.ended(runner)}
        return trials + self.cells(setup, without=waiting)

    def leading_cells(self, setup: Setup, runner: Runner) -> list[Cell]:
        """Return further seeds for the best rows and those that no test tells from them."""
        cells: dict[str, Cell] = {}
        for column in self.columns:
            if column.setup != setup or column.missing or column.first_seeds <= column.seeds:
                continue
            # Decided by the first seeds, so that every process, at any time, decides the same.
            part, queries = self._measured(dataclasses.replace(column, first_seeds=0), runner)
            rankings = comparisons(part, queries).values()
            leaders = {leader for ranking in rankings for leader in ranking.leaders()}
            seeds = range(column.seeds, column.first_seeds)
            for seed, bits, row in product(seeds, column.part.bits, column.part.rows):
                if (row.name, bits) in leaders:
                    cell = self.cell(column, row, bits, seed)
                    cells.setdefault(cell.file, cell)
        return list(cells.values())

    def known_cells(self, runner: Runner) -> list[Cell]:
        """Return every trial and run that is needed, as far as it is known by now."""
        tunings = (tuning.trials(runner, guess=True) for tuning in self.tunings)
        trials = cells_of(trial for trials in tunings for trial in trials)
        if self.tune_only:
            return trials
        leading = [cell for setup in self.setups for cell in self.leading_cells(setup, runner)]
        return trials + self.cells() + leading

    def collect(self, runner: Runner) -> dict[str, Any]:
        """Return the content of the table, which can be printed without the folder of runs."""
        searches: dict[str, Any] = {}
        for column in self.columns:
            slug = column.setup.with_all_classes.slug
            if not column.missing and (known := self.winners.benches.get(slug)):
                spaces = {row.space for row in column.part.rows}
                rows = {space: one for space, one in known["rows"].items() if space in spaces}
                searches.setdefault(slug, {**known, "rows": {}})["rows"].update(rows)
        return {
            "target": self.spec.name,
            "title": self.spec.title,
            "kind": self.spec.kind,
            "notes": list(self.spec.notes),
            "parts": [self._tested(column, runner) for column in self.columns],
            "tuning": searches,
        }

    def _tested(self, column: TableColumn, runner: Runner) -> dict[str, Any]:
        """Return the runs of one data set, with the tests of the best rows against the others."""
        part, queries = self._measured(column, runner)
        rankings = comparisons(part, queries).values()
        tests = [test for ranking in rankings for test in ranking.tests(self.spec.name)]
        return {**part, "tests": tests}

    def _measured(self, column: TableColumn, runner: Runner) -> tuple[dict[str, Any], QueryValues]:
        """Return the finished and failed runs of a column, and their values per query."""
        entry = column.to_json(self.winners)
        queries: QueryValues = {}
        for row, bits, run in self._runs(column, runner):
            for key in ("protocol", "images", "weights"):
                if key in run:
                    entry.setdefault(key, run[key])
            if row.class_step and "evaluation" in run:
                run = {**run, **run["class_step"]}
            for key, measured in _rankings(run).items():
                if text := measured.get("average_precision"):
                    queries.setdefault((row.name, bits, key), []).append(unpack_shares(text))
            entry["runs"].append({"row": row.name, **_short(run)})
        return entry, queries

    def _runs(
        self, column: TableColumn, runner: Runner
    ) -> Iterator[tuple[Row, int, dict[str, Any]]]:
        """Yield every run of a column that ended, with its row and code length."""
        seeds = range(0 if column.missing else max(column.seeds, column.first_seeds))
        for row, bits, seed in product(column.part.rows, column.part.bits, seeds):
            cell = self.cell(column, row, bits, seed)
            if (run := runner.row(cell)) is not None:
                yield row, bits, run
            elif (failure := runner.failure(cell)) is not None:
                yield row, bits, {"bits": bits, "seed": seed, "failed": failure["error"]}


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
        setup = Setup(
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
        columns.append(TableColumn(part, source, setup, settings, seeds, more, missing=not present))
    if request.tune:
        earlier = Winners.load(Path(request.tuning)) if request.tuning else Winners()
        tunings = _tunings(columns, request, earlier)
        return Plan(spec, columns, Winners(), tunings, earlier.identities, request.tune_only)
    own = request.folder / TUNING_FILE
    path = request.tuning or (own if own.is_file() else PACKAGED_TUNING)
    return Plan(spec, columns, Winners.load(Path(path)))


def fixed_layers(backbone: str, live: bool) -> int:
    """Return how many first layers of a backbone keep their weights in a fine-tuned grid."""
    return backbones.early_layers(backbone) if live else 0


def _tunings(columns: Sequence[TableColumn], request: Request, earlier: Winners) -> list[Tuning]:
    """One search per setup and space, for the rows of all parts; trials of earlier ones count."""
    epochs, points = request.trial_epochs, request.points or POINTS
    found: dict[tuple[Setup, str], Tuning] = {}
    for column in columns:
        settings, bits = column.settings, column.part.tuning_bits
        if epochs is not None:
            settings = dataclasses.replace(settings, epochs=epochs)
        for row in column.part.rows:
            key, last = (column.setup, row.space), request.last_round
            searched = search_space(row, finetune=column.setup.finetune)
            if searched and not column.missing and key not in found:
                tuning = Tuning(row, column.setup, settings, bits, points, last)
                found[key] = earlier.continued(tuning)
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


def _rankings(run: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """Return what a run measured, by the key of the ranking in which it competes."""
    found = {key: run[key] for key in RANKINGS if key in run}
    # Codes without a Hamming distance compete with the others' real-valued queries.
    if found.get("evaluation", {}).get("ranking", HAMMING_RANKING) != HAMMING_RANKING:
        found["real_queries"] = found["evaluation"]
    return found


def _short(run: Mapping[str, Any]) -> dict[str, Any]:
    """Return a run as the table stores it."""
    short = {key: value for key, value in run.items() if key not in DROPPED}
    if "config" in run:
        settings = run["config"]["settings"]
        short["settings"] = {key: settings[key] for key in ("learning_rate", "epochs")}
    for key in RANKINGS:
        if key in run:
            metrics = {k: v for k, v in run[key].items() if k not in DROPPED_METRICS}
            # Through JSON, which rounds the floats at every depth.
            text = json.dumps(metrics)
            short[key] = json.loads(text, parse_float=lambda number: round(float(number), 6))
    return short
