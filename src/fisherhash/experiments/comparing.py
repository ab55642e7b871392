"""Methods side by side on one data set: a table of the user's own, run like the paper's."""

from __future__ import annotations

import dataclasses
import logging
import math
import os
from collections.abc import Callable, Sequence
from pathlib import Path

from fisherhash import methods
from fisherhash.codes import check_bits
from fisherhash.data.sources import NAMED
from fisherhash.errors import UsageError
from fisherhash.experiments.benches import Bench
from fisherhash.experiments.collecting import collect
from fisherhash.experiments.planning import Column, Plan, fixed_layers
from fisherhash.experiments.reproduce import Outcome, carry_out, publish
from fisherhash.experiments.runner import Runner
from fisherhash.experiments.specs import Part, Row, Source, Spec
from fisherhash.experiments.standing import Standing
from fisherhash.experiments.tuning import Tuning
from fisherhash.system import storage
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
    part = _part(place, protocol, names, bits)
    if seeds < 1:
        raise UsageError(f"seeds must be at least 1, got {seeds}")
    if settings.fixed_layers < 0:
        fixed = fixed_layers(network.backbone, live)
        settings = dataclasses.replace(settings, fixed_layers=fixed)
    (source,) = part.sources
    bench = Bench(
        source.data, protocol, network.backbone, network.weights, network.image_size, live
    )
    spec = Spec("compare", f"Comparison on {source.title}", (part,))
    plan = Plan(spec, [Column(part, source, bench, settings, settings, seeds)], Tuning())
    runner = Runner(folder, device=network.device, say=say)
    # Opened even if all runs are done: other images or weights must not pass for the same.
    say(str(runner.stage(bench).split))
    _claim_folder(folder, bench, settings)
    say(runner.estimate(plan.cells()))
    carry_out(plan, runner)
    results = collect(plan, runner)
    (found,) = results["parts"]
    scores = Standing(found).scores

    def total(row: dict[str, str]) -> float:
        means = [scores[row["name"], length].mean for length in part.bits]
        return sum(mean for mean in means if not math.isnan(mean))

    found["rows"].sort(key=lambda row: (-total(row), row["name"]))
    return publish(results, plan, runner, page="table", data="results")


def _part(data: str, protocol: str | None, names: Sequence[str], bits: Sequence[int]) -> Part:
    chosen = list(methods.registry()) if list(names) == ["all"] else list(names)
    if not chosen:
        raise UsageError("no method given; 'all' takes every method")
    if not bits:
        raise UsageError("no code length given")
    for name in chosen:
        methods.find(name)
    return Part(
        (Source(data, protocol, Path(data).name),),
        tuple(dict.fromkeys(check_bits(length) for length in bits)),
        tuple(Row(name, name) for name in dict.fromkeys(chosen)),
    )


def _claim_folder(folder: Path, bench: Bench, settings: Settings) -> None:
    """Write down what all runs share; a folder that holds anything else is refused."""
    shared = dataclasses.asdict(bench) | {"data": bench.name}
    del shared["weights"]  # a path; the runs store the checksum of the values
    shared["settings"] = dataclasses.asdict(dataclasses.replace(settings, seed=0))
    path = folder / COMPARISON_FILE
    if path.is_file():
        found = storage.read_json(path)
        differ = [key for key in shared if found.get(key) != shared[key]]
        if differ:
            raise UsageError(
                f"{folder} holds a comparison with different {', '.join(differ)}; choose another "
                "--out"
            )
    elif folder.is_file() or (folder.is_dir() and any(folder.iterdir())):
        raise UsageError(
            f"{folder} holds no comparison that this version can continue; nothing in it was "
            "changed. Choose another --out"
        )
    storage.write_file(path, storage.dump_json(shared))
