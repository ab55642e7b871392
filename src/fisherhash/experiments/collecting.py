"""The content of a table: what it needs to be printed without the folder of runs."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Mapping
from itertools import product
from typing import Any

from fisherhash.experiments.benches import Bench, Cell
from fisherhash.experiments.planning import Column, Plan, row_values
from fisherhash.experiments.runner import Runner
from fisherhash.experiments.search_space import parted
from fisherhash.experiments.significance import unpack_shares
from fisherhash.experiments.specs import Row
from fisherhash.experiments.standing import HAMMING_RANKING, RANKINGS, QueryValues, Standing
from fisherhash.experiments.winners import UNTUNED, Tuning

# Parts of a run that its table stores once for all runs, or not at all.
DROPPED = ("config", "protocol", "method", "images", "weights", "class_step")
DROPPED_METRICS = ("distances", "bit_statistics", "pr_by_radius", "average_precision")


def collect(plan: Plan, runner: Runner) -> dict[str, Any]:
    """Collect the finished and failed runs of a table."""
    parts = [collect_part(plan, column, runner) for column in plan.columns]
    return {
        "target": plan.spec.name,
        "title": plan.spec.title,
        "of": plan.spec.of,
        "kind": plan.spec.kind,
        "notes": list(plan.spec.notes),
        "parts": parts,
        "tuning": _searches(plan),
    }


def _searches(plan: Plan) -> dict[str, Any]:
    """The searches that the rows of a plan take their hyper-parameters from, by bench."""
    found: dict[str, Any] = {}
    for column in plan.columns:
        slug = column.bench.with_all_classes.slug
        if column.missing or slug not in plan.tuning.benches:
            continue
        known = plan.tuning.benches[slug]
        spaces = {row.space for row in column.part.rows}
        rows = {space: entry for space, entry in known["rows"].items() if space in spaces}
        found.setdefault(slug, {**known, "rows": {}})["rows"].update(rows)
    return found


def collect_part(plan: Plan, column: Column, runner: Runner) -> dict[str, Any]:
    """Collect the runs of one data set, with the tests of the best rows against the others."""
    entry = _part(column, plan.tuning)
    queries: QueryValues = {}
    for row, bits, run in _runs(plan, column, runner):
        for key in ("protocol", "images", "weights"):
            if key in run:
                entry.setdefault(key, run[key])
        if row.class_step:
            run = _stepped(run)
        for key, measured in _rankings(run).items():
            if text := measured.get("average_precision"):
                queries.setdefault((row.name, bits, key), []).append(unpack_shares(text))
        entry["runs"].append({"row": row.name, **_short(run)})
    entry["tests"] = Standing(entry, queries).tests(plan.spec.name)
    return entry


def _rankings(run: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """Return what a run measured, by the key of the ranking in which it competes."""
    found = {key: run[key] for key in RANKINGS if key in run}
    # Codes without a Hamming distance compete with the others' real-valued queries.
    if found.get("evaluation", {}).get("ranking", HAMMING_RANKING) != HAMMING_RANKING:
        found["real_queries"] = found["evaluation"]
    return found


def known_cells(plan: Plan, runner: Runner) -> list[Cell]:
    """Return every run that a plan needs, as far as it is known by now."""
    cells = plan.all_cells(runner)
    if not plan.tune_only:
        cells += [cell for bench in plan.benches for cell in leading_cells(plan, bench, runner)]
    return cells


def leading_cells(plan: Plan, bench: Bench, runner: Runner) -> list[Cell]:
    """Return further seeds for the best rows of a bench and those that no test tells from them."""
    cells: dict[str, Cell] = {}
    for column in plan.columns:
        if column.bench != bench or column.missing or column.first_seeds <= column.seeds:
            continue
        # Decided by the first seeds, so that every process, at any time, decides the same.
        part = collect_part(plan, dataclasses.replace(column, first_seeds=0), runner)
        leaders = Standing(part).leaders()
        seeds = range(column.seeds, column.first_seeds)
        for seed, bits, row in product(seeds, column.part.bits, column.part.rows):
            if (row.name, bits) in leaders:
                cell = plan.cell(column, row, bits, seed)
                cells.setdefault(cell.file, cell)
    return list(cells.values())


def _runs(plan: Plan, column: Column, runner: Runner) -> Iterator[tuple[Row, int, dict[str, Any]]]:
    """Return every run of a column that ended, with its row and code length."""
    seeds = range(0 if column.missing else max(column.seeds, column.first_seeds))
    for row, bits, seed in product(column.part.rows, column.part.bits, seeds):
        cell = plan.cell(column, row, bits, seed)
        run, failure = runner.row(cell), runner.failure(cell)
        if run is not None:
            yield row, bits, run
        elif failure is not None:
            yield row, bits, {"bits": bits, "seed": seed, "failed": failure["error"]}


def _part(column: Column, tuning: Tuning) -> dict[str, Any]:
    """One column without its runs."""
    entry: dict[str, Any] = {
        "data": column.source.data,
        "title": column.source.title,
        "stands_in": column.source.stands_in and not column.missing,
        "bits": list(column.part.bits),
        "settings": column.settings.to_json(),
        "seeds": column.seeds,
        "rows": [],
        "runs": [],
    }
    if not column.missing:
        entry["bench"] = column.bench.to_json() | {"slug": column.bench.slug}
    for row in column.part.rows:
        choice = UNTUNED if column.missing else tuning.choice(column.bench, row)
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


def _stepped(run: dict[str, Any]) -> dict[str, Any]:
    """A run as the row with the class step has it."""
    return {**run, **run["class_step"]} if "evaluation" in run else run


def _short(run: Mapping[str, Any]) -> dict[str, Any]:
    """A run as the table stores it."""
    short = {key: value for key, value in run.items() if key not in DROPPED}
    if "config" in run:
        settings = run["config"]["settings"]
        short["settings"] = {key: settings[key] for key in ("learning_rate", "epochs")}
    for key in RANKINGS:
        if key in run:
            metrics = {k: v for k, v in run[key].items() if k not in DROPPED_METRICS}
            short[key] = _rounded(metrics)
    return short


def _rounded(metrics: Mapping[str, Any]) -> dict[str, Any]:
    # Through JSON, which rounds the floats at every depth.
    return json.loads(json.dumps(metrics), parse_float=lambda text: round(float(text), 6))
