"""From the name of a table to its results: plan, tune, run, report; alone or in several processes.

Needs torch, numpy, Pillow and safetensors only, so that it runs on a bare machine with a GPU.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fisherhash.errors import FisherhashError, UsageError
from fisherhash.experiments import report, specs, tuning
from fisherhash.experiments.benches import Cell
from fisherhash.experiments.planning import (
    Column,
    Request,
    all_cells,
    plan,
    row_cell,
    row_options,
    table_cells,
    tunings,
    winners,
)
from fisherhash.experiments.runner import Runner
from fisherhash.experiments.specs import Row, Spec
from fisherhash.experiments.tuning import Choice, Tuning
from fisherhash.system import storage
from fisherhash.system.cache import DATA_VARIABLE
from fisherhash.system.cores import available_cores
from fisherhash.system.devices import choose_device

logger = logging.getLogger(__name__)

_BOOT = (
    "import json, sys; plan = json.loads(sys.stdin.readline()); sys.path[:] = plan['path']; "
    "from fisherhash.experiments.reproduce import work; sys.exit(work(plan))"
)


@dataclass(frozen=True)
class Outcome:
    """What a call did.

    Attributes:
        results: the table's content, as written to ``<target>.json``.
        left: runs without a result, because the time was over or they failed.
        failed: the sentence each failed run ended with, by its title.
        page: the HTML page; ``<target>.md`` and ``<target>.json`` are beside it.
    """

    results: dict[str, Any]
    left: int
    failed: dict[str, str]
    page: Path


def reproduce(
    request: Request,
    *,
    jobs: int | None = None,
    minutes: float | None = None,
    say: Callable[[str], None] = logger.info,
) -> Outcome:
    """Run a table or the figures; what is done before is not repeated.

    Args:
        request: what.
        jobs: processes that share the work; None for two where heads are trained on a CPU with
            two cores or more, which one process does not fill, and one otherwise.
        minutes: after so many no run is started.
        say: takes one line a run.
    """
    columns = plan(request)
    if jobs is None:
        small = choose_device(request.device).type == "cpu" and not _finetunes(columns)
        jobs = min(2, available_cores()) if small else 1
    if jobs < 1:
        raise UsageError(f"jobs must be at least 1, got {jobs}")
    folder = Path(request.out)
    _check_folder(folder)
    stop_at = None if minutes is None else time.time() + 60 * minutes
    runner = Runner(folder, device=request.device, stop_at=stop_at, jobs=jobs, say=say)
    spec = specs.find(request.target)
    for column in columns:
        say(_describe(column))
    if all(column.bench is None for column in columns):
        names = sorted({source.data for column in columns for source in column.part.sources})
        raise UsageError(
            f"no data set of {spec.name} is on this machine ({', '.join(names)}). Put one where "
            f"{DATA_VARIABLE} points, or fetch CIFAR-10 with: fisherhash train cifar10 "
            "--download --out MODEL. docs/data.md says how the others are built"
        )
    cells = all_cells(request, columns, runner)
    _warn_untuned(request, columns, runner, say)
    say(runner.estimate(cells))
    if any(runner.left(cells)) and not runner.late:
        if jobs > 1:
            runner.prepare(cells)
            _share(request, runner)
        else:
            carry_out(request, runner)
    runner.close()
    found = winners(request, columns, runner)
    if request.tune:
        found.save(folder / tuning.FILE)
    results = collect(spec, columns, found, runner)
    storage.write_files(folder, {f"{spec.name}.json": storage.write_text(dump_results(results))})
    page = report.write(results, folder, draw(results, columns, folder, runner))
    cells = all_cells(request, columns, runner)
    failures = {
        f"{cell.title} {cell.bits} bits, seed {cell.seed}": runner.failure(cell)
        for cell in runner.left(cells)
    }
    return Outcome(
        results,
        len(runner.left(cells)),
        {title: failure["error"] for title, failure in failures.items() if failure},
        page,
    )


def draw(
    results: Mapping[str, Any], columns: Sequence[Column], folder: Path, runner: Runner
) -> list[Path]:
    """The pictures of the figures; none for a table, and none where matplotlib is missing."""
    if results["kind"] != "figures":
        return []
    from fisherhash.experiments import figures

    try:
        return figures.draw_all(results, columns, folder / "figures", runner)
    except FisherhashError as error:
        runner.say(f"no pictures: {error}")
        return []


def table_text(outcome: Outcome) -> str:
    """The table as Markdown."""
    return report.markdown(outcome.results)


def carry_out(request: Request, runner: Runner) -> None:
    """A bench after the other: tune if asked to, then run its part of the table.

    Every process that shares the work does the same.
    """
    columns = plan(request)
    for bench, settings, rows, bits in tunings(columns):
        if request.tune and not tuning.tune(runner, bench, settings, rows, bits=bits):
            return
        cells = table_cells(columns, winners(request, columns, runner))
        runner.run([cell for cell in cells if cell.bench == bench])


def collect(spec: Spec, columns: Sequence[Column], found: Tuning, runner: Runner) -> dict[str, Any]:
    """The content of a table, complete enough to print it without the folder of runs."""
    parts = []
    for column in columns:
        part, bench = column.part, column.bench
        entry: dict[str, Any] = {
            "data": column.source.data if column.source else part.sources[0].data,
            "title": column.source.title if column.source else part.sources[0].title,
            "stands_in": bool(column.source and column.source.stands_in),
            "bits": list(part.bits),
            "settings": dataclasses.asdict(column.settings),
            "seeds": column.seeds,
            "rows": [],
            "runs": [],
        }
        if bench is not None:
            entry["bench"] = {
                k: v for k, v in dataclasses.asdict(bench).items() if k != "weights"
            } | {"slug": bench.slug}
        for row in part.rows:
            choice = found.choice(bench, row) if bench else Choice({}, {}, tuned=False)
            line = {
                "name": row.name,
                "method": row.method,
                "options": row_options(row, choice),
                "settings": {**choice.settings, **row.settings},
                "tuned": choice.tuned,
                "paper": list(row.paper),
            }
            entry["rows"].append(line)
            if row.real_queries:
                entry["rows"].append({**line, "name": _real(row), "real_queries_of": row.name})
            for length in part.bits:
                for seed in range(column.seeds if bench else 0):
                    cell = row_cell(column, row, length, seed, found)
                    run = runner.row(cell)
                    if run is not None:
                        for key in ("protocol", "images", "weights"):
                            entry.setdefault(key, run.get(key))
                    entry["runs"] += _lines(row, cell, run, runner.failure(cell))
        parts.append(entry)
    benches = [column.bench for column in columns if column.bench]
    slugs = dict.fromkeys(bench.slug for bench in benches)
    return {
        "target": spec.name,
        "title": spec.title,
        "of": spec.of,
        "kind": spec.kind,
        "notes": list(spec.notes),
        "parts": parts,
        "tuning": {slug: found.benches[slug] for slug in slugs if slug in found.benches},
    }


def _real(row: Row) -> str:
    return f"{row.name}, real-valued queries"


def _lines(
    row: Row, cell: Cell, run: Mapping[str, Any] | None, failure: Mapping[str, Any] | None
) -> list[dict[str, Any]]:
    """What a table keeps of a run, of its second measurement, or of why there is none."""
    names = [row.name, _real(row)] if row.real_queries else [row.name]
    if run is None:
        what = {"bits": cell.bits, "seed": cell.seed}
        return [{"row": n} | what | {"failed": failure["error"]} for n in names] if failure else []
    lines = [{"row": name, **_without(run)} for name in names]
    if "real_queries" in run:
        again = {**run, "evaluation": run["real_queries"]}
        lines[1] = {"row": names[1], **_without(again)}
    return lines


def dump_results(results: Mapping[str, Any]) -> str:
    """JSON with one line a run."""
    lines: list[str] = []

    def keep(value: Any) -> str:
        lines.append(json.dumps(value, ensure_ascii=False))
        return f"@{len(lines) - 1}@"

    parts = [{**part, "runs": [keep(run) for run in part["runs"]]} for part in results["parts"]]
    text = storage.dump_json({**results, "parts": parts})
    for number, line in enumerate(lines):
        text = text.replace(f'"@{number}@"', line, 1)
    return text


def work(plan_: Mapping[str, Any]) -> int:
    """A process that shares the work of another; ends when that one does."""
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    request = Request(**plan_["request"])
    runner = Runner(
        Path(request.out),
        device=request.device,
        stop_at=plan_["stop_at"],
        token=plan_["token"],
        jobs=plan_["jobs"],
        say=_say,
    )
    try:
        carry_out(request, runner)
    except FisherhashError as error:
        _say(f"fisherhash: {error}")
        return error.exit_code
    except KeyboardInterrupt:
        return 130
    return 0


def _say(line: str) -> None:
    sys.stderr.write(f"{line}\n")  # in one piece: other processes write there too
    sys.stderr.flush()


def _end_with_parent() -> None:
    sys.stdin.read()
    os._exit(1)


def _share(request: Request, runner: Runner) -> None:
    """Start processes that do the same work by turns, and wait for them."""
    plan_ = {
        "path": [os.path.abspath(place) if place else os.getcwd() for place in sys.path],
        "request": dataclasses.asdict(request),
        "stop_at": runner.stop_at,
        "token": runner.token,
        "jobs": runner.jobs,
    }
    threads = max(1, available_cores() // runner.jobs)
    environment = {"OMP_NUM_THREADS": str(threads), "OMP_WAIT_POLICY": "PASSIVE", **os.environ}
    processes: list[subprocess.Popen[str]] = []
    try:
        for _ in range(runner.jobs):
            process = subprocess.Popen(
                [sys.executable, "-c", _BOOT], stdin=subprocess.PIPE, text=True, env=environment
            )
            processes.append(process)
            if process.stdin is not None:
                process.stdin.write(json.dumps(plan_) + "\n")
                process.stdin.flush()
        codes = [process.wait() for process in processes]
    finally:
        for process in processes:
            if process.stdin is not None:
                process.stdin.close()
            if process.poll() is None:
                process.terminate()
                process.wait()
    if any(code == UsageError.exit_code for code in codes):
        raise UsageError("the request is wrong; see the sentence above")
    ended = sum(code != 0 for code in codes)
    if ended:
        runner.say(f"{ended} of {len(codes)} processes ended early; the same command continues")


def _finetunes(columns: Sequence[Column]) -> bool:
    return any(column.bench is not None and column.bench.finetune for column in columns)


def _describe(column: Column) -> str:
    part, bench = column.part, column.bench
    if bench is None or column.source is None:
        names = " nor ".join(source.data for source in part.sources)
        return f"{part.sources[0].title}: not run, there is no {names} on this machine"
    way = "the network is trained" if bench.finetune else "frozen features"
    rows = len(part.rows)
    return (
        f"{column.source.title}: {rows} rows x {len(part.bits)} code lengths x {column.seeds} "
        f"seed{'s' if column.seeds > 1 else ''}, {bench.backbone} at {bench.image_size} px, {way}, "
        f"{column.settings.epochs} epoch{'s' if column.settings.epochs > 1 else ''}"
    )


def _warn_untuned(
    request: Request, columns: Sequence[Column], runner: Runner, say: Callable[[str], None]
) -> None:
    if request.tune:
        return
    found = winners(request, columns, runner)
    for bench, _, rows, _ in tunings(columns):
        missing = [row.space for row in rows if not found.choice(bench, row).tuned]
        if missing:
            names = ", ".join(dict.fromkeys(missing))
            say(f"not tuned on {bench.slug}, trained with defaults: {names}; --tune searches first")


def _check_folder(folder: Path) -> None:
    if folder.is_file():
        raise UsageError(f"{folder} is a file; choose another --out")


def _without(run: Mapping[str, Any]) -> dict[str, Any]:
    """A run as the table's file keeps it: without what is said once, and without fine detail."""
    drop = ("config", "protocol", "method", "images", "weights", "real_queries")
    short = {key: value for key, value in run.items() if key not in drop}
    if "config" in run:
        settings = run["config"]["settings"]
        short["settings"] = {key: settings[key] for key in ("learning_rate", "epochs")}
    if "evaluation" in run:
        detail = ("distances", "bit_statistics", "pr_by_radius")
        kept = {key: value for key, value in run["evaluation"].items() if key not in detail}
        short["evaluation"] = _rounded(kept)
    return short


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return round(value, 6)
    if isinstance(value, Mapping):
        return {key: _rounded(item) for key, item in value.items()}
    return [_rounded(item) for item in value] if isinstance(value, list) else value
