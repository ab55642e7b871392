"""Indexes of format 1, written by the code before notes were in the catalogue, still work."""

import json
import shutil
import tarfile
from pathlib import Path

import pytest

from fisherhash.errors import FisherhashError, UsageError
from fisherhash.index import Entry, Index

FIXTURE = Path(__file__).parents[2] / "fixtures" / "format-1.tar.xz"
FOLDER = {"folder": {"folder": "/tmp/fisherhash-fixture/format-1/photos"}}
OLD_FILES = ("folder.json", "skipped.csv")


@pytest.fixture(scope="module")
def unpacked(tmp_path_factory):
    folder = tmp_path_factory.mktemp("fixture")
    with tarfile.open(FIXTURE) as archive:
        archive.extractall(folder, filter="data")
    return folder / "format-1"


@pytest.fixture
def images(unpacked, tmp_path):
    return Path(shutil.copytree(unpacked / "photos.index", tmp_path / "photos.index"))


@pytest.fixture
def codes(unpacked, tmp_path):
    return Path(shutil.copytree(unpacked / "codes.index", tmp_path / "codes.index"))


@pytest.fixture(scope="module")
def expected(unpacked):
    return json.loads((unpacked / "expected.json").read_text())


def contents(folder):
    return {
        str(file.relative_to(folder)): file.read_bytes()
        for file in sorted(folder.rglob("*"))
        if file.is_file()
    }


def check_codes(index, expected):
    wanted = expected["codes"]
    found = index.search(wanted["queries"], 12)
    assert [found.ids.tolist(), found.distances.tolist()] == [wanted["ids"], wanted["distances"]]
    near = index.within(wanted["queries"], 10)
    assert [one.tolist() for one in (near.offsets, near.ids, near.distances)] == wanted["within"]
    kept = index.search(wanted["queries"], 5, where=["label=odd", "exif.iso>=300"])
    assert [kept.ids.tolist(), kept.distances.tolist()] == wanted["filtered"]
    assert index.count() == wanted["count"]
    assert index.keys() == wanted["keys"]
    assert index.info()["next_id"] == wanted["next_id"]
    assert index.verify() == []


def check_images(index, expected):
    wanted = expected["photos"]
    items = {item.key: item for item in index.items()}
    assert sorted(items) == wanted["keys"]
    assert [list(items[key].labels) for key in wanted["keys"]] == wanted["labels"]
    assert [items[key].metadata for key in wanted["keys"]] == wanted["metadata"]
    hits = index.search(index.codes([items["b/01.png"].id]), 5)[0]
    assert [[index.get(hit.id).key, hit.distance] for hit in hits] == wanted["search"]
    assert index.notes("sync") == FOLDER
    assert sorted(index.notes("skipped")) == wanted["skipped"]
    skip = index.notes("skipped")["a/broken.png"]
    assert skip["reason"].startswith("not a picture")
    assert (skip["size"], skip["mtime_ns"]) == (15, 1794790024578670526)
    assert index.model_folder() == index.path / "model"
    assert index.verify() == []


def test_reading_changes_nothing(images, codes, expected):
    before = [contents(folder) for folder in (images, codes)]
    with Index.open(codes) as index:
        check_codes(index, expected)
        assert index.info()["format"] == 1
        assert index.notes("sync") == {}
    with Index.open(images) as index:
        check_images(index, expected)
    assert [contents(folder) for folder in (images, codes)] == before


