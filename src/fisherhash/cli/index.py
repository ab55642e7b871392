"""Verbs of the index: index sync|add|remove|skipped|info|verify|compact, search.

``contents`` adds the verbs that list what an index holds.
"""

from __future__ import annotations

import csv
import json as json_module
import math
import os
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import App, Parameter

from fisherhash.cli.base import (
    DEFAULT_LIMITS,
    Flag,
    Json,
    LimitFlags,
    Workers,
    app,
    check_output,
    notes,
    parse_workers,
    print_data,
    print_json,
    say,
)
from fisherhash.errors import FisherhashError, UsageError, counted, printable, printable_text
from fisherhash.system.options import parse_pairs

if TYPE_CHECKING:
    from fisherhash.index.base import Index
    from fisherhash.index.images.image_index import ImageIndex
    from fisherhash.index.images.results import SyncReport

Several = Annotated[list[str] | None, Parameter(negative="")]
LISTED = 5
"""Skipped files that are named on the screen."""

index_app = App(
    name="index",
    help="Create an index of images and keep it in sync with them.",
    help_format="markdown",
)
app.command(index_app)


@index_app.command
def sync(
    index: str,
    folder: Path,
    *,
    model: str | None = None,
    fit: str | None = None,
    bits: int | None = None,
    device: str = "cpu",
    workers: Workers = "auto",
    dry_run: Flag = False,
    allow_empty: Flag = False,
    moved: Flag = False,
    refresh_fields: Flag = False,
    watch: Flag = False,
    limits: LimitFlags = DEFAULT_LIMITS,
    json: Json = False,
) -> None:
    """Bring an index in sync with a folder of images; it is created if there is none.

    Only new and changed files are encoded; what is gone is removed. If interrupted, the same
    command continues where it stopped. To list the files that cannot be read: index skipped INDEX.

    Args:
        index: The index: a folder, or the URI of another kind of index.
        folder: The images, in sub-folders of any depth; the first sub-folder is an image's label.
        model: A model folder, or the name of a built-in hasher; by default the index's own. A new
            index of 1,000 images or more fits codes to them, a smaller one takes the built-in
            hasher.
        fit: For a new index: fit a hasher to these images by this method, without labels.
        bits: For a new index: length of the codes, by default 128, or 64 with --fit; 64, 128 or
            256 where there are too few images to fit codes to.
        device: cpu, cuda, … or auto.
        dry_run: Only print what would be done.
        allow_empty: Let an empty folder empty the index.
        moved: The index was in sync with another folder, and this one takes its place.
        refresh_fields: Read date, camera and position of photos that have not changed, too.
        watch: Stay, and sync again whenever an image in the folder changes; Ctrl-C ends it.
        json: Print the result as JSON on stdout.
    """
    if watch and dry_run:
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
        dry_run=dry_run,
        allow_empty=allow_empty,
        moved=moved,
        refresh_fields=refresh_fields,
        workers=count,
    )
    if not dry_run:
        report_sync(report, index, began, as_json=json)
        if watch:
            _watch(index, folder, device, count, as_json=json)
        return
    notes(report.notes)
    changes = {"add": report.added, "update": report.updated, "remove": report.removed}
    print_data(changes | {"unchanged": report.unchanged}, _planned(changes), json=json)
    say(f"would be: {report}; nothing was changed")


