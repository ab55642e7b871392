"""From a request to its results: plan, tune, run and report, in one process or several.

:func:`reproduce` runs a table of the paper, :func:`compare` one of the user's own. Both need torch,
numpy, Pillow and safetensors only, so that they run on a bare machine with a GPU; where there is no
jinja2, the report is Markdown alone.
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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from fisherhash import methods
from fisherhash.codes import check_bits
from fisherhash.data.sources import NAMED
from fisherhash.errors import FisherhashError, UsageError, counted
from fisherhash.experiments import report
from fisherhash.experiments.cells import Setup
from fisherhash.experiments.comparison import Comparison
from fisherhash.experiments.planning import Plan, TableColumn, fixed_layers, make_plan
from fisherhash.experiments.request import Request, say_line
from fisherhash.experiments.runner import Runner, check_same
from fisherhash.experiments.specs import Part, Row, Source, Spec
from fisherhash.experiments.winners import TUNING_FILE, Winners
from fisherhash.system import storage
from fisherhash.system.cache import DATA_VARIABLE
from fisherhash.system.cores import available_cores
from fisherhash.system.devices import choose_device
from fisherhash.system.extras import require_package
from fisherhash.training.settings import NetworkOptions, Settings

logger = logging.getLogger(__name__)

BROKEN = 75
"""The exit code of a process that can no longer use its GPU: another one takes its place."""
WATCH_SECONDS = 0.1
COMPARISON_FILE = "comparison.json"
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
        page: the HTML page (without jinja2 the Markdown file); the other files are beside it.
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
    name, file = plan.spec.name, folder / TUNING_FILE
    if plan.tunings and file.is_file():
        # The winners are written into the same file, under the settings of all of them.
        Winners.load(file).check_joins(plan.tunings, f"{file} has searches that were run")
    if plan.spec.kind == "figures":
        require_package("matplotlib", "plots", "drawing the figures")
    runner = Runner(folder, device=choose_device(request.device), stop_at=stop_at, say=say)
    runner.jobs = request.jobs or _usual_jobs(plan, runner)
    runner.trials_only, runner.recorded = plan.tune_only, plan.recorded
    for column in plan.columns:
        say(_describe(column))
    if count := sum(len(tuning.recorded) for tuning in plan.tunings):
        say(f"{counted(count, 'trial')} of {request.tuning} will not be repeated")
    if not plan.setups:
        names = sorted({source.data for column in plan.columns for source in column.part.sources})
        raise UsageError(
            f"no data set of {name} is on this machine ({', '.join(names)}). Put one "
            f"where {DATA_VARIABLE} points, or download CIFAR-10 with: fisherhash train cifar10 "
            "--download --out MODEL. docs/data.md explains how to build the others"
        )
    plan.learn(runner)
    _warn_untuned(plan, say)
    cells = plan.known_cells(runner)
    say(runner.estimate(cells))
    if runner.left(cells) and not runner.late:
        if runner.jobs > 1:
            runner.prepare(cells)
            _share(request, runner)
        else:
            carry_out(plan, runner)
        plan.learn(runner)
    if plan.tunings:
        plan.winners.save(file)
    return publish(plan, runner, plan.collect(runner), page=name, data=name)


def compare(
    data: str | os.PathLike[str],
    *,
    out: str | os.PathLike[str],
    names: Sequence[str],
    bits: Sequence[int],
    seeds: int = 1,
    protocol: str | None = None,
    network: NetworkOptions | None = None,
    settings: Settings | None = None,
    say: Callable[[str], None] = logger.info,
) -> Outcome:
    """Train and measure every method at every code length and seed in the same way.

    Finished runs in ``out`` are not repeated; a killed comparison continues where it stopped.

    Args:
        data: as for training.
        out: folder for the runs, ``table.md``, ``table.html`` and ``results.json``.
        names: methods, or ``["all"]``; anybody's as ``module:Class``.
        bits: code lengths.
        seeds: number of seeds; they are 0, 1, 2, …
        protocol: name of the split; by default the one the data suggests.
        network: the network all methods start from, and the device; frozen by default.
        settings: how every method is trained; its seed is replaced.
        say: receives one line per run.
    """
    network, settings = network or NetworkOptions(), settings or Settings()
    chosen = list(methods.registry()) if list(names) == ["all"] else list(names)
    if not chosen or not bits:
        missing = "code length given" if chosen else "method given; 'all' takes every method"
        raise UsageError(f"no {missing}")
    for name in chosen:
        methods.find(name)
    if seeds < 1:
        raise UsageError(f"seeds must be at least 1, got {seeds}")
    lengths = tuple(dict.fromkeys(check_bits(length) for length in bits))
    live, path = bool(network.finetune), os.fspath(data)
    if path not in NAMED and Path(path).exists():
        path = os.path.abspath(path)
    if settings.fixed_layers < 0:
        fixed = fixed_layers(network.backbone, live)
        settings = dataclasses.replace(settings, fixed_layers=fixed)
    source = Source(path, protocol, Path(path).name)
    part = Part((source,), lengths, tuple(Row(name, name) for name in dict.fromkeys(chosen)))
    setup = Setup(path, protocol, network.backbone, network.weights, network.image_size, live)
    spec = Spec("compare", f"Comparison on {source.title}", (part,))
    plan = Plan(spec, [TableColumn(part, source, setup, settings, seeds)], Winners())
    runner = Runner(Path(out), device=choose_device(network.device), say=say)
    # Opened even if all runs are done: other images or weights must not pass for the same.
    say(str(runner.open(setup).split))
    _claim_folder(Path(out), setup, settings)
    say(runner.estimate(plan.cells()))
    carry_out(plan, runner)
    results = plan.collect(runner)
    (found,) = results["parts"]
    scores = Comparison(found).scores

    def total(name: str) -> float:
        return np.nansum([scores[name, length].mean for length in lengths])

    found["rows"].sort(key=lambda row: (-total(row["name"]), row["name"]))
    return publish(plan, runner, results, page="table", data="results")


def _claim_folder(folder: Path, setup: Setup, settings: Settings) -> None:
    """Write down what all runs share; a folder that holds anything else is refused."""
    shared = setup.to_json() | {"data": setup.name}
    shared["settings"] = dataclasses.asdict(dataclasses.replace(settings, seed=0))
    path = folder / COMPARISON_FILE
    if path.is_file():
        check_same(storage.read_json(path), shared, f"{folder} holds a comparison")
    elif folder.is_file() or (folder.is_dir() and any(folder.iterdir())):
        raise UsageError(
            f"{folder} holds no comparison; nothing in it was changed. Choose another --out"
        )
    storage.write_file(path, storage.dump_json(shared))


def carry_out(plan: Plan, runner: Runner) -> None:
    """Setup by setup: search if requested, and run its part of the table.

    Every process that shares the work does the same. No row waits for another: its next trials
    and then its runs begin when its own earlier trials are done.
    """
    for setup in plan.setups:
        runner.run(partial(plan.open_cells, setup, runner))
        plan.learn(runner)
        if not (plan.tune_only or runner.late):
            further = plan.leading_cells(setup, runner)
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
    drawn: list[Path] = []
    if plan.spec.kind == "figures":
        from fisherhash.experiments import figures

        try:
            drawn = figures.draw_all(results, plan.setups, runner)
        except FisherhashError as error:
            runner.say(f"no figures: {error}")
    runner.close()
    shown = f"{page}.md"
    contents = {f"{data}.json": report.dump_results(results), shown: report.markdown(results)}
    try:
        html = report.html_page(results, drawn)
    except ImportError as error:
        runner.say(f"no HTML page: {error}")
    else:
        shown = f"{page}.html"
        contents[shown] = html
    storage.write_files(runner.folder, contents)
    left = runner.left(plan.known_cells(runner))
    failed = {
        cell.full_title: failure["error"] for cell in left if (failure := runner.failure(cell))
    }
    return Outcome(results, len(left), failed, runner.folder / shown)


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
        "path": [os.path.abspath(path) if path else os.getcwd() for path in sys.path],
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
    small = runner.device.type == "cpu" and not any(setup.finetune for setup in plan.setups)
    return min(2, available_cores()) if small else 1


def _describe(column: TableColumn) -> str:
    part, setup = column.part, column.setup
    if column.missing:
        names = " nor ".join(source.data for source in part.sources)
        return f"{part.sources[0].title}: not run, there is no {names} on this machine"
    training = "the network is trained" if setup.finetune else "frozen features"
    return (
        f"{column.source.title}: {counted(len(part.rows), 'row')} x "
        f"{counted(len(part.bits), 'code length')} x {counted(column.seeds, 'seed')}, "
        f"{setup.backbone} at {setup.image_size} px, {training}, "
        f"{counted(column.settings.epochs, 'epoch')}"
    )


def _warn_untuned(plan: Plan, say: Callable[[str], None]) -> None:
    for column in [] if plan.tunings else plan.columns:
        choices = {row.space: plan.winners.choice(column.setup, row) for row in column.part.rows}
        missing = [space for space, choice in choices.items() if not choice.tuned]
        if missing and not column.missing:
            names = ", ".join(missing)
            say(f"not tuned on {column.setup.slug}, using defaults: {names}; --tune searches first")
