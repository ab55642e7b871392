"""Blocks of a self-contained HTML page: queries with their results, codes as bits, charts.

A page needs no network and no script: images are data URIs, drawings are inline SVG, and one style
sheet follows the reader's light or dark setting. Every function takes plain text, escapes it and
returns HTML.
"""

from __future__ import annotations

import base64
import io
import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from importlib import resources
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray
from PIL import Image

from fisherhash import codes
from fisherhash.errors import UsageError
from fisherhash.index.images.results import shown_distance
from fisherhash.system.version import __version__

THUMBNAIL = 320
"""Pixels of a thumbnail: more than its size on the page, for high-resolution screens."""
_LONGEST = 44
"""Characters of a name; the middle of a longer one is left out."""


@dataclass(frozen=True)
class Result:
    """One retrieved image.

    Attributes:
        image: shown as a thumbnail.
        distance: from the query; a real number is shown with two digits.
        code: (bytes,) its packed code.
        caption: its class or its file name.
        right: whether it is a correct result; None if unknown.
        link: the address of the whole image, which its thumbnail opens.
        note: why there is no thumbnail.
        combined: the distance of both codes, where that orders the results.
    """

    image: Image.Image
    distance: float
    code: NDArray[np.uint8]
    caption: str = ""
    right: bool | None = None
    link: str = ""
    note: str = ""
    combined: float | None = None


@dataclass(frozen=True)
class Query:
    """One query and its results, the nearest first.

    Attributes:
        image: the query image.
        code: (bytes,) its packed code.
        caption: its class or its file name.
        results: the retrieved images in the order in which they are shown.
        notes: short lines under the caption.
        link: the address of the whole image.
    """

    image: Image.Image
    code: NDArray[np.uint8]
    caption: str
    results: Sequence[Result]
    notes: Sequence[str] = ()
    link: str = ""


@dataclass(frozen=True)
class Series:
    """One line of a chart.

    Attributes:
        name: for the legend.
        values: one per point of the x axis.
        kind: a filled area, a line, or a dashed line.
    """

    name: str
    values: Sequence[float]
    kind: Literal["area", "line", "dashed"] = "line"


def page(title: str, body: str, *, description: str = "") -> str:
    """Wrap blocks of HTML into a page; only ``title`` and ``description`` are escaped here."""
    files = resources.files("fisherhash.pages")
    # What the search page of the server shares comes first.
    sheets = (files.joinpath(name).read_text("utf-8") for name in ("design.css", "pages.css"))
    style = "".join(sheets)
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n'
        f'<meta name="generator" content="fisherhash {escape(__version__)}">\n'
        f'<meta name="description" content="{escape(description)}">\n'
        f'<link rel="icon" href="data:,">\n<title>{escape(title)}</title>\n'
        f"<style>\n{style}</style>\n</head>\n<body>\n<main>\n{body}\n</main>\n</body>\n</html>\n"
    )


def shorten_middle(name: str, most: int = 40) -> str:
    """A name of at most so many characters: the middle of a long one says the least.

    >>> shorten_middle("holiday/2019/IMG_20190714_180312_HDR.jpg", 24)
    'holiday/20…80312_HDR.jpg'
    """
    if len(name) <= most:
        return name
    front = (most - 1) * 9 // 20
    return f"{name[:front]}…{name[len(name) - (most - 1 - front) :]}"


def header(eyebrow: str, title: str, lead: str) -> str:
    """The top of a page: a small line, the title, and a paragraph; all plain text."""
    return (
        f'<header>\n<p class="eyebrow">{escape(eyebrow)}</p>\n<h1>{escape(title)}</h1>\n'
        f'<p class="lead">{escape(lead)}</p>\n</header>'
    )


def section(title: str, body: str, *, name: str, intro: str = "") -> str:
    """A titled part of a page; ``intro`` is plain text, ``body`` is HTML."""
    lead = f'<p class="intro">{escape(intro)}</p>' if intro else ""
    return f'<section id="{escape(name)}">\n<h2>{escape(title)}</h2>\n{lead}\n{body}\n</section>'


