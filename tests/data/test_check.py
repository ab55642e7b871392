"""check: a planted fault of every kind is named; sound data are called sound."""

from __future__ import annotations

import json
import shutil

import pytest
from PIL import Image

from fisherhash.data.check import check
from fisherhash.data.protocols import resolve
from fisherhash.data.sources import open_data


@pytest.fixture
def root(tmp_path, pictures):
    return pictures.classes(tmp_path / "set", {"cat": 5, "dog": 5})


def test_sound_data(root):
    data = open_data(root)
    report = check(data, resolve(data))
    assert report.ok
    assert "10 images, 2 classes of 5 to 5 images" in str(report)
    assert "nothing wrong was found" in str(report)
    assert report.to_json()["ok"] is True


@pytest.mark.parametrize("workers", [0, 2])
def test_planted_faults_are_named(root, pictures, workers):
    pictures.bad(root / "dog")
    shutil.copy(root / "cat" / "000.png", root / "cat" / "copy.png")
    shutil.copy(root / "cat" / "001.png", root / "dog" / "conflict.png")
    Image.open(root / "cat" / "002.png").save(root / "cat" / "same pixels.bmp")
    pictures.quarters().save(root / "loose.png")
    (root / "owl").mkdir()
    pictures.quarters(30, 30).save(root / "owl" / "single.png")
    report = check(open_data(root), workers=workers)
    assert not report.ok
    assert {item.name for item in report.unreadable} >= {"dog/cut.jpg", "dog/empty.jpg"}
    assert len(report.unreadable) == 8
    assert report.unlabelled == ["loose.png"]
    assert report.duplicates == [
        ["cat/000.png", "cat/copy.png"],
        ["cat/001.png", "dog/conflict.png"],
        ["cat/002.png", "cat/same pixels.bmp"],
    ]
    assert report.conflicts == [["cat/001.png", "dog/conflict.png"]]
    assert report.single_classes == ["owl"]
    assert report.class_sizes == {"cat": 7, "dog": 14, "owl": 1}
    text = str(report)
    for name in (
        "truncated",
        "loose.png",
        "cat/000.png = cat/copy.png",
        "same pixels.bmp",
        "different labels: 1",
        "owl",
        "and 3 more",
    ):
        assert name in text, (name, text)
    content = json.loads(json.dumps(report.to_json()))
    assert content["unreadable"][0].keys() == {"name", "reason"}
    assert len(content["unreadable"]) == 8


def test_overlap_between_lists(root):
    shutil.copy(root / "cat" / "000.png", root / "cat" / "again.png")
    (root / "train.txt").write_text("cat/001.png 1 0\ndog/001.png 0 1\n")
    (root / "query.txt").write_text("cat/000.png 1 0\ndog/001.png 0 1\ncat/003.png 0 0\n")
    (root / "database.txt").write_text("cat/again.png 1 0\ncat/001.png 1 0\ndog/001.png 0 1\n")
    data = open_data(root)
    report = check(data)
    assert report.overlaps == {
        "query in database": ["dog/001.png", "cat/000.png = cat/again.png"],
        "query in train": ["dog/001.png"],
    }
    assert report.unlabelled == ["cat/003.png"]
    text = str(report)
    assert "queries in the database: 2" in text
    mended = check(data, resolve(data))
    copy = "cat/000.png = cat/again.png"
    assert mended.overlaps == {"query in database": [copy], "query in train": []}
    assert any("taken out of the database" in note for note in mended.notes)


def test_photos_without_labels_are_no_fault(tmp_path, pictures):
    pictures.quarters().save(tmp_path / "a.png")
    pictures.quarters(20, 20).save(tmp_path / "b.png")
    report = check(open_data(tmp_path))
    assert report.ok
    assert "no labels" in str(report)
