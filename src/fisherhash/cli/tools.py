"""Verbs that inspect and report: check-data, methods, doctor."""

from __future__ import annotations

import textwrap

from fisherhash.cli.base import (
    DEFAULT_LIMITS,
    Data,
    Json,
    LimitFlags,
    Workers,
    app,
    parse_workers,
    print_data,
    print_json,
)


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
def methods(name: str | None = None, /, *, json: Json = False) -> None:
    """List the methods, with their hyper-parameters.

    Args:
        name: One method; its hyper-parameters are explained.
        json: Print JSON instead of text, without the explanations.
    """
    from dataclasses import asdict

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


@app.command
def doctor(*, json: Json = False) -> None:
    """Report what is installed, what is missing, and where files are stored.

    Args:
        json: Print JSON instead of text.
    """
    from fisherhash.cli.doctor import examine

    found = examine()
    lines = []
    for section, rows in found.items():
        lines += [section, *(f"  {name:<20} {value}" for name, value in rows.items())]
    print_data(found, lines, json=json)
