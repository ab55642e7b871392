"""Self-contained HTML pages: templates, codes drawn as bits, charts.

A page needs no network and no script: images are data URIs, drawings are inline SVG, and one style
sheet follows the reader's light or dark setting. Templates escape every text they are given.
"""

from __future__ import annotations

import base64
import functools
import io
import math
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources
from typing import Any, Literal

import jinja2
import numpy as np
from markupsafe import Markup, escape
from numpy.typing import NDArray
from PIL import Image

from fisherhash import codes
from fisherhash.index.images.results import shown_distance
from fisherhash.system.version import __version__

THUMBNAIL = 320
"""Pixels of a thumbnail: more than its size on the page, for high-resolution screens."""
_LONGEST = 44
"""Characters of a name; the middle of a longer one is left out."""
_SHAPES = {
    "b": "M{x}.2 {y}.2h.6v.6h-.6z",
    "d": "M{x}.17 {y}.5a.33.33 0 1 0 .66 0a.33.33 0 1 0-.66 0z",
}
"""A square for a bit, a circle for one that differs."""


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
    """

    image: Image.Image
    distance: float
    code: NDArray[np.uint8]
    caption: str = ""
    right: bool | None = None
    link: str = ""
    note: str = ""


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


def render(template: str, *, title: str, description: str = "", **values: Any) -> str:
    """Render a template of this package as a whole page.

    Args:
        template: its file name.
        title: of the page.
        description: one sentence about the page.
        values: what the template shows.
    """
    shared = {"title": title, "description": description, "version": __version__}
    return _environment().get_template(template).render(**shared, **values)


@functools.cache
def _environment() -> jinja2.Environment:
    files = resources.files("fisherhash.pages")
    # What the search page of the server shares comes first.
    sheets = (files.joinpath(name).read_text("utf-8") for name in ("design.css", "pages.css"))
    found = jinja2.Environment(
        loader=jinja2.PackageLoader("fisherhash.pages"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    found.globals.update(style=Markup("".join(sheets)), bits_svg=bits_svg)
    found.filters.update(
        data_uri=data_uri,
        distance=shown_distance,
        shape=lambda kind: _SHAPES[kind].format(x=0, y=0),
        shorten=lambda name: shorten_middle(name, _LONGEST),
    )
    return found


def shorten_middle(name: str, most: int = 40) -> str:
    """A name of at most so many characters: the middle of a long one says the least.

    >>> shorten_middle("holiday/2019/IMG_20190714_180312_HDR.jpg", 24)
    'holiday/20…80312_HDR.jpg'
    """
    if len(name) <= most:
        return name
    front = (most - 1) * 9 // 20
    return f"{name[:front]}…{name[len(name) - (most - 1 - front) :]}"


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
) -> Markup:
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
    for position, (bit, differs) in enumerate(zip(own, own != other, strict=True)):
        row, column = divmod(position, wide)
        kind = "d" if differs else "b"
        paths[f"{kind}{bit}"] += _SHAPES[kind].format(x=column, y=row)
    label = f"code {codes.to_hex(code[None])[0]}"
    if against is not None:
        count = int((own != other).sum())
        label += f", {count} {'bit differs' if count == 1 else 'bits differ'}"
    drawn = "".join(f'<path class="{name}" d="{path}"/>' for name, path in paths.items() if path)
    rows = math.ceil(bits / wide)
    return Markup(
        f'<svg class="bits" viewBox="0 0 {wide} {rows}" role="img" aria-label="{label}">'
        f"{drawn}</svg>"
    )


def line_chart(
    series: Sequence[Series], x: Sequence[float], *, title: str, x_label: str, y_label: str
) -> Markup:
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
    return Markup(
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
