"""The verbs that look after an index: repair, backup, copy, and searches of what is left."""

import json
import sqlite3

import numpy as np
import pytest

from fisherhash.index import Entry, Index

BLOCK = 4096


@pytest.fixture
def index(tmp_path):
    """5,000 items, of which the first block holds 4,096, and ten codes without a key."""
    path = tmp_path / "a.index"
    codes = np.random.default_rng(0).integers(0, 256, (5000, 8), dtype=np.uint8)
    with Index.create(path, bits=64) as index:
        index.add(Entry(f"{i}.jpg", code, labels="x") for i, code in enumerate(codes))
        index.add_codes(codes[:10])
    return path


def damage(path, block):
    """Change one bit of the codes of a block."""
    with sqlite3.connect(path) as db:
        (codes,) = db.execute("SELECT codes FROM blocks WHERE block = ?", [block]).fetchone()
        data = bytes([codes[0] ^ 1]) + codes[1:]
        db.execute("UPDATE blocks SET codes = ? WHERE block = ?", [data, block])


def test_repair_names_what_is_lost(run, index, tmp_path):
    damage(index, 1)
    code, out, err = run("index", "repair", index)
    assert code == 0
    lines = out.splitlines()
    assert len(lines) == 5000 - BLOCK + 1
    assert lines[0].startswith("lost  4096.jpg  (id 4096): ")
    assert "4,096 items saved, 914 lost; the repaired index is" in err
    code, out, err = run("index", "verify", tmp_path / "a.index-repaired")
    assert code == 0, out
    code, _, err = run("index", "repair", index)
    assert code == 2
    assert "exists already" in err
    code, out, _ = run("index", "repair", index, "--out", tmp_path / "b", "--json")
    report = json.loads(out)
    assert (report["kept"], report["lost_count"]) == (BLOCK, 914)
    assert report["lost_codes"] == [[4096, 5009]]
    assert (report["lost"][0]["key"], report["lost"][0]["id"]) == ("4096.jpg", 4096)


def test_a_damaged_index_is_searched_only_by_explicit_wish(run, index, tmp_path):
    damage(index, 1)
    code, _, err = run("search", "--index", index, "--key", "3.jpg")
    assert code == 1
    assert "damaged" in err
    assert "block 1" in err
    page = tmp_path / "page.html"
    wish = ("search", "--index", index, "--key", "3.jpg", "--skip-damaged", "-k", "3")
    code, out, err = run(*wish, "--html", page)
    assert code == 0
    assert len(out.splitlines()) == 3
    assert "Left out because they are damaged: 914 items" in err
    assert "Left out because they are damaged: 914 items" in page.read_text()
    code, out, _ = run(*wish, "--json")
    assert [result["unavailable"] for result in json.loads(out)] == [914]


def test_backup_and_copy(run, index, tmp_path):
    code, out, err = run("index", "backup", index, tmp_path / "b")
    assert (code, out) == (0, "")
    assert "made and checked, 5,010 items" in err
    code, out, err = run("index", "copy", index, tmp_path / "c", "--json")
    assert (code, json.loads(out)["count"]) == (0, 5010)
    assert "5,010 items, 5,010 copied, 128 items and searches compared" in err
    for made in ("b", "c"):
        assert Index.examine(tmp_path / made) == []
    code, _, err = run("index", "backup", "postgresql://x/y", tmp_path / "d")
    assert code == 2
    assert "index copy" in err
