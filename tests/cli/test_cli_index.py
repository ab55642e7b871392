"""The verbs of the index: data on stdout, talk on stderr, a sentence for every fault."""

import csv
import io
import json
import os
import re
import shutil
import sqlite3
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from fisherhash import backbones, cli, codes
from fisherhash.index import Index, base
from fisherhash.index.images.encoding import FileEncoder
from fisherhash.model.hasher import Hasher
from fisherhash.model.head import linear_head
from fisherhash.model.torch_network import TorchNetwork

LINE = re.compile(r" *(\d+) +(\d+)  (.*)")


def command(*words, **options):
    """Runs the command in a process of its own."""
    return subprocess.run(
        [sys.executable, "-c", "from fisherhash.cli import main; main()", *map(str, words)],
        capture_output=True,
        check=False,
        **options,
    )


def talk(err):
    """What was said, without the time of the first search and without ties."""
    return [
        line
        for line in err.splitlines()
        if not line.startswith("first search of") and "images are at distance" not in line
    ]


def make_hasher(seed=0, bits=24):
    network = TorchNetwork(backbones.create("tiny", image_size=32), torch.device("cpu"))
    rng = np.random.default_rng(seed)
    weight = rng.normal(size=(network.width, bits))
    features = np.abs(rng.normal(size=(64, network.width))) * 0.1
    head = linear_head(weight, -(features @ weight).mean(axis=0))
    return Hasher(network, head, method="lsh")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model") / "tiny"
    make_hasher().save(folder)
    return folder


@pytest.fixture(scope="module")
def shared(photos, model, tmp_path_factory):
    """An index of the session's images; not to be changed by a test."""
    path = tmp_path_factory.mktemp("index") / "photos.index"
    with pytest.raises(SystemExit) as ended:
        cli.main(["index", "sync", str(path), str(photos), "--model", str(model)])
    assert ended.value.code == 0
    return path


@pytest.fixture
def index(shared, tmp_path):
    """A copy of that index."""
    return shutil.copy(shared, tmp_path / "photos.index")


def rows(out):
    return [(int(r), int(d), key) for r, d, key in (LINE.fullmatch(x).groups() for x in out)]


def expected(photos, query, keys=None):
    """(distance, key) in the order of the index, which is that of the sorted keys."""
    hasher = make_hasher()
    names = sorted(p.relative_to(photos).as_posix() for p in photos.rglob("*.png"))
    packed = hasher.encode([photos / name for name in names])
    distances = codes.hamming(hasher.encode(query), packed)[0].tolist()
    return sorted(zip(distances, names, strict=True), key=lambda pair: pair[0])


def test_sync_reports_on_stderr_and_as_json(run, photos, model, tmp_path):
    path = tmp_path / "a.index"
    code, out, err = run("index", "sync", path, photos, "--model", model)
    assert (code, out) == (0, "")
    assert "42 added, 0 updated, 0 removed, 0 unchanged; 42 in" in err
    code, out, err = run("index", "sync", path, photos, "--json")
    assert code == 0
    report = json.loads(out)
    assert (report["added"], report["unchanged"], report["skipped"]) == (0, 42, [])
    assert report["count"] == 42


@pytest.mark.skipif(sys.platform == "win32", reason="one process is as fast there")
def test_a_dry_run_prints_what_would_be_done(run, write_photos, model, tmp_path):
    root = write_photos(tmp_path / "p", {"a": 2})
    path = tmp_path / "a.index"
    code, out, err = run("index", "sync", path, root, "--model", model, "--dry-run")
    assert (code, out) == (0, "add     a/00.png\nadd     a/01.png\n")
    assert "nothing was changed" in err
    assert not path.exists()
    run("index", "sync", path, root, "--model", model)
    (root / "a" / "00.png").unlink()
    code, out, _ = run("index", "sync", path, root, "--dry-run", "--json")
    assert json.loads(out) == {"add": [], "update": [], "remove": ["a/00.png"], "unchanged": 1}


def test_search_finds_what_brute_force_finds(run, photos, shared):
    query = photos / "b" / "03.png"
    want = expected(photos, query)
    code, out, err = run("search", query, "--index", shared)
    assert (code, talk(err)) == (0, [])
    assert rows(out.splitlines()) == [(i + 1, d, k) for i, (d, k) in enumerate(want[:10])]
    code, out, _ = run("search", query, "--index", shared, "-k", "100")
    assert len(out.splitlines()) == 42
    radius = want[6][0]
    within = [pair for pair in want if pair[0] <= radius]
    code, out, _ = run("search", query, "--index", shared, "--radius", radius)
    assert [(d, k) for _, d, k in rows(out.splitlines())] == within
    code, out, _ = run("search", query, "--index", shared, "--radius", radius, "-k", 2)
    assert [(d, k) for _, d, k in rows(out.splitlines())] == within[:2]
    code, out, _ = run("search", query, "--index", shared, "--where", "label=c", "-k", "3")
    assert [k for _, _, k in rows(out.splitlines())] == [k for _, k in want if k[0] == "c"][:3]


