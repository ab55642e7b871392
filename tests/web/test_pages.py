"""The pages without a browser: what they show is what the index holds."""

from __future__ import annotations

import html
import re
import shlex
import subprocess
import time
from collections import defaultdict
from html.parser import HTMLParser

import numpy as np
import pytest
from PIL import Image

from fisherhash import Hasher
from fisherhash.codes import hamming
from fisherhash.index.base import CannotWriteError
from fisherhash.index.images.image_index import ImageIndex
from fisherhash.index.images.known import cache_place
from fisherhash.index.images.results import joined_codes
from fisherhash.model import builtin

from .conftest import EVIL


def ready(server, path):
    """A page whose content is computed in the background."""
    for _ in range(100):
        text = server.ask(path).text
        if "data-again" not in text and 'http-equiv="refresh"' not in text:
            return text
        time.sleep(0.1)
    raise AssertionError(f"{path} is never ready")


class Tags(HTMLParser):
    """Every tag of a page with the names of its attributes."""

    def __init__(self):
        super().__init__()
        self.found = []

    def handle_starttag(self, tag, attrs):
        self.found.append((tag, [name for name, _ in attrs]))


def equal_codes(server):
    groups = defaultdict(list)
    for item in server.images.index.items():
        groups[item.code].append(item.id)
    return [ids for ids in groups.values() if len(ids) > 1]


def shown_ids(text):
    part = text[text.index('id="results"') :] if 'id="results"' in text else text
    return [int(n) for n in re.findall(r'<img src="/images/(\d+)/medium', part)]


def distances_of(text):
    return [int(n) for n in re.findall(r'class="hidden">, distance </span>(\d+)<', text)]


def test_the_first_page_offers_random_images_and_others(server):
    first = server.ask("/")
    assert first.status == 200
    assert first.headers["content-type"] == "text/html; charset=utf-8"
    assert "Drop an image" in first.text
    assert len(shown_ids(first.text)) == 24
    again, other = server.ask("/"), server.ask("/?seed=1")
    assert shown_ids(again.text) == shown_ids(first.text)
    assert shown_ids(other.text) != shown_ids(first.text)


def test_neighbours_of_an_item_are_those_of_the_index(server, id_of):
    number = id_of("dogs/17.png")
    text = server.ask(f"/?like={number}&k=7").text
    ids, codes = next(iter(server.images.index.scan()))
    own = joined_codes([server.images.index.get(number).code])
    apart = hamming(own, codes)[0].astype(int)
    order = [i for i in np.lexsort((ids, apart)) if ids[i] != number][:7]
    assert shown_ids(text) == ids[order].tolist()
    assert distances_of(text) == apart[order].tolist()
    assert re.search(rf"{len(ids)} codes in [\d.]+ ms, exact: every code was compared", text)
    # The first result leads to its own neighbours, with the same slider.
    assert f'href="/?like={ids[order[0]]}&amp;k=7"' in text


def test_radius_and_filters(server, id_of):
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


def test_filters_have_counts_under_the_others(server):
    text = server.ask("/?where=label%3Dcats").text
    counts = dict(re.findall(r'<span>([^<]+)</span><span class="count">(\d+)</span>', text))
    assert counts["cats"] == "14"
    assert counts["2019"] == "5"
    assert counts["One"] == "7"
    assert "dogs" not in counts
    whole = dict(
        re.findall(r'<span>([^<]+)</span><span class="count">(\d+)</span>', server.ask("/").text)
    )
    assert (whole["dogs"], whole["copies"], whole["no label"]) == ("12", "3", "1")


def test_bits_come_only_on_request(server, id_of):
    number = id_of("cats/03.jpg")
    plain = server.ask(f"/results?like={number}").text
    drawn = server.ask(f"/results?like={number}&bits=1").text
    assert 'class="bits"' not in plain
    assert drawn.count('class="bits"') == 24
    said = [int(n) for n in re.findall(r"code \w+, (\d+) bits? differs?", drawn)]
    assert said == distances_of(drawn)


