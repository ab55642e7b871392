from __future__ import annotations

import base64
import io
import re
import subprocess
import sys
from html.parser import HTMLParser

import numpy as np
import pytest
from PIL import Image

from fisherhash import codes
from fisherhash.pages import html as pages

ODD = "<b>\"cats\" & 'dogs'</b>"


class Balance(HTMLParser):
    """Fails on a tag that is closed in the wrong place."""

    void = frozenset({"meta", "link", "img", "br", "input"})

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.count: dict[str, int] = {}

    def handle_starttag(self, tag, attrs):
        self.count[tag] = self.count.get(tag, 0) + 1
        if tag not in self.void:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.count[tag] = self.count.get(tag, 0) + 1

    def handle_endtag(self, tag):
        assert self.open
        assert self.open.pop() == tag


def parsed(html: str) -> Balance:
    parser = Balance()
    parser.feed(html)
    parser.close()
    assert not parser.open
    return parser


def picture(side: int = 32, seed: int = 0) -> Image.Image:
    pixels = np.random.default_rng(seed).integers(0, 256, (side, side, 3), dtype=np.uint8)
    return Image.fromarray(pixels)


def decoded(uri: str) -> Image.Image:
    return Image.open(io.BytesIO(base64.b64decode(uri.split(",", 1)[1])))


def drawn(svg: str, bits: int, columns: int) -> tuple[list[int], list[int]]:
    """The bits and the differing bits that a drawing shows, read back from its paths."""
    values, differ = [-1] * bits, [0] * bits
    for kind, bit, path in re.findall(r'class="([bd])([01])" d="([^"]+)"', svg):
        for column, row in re.findall(r"M(\d+)\.\d+ (\d+)\.", path):
            place = int(row) * columns + int(column)
            assert values[place] == -1
            values[place], differ[place] = int(bit), int(kind == "d")
    return values, differ


@pytest.mark.parametrize(("bits", "columns"), [(1, 8), (12, 8), (24, 8), (64, 8), (128, 16)])
def test_bits_are_drawn_where_they_are(bits, columns):
    rng = np.random.default_rng(bits)
    own, other = rng.integers(0, 2, (2, bits))
    packed = codes.pack([own, other])
    svg = pages.bits_svg(packed[0], bits, against=packed[1])
    values, differ = drawn(svg, bits, columns)
    assert values == own.tolist()
    assert differ == (own != other).tolist()
    count = int((own != other).sum())
    word = "bit differs" if count == 1 else "bits differ"
    assert f'aria-label="code {codes.to_hex(packed[:1])[0]}, {count} {word}"' in svg


def test_bits_on_one_line():
    packed = codes.pack([[1] * 24])
    svg = pages.bits_svg(packed[0], 24, columns=24)
    assert 'viewBox="0 0 24 1"' in svg
    assert drawn(svg, 24, 24) == ([1] * 24, [0] * 24)


def test_small_pictures_are_kept_and_large_ones_reduced():
    small = decoded(pages.data_uri(picture(32)))
    assert small.format == "PNG"
    assert np.array_equal(np.asarray(small), np.asarray(picture(32)))
    large = pages.data_uri(Image.new("RGBA", (900, 600)))
    assert large.startswith("data:image/jpeg;base64,")
    assert decoded(large).size == (320, 213)


def rows_of(right: list[bool | None], caption: str = "cat") -> str:
    packed = codes.pack([[0] * 12, [1] * 12])
    results = [pages.Result(picture(), 12, packed[1], caption, mark) for mark in right]
    rows = [pages.Query(picture(), packed[0], caption, results, [caption])]
    words = {"heading": caption, "index": caption, "compared": caption}
    return pages.render("results.html", title=caption, rows=rows, bits=12, **words)


def test_query_rows_mark_right_wrong_and_unknown():
    html = rows_of([True, False, None])
    parsed(html)
    assert re.findall(r'<li class="(\w+)" data-distance="12">', html) == [
        "right",
        "wrong",
        "unmarked",
    ]
    assert re.findall(r'class="badge (\w+)" aria-hidden="true">(.)<', html) == [
        ("right", "✓"),
        ("wrong", "✕"),
    ]
    assert re.findall(r'alt="([^"]*)"', html) == [
        "query: cat",
        "cat, distance 12, right",
        "cat, distance 12, wrong",
        "cat, distance 12",
    ]
    assert html.count("distance <b>12</b>") == 3


def test_all_text_is_escaped():
    chart = pages.line_chart(
        [pages.Series(ODD, [1.0, 2.0])], [1, 2], title=ODD, x_label=ODD, y_label=ODD
    )
    for html, least in ((rows_of([True], ODD), 5), (chart, 4)):
        assert ODD not in html
        assert parsed(html).count.get("script", 0) == 0
        assert html.count("&lt;b&gt;&#34;cats&#34; &amp; &#39;dogs&#39;&lt;/b&gt;") >= least


@pytest.mark.parametrize("values", [[1.0], [0.0, 0.0], [0.001, 0.002], [3e6, 1.0, 2.0]])
def test_line_chart_stays_inside_its_box(values):
    x = list(range(1, len(values) + 1))
    series = [pages.Series("a", values, "area"), pages.Series("b", values, "dashed")]
    html = pages.line_chart(series, x, title="t", x_label="x", y_label="y")
    parsed(html)
    line = re.findall(r'class="line s0 area" d="M([^"z]*)"', html)[-1]
    points = np.array([[float(n) for n in point.split()] for point in line.split("L")])
    assert len(points) == len(values)
    assert (points >= 0).all()
    assert (points <= [520, 250]).all()
    assert points[int(np.argmax(values)), 1] == points[:, 1].min()


def test_page_needs_nothing_from_outside():
    html = rows_of([True])
    assert html.startswith("<!doctype html>")
    assert "http" not in html
    assert "url(" not in html
    assert "@import" not in html
    parsed(html)


def test_import_does_not_need_torch():
    code = "import sys, fisherhash.pages.html; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
