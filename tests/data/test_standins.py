"""The file lists of the stand-ins: those in the package are the agreed ones."""

from __future__ import annotations

import pytest
from PIL import Image

from fisherhash.data.lists import open_lists
from fisherhash.data.protocols import PROTOCOLS, resolve
from fisherhash.data.sources import open_data
from fisherhash.data.standins import build_tiny100, write_lists
from fisherhash.errors import UsageError


@pytest.mark.parametrize(("name", "classes"), [("tiny100", 100), ("coco21", 21)])
def test_lists_in_the_package_are_the_agreed_ones(tmp_path, name, classes):
    folder = write_lists(name, tmp_path / "called otherwise")
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
    folder = write_lists("coco21", tmp_path / "coco21")
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

    monkeypatch.setattr("fisherhash.data.standins.write_lists", small)
    folder = build_tiny100(source, tmp_path / "tiny100")
    assert (folder / "n01" / "n01_7.JPEG").read_bytes() == b"one"
    assert (folder / "n01" / "val_3.JPEG").read_bytes() == b"two"
    (source / "val" / "images" / "val_3.JPEG").unlink()
    with pytest.raises(UsageError, match=r"val_3\.JPEG is missing"):
        build_tiny100(source, tmp_path / "again")


def test_unknown_stand_in(tmp_path):
    with pytest.raises(UsageError, match="Did you mean 'coco21'"):
        write_lists("coco22", tmp_path)
