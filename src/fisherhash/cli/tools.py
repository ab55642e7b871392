"""Verbs that inspect and report: check-data, methods, doctor."""

from __future__ import annotations

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
def methods(*, json: Json = False) -> None:
    """List the methods, with their hyper-parameters.

    Args:
        json: Print JSON instead of text.
    """
    from dataclasses import asdict

    from fisherhash.methods import hyper_parameters, registry

    listed = {
        name: asdict(method.info)
        | {"options": {k: p.default for k, p in hyper_parameters(method).items()}}
        for name, method in registry().items()
    }
    if json:
        print_json(listed)
        return
    for name, info in listed.items():
        print(f"{name:<12} {info['title']} ({info['venue']} {info['year']})")
        learns = "no labels" if info["supervision"] == "none" else info["supervision"]
        several = "several labels" if info["multilabel"] else "one label per image"
        print(f"{'':<12} learns from {learns}; {several}; {info['url']}")
        options = " ".join(f"{k}={v}" for k, v in info["options"].items())
        if options:
            print(f"{'':<12} --set {options}")


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
