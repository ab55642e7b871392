"""One training of a grid, and the measurements of all cells that share it."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from typing import Any

from fisherhash import methods
from fisherhash.experiments.benches import Cell, OpenBench
from fisherhash.experiments.rankings import measure_rankings
from fisherhash.training.fitting import fit


def run_cells(cells: Sequence[Cell], stage: OpenBench) -> list[dict[str, Any]]:
    """Train once and measure all cells; returns what only a run can tell of each.

    Args:
        cells: cells of one training, see :attr:`Cell.training`.
        stage: the images and the network.
    """
    cell = cells[0]
    # Before training, because it is about the network as it was.
    reference = stage.reference if cell.measured else None
    endings = [
        (one.bits, dataclasses.replace(one.settings, validation_every=one.settings.epochs))
        for one in cells
    ]
    trained = fit(
        stage.collection,
        method=cell.method,
        bits=cell.bits,
        options=cell.options,
        backbone=stage.network,
        finetune=stage.finetune,
        protocol=stage.split,
        settings=endings[0][1],
        device=str(stage.device),
        bank=stage.bank,
        fitted=False,
        endings=endings[1:],
    )
    every = [trained, *trained.others]
    rows: list[dict[str, Any]] = [
        {"options": methods.resolved_options(one.method), "features_by": one.features_by}
        for one in every
    ]
    began = time.perf_counter()
    if cell.measured:
        if stage.unseen is not None:
            every = [dataclasses.replace(one, collection=stage.unseen) for one in every]
        ended = [(one, own.settings) for one, own in zip(every, cells, strict=True)]
        measured = measure_rankings(ended, stage.bank, reference=reference)
        rows = [row | found for row, found in zip(rows, measured, strict=True)]
    seconds = trained.seconds | {"measuring": time.perf_counter() - began}
    for row, one in zip(rows, every, strict=True):
        last = one.history[-1] if one.history else None
        if not cell.measured and last is not None:
            row["validation"] = last.pop("validation", None) or {"plain": last["validation_map"]}
        row["seconds"] = {name: round(value, 3) for name, value in seconds.items()}
        row["history"] = last
    return rows
