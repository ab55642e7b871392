"""CSV files, list folders and stand-ins: both forms, odd names, and the line of every fault."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image

from fisherhash.data.lists import build_tiny100, open_lists
from fisherhash.data.lists import write_lists as write_stand_in
from fisherhash.data.protocols import PROTOCOLS, resolve
from fisherhash.data.sources import open_data
from fisherhash.errors import UsageError


@pytest.fixture
def root(tmp_path, pictures):
    return pictures.classes(tmp_path / "set", {"cat": 4, "dog": 4, "owl": 4})


def write_lists(root: Path, train: str, query: str, database: str, classes: str = "") -> Path:
    for part, text in (("train", train), ("query", query), ("database", database)):
        (root / f"{part}.txt").write_text(text, encoding="utf-8")
    if classes:
        (root / "classes.txt").write_text(classes, encoding="utf-8")
    return root


def fails(spec: Path, *words: str) -> None:
    with pytest.raises(UsageError) as caught:
        open_data(spec)
    for word in words:
        assert word in str(caught.value), (word, str(caught.value))


def csv_file(root: Path, text: str, name: str = "labels.csv") -> Path:
    path = root / name
    path.write_bytes(text.encode())
    return path


def test_csv_single_and_multi_label(root):
    path = csv_file(
        root, "path,label\ncat/000.png,cat;pet\ndog/000.png, dog ;pet\nowl/000.png,owl\n"
    )
    data = open_data(path)
    assert data.classes == ("cat", "dog", "owl", "pet")
    assert data.labels.tolist() == [[1, 0, 0, 1], [0, 1, 0, 1], [0, 0, 1, 0]]
    assert list(data.names) == ["cat/000.png", "dog/000.png", "owl/000.png"]
    assert data.reader.open(1).size == (16, 12)
    assert data.name == "labels"
    assert data.kind == "csv"


@pytest.mark.parametrize(
    "text",
    [
        "cat/000.png,cat\ndog/000.png,dog\n",
        "\ufeffpath,label\r\ncat/000.png,cat\r\n\r\ndog/000.png,dog\r\n",
        "Class,Filename\ncat,cat/000.png\ndog,dog/000.png\n",
        'path,label\n"cat/000.png","cat"\n"./dog/000.png","dog"\n',
        "path,label\ncat\\000.png,cat\ndog\\000.png,dog\n",
        "path,label,remark\ncat/000.png,cat,\ndog/000.png,dog,two, with comma\n",
    ],
    ids=["no header", "bom and crlf", "columns swapped", "quoted", "backslashes", "more columns"],
)
def test_csv_dialects(root, text):
    data = open_data(csv_file(root, text))
    assert list(data.names) == ["cat/000.png", "dog/000.png"]
    assert data.classes == ("cat", "dog")


def test_tsv_and_absolute_paths(root, tmp_path, pictures):
    pictures.quarters().save(tmp_path / "outside.png")
    text = f"path\tlabel\n{root / 'cat' / '000.png'}\tcat\n{tmp_path / 'outside.png'}\tdog\n"
    data = open_data(csv_file(root, text, "labels.tsv"))
    assert list(data.names) == ["cat/000.png", (tmp_path / "outside.png").as_posix()]
    assert data.reader.open(1).size == (40, 24)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", ["is empty", "path,label"]),
        ("path,label\n", ["header but no images"]),
        (
            "path,label\ncat/000.png,cat\ndog/000.png,\nowl/000.png\n",
            ["line 3", "label is missing", "2 of 3"],
        ),
        ("path,label\n,cat\n", ["line 2", "path is missing"]),
        (
            "path,label\ncat/000.png,cat\n\ncat/000.png,dog\n",
            ["line 4", "already in line 2", "cat;dog"],
        ),
        ("a;b;c\n1;2;3\n", ["line 1", "expected the header 'path,label'"]),
        ("path,colour\ncat/000.png,red\n", ["line 1", "no label column"]),
        ("path,label\nx/1.png,cat\nx/2.png,dog\n", ["none of the listed images", "x/1.png"]),
    ],
    ids=["empty", "header only", "labels", "path", "twice", "no header", "no label", "elsewhere"],
)
def test_csv_faults(root, text, words):
    fails(csv_file(root, text), "labels.csv", *words)


def test_csv_that_is_not_utf8(root):
    (root / "labels.csv").write_bytes(b"path,label\ncat/000.png,cat\nd\xf6g/000.png,dog\n")
    fails(root / "labels.csv", "line 3", "UTF-8")


def test_lists_with_class_folders(root):
    write_lists(
        root,
        "cat/001.png\ndog/001.png\n",
        "cat/000.png\r\ndog/000.png\r\n",
        "\ufeffcat/001.png\ncat/002.png\ndog/001.png\n\nowl/003.png\n",
        "owl\tStrigiformes, owls\ncat\tFelis catus\ndog\tCanis\n",
    )
    data = open_data(root)
    assert data.classes == ("owl", "cat", "dog")
    assert list(data.names) == [
        "cat/001.png",
        "cat/002.png",
        "dog/001.png",
        "owl/003.png",
        "cat/000.png",
        "dog/000.png",
    ]
    assert data.splits["train"].tolist() == [0, 2]
    assert data.splits["query"].tolist() == [4, 5]
    assert data.splits["database"].tolist() == [0, 1, 2, 3]
    assert data.splits["train"].dtype == np.int64
    assert data.labels.argmax(axis=1).tolist() == [1, 1, 2, 0, 1, 2]
    assert data.kind == "lists"


def test_lists_with_flags(root):
    write_lists(
        root,
        "cat/001.png 1 0 1\n",
        "cat/000.png\t1\t0\t1 \ndog/000.png 0 0 0\n",
        "cat/001.png 1 0 1\ndog/001.png 0 1 0\n",
    )
    data = open_data(root)
    assert data.labels.tolist() == [[1, 0, 1], [0, 1, 0], [1, 0, 1], [0, 0, 0]]
    assert len(data.classes) == 3


def test_paths_that_end_like_flags(root, pictures):
    for name in ("photo 1", "photo 0 1", "plain"):
        pictures.quarters().save(root / name, format="PNG")
    lines = "photo 1 1 0\nphoto 0 1 0 1\nplain 1 1\n"
    write_lists(root, lines, lines, lines)
    data = open_data(root)
    assert list(data.names) == ["photo 1", "photo 0 1", "plain"]
    assert data.labels.tolist() == [[1, 0], [0, 1], [1, 1]]


@pytest.mark.parametrize(
    ("lists", "words"),
    [
        (("a/b.png 1 0\n", "c.png\n", "d.png 0 1\n"), ["query.txt", "line 1", "no labels"]),
        (
            ("a.png 1 0 1\n", "b.png 1 0\n", "c.png 0 1 0\n", "x\ny\nz\n"),
            ["query.txt", "2 labels", "names 3"],
        ),
        (("a.png\n", "b/c.png\n", "b/d.png\n"), ["train.txt", "line 1", "no class folder"]),
        (("", "b/c.png\n", "b/d.png\n"), ["train.txt is empty"]),
        (
            ("cat/000.png\n", "eel/0.png\n", "cat/000.png\n", "cat\ndog\n"),
            ["query.txt", "'eel'", "classes.txt"],
        ),
        (
            ("cat/000.png 1 0\n", "dog/000.png 0 1\n", "cat/000.png 0 1\n"),
            ["train.txt", "other labels", "database.txt, line 1"],
        ),
        (("x/1.png\n", "x/2.png\n", "y/3.png\n"), ["none of the listed images"]),
        (
            ("cat/000.png\n", "dog/000.png\n", "cat/000.png\n", "cat\ncat\ndog\n"),
            ["names the class 'cat' twice"],
        ),
    ],
    ids=["mixed", "width", "no class", "empty", "unknown", "differ", "elsewhere", "class twice"],
)
def test_list_faults(root, lists, words):
    fails(write_lists(root, *lists), *words)


def test_one_list_missing_and_one_list_given(root):
    write_lists(root, "cat/000.png\n", "dog/000.png\n", "cat/000.png\n")
    fails(root / "train.txt", "one of three lists", str(root))
    (root / "train.txt").unlink()
    fails(root, "no train.txt", "all needed")


NAME = st.text(
    st.characters(exclude_categories=["Cs", "Cc", "Zl", "Zp"], exclude_characters='/\\"'),
    min_size=1,
    max_size=12,
).filter(lambda text: text == text.strip() and text.strip(".") and not text.startswith("\ufeff"))


@settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    st.dictionaries(
        NAME.map(lambda text: f"d/{text}.png"), st.integers(0, 7), min_size=1, max_size=8
    )
)
def test_any_name_survives_both_kinds_of_list(tmp_path, rows):
    (tmp_path / "d").mkdir(exist_ok=True)
    for name in rows:
        (tmp_path / name).touch()
    flags = {name: [number >> 2 & 1, number >> 1 & 1, number & 1] for name, number in rows.items()}
    text = "".join(f"{name} {' '.join(map(str, row))}\n" for name, row in flags.items())
    data = open_data(write_lists(tmp_path, text, text, text))
    assert list(data.names) == list(rows)
    assert data.labels.tolist() == list(flags.values())
    table = "path,label\n" + "".join(f'"{name}",label {n}\n' for name, n in rows.items())
    data = open_data(csv_file(tmp_path, table))
    assert list(data.names) == list(rows)


@pytest.mark.parametrize(("name", "classes"), [("tiny100", 100), ("coco21", 21)])
def test_lists_in_the_package_are_the_agreed_ones(tmp_path, name, classes):
    folder = write_stand_in(name, tmp_path / "called otherwise")
    with pytest.raises(UsageError, match="none of the listed images was found"):
        open_data(folder)
    first = (folder / "database.txt").read_text().split()[0]
    (folder / first).parent.mkdir()
    Image.new("RGB", (8, 8)).save(folder / first)
    data = open_lists(folder)
    split = resolve(data)
    assert split.protocol == name
    assert split.agreed is True
    assert len(data.classes) == classes
    assert (len(split.train), len(split.query), len(split.database)) == PROTOCOLS[name].sizes
    assert not set(split.query) & set(split.database)
    assert set(split.train) < set(split.database)
    assert data.labels.any(axis=1).all()


def test_a_changed_list_is_not_the_agreed_one(tmp_path):
    folder = write_stand_in("coco21", tmp_path / "coco21")
    lines = (folder / "query.txt").read_text().splitlines(keepends=True)
    (folder / "query.txt").write_text("".join(lines[1:]))
    (folder / "images").mkdir()
    Image.new("RGB", (8, 8)).save(folder / lines[1].split()[0])
    for line in lines:
        (folder / line.split()[0]).touch()
    split = resolve(open_data(folder))
    assert split.agreed is False
    assert "not the agreed lists" in split.notes[0]


def test_build_tiny100(tmp_path, monkeypatch):
    with pytest.raises(UsageError, match="is not Tiny-ImageNet"):
        build_tiny100(tmp_path, tmp_path / "tiny100")
    source = tmp_path / "tiny-imagenet-200"
    (source / "train" / "n01" / "images").mkdir(parents=True)
    (source / "val" / "images").mkdir(parents=True)
    (source / "train" / "n01" / "images" / "n01_7.JPEG").write_bytes(b"one")
    (source / "val" / "images" / "val_3.JPEG").write_bytes(b"two")

    def small(_: str, dest):
        dest.mkdir()
        (dest / "database.txt").write_text("n01/n01_7.JPEG\n")
        (dest / "query.txt").write_text("n01/val_3.JPEG\n")
        return dest

    monkeypatch.setattr("fisherhash.data.lists.write_lists", small)
    folder = build_tiny100(source, tmp_path / "tiny100")
    assert (folder / "n01" / "n01_7.JPEG").read_bytes() == b"one"
    assert (folder / "n01" / "val_3.JPEG").read_bytes() == b"two"
    (source / "val" / "images" / "val_3.JPEG").unlink()
    with pytest.raises(UsageError, match=r"val_3\.JPEG is missing"):
        build_tiny100(source, tmp_path / "again")


def test_unknown_stand_in(tmp_path):
    with pytest.raises(UsageError, match="Did you mean 'coco21'"):
        write_stand_in("coco22", tmp_path)