def test_the_histogram_counts_every_item_once(server, id_of):
    number = id_of("copies/a.png")
    text = server.ask(f"/histogram?like={number}").text
    counts = [int(n) for n in re.search(r'data-counts="([\d,]+)"', text)[1].split(",")]
    assert len(counts) == 65
    assert sum(counts) == len(server.images.index) - 1
    assert counts[0] >= 1  # its copy
    some = server.ask(f"/histogram?like={number}&where=label%3Ddogs").text
    assert sum(map(int, re.search(r'data-counts="([\d,]+)"', some)[1].split(","))) == 12


def test_names_are_text_everywhere(server, id_of):
    number = id_of(EVIL)
    for path in ("/?k=100", f"/?like={number}", "/duplicates?radius=12", "/buckets", "/map"):
        text = server.ask(path).text
        assert "<img src=x" not in text
    assert html.escape(EVIL) in server.ask(f"/?like={number}").text


def test_an_upload_leads_to_an_address_that_can_be_shared(server, png, id_of):
    answer = server.ask(
        "/search?k=5", method="POST", body=png, headers={"Accept": "application/json"}
    )
    url = answer.json["url"]
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
    mark = "frontier"
    head = f'--{mark}\r\nContent-Disposition: form-data; name="image"; filename="q.png"\r\n\r\n'
    form = head.encode() + png + f"\r\n--{mark}--\r\n".encode()
    kind = {"Content-Type": f"multipart/form-data; boundary={mark}"}
    answer = server.ask("/search", method="POST", body=form, headers=kind)
    assert answer.status == 303
    assert f"code={code}" in answer.headers["location"]


def test_an_unreadable_upload_gets_a_sentence(server):
    answer = server.ask(
        "/search", method="POST", body=b"no image", headers={"Accept": "application/json"}
    )
    assert answer.status == 422
    assert answer.json["error"].endswith(".")


def test_images_are_upright_bounded_and_without_metadata(server, id_of, tmp_path):
    for size, side in (("small", 128), ("medium", 160), ("large", 160)):
        answer = server.ask(f"/images/{id_of('cats/00.jpg')}/{size}")
        assert answer.status == 200
        (tmp_path / "image.jpg").write_bytes(answer.body)
        with Image.open(tmp_path / "image.jpg") as image:
            assert max(image.size) == side
            assert not image.getexif()
    original = server.ask(f"/images/{id_of('cats/00.jpg')}/original")
    assert b"Exif" in original.body
    assert original.headers["content-type"] == "image/jpeg"
    assert "sandbox" in original.headers["content-security-policy"]


