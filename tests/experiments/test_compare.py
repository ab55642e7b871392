"""Comparisons: resumed after a kill, “–” where a method is not defined, one table."""

import json
import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
import torch
from fisherhash.experiments.compare import compare
from PIL import Image

from fisherhash import backbones
from fisherhash.errors import UsageError
from fisherhash.methods import base
from fisherhash.training.settings import Settings

QUICK = {"backbone": "tiny", "settings": Settings(epochs=2), "device": "cpu"}


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
    assert len(result.rows) == 8
    stored = json.loads((tmp_path / "out" / "results.json").read_text())
    assert len(stored["rows"]) == 8
    assert len(stored["protocol"]["checksum"]) == 64
    assert stored["rows"][0]["options"]["margin"] == 1.0
    table = (tmp_path / "out" / "table.md").read_text()
    assert "| method | 8 bits | 16 bits |" in table
    for name in ("dfh", "lsh"):
        (line,) = [line for line in table.splitlines() if line.startswith(f"| {name} |")]
        values = [
            row["evaluation"]["map"]
            for row in stored["rows"]
            if row["method"] == name and row["bits"] == 8
        ]
        assert f"{sum(values) / 2:.3f} ({min(values):.3f}–{max(values):.3f})" in line
    assert sum("left" in line for line in said) == 8


def test_a_wrong_request_is_an_error_and_not_a_dash(photos, tmp_path):
    arguments = {"out": tmp_path / "out", "names": ["lsh"], "bits": [8], "backbone": "tiny"}
    with pytest.raises(UsageError, match="cuda9"):
        compare(photos, device="cuda9", **arguments)
    assert not (tmp_path / "out" / "runs").exists()
    assert "–" not in compare(photos, device="cpu", **arguments).table


def test_other_pictures_or_weights_are_not_mixed_in(photos, tmp_path):
    arguments = {"out": tmp_path / "out", "names": ["lsh"], "bits": [8], **QUICK}
    compare(photos, **arguments)
    Image.new("RGB", (32, 32), "white").save(photos / "red" / "0.png")
    with pytest.raises(UsageError, match="another images"):
        compare(photos, **arguments)


def test_a_network_of_the_caller_is_left_as_it_was(photos, tmp_path):
    """And every cell of a fine-tuned comparison starts from it, not from the last cell's."""
    network = backbones.create("tiny")
    before = {key: value.clone() for key, value in network.state_dict().items()}
    arguments = {"names": ["dfh"], "bits": [8], "device": "cpu", "finetune": True}
    arguments["settings"] = Settings(epochs=2, head_epochs=1, batch_size=8)
    both = compare(photos, out=tmp_path / "a", backbone=network, seeds=2, **arguments)
    for key, value in network.state_dict().items():
        torch.testing.assert_close(value, before[key])
    alone = compare(photos, out=tmp_path / "b", backbone="tiny", seeds=2, **arguments)
    assert [row["evaluation"]["map"] for row in both.rows] == [
        row["evaluation"]["map"] for row in alone.rows
    ]


def test_what_is_done_is_not_done_again(photos, tmp_path):
    arguments = {"out": tmp_path / "out", "names": ["dfh"], "bits": [8], **QUICK}
    first = compare(photos, **arguments)
    path = tmp_path / "out" / "runs" / "dfh-8-0.json"
    before = path.stat().st_mtime_ns
    again = compare(photos, **arguments)
    assert path.stat().st_mtime_ns == before
    assert again.table == first.table


def test_other_settings_are_not_mixed_in(photos, tmp_path):
    compare(photos, out=tmp_path / "out", names=["lsh"], bits=[8], **QUICK)
    with pytest.raises(UsageError, match="another settings"):
        compare(
            photos,
            out=tmp_path / "out",
            names=["lsh"],
            bits=[8],
            backbone="tiny",
            settings=Settings(epochs=3),
        )


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"names": ["dfhh"], "bits": [8]}, "Did you mean 'dfh'"),
        ({"names": ["dfh"], "bits": [0]}, "between 1 and 1024"),
        ({"names": ["dfh"], "bits": []}, "no code length"),
        ({"names": ["dfh"], "bits": [8], "seeds": 0}, "at least 1"),
    ],
)
def test_bad_requests(photos, tmp_path, arguments, sentence):
    with pytest.raises(UsageError, match=sentence):
        compare(photos, out=tmp_path / "out", **arguments, **QUICK)
    assert not (tmp_path / "out" / "runs").exists()


def test_a_method_that_is_not_defined_gets_a_dash(photos, tmp_path, monkeypatch):
    class OneLabel(base.find("lsh")):
        info = base.MethodInfo(
            "onelabel", "t", "v", 2020, "https://x", "classes", False, "closed-form"
        )

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
    (row,) = [row for row in result.rows if row["method"] == "onelabel"]
    assert row["not_defined"] == "onelabel is not defined for images with several labels"


def test_a_run_that_fails_is_named_and_tried_again(photos, tmp_path, monkeypatch):
    class Wild(base.find("dfh")):
        info = base.MethodInfo("wild", "t", "v", 2020, "https://x", "classes", True, "gradient")

        def loss(self, outputs, batch):
            return {"loss": (outputs * float("nan")).sum()}

    monkeypatch.setitem(base._REGISTRY, "wild", Wild)
    result = compare(photos, out=tmp_path / "out", names=["wild", "lsh"], bits=[8], **QUICK)
    assert "lower the learning rate" in result.failed["wild-8-0.json"]
    assert "| lsh |" in result.table
    assert not (tmp_path / "out" / "runs" / "wild-8-0.json").exists()


def test_killed_and_continued(photos, tmp_path):
    """A real process, killed when its first run is on disk; the rest is done by the second."""
    script = (
        "import sys; from fisherhash.experiments.compare import compare; "
        "from fisherhash.training.settings import Settings; "
        "compare(sys.argv[1], out=sys.argv[2], names=['lsh', 'dfh', 'itq'], bits=[8, 12], "
        "backbone='tiny', settings=Settings(epochs=40), device='cpu')"
    )
    command = [sys.executable, "-c", script, str(photos), str(tmp_path / "out")]
    runs = tmp_path / "out" / "runs"
    process = subprocess.Popen(command, env={**os.environ, "OMP_NUM_THREADS": "1"})
    deadline = time.monotonic() + 60
    while not list(runs.glob("*.json")) and time.monotonic() < deadline:
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    done = {path.name: path.read_text() for path in runs.glob("*.json")}
    assert 1 <= len(done) < 6
    subprocess.run(command, check=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert len(list(runs.glob("*.json"))) == 6
    for name, content in done.items():
        assert (runs / name).read_text() == content
    assert len(json.loads((tmp_path / "out" / "results.json").read_text())["rows"]) == 6