def data_uri(image: Image.Image) -> str:
    """Encode an image as a data URI: a lossless PNG if it is small, else a JPEG thumbnail."""
    small = image.convert("RGB")
    kind, options = "png", {"optimize": True}
    if max(small.size) > THUMBNAIL:
        small.thumbnail((THUMBNAIL, THUMBNAIL), Image.Resampling.LANCZOS)
        kind, options = "jpeg", {"quality": 85}
    file = io.BytesIO()
    small.save(file, kind, **options)
    return f"data:image/{kind};base64,{base64.b64encode(file.getvalue()).decode()}"


def bits_svg(
    code: NDArray[np.uint8],
    bits: int,
    *,
    against: NDArray[np.uint8] | None = None,
    columns: int | None = None,
) -> str:
    """Draw a code as a grid of squares, dark for 1; bits that differ from ``against`` are circles.

    Args:
        code: (bytes,) packed.
        bits: its length.
        against: (bytes,) the code to compare with.
        columns: squares per row; by default 8, one byte per row, and more above 64 bits.
    """
    own = codes.unpack(code[None], bits)[0]
    other = own if against is None else codes.unpack(against[None], bits)[0]
    wide = columns or 8 * max(1, 2 ** math.ceil(math.log2(max(bits, 64) / 64) / 2))
    paths = {"b0": "", "b1": "", "d0": "", "d1": ""}
    for place, (bit, differs) in enumerate(zip(own, own != other, strict=True)):
        row, column = divmod(place, wide)
        kind, shape = ("d", _CIRCLE) if differs else ("b", _SQUARE)
        paths[f"{kind}{bit}"] += shape.format(x=column, y=row)
    label = f"code {codes.to_hex(code[None])[0]}"
    if against is not None:
        count = int((own != other).sum())
        label += f", {count} {'bit differs' if count == 1 else 'bits differ'}"
    drawn = "".join(f'<path class="{name}" d="{path}"/>' for name, path in paths.items() if path)
    rows = math.ceil(bits / wide)
    return (
        f'<svg class="bits" viewBox="0 0 {wide} {rows}" role="img" aria-label="{label}">'
        f"{drawn}</svg>"
    )


_SQUARE = "M{x}.2 {y}.2h.6v.6h-.6z"
_CIRCLE = "M{x}.17 {y}.5a.33.33 0 1 0 .66 0a.33.33 0 1 0-.66 0z"


def legend(*, marks: bool, compared: str = "the query", shown: bool = True) -> str:
    """Explain the squares and circles and, with ``marks``, the ticks and crosses.

    Args:
        marks: whether results are right or wrong.
        compared: what the bits are compared with.
        shown: whether the bits are shown at first; the reader can change that.
    """
    checked = " checked" if shown else ""
    items = f'<li><label><input id="show-bits" type="checkbox"{checked}> show bits</label></li>'
    if marks:
        items += f"<li>{_badge('right')}same class</li><li>{_badge('wrong')}another class</li>"
    differs = f"differs from {compared}"
    keys = {"b1": "bit 1", "b0": "bit 0", "d1": f"1, {differs}", "d0": f"0, {differs}"}
    for kind, text in keys.items():
        shape = (_CIRCLE if kind[0] == "d" else _SQUARE).format(x=0, y=0)
        items += (
            '<li class="of-bits"><svg class="bits" viewBox="0 0 1 1" aria-hidden="true">'
            f'<path class="{kind}" d="{shape}"/></svg>{escape(text)}</li>'
        )
    return f'<ul class="legend">{items}</ul>'


def _badge(mark: str) -> str:
    sign = "✓" if mark == "right" else "✕"
    return f'<span class="badge {mark}" aria-hidden="true">{sign}</span>'


def query_rows(queries: Sequence[Query], bits: int) -> str:
    """Show each query as a row: its image and code, then its results."""
    return '<div class="queries">\n' + "\n".join(_query_row(q, bits) for q in queries) + "\n</div>"