def test_an_item_searched_by_its_key_does_not_find_itself(run, photos, shared):
    query = photos / "b" / "03.png"
    want = [pair for pair in expected(photos, query) if pair[1] != "b/03.png"]
    code, out, err = run("search", "--index", shared, "--key", "b/03.png", "-k", "5")
    assert (code, talk(err)) == (0, [])
    assert [(d, k) for _, d, k in rows(out.splitlines())] == want[:5]
    code, out, _ = run("search", "--index", shared, "--key", "b/03.png", "--radius", "24")
    assert [(d, k) for _, d, k in rows(out.splitlines())] == want


def test_several_queries_and_json(run, photos, shared):
    first, second = photos / "a" / "00.png", photos / "c" / "01.png"
    words = ["search", first, second, "--index", shared, "--key", "b/00.png", "-k", "2"]
    code, out, _ = run(*words)
    assert code == 0
    blocks = out.split("\n\n")
    assert [block.splitlines()[0] for block in blocks] == [str(first), str(second), "b/00.png"]
    assert all(len(block.splitlines()) == 3 for block in blocks)
    code, out, err = run(*words, "--json")
    assert (code, talk(err)) == (0, [])
    found = json.loads(out)
    assert [one["query"] for one in found] == [str(first), str(second), "b/00.png"]
    best = found[0]["results"][0]
    assert (best["rank"], best["distance"], best["key"]) == (1, 0, "a/00.png")
    assert best["path"] == str(photos / "a" / "00.png")
    assert best["labels"] == ["a"]
    assert found[0]["code"] == codes.to_hex(make_hasher().encode(first))[0]


def test_a_contact_sheet_is_written(run, photos, shared, tmp_path):
    page = tmp_path / "new" / "answers.html"
    words = ["search", photos / "a" / "00.png", "--index", shared, "--html", page]
    code, out, err = run(*words)
    assert code == 0
    assert str(page) in err
    assert len(out.splitlines()) == 10
    html = page.read_text()
    assert html.count("data:image/") >= 11
    assert "42 images" in html


def test_radius_that_finds_nothing(run, index, tmp_path):
    with Index.open(index, write=True) as opened:
        opened.remove(opened.keys()[1:])
    code, out, err = run("search", "--index", index, "--key", "a/00.png", "--radius", "3")
    assert (code, out) == (0, "")
    assert "a/00.png: nothing found\n" in err
    words = ["search", "--index", index, "--key", "a/00.png"]
    code, out, err = run(*words, "--where", "label=cats", "--where", "key>=x")
    assert (code, out) == (0, "")
    assert "nothing found; no item matches label=cats and key>=x" in err
    code, out, err = run(*words, "--where", "label=aa")
    assert (code, out) == (0, "")
    assert "no item matches label=aa. Did you mean label=a?" in err


def test_remove_by_key_and_by_filter(run, index):
    code, out, err = run("index", "remove", index, "a/00.png", "b/01.png", "--json")
    assert code == 0, err
    assert json.loads(out) == {"removed": 2, "count": 40}
    code, out, err = run("index", "remove", index, "--where", "label=c")
    assert (code, out) == (0, "")
    assert "14 removed, 26 left" in err
    code, _, err = run("index", "remove", index, "a/00.png")
    assert code == 2
    assert "a/00.png" in err
    assert run("index", "remove", index)[0] == 2
    assert run("index", "remove", index, "a/02.png", "--where", "label=a")[0] == 2


def test_a_dry_run_of_remove_removes_nothing(run, index):
    code, out, err = run("index", "remove", index, "--where", "label=c", "--dry-run")
    assert code == 0, err
    assert out.splitlines() == [f"remove  c/{i:02d}.png" for i in range(14)]
    assert "would be: 14 removed, 28 left; nothing was changed" in err
    code, out, _ = run("index", "remove", index, "a/00.png", "--dry-run", "--json")
    assert (code, json.loads(out)) == (0, {"remove": ["a/00.png"]})
    assert run("index", "remove", index, "zz", "--dry-run")[0] == 2
    with Index.open(index) as opened:
        assert len(opened) == 42


def test_a_named_file_that_cannot_be_read_is_told_every_time(run, photos, index, tmp_path):
    bad = tmp_path / "bad.jpg"
    bad.write_bytes(b"x")
    for _ in range(2):
        code, _, err = run("index", "add", index, bad)
        assert code == 1
        assert f"skipped {bad}: not a" in err
        assert "no image could be read" in err
    code, _, err = run("index", "add", index, bad, photos / "a" / "00.png")
    assert code == 0
    assert f"skipped {bad}: not a" in err
    bad.unlink()
    assert run("index", "list", index, "--skipped")[1].startswith(f"name,reason\n{bad},not ")
    assert "skipped" in json.loads(run("index", "sync", index, photos, "--json")[1])
    assert run("index", "list", index, "--skipped")[1] == "name,reason\n"


