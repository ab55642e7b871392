"""Verbs of the index: index add|remove|sync|info|verify|compact, search, dedup."""

from __future__ import annotations

import json as json_module
import math
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import App, Parameter

from fisherhash.cli.base import Flag, Json, Whole, app, notes, print_json, say
from fisherhash.errors import FisherhashError, UsageError, printable

if TYPE_CHECKING:
    from fisherhash.index.images.importing import SyncReport

Several = Annotated[list[str] | None, Parameter(negative="")]
LISTED = 5
"""Skipped files that are named on the screen."""

index_app = App(
    name="index",
    help="Make an index of pictures and keep it in step with them.",
    help_format="plaintext",
)
app.command(index_app)


@index_app.command
def sync(
    index: Path,
    folder: Path,
    *,
    model: str | None = None,
    fit: str | None = None,
    bits: Whole | None = None,
    device: str = "cpu",
    dry_run: Flag = False,
    allow_empty: Flag = False,
    moved: Flag = False,
    json: Json = False,
) -> None:
    """Bring an index in step with a folder of pictures; it is made if there is none.

    Only new and changed files are encoded; what is gone is removed. Interrupted, the same command
    continues where it stopped. Files that cannot be read are listed in INDEX/skipped.csv.

    Parameters
    ----------
    index
        The index, a folder.
    folder
        The pictures, in sub-folders of any depth; the first sub-folder is a picture's label.
    model
        A model folder, or the name of a built-in hasher; by default the index's own, for a new
        index the built-in one.
    fit
        For a new index: fit a hasher to these pictures, without labels; itq is a good choice.
    bits
        With --fit: length of the codes, by default 64.
    device
        cpu, cuda, …
    dry_run
        Only print what would be done.
    allow_empty
        Let an empty folder empty the index.
    moved
        The index was in step with another folder, and this one takes its place.
    json
        Print the result as JSON on stdout.
    """
    began = time.perf_counter()
    from fisherhash.index.images.folders import sync_folder

    report = sync_folder(
        index,
        folder,
        model=model,
        fit=fit,
        bits=bits,
        device=device,
        dry_run=dry_run,
        allow_empty=allow_empty,
        moved=moved,
    )
    if dry_run:
        _dry(report, as_json=json)
    else:
        _report(report, index, began, as_json=json)


@index_app.command
def add(
    index: Path,
    *images: Path,
    model: str | None = None,
    label: Several = None,
    meta: Several = None,
    device: str = "cpu",
    json: Json = False,
) -> None:
    """Add pictures to an index; it is made if there is none.

    A picture inside the folder that the index is in step with has its path from there as its key,
    any other one its absolute path.

    Parameters
    ----------
    index
        The index, a folder.
    images
        Image files and folders.
    model
        As for sync.
    label
        A label of these pictures; may be given several times.
    meta
        A field NAME=VALUE of these pictures; may be given several times.
    device
        cpu, cuda, …
    json
        Print the result as JSON on stdout.
    """
    began = time.perf_counter()
    from fisherhash.index.images.folders import add_images

    if not images:
        raise UsageError("no image given: fisherhash index add INDEX IMAGES…")
    report = add_images(
        index, images, model=model, labels=label, metadata=_metadata(meta), device=device
    )
    _report(report, index, began, as_json=json)
    if report.skipped and not (report.added or report.updated or report.unchanged):
        raise FisherhashError("no image could be read")


@index_app.command
def remove(
    index: Path,
    *keys: str,
    where: Several = None,
    dry_run: Flag = False,
    json: Json = False,
) -> None:
    """Remove items from an index; no picture file is touched.

    Parameters
    ----------
    index
        The index, a folder.
    keys
        Keys of items, as search prints them.
    where
        Remove the items for which this holds, label=cat or year<2010; may be given several times,
        all must hold.
    dry_run
        Only print what would be removed.
    json
        Print the result as JSON on stdout.
    """
    from fisherhash.index.images.asking import ids_where, name_of
    from fisherhash.index.local.index import LocalIndex

    if bool(keys) == bool(where):
        raise UsageError("say what to remove: KEYS…, or --where label=cat")
    with LocalIndex.open(index, write=not dry_run) as opened:
        if where:
            ids = ids_where(opened, where)
        else:
            ids = [opened.item(key).id for key in dict.fromkeys(keys)]
        if dry_run:
            _dry_removal([name_of(item) for item in opened.items(ids)], len(opened), as_json=json)
            return
        removed = opened.remove(ids=ids)
        left = len(opened)
    say(f"{removed:,} removed, {left:,} left in {index}")
    if json:
        print_json({"removed": removed, "count": left})


