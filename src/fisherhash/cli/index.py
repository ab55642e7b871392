"""Verbs of an index: index sync|add|remove|list|info|verify|repair|backup|copy."""

from __future__ import annotations

import csv
import itertools
import json as json_module
import math
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import App, Parameter

from fisherhash.cli.base import (
    DEFAULT_LIMITS,
    Flag,
    Json,
    LimitFlags,
    Workers,
    app,
    notes,
    parse_workers,
    print_data,
    print_json,
    say,
)
from fisherhash.errors import FisherhashError, UsageError, counted, printable, printable_text
from fisherhash.index.images.options import SyncOptions
from fisherhash.system.options import parse_pairs

if TYPE_CHECKING:
    from fisherhash.index.images.image_index import ImageIndex
    from fisherhash.index.images.results import SyncReport
    from fisherhash.index.local.upkeep import RepairReport

IndexName = Annotated[
    str, Parameter(help="The index: a file, or the URI of another kind of index.")
]
Several = Annotated[list[str] | None, Parameter(negative="")]
Where = Annotated[
    list[str] | None,
    Parameter(
        negative="",
        help="Only items that match this filter, label=cat or taken>=2020; may be given several "
        "times, all must match.",
    ),
]
LISTED = 5
"""Skipped files that are named on the screen."""

index_app = App(
    name="index",
    help="Create an index of images and keep it in sync with them.",
    help_format="markdown",
)
app.command(index_app)


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class SyncFlags(SyncOptions):
    """The options of a sync as flags."""

    dry_run: Flag = False
    allow_empty: Flag = False
    moved: Flag = False


_SYNC = SyncFlags()


@index_app.command
def sync(
    index: IndexName,
    folder: str,
    *,
    model: str | None = None,
    fit: str | None = None,
    bits: int | None = None,
    device: str = "cpu",
    cluster: str | None = None,
    workers: Workers = "auto",
    options: SyncFlags = _SYNC,
    watch: Flag = False,
    limits: LimitFlags = DEFAULT_LIMITS,
    json: Json = False,
) -> None:
    """Bring an index in sync with a folder of images; it is created if there is none.

    Only new and changed files are encoded; what is gone is removed. If interrupted, the same
    command continues where it stopped. To list the files that cannot be read: index list INDEX
    --skipped.

    Args:
        folder: The images, in sub-folders of any depth; the first sub-folder is an image's label.
            Also a URL such as s3://BUCKET/FOLDER, or a text file FILE.txt with one path or URL per
            line; such images are added, and none is removed.
        model: A model folder, or the name of a built-in hasher; by default the index's own. A new
            index of 1,000 images or more fits codes to them, a smaller one takes a built-in
            hasher. To the bits of a model, bits that are fitted to the images are added.
        fit: For a new index: fit a hasher to these images by this method, without labels.
        bits: For a new index: length of the codes, by default 128; 64, 128 or 256 where there are
            too few images to fit codes to.
        device: cpu, cuda, … or auto.
        cluster: Encode on a Ray cluster whose nodes see the images: HOST:PORT, or auto for the one
            that this machine belongs to, or a new one on this machine.
        watch: Stay, and sync again whenever an image in the folder changes; Ctrl-C ends it.
        json: Print the result as JSON on stdout.
    """
    if watch and options.dry_run:
        raise UsageError("--watch and --dry-run exclude each other")
    began = time.perf_counter()
    limits.apply()
    count = parse_workers(workers)
    from fisherhash.index.images.creating import sync_index

    report = sync_index(
        index,
        folder,
        model=model,
        fit=fit,
        bits=bits,
        device=device,
        cluster="" if cluster == "auto" else cluster,
        options=options,
        workers=count,
    )
    if options.dry_run:
        notes(report.notes)
        changes = {"add": report.added, "update": report.updated, "remove": report.removed}
        print_data(changes | {"unchanged": report.unchanged}, _planned(changes), json=json)
        say(f"would be: {report}; nothing was changed")
        return
    report_sync(report, index, began, as_json=json)
    if watch:
        from fisherhash.index.images.creating import watch_folder

        say(f"watching {folder}; Ctrl-C ends it")
        for report in watch_folder(index, folder, device=device, workers=count, say=say):
            report_sync(report, index, time.perf_counter(), as_json=json)