def _query_row(query: Query, bits: int) -> str:
    notes = "".join(f"<span>{escape(note)}</span>" for note in query.notes)
    results = "\n".join(_result(result, query, bits) for result in query.results)
    return (
        '<article class="query">\n<div class="subject">'
        f"{_linked(query.image, f'query: {query.caption}', query.link)}"
        f'<div><h3 title="{escape(query.caption)}">{_short(query.caption)}</h3>'
        f'<p class="notes">{notes}</p>'
        f"{bits_svg(query.code, bits)}</div></div>\n"
        f'<ol class="results">\n{results}\n</ol>\n</article>'
    )


def _result(result: Result, query: Query, bits: int) -> str:
    mark = {True: "right", False: "wrong", None: ""}[result.right]
    badge = _badge(mark) if mark else ""
    distance = shown_distance(result.distance)
    shown = f"distance <b>{distance}</b>"
    if result.combined is not None:
        shown = f"both codes <b>{result.combined:.2f}</b>, first <b>{distance}</b>"
    alt = ", ".join(filter(None, (result.caption, f"distance {distance}", mark)))
    note = f'<span class="notes">{escape(result.note)}</span>' if result.note else ""
    return (
        f'<li class="{mark or "unmarked"}" data-distance="{distance}"><div class="frame">'
        f"{_linked(result.image, alt, result.link)}{badge}</div>"
        f'<span class="distance">{shown}</span>'
        f'<span class="caption" title="{escape(result.caption)}">{_short(result.caption)}</span>'
        f"{note}{bits_svg(result.code, bits, against=query.code)}</li>"
    )


def _linked(image: Image.Image, alt: str, link: str) -> str:
    shown = f'<img src="{data_uri(image)}" alt="{escape(alt)}">'
    return f'<a href="{escape(link)}">{shown}</a>' if link else shown


def _short(name: str) -> str:
    return escape(shorten_middle(name, _LONGEST))


def tiles(items: Sequence[tuple[str, str, str]]) -> str:
    """Show headline numbers: (number, what it is, a line of detail) each."""
    inside = "".join(
        f'<div class="tile"><dt>{escape(name)}</dt><dd><b>{escape(number)}</b>'
        f"<span>{escape(detail)}</span></dd></div>"
        for number, name, detail in items
    )
    return f'<dl class="tiles">{inside}</dl>'


def code_table(
    names: Sequence[str], packed: NDArray[np.uint8], bits: int, notes: Sequence[str], heading: str
) -> str:
    """Show named codes (n, bytes), one per row with all bits on one line, and a note for each."""
    rows = "".join(
        f'<tr><th scope="row">{escape(name)}</th>'
        f"<td>{bits_svg(code, bits, columns=min(bits, 64))}</td><td>{escape(note)}</td></tr>"
        for name, code, note in zip(names, packed, notes, strict=True)
    )
    return (
        '<div class="scroll"><table class="codes"><thead><tr><th scope="col">class</th>'
        f'<th scope="col">its {bits} bits</th><th scope="col">{escape(heading)}</th></tr></thead>'
        f"<tbody>{rows}</tbody></table></div>"
    )


def distance_matrix(names: Sequence[str], distances: ArrayLike) -> str:
    """Show distances (n, n) as a shaded table; the smallest ones are outlined."""
    matrix = np.asarray(distances)
    if matrix.shape != (len(names), len(names)):
        raise UsageError(f"{len(names)} names for distances of shape {matrix.shape}")
    apart = matrix[~np.eye(len(names), dtype=bool)]
    low, high = (apart.min(), apart.max()) if len(apart) else (0, 0)
    head = "".join(f'<th scope="col"><span>{escape(name)}</span></th>' for name in names)
    rows = ""
    for i, name in enumerate(names):
        cells = ""
        for j, value in enumerate(matrix[i].tolist()):
            if i == j:
                cells += '<td class="self">·</td>'
                continue
            kind = ' class="least"' if value == low else ""
            share = (value - low) / ((high - low) or 1)
            cells += f'<td{kind} style="--share:{8 + 44 * share:.0f}%">{value:g}</td>'
        rows += f'<tr><th scope="row">{escape(name)}</th>{cells}</tr>'
    return (
        '<div class="scroll"><table class="matrix"><thead><tr><td></td>'
        f"{head}</tr></thead><tbody>{rows}</tbody></table></div>"
    )


