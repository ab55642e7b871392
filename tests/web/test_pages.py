"""The pages without a browser: what they show is what the index holds."""

from __future__ import annotations

import html
import re
import shlex
import subprocess
import time
from html.parser import HTMLParser

import numpy as np
import pytest
from PIL import Image

from fisherhash.codes import hamming
from fisherhash.index.base import CannotWriteError
from fisherhash.index.images.image_index import ImageIndex
from fisherhash.model import builtin
from fisherhash.web.duplicates import removal_script

from .conftest import EVIL, FORM, write_image


def ready(server, path):
    """A page whose content is computed in the background."""
    for _ in range(100):
        text = server.ask(path).text
        if "data-again" not in text and 'http-equiv="refresh"' not in text:
            return text
        time.sleep(0.1)
    raise AssertionError(f"{path} is never ready")


def shown_ids(text):
    return [int(n) for n in re.findall(r'class="frame" [^>]*><img src="/images/(\d+)/medium', text)]


def distances_of(text):
    return [int(n) for n in re.findall(r'class="hidden">, distance </span>(\d+)<', text)]


def choices_of(text):
    found = re.findall(r'<span>([^<]+)</span><span class="count">(\d+)</span>', text)
    return {name: int(count) for name, count in found}


def test_the_first_page_offers_random_images_and_others(server):
    first, again, other = (server.ask(path) for path in ("/", "/", "/?seed=1"))
    assert first.headers["content-type"] == "text/html; charset=utf-8"
    assert "Drop an image" in first.text
    assert len(shown_ids(first.text)) == 24
    assert shown_ids(again.text) == shown_ids(first.text) != shown_ids(other.text)


def test_neighbours_of_an_item_are_those_of_the_index(server, id_of):
    number = id_of("dogs/17.png")
    text = server.ask(f"/?like={number}&k=7").text
    ids, codes = next(iter(server.images.index.scan()))
    apart = hamming(codes[ids == number], codes)[0].astype(int)
    order = [i for i in np.lexsort((ids, apart)) if ids[i] != number][:7]
    assert shown_ids(text) == ids[order].tolist()
    assert distances_of(text) == apart[order].tolist()
    assert re.search(rf"{len(ids)} codes in [\d.]+ ms, exact", text)
    # The first result leads to its own neighbours, with the same slider.
    assert f'href="/?k=7&amp;like={ids[order[0]]}"' in text


def test_radius_filters_and_bits(server, id_of):
    number = id_of("cats/03.jpg")
    every = server.ask(f"/results?like={number}&k=30").text
    near = server.ask(f"/results?like={number}&k=30&radius=20").text
    assert distances_of(near) == [d for d in distances_of(every) if d <= 20]
    dogs = server.ask(f"/results?like={number}&k=30&where=label%3Ddogs").text
    assert len(shown_ids(dogs)) == 12
    assert "12 codes in" in dogs
    both = server.ask("/results?where=taken%3D2019&where=camera%3DOne").text
    assert "<b>3 images</b>" in both
    assert "Nothing is that near" in server.ask(f"/results?like={number}&radius=0").text
    assert 'class="bits"' not in every
    drawn = server.ask(f"/results?like={number}&bits=1").text
    said = [int(n) for n in re.findall(r"code \w+, (\d+) bits? differs?", drawn)]
    assert said == distances_of(drawn)


def test_filters_have_counts_under_the_others(server):
    counts = choices_of(server.ask("/?where=label%3Dcats").text)
    assert (counts["cats"], counts["2019"], counts["One"]) == (14, 5, 7)
    assert "dogs" not in counts
    whole = choices_of(server.ask("/").text)
    assert (whole["dogs"], whole["copies"], whole["no label"]) == (12, 3, 1)
    months = choices_of(server.ask("/?where=taken%3D2019").text)
    assert months["2019"] == sum(n for name, n in months.items() if name.startswith("2019-")) == 5


def test_the_histogram_counts_every_item_once(server, id_of):
    def counts(more=""):
        text = server.ask(f"/histogram?like={id_of('copies/a.png')}{more}").text
        return [int(n) for n in re.search(r'data-counts="([\d,]+)"', text)[1].split(",")]

    assert len(counts()) == 65
    assert sum(counts()) == len(server.images.index) - 1
    assert counts()[0] >= 1  # its copy
    assert sum(counts("&where=label%3Ddogs")) == 12


