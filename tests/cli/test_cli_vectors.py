"""Vectors on the command line: train, encode, index add and search with .npy files."""

import json
import re
from pathlib import Path

import numpy as np
import pytest

from fisherhash import Hasher
from fisherhash.index.base import Index

PAGE = Path(__file__).parents[2] / "docs" / "search.md"


@pytest.fixture
def here(tmp_path, monkeypatch, run):
    """A folder with vectors, their keys and a model."""
    monkeypatch.chdir(tmp_path)
    x = np.random.default_rng(0).normal(size=(60, 20)).astype(np.float32)
    np.save("x.npy", x)
    np.save("y.npy", np.arange(60) % 3)
    np.save("q.npy", x[[5, 9]])
    Path("keys.txt").write_text("".join(f"doc {i}\n" for i in range(60)))
    code, _, err = run(*words("train --features x.npy --method itq --bits 16 --out m"))
    assert code == 0, err
    assert "60 vectors of 20 dimensions" in err
    return tmp_path


def words(text):
    return text.split()


def test_vectors_go_from_a_file_to_search_results(here, run):
    add = words("index add v.index --features x.npy --keys keys.txt --model m")
    assert run(*add)[0] == 0
    assert "0 added, 0 updated, 0 removed, 60 unchanged" in run(*add)[2]
    code, out, _ = run(*words("search --features q.npy --index v.index -k 2 --json"))
    found = json.loads(out)
    assert code == 0
    assert [result["query"] for result in found] == ["row 0", "row 1"]
    for result, key in zip(found, ("doc 5", "doc 9"), strict=True):
        first = [row["key"] for row in result["results"] if row["distance"] == 0]
        assert key in first
    with Index.open("v.index") as index:
        assert index.fingerprint == Hasher.load("m").fingerprint()
    assert run("index", "verify", "v.index")[0] == 0


def test_codes_in_a_file_and_on_the_screen(here, run):
    expected = Hasher.load("m").encode_features(np.load("x.npy"))
    assert run(*words("encode --features x.npy --model m --out c.npz"))[0] == 0
    with np.load("c.npz") as found:
        np.testing.assert_array_equal(found["codes"], expected)
        assert (int(found["bits"]), found["names"][59]) == (16, "59")
    out = run(*words("encode --features x.npy --model m"))[1]
    assert out.splitlines()[59] == f"{expected[59].tobytes().hex()}  59"
    out, err = run(*words("encode --features x.npy --model m --bits 8"))[1:]
    assert out.splitlines()[59] == f"{expected[59, :1].tobytes().hex()}  59"
    assert "not trained for codes of 8 bits" in err
    listed = json.loads(run(*words("encode --features x.npy --model m --json"))[1])
    assert listed["codes"][59] == {"name": "59", "code": expected[59].tobytes().hex()}


def test_a_method_that_learns_from_labels(here, run):
    train = words("train --features x.npy --method dfh --bits 8 --epochs 2 --out d")
    code, _, err = run(*train)
    assert (code, "give them with --labels" in err) == (2, True)
    assert run(*train, "--labels", "y.npy")[0] == 0
    assert Hasher.load("d").classes == ("0", "1", "2")


def test_keys_by_default_are_row_numbers_and_never_replace_others(here, run):
    add = words("index add v.index --features x.npy --model m")
    assert run(*add)[0] == 0
    assert "60 unchanged" in run(*add)[2]
    np.save("x.npy", -np.load("x.npy"))
    code, _, err = run(*add)
    assert (code, "--keys FILE" in err) == (2, True)
    with Index.open("v.index") as index:
        assert index.keys()[:2] == ["0", "1"]
    # Keys of the user's own replace their items.
    keyed = words("index add k.index --features x.npy --keys keys.txt --model m")
    run(*keyed)
    np.save("x.npy", -np.load("x.npy"))
    assert "60 updated" in run(*keyed)[2]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("encode --features w.npy --model m", "21 dimensions; the model takes vectors of 20"),
        ("index add n.index --features w.npy --model m", "takes vectors of 20 dimensions"),
        ("search --features w.npy --index v.index", "takes vectors of 20 dimensions"),
        ("encode --features nan.npy --model m", "in 2 rows: 3, 7"),
        ("index add n.index --features nan.npy --model m", "in 2 rows: 3, 7"),
        ("train --features nan.npy --method itq --out n", "in 2 rows: 3, 7"),
        ("train --features none.npy --method itq --out n", "none.npy cannot be read"),
        ("train --features x.npy --method itq --out n --backbone tiny", "--backbone is about"),
        ("train . --features x.npy --method itq --out n", "DATA is about images"),
        ("train --out n", "DATA is missing"),
        ("train . --labels y.npy --out n", "--labels goes with --features"),
        ("encode a.png --features x.npy --model m", "exclude each other"),
        ("index add n.index --features x.npy", "--model MODEL"),
        ("index add n.index a.png --keys keys.txt", "--keys goes with --features"),
        ("index add n.index --features q.npy --keys keys.txt --model m", "60 keys for 2 vectors"),
        ("index add v.index --features x.npy --model other", "another model"),
        ("encode a.png --model m", "cannot encode images"),
        ("index add n.index a.png --model m", "cannot encode images"),
        ("index sync n.index photos --model m", "cannot encode images"),
        ("search a.png --index v.index", "cannot encode images"),
        ("encode --features x.npy", "1280 features that its backbone efficientnet-lite0"),
    ],
)
def test_bad_input(here, run, write_photos, line, message):
    run(*words("index add v.index --features x.npy --model m"))
    if "other" in line:
        run(*words("train --features x.npy --method lsh --bits 16 --out other"))
    x = np.load("x.npy")
    np.save("w.npy", np.pad(x, ((0, 0), (0, 1))))
    x[[3, 7], 2] = np.nan
    np.save("nan.npy", x)
    write_photos(Path("photos"), {"cat": 1})
    next(Path("photos").rglob("*.*")).rename("a.png")
    write_photos(Path("photos"), {"cat": 1})
    code, out, err = run(*words(line))
    assert (code, out) == (2, "")
    assert message in err
    assert "Traceback" not in err
    assert not Path("n.index").exists()
    assert not Path("n").exists()


def test_the_page_in_the_docs_runs(tmp_path, monkeypatch, run):
    """Its blocks, one after the other, with the output that it shows."""
    monkeypatch.chdir(tmp_path)
    section = re.search(r"^## Vectors .*?(?=^## )", PAGE.read_text("utf-8"), re.S | re.M)
    assert section is not None
    blocks = re.findall(r"```(python|sh|text)\n(.*?)```", section[0], re.S)
    assert {kind for kind, _ in blocks} == {"python", "sh", "text"}
    space, out = {}, ""
    for kind, text in blocks:
        if kind == "python":
            exec(text, space)
        elif kind == "text":
            assert out == text
        else:
            out = ""
            for line in text.replace("\\\n", " ").splitlines():
                code, printed, err = run(*line.split()[1:])
                assert code == 0, err
                out += printed
