"""From a request to its results: plan, tune, run and report, in one process or several.

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
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fisherhash.errors import FisherhashError, UsageError
from fisherhash.experiments import report
from fisherhash.experiments.collecting import collect, dump_results
from fisherhash.experiments.planning import Column, Plan, make_plan
from fisherhash.experiments.request import Request
from fisherhash.experiments.runner import Runner
from fisherhash.experiments.tables import counted
from fisherhash.experiments.tuning import TUNING_FILE, tune
from fisherhash.system import storage
from fisherhash.system.cache import DATA_VARIABLE
from fisherhash.system.cores import available_cores

logger = logging.getLogger(__name__)

_BOOT = (
    "import json, sys; call = json.loads(sys.stdin.readline()); sys.path[:] = call['path']; "
    "from fisherhash.experiments.reproduce import work; sys.exit(work(call))"
)


@dataclass(frozen=True)
class Outcome:
    """What a call did.

    Attributes:
        results: the content of the table, as written to its JSON file.
        left: number of runs without a result, because the time was over or they failed.
        failed: the error of each failed run, by its title.
        page: the HTML page; the Markdown and JSON files are beside it.
    """

    results: dict[str, Any]
    left: int
    failed: dict[str, str]
    page: Path

    @property
    def table(self) -> str:
        """The report as Markdown."""
        return report.markdown(self.results)


def reproduce(request: Request, *, say: Callable[[str], None] = logger.info) -> Outcome:
    """Run a table or the figures; finished runs in the folder are not repeated.

    Args:
        request: what to run, and how.
        say: receives one line per run.
    """
    folder = request.folder
    if folder.is_file():
        raise UsageError(f"{folder} is a file; choose another --out")
    stop_at = None if request.minutes is None else time.time() + 60 * request.minutes
    plan = make_plan(request)
    runner = Runner(folder, device=request.device, stop_at=stop_at, say=say)
    runner.jobs = request.jobs or _usual_jobs(plan, runner)
    for column in plan.columns:
        say(_describe(column))
    if not plan.benches:
        names = sorted({source.data for column in plan.columns for source in column.part.sources})
        raise UsageError(
            f"no data set of {plan.spec.name} is on this machine ({', '.join(names)}). Put one "
            f"where {DATA_VARIABLE} points, or download CIFAR-10 with: fisherhash train cifar10 "
            "--download --out MODEL. docs/data.md explains how to build the others"
        )
    plan.learn(runner)
    _warn_untuned(plan, say)
    cells = plan.all_cells(runner)
    say(runner.estimate(cells))
    if runner.left(cells) and not runner.late:
        if runner.jobs > 1:
            runner.prepare(cells)
            _share(request, runner)
        else:
            carry_out(plan, runner)
        plan.learn(runner)
    if plan.searches:
        plan.tuning.save(folder / TUNING_FILE)
    results = collect(plan, runner)
    return publish(results, plan, runner, draw(results, plan, runner))


def carry_out(plan: Plan, runner: Runner) -> None:
    """Bench by bench: search if requested, then run its part of the table.

    Every process that shares the work does the same.
    """
    for bench in plan.benches:
        searches = [search for search in plan.searches if search.bench == bench]
        if not tune(runner, searches):
            return
        plan.learn(runner)
        runner.run(plan.cells(bench))


def publish(
    results: dict[str, Any],
    plan: Plan,
    runner: Runner,
    figures: list[Path] | None = None,
    *,
    page: str = "",
    data: str = "",
) -> Outcome:
    """Write a table as JSON, Markdown and HTML, and report what is left of its runs.

    Args:
        results: the content of the table.
        plan: the grid it came from.
        runner: knows what is left, and the folder.
        figures: SVG files for the page.
        page: name of the Markdown and HTML files without ending; by default the table's name.
        data: name of the JSON file without ending; by default the table's name.
    """
    runner.close()
    name = plan.spec.name
    contents = {
        f"{data or name}.json": dump_results(results),
        f"{page or name}.md": report.markdown(results),
        f"{page or name}.html": report.html_page(results, figures or ()),
    }
    storage.write_files(runner.folder, contents)
    left = runner.left(plan.all_cells(runner))
    failures = {
        f"{cell.title} {cell.bits} bits, seed {cell.seed}": runner.failure(cell) for cell in left
    }
    failed = {title: failure["error"] for title, failure in failures.items() if failure}
    return Outcome(results, len(left), failed, runner.folder / f"{page or name}.html")


def draw(results: Mapping[str, Any], plan: Plan, runner: Runner) -> list[Path]:
    """Draw the figures; a table has none, and without matplotlib there are none."""
    if plan.spec.kind != "figures":
        return []
    from fisherhash.experiments import figures

    try:
        return figures.draw_all(results, plan.benches, runner)
    except FisherhashError as error:
        runner.say(f"no figures: {error}")
        return []


def work(call: Mapping[str, Any]) -> int:
    """Share the work of another process; ends when that one does."""
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    request = Request(**call["request"])
    runner = Runner(request.folder, device=request.device, say=_say, **call["runner"])
    try:
        carry_out(make_plan(request), runner)
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
    """Start processes that share the work, and wait for them."""
    call = {
        "path": [os.path.abspath(place) if place else os.getcwd() for place in sys.path],
        "request": dataclasses.asdict(request),
        "runner": {"stop_at": runner.stop_at, "token": runner.token, "jobs": runner.jobs},
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
                process.stdin.write(json.dumps(call) + "\n")
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
        raise UsageError("the request is wrong; see the message above")
    ended = sum(code != 0 for code in codes)
    if ended:
        runner.say(f"{ended} of {len(codes)} processes ended early; the same command continues")


def _usual_jobs(plan: Plan, runner: Runner) -> int:
    """Two where heads are trained on a CPU with two cores or more, which one does not fill."""
    small = runner.device.type == "cpu" and not any(bench.finetune for bench in plan.benches)
    return min(2, available_cores()) if small else 1


def _describe(column: Column) -> str:
    part, bench = column.part, column.bench
    if bench is None or column.source is None:
        names = " nor ".join(source.data for source in part.sources)
        return f"{part.sources[0].title}: not run, there is no {names} on this machine"
    way = "the network is trained" if bench.finetune else "frozen features"
    return (
        f"{column.source.title}: {counted(len(part.rows), 'row')} x "
        f"{counted(len(part.bits), 'code length')} x {counted(column.seeds, 'seed')}, "
        f"{bench.backbone} at {bench.image_size} px, {way}, "
        f"{counted(column.settings.epochs, 'epoch')}"
    )


def _warn_untuned(plan: Plan, say: Callable[[str], None]) -> None:
    for bench in [] if plan.searches else plan.benches:
        rows = [row for column in plan.columns if column.bench == bench for row in column.part.rows]
        missing = [row.space for row in rows if not plan.tuning.choice(bench, row).tuned]
        if missing:
            names = ", ".join(dict.fromkeys(missing))
            say(f"not tuned on {bench.slug}, using defaults: {names}; --tune searches first")