def test_names_are_text_everywhere(server, id_of):
    number = id_of(EVIL)
    for path in ("/?k=100", f"/?like={number}", "/duplicates?radius=12", "/map"):
        assert "<img src=x" not in server.ask(path).text
    assert html.escape(EVIL) in server.ask(f"/?like={number}").text


def test_an_upload_leads_to_an_address_that_can_be_shared(server, png, id_of):
    headers = {"Accept": "application/json"}
    url = server.ask("/search?k=5", method="POST", body=png, headers=headers).json["url"]
    code = server.images.index.get(id_of("dogs/17.png")).code.hex()
    assert f"code={code}" in url
    text = server.ask(url).text
    assert "Your image" in text
    assert shown_ids(text)[0] == id_of("dogs/17.png")
    assert distances_of(text)[0] == 0
    assert len(shown_ids(text)) == 5
    preview = re.search(r'src="(/uploads/\w+)"', text)[1]
    assert server.ask(preview).headers["content-type"] == "image/jpeg"
    # A form without a script works too.
    head = '--x\r\nContent-Disposition: form-data; name="image"; filename="q.png"\r\n\r\n'
    form = head.encode() + png + b"\r\n--x--\r\n"
    kind = {"Content-Type": "multipart/form-data; boundary=x"}
    answer = server.ask("/search", method="POST", body=form, headers=kind)
    assert answer.status == 303
    assert f"code={code}" in answer.headers["location"]


def test_images_are_upright_bounded_and_without_metadata(server, id_of, tmp_path):
    for size, side in (("small", 128), ("medium", 160), ("large", 160)):
        answer = server.ask(f"/images/{id_of('cats/00.jpg')}/{size}")
        (tmp_path / "image.jpg").write_bytes(answer.body)
        with Image.open(tmp_path / "image.jpg") as image:
            assert max(image.size) == side
            assert not image.getexif()
    original = server.ask(f"/images/{id_of('cats/00.jpg')}/original")
    assert b"Exif" in original.body
    assert original.headers["content-type"] == "image/jpeg"
    assert "sandbox" in original.headers["content-security-policy"]


def shown_groups(text):
    """Of each group on the page: whether it is confirmed, and the names of its images."""
    found = []
    for part in text.split("<fieldset")[1:]:
        sure = "not confirmed" not in part if "confirmed" in part else None
        found.append((sure, re.findall(r'alt="([^"]*)"', part)))
    return found


def test_duplicates_are_those_of_dedup(server):
    text = ready(server, "/duplicates")
    found = server.images.duplicates()
    assert found.code == builtin.COPY_HASHER
    assert shown_groups(text) == [(g.confirmed, [hit.name for hit in g]) for g in found.groups]
    assert (True, ["copies/a.png", "copies/b.png", "copies/small.jpg"]) in shown_groups(text)
    assert f'value="{found.radius}"' in text
    assert str(found.expectation()) in text
    assert " checked" not in text
    # The widest radius of the slider has more, of which some are no copies.
    assert "not confirmed" in ready(server, f"/duplicates?radius={found.bits}&code=copy")
    assert ready(server, "/duplicates") == text
    # A radius that no code has.
    assert "Radius must be between 0 and 256 bits" in server.ask("/duplicates?radius=300").text
    own = ready(server, "/duplicates/groups?radius=0&code=own")
    assert (True, ["copies/a.png", "copies/b.png"]) in shown_groups(own)


def test_marked_images_can_be_exported(server, collection, id_of, tmp_path):
    odd = str(collection.folder / EVIL)
    for kind, line in (("list", odd), ("script", f"move {shlex.quote(odd)}\n")):
        body = f"remove={id_of('copies/b.png')}&remove={id_of(EVIL)}&format={kind}".encode()
        answer = server.ask("/duplicates/export", method="POST", body=body, headers=FORM)
        assert line in answer.text
        assert "attachment" in answer.headers["content-disposition"]
    # The script runs, on files of its own.
    own, out = tmp_path / "it's mine", tmp_path / "out"
    for folder in (own, out):
        folder.mkdir()
        (folder / "one.png").write_text(folder.name)
    (tmp_path / "run.sh").write_text(removal_script([str(own / "one.png")]))
    subprocess.run(["sh", "run.sh", "out"], cwd=tmp_path, check=True)
    assert {p.name: p.read_text() for p in out.iterdir()} == {
        "one.png": "out",
        "1-one.png": own.name,
    }
    # All confirmed groups, on whatever page they are.
    ready(server, "/duplicates")
    body = b"every=1&format=list"
    answer = server.ask("/duplicates/export?code=copy", method="POST", body=body, headers=FORM)
    worse = {str(collection.folder / "copies" / name) for name in ("b.png", "small.jpg")}
    assert worse <= set(answer.text.split())
    assert str(collection.folder / "copies" / "a.png") not in answer.text