def test_duplicates_regroup_and_export(server, collection, id_of, tmp_path):
    equal = ready(server, "/duplicates/groups?radius=0&code=own")
    groups = equal_codes(server)
    assert f"{sum(map(len, groups))} images" in equal
    more = ready(server, "/duplicates/groups?radius=12&code=own")
    assert int(re.search(r", (\d+) images", more)[1]) >= 3
    # Nothing is marked; the largest of the copies is the best.
    assert " checked" not in more
    group = next(part for part in more.split("<fieldset") if "small.jpg" in part)
    copies = group.split("<li")
    assert not any('class="mark"' in copy for copy in copies if "small.jpg" in copy)
    odd = collection.folder / EVIL
    marked = f"remove={id_of('copies/b.png')}&remove={id_of(EVIL)}"
    kind = {"Content-Type": "application/x-www-form-urlencoded"}
    for name in ("list", "csv"):
        body = f"{marked}&format={name}".encode()
        answer = server.ask("/duplicates/export", method="POST", body=body, headers=kind)
        assert str(odd) in answer.text
    body = f"{marked}&format=script".encode()
    script = server.ask("/duplicates/export", method="POST", body=body, headers=kind).text
    assert f"move {shlex.quote(str(odd))}\n" in script
    # The script runs, on files of its own.
    own = tmp_path / "it's mine"
    own.mkdir()
    for name in ("one.png", "two.png"):
        (own / name).write_text(name)
    from fisherhash.web.reviewing import removal_script

    (tmp_path / "run.sh").write_text(removal_script([str(own / "one.png"), str(own / "two.png")]))
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "one.png").write_text("older")
    subprocess.run(["sh", "run.sh", "out"], cwd=tmp_path, check=True)
    moved = sorted(path.name for path in (tmp_path / "out").iterdir())
    assert moved == ["1-one.png", "one.png", "two.png"]
    assert (tmp_path / "out" / "one.png").read_text() == "older"


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
    assert shown_groups(text) == [
        (group.confirmed, [match.name for match in group]) for group in found.groups
    ]
    assert (True, ["copies/a.png", "copies/b.png", "copies/small.jpg"]) in shown_groups(text)
    assert f'value="{found.radius}"' in text
    assert str(found.expectation()) in text
    # The widest radius of the slider has more, of which some are no copies.
    wide = ready(server, f"/duplicates?radius={found.bits}&code=copy")
    assert "not confirmed" in wide
    assert ready(server, "/duplicates") == text
    # A radius that no code has.
    assert "Radius must be between 0 and 256 bits" in server.ask("/duplicates?radius=300").text


def test_every_confirmed_group_can_be_exported(server, collection):
    ready(server, "/duplicates")
    kind = {"Content-Type": "application/x-www-form-urlencoded"}
    answer = server.ask(
        "/duplicates/export?code=copy", method="POST", body=b"every=1&format=list", headers=kind
    )
    worse = ["copies/b.png", "copies/small.jpg"]
    assert set(answer.text.split()) >= {str(collection.folder / name) for name in worse}
    assert str(collection.folder / "copies" / "a.png") not in answer.text


def test_copy_codes_of_a_large_collection_are_computed_on_request(
    new_collection, serve, tmp_path, monkeypatch
):
    monkeypatch.setattr("fisherhash.web.duplicates.MOST_UNASKED", 20)
    made = new_collection(tmp_path)
    with serve(made.index) as served:
        asked = served.ask("/duplicates").text
        assert "29 images have none yet" in asked or "30 images have none yet" in asked
        assert 'formaction="/duplicates/compute"' in asked
        # The API answers with what it has.
        assert served.json("/api/duplicates")["code"] == "own"
        assert "<fieldset" in ready(served, "/duplicates?code=own")
        answer = served.ask("/duplicates/compute", method="POST", body=b"")
        assert (answer.status, answer.headers["location"]) == (303, "/duplicates")
        assert "copies/small.jpg" in ready(served, "/duplicates")
        assert served.json("/api/duplicates")["code"] == "copy"


def test_copy_codes_that_cannot_be_stored(new_collection, serve, tmp_path, monkeypatch):
    made = new_collection(tmp_path)
    full = CannotWriteError(str(tmp_path / "secret place"), "no space is left", "", "try again")
    with serve(made.index) as served:
        monkeypatch.setattr(ImageIndex, "duplicate_search", lambda *_, **__: raise_(full))
        text = served.ask("/duplicates").text
        assert "the server&#39;s log says why" in text
        assert "secret place" not in text
        # The other codes need nothing that is stored.
        assert "Search codes" in text


def raise_(error):
    raise error


def test_copy_codes_that_another_process_computes(new_collection, serve, tmp_path):
    made = new_collection(tmp_path)
    place = cache_place(made.index, "copies", ".index")
    hasher = Hasher.load(builtin.COPY_HASHER)
    with ImageIndex.create(place, hasher), serve(made.index) as served:
        text = served.ask("/duplicates/groups").text
        assert "Another process computes the codes for copies: " in text
        assert "data-again" in text
        busy = served.ask("/api/duplicates", headers={"Accept": "application/json"})
        assert busy.status == 503
        assert "Another process" in busy.json["error"]


