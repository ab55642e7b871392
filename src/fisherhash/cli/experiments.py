"""Verbs that run several methods: compare."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from fisherhash.cli.base import Json, Whole, app, print_json, say
from fisherhash.errors import FisherhashError, UsageError


@app.command
def compare(
    *,
    data: str,
    out: Path,
    methods: str = "all",
    bits: str = "12,48",
    seeds: Whole = 1,
    protocol: str | None = None,
    backbone: str = "efficientnet-lite0",
    weights: Path | None = None,
    image_size: Whole | None = None,
    finetune: Annotated[bool, Parameter(negative="--frozen")] = False,
    epochs: Whole | None = None,
    learning_rate: float | None = None,
    device: str | None = None,
    json: Json = False,
) -> None:
    """Train several methods alike, measure them alike, and write one table.

    Interrupted, the same command continues where it stopped.

    Parameters
    ----------
    data
        As for train.
    out
        Folder for the runs, table.md and results.json.
    methods
        Names joined by commas, or all.
    bits
        Code lengths joined by commas.
    seeds
        How many seeds; they are 0, 1, 2, …
    protocol
        How the data is split; by default what the data suggests.
    backbone
        As for train; one for all methods.
    weights
        The backbone's weights file.
    image_size
        Side of the images in pixels.
    finetune
        Train the network with the head, or only the head on frozen features (the default).
    epochs
        Passes over the training images.
    learning_rate
        The highest learning rate.
    device
        cpu, cuda, …
    json
        Print the results as JSON on stdout instead of the table.
    """
    from fisherhash.experiments.compare import compare as run
    from fisherhash.training.loop import Settings

    given = {"epochs": epochs, "learning_rate": learning_rate}
    comparison = run(
        data,
        out=out,
        names=[name.strip() for name in methods.split(",") if name.strip()],
        bits=[_whole(number) for number in bits.split(",")],
        seeds=seeds,
        protocol=protocol,
        backbone=backbone,
        weights=weights,
        image_size=image_size,
        finetune=finetune,
        settings=Settings(**{k: v for k, v in given.items() if v is not None}),
        device=device,
        say=say,
    )
    if json:
        print_json({"rows": comparison.rows, "failed": comparison.failed})
    else:
        print(comparison.table, end="")
    say(f"table.md and results.json are in {out}")
    if comparison.failed:
        raise FisherhashError(f"{len(comparison.failed)} runs failed; the same command tries again")


def _whole(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise UsageError(f"bits must be whole numbers joined by commas, got '{text}'") from None
