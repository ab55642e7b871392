from __future__ import annotations

import json
import re
import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch
from markupsafe import escape

from fisherhash import codes
from fisherhash.data.protocols import Split
from fisherhash.data.sources import open_data
from fisherhash.data.splits import hash_order
from fisherhash.errors import UsageError
from fisherhash.model.hasher import Hasher
from fisherhash.pages import demo
from fisherhash.training.measuring import SPLIT_FILE

QUICK = {"epochs": 2, "image_size": 32, "backbone": "tiny"}
ODD = '<i>air & "space"</i>'


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """The tiny network's threads would only wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A demo, what it said, and its page."""
    folder = tmp_path_factory.mktemp("demo")
    lines: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FISHERHASH_CACHE", str(folder / "cache"))
        result = demo.run_demo(folder / "out", **QUICK, say=lines.append)
        yield result, lines, result.page.read_text(encoding="utf-8")


def without_times(html: str) -> str:
    return re.sub(r'<section id="times">.*?</section>', "", html, flags=re.DOTALL)


def queries_of(html: str) -> list[str]:
    return re.findall(r'<article class="query">(.*?)</article>', html, flags=re.DOTALL)


def test_page_is_self_contained(made):
    result, _, html = made
    assert len(html.encode()) < 1_500_000
    assert "<script" not in html
    assert not re.findall(r"\son\w+=", html)
    assert "url(" not in html
    for uri in re.findall(r'src="([^"]+)"', html):
        assert uri.startswith("data:image/png;base64,")
    for tag, link in re.findall(r'<(\w+)[^>]*?href="([^"]+)"', html):
        assert (tag == "a") == link.startswith("https://")
    assert html.count("http") == len(re.findall(r'<a\s+href="http', html))
    assert all(re.findall(r"<img [^>]*?alt=\"([^\"]*)\"", html, flags=re.DOTALL))
    assert result.page.name == "index.html"


def test_ten_queries_are_the_first_of_their_class_in_hash_order(made):
    result, _, html = made
    collection = open_data("sample")
    split = Split.load(result.model / SPLIT_FILE, collection)
    rows = queries_of(html)
    assert re.findall(r"<h3 [^>]*>(.*?)</h3>", html) == list(collection.classes)
    hasher = Hasher.load(result.model)
    numbers = collection.labels.argmax(axis=1)
    order = hash_order(collection.names, split.query, 0)
    database = hasher.encode_collection(collection, split.database, cached=True).codes
    for number, row in enumerate(rows):
        query = next(item for item in order if numbers[item] == number)
        code = hasher.encode(collection.reader.open(query))
        found = re.findall(r'<li class="(\w+)" data-distance="(\d+)">', row)
        assert len(found) == 10
        assert re.findall(r"distance <b>(\d+)</b>", row) == [distance for _, distance in found]
        distances = codes.hamming(code, database)[0].astype(int)
        nearest = np.argsort(distances, kind="stable")[:10]
        assert [int(distance) for _, distance in found] == distances[nearest].tolist()
        same = numbers[split.database[nearest]] == number
        assert [mark == "right" for mark, _ in found] == same.tolist()
        names = [collection.classes[i] for i in numbers[split.database[nearest]]]
        assert re.findall(r'class="caption" title="(\w+)"', row) == names
        drawn = re.findall(r'aria-label="code (\w+)(?:, (\d+) bits? differ)?', row)
        assert drawn[0] == (codes.to_hex(code)[0], "")
        assert drawn[1:] == [
            (text, str(distance))
            for text, distance in zip(
                codes.to_hex(database[nearest]), distances[nearest], strict=True
            )
        ]
        assert f"<span>{int(same.sum())} of 10 right</span>" in row


