"""Methods side by side: one split, one backbone, one evaluator; a run a file, so it resumes."""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from fisherhash import backbones, methods
from fisherhash.codes import check_bits
from fisherhash.data.protocols import resolve
from fisherhash.data.sources import Collection, open_data
from fisherhash.errors import UsageError
from fisherhash.experiments.benches import Bench, Cell, Stage
from fisherhash.experiments.runner import NOT_DEFINED, Runner
from fisherhash.system import storage
from fisherhash.training.loop import Settings

logger = logging.getLogger(__name__)

RUNS, TABLE, RESULTS = "runs", "table.md", "results.json"
# Parts of a run that the results of a comparison hold once for all.
_SAID_ONCE = ("config", "protocol", "images", "weights")


@dataclass(frozen=True)
class Comparison:
    """The finished grid.

    Attributes:
        rows: one result a run, as written to its file.
        failed: the sentence each failed run ended with, by file name; the next call tries again.
        table: the table as Markdown.
        folder: where all of it is.
    """

    rows: list[dict[str, Any]]
    failed: dict[str, str]
    table: str
    folder: Path


def compare(
    data: str | os.PathLike[str] | Collection,
    *,
    out: str | os.PathLike[str],
    names: Sequence[str],
    bits: Sequence[int],
    seeds: int = 1,
    protocol: str | None = None,
    backbone: str | nn.Module = backbones.DEFAULT,
    weights: str | os.PathLike[str] | None = None,
    image_size: int | None = None,
    finetune: bool = False,
    settings: Settings | None = None,
    device: str | None = None,
    say: Callable[[str], None] = logger.info,
) -> Comparison:
    """Train every method at every length and seed alike, and measure them alike.

    A run that is already in ``out`` is not repeated; a killed comparison continues where it was.

    Args:
        data: as for training.
        out: folder for the runs, the table and the results.
        names: methods, or ``["all"]``.
        bits: code lengths.
        seeds: how many; they are 0, 1, 2, …
        protocol: how the data is split.
        backbone: one for all.
        weights: its weights file.
        image_size: side of the images.
        finetune: train the whole network each time, not only the head on frozen features.
        settings: how every method is trained; the seed in it is replaced.
        device: where.
        say: takes one line a run.
    """
    collection = data if isinstance(data, Collection) else open_data(data)
    split = resolve(collection, protocol)
    grid = _grid(names, bits, seeds)
    bits = list(dict.fromkeys(bits))
    folder = Path(out)
    settings = settings or Settings()
    network = backbones.create(backbone, weights=weights, image_size=image_size)
    common = {
        "data": collection.name,
        "protocol": split.to_json(),
        "backbone": network.name,
        "image_size": network.preprocessing.size,
        # What the names stand for: the pixels and the first weights.
        "images": collection.reader.fingerprint()[:16],
        "weights": storage.tensors_checksum(network.state_dict())[:16],
        "finetune": finetune,
        "settings": dataclasses.asdict(dataclasses.replace(settings, seed=0)),
    }
    runner = Runner(
        folder,
        device=device,
        open_stage=lambda bench, place: Stage(
            collection, split, network, finetune=bench.finetune, device=place
        ),
        say=say,
    )
    _check_folder(folder, common)
    say(f"{split}")
    bench = Bench(
        collection.name,
        split.protocol,
        network.name,
        image_size=network.preprocessing.size,
        finetune=finetune,
    )
    cells = [
        Cell(
            bench,
            name,
            length,
            dataclasses.replace(settings, seed=seed),
            file=f"{RUNS}/{name}-{length}-{seed}.json",
        )
        for name, length, seed in grid
    ]
    runner.run(cells)
    rows, failed = [], {}
    for cell in cells:
        row, failure = runner.row(cell), runner.failure(cell)
        if row is not None:
            rows.append({key: row[key] for key in row if key not in _SAID_ONCE})
        elif failure is not None:
            failed[Path(cell.file).name] = failure["error"]
    table = make_table(rows, common, bits)
    results = {**common, "rows": rows, "failed": failed}
    storage.write_files(
        folder,
        {
            TABLE: storage.write_text(table),
            RESULTS: storage.write_text(storage.dump_json(results)),
        },
    )
    return Comparison(rows, failed, table, folder)


def make_table(rows: list[dict[str, Any]], common: dict[str, Any], bits: Sequence[int]) -> str:
    """A Markdown table: methods by the mean of their mAP over all lengths, best first."""
    protocol = common["protocol"]
    top = "ALL" if protocol["top"] is None else protocol["top"]
    cells = {
        (name, length): _cell([r for r in rows if r["method"] == name and r["bits"] == length])
        for name in {row["method"] for row in rows}
        for length in bits
    }
    order = sorted(
        {name for name, _ in cells},
        key=lambda n: (-sum(cells[n, length][0] for length in bits), n),
    )
    trained = "fine-tuned" if common["finetune"] else "frozen features"
    lines = [
        f"mAP@{top}, expected over tie order, on {protocol['protocol']} "
        f"(checksum {protocol['checksum'][:16]}); {common['backbone']}, {trained}.",
        "",
        "| method | " + " | ".join(f"{length} bits" for length in bits) + " |",
        "|---" * (len(bits) + 1) + "|",
    ]
    for name in order:
        lines.append(f"| {name} | " + " | ".join(cells[name, length][1] for length in bits) + " |")
    return "\n".join(lines) + "\n"


def _cell(rows: list[dict[str, Any]]) -> tuple[float, str]:
    values = [row["evaluation"]["map"] for row in rows if "evaluation" in row]
    if not values:
        return 0.0, NOT_DEFINED if rows else "not run"
    mean = statistics.mean(values)
    spread = f" ({min(values):.3f}–{max(values):.3f})" if len(values) > 1 else ""
    return mean, f"{mean:.3f}{spread}"


def _grid(names: Sequence[str], bits: Sequence[int], seeds: int) -> list[tuple[str, int, int]]:
    if seeds < 1:
        raise UsageError(f"seeds must be at least 1, got {seeds}")
    if not bits:
        raise UsageError("no code length given")
    chosen = list(methods.registry()) if list(names) == ["all"] else list(names)
    if not chosen:
        raise UsageError("no method given; 'all' takes every method")
    for name in chosen:
        methods.find(name)
    return [
        (name, check_bits(length), seed)
        for seed in range(seeds)
        for length in dict.fromkeys(bits)
        for name in dict.fromkeys(chosen)
    ]


def _check_folder(folder: Path, common: dict[str, Any]) -> None:
    """Results of other settings are never mixed into one table."""
    path = folder / "settings.json"
    if folder.is_file() or (folder.is_dir() and any(folder.iterdir()) and not path.is_file()):
        raise UsageError(
            f"{folder} holds something else than a comparison; nothing in it was changed. "
            "Choose another --out"
        )
    wanted = json.loads(json.dumps(common))
    if not path.is_file():
        storage.write_files(folder, {path.name: storage.write_text(storage.dump_json(wanted))})
        return
    found = storage.read_json(path)
    differ = [key for key in wanted if found.get(key) != wanted[key]]
    if differ:
        raise UsageError(
            f"{folder} holds a comparison with another {', '.join(differ)}; choose another --out"
        )
