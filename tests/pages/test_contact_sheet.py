"""The results page: self-contained, escaped, and whole when files are gone."""

import base64
import io
import os
import re
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from fisherhash.errors import FisherhashError
from fisherhash.index.images.duplicates import DuplicateGroup, Duplicates
from fisherhash.index.images.results import Hit, SearchResult
from fisherhash.pages import contact_sheet

CODE = b"\xa5\x0f"


def hit(path, name="cats/1.png", distance=3, number=0, same=None):
    return Hit(number, name, distance, path, code=b"\xa5\x08", same_bytes=same)


@pytest.fixture
def image_file(tmp_path):
    path = tmp_path / "large.png"
    rng = np.random.default_rng(0)
    Image.fromarray(rng.integers(0, 256, (900, 1200, 3), dtype=np.uint8)).save(path)
    return str(path)


def shown_images(html):
    """The images that are embedded in a page."""
    found = re.findall(r'src="data:image/(\w+);base64,([^"]+)"', html)
    return [Image.open(io.BytesIO(base64.b64decode(data))) for _, data in found]


def test_a_page_needs_nothing_else(image_file):
    result = SearchResult(
        "holiday.jpg", image_file, CODE, [hit(image_file), hit(image_file, distance=5)]
    )
    html = contact_sheet.search_page([result], 16, index="photos.index", count=12345, folders=["/"])
    assert len(shown_images(html)) == 3
    assert all(max(shown.size) == 320 for shown in shown_images(html))
    assert len(html) < 500_000
    assert not re.search(r'src="(?!data:)', html)
    # A thumbnail opens its image.
    links = re.findall(r'<a href="([^"]+)"><img', html)
    assert links == [Path(image_file).as_uri()] * 3
    # Bits are there on request: the box is not checked.
    assert 'id="show-bits" type="checkbox">' in html
    assert "<script" not in html
    assert "12,345 images" in html
    assert "holiday.jpg" in html
    assert [int(d) for d in re.findall(r'data-distance="(\d+)"', html)] == [3, 5]


def test_names_are_text_and_never_html(image_file):
    evil = '<img src=x onerror="alert(1)">&.png'
    odd = os.fsdecode(b"caf\xe9.png")
    result = SearchResult(evil, image_file, CODE, [hit(image_file, evil), hit(image_file, odd)])
    html = contact_sheet.search_page([result], 16, index=evil, count=1, folders=["/"])
    assert evil not in html
    assert "&lt;img src=x onerror=&#34;alert(1)&#34;&gt;&amp;.png" in html
    assert "caf\ufffd.png" in html
    html.encode("utf-8")


def test_missing_and_broken_files_have_a_placeholder(image_file, tmp_path):
    broken = tmp_path / "broken.png"
    broken.write_bytes(b"no image")
    found = [hit(str(tmp_path / "gone.png"), "gone.png"), hit(str(broken), "broken.png")]
    found.append(hit(None, "id 7"))
    html = contact_sheet.search_page(
        [SearchResult("q", image_file, CODE, found)], 16, index="i", count=3, folders=["/"]
    )
    assert len(shown_images(html)) == 4
    for name, reason in (("gone.png", "the file is gone"), ("broken.png", "not a"), ("id 7", "no")):
        assert re.search(f'title="{name}">{name}</span><span class="notes">{reason}', html)
    # What cannot be shown cannot be opened either.
    assert html.count("<a href=") == 1


def test_names_are_relative_and_short(image_file, tmp_path):
    long = "holiday/" + "x" * 60 + "/harbour.jpg"
    found = [hit(image_file, image_file), hit(image_file, long)]
    html = contact_sheet.search_page(
        [SearchResult("q", image_file, CODE, found)], 16, index="i", count=3, folders=[tmp_path]
    )
    assert '<span class="caption" title="large.png">large.png</span>' in html
    shown = re.search(rf'title="{long}">([^<]+)<', html)[1]
    assert len(shown) == 44
    assert shown.startswith("holiday/xx")
    assert shown.endswith("/harbour.jpg")