def test_the_first_write_moves_the_notes(images, expected):
    with Index.open(images) as reader:
        check_images(reader, expected)
        with Index.open(images, write=True) as index:
            check_images(index, expected)
            # Nothing to do, or a change that is refused: the index stays as it is.
            index.write_notes({"sync": FOLDER, "skipped": {"never there": None}})
            with pytest.raises(UsageError):
                index.add([Entry("b/01.png", index.codes([0])[0])], notes={"sync": {"x": 1}})
            assert index.info()["format"] == 1
            assert all((images / name).exists() for name in OLD_FILES)
            check_images(reader, expected)
            index.update([Entry("b/01.png", labels="b")], notes={"skipped": {"new.png": 7}})
            assert index.info()["format"] == reader.info()["format"] == 3
            assert not any((images / name).exists() for name in OLD_FILES)
            for one in (index, reader):
                assert one.notes("skipped").pop("new.png") == 7
                assert one.verify() == []
            index.write_notes({"skipped": {"new.png": None}})
            check_images(index, expected)
            check_images(reader, expected)
    with Index.open(images, write=True) as index:
        index.write_notes({"skipped": {"a/broken.png": None}, "sync": {"folder": None}})
        assert index.notes("sync") == index.notes("skipped") == {}
    assert Index.examine(images) == []


def test_compact_and_further_codes(codes, images, expected):
    with Index.open(codes, write=True) as index:
        assert index.compact()["dropped"] == 30
        check_codes(index, expected)
        assert index.info()["format"] == 3
        assert index.add_codes(index.codes([3])) == range(280, 281)
        index.remove(ids=[280])
        with pytest.raises(UsageError, match="holds codes of model ffffffffffff"):
            index.add_codes(index.codes([3]), fingerprint="a" * 64)
    with Index.open(images, write=True) as index:
        index.compact()
        check_images(index, expected)
    for folder in (codes, images):
        assert Index.examine(folder) == []


def test_a_file_that_a_killed_writer_did_not_delete_is_no_longer_read(images, expected):
    old = {name: (images / name).read_bytes() for name in OLD_FILES}
    with Index.open(images, write=True) as index:
        index.write_notes({"skipped": {"a/broken.png": None, "other": 1}})
    for name, data in old.items():
        (images / name).write_bytes(data)
        (images / f"{name}.new").write_bytes(data)
    with Index.open(images) as reader:
        assert reader.notes("skipped") == {"other": 1}
        assert reader.verify() == []
    Index.open(images, write=True).close()
    assert not any(images.glob("folder.json*"))
    assert not any(images.glob("skipped.csv*"))


def test_what_is_damaged_in_the_old_files_is_left_out(images):
    (images / "folder.json").write_text('{"folder"')
    lines = (images / "skipped.csv").read_text().splitlines()
    more = ["half", "b.png,gone,12,x", "c.png,gone,,", "caf\udce9.png,gone,1,2", "d,e,1,2,3"]
    text = "\n".join([*lines, *more]) + "\n"
    (images / "skipped.csv").write_text(text, errors="surrogateescape")
    left = {"a/broken.png", "c.png", "caf\udce9.png"}
    with Index.open(images, write=True) as index:
        assert index.notes("sync") == {}
        assert index.notes("skipped").keys() == left
        assert index.notes("skipped")["c.png"] == {"reason": "gone", "size": None, "mtime_ns": None}
        problems = index.verify()
        assert [problem.file for problem in problems] == ["folder.json", "skipped.csv"]
        assert "(3)" in problems[1].what
        index.write_notes({"sync": {"folder": {"folder": "/images"}}})
        assert index.notes("skipped").keys() == left
        assert index.verify() == []
        assert len(index) == 17


@pytest.mark.parametrize("name", OLD_FILES)
def test_an_old_file_that_cannot_be_read_stops_the_move(images, name):
    data = (images / name).read_bytes()
    (images / name).unlink()
    (images / name).mkdir()
    with Index.open(images, write=True) as index:
        with pytest.raises(FisherhashError, match=rf"{name} cannot be read"):
            index.remove(["b/01.png"])
        with pytest.raises(FisherhashError, match=rf"{name} cannot be read"):
            index.notes("sync")
        assert len(index) == 17
        assert [problem.file for problem in index.verify()] == [name]
        (images / name).rmdir()
        (images / name).write_bytes(data)
        index.remove(["b/01.png"])
        assert (index.notes("sync"), len(index.notes("skipped"))) == (FOLDER, 1)
