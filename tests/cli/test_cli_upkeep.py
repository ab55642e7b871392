"""The verbs that look after an index: repair, backup, copy, seal, and searches of what is left."""

import json

import numpy as np
import pytest

from fisherhash import cli
from fisherhash.index import Entry, Index


@pytest.fixture
def run(capsys):
    """Runs the command in this process: exit code, stdout, stderr."""

    def run(*words):
        with pytest.raises(SystemExit) as ended:
            cli.main([str(word) for word in words])
        captured = capsys.readouterr()
        return ended.value.code or 0, captured.out, captured.err

    return run


@pytest.fixture
def index(tmp_path):
    path = tmp_path / "a.index"
    codes = np.random.default_rng(0).integers(0, 256, (1500, 8), dtype=np.uint8)
    with Index.create(path, bits=64) as index:
        index.add(Entry(f"{i}.jpg", code, labels="x") for i, code in enumerate(codes))
        index.add_codes(codes[:10])
    return path


def damage(path, place=4100):
    (file,) = path.glob("codes/*.codes")
    data = bytearray(file.read_bytes())
    data[place] ^= 1
    file.write_bytes(data)


def test_repair_names_what_is_lost(run, index, tmp_path):
    damage(index)
    code, out, err = run("index", "repair", index)
    assert code == 0
    lines = out.splitlines()
    assert len(lines) == 512
    assert lines[0] == "lost  512.jpg  (id 512): its code is damaged"
    assert "998 items saved, 512 lost; the repaired index is" in err
    assert "note: codes/000001.codes has 4,096 bytes in blocks that are not what was written" in err
    code, out, err = run("index", "verify", tmp_path / "a.index-repaired")
    assert code == 0
    code, _, err = run("index", "repair", index)
    assert code == 2
    assert "exists already; give another folder with --out" in err
    damage(index, 1505 * 8)
    code, out, _ = run("index", "repair", index, "--out", tmp_path / "b", "--json")
    report = json.loads(out)
    assert (report["kept"], report["lost_count"]) == (1510 - 512 - 486, 512 + 486)
    assert report["lost_codes"] == [[1500, 1509]]
    assert report["lost"][0] == {"key": "512.jpg", "id": 512, "reason": "its code is damaged"}


def test_a_damaged_index_is_searched_only_by_explicit_wish(run, index, tmp_path):
    damage(index)
    code, _, err = run("search", "--index", index, "--key", "3.jpg")
    assert code == 1
    assert "000001.codes is damaged" in err
    page = tmp_path / "page.html"
    wish = ("search", "--index", index, "--key", "3.jpg", "--skip-damaged", "-k", "3")
    code, out, err = run(*wish, "--html", page)
    assert code == 0
    assert len(out.splitlines()) == 3
    assert "Left out because they are damaged: 512 items" in err
    assert "Left out because they are damaged: 512 items" in page.read_text()
    code, out, _ = run(*wish, "--json")
    assert [result["unavailable"] for result in json.loads(out)] == [512]
    code, out, _ = run("search", "--index", tmp_path / "a.index-whole", "--key", "3.jpg")
    assert code == 2


def test_backup_and_copy(run, index, tmp_path):
    code, out, err = run("index", "backup", index, tmp_path / "b")
    assert (code, out) == (0, "")
    assert "made and checked, 1,510 items; 12,080 bytes of codes copied, 0 were there" in err
    with Index.open(index, write=True) as opened:
        opened.add_codes(np.zeros((2, 8), np.uint8))
    code, out, err = run("index", "backup", index, tmp_path / "b", "--json")
    assert "brought up to date and checked, 1,512 items" in err
    assert json.loads(out)["copied"] == 16
    code, out, err = run("index", "copy", index, tmp_path / "c", "--json")
    assert (code, json.loads(out)["count"]) == (0, 1512)
    assert "1,512 items, 1,512 copied, 128 items and searches compared" in err
    assert Index.examine(tmp_path / "c") == []
    code, _, err = run("index", "backup", "postgresql://x/y", tmp_path / "d")
    assert code == 2
    assert "index copy" in err


def test_seal_and_verify_with_a_key(run, index, tmp_path):
    key = tmp_path / "key"
    key.write_bytes(bytes(32))
    code, _, err = run("index", "seal", index, "--key", key)
    assert code == 0
    assert "files sealed in seal.json" in err
    code, out, err = run("index", "verify", index, "--key", key)
    assert (code, out) == (0, "")
    assert "as it was sealed" in err
    (index / "codes" / "more").write_text("")
    damage(index)
    code, out, err = run("index", "verify", index, "--key", key)
    assert (code, out) == (1, "changed  codes/000001.codes\nadded    codes/more\n")
    code, out, _ = run("index", "verify", index, "--key", key, "--json")
    assert json.loads(out)["added"] == ["codes/more"]
    key.write_bytes(bytes(31) + b"1")
    code, _, err = run("index", "verify", index, "--key", key)
    assert code == 1
    assert "was not made with this key, or was changed" in err
