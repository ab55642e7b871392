"""From a request to its results: plan, tune, run and report, in one process or several.

Needs torch, numpy, Pillow and safetensors only, so that it runs on a bare machine with a GPU.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from fisherhash.errors import FisherhashError, UsageError, counted
from fisherhash.experiments import report
from fisherhash.experiments.collecting import collect, known_cells, leading_cells
from fisherhash.experiments.planning import Column, Plan, make_plan, open_cells
from fisherhash.experiments.request import Request, say_line
from fisherhash.experiments.runner import Runner
from fisherhash.experiments.tables import dump_results
from fisherhash.experiments.winners import TUNING_FILE, Tuning
from fisherhash.system import storage
from fisherhash.system.cache import DATA_VARIABLE
from fisherhash.system.cores import available_cores
from fisherhash.system.devices import choose_device
from fisherhash.system.extras import require_package

logger = logging.getLogger(__name__)

BROKEN = 75
"""The exit code of a process that can no longer use its GPU: another one takes its place."""
WATCH_SECONDS = 0.1
_BOOT = (
    "import json, sys; call = json.loads(sys.argv[1]); sys.path[:] = call['path']; "
    "from fisherhash.experiments.request import exit_code; "
    "from fisherhash.experiments.reproduce import work; sys.exit(exit_code(lambda: work(call)))"
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
    if plan.searches and (folder / TUNING_FILE).is_file():
        # The winners are written into the same file, under the settings of all of them.
        Tuning.load(folder / TUNING_FILE).check_joins(plan.searches, str(folder / TUNING_FILE))
    if plan.spec.kind == "figures":
        require_package("matplotlib", "plots", "drawing the figures")
    runner = Runner(folder, device=choose_device(request.device), stop_at=stop_at, say=say)
    runner.jobs = request.jobs or _usual_jobs(plan, runner)
    runner.trials_only, runner.recorded = plan.tune_only, plan.recorded
    for column in plan.columns:
        say(_describe(column))
    if count := sum(len(search.recorded) for search in plan.searches):
        say(f"{counted(count, 'trial')} of {request.tuning} will not be repeated")
    if not plan.benches:
        names = sorted({source.data for column in plan.columns for source in column.part.sources})
        raise UsageError(
            f"no data set of {plan.spec.name} is on this machine ({', '.join(names)}). Put one "
            f"where {DATA_VARIABLE} points, or download CIFAR-10 with: fisherhash train cifar10 "
            "--download --out MODEL. docs/data.md explains how to build the others"
        )
    plan.learn(runner)
    _warn_untuned(plan, say)
    cells = known_cells(plan, runner)
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
    name = plan.spec.name
    return publish(plan, runner, collect(plan, runner), page=name, data=name)


def carry_out(plan: Plan, runner: Runner) -> None:
    """Bench by bench: search if requested, and run its part of the table.

    Every process that shares the work does the same. No row waits for another: its next trials
    and then its runs begin when its own earlier trials are done.
    """
    for bench in plan.benches:
        runner.run(partial(open_cells, plan, bench, runner))
        plan.learn(runner)
        if not (plan.tune_only or runner.late):
            further = leading_cells(plan, bench, runner)
            runner.run(lambda further=further: further)


def publish(
    plan: Plan, runner: Runner, results: dict[str, Any], *, page: str, data: str
) -> Outcome:
    """Write a table as JSON, Markdown and HTML, and report what is left of its runs.

    Args:
        plan: the grid it came from.
        runner: knows what is left, and the folder.
        results: the content of the table.
        page: name of the Markdown and HTML files without ending.
        data: name of the JSON file without ending.
    """
    figures = _draw(results, plan, runner)
    runner.close()
    contents = {
        f"{data}.json": dump_results(results),
        f"{page}.md": report.markdown(results),
        f"{page}.html": report.html_page(results, figures),
    }
    storage.write_files(runner.folder, contents)
    left = runner.left(known_cells(plan, runner))
    failed = {
        cell.full_title: failure["error"] for cell in left if (failure := runner.failure(cell))
    }
    return Outcome(results, len(left), failed, runner.folder / f"{page}.html")


def _draw(results: Mapping[str, Any], plan: Plan, runner: Runner) -> list[Path]:
    """Draw the figures; a table has none, and without matplotlib there are none."""
    if plan.spec.kind == "figures":
        from fisherhash.experiments import figures

        try:
            return figures.draw_all(results, plan.benches, runner)
        except FisherhashError as error:
            runner.say(f"no figures: {error}")
    return []


def work(call: Mapping[str, Any]) -> None:
    """Share the work of another process; ends when that one does."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the other process says it and ends this one
    threading.Thread(target=_end_with_parent, daemon=True).start()
    request = Request(**call["request"])
    device = choose_device(request.device)
    runner = Runner(request.folder, device=device, say=say_line, **call["runner"])
    plan = make_plan(request)
    runner.trials_only, runner.recorded = plan.tune_only, plan.recorded
    carry_out(plan, runner)
    if runner.broken:
        sys.stderr.flush()
        os._exit(BROKEN)  # CUDA may abort a process that ends in the usual way


def _end_with_parent() -> None:
    sys.stdin.read()
    os._exit(1)


def _share(request: Request, runner: Runner) -> None:
    """Start processes that share the work, and wait for them."""
    call = {
        "path": [os.path.abspath(place) if place else os.getcwd() for place in sys.path],
        # The device by name: a process that starts later must not choose another one.
        "request": dataclasses.asdict(dataclasses.replace(request, device=str(runner.device))),
        "runner": {"stop_at": runner.stop_at, "token": runner.token, "jobs": runner.jobs},
    }
    threads = max(1, available_cores() // runner.jobs)
    environment = {"OMP_NUM_THREADS": str(threads), "OMP_WAIT_POLICY": "PASSIVE", **os.environ}
    command = [sys.executable, "-c", _BOOT, json.dumps(call)]
    codes: list[int] = []
    # A process ends when its input is closed: at the end of this block, or with this process.
    with contextlib.ExitStack() as stack:

        def start() -> subprocess.Popen[bytes]:
            process = subprocess.Popen(command, stdin=subprocess.PIPE, env=environment)
            return stack.enter_context(process)

        running = [start() for _ in range(runner.jobs)]
        while running:
            time.sleep(WATCH_SECONDS)
            for process in [one for one in running if one.poll() is not None]:
                running.remove(process)
                if process.returncode == BROKEN and not runner.late:
                    runner.say("another process takes its place")
                    running.append(start())
                else:
                    codes.append(process.returncode)
    if any(code == UsageError.exit_code for code in codes):
        raise UsageError("the request is wrong; see the message above")
    if ended := sum(code != 0 for code in codes):
        runner.say(f"{ended} of {len(codes)} processes ended early; the same command continues")


def _usual_jobs(plan: Plan, runner: Runner) -> int:
    """Two where heads are trained on a CPU with two cores or more, which one does not fill."""
    small = runner.device.type == "cpu" and not any(bench.finetune for bench in plan.benches)
    return min(2, available_cores()) if small else 1


def _describe(column: Column) -> str:
    part, bench = column.part, column.bench
    if column.missing:
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