def test_skipped_files_are_listed_as_csv_and_as_json(run, index, tmp_path):
    names = ['a "b", c.png', "two\nlines.png"]
    for name in names:
        (tmp_path / name).write_bytes(b"x")
    assert run("index", "add", index, *(tmp_path / name for name in names))[0] == 1
    code, out, err = run("index", "list", index, "--skipped")
    assert (code, err) == (0, "")
    header, *rows = csv.reader(io.StringIO(out))
    assert header == ["name", "reason"]
    assert [name for name, _ in rows] == [str(tmp_path / name) for name in names]
    listed = json.loads(run("index", "list", index, "--skipped", "--json")[1])
    assert [[file["name"], file["reason"]] for file in listed] == rows


def test_keys_are_accepted_as_they_are_printed(run, photos, index):
    strange = photos / "two\nlines.png"
    shutil.copy(photos / "a" / "00.png", strange)
    run("index", "sync", index, photos)
    strange.unlink()  # other tests share the folder
    printed = "two\\nlines.png"
    found = run("search", "--index", index, "--key", "a/00.png", "--radius", 0)[1]
    assert printed in found.split()
    code, out, _ = run("search", "--index", index, "--key", printed, "-k", 1)
    assert (code, out.split()[-1]) == (0, "a/00.png")
    assert run("index", "remove", index, printed, "--dry-run")[1] == f"remove  {printed}\n"
    assert run("index", "remove", index, printed)[0] == 0
    assert run("search", "--index", index, "--key", printed)[0] == 2


def test_an_index_of_an_empty_folder(run, tmp_path, model):
    (tmp_path / "empty").mkdir()
    words = ["index", "sync", tmp_path / "e.index", tmp_path / "empty", "--model", model]
    assert run(*words)[0] == 2
    code, _, err = run(*words, "--allow-empty")
    assert code == 0, err
    assert run(*words)[0] == 0


def test_add_with_label_and_metadata_to_search_by(run, photos, index, write_photos, tmp_path):
    root = write_photos(tmp_path / "more", {"x": 3}, seed=5)
    code, _, err = run(
        "index", "add", index, root / "x" / "00.png", "--label", "guest", "--meta", "year=2021",
        "--meta", "camera=Nikon 1",
    )  # fmt: skip
    assert code == 0, err
    assert "1 added" in err
    run("index", "add", index, root / "x", "--meta", "year=1999")
    for where, count in (
        ("label=guest", 1),
        ("year<2000", 3),
        ("year>=2000", 0),
        ("label=a", 14),
        ("label=", 2),
    ):
        words = ["search", photos / "a" / "00.png", "--index", index, "-k", 50, "--where", where]
        assert len(run(*words)[1].splitlines()) == count, where


def test_info_and_verify(run, index, photos, model):
    run("index", "remove", index, "a/00.png")
    code, out, err = run("index", "info", index)
    assert (code, err) == (0, "")
    assert re.search(r"^bits +24$", out, re.MULTILINE)
    assert re.search(r"^items +41$", out, re.MULTILINE)
    assert not re.search("^(with a key|next|uri|skipped)", out, re.MULTILINE)
    assert str(model) in out
    assert str(photos) in out
    found = json.loads(run("index", "info", index, "--json")[1])
    assert found["bits"] == 24
    assert found["folder"] == str(photos)
    assert re.search(rf"^bytes +{found['bytes']:,}$", out, re.MULTILINE)
    code, out, err = run("index", "verify", index)
    assert (code, out) == (0, "")
    assert "nothing wrong was found" in err
    assert json.loads(run("index", "verify", index, "--json")[1])["ok"] is True
    with sqlite3.connect(index) as db:
        db.execute("UPDATE blocks SET crc = crc + 1")
    code, out, err = run("index", "verify", index)
    assert code == 1
    assert "block 0" in out
    assert "problem" in err
    code, out, _ = run("index", "verify", index, "--json")
    assert code == 1
    assert json.loads(out)["ok"] is False


