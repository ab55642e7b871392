"""Verbs that look after an index: index repair|backup|copy|build|seal."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from fisherhash.cli.base import Json, print_data, print_json, say
from fisherhash.cli.index import index_app
from fisherhash.errors import UsageError, counted, printable

if TYPE_CHECKING:
    from fisherhash.index.local.repair import RepairReport


@index_app.command
def repair(index: Path, *, out: Path | None = None, json: Json = False) -> None:
    """Save everything that verifies of a damaged index into a new one; prints what is lost.

    The damaged index is only read. Ids stay. A lost item of a synced folder comes back with the
    next index sync.

    Args:
        index: The folder of the index.
        out: The new folder; by default INDEX-repaired.
        json: Print JSON instead of text.
    """
    from fisherhash.index.local.repair import repair_index

    _must_be_path(index)
    place = index.with_name(f"{index.name}-repaired") if out is None else out
    report = repair_index(index, place)
    for remark in report.remarks:
        say(f"note: {remark}")
    print_data(report.to_json(), _lost(report), json=json)
    back = "; lost images of a synced folder come back with index sync" if report.lost else ""
    say(f"{report}; the repaired index is {place}{back}")


def _lost(report: RepairReport) -> Iterator[str]:
    for item in report.lost:
        yield f"lost  {printable(item.key)}  (id {item.id}): {item.reason}"
    for first, last in report.lost_codes:
        ids = f"id {first}" if first == last else f"ids {first} to {last}"
        yield f"lost  {ids}, without a key: {counted(last - first + 1, 'damaged code')}"


@index_app.command
def backup(index: Path, dest: Path, *, json: Json = False) -> None:
    """Copy an index, also while it is written; an earlier backup is brought up to date.

    The backup is an index like any other. Only codes that an earlier backup lacks are copied, and
    everything is checked before it takes the earlier one's place.

    Args:
        index: The folder of the index.
        dest: The backup: a folder that does not exist yet, or an earlier backup of this index.
        json: Print the result as JSON on stdout.
    """
    from fisherhash.index.local.backup import backup_index

    _must_be_path(index)
    _must_be_path(dest)
    began = time.perf_counter()
    report = backup_index(index, dest)
    how = "brought up to date" if report.incremental else "made"
    copied = f"{counted(report.copied, 'byte')} of codes copied, {report.kept:,} were there"
    seconds = time.perf_counter() - began
    say(f"{dest}: {how} and checked, {counted(report.count, 'item')}; {copied}, {seconds:.1f} s")
    if json:
        print_json(report.to_json())


@index_app.command
def copy(source: str, target: str, *, json: Json = False) -> None:
    """Copy an index to a new one, perhaps of another kind; ids stay.

    If interrupted, the same command continues where it stopped.

    Args:
        source: The index: a folder, or the URI of another kind of index.
        target: The new index, likewise.
        json: Print the result as JSON on stdout.
    """
    from fisherhash.index.copying import copy_index

    began = time.perf_counter()
    report = copy_index(source, target)
    seconds = time.perf_counter() - began
    checks = f"{counted(report.checked, 'item')} and searches compared"
    items = counted(report.count, "item")
    say(f"{target}: {items}, {report.copied:,} copied, {checks}, {seconds:.1f} s")
    if json:
        print_json(report.to_json())


@index_app.command
def build(index: str, *, json: Json = False) -> None:
    """Prepare what searches need now, instead of at the first search: tables, or a graph.

    Args:
        index: The index: a folder, or the URI of another kind of index.
        json: Print what is known about the index as JSON on stdout.
    """
    from fisherhash.index import Index

    began = time.perf_counter()
    with Index.open(index, write=True) as opened:
        opened.build()
        info = opened.info()
    say(f"{info['uri']}: prepared for searches, {time.perf_counter() - began:.1f} s")
    if json:
        print_json(info)


@index_app.command
def seal(folder: Path, *, key: Path) -> None:
    """Seal an index or a model before it is sent: index verify --key tells whether it changed.

    Who has the key can make a seal, too; send it on another way than the folder.

    Args:
        folder: The folder of an index or of a model.
        key: A file with the secret key, at least 16 bytes: head -c 32 /dev/urandom > KEY
    """
    from fisherhash.system.seal import SEAL, read_key, seal_folder

    count = seal_folder(folder, read_key(key))
    say(f"{folder}: {counted(count, 'file')} sealed in {SEAL}")


def _must_be_path(index: Path) -> None:
    if "://" in str(index) or ":/" in str(index):
        raise UsageError(f"{index} is no folder; copy other kinds of index with: index copy")