def test_export_refuses_what_it_cannot_do(server):
    kind = {"Content-Type": "application/x-www-form-urlencoded"}
    for body in (b"", b"format=list", b"remove=x&format=list", b"remove=1&format=exe"):
        answer = server.ask("/duplicates/export", method="POST", body=body, headers=kind)
        assert answer.status == 400
    answer = server.ask(
        "/duplicates/export", method="POST", body=b"remove=99999&format=list", headers=kind
    )
    assert answer.status == 404


def test_the_timeline_has_every_dated_image(server):
    text = ready(server, "/timeline")
    assert [int(n) for n in re.findall(r'<p class="count">(\d+)</p>', text)].count(0) == 0
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
    colours = np.frombuffer(rest[-count:], np.uint8)
    labels = [(item.labels or ("",))[0] for item in server.images.index.items()]
    assert [names[c] if c < len(names) else "" for c in colours] == labels


def test_buckets_are_groups_of_equal_codes(server, id_of):
    text = ready(server, "/buckets")
    sizes = [int(n) for n in re.findall(r"<h2>(\d+) images</h2>", text)]
    assert sizes == sorted((len(group) for group in equal_codes(server)), reverse=True)
    code = server.images.index.get(id_of("copies/a.png")).code.hex()
    assert f"code={code}" in text


def test_the_model_page_explains_centres_and_bits(server, id_of):
    text = ready(server, "/model")
    assert "general-64" in text
    cells = re.findall(r'<td class="s\d[^"]*">(\d+)</td>', text)
    assert len(cells) == 6  # three labels
    number = id_of("cats/03.jpg")
    rows = ready(server, f"/model/bits?like={number}")
    assert rows.count('class="bit"') == 64
    own = re.findall(r"Bit (\d+) is (\d), as in the query", rows)
    bits = np.unpackbits(np.frombuffer(server.images.index.get(number).code, np.uint8))
    assert [(int(a), int(b)) for a, b in own] == list(enumerate(bits.tolist()))


def test_readers_see_new_items_without_a_restart(new_collection, serve, hasher, tmp_path):
    from fisherhash.index.images.image_index import ImageIndex

    from .conftest import write_image

    made = new_collection(tmp_path)
    with serve(made.index) as served:
        before = served.json("/api/info")["count"]
        write_image(made.folder / "dogs" / "new.png", 999)
        with ImageIndex.open(made.index, write=True) as images:
            ImageIndex(images.index, hasher).sync(made.folder, workers=0)
        assert served.json("/api/info")["count"] == before + 1
        found = served.json("/api/search?key=dogs%2Fnew.png&k=1")
        assert found["query"]["key"] == "dogs/new.png"


@pytest.mark.parametrize("path", ["/", "/map", "/duplicates", "/model", "/nowhere", "/api/info"])
def test_strict_headers_go_with_every_answer(server, path):
    headers = server.ask(path).headers
    policy = headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert headers["x-content-type-options"] == "nosniff"
    assert headers["referrer-policy"] == "no-referrer"
    assert "server" not in headers or headers["server"] == "uvicorn"


def test_no_page_has_inline_scripts_or_styles(server, id_of):
    number = id_of("cats/03.jpg")
    for path in ("/", f"/?like={number}&bits=1", "/map", "/duplicates", "/model", "/timeline"):
        text = server.ask(path).text
        tags = Tags()
        tags.feed(text)
        assert len(tags.found) > 20
        for tag, attributes in tags.found:
            assert tag not in ("style", "iframe", "object")
            assert not [name for name in attributes if name == "style" or name.startswith("on")]
            assert tag != "script" or "src" in attributes
        assert "http://" not in text.replace("http://www.w3.org", "")
        assert "https://" not in text
