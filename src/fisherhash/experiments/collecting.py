"""The content of a table: what it needs to be printed without the folder of runs."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from itertools import product
from typing import Any

from fisherhash.experiments.planning import Column, Plan, row_options
from fisherhash.experiments.runner import Runner
from fisherhash.experiments.specs import Row
from fisherhash.experiments.tuning import UNTUNED, Tuning

# Parts of a run that its table stores once for all runs, or not at all.
DROPPED = ("config", "protocol", "method", "images", "weights", "real_queries")
DROPPED_METRICS = ("distances", "bit_statistics", "pr_by_radius")


def collect(plan: Plan, runner: Runner) -> dict[str, Any]:
    """Collect the finished and failed runs of a table."""
    parts = []
    for column in plan.columns:
        entry = _part(column, plan.tuning)
        seeds = range(0 if column.missing else column.seeds)
        for row, bits, seed in product(column.part.rows, column.part.bits, seeds):
            cell = plan.cell(column, row, bits, seed)
            run, failure = runner.row(cell), runner.failure(cell)
            if run is not None:
                for key in ("protocol", "images", "weights"):
                    entry.setdefault(key, run.get(key))
            elif failure is not None:
                run = {"bits": bits, "seed": seed, "failed": failure["error"]}
            if run is not None:
                entry["runs"] += _runs(row, run)
        parts.append(entry)
    found = plan.tuning.benches
    return {
        "target": plan.spec.name,
        "title": plan.spec.title,
        "of": plan.spec.of,
        "kind": plan.spec.kind,
        "notes": list(plan.spec.notes),
        "parts": parts,
        "tuning": {bench.slug: found[bench.slug] for bench in plan.benches if bench.slug in found},
    }


def _part(column: Column, tuning: Tuning) -> dict[str, Any]:
    """One column without its runs."""
    entry: dict[str, Any] = {
        "data": column.source.data,
        "title": column.source.title,
        "stands_in": column.source.stands_in and not column.missing,
        "bits": list(column.part.bits),
        "settings": dataclasses.asdict(column.settings),
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
            "options": row_options(row, choice),
            "settings": dict(choice.settings),
            "tuned": choice.tuned,
            "paper": list(row.paper),
        }
        entry["rows"].append(line)
        if row.real_queries:
            entry["rows"].append({**line, "name": _real(row), "real_queries_of": row.name})
    return entry


def _real(row: Row) -> str:
    return f"{row.name}, real-valued queries"


def _runs(row: Row, run: Mapping[str, Any]) -> list[dict[str, Any]]:
    """A run as the table stores it, and its measurement with real-valued queries."""
    runs = [{"row": row.name, **_short(run)}]
    if row.real_queries:
        again = {**run, "evaluation": run["real_queries"]} if "real_queries" in run else run
        runs.append({"row": _real(row), **_short(again)})
    return runs


def _short(run: Mapping[str, Any]) -> dict[str, Any]:
    short = {key: value for key, value in run.items() if key not in DROPPED}
    if "config" in run:
        settings = run["config"]["settings"]
        short["settings"] = {key: settings[key] for key in ("learning_rate", "epochs")}
    if "evaluation" in run:
        metrics = {k: v for k, v in run["evaluation"].items() if k not in DROPPED_METRICS}
        # Through JSON, which rounds the floats at every depth.
        short["evaluation"] = json.loads(
            json.dumps(metrics), parse_float=lambda text: round(float(text), 6)
        )
    return short
