"""Comparisons: resumed after a kill, “–” where a method is not defined, one table."""

import json

import numpy as np
import pytest
from PIL import Image

from fisherhash.errors import UsageError
from fisherhash.experiments.reproduce import compare
from fisherhash.experiments.significance import t_interval
from fisherhash.methods import base
from fisherhash.training.settings import NetworkOptions, Settings

TINY = NetworkOptions(backbone="tiny", device="cpu")
QUICK = {"network": TINY, "settings": Settings(epochs=2)}


def runs(outcome):
    (part,) = outcome.results["parts"]
    return part["runs"]


@pytest.fixture
def photos(tmp_path):
    rng = np.random.default_rng(0)
    for colour, name in enumerate(("red", "green", "blue")):
        (tmp_path / "photos" / name).mkdir(parents=True)
        for i in range(12):
            pixels = rng.integers(0, 90, (32, 32, 3), dtype=np.uint8)
            pixels[..., colour] += 150
            Image.fromarray(pixels).save(tmp_path / "photos" / name / f"{i}.png")
    return tmp_path / "photos"


def test_a_table_and_a_json(photos, tmp_path):
    said = []
    result = compare(
        photos,
        out=tmp_path / "out",
        names=["dfh", "lsh"],
        bits=[8, 16],
        seeds=2,
        say=said.append,
        **QUICK,
    )
    assert not result.failed
    assert len(runs(result)) == 8
    stored = json.loads((tmp_path / "out" / "results.json").read_text())
    assert stored == result.results
    assert len(stored["parts"][0]["protocol"]["checksum"]) == 64
    assert runs(result)[0]["options"]["margin"] == 1.0
    table = (tmp_path / "out" / "table.md").read_text()
    assert result.table == table
    assert "| method | 8 bits | 16 bits |" in table
    assert "With default hyper-parameters, not tuned." in table
    means = {}
    assert [row["name"] for row in result.results["parts"][0]["rows"]] == ["lsh", "dfh"]
    for name in ("dfh", "lsh"):
        line, _real, _ties = [line for line in table.splitlines() if line.startswith(f"| {name} |")]
        values = [
            run["evaluation"]["map"]
            for run in runs(result)
            if run["row"] == name and run["bits"] == 8
        ]
        means[name] = sum(values) / 2
        shown = f"{means[name]:.3f} ± {t_interval(values):.3f}"
        assert shown in line.replace("**", "")
    assert means["lsh"] > means["dfh"]  # the best is first; the colours are easy for any method
    assert "<table" in (tmp_path / "out" / "table.html").read_text()
    assert sum("; about" in line for line in said) == 8


def test_a_wrong_request_is_an_error_and_not_a_dash(photos, tmp_path):
    arguments = {"out": tmp_path / "out", "names": ["lsh"], "bits": [8]}
    with pytest.raises(UsageError, match="cuda9"):
        compare(photos, network=NetworkOptions("tiny", device="cuda9"), **arguments)
    assert not (tmp_path / "out" / "runs").exists()
    assert "–" not in compare(photos, network=TINY, **arguments).table


def test_a_setting_that_one_method_has_no_use_for_does_not_end_the_comparison(photos, tmp_path):
    result = compare(
        photos,
        out=tmp_path / "out",
        names=["dfh", "itq", "sdh"],
        bits=[8],
        network=TINY,
        settings=Settings(epochs=2, step_weight=1.0),
    )
    lines = {line.split(" |")[0]: line for line in reversed(result.table.splitlines())}
    assert "–" in lines["| itq"]
    assert "–" in lines["| sdh"]
    assert "0." in lines["| dfh"]
    assert any(
        "neither outputs nor a class step" in run.get("not_defined", "") for run in runs(result)
    )


def test_other_images_or_weights_are_not_mixed_in(photos, tmp_path):
    arguments = {"out": tmp_path / "out", "names": ["lsh"], "bits": [8], **QUICK}
    compare(photos, **arguments)
    Image.new("RGB", (32, 32), "white").save(photos / "red" / "0.png")
    with pytest.raises(UsageError, match="different images"):
        compare(photos, **arguments)


def test_every_run_of_a_fine_tuned_comparison_starts_from_the_same_network(photos, tmp_path):
    """Not from the network that the run before it trained."""
    arguments = {
        "names": ["dfh"],
        "bits": [8],
        "network": NetworkOptions("tiny", device="cpu", finetune=True),
        "settings": Settings(epochs=2, head_epochs=1, batch_size=8),
    }
    both = compare(photos, out=tmp_path / "a", seeds=2, **arguments)
    compare(photos, out=tmp_path / "b", seeds=1, **arguments)
    alone = compare(photos, out=tmp_path / "b", seeds=2, **arguments)  # runs seed 1 only
    assert [run["evaluation"]["map"] for run in runs(both)] == [
        run["evaluation"]["map"] for run in runs(alone)
    ]
    assert "the network trained" in both.table


