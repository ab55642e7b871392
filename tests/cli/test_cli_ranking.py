"""Second codes and rankings from the command line: train, evaluate, index, search."""

import json
import re

import pytest

from fisherhash import cli

TINY = ["--backbone", "tiny", "--epochs", "2", "--batch-size", "8", "--frozen"]


@pytest.fixture
def run(capsys):
    """Runs the command in this process: exit code, stdout, stderr."""

    def run(*words):
        with pytest.raises(SystemExit) as ended:
            cli.main([str(word) for word in words])
        captured = capsys.readouterr()
        return ended.value.code or 0, captured.out, captured.err

    return run


def test_from_training_to_a_search_that_orders_ties(run, photos, tmp_path):
    model, index = tmp_path / "m", tmp_path / "i"
    code, out, err = run(
        *("train", photos, "--out", model, *TINY, "--bits", 2, "--fine-bits", 24, "--json")
    )
    assert code == 0, err
    assert "second code of 24 bits, which searches count too: 3 bytes per image" in err
    # All images but the queries were trained on: nothing is left to compare the rankings with.
    assert "ranking by real-valued queries" not in err
    result = json.loads(out)
    assert (result["fine_bits"], result["fine_bytes"]) == (24, 3)
    assert not result.get("ranking")

    code, out, err = run("evaluate", "--model", model, "--data", photos)
    assert code == 0, err
    assert "mAP by Hamming distance" in out
    assert "mAP by real-valued queries" in out
    assert "measured: the first code, 2 bits; searches in an index use both codes" in err
    _, out, _ = run("evaluate", "--model", model, "--data", photos, "--json")
    assert 0 < json.loads(out)["real_valued_queries"]["map"] <= 1

    code, _, err = run("index", "sync", index, photos, "--model", model)
    assert code == 0, err
    _, out, _ = run("index", "info", index)
    assert re.search(r"second code, bits +24", out)
    assert re.search(rf"second codes, bytes +{42 * 3}", out)

    query = photos / "a" / "03.png"
    code, out, err = run("search", query, "--index", index, "--ranking", "hamming", "-k", 3)
    assert code == 0, err
    assert re.match(r" +1 +0.00 +0  a/03.png\n", out)
    assert re.search(r"\d+ images are at distance 0.*; both codes decide which 3 of them", err)
    assert "Ordered by both codes: the distance of the first plus 1/6 of that of the second" in err
    assert "columns: rank, this sum, distance of the first code, key" in err
    ties = ("search", query, "--index", index, "--ranking", "hamming", "-k", 3)
    code, out, err = run(*ties, "--fine-weight", "ties")
    assert code == 0, err
    assert re.match(r" +1 +0  a/03.png\n", out)
    assert re.search(r"\d+ images are at distance 0; the first 3 by the second code are shown", err)
    assert "both codes" not in err
    code, out, err = run(*ties, "--fine-weight", "1/4", "--json")
    assert code == 0, err
    (found,) = json.loads(out)
    assert found["fine_weight"] == 0.25
    assert [row["combined"] for row in found["results"]] == [
        row["distance"] + row["fine"] / 4 for row in found["results"]
    ]
    code, out, err = run(
        *("search", query, "--index", index, "--ranking", "real", "--json", "-k", 5),
        *("--html", tmp_path / "page.html"),
    )
    assert code == 0, err
    (found,) = json.loads(out)
    assert found["ranking"] == "real"
    rows = [(row["combined"], row["id"]) for row in found["results"]]
    assert rows == sorted(rows)
    assert all(
        row["combined"] == pytest.approx(row["distance"] + row["fine"] / 6, abs=1e-5)
        for row in found["results"]
    )
    assert found["ties"]
    page = (tmp_path / "page.html").read_text()
    assert "Bits that the model is surer of count more" in page
    assert "both codes decide which" in page
    assert "Ordered by both codes: the distance of the first plus 1/6" in page
    assert re.search(r"both codes <b>0\.00</b>, first <b>0\.00</b>", page)

    code, _, err = run("search", "--index", index, "--key", "a/03.png", "--ranking", "real")
    assert code == 2
    assert "'real' needs images or vectors" in err
    code, out, err = run("search", "--index", index, "--key", "a/03.png", "-k", 2, "--json")
    assert code == 0, err
    assert json.loads(out)[0]["ranking"] == "hamming"


def test_without_a_second_code_everything_is_as_before(run, photos, tmp_path):
    model, index = tmp_path / "m", tmp_path / "i"
    code, out, err = run(
        *("train", photos, "--out", model, *TINY, "--bits", 12, "--fine-bits", 0, "--json")
    )
    assert code == 0, err
    assert "second code" not in err
    assert "fine_bits" not in json.loads(out)
    assert run("index", "sync", index, photos, "--model", model)[0] == 0
    query = photos / "b" / "01.png"
    code, out, err = run("search", query, "--index", index, "--ranking", "real", "-k", 4)
    assert code == 0, err
    assert len(out.splitlines()) == 4
    assert "both codes" not in err
    for match in out.splitlines():
        assert re.fullmatch(r" +\d +\d+\.\d\d  \w/\d\d\.png", match)
    assert json.loads(run("index", "info", index, "--json")[1])["fine_bits"] == 0