def time_table(seconds: Sequence[tuple[str, float]]) -> str:
    """Show how long each part took, with a proportional bar, and the sum."""
    total = sum(value for _, value in seconds)
    rows = "".join(
        f'<tr><th scope="row">{escape(name)}</th><td><i style="width:'
        f'{100 * value / (total or 1):.1f}%"></i></td><td>{value:.1f} s</td></tr>'
        for name, value in seconds
    )
    return (
        f'<table class="times"><tbody>{rows}</tbody><tfoot><tr><th scope="row">in all</th><td></td>'
        f"<td>{total:.1f} s</td></tr></tfoot></table>"
    )


def line_chart(
    series: Sequence[Series], x: Sequence[float], *, title: str, x_label: str, y_label: str
) -> str:
    """Draw lines over a common x axis, from zero up, as inline SVG with a legend."""
    wide, high, left, bottom, top = 520, 250, 40, 46, 10
    ticks = _ticks(max((max(s.values) for s in series), default=1.0))
    first, last = x[0], x[-1]

    def across(value: float) -> float:
        return left + (wide - left - 8) * (value - first) / ((last - first) or 1)

    def up(value: float) -> float:
        return high - bottom - (high - bottom - top) * value / ticks[-1]

    floor = up(0)
    drawn = "".join(
        f'<line class="grid" x1="{left}" x2="{wide - 8}" y1="{up(t):.1f}" y2="{up(t):.1f}"/>'
        f'<text class="end" x="{left - 8}" y="{up(t) + 4.5:.1f}">{t:g}</text>'
        for t in ticks
    )
    keys = ""
    for number, one in enumerate(series):
        points = [f"{across(a):.1f} {up(b):.1f}" for a, b in zip(x, one.values, strict=True)]
        line = "M" + "L".join(points)
        if one.kind == "area":
            closed = f"{line}L{across(last):.1f} {floor:.1f}L{across(first):.1f} {floor:.1f}z"
            drawn += f'<path class="fill s{number}" d="{closed}"/>'
        drawn += f'<path class="line s{number} {one.kind}" d="{line}"/>'
        keys += (
            '<li><svg viewBox="0 0 22 10" aria-hidden="true">'
            + (f'<path class="fill s{number}" d="M0 2h22v8h-22z"/>' if one.kind == "area" else "")
            + f'<path class="line s{number} {one.kind}" d="M0 {2 if one.kind == "area" else 5}h22"'
            f"/></svg>{escape(one.name)}</li>"
        )
    step = _ticks(max(last - first, 1), steps=6)[1]
    inner = [t for t in np.arange(step, last, step).tolist() if first < t < last - step / 2]
    drawn += "".join(
        f'<text class="mid" x="{across(t):.1f}" y="{floor + 18:.1f}">{t:g}</text>'
        for t in dict.fromkeys((first, *inner, last))
    )
    drawn += f'<text class="mid" x="{across((first + last) / 2):.1f}" y="{high - 4}">'
    drawn += f"{escape(x_label)}</text>"
    return (
        f'<figure class="chart"><figcaption><b>{escape(title)}</b> <span>{escape(y_label)}</span>'
        f'</figcaption><ul class="keys">{keys}</ul><svg viewBox="0 0 {wide} {high}" role="img" '
        f'aria-label="{escape(title)}">{drawn}</svg></figure>'
    )


def _ticks(highest: float, steps: int = 4) -> list[float]:
    """Choose round numbers from 0 to at least ``highest``, in at most ``steps`` steps.

    >>> _ticks(4.4)
    [0.0, 2.0, 4.0, 6.0]
    """
    highest = max(highest, 1e-9)
    rough = highest / steps
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(m * power for m in (1, 2, 5, 10) if m * power >= rough * 0.999)
    return [round(i * step, 12) for i in range(math.ceil(highest / step - 1e-9) + 1)]
