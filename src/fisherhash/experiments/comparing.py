"""Methods side by side on one data set: a table of the user's own, run like the paper's."""

from __future__ import annotations

import dataclasses
import logging
import os
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from fisherhash import methods
from fisherhash.codes import check_bits
from fisherhash.data.sources import NAMED
from fisherhash.errors import UsageError
from fisherhash.experiments.benches import Bench
from fisherhash.experiments.collecting import collect
from fisherhash.experiments.planning import Column, Plan, fixed_layers
from fisherhash.experiments.reproduce import Outcome, carry_out, publish
from fisherhash.experiments.runner import Runner, check_same
from fisherhash.experiments.specs import Part, Row, Source, Spec
from fisherhash.experiments.standing import Standing
from fisherhash.experiments.winners import Tuning
from fisherhash.system import storage
from fisherhash.system.devices import choose_device
from fisherhash.training.settings import NetworkOptions, Settings

logger = logging.getLogger(__name__)

COMPARISON_FILE = "comparison.json"


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
        names: methods, or ``["all"]``.
        bits: code lengths.
        seeds: number of seeds; they are 0, 1, 2, …
        protocol: name of the split; by default the one the data suggests.
        network: the network all methods start from, and the device; frozen by default.
        settings: how every method is trained; its seed is replaced.
        say: receives one line per run.
    """
    network, settings = network or NetworkOptions(), settings or Settings()
    folder, live = Path(out), bool(network.finetune)
    place = os.fspath(data)
    if place not in NAMED and Path(place).exists():
        place = os.path.abspath(place)
    source = Source(place, protocol, Path(place).name)
    part = Part((source,), _lengths(bits), _rows(names))
    if seeds < 1:
        raise UsageError(f"seeds must be at least 1, got {seeds}")
    if settings.fixed_layers < 0:
        fixed = fixed_layers(network.backbone, live)
        settings = dataclasses.replace(settings, fixed_layers=fixed)
    bench = Bench(place, protocol, network.backbone, network.weights, network.image_size, live)
    spec = Spec("compare", f"Comparison on {source.title}", (part,))
    plan = Plan(spec, [Column(part, source, bench, settings, seeds)], Tuning())
    runner = Runner(folder, device=choose_device(network.device), say=say)
    # Opened even if all runs are done: other images or weights must not pass for the same.
    say(str(runner.stage(bench).split))
    _claim_folder(folder, bench, settings)
    say(runner.estimate(plan.cells()))
    carry_out(plan, runner)
    results = collect(plan, runner)
    (found,) = results["parts"]
    scores = Standing(found).scores

    def total(name: str) -> float:
        return np.nansum([scores[name, length].mean for length in part.bits])

    found["rows"].sort(key=lambda row: (-total(row["name"]), row["name"]))
    return publish(plan, runner, results, page="table", data="results")


def _rows(names: Sequence[str]) -> tuple[Row, ...]:
    chosen = list(methods.registry()) if list(names) == ["all"] else list(names)
    if not chosen:
        raise UsageError("no method given; 'all' takes every method")
    for name in chosen:
        methods.find(name)
    return tuple(Row(name, name) for name in dict.fromkeys(chosen))


def _lengths(bits: Sequence[int]) -> tuple[int, ...]:
    if not bits:
        raise UsageError("no code length given")
    return tuple(dict.fromkeys(check_bits(length) for length in bits))


def _claim_folder(folder: Path, bench: Bench, settings: Settings) -> None:
    """Write down what all runs share; a folder that holds anything else is refused."""
    shared = bench.to_json() | {"data": bench.name}
    shared["settings"] = dataclasses.asdict(dataclasses.replace(settings, seed=0))
    path = folder / COMPARISON_FILE
    if path.is_file():
        check_same(storage.read_json(path), shared, f"{folder} holds a comparison")
    elif folder.is_file() or (folder.is_dir() and any(folder.iterdir())):
        raise UsageError(
            f"{folder} holds no comparison that this version can continue; nothing in it was "
            "changed. Choose another --out"
        )
    storage.write_file(path, storage.dump_json(shared))