def test_what_is_done_is_not_done_again(photos, tmp_path):
    arguments = {"out": tmp_path / "out", "names": ["dfh"], "bits": [8], **QUICK}
    first = compare(photos, **arguments)
    (path,) = (tmp_path / "out" / "runs").rglob("dfh-8-0-*.json")
    before = path.stat().st_mtime_ns
    again = compare(photos, **arguments)
    assert path.stat().st_mtime_ns == before
    assert again.table == first.table


def test_other_settings_are_not_mixed_in(photos, tmp_path):
    compare(photos, out=tmp_path / "out", names=["lsh"], bits=[8], **QUICK)
    with pytest.raises(UsageError, match="different settings"):
        compare(
            photos,
            out=tmp_path / "out",
            names=["lsh"],
            bits=[8],
            network=TINY,
            settings=Settings(epochs=3),
        )


def test_a_folder_of_an_earlier_version_is_refused(photos, tmp_path):
    (tmp_path / "out" / "runs").mkdir(parents=True)
    (tmp_path / "out" / "settings.json").write_text("{}")
    with pytest.raises(UsageError, match="holds no comparison"):
        compare(photos, out=tmp_path / "out", names=["lsh"], bits=[8], **QUICK)
    assert len(list((tmp_path / "out").iterdir())) == 2


def test_the_same_folder_by_another_path_is_the_same_data(photos, tmp_path, monkeypatch):
    arguments = {"out": tmp_path / "out", "names": ["lsh"], "bits": [8], **QUICK}
    compare(photos, **arguments)
    monkeypatch.chdir(photos.parent)
    said = []
    compare("./photos", say=said.append, **arguments)
    assert said[-1] == "all 1 runs are done"


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"names": ["dfhh"], "bits": [8]}, "Did you mean 'dfh'"),
        ({"names": ["dfh"], "bits": [0]}, "between 1 and 1024"),
        ({"names": ["dfh"], "bits": []}, "no code length"),
        ({"names": [], "bits": [8]}, "no method given"),
        ({"names": ["dfh"], "bits": [8], "seeds": 0}, "at least 1"),
    ],
)
def test_bad_requests(photos, tmp_path, arguments, sentence):
    with pytest.raises(UsageError, match=sentence):
        compare(photos, out=tmp_path / "out", **arguments, **QUICK)
    assert not (tmp_path / "out" / "runs").exists()


def test_anybody_s_method_is_a_row(photos, tmp_path, monkeypatch):
    code = "from fisherhash.methods import find\n\n\nclass Mine(find('lsh')):\n    pass\n"
    (tmp_path / "rows_of_mine.py").write_text(code)
    monkeypatch.chdir(tmp_path)
    names = ["lsh", "rows_of_mine:Mine"]
    result = compare(photos, out=tmp_path / "out", names=names, bits=[8], **QUICK)
    assert not result.failed
    scores = {run["row"]: run["evaluation"]["map"] for run in runs(result)}
    assert scores["rows_of_mine:Mine"] == scores["lsh"]
    assert list((tmp_path / "out" / "runs").rglob("rows_of_mine_Mine-8-0-*.json"))


def test_a_method_that_is_not_defined_gets_a_dash(photos, tmp_path, monkeypatch):
    class OneLabel(base.find("lsh")):
        info = base.MethodInfo("onelabel", "t", "v", 2020, "https://x", "classes", False)

    monkeypatch.setitem(base._REGISTRY, "onelabel", OneLabel)
    rows = [
        f"{path.relative_to(photos.parent)},{path.parent.name};{'warm' if i % 2 else 'cold'}"
        for i, path in enumerate(sorted(photos.rglob("*.png")))
    ]
    several = photos.parent / "several.csv"
    several.write_text("path,label\n" + "\n".join(rows) + "\n")
    result = compare(several, out=tmp_path / "out", names=["lsh", "onelabel"], bits=[8], **QUICK)
    assert not result.failed
    assert "| onelabel | – |" in result.table
    (run,) = [run for run in runs(result) if run["row"] == "onelabel"]
    assert run["not_defined"] == "onelabel is not defined for images with several labels"