def test_numbers_on_the_page_are_those_of_the_evaluation(made):
    result, lines, html = made
    evaluation = result.evaluation
    assert f"<b>{evaluation.map:.3f}</b>" in html
    assert f"at worst {evaluation.map_lower:.3f}, at best {evaluation.map_upper:.3f}" in html
    assert "<b>3 bytes</b>" in html
    assert "<b>1,800</b>" in html
    assert any(f"mAP {evaluation.map:.4f}" in line for line in lines)
    record = json.loads((result.page.parent / "demo.json").read_text(encoding="utf-8"))
    assert record["finished"]
    assert record["evaluation"]["map"] == evaluation.map


def test_centres_and_their_distances(made):
    _, _, html = made
    part = re.search(r'<section id="centres">.*?</section>', html, flags=re.DOTALL)
    assert part is not None
    shown = re.findall(r'aria-label="code (\w{6})"', part[0])
    assert len(shown) == 10
    centres = codes.from_hex(shown, 24)
    distances = codes.hamming(centres, centres)
    matrix = part[0][part[0].index('class="matrix"') :]
    cells = [int(cell) for cell in re.findall(r"<td[^>]*>(\d+)</td>", matrix)]
    off = ~np.eye(10, dtype=bool)
    assert cells == distances[off].tolist()
    assert f"The closest two differ in {distances[off].min()} of 24 bits" in part[0]


def test_says_a_line_for_every_part(made):
    result, lines, html = made
    assert list(result.seconds) == ["features", "training", "saving", "evaluation", "page"]
    assert sum(bool(re.search(r": \d+\.\d s", line)) for line in lines) == len(result.seconds)
    for part in demo.DEMO_PARTS.values():
        assert part in html


def test_second_run_replaces_the_first_and_is_the_same(made):
    result, _, html = made
    again = demo.run_demo(result.page.parent, **QUICK, say=lambda _: None)
    assert without_times(again.page.read_text(encoding="utf-8")) == without_times(html)


def test_one_thread_for_a_while(tmp_path):
    def stop(_):
        raise UsageError(f"{torch.get_num_threads()} threads")

    torch.set_num_threads(2)
    try:
        with pytest.raises(UsageError, match="1 threads"):
            demo.run_demo(tmp_path, **QUICK, say=stop)
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(1)


def test_a_demo_that_was_cut_short_is_continued(made, tmp_path):
    claimed = demo._claim(tmp_path / "new")
    shutil.copytree(made[0].model, claimed / "model")
    assert demo._claim(claimed) == claimed


@pytest.mark.parametrize("name", ["notes.txt", "demo.json", "index.html"])
def test_refuses_a_foreign_folder(tmp_path, name):
    (tmp_path / name).write_text('{"made_by": "me"}', encoding="utf-8")
    with pytest.raises(UsageError, match="not made by the demo"):
        demo.run_demo(tmp_path, **QUICK)
    assert [path.name for path in tmp_path.iterdir()] == [name]
    assert (tmp_path / name).read_text(encoding="utf-8") == '{"made_by": "me"}'


def test_refuses_a_file_and_wrong_numbers(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="is a file"):
        demo.run_demo(tmp_path / "file", **QUICK)
    with pytest.raises(UsageError, match="bits must be"):
        demo.run_demo(tmp_path / "new", bits=0)
    with pytest.raises(UsageError, match="epochs must be"):
        demo.run_demo(tmp_path / "new", epochs=0)
    assert not (tmp_path / "new").exists()


def test_odd_class_names_are_escaped(made, monkeypatch, tmp_path):
    sample = open_data("sample")
    named = replace(sample, classes=(ODD, *sample.classes[1:]))
    monkeypatch.setattr(demo, "open_data", lambda _: named)
    out = tmp_path / "a 'b' <c>"
    result = demo.run_demo(out, bits=12, epochs=1, image_size=32, backbone="tiny")
    html = result.page.read_text(encoding="utf-8")
    assert ODD not in html
    assert f">{escape(ODD)}</h3>" in html
    assert "<c>" not in html
    assert "<b>2 bytes</b>" in html