def test_dedup_lists_groups(run, write_photos, model, tmp_path):
    root = write_photos(tmp_path / "p", {"a": 6})
    for name in ("copy.png", "copy2.png"):
        shutil.copy(root / "a" / "02.png", root / name)
    path = tmp_path / "a.index"
    run("index", "sync", path, root, "--model", model)
    page = tmp_path / "d.html"
    code, out, err = run("dedup", path, "--compare-files", "--html", page)
    assert code == 0, err
    assert "     0  copy.png  same bytes (1)\n" in out
    assert "3 items, confirmed\n" in out
    assert "expect one false pair in about" in err
    assert "byte for byte copies of another file: 2" in err
    assert "Likely duplicates" in page.read_text()
    words = ("dedup", path, "--json", "--radius", "24", "--code", "own", "--no-confirm")
    groups = json.loads(run(*words)[1])["groups"]
    assert [group["size"] for group in groups] == [8]
    table, script = tmp_path / "d.csv", tmp_path / "d.sh"
    code, _, err = run("dedup", path, "--csv", table, "--moves", script)
    assert code == 0, err
    assert table.read_text().startswith("group,keep,distance,span,confirmed,same_bytes,key,path\n")
    assert f"{root}-duplicates" in script.read_text()
    assert (root / "copy.png").exists()
    # Whoever forgets a value gives the next word instead, which must not be overwritten.
    for flag, ending in (("--html", ".html"), ("--csv", ".csv"), ("--moves", ".sh")):
        for mine in (root / "copy.png", path):
            before = mine.read_bytes()
            code, _, err = run("dedup", path, flag, mine)
            assert code == 2
            assert f"{flag} writes a file that ends in {ending}, got '{mine}'" in err
            assert mine.read_bytes() == before
    photo = root / "copy.png"
    before = photo.read_bytes()
    code, _, err = run("search", photo, "--index", path, "--html", photo)
    assert (code, "--html writes a file that ends in .html" in err) == (2, True)
    assert photo.read_bytes() == before
    assert run("dedup", path, "--move-to", tmp_path)[0] == 2
    assert run("dedup", path, "--keep", "worst")[0] == 2


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["index", "snyc", "x", "y"], 'Did you mean "sync"'),
        (["index", "sync", "INDEX", "PHOTOS", "--modle", "x"], "Did you mean --model?"),
        (["index", "sync", "INDEX", "--modle", "x"], "--modle. Did you mean --model?"),
        (["index", "sync", "new", "nowhere"], "there is no folder 'nowhere'"),
        (["index", "sync", "new", "PHOTOS/a/00.png"], "is a file; sync takes a folder"),
        (["index", "sync", "new", "EMPTY"], "holds no images"),
        (["index", "sync", "INDEX", "EMPTY"], "nothing was changed"),
        (["index", "sync", "INDEX", "EMPTY", "--allow-empty"], "is another folder: of 42"),
        (["index", "sync", "INDEX", "EMPTY", "--moved"], "add --allow-empty"),
        (["index", "remove", "INDEX", "--where", "labl!=a"], "Did you mean 'label'?"),
        (["index", "remove", "INDEX", "--where", "labl!=a", "--dry-run"], "the field 'labl'"),
        (["search", "--index", "INDEX", "--key", "a/00.png", "--where", "labl=a"], "'label'?"),
        (["search", "nowhere.jpg", "--index", "INDEX"], "there is no file 'nowhere.jpg'"),
        (["index", "sync", "PHOTOS", "PHOTOS/a"], "PHOTOS"),
        (
            ["index", "sync", "PHOTOS", "INDEX"],
            "an index is a file, and comes first",
        ),
        (["index", "sync", "PHOTOS", "new"], "and comes first: fisherhash index sync new"),
        (["index", "sync", "EMPTY", "new"], "is a folder, but an index is a file"),
        (["index", "sync", "PHOTOS/a/00.png", "PHOTOS"], "00.png"),
        (["index", "sync", "new", "PHOTOS", "--model", "nowhere"], "nowhere does not exist"),
        (["index", "sync", "new", "PHOTOS", "--fit", "itqq"], "Did you mean 'itq'?"),
        (["index", "sync", "new", "PHOTOS", "--fit", "itq", "--bits", "0"], "between 1 and 1024"),
        (["index", "sync", "new", "PHOTOS", "--bits", "8"], "--bits 8 needs codes that are fitted"),
        (["index", "sync", "new", "PHOTOS", "--fit", "itq", "--model", "m"], "exclude each other"),
        (["index", "add", "INDEX"], "no image given"),
        (["index", "add", "INDEX", "nowhere.jpg"], "there is no file or folder 'nowhere.jpg'"),
        (["index", "add", "INDEX", "PHOTOS", "--meta", "year"], "--meta takes NAME=VALUE"),
        (["index", "info", "nowhere"], "nowhere"),
        (["index", "info", "PHOTOS"], "PHOTOS"),
        (["index", "verify", "nowhere"], "nowhere"),
        (["index", "remove", "INDEX", "no such key"], "no such key"),
        (["search", "PHOTOS/a/00.png", "--index", "nowhere"], "nowhere"),
        (["search", "--index", "INDEX"], "nothing to search for"),
        (["search", "PHOTOS/a/00.png"], "--index"),
        (["search", "PHOTOS/a/00.png", "--index", "INDEX", "-k", "0"], "k must be at least 1"),
        (["search", "PHOTOS/a/00.png", "--index", "INDEX", "-k", "x"], "must be a whole number"),
        (["search", "PHOTOS/a/00.png", "--index", "INDEX", "--radius", "25"], "0 and 24 bits"),
        (["search", "PHOTOS/a/00.png", "--index", "INDEX", "--radius", "-1"], "0 and 1024"),
        (["search", "PHOTOS/a/00.png", "--index", "INDEX", "--where", "cat"], "label=cat"),
        (["search", "--index", "INDEX", "--key", "zz.png"], "zz.png"),
        (["dedup", "nowhere"], "nowhere"),
        (["dedup", "INDEX", "--radius", "25", "--code", "own"], "0 and 24 bits"),
        (["dedup", "INDEX", "--raduis", "2"], "Did you mean --radius?"),
    ],
)
def test_bad_use_is_a_sentence_and_exit_code_2(
    run, photos, index, tmp_path, monkeypatch, words, sentence
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    places = {"PHOTOS": str(photos), "INDEX": str(index), "EMPTY": str(tmp_path / "empty")}

    def fill(word):
        for name, place in places.items():
            word = word.replace(name, place)
        return word

    code, out, err = run(*map(fill, words))
    assert code == 2, err
    assert out == ""
    assert fill(sentence) in err
    assert err.splitlines()[-1].startswith("fisherhash: ")
    assert "Traceback" not in err
    assert not (tmp_path / "new").exists()


def test_a_query_that_is_no_image(run, index, tmp_path):
    (tmp_path / "notes.txt").write_text("text")
    code, out, err = run("search", tmp_path / "notes.txt", "--index", index)
    assert (code, out) == (1, "")
    assert "notes.txt: not a" in err


def test_images_that_can_be_read_are_answered_beside_one_that_cannot(run, photos, index, tmp_path):
    bad, good = tmp_path / "bad.jpg", photos / "a" / "00.png"
    bad.write_bytes(b"x")
    code, out, err = run("search", bad, good, "--index", index, "-k", "1")
    assert (code, out) == (0, f"{good}\n   1    0  a/00.png\n")
    assert f"skipped {bad}: not a" in err
    code, out, _ = run("search", bad, "--key", "a/00.png", "--index", index, "--json")
    assert (code, [one["query"] for one in json.loads(out)]) == (0, ["a/00.png"])
    assert run("search", bad, "--index", index)[0] == 1


def test_bad_files_are_named_and_a_folder_of_nothing_else_fails(run, photos, model, tmp_path):
    root = tmp_path / "p"
    root.mkdir()
    (root / "bad.jpg").write_bytes(b"x")
    code, _, err = run("index", "sync", tmp_path / "a.index", root, "--model", model)
    assert code == 1
    assert "skipped bad.jpg: not a" in err
    assert "no image could be read" in err
    shutil.copy(photos / "a" / "00.png", root)
    code, _, err = run("index", "sync", tmp_path / "a.index", root)
    assert code == 0
    assert "1 added, 0 updated, 0 removed, 0 unchanged, 1 skipped (0 of them new)" in err
    assert f"list them with: fisherhash index list {tmp_path / 'a.index'} --skipped" in err


def test_a_full_disk_leaves_the_index_as_it_was(index, tmp_path, write_photos, run_command_limited):
    root = write_photos(tmp_path / "more", {"x": 400}, seed=5)
    size = index.stat().st_size + 10_000
    done = run_command_limited(size, "index", "add", index, root)
    assert done.returncode == 1, done.stderr
    assert "Traceback" not in done.stderr
    done = command("index", "verify", index)
    assert done.returncode == 0, done.stderr + done.stdout
    done = command("index", "add", index, root, "--json")
    assert done.returncode == 0
    report = json.loads(done.stdout)
    assert report["added"] + report["unchanged"] == 400
    assert report["count"] == 442


def test_ctrl_c_says_how_to_go_on(run, photos, model, tmp_path, monkeypatch):
    def interrupted(*arguments, **options):
        raise KeyboardInterrupt

    words = ["index", "sync", tmp_path / "a.index", photos, "--model", model]
    with monkeypatch.context() as patch:
        patch.setattr(FileEncoder, "blocks", interrupted)
        code, _, err = run(*words)
    assert code == 130
    assert "the same command continues where it stopped" in err
    assert "42 added" in run(*words)[2]


def test_a_killed_import_goes_on(write_photos, model, tmp_path):
    root = write_photos(tmp_path / "p", {"a": 1500})
    path = tmp_path / "a.index"
    script = "from fisherhash.cli import main; main()"
    words = ["index", "sync", str(path), str(root), "--model", str(model)]
    process = subprocess.Popen([sys.executable, "-c", script, *words], stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and process.poll() is None:
        try:
            with Index.open(path) as index:
                if len(index):
                    break
        except Exception:
            pass
        time.sleep(0.02)
    process.kill()
    process.wait()
    with Index.open(path) as index:
        before = len(index)
    assert before >= 128
    done = command(*words, "--json")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["unchanged"] == before
    assert report["count"] == 1500
    assert command("index", "verify", path).returncode == 0


def test_encode_and_sync_use_the_built_in_hasher(run, photos, tmp_path, monkeypatch):
    """Which one it is, and how good, is tested with it; here a tiny one stands for it."""
    from fisherhash.model import builtin

    asked = []

    def load(name, *, device="cpu"):
        asked.append(name)
        hasher = make_hasher()
        hasher.origin = {"builtin": name}
        return hasher

    monkeypatch.setattr(Hasher, "load_builtin", load)
    image = photos / "a" / "00.png"
    code, out, err = run("encode", image)
    assert (code, err) == (0, "")
    assert out == f"{codes.to_hex(make_hasher().encode(image))[0]}  {image}\n"
    path = tmp_path / "a.index"
    assert run("index", "sync", path, photos)[0] == 0
    assert "built-in hasher" in run("index", "info", path)[1]
    assert rows(run("search", image, "--index", path)[1].splitlines())[0][1] == 0
    assert set(asked) == {builtin.DEFAULT_HASHER, "general2-128"}
    assert run("index", "sync", path, photos, "--model", builtin.DEFAULT_HASHER)[0] == 0
    code, _, err = run("encode", image, "--model", builtin.DEFAULT_HASHER + "x")
    assert code == 2
    assert "Did you mean" in err


def test_names_that_are_not_utf8_leave_as_they_came(photos, model, tmp_path):
    root = os.path.join(os.fsencode(tmp_path), b"caf\xe9")
    os.mkdir(root)
    shutil.copy(photos / "a" / "00.png", os.fsdecode(os.path.join(root, b"\xff.png")))
    path = tmp_path / "a.index"
    done = command("index", "sync", path, os.fsdecode(root), "--model", model)
    assert done.returncode == 0, done.stderr
    page = tmp_path / "a.html"
    done = command("search", photos / "a" / "00.png", "--index", path, "--html", page)
    assert (done.returncode, done.stdout) == (0, b"   1    0  \xff.png\n")
    assert page.read_bytes().count(b"data:image/") >= 2
    assert command("dedup", path, "--json").returncode == 0
    found = json.loads(command("search", "--index", path, photos / "a" / "00.png", "--json").stdout)
    assert os.fsencode(found[0]["results"][0]["key"]) == b"\xff.png"
    assert np.array_equal([found[0]["results"][0]["distance"]], [0])


def test_fields_that_only_look_like_numbers_are_texts():
    fields = cli.index._metadata(["a=Infinity", "b=NaN", "c=1e999", "d=7", "e=007"])
    assert fields == {"a": "Infinity", "b": "NaN", "c": "1e999", "d": 7, "e": "007"}


def test_names_that_would_steer_a_terminal_are_escaped():
    from fisherhash.errors import printable

    assert printable("a\x1b[31m\nb\udcff.jpg") == "a\\x1b[31m\\nb\udcff.jpg"
    assert printable("Übersee 写真.jpg") == "Übersee 写真.jpg"


def test_every_verb_takes_the_uri_of_another_kind_of_index(
    run, write_photos, model, tmp_path, monkeypatch
):
    monkeypatch.syspath_prepend(Path(__file__).parents[1] / "index" / "contract")
    monkeypatch.setitem(base.BACKENDS, "memory", "memory:MemoryIndex")
    root = write_photos(tmp_path / "p", {"a": 3, "b": 3})
    (root / "bad.png").write_bytes(b"x")
    uri = f"memory://{tmp_path}/x"
    code, out, _ = run("index", "sync", uri, root, "--model", model, "--dry-run")
    assert (code, len(out.splitlines())) == (0, 7)
    code, out, err = run("index", "sync", uri, root, "--model", model, "--json")
    assert code == 0, err
    assert json.loads(out)["added"] == 6
    assert "6 unchanged" in run("index", "sync", uri, root)[2]
    assert run("index", "list", uri, "--skipped")[1].startswith("name,reason\nbad.png,")
    shutil.copy(root / "a" / "00.png", tmp_path / "copy.png")
    assert run("index", "add", uri, tmp_path / "copy.png", "--label", "guest")[0] == 0
    facts = json.loads(run("index", "info", uri, "--json")[1])
    assert (facts["uri"], facts["count"], facts["folder"]) == (uri, 7, str(root))
    assert re.search(r"^bits +24$", run("index", "info", uri)[1], re.MULTILINE)
    code, out, _ = run("search", tmp_path / "copy.png", "--index", uri, "-k", "2")
    copy = (tmp_path / "copy.png").as_posix()
    assert (code, rows(out.splitlines())) == (0, [(1, 0, "a/00.png"), (2, 0, copy)])
    page = tmp_path / "page.html"
    words = ["search", "--key", "a/00.png", "--index", uri, "-k", "1", "--html", page]
    assert rows(run(*words)[1].splitlines()) == [(1, 0, copy)]
    assert "fisherhash · x" in page.read_text()
    code, out, _ = run("dedup", uri, "--code", "own", "--radius", "0", "--compare-files")
    assert (code, out.count("same bytes")) == (0, 2)
    assert run("index", "verify", uri)[:2] == (0, "")
    assert "remove  b/00.png" in run("index", "remove", uri, "--where", "label=b", "--dry-run")[1]
    assert "3 removed, 4 left" in run("index", "remove", uri, "--where", "label=b")[2]
    assert "1 removed, 3 left" in run("index", "remove", uri, copy)[2]
    code, _, err = run("index", "info", f"{uri}/nowhere")
    assert (code, "nowhere" in err) == (2, True)
    assert run("index", "info", "postgres-like://x")[0] == 2


def test_an_index_made_in_python_is_searched_from_the_command_line(
    run, photos, tmp_path, monkeypatch
):
    """With a built-in hasher, for which a tiny one stands, and with one that the index carries."""
    from fisherhash import ImageIndex
    from fisherhash.model.hasher import Hasher

    def load_builtin(name, *, device="cpu"):
        hasher = make_hasher()
        hasher.origin = {"builtin": name}
        return hasher

    monkeypatch.setattr(Hasher, "load_builtin", load_builtin)
    query = photos / "a" / "00.png"
    for name, hasher in (("own", make_hasher()), ("named", Hasher.load("general-64"))):
        with ImageIndex.create(tmp_path / name, hasher) as images:
            assert len(images.sync(photos).added) == 42
            want = [(m.distance, m.name) for m in images.search(query)[0]]
        out = run("search", query, "--index", tmp_path / name)[1]
        assert [(d, key) for _, d, key in rows(out.splitlines())] == want
        with ImageIndex.open(tmp_path / name) as images:
            assert [(m.distance, m.name) for m in images.search(query)[0]] == want


def test_the_index_may_be_one_of_the_images(run, photos, shared):
    """``search PHOTO INDEX`` and ``search INDEX PHOTO`` are ``search PHOTO --index INDEX``."""
    photo = photos / "a" / "00.png"
    expected = run("search", photo, "--index", shared)[:2]
    assert expected[0] == 0
    for words in ([photo, shared], [shared, photo]):
        assert run("search", *words)[:2] == expected


def test_a_folder_of_queries_is_its_images(run, photos, shared):
    code, out, _ = run("search", photos / "a", "--index", shared, "-k", "1", "--json")
    assert code == 0
    queries = [result["query"] for result in json.loads(out)]
    assert queries == sorted(p.as_posix() for p in (photos / "a").glob("*.png"))


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["PHOTOS"], "fisherhash index sync photos.index PHOTOS; then: fisherhash search IMAGE"),
        (["INDEX"], "nothing to search for: give an image, fisherhash search IMAGE --index INDEX"),
        (["--key", "a/00.png"], "--index is missing: fisherhash search IMAGE --index INDEX"),
        (["INDEX", "--index", "INDEX"], "INDEX is an index; search INDEX with images"),
    ],
)
def test_a_search_without_an_index_or_an_image_says_how(run, photos, shared, words, sentence):
    def fill(text):
        return text.replace("PHOTOS", str(photos)).replace("INDEX", str(shared))

    code, out, err = run("search", *map(fill, words))
    assert (code, out) == (2, "")
    name = f"{photos.name}.index"
    known = "--index INDEX" if words[0] == "--key" else None
    expected = sentence if known else fill(sentence.replace("photos.index", name))
    assert expected in err