@index_app.command(usage="Usage: fisherhash index add [OPTIONS] INDEX IMAGES...")
def add(
    index: str,
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
        index: The index: a folder, or the URI of another kind of index.
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
    from fisherhash.index.images.creating import add_to_index

    if features is not None:
        if images:
            raise UsageError("images and --features exclude each other; add them one by one")
        from fisherhash.index.images.vectors import add_vectors

        added = add_vectors(
            index,
            features,
            keys=keys,
            model=model,
            labels=label,
            metadata=_metadata(meta),
            device=device,
        )
        report_sync(added, index, began, as_json=json)
        return
    if keys is not None:
        raise UsageError("--keys goes with --features; the key of an image is its path")
    if not images:
        raise UsageError("no image given: fisherhash index add INDEX IMAGES…")
    report = add_to_index(
        index,
        images,
        model=model,
        labels=label,
        metadata=_metadata(meta),
        device=device,
        workers=parse_workers(workers),
    )
    report_sync(report, index, began, as_json=json)
    if report.skipped and not (report.added or report.updated or report.unchanged):
        raise FisherhashError("no image could be read")


@index_app.command(usage="Usage: fisherhash index remove [OPTIONS] INDEX [KEYS...]")
def remove(
    index: str,
    *keys: str,
    where: Several = None,
    dry_run: Flag = False,
    json: Json = False,
) -> None:
    """Remove items from an index; no image file is touched.

    Args:
        index: The index: a folder, or the URI of another kind of index.
        keys: Keys of items, as search prints them.
        where: Remove the items that match this filter, label=cat or year<2010; may be given several
            times, all must match.
        dry_run: Only print what would be removed.
        json: Print the result as JSON on stdout.
    """
    if bool(keys) == bool(where):
        raise UsageError("say what to remove: KEYS…, or --where label=cat")
    with open_images(index, write=not dry_run) as images:
        opened = images.index
        if not dry_run:
            removed = images.remove(_printed(opened, keys), where=where)
            say(f"{removed:,} removed, {len(opened):,} left in {index}")
            if json:
                print_json({"removed": removed, "count": len(opened)})
            return
        if where:
            from fisherhash.index.images.labels import where_labels

            found = opened.items(where_labels(opened, where))
        else:
            found = opened.get(dict.fromkeys(_printed(opened, keys)))
        names = [item.name for item in found]
        left = len(opened) - len(names)
    print_data({"remove": names}, _planned({"remove": names}), json=json)
    say(f"would be: {len(names):,} removed, {left:,} left; nothing was changed")


@index_app.command
def skipped(index: str, *, json: Json = False) -> None:
    """List the files that could not be read, as CSV: name, reason.

    A damaged file is tried again when it changes; a file that could not be opened, at every sync.

    Args:
        index: The index: a folder, or the URI of another kind of index.
        json: Print JSON instead of CSV.
    """
    with open_images(index) as opened:
        files = opened.skipped()
    if json:
        print_json([file._asdict() for file in files])
        return
    writer = csv.writer(sys.stdout, lineterminator="\n")
    writer.writerow(("name", "reason"))
    writer.writerows(map(printable_text, file) for file in files)


INFO_UNUSUAL = ("fine_bits", "fine_bytes", "removed", "skipped")
"""Facts that `index info` prints only where they are not zero."""
INFO_TITLES = {
    "count": "items",
    "keyed": "with a key",
    "fine_bits": "second code, bits",
    "fine_bytes": "second codes, bytes",
    "skipped": "skipped files",
    "encoded_by": "encoded by",
}


@index_app.command
def info(index: str, *, json: Json = False) -> None:
    """Say what an index holds, what made its codes, and how large it is.

    Args:
        index: The index: a folder, or the URI of another kind of index.
        json: Print JSON instead of text.
    """
    from fisherhash.index.images.creating import describe_model

    with open_images(index) as opened:
        facts = opened.info()
    shown = facts | {"model": describe_model(facts["model"]) if facts["model"] else None}
    if isinstance(facts.get("bytes"), dict):
        shown["bytes"] = sum(facts["bytes"].values())
    # What only programs ask for, and what is as it is in most indexes.
    left_out = {"next_id", *(name for name in INFO_UNUSUAL if not shown.get(name))}
    left_out |= {"uri"} if shown.get("path") == shown["uri"] else set()
    left_out |= {"keyed"} if shown.get("keyed") == shown.get("count") else set()
    lines = (
        printable(f"{INFO_TITLES.get(name, name):<19} {f'{v:,}' if isinstance(v, int) else v}")
        for name, v in shown.items()
        if v is not None and not isinstance(v, dict | list) and name not in left_out
    )
    print_data(facts, lines, json=json)


@index_app.command
def verify(index: str, *, key: Path | None = None, json: Json = False) -> None:
    """Check every checksum of an index and its model; exit code 1 if anything is wrong.

    Args:
        index: The index: a folder, or the URI of another kind of index.
        key: Compare an index or a model with its seal instead, see index seal; a file with the key.
        json: Print JSON instead of text.
    """
    if key is not None:
        _verify_seal(index, key, as_json=json)
        return
    from fisherhash.index.images.image_index import ImageIndex

    problems = ImageIndex.examine(index)
    found = {"ok": not problems, "problems": [asdict(problem) for problem in problems]}
    print_data(found, problems, json=json)
    if problems:
        raise FisherhashError(f"{index} is not as it was written; problems: {len(problems)}")
    say(f"{index}: nothing wrong was found")


def _verify_seal(folder: str, key: Path, *, as_json: bool) -> None:
    from fisherhash.system.seal import check_seal, read_key

    report = check_seal(folder, read_key(key))
    lines = [
        f"{how:<8} {printable(name)}"
        for how in ("changed", "missing", "added")
        for name in getattr(report, how)
    ]
    print_data(asdict(report) | {"ok": report.intact}, lines, json=as_json)
    if report.forged:
        raise FisherhashError(f"the seal of {folder} was not made with this key, or was changed")
    if not report.intact:
        raise FisherhashError(f"{folder} is not as it was sealed; files: {len(lines)}")
    say(f"{folder}: as it was sealed")


@index_app.command
def compact(index: str, *, json: Json = False) -> None:
    """Rewrite an index without what was removed; ids stay.

    Args:
        index: The index: a folder, or the URI of another kind of index.
        json: Print the result as JSON on stdout.
    """
    with open_images(index, write=True) as opened:
        result = opened.index.compact()
        count = len(opened.index)
    say(f"{index}: {counted(count, 'item')}, compact")
    if json:
        print_json(result)


@app.command(usage="Usage: fisherhash search --index INDEX [OPTIONS] [IMAGES...]")
def search(
    *images: str,
    index: str | None = None,
    key: Several = None,
    features: Path | None = None,
    k: Annotated[int | None, Parameter(name="-k")] = None,
    radius: int | None = None,
    ranking: Literal["hamming", "real"] | None = None,
    fine_weight: str | None = None,
    where: Several = None,
    html: Path | None = None,
    show_from: Several = None,
    limits: LimitFlags = DEFAULT_LIMITS,
    device: str = "cpu",
    skip_damaged: Flag = False,
    json: Json = False,
) -> None:
    """Find the images of an index that are most similar: prints rank, distance and key of each.

    Where the index has second codes, both order the results, and the distance of both codes comes
    before that of the first.

    Args:
        images: Image files to search with; a folder stands for the images in it.
        index: The index: a folder, or the URI of another kind of index. Without this option, the
            one of IMAGES that is an index.
        key: Search with an item of the index, which does not find itself; may be given several
            times.
        features: Search with the vectors of a file FILE.npy, one per row.
        k: Results per image; by default 10, with --radius all.
        radius: Only what differs in at most this many bits of the first code.
        ranking: hamming counts the bits that differ, real also weighs them by how sure the model is
            of the query's bits; by default what the model's card says is better.
        fine_weight: Where the index has second codes: what one of their bits counts beside one of
            the first codes; by default 1/6. 0 leaves them out; ties lets them order only what is at
            the same distance.
        where: Only items that match this filter, label=cat or year>=2020; may be given several
            times, all must match.
        html: Also write a page with thumbnails, a file that ends in .html.
        show_from: A folder whose images may be on the page, beside those that the index was filled
            from on this machine; may be given several times.
        device: cpu, cuda, … or auto.
        skip_damaged: Search a damaged index without the items whose codes are damaged; each answer
            says how many they are.
        json: Print JSON instead of text.
    """
    check_output("--html", html, ".html")
    from fisherhash.index.images.labels import near_label, where_labels
    from fisherhash.index.images.results import both_codes, left_out, shown_distance

    queries, index = _queries(images, index, has_keys=bool(key) or features is not None)
    limits.apply()
    vectors = None
    if features is not None:
        from fisherhash.data.vectors import open_vectors

        vectors = open_vectors(features)
    with open_images(index, device=device, skip_damaged=skip_damaged) as opened:
        keys = _printed(opened.index, key or ())
        results = opened.search(
            queries,
            keys=keys,
            features=vectors,
            k=k,
            radius=radius,
            where=where,
            ranking=ranking,
            fine_weight=parse_fine_weight(fine_weight),
            count_ties=True,
            skip_unreadable=True,
        )
        bits, count = opened.index.bits, len(opened.index)
        # A typo in a value looks like an answer otherwise.
        found = any(len(result) for result in results)
        asked = where_labels(opened.index, where) if where and not found else None
        no_item = asked is not None and not len(opened.index.ids(asked))
        hint = near_label(opened.index, where) if no_item and not json else ""
    errors = [result.error for result in results if result.error is not None]
    results = [result for result in results if result.error is None]
    if not results:
        raise FisherhashError("; ".join(errors))
    if html is not None:
        from fisherhash.pages import contact_sheet

        name = Path(index).absolute().name
        page = contact_sheet.search_page(
            results, bits, index=name, count=count, folders=shown_folders(index, show_from)
        )
        contact_sheet.write_page(html, page)
        say(f"the page is {html}")
    if json:
        print_json([result.to_json() for result in results])
    for number, result in enumerate(() if json else results):
        if len(results) > 1 or errors:
            print(f"{'' if number == 0 else chr(10)}{printable(result.query)}")
        for rank, match in enumerate(result, start=1):
            both = "" if match.combined is None else f" {match.combined:>6.2f}"
            print(f"{rank:>4}{both} {shown_distance(match.distance):>4}  {printable(match.name)}")
        for line in result.tied():
            say(line)
        if not len(result):
            why = f"; no item matches {' and '.join(where)}{hint}" if where and no_item else ""
            say(f"{printable(result.query)}: nothing found{why}")
        if result.unavailable is not None:
            say(left_out(result.unavailable))
    weight = results[0].fine_weight
    if weight and not json:
        say(f"{both_codes(weight)}. The columns: rank, this sum, distance of the first code, key")
    for error in errors:
        say(f"skipped {printable(error)}")


def parse_fine_weight(text: str | None) -> float | None:
    """The value of --fine-weight: a number or a fraction; None for ties."""
    from fisherhash.index.images.nearest import FINE_WEIGHT

    if text is None or text == "ties":
        return FINE_WEIGHT if text is None else None
    top, slash, bottom = text.partition("/")
    try:
        return float(top) / (float(bottom) if slash else 1.0)
    except (ValueError, ZeroDivisionError):
        raise UsageError(
            f"--fine-weight must be ties, or a number such as 0.25 or 1/3, got '{text}'"
        ) from None


def open_images(
    index: str, *, write: bool = False, device: str = "cpu", skip_damaged: bool = False
) -> ImageIndex:
    """Open an index of images."""
    from fisherhash.index.images.image_index import ImageIndex

    return ImageIndex.open(index, write=write, device=device, skip_damaged=skip_damaged)


def _printed(index: Index, names: Sequence[str]) -> Sequence[str]:
    """The keys of names as they are printed, where some characters are escaped."""
    if not any("\\" in name and name not in index for name in names):
        return names
    escaped = {printable(key): key for key in index.files()}
    return [name if name in index else escaped.get(name, name) for name in names]


def shown_folders(index: str, more: list[str] | None) -> list[str]:
    """Whose images a page may embed; tells the user what to do if there are none."""
    from fisherhash.index.images.known import known_folders

    folders = [*known_folders(index), *(more or ())]
    if not folders:
        say(
            f"{index} was not filled on this machine, so the page shows none of its images; "
            "choose a folder whose images may be shown with --show-from FOLDER"
        )
    return folders


def _queries(images: Sequence[str], index: str | None, *, has_keys: bool) -> tuple[list[str], str]:
    """The files to search with, and the index: it may be among the images."""
    from fisherhash.index.base import Index

    own = [name for name in images if "://" in name or Index.is_index(name)]
    if index is None and len(own) == 1:
        index, images = own[0], [name for name in images if name != own[0]]
        own = []
        if not images and not has_keys:
            raise UsageError(
                f"nothing to search for: give an image, fisherhash search IMAGE --index {index}, "
                "or --key KEY"
            )
    folder = next(filter(os.path.isdir, images), None)
    if index is None and folder is not None and len(images) == 1:
        name = os.path.basename(os.path.abspath(folder))
        raise UsageError(
            f"--index is missing, and {folder} is a folder of images, not an index. Create one "
            f"with: fisherhash index sync {name}.index {folder}; then: fisherhash search IMAGE "
            f"--index {name}.index"
        )
    if index is None:
        raise UsageError(
            "--index is missing: fisherhash search IMAGE --index INDEX. Create an index with: "
            "fisherhash index sync INDEX FOLDER"
        )
    if own:
        raise UsageError(f"{own[0]} is an index; search {index} with images or with --key")
    if folder is None:
        return list(images), index
    from fisherhash.data.sources import open_paths

    return list(open_paths(images).names), index


def report_sync(report: SyncReport, index: str, began: float, *, as_json: bool) -> None:
    """Print what a sync changed, and which images it skipped."""
    notes(report.notes)
    shown = report.skipped[: max(report.named, min(LISTED, report.new_skipped))]
    for skip in shown:
        say(f"skipped {printable(skip.name)}: {skip.reason}")
    several = len(report.skipped)
    if several > len(shown):
        files = "1 file is" if several == 1 else f"{several:,} files are"
        say(f"{files} skipped; list them with: fisherhash index skipped {index}")
    seconds = time.perf_counter() - began
    say(f"{report}; {report.count:,} in {index}, {seconds:.1f} s")
    if as_json:
        print_json(report.to_json() | {"index": index, "seconds": round(seconds, 2)})
    if not report.count and report.skipped:
        raise FisherhashError("no image could be read")


def _watch(index: str, folder: Path, device: str, workers: int | None, *, as_json: bool) -> None:
    from fisherhash.index.images.watching import watch_folder

    say(f"watching {folder}; Ctrl-C ends it")
    for report in watch_folder(index, folder, device=device, workers=workers, say=say):
        report_sync(report, index, time.perf_counter(), as_json=as_json)


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