def test_copy_codes_that_cannot_be_stored(new_collection, serve, tmp_path, monkeypatch):
    full = CannotWriteError(str(tmp_path / "secret place"), "no space is left", "", "try again")

    def fail(*_, **__):
        raise full

    with serve(new_collection(tmp_path).index) as served:
        monkeypatch.setattr(ImageIndex, "duplicate_search", fail)
        text = served.ask("/duplicates").text
        assert "the server&#39;s log says why" in text
        assert "secret place" not in text
        # The other codes need nothing that is stored.
        assert "Search codes" in text


def test_the_timeline_has_every_dated_image(server):
    text = ready(server, "/timeline")
    assert sum(map(int, re.findall(r'<p class="count">(\d+)</p>', text))) == 14
    assert "16 images have no date" in text
    assert 'href="/?where=taken%3D2019"' in text


def test_the_map_has_every_item(server):
    for _ in range(40):
        answer = server.ask("/map/points")
        if answer.status == 200:
            break
    head = int(np.frombuffer(answer.body[:8], "<f8")[0])
    names = answer.body[8 : 8 + head].decode().split("\n")
    assert names[:2] == ["cats", "dogs"]
    rest = answer.body[8 + 8 * -(-head // 8) :]
    count = int(np.frombuffer(rest[:8], "<f8")[0])
    ids = np.frombuffer(rest[8 : 8 + 8 * count], "<f8").astype(int)
    assert ids.tolist() == server.images.index.ids().tolist()
    assert len(rest) == 8 + 8 * count + 4 * count + count
    labels = [(item.labels or ("",))[0] for item in server.images.index.items()]
    colours = np.frombuffer(rest[-count:], np.uint8)
    assert [names[c] if c < len(names) else "" for c in colours] == labels


def test_the_page_of_the_api_says_what_its_description_says(server):
    text = server.ask("/docs").text
    for path, verbs in server.json("/openapi.json")["paths"].items():
        for operation in verbs.values():
            assert f"<code>{path}</code>" in text
            for one in operation.get("parameters", ()):
                assert html.escape(one["description"]) in html.escape(html.unescape(text))


def test_readers_see_new_items_without_a_restart(new_collection, serve, hasher, tmp_path):
    made = new_collection(tmp_path)
    with serve(made.index) as served:
        assert dict(served.json("/api/facets")["labels"])["dogs"] == 12
        write_image(made.folder / "dogs" / "new.png", 999)
        with ImageIndex.open(made.index, write=True) as images:
            ImageIndex(images.index, hasher).sync(made.folder, workers=0)
        assert served.json("/api/info")["count"] == 31
        found = served.json("/api/search?key=dogs%2Fnew.png&k=1")
        assert found["query"]["key"] == "dogs/new.png"


class Tags(HTMLParser):
    """Every tag of a page with the names of its attributes."""

    def __init__(self):
        super().__init__()
        self.found = []

    def handle_starttag(self, tag, attrs):
        self.found.append((tag, [name for name, _ in attrs]))


@pytest.mark.parametrize(
    "path", ["/", "/?like=3&bits=1", "/map", "/duplicates", "/timeline", "/docs", "/nowhere"]
)
def test_pages_are_strict_and_have_no_inline_scripts_or_styles(server, path):
    answer = server.ask(path)
    assert "default-src 'none'" in answer.headers["content-security-policy"]
    assert "unsafe" not in answer.headers["content-security-policy"]
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert answer.headers["referrer-policy"] == "no-referrer"
    tags = Tags()
    tags.feed(answer.text)
    assert len(tags.found) > 10
    for tag, attributes in tags.found:
        assert tag not in ("style", "iframe", "object")
        assert not [name for name in attributes if name == "style" or name.startswith("on")]
        assert tag != "script" or "src" in attributes
    here = answer.text.replace("http://www.w3.org", "").replace(server.url, "")
    assert not re.search("https?://", here)
