"""open_data: every form of data, and a sentence for everything that is none."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import numpy as np
import pytest

from fisherhash.data.sources import open_data, open_paths
from fisherhash.errors import UsageError


def fails(spec: object, *words: str, **options: bool) -> str:
    """The sentence of the UsageError, which must hold every word."""
    with pytest.raises(UsageError) as caught:
        open_data(spec, **options)
    for word in words:
        assert word in str(caught.value), (word, str(caught.value))
    assert caught.value.exit_code == 2
    return str(caught.value)


def test_class_folders(tmp_path, pictures):
    pictures.classes(tmp_path, {"cat": 2, "dög 2": 3})
    (tmp_path / "cat" / "kittens" / "deep").mkdir(parents=True)
    shutil.copy(tmp_path / "cat" / "000.png", tmp_path / "cat" / "kittens" / "deep" / "A B.PNG")
    data = open_data(tmp_path)
    assert data.classes == ("cat", "dög 2")
    assert list(data.names) == [
        "cat/000.png",
        "cat/001.png",
        "cat/kittens/deep/A B.PNG",
        "dög 2/000.png",
        "dög 2/001.png",
        "dög 2/002.png",
    ]
    assert data.labels.tolist() == [[1, 0]] * 3 + [[0, 1]] * 3
    assert data.labels.dtype == np.uint8
    assert data.reader.open(2).size == (16, 12)
    assert data.kind == "folder"
    assert data.name == tmp_path.name
    assert list(open_data(str(tmp_path)).names) == list(data.names)


def test_photos_without_labels(tmp_path, pictures):
    pictures.good(tmp_path)
    data = open_data(tmp_path)
    assert data.classes == ()
    assert data.labels.shape == (len(data), 0)
    assert data.kind == "photos"
    assert "Übung – 写真 №1.png" in data.names
    assert "UPPER.JPEG" in data.names


def test_loose_images_beside_classes_are_unlabelled_rows(tmp_path, pictures):
    pictures.classes(tmp_path, {"cat": 2, "dog": 2})
    pictures.quarters().save(tmp_path / "loose.png")
    data = open_data(tmp_path)
    assert data.names[-1] == "loose.png"
    assert data.labels[-1].tolist() == [0, 0]
    assert any("1 image outside the class sub-folders: without a label" in n for n in data.notes)


def test_fingerprint_changes_with_a_file(tmp_path, pictures):
    pictures.classes(tmp_path, {"cat": 2, "dog": 2})
    before = open_data(tmp_path).reader.fingerprint()
    assert open_data(tmp_path).reader.fingerprint() == before
    os.utime(tmp_path / "cat" / "000.png", ns=(1, 1))
    assert open_data(tmp_path).reader.fingerprint() != before


def test_empty_folder(tmp_path):
    fails(tmp_path, "is an empty folder", str(tmp_path), "sub-folder", "CSV")


def test_folder_without_images(tmp_path):
    (tmp_path / "notes.txt").write_text("x")
    (tmp_path / "more").mkdir()
    (tmp_path / "more" / "b.txt").write_text("x")
    fails(tmp_path, "holds no images", "2 x .txt")


def test_missing_path_and_mistyped_name(tmp_path):
    fails(tmp_path / "nowhere", "there is no file or folder", "nowhere")
    fails("cifar-10", "Did you mean 'cifar10'?")
    fails("", "no data was named")
    fails("  ", "no data was named")


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("a.png", "one image"),
        ("a.parquet", "neither a folder nor a CSV"),
    ],
)
def test_files_that_are_no_list(tmp_path, name, words):
    (tmp_path / name).write_bytes(b"x")
    fails(tmp_path / name, words)


@pytest.mark.parametrize("name", ["tiny100", "coco21"])
def test_named_stand_ins(tmp_path, pictures, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    fails(name, name, "FISHERHASH_DATA", "docs/data.md")
    root = pictures.classes(tmp_path / "sets" / name, {"a": 2, "b": 2})
    for part in ("train", "query", "database"):
        (root / f"{part}.txt").write_text("a/000.png\nb/001.png\n")
    monkeypatch.setenv("FISHERHASH_DATA", str(tmp_path / "sets"))
    assert open_data(name).name == name
    monkeypatch.delenv("FISHERHASH_DATA")
    monkeypatch.chdir(tmp_path / "sets")
    assert open_data(name).name == name


def test_open_paths_keeps_order_and_repeats(tmp_path, pictures, monkeypatch):
    pictures.classes(tmp_path, {"b": 2, "a": 2})
    monkeypatch.chdir(tmp_path)
    data = open_paths(["b/001.png", Path("a"), "b/001.png"])
    assert list(data.names) == ["b/001.png", "a/000.png", "a/001.png", "b/001.png"]
    assert data.labels.shape == (4, 0)
    first = np.asarray(data.reader.open(0))
    monkeypatch.chdir("/")
    assert np.array_equal(np.asarray(data.reader.open(3)), first)


def test_open_paths_bad_input(tmp_path):
    (tmp_path / "empty").mkdir()
    for paths, words in (
        ([tmp_path / "no.jpg"], "there is no file"),
        ([tmp_path / "empty"], "holds no images"),
        ([], "no images were given"),
    ):
        with pytest.raises(UsageError, match=words):
            open_paths(paths)


def test_no_torch_is_imported():
    import subprocess
    import sys

    code = "import sys, fisherhash.data, fisherhash.data.check; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
