"""A results page: each query with the images it found, or each group of duplicates."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw

from fisherhash.data.formats import UnreadableImage
from fisherhash.data.images import load_image
from fisherhash.errors import counted
from fisherhash.index.images.duplicates import Duplicates, confirmed
from fisherhash.index.images.known import is_inside
from fisherhash.index.images.results import Match, SearchResult, both_codes, left_out
from fisherhash.pages import html as pages
from fisherhash.system.storage import write_file

RESULTS_SHOWN = 200
"""Results of a query on the page, and groups of duplicates; the page holds every thumbnail."""

OUTSIDE = "not shown: it is outside the folders that this index was filled from on this machine"
"""Why an image of an index is not on the page."""


def search_page(
    results: Sequence[SearchResult],
    bits: int,
    *,
    index: str,
    count: int,
    folders: Iterable[str | os.PathLike[str]],
) -> str:
    """A page for the results of a search.

    Args:
        results: the queries and what they found.
        bits: length of the codes.
        index: the name of the index.
        count: how many items it holds.
        folders: only images inside these folders are shown, beside the query images that the
            caller gave. What else an index names may be anything on this machine.
    """
    places = [os.fspath(folder) for folder in folders]
    lead = (
        f"{counted(len(results), 'query', 'queries')} in {counted(count, 'image')}. Each image "
        f"is {counted(bits, 'bit')}: the fewer of them differ, the more similar two images are. "
        "The nearest come first."
    )
    if any(one.ranking == "real" for one in results):
        lead += " Bits that the model is surer of count more."
    if results and results[0].fine_weight:
        lead += f" {both_codes(results[0].fine_weight)}."
    if results and results[0].unavailable is not None:
        lead += f" {left_out(results[0].unavailable)}."
    title = "Similar images" if any(map(len, results)) else "Nothing found"
    rows = []
    for one in results:
        given = _thumbnail(one.path, places if one.by_key else None)
        rows.append(_row(one.query, one.path, given, one.code, one.matches, places, one.tied()))
    return _page(title, lead, index, rows, bits, "the query")


def duplicates_page(found: Duplicates, *, folders: Iterable[str | os.PathLike[str]]) -> str:
    """A page for groups of likely duplicates; the first of a group comes before the others.

    Args:
        found: the groups.
        folders: only images inside these folders are shown.
    """
    places = [os.fspath(folder) for folder in folders]
    total, shown = len(found.groups), found.groups[:RESULTS_SHOWN]
    lead = f"{found.summary()}."
    if expected := found.expectation():
        lead += f" {expected}."
    if len(shown) < total:
        lead += f" The {len(shown):,} surest are shown."
    rows = []
    for group in shown:
        first, *others = group
        notes = [counted(len(others) + 1, "image")]
        if (sure := confirmed(group)) is not None:
            notes.append("confirmed" if sure else "not confirmed")
        same = {match.same_bytes for match in (first, *others)}
        if len(same) == 1 and None not in same:
            notes.append("the same bytes")
        shown_first = _thumbnail(first.path, places)
        code = first.item.code
        rows.append(_row(first.name, first.path, shown_first, code, others, places, notes))
    title = "Likely duplicates" if total else "No duplicates"
    return _page(title, lead, found.index, rows, found.bits, "the first")


def write_page(path: str | os.PathLike[str], html: str) -> None:
    """Write a page completely, or leave the old one as it is."""
    write_file(path, html.encode("utf-8", "replace"))


def _page(
    title: str, lead: str, index: str, rows: Sequence[pages.Query], bits: int, compared: str
) -> str:
    body = pages.header(f"fisherhash · {index}", title, lead)
    if rows:
        shown = pages.legend(marks=False, compared=compared, shown=False) + pages.query_rows(
            rows, bits
        )
        body += f'\n<section id="results">\n{shown}\n</section>'
    return pages.page(f"{title} · {index}", body, description=lead)


def _row(
    name: str,
    path: str | None,
    thumbnail: tuple[Image.Image, str],
    code: bytes,
    matches: Sequence[Match],
    folders: Sequence[str],
    notes: Sequence[str] = (),
) -> pages.Query:
    image, missing = thumbnail
    lines = [*notes, missing] if missing else list(notes)
    if len(matches) > RESULTS_SHOWN:
        lines.append(f"the first {RESULTS_SHOWN} of {len(matches):,} are shown")
    results = []
    for match in matches[:RESULTS_SHOWN]:
        shown, missing = _thumbnail(match.path, folders)
        results.append(
            pages.Result(
                shown,
                match.distance,
                np.frombuffer(match.item.code, np.uint8),
                _caption(match.name, folders),
                link="" if missing else _link(match.path),
                note=missing,
                combined=match.combined,
            )
        )
    link = "" if thumbnail[1] else _link(path)
    caption, own = _caption(name, folders), np.frombuffer(code, np.uint8)
    return pages.Query(image, own, caption, results, lines, link)


def _caption(name: str, folders: Sequence[str]) -> str:
    """A name relative to the folder that it is in, and always UTF-8."""
    if os.path.isabs(name):
        inside = [folder for folder in folders if is_inside(name, [folder]) and folder != os.sep]
        name = os.path.relpath(os.path.realpath(name), inside[0]) if inside else name
    return _plain(name)


def _link(path: str | None) -> str:
    """The address of an image file, which a click on its thumbnail opens."""
    return "" if path is None else Path(os.path.abspath(path)).as_uri()


def _thumbnail(path: str | None, folders: Sequence[str] | None) -> tuple[Image.Image, str]:
    """An image small enough for the page, or a placeholder and the reason.

    Args:
        path: the file.
        folders: where it must be; None for a file that the caller named.
    """
    if path is None:
        return _placeholder(), "no file"
    if folders is not None and not is_inside(path, folders):
        return _placeholder(), OUTSIDE
    # Twice the size on the page, which is made from it without loss.
    side = 2 * pages.THUMBNAIL
    try:
        image = load_image(path, enough=side)
    except UnreadableImage as error:
        return _placeholder(), str(error) if os.path.exists(path) else "the file is gone"
    image.thumbnail((side, side))
    return image, ""


def _placeholder() -> Image.Image:
    """A crossed-out frame."""
    side = 96
    image = Image.new("RGB", (side, side), (214, 216, 222))
    draw = ImageDraw.Draw(image)
    for line in ((28, 28, 68, 68), (28, 68, 68, 28)):
        draw.line(line, fill=(122, 128, 140), width=4)
    draw.rectangle((14, 14, side - 15, side - 15), outline=(122, 128, 140), width=3)
    return image


def _plain(name: str) -> str:
    """A name that is not UTF-8, as far as it can be shown."""
    return name.encode("utf-8", "surrogateescape").decode("utf-8", "replace")