@index_app.command(usage="Usage: fisherhash index add [OPTIONS] INDEX IMAGES...")
def add(
    index: IndexName,
    *images: Path,
    features: Path | None = None,
    keys: Path | None = None,
    model: str | None = None,
    label: Several = None,
    meta: Several = None,
    limits: LimitFlags = DEFAULT_LIMITS,
    device: str = "cpu",
    workers: Workers = "auto",
    json: Json = False,
) -> None:
    """Add images to an index; it is created if there is none.

    The key of an image is its path inside the folder that the index is in sync with; any other
    image has its absolute path as its key.

    Args:
        images: Image files and folders.
        features: Instead of images: a file FILE.npy with vectors, one per row. A new index needs
            --model, trained with train --features.
        keys: With --features: a text file with one key per line; by default the numbers of the
            rows, from 0.
        model: As for sync.
        label: A label of these images; may be given several times.
        meta: A field NAME=VALUE of these images; may be given several times.
        device: cpu, cuda, … or auto.
        json: Print the result as JSON on stdout.
    """
    began = time.perf_counter()
    limits.apply()
    count, fields = parse_workers(workers), _metadata(meta)
    from fisherhash.index.images.creating import add_to_index, add_vectors

    given: dict[str, Any] = {"model": model, "labels": label, "metadata": fields, "device": device}
    if features is not None:
        if images:
            raise UsageError("images and --features exclude each other; add them one by one")
        report = add_vectors(index, features, keys=keys, **given)
    elif keys is not None:
        raise UsageError("--keys goes with --features; the key of an image is its path")
    elif not images:
        raise UsageError("no image given: fisherhash index add INDEX IMAGES…")
    else:
        report = add_to_index(index, images, workers=count, **given)
    report_sync(report, index, began, as_json=json)
    if report.skipped and not (report.added or report.updated or report.unchanged):
        raise FisherhashError("no image could be read")


@index_app.command(usage="Usage: fisherhash index remove [OPTIONS] INDEX [KEYS...]")
def remove(
    index: IndexName, *keys: str, where: Where = None, dry_run: Flag = False, json: Json = False
) -> None:
    """Remove items from an index, by key or by filter; no image file is touched.

    Args:
        keys: Keys of items, as search prints them. The next index sync brings back those whose
            files are still in the folder.
        dry_run: Only print what would be removed.
        json: Print the result as JSON on stdout.
    """
    if bool(keys) == bool(where):
        raise UsageError("say what to remove: KEYS…, or --where label=cat")
    with open_images(index, write=not dry_run) as images:
        names = printed_keys(images, keys)
        if not dry_run:
            removed, left = images.remove(names, where=where), len(images.index)
            say(f"{removed:,} removed, {left:,} left in {index}")
            if json:
                print_json({"removed": removed, "count": left})
            return
        if where:
            from fisherhash.index.images.searching import where_labels

            found = images.index.items(where_labels(images.index, where))
        else:
            found = images.index.get(dict.fromkeys(names))
        names = [item.name for item in found]
        left = len(images.index) - len(names)
    print_data({"remove": names}, _planned({"remove": names}), json=json)
    say(f"would be: {len(names):,} removed, {left:,} left; nothing was changed")


@index_app.command(name="list")
def list_items(
    index: IndexName,
    *,
    labels: Flag = False,
    skipped: Flag = False,
    where: Where = None,
    limit: int | None = None,
    json: Json = False,
) -> None:
    """List the items of an index: one line per item, its key and its labels.

    Args:
        labels: List the labels instead, the most frequent first: how many items, and the label.
        skipped: List the files that could not be read instead, as CSV: name, reason. A damaged file
            is tried again when it changes, one that could not be opened at every sync.
        limit: The most lines; by default all.
        json: Print JSON instead of text: with id, file, code and fields.
    """
    if limit is not None and limit < 1:
        raise UsageError(f"--limit must be at least 1, got {limit}")
    if skipped and (labels or where):
        raise UsageError("--skipped lists files, which have neither labels nor fields")
    with open_images(index) as images:
        if skipped:
            _print_skipped(images, limit, as_json=json)
        elif labels:
            _print_labels(images, where, limit, as_json=json)
        else:
            _print_items(images, where, limit, as_json=json)


