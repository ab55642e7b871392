"""A results page: each query with the images it found, or each group of duplicates."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from PIL import Image, ImageDraw

from fisherhash.data.formats import UnreadableImage
from fisherhash.data.images import load_image
from fisherhash.errors import counted
from fisherhash.index.images.folders import is_inside
from fisherhash.index.images.results import left_out
from fisherhash.pages import html as pages
from fisherhash.system.storage import write_file

if TYPE_CHECKING:
    from fisherhash.index.images.duplicates import Duplicates
    from fisherhash.index.images.results import Hit, SearchResult

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
    inside = [os.fspath(folder) for folder in folders]
    lead = (
        f"{counted(len(results), 'query', 'queries')} in {counted(count, 'image')}. Each image "
        f"is {counted(bits, 'bit')}: the fewer of them differ, the more similar two images are. "
        "The nearest come first."
    )
    if any(one.ranking == "real" for one in results):
        lead += " Bits that the model is surer of count more."
    if results and results[0].unavailable is not None:
        lead += f" {left_out(results[0].unavailable)}."
    rows = []
    for one in results:
        image, missing = _thumbnail(one.path, inside if one.by_key else None)
        rows.append(
            _row(one.query, one.path, image, missing, one.code, one.hits, inside, one.tied())
        )
    title = "Similar images" if any(map(len, results)) else "Nothing found"
    return _page(title, lead, index, rows, bits, "the query")


def duplicates_page(found: Duplicates, *, folders: Iterable[str | os.PathLike[str]]) -> str:
    """A page for groups of likely duplicates; the first of a group comes before the others.

    Args:
        found: the groups.
        folders: only images inside these folders are shown.
    """
    inside = [os.fspath(folder) for folder in folders]
    total, shown = len(found.groups), found.groups[:RESULTS_SHOWN]
    lead = f"{found.summary()}."
    if expected := found.expectation():
        lead += f" {expected}."
    if len(shown) < total:
        lead += f" The {len(shown):,} surest are shown."
    rows = []
    for group in shown:
        first, *others = group
        notes = [counted(len(group), "image")]
        if group.confirmed is not None:
            notes.append("confirmed" if group.confirmed else "not confirmed")
        same = {hit.same_bytes for hit in group}
        if len(same) == 1 and None not in same:
            notes.append("the same bytes")
        image, missing = _thumbnail(first.path, inside)
        rows.append(_row(first.name, first.path, image, missing, first.code, others, inside, notes))
    title = "Likely duplicates" if total else "No duplicates"
    return _page(title, lead, found.index, rows, found.bits, "the first")


def write_page(path: str | os.PathLike[str], html: str) -> None:
    """Write a page completely, or leave the old one as it is."""
    write_file(path, html.encode("utf-8", "replace"))


def _page(
    heading: str, lead: str, index: str, rows: Sequence[pages.Query], bits: int, compared: str
) -> str:
    return pages.render(
        "results.html",
        title=f"{heading} · {index}",
        description=lead,
        heading=heading,
        index=index,
        rows=rows,
        bits=bits,
        compared=compared,
    )


def _row(
    name: str,
    path: str | None,
    image: Image.Image,
    missing: str,
    code: bytes,
    hits: Sequence[Hit],
    folders: Sequence[str],
    notes: Sequence[str],
) -> pages.Query:
    lines = [*notes, missing] if missing else list(notes)
    if len(hits) > RESULTS_SHOWN:
        lines.append(f"the first {RESULTS_SHOWN} of {len(hits):,} are shown")
    results = []
    for hit in hits[:RESULTS_SHOWN]:
        shown, why = _thumbnail(hit.path, folders)
        results.append(
            pages.Result(
                shown,
                hit.distance or 0,
                np.frombuffer(hit.code, np.uint8),
                _caption(hit.name, folders),
                link="" if why else _link(hit.path),
                note=why,
            )
        )
    own = np.frombuffer(code, np.uint8)
    link = "" if missing else _link(path)
    return pages.Query(image, own, _caption(name, folders), results, lines, link)


def _caption(name: str, folders: Sequence[str]) -> str:
    """A name relative to the folder that it is in, and always UTF-8."""
    if os.path.isabs(name):
        inside = [folder for folder in folders if is_inside(name, [folder]) and folder != os.sep]
        name = os.path.relpath(os.path.realpath(name), inside[0]) if inside else name
    return name.encode("utf-8", "surrogateescape").decode("utf-8", "replace")


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
