"""Verbs that look into an index: search, dedup."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from fisherhash.cli.base import (
    DEFAULT_LIMITS,
    Flag,
    Json,
    LimitFlags,
    Workers,
    app,
    check_output,
    parse_workers,
    print_json,
    say,
)
from fisherhash.cli.index import IndexName, Several, open_images, printed_keys
from fisherhash.errors import FisherhashError, UsageError, printable
from fisherhash.index.images.options import DuplicateOptions, SearchOptions
from fisherhash.system.options import Range

if TYPE_CHECKING:
    from fisherhash.index.images.image_index import ImageIndex
    from fisherhash.index.images.results import SearchResult

ShowFrom = Annotated[
    list[str] | None,
    Parameter(
        negative="",
        help="A folder whose images may be on the page, beside those that the index was filled "
        "from on this machine; may be given several times.",
    ),
]


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class SearchFlags(SearchOptions):
    """The options of a search as flags; ties are always counted."""

    k: Annotated[int | None, Range(1), Parameter(name="-k")] = None
    where: Annotated[tuple[str, ...], Parameter(negative="")] = ()
    count_ties: Annotated[bool, Parameter(parse=False)] = True


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class DuplicateFlags(DuplicateOptions):
    """The options of a search for duplicates as flags."""

    compare_files: Flag = False


_SEARCH, _DUPLICATES = SearchFlags(), DuplicateFlags()


@app.command(usage="Usage: fisherhash search --index INDEX [OPTIONS] [IMAGES...]")
def search(
    *images: str,
    index: str | None = None,
    key: Several = None,
    features: Path | None = None,
    options: SearchFlags = _SEARCH,
    html: Path | None = None,
    show_from: ShowFrom = None,
    limits: LimitFlags = DEFAULT_LIMITS,
    device: str = "cpu",
    skip_damaged: Flag = False,
    json: Json = False,
) -> None:
    """Find the images of an index that are most similar: prints rank, distance and key of each.

    Args:
        images: Image files to search with; a folder stands for the images in it.
        index: The index: a file, or the URI of another kind of index. Without this option, the
            one of IMAGES that is an index.
        key: Search with an item of the index, which does not find itself; may be given several
            times.
        features: Search with the vectors of a file FILE.npy, one per row.
        html: Also write a page with thumbnails, a file that ends in .html.
        device: cpu, cuda, … or auto.
        skip_damaged: Search a damaged index without the items whose codes are damaged; each answer
            says how many they are.
        json: Print JSON instead of text.
    """
    check_output("--html", html, ".html")
    queries, index = _queries(images, index, has_keys=bool(key) or features is not None)
    limits.apply()
    vectors = None
    if features is not None:
        from fisherhash.data.vectors import open_vectors

        vectors = open_vectors(features)
    with open_images(index, device=device, skip_damaged=skip_damaged) as opened:
        results = opened.search(
            queries,
            keys=printed_keys(opened, key or []),
            features=vectors,
            skip_unreadable=True,
            **asdict(options),
        )
        bits, count = opened.index.bits, len(opened.index)
        why = "" if any(map(len, results)) else _why_nothing(opened, options.where)
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
    else:
        _print_results(results, why, named=len(results) > 1 or bool(errors))
    for error in errors:
        say(f"skipped {printable(error)}")


def _print_results(results: Sequence[SearchResult], why: str, *, named: bool) -> None:
    from fisherhash.index.images.results import left_out, shown_distance

    for number, result in enumerate(results):
        if named:
            print(f"{'' if number == 0 else chr(10)}{printable(result.query)}")
        for rank, hit in enumerate(result, start=1):
            print(f"{rank:>4} {shown_distance(hit.distance or 0):>4}  {printable(hit.name)}")
        for line in result.tied():
            say(line)
        if not len(result):
            say(f"{printable(result.query)}: nothing found{why}")
        if result.unavailable is not None:
            say(left_out(result.unavailable))


def _why_nothing(images: ImageIndex, where: Sequence[str]) -> str:
    """What to say where nothing was found: a typo in a value looks like an answer otherwise."""
    from fisherhash.index.images.searching import near_label, where_labels

    index = images.index
    if not where or index.count(where_labels(index, where)):
        return ""
    return f"; no item matches {' and '.join(where)}{near_label(index, where)}"


def shown_folders(index: str, more: Sequence[str] | None) -> list[str]:
    """Whose images a page may embed; tells the user what to do if there are none."""
    from fisherhash.index.images.folders import known_folders

    folders = [*known_folders(index), *(more or ())]
    if not folders:
        say(
            f"{index} was not filled on this machine, so the page shows none of its images; "
            "choose a folder whose images may be shown with --show-from FOLDER"
        )
    return folders


def _queries(images: Sequence[str], index: str | None, *, has_keys: bool) -> tuple[list[str], str]:
    """The files to search with, and the index: it may be among the images."""
    own = [name for name in images if _is_index(name)]
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


def _is_index(name: str) -> bool:
    """Whether a word is an index and no image; without opening it."""
    if "://" in name:
        return True
    try:
        with open(name, "rb") as file:
            return file.read(15) == b"SQLite format 3"
    except OSError:
        return False


@app.command
def dedup(
    index: IndexName,
    *,
    options: DuplicateFlags = _DUPLICATES,
    csv: Path | None = None,
    moves: Path | None = None,
    move_to: Path | None = None,
    html: Path | None = None,
    show_from: ShowFrom = None,
    workers: Workers = "auto",
    limits: LimitFlags = DEFAULT_LIMITS,
    json: Json = False,
) -> None:
    """List groups of images that are likely copies of each other, the surest first.

    Any two images of a group have codes within the radius. Where the files are there, their codes
    are made for copies, and thumbnails confirm each group. Nothing is moved or deleted.

    Args:
        csv: Also write the groups to a file that ends in .csv.
        moves: Also write a shell script, a file that ends in .sh, that moves all but the first
            image of each group.
        move_to: With --moves: the folder to move to, by default FOLDER-duplicates beside the synced
            FOLDER.
        html: Also write a page with thumbnails, a file that ends in .html.
        json: Print JSON instead of text.
    """
    if move_to is not None and moves is None:
        raise UsageError("--move-to goes with --moves FILE, which names the script")
    for flag, path, ending in (
        ("html", html, ".html"),
        ("csv", csv, ".csv"),
        ("moves", moves, ".sh"),
    ):
        check_output(f"--{flag}", path, ending)
    limits.apply()
    from fisherhash.index.images.duplicates import moves_script
    from fisherhash.system.storage import write_file

    with open_images(index) as opened:
        found = opened.duplicates(workers=parse_workers(workers), **asdict(options))
    if html is not None:
        from fisherhash.pages import contact_sheet

        page = contact_sheet.duplicates_page(found, folders=shown_folders(index, show_from))
        contact_sheet.write_page(html, page)
        say(f"the page is {html}")
    if csv is not None:
        write_file(csv, found.to_csv())
        say(f"the list is {csv}")
    if moves is not None:
        target = move_to or Path(f"{found.folder}-duplicates" if found.folder else "duplicates")
        write_file(moves, moves_script(found, target, script=str(moves)))
        say(f"the script is {moves}; it moves files to {target} when you run it")
    if json:
        print_json(found.to_json())
    else:
        print(found, end="")
    paths = {hit.path for group in found.groups for hit in group if hit.path}
    if gone := sum(not os.path.exists(path) for path in paths):
        say(f"of these files {gone:,} are no longer there; index sync removes them from the index")
    if found.without_code:
        say(f"without a copy code, because their files cannot be read: {found.without_code:,}")
    if options.radius is None and not found.radius and found.distinct > 1:
        near = f"--radius {max(1, found.bits // 12)} lists nearer ones, too"
        say(f"many of these images are so alike that only equal codes are a sure sign; {near}")
    if expected := found.expectation():
        say(expected)
    say(found.summary())