def _print_items(
    images: ImageIndex, where: list[str] | None, limit: int | None, *, as_json: bool
) -> None:
    from fisherhash.index.images.results import Hit, synced_folder
    from fisherhash.index.images.searching import near_label, where_labels

    folder, count, rows = synced_folder(images.index), 0, []
    items = images.index.items(where_labels(images.index, where))
    for item in itertools.islice(items, limit):
        count += 1
        if as_json:
            found = Hit.of(item, folder=folder).to_json() | {"code": item.code.hex()}
            rows.append({name: value for name, value in found.items() if name != "distance"})
        else:
            print("\t".join([printable(item.name), *map(printable, item.labels)]))
    if as_json:
        print_json(rows)
    elif where and not count:
        say(f"no item matches {' and '.join(where)}{near_label(images.index, where)}")


def _print_labels(
    images: ImageIndex, where: list[str] | None, limit: int | None, *, as_json: bool
) -> None:
    from fisherhash.index.images.searching import count_labels

    counts = count_labels(images.index, where)
    ordered = sorted(counts.items(), key=lambda pair: (-pair[1], pair[0]))[:limit]
    rows = [{"label": label or None, "count": count} for label, count in ordered]
    lines = (f"{count:>9,}  {printable(label) or '(no label)'}" for label, count in ordered)
    print_data(rows, lines, json=as_json)


def _print_skipped(images: ImageIndex, limit: int | None, *, as_json: bool) -> None:
    files = images.skipped()[:limit]
    if as_json:
        print_json([file._asdict() for file in files])
        return
    writer = csv.writer(sys.stdout, lineterminator="\n")
    writer.writerow(("name", "reason"))
    writer.writerows(map(printable_text, file) for file in files)


INFO_TITLES = {
    "count": "items",
    "keyed": "with a key",
    "skipped": "skipped files",
}


@index_app.command
def info(index: IndexName, *, json: Json = False) -> None:
    """Say what an index holds, what made its codes, and how large it is.

    Args:
        json: Print JSON instead of text.
    """
    from fisherhash.index.images.choosing import describe_model

    with open_images(index) as opened:
        facts = opened.info()
    shown = facts | {"model": describe_model(facts["model"]) if facts["model"] else None}
    # What only programs ask for, and what is as it is in most indexes.
    left_out = {"next_id", "format", "commit"}
    left_out |= {name for name in ("unavailable", "skipped") if not shown.get(name)}
    left_out |= {"uri"} if shown.get("path") == shown["uri"] else set()
    left_out |= {"keyed"} if shown.get("keyed") == shown.get("count") else set()
    lines = (
        printable(f"{INFO_TITLES.get(name, name):<19} {f'{v:,}' if isinstance(v, int) else v}")
        for name, v in shown.items()
        if v is not None and not isinstance(v, dict | list) and name not in left_out
    )
    print_data(facts, lines, json=json)


@index_app.command
def verify(index: IndexName, *, json: Json = False) -> None:
    """Check every checksum of an index and its model; exit code 1 if anything is wrong.

    Args:
        json: Print JSON instead of text.
    """
    from fisherhash.index.images.image_index import ImageIndex

    problems = ImageIndex.examine(index)
    found = {"ok": not problems, "problems": [asdict(problem) for problem in problems]}
    print_data(found, problems, json=json)
    if problems:
        raise FisherhashError(f"{index} is not as it was written; problems: {len(problems)}")
    say(f"{index}: nothing wrong was found")