@index_app.command
def info(index: Path, *, json: Json = False) -> None:
    """Say what an index holds, what made its codes, and how large it is.

    Parameters
    ----------
    index
        The index, a folder.
    json
        Print JSON instead of text.
    """
    from fisherhash.index.images.folders import mirrored_folder, verify_lists
    from fisherhash.index.images.hashers import describe_model
    from fisherhash.index.images.skips import SkipList
    from fisherhash.index.local.index import LocalIndex

    with LocalIndex.open(index) as opened:
        found: dict[str, Any] = dict(opened.info())
        model = opened.model or {}
    folder = mirrored_folder(index)
    notes(tuple(f"{index}/{problem}" for problem in verify_lists(index)))
    found |= {"folder": None if folder is None else str(folder), "skipped": len(SkipList(index))}
    if json:
        print_json(found)
        return
    found["model"] = describe_model(model) if model else None
    for name, value in found.items():
        if value is not None and not isinstance(value, dict | list):
            shown = f"{value:,}" if isinstance(value, int) else value
            print(f"{name.replace('_', ' '):<14} {shown}")


@index_app.command
def verify(index: Path, *, json: Json = False) -> None:
    """Check every checksum of an index and its model; exit code 1 if anything is wrong.

    Parameters
    ----------
    index
        The index, a folder.
    json
        Print JSON instead of text.
    """
    from dataclasses import asdict

    from fisherhash.index.images.folders import verify_lists
    from fisherhash.index.images.hashers import verify_model
    from fisherhash.index.local.index import LocalIndex
    from fisherhash.index.local.verify import verify_path

    if not (index / "catalogue.sqlite").exists():
        # Says what is there instead.
        LocalIndex.open(index).close()
    problems = [*verify_path(index), *verify_model(index), *verify_lists(index)]
    if json:
        print_json({"ok": not problems, "problems": [asdict(problem) for problem in problems]})
    else:
        for problem in problems:
            print(problem)
    if problems:
        raise FisherhashError(f"{index} is not as it was written; problems: {len(problems)}")
    say(f"{index}: nothing wrong was found")


@index_app.command
def compact(index: Path, *, json: Json = False) -> None:
    """Rewrite an index without what was removed; ids stay.

    Parameters
    ----------
    index
        The index, a folder.
    json
        Print the result as JSON on stdout.
    """
    from fisherhash.index.local.index import LocalIndex

    with LocalIndex.open(index, write=True) as opened:
        result = opened.compact()
        count = len(opened)
    say(f"{index}: {count:,} items, compact")
    if json:
        print_json(result)


@app.command
def search(
    *images: Path,
    index: Path,
    key: Several = None,
    k: Annotated[Whole | None, Parameter(name="-k")] = None,
    radius: Whole | None = None,
    where: Several = None,
    html: Path | None = None,
    device: str = "cpu",
    json: Json = False,
) -> None:
    """Find the pictures of an index that are most like these: rank, distance and key of each.

    Parameters
    ----------
    images
        Image files to search with.
    index
        The index, a folder.
    key
        Search with an item of the index, which does not find itself; may be given several times.
    k
        Answers an image; by default 10, with --radius all.
    radius
        Only what differs in at most this many bits.
    where
        Only items for which this holds, label=cat or year>=2020; may be given several times, all
        must hold.
    html
        Also write a page with thumbnails.
    device
        cpu, cuda, …
    json
        Print JSON instead of text.
    """
    from fisherhash.index.images.asking import ask

    bad: list[str] = []
    answers = ask(
        index,
        images,
        keys=key or (),
        k=k,
        radius=radius,
        where=where,
        device=device,
        unreadable=bad,
    )
    if html is not None:
        from fisherhash.index.local.index import LocalIndex
        from fisherhash.pages import contact_sheet

        with LocalIndex.open(index) as opened:
            name, bits, count = index.absolute().name, opened.bits, len(opened)
        page = contact_sheet.search_page(answers, bits, index=name, count=count)
        contact_sheet.write_page(html, page)
        say(f"the page is {html}")
    if json:
        print_json([answer.to_json() for answer in answers])
    for number, answer in enumerate(() if json else answers):
        if len(answers) > 1 or bad:
            print(f"{'' if number == 0 else chr(10)}{printable(answer.name)}")
        for rank, found in enumerate(answer.found, start=1):
            print(f"{rank:>4} {found.distance:>4}  {printable(found.name)}")
        if not answer.found:
            say(f"{answer.name}: nothing found")
    if bad:
        raise FisherhashError("; ".join(bad))


