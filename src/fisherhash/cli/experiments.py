"""Verbs that run several methods: compare, reproduce."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from fisherhash.cli.base import DEFAULT_NETWORK, Data, Json, NetworkFlags, ProtocolName, app, say
from fisherhash.system.options import parse_number
from fisherhash.training.settings import Settings


@Parameter(name="*")
@dataclass(frozen=True)
class _SharedSettings(Settings):
    """Settings without a seed: a comparison has several."""

    seed: Annotated[int, Parameter(parse=False)] = 0


_DEFAULT_SETTINGS = _SharedSettings()


@app.command
def compare(
    *,
    data: Data,
    out: Path,
    methods: str = "all",
    bits: str = "12,48",
    seeds: int = 1,
    protocol: ProtocolName = None,
    network: NetworkFlags = DEFAULT_NETWORK,
    settings: _SharedSettings = _DEFAULT_SETTINGS,
    json: Json = False,
) -> None:
    """Train and measure several methods in the same way, and write one table.

    After an interruption the same command continues where it stopped.

    Args:
        out: Folder for the runs, table.md, table.html and results.json.
        methods: Names joined by commas, or all.
        bits: Code lengths joined by commas.
        seeds: Number of seeds; they are 0, 1, 2, …
        json: Print the results as JSON on stdout instead of the table.
    """
    from fisherhash.experiments import comparing
    from fisherhash.experiments.__main__ import print_outcome

    outcome = comparing.compare(
        data,
        out=out,
        names=[name.strip() for name in methods.split(",") if name.strip()],
        bits=[parse_number("each of --bits", int, number) for number in bits.split(",")],
        seeds=seeds,
        protocol=protocol,
        network=network,
        settings=settings,
        say=say,
    )
    print_outcome(outcome, as_json=json)


@app.command(help_flags=[], version_flags=[])
def reproduce(*words: Annotated[str, Parameter(show=False, allow_leading_hyphen=True)]) -> None:
    """Run a table or the figures of the DFH paper on the data of this machine."""
    from fisherhash.experiments.__main__ import run_command

    run_command(words, command="fisherhash reproduce")