@index_app.command
def repair(index: str, *, out: str | None = None, json: Json = False) -> None:
    """Save everything that verifies of a damaged index into a new one; prints what is lost.

    The damaged index is only read. Ids stay. A lost item of a synced folder comes back with the
    next index sync.

    Args:
        index: The file of the index.
        out: The new file; by default INDEX-repaired.
        json: Print JSON instead of text.
    """
    from fisherhash.index.local import repair as repair_index

    _must_be_file(index, out or "")
    report = repair_index(index, f"{index}-repaired" if out is None else out)
    notes(report.remarks)
    print_data(report.to_json(), _lost(report), json=json)
    back = "; lost images of a synced folder come back with index sync" if report.lost else ""
    say(f"{report}; the repaired index is {report.target}{back}")


def _must_be_file(*names: str) -> None:
    for name in names:
        if "://" in name:
            raise UsageError(f"{name} is no file; copy other kinds of index with: index copy")


def _lost(report: RepairReport) -> Iterator[str]:
    for item in report.lost:
        yield f"lost  {printable(item.key or '')}  (id {item.id}): {item.reason}"
    for first, last in report.lost_codes:
        ids = f"id {first}" if first == last else f"ids {first} to {last}"
        yield f"lost  {ids}, without a key: {counted(last - first + 1, 'damaged code')}"


@index_app.command
def backup(index: str, dest: str, *, json: Json = False) -> None:
    """Copy an index, also while it is written; the copy is checked before it is there.

    Args:
        index: The file of the index.
        dest: The backup: a file that does not exist yet. It is an index like any other.
        json: Print the result as JSON on stdout.
    """
    from fisherhash.index.local import backup as backup_index

    _must_be_file(index, dest)
    began = time.perf_counter()
    report = backup_index(index, dest)
    seconds = time.perf_counter() - began
    say(f"{dest}: made and checked, {counted(report.count, 'item')}, {seconds:.1f} s")
    if json:
        print_json(report.to_json())


@index_app.command
def copy(source: str, target: str, *, json: Json = False) -> None:
    """Copy an index to a new one, perhaps of another kind; ids stay.

    If interrupted, the same command continues where it stopped.

    Args:
        source: The index: a file, or the URI of another kind of index.
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


def open_images(
    index: str, *, write: bool = False, device: str = "cpu", skip_damaged: bool = False
) -> ImageIndex:
    """Open an index of images."""
    from fisherhash.index.images.image_index import ImageIndex

    return ImageIndex.open(index, write=write, device=device, skip_damaged=skip_damaged)


def printed_keys(images: ImageIndex, names: tuple[str, ...] | list[str]) -> list[str]:
    """The keys of names as they are printed, where some characters are escaped."""
    index = images.index
    if not any("\\" in name and name not in index for name in names):
        return list(names)
    escaped = {printable(key): key for key in index.files()}
    return [name if name in index else escaped.get(name, name) for name in names]


def report_sync(report: SyncReport, index: str, began: float, *, as_json: bool) -> None:
    """Print what a sync changed, and which images it skipped."""
    notes(report.notes)
    shown = report.skipped[: max(report.named, min(LISTED, report.new_skipped))]
    for skip in shown:
        say(f"skipped {printable(skip.name)}: {skip.reason}")
    several = len(report.skipped)
    if several > len(shown):
        files = "1 file is" if several == 1 else f"{several:,} files are"
        say(f"{files} skipped; list them with: fisherhash index list {index} --skipped")
    seconds = time.perf_counter() - began
    say(f"{report}; {report.count:,} in {index}, {seconds:.1f} s")
    if as_json:
        print_json(report.to_json() | {"index": index, "seconds": round(seconds, 2)})
    if not report.count and report.skipped:
        raise FisherhashError("no image could be read")


def _planned(changes: dict[str, list[str]]) -> Iterator[str]:
    return (f"{verb:<6}  {printable(key)}" for verb, keys in changes.items() for key in keys)


def _metadata(pairs: list[str] | None) -> dict[str, Any] | None:
    """NAME=VALUE; a value that reads as a number is one, so that a filter can compare it."""
    fields: dict[str, Any] = {}
    for name, text in parse_pairs("--meta", pairs or ()).items():
        try:
            value = json_module.loads(text)
        except ValueError:
            value = text
        # Infinite numbers are texts too: JSON has no number for them.
        number = isinstance(value, int | float) and math.isfinite(value)
        fields[name] = value if number else text
    return fields or None