@app.command
def dedup(
    index: Path,
    *,
    radius: Whole = 0,
    compare_files: Flag = False,
    html: Path | None = None,
    json: Json = False,
) -> None:
    """List groups of pictures with equal or nearly equal codes, the largest first.

    Equal or near codes are candidates for duplicates, not a proof. The default finds equal codes;
    copies that were saved again or scaled often differ in a few bits: --radius 3.

    Parameters
    ----------
    index
        The index, a folder.
    radius
        Bits in which neighbours in a group may differ; large ones chain different pictures.
    compare_files
        Also read the files of each group, and mark those that are the same byte for byte.
    html
        Also write a page with thumbnails.
    json
        Print JSON instead of text.
    """
    from fisherhash.index.images.duplicates import duplicates

    found = duplicates(index, radius=radius, compare_files=compare_files)
    if html is not None:
        from fisherhash.pages import contact_sheet

        contact_sheet.write_page(html, contact_sheet.duplicates_page(found))
        say(f"the page is {html}")
    if json:
        print_json(found.to_json())
    else:
        print(found, end="")
    say(found.summary())


def _report(report: SyncReport, index: Path, began: float, *, as_json: bool) -> None:
    notes(tuple(report.notes))
    shown = report.skipped[: max(report.named, min(LISTED, report.new_skipped))]
    for skip in shown:
        say(f"skipped {printable(skip.name)}: {skip.reason}")
    several = len(report.skipped)
    if several > len(shown):
        files = "1 file is" if several == 1 else f"{several:,} files are"
        say(f"{files} skipped; all are listed in {index / 'skipped.csv'}")
    seconds = time.perf_counter() - began
    say(f"{report}; {report.count:,} in {index}, {seconds:.1f} s")
    if as_json:
        print_json(report.to_json() | {"index": str(index), "seconds": round(seconds, 2)})
    if not report.count and report.skipped:
        raise FisherhashError("no image could be read")


def _dry(report: SyncReport, *, as_json: bool) -> None:
    notes(tuple(report.notes))
    changes = {"add": report.added, "update": report.updated, "remove": report.removed}
    if as_json:
        print_json(changes | {"unchanged": report.unchanged})
    else:
        for verb, keys in changes.items():
            for key in keys:
                print(f"{verb:<6}  {printable(key)}")
    say(f"would be: {report}; nothing was changed")


def _dry_removal(names: list[str], count: int, *, as_json: bool) -> None:
    if as_json:
        print_json({"remove": names})
    else:
        for name in names:
            print(f"remove  {printable(name)}")
    say(f"would be: {len(names):,} removed, {count - len(names):,} left; nothing was changed")


def _metadata(pairs: list[str] | None) -> dict[str, Any] | None:
    """NAME=VALUE; a value that reads as a number is one, so that year>=2020 can be asked."""
    if not pairs:
        return None
    fields: dict[str, Any] = {}
    for pair in pairs:
        name, equals, text = pair.partition("=")
        if not equals or not name:
            raise UsageError(f"--meta takes NAME=VALUE, got '{pair}'")
        try:
            value = json_module.loads(text)
        except ValueError:
            value = text
        # Also infinite ones are words: JSON has no number for them.
        number = isinstance(value, int | float) and math.isfinite(value)
        fields[name] = value if number else text
    return fields