def test_list_prints_keys_and_labels(run, photos, shared):
    keys = sorted(p.relative_to(photos).as_posix() for p in photos.rglob("*.png"))
    code, out, _ = run("index", "list", shared)
    assert code == 0
    assert out.splitlines() == [f"{key}\t{key.split('/')[0]}" for key in keys]
    assert run("index", "list", shared, "--limit", "2")[1].splitlines() == out.splitlines()[:2]
    _, out, _ = run("index", "list", shared, "--where", "label=b", "--json", "--limit", "1")
    (row,) = json.loads(out)
    assert row["key"] == next(key for key in keys if key.startswith("b/"))
    assert row["labels"] == ["b"]
    assert row["path"] == str(photos / row["key"])
    with Index.open(shared) as opened:
        assert bytes.fromhex(row["code"]) == opened.get(row["key"]).code
    assert "at least 1" in run("index", "list", shared, "--limit", "0")[2]
    assert "Did you mean 'label'?" in run("index", "list", shared, "--where", "labl=b")[2]


def test_labels_are_counted_and_match_without_case(run, photos, index, write_photos, tmp_path):
    more = write_photos(tmp_path / "more", {"x": 2})
    assert run("index", "add", index, more, "--label", "Ibis")[0] == 0
    count = len(list((photos / "a").glob("*.png")))
    code, out, _ = run("index", "list", index, "--labels", "--json")
    assert code == 0
    assert {row["label"]: row["count"] for row in json.loads(out)} == {
        p.name: len(list(p.glob("*.png"))) for p in photos.iterdir() if p.is_dir()
    } | {"Ibis": 2}
    assert run("index", "list", index, "--labels", "--where", "label=A")[1] == f"{count:>9,}  a\n"
    assert len(run("index", "list", index, "--labels", "--limit", "1")[1].splitlines()) == 1
    for label in ("Ibis", "ibis", "IBIS"):
        _, out, _ = run(
            "search", "--index", index, "--key", "a/00.png", "--where", f"label={label}"
        )
        assert len(out.splitlines()) == 2
    # Two labels that differ in case only: exactly one of them, or a question.
    key = next(iter(more.rglob("*.png"))).as_posix()
    assert run("index", "add", index, key, "--label", "iBIS")[0] == 0
    assert len(run("index", "list", index, "--where", "label=iBIS")[1].splitlines()) == 1
    code, _, err = run("index", "list", index, "--where", "label=ibis")
    assert code == 2
    assert "label=Ibis or label=iBIS?" in err
    assert (
        "would be: 1 removed"
        in run("index", "remove", index, "--where", "label=Ibis", "--dry-run")[2]
    )