def test_nothing_found_is_a_page_too(image_file):
    html = contact_sheet.search_page(
        [SearchResult("q", image_file, CODE, [])], 16, index="i", count=0, folders=["/"]
    )
    assert "Nothing found" in html
    assert len(shown_images(html)) == 1


def test_long_lists_are_cut_and_say_so(tmp_path, monkeypatch):
    monkeypatch.setattr(contact_sheet, "RESULTS_SHOWN", 4)
    found = [hit(None, f"n{i}", number=i) for i in range(9)]
    html = contact_sheet.search_page(
        [SearchResult("q", None, CODE, found)], 16, index="i", count=9, folders=["/"]
    )
    assert "the first 4 of 9 are shown" in html
    assert len(shown_images(html)) == 5
    groups = Duplicates("i", 16, 20, 2, [DuplicateGroup(tuple(found[:2]))] * 6)
    html = contact_sheet.duplicates_page(groups, folders=["/"])
    assert "6 groups of codes within 2 bits, 2 of 20 items." in html
    assert "The 4 surest are shown." in html
    assert "not a proof" in html
    assert len(shown_images(html)) == 8
    assert "Equal or near codes are candidates" in html
    assert "differs from the first" in html
    assert "differs from the query" not in html


def test_groups_say_when_all_files_are_the_same(image_file):
    for marks, said in (((0, 0), True), ((None, None), False), ((0, 1), False)):
        group = [hit(image_file, name, same=mark) for name, mark in zip("ab", marks, strict=True)]
        html = contact_sheet.duplicates_page(
            Duplicates("i", 16, 2, 0, [DuplicateGroup(tuple(group))], compared=True), folders=["/"]
        )
        assert ("the same bytes" in html) is said
    assert "No duplicates" in contact_sheet.duplicates_page(
        Duplicates("i", 16, 2, 0, []), folders=["/"]
    )


def test_a_page_that_cannot_be_written_leaves_the_old_one(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(FisherhashError, match="could not write"):
        contact_sheet.write_page(tmp_path / "file" / "a.html", "x")
    contact_sheet.write_page(tmp_path / "new" / "a.html", "page")
    assert [p.name for p in (tmp_path / "new").iterdir()] == ["a.html"]
    for folder in (tmp_path / "new", "."):
        with pytest.raises(FisherhashError, match="is a folder"):
            contact_sheet.write_page(folder, "x")


def test_only_images_of_known_folders_are_shown(image_file, tmp_path):
    inside, secret = tmp_path / "photos", tmp_path / "secret.png"
    inside.mkdir()
    Image.new("RGB", (9, 9), (1, 2, 3)).save(secret)
    Image.new("RGB", (9, 9), (200, 100, 50)).save(inside / "own.png")
    (inside / "link.png").symlink_to(secret)
    os.mkfifo(inside / "pipe.png")
    paths = [inside / "own.png", inside / "link.png", inside / ".." / "secret.png", secret]
    found = [hit(str(path), f"{i}.png", number=i) for i, path in enumerate(paths)]
    found.append(hit(str(inside / "pipe.png"), "pipe.png", number=9))
    given = SearchResult("q", str(secret), CODE, found)
    by_key = SearchResult("q", str(secret), CODE, found, by_key=True)
    options = {"index": "i", "count": 4, "folders": [inside]}
    shown = shown_images(contact_sheet.search_page([given], 16, **options))
    # The query is a file that the user named; of the rest only one is in the folder.
    colours = [image.convert("RGB").getpixel((4, 4)) for image in shown]
    assert colours[:2] == [(1, 2, 3), (200, 100, 50)]
    assert (1, 2, 3) not in colours[1:]
    html = contact_sheet.search_page([by_key], 16, **options)
    colours = [image.convert("RGB").getpixel((4, 4)) for image in shown_images(html)]
    assert (1, 2, 3) not in colours
    assert html.count(contact_sheet.OUTSIDE) >= 4
    group = Duplicates("i", 16, 2, 0, [DuplicateGroup(tuple(found))])
    html = contact_sheet.duplicates_page(group, folders=[])
    assert (200, 100, 50) not in [i.convert("RGB").getpixel((4, 4)) for i in shown_images(html)]