def test_a_search_by_key_imports_nothing_heavy(shared):
    script = """if True:
        import sys
        from fisherhash.cli import main
        try:
            main(["search", "--key", "a/00.png", "--index", sys.argv[1]])
        except SystemExit as ended:
            print(ended.code)
        heavy = {"torch", "numba", "rich", "scipy", "matplotlib", "onnxruntime"}
        print(sorted(heavy & sys.modules.keys()))
    """
    done = subprocess.run(
        [sys.executable, "-c", script, shared], capture_output=True, text=True, check=False
    )
    assert done.stdout.splitlines()[-2:] == ["0", "[]"], done.stderr


@pytest.mark.parametrize("workers", ["0", "1", "auto"])
def test_the_number_of_workers_changes_no_code(run, photos, model, shared, tmp_path, workers):
    made = tmp_path / "made.index"
    code, _, err = run("index", "sync", made, photos, "--model", model, "--workers", workers)
    assert code == 0, err
    assert run("index", "list", made, "--json")[1] == run("index", "list", shared, "--json")[1]


@pytest.mark.parametrize("verb", [["index", "sync"], ["index", "add"], ["encode"], ["check-data"]])
@pytest.mark.parametrize(
    ("number", "words"),
    [("-2", "--workers must be auto or a whole number, got '-2'"), ("100000", "per core")],
)
def test_a_number_of_workers_that_is_none(run, photos, tmp_path, verb, number, words):
    place = [] if len(verb) == 1 else [tmp_path / "new"]
    code, _, err = run(*verb, *place, photos, "--workers", number)
    assert code == 2
    assert words in err
    assert not (tmp_path / "new").exists()


def test_device_auto_is_taken_everywhere(run, photos, model, shared, tmp_path):
    for words in (
        ["encode", photos / "a" / "00.png", "--model", model],
        ["index", "sync", tmp_path / "new", photos, "--model", model],
        ["index", "add", tmp_path / "new", photos],
        ["search", photos / "a" / "00.png", "--index", shared],
    ):
        code, _, err = run(*words, "--device", "auto")
        assert code == 0, err


def test_sync_takes_the_features_that_training_computed(run, write_photos, tmp_path, monkeypatch):
    photos, made = write_photos(tmp_path / "set", {"a": 20, "b": 20}), tmp_path / "model"
    words = [
        "--backbone",
        "tiny",
        "--image-size",
        "32",
        "--epochs",
        "1",
        "--batch-size",
        "8",
        "--bits",
        "12",
        "--frozen",
    ]
    assert run("train", photos, "--out", made, *words)[0] == 0
    fresh, reused = tmp_path / "fresh.index", tmp_path / "reused.index"
    decoded = []
    real = FileEncoder._computed

    def computed(self, name, files, rest):
        decoded.append(len(rest))
        return real(self, name, files, rest)

    monkeypatch.setattr(FileEncoder, "_computed", computed)
    assert (
        "40 images: features are on disk"
        in run("index", "sync", reused, photos, "--model", made)[2]
    )
    # Another set of files is another data set: everything is computed.
    (photos / "a" / "more.png").write_bytes((photos / "a" / "00.png").read_bytes())
    assert "on disk" not in run("index", "sync", fresh, photos, "--model", made)[2]
    assert decoded == [41]
    assert run("index", "remove", fresh, "a/more.png")[0] == 0
    with Index.open(fresh) as one, Index.open(reused) as other:
        assert {item.key: item.code for item in one.items()} == {
            item.key: item.code for item in other.items()
        }
