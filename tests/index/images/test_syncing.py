"""Sync and add: only what changed is encoded, nothing is lost, bad files are listed."""

import contextlib
import errno
import importlib
import os
import shutil
import sqlite3
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from fisherhash.data.folders import walk_images
from fisherhash.data.images import UnreadableImage, load_image
from fisherhash.errors import FisherhashError, UsageError
from fisherhash.index import Entry, Index
from fisherhash.index.base import CannotWriteError
from fisherhash.index.images import choosing, encoding, image_index
from fisherhash.index.images.creating import add_to_index, sync_index
from fisherhash.index.images.image_index import ImageIndex
from fisherhash.index.images.options import SyncOptions
from fisherhash.model.hasher import Hasher
from fisherhash.model.head import FinishedHead


@pytest.fixture
def counted(monkeypatch):
    """The keys of the images that were encoded."""
    done = []
    encode = Hasher.encode_blocks

    def counting(hasher, source, indices=None, **options):
        if indices is not None:
            done.extend(source.names[i] for i in indices)
        return encode(hasher, source, indices, **options)

    monkeypatch.setattr(Hasher, "encode_blocks", counting)
    return done


@pytest.fixture
def path(album, model, tmp_path):
    """An index of the album."""
    sync_index(tmp_path / "album.index", album, model=model)
    return tmp_path / "album.index"


def keys(path):
    with Index.open(path) as index:
        return set(index.keys())


def skipped(path):
    with ImageIndex.open(path) as images:
        return dict(images.skipped())


def reason(data):
    """Why bytes are no image."""
    with pytest.raises(UnreadableImage) as raised:
        load_image(data)
    return str(raised.value)


def names(root):
    return {p.relative_to(root).as_posix() for p in root.rglob("*") if p.is_file()}


def counts(report):
    return len(report.added), len(report.updated), len(report.removed), report.unchanged


def test_a_new_index_holds_every_image_with_its_code_label_and_file(
    album, model, tmp_path, blocks_of, make_hasher
):
    path = tmp_path / "album.index"
    blocks_of(5)
    report = sync_index(path, album, model=model)
    assert counts(report) == (14, 0, 0, 0)
    assert report.count == 14
    assert report.skipped == []
    assert keys(path) == names(album)
    with Index.open(path) as index:
        assert index.bits == 24
        for key in names(album):
            item = index.get(key)
            state = (album / key).stat()
            assert item.path == str(album / key)
            assert (item.size, item.mtime_ns) == (state.st_size, state.st_mtime_ns)
            assert item.labels == (() if "/" not in key else (key.split("/")[0],))
            code = index.codes(np.array([item.id]))
            np.testing.assert_array_equal(code, make_hasher().encode(album / key))
    assert skipped(path) == {}
    assert list(tmp_path.glob(".*")) == []


def test_only_what_changed_is_encoded(path, album, counted):
    with Index.open(path) as index:
        ids = {key: index.get(key).id for key in set(index.keys())}
    counted.clear()
    assert counts(sync_index(path, album)) == (0, 0, 0, 14)
    assert counted == []
    shutil.copy(album / "dogs" / "02.png", album / "dogs" / "new.png")
    shutil.copy(album / "dogs" / "02.png", album / "cats" / "01.png")
    os.utime(album / "cats" / "02.png", ns=(1, 1))
    (album / "top.png").unlink()
    assert counts(sync_index(path, album)) == (1, 2, 1, 11)
    assert sorted(counted) == ["cats/01.png", "cats/02.png", "dogs/new.png"]
    assert keys(path) == names(album)
    with Index.open(path) as index:
        assert all(index.get(key).id == ids[key] for key in keys(path) & ids.keys())
        codes = index.codes(np.array([ids["cats/01.png"], ids["dogs/02.png"]]))
        np.testing.assert_array_equal(codes[0], codes[1])
        assert index.verify() == []
    assert counts(sync_index(path, album)) == (0, 0, 0, 14)


def test_a_dry_run_changes_nothing(album, model, tmp_path):
    path = tmp_path / "album.index"
    report = sync_index(path, album, SyncOptions(dry_run=True), model=model)
    assert set(report.added) == names(album)
    assert not path.exists()
    sync_index(path, album, model=model)
    (album / "top.png").unlink()
    shutil.copy(album / "dogs" / "02.png", album / "new.png")
    os.utime(album / "cats" / "02.png", ns=(1, 1))
    before = path.read_bytes()
    report = sync_index(path, album, SyncOptions(dry_run=True))
    assert (report.added, report.updated, report.removed) == (
        ["new.png"],
        ["cats/02.png"],
        ["top.png"],
    )
    assert path.read_bytes() == before


def test_bad_files_are_listed_and_not_decoded_again_until_they_change(
    album, model, tmp_path, counted, blocks_of
):
    path, bad = tmp_path / "album.index", album / "dogs" / "bad.jpg"
    blocks_of(3)
    bad.write_bytes(b"no image")
    (album / "empty.png").touch()
    (album / "notes.txt").write_text("no image either")
    report = sync_index(path, album, model=model)
    assert (counts(report), report.new_skipped) == ((14, 0, 0, 0), 2)
    assert skipped(path) == {
        "dogs/bad.jpg": reason(b"no image"),
        "empty.png": "the file is empty (0 bytes)",
    }
    assert any(": 1 x .txt" in note for note in report.notes)
    counted.clear()
    (album / "z.png").write_bytes(b"new")
    report = sync_index(path, album)
    # The new ones are listed first.
    assert [skip.name for skip in report.skipped] == ["z.png", "dogs/bad.jpg", "empty.png"]
    assert (counted, report.new_skipped) == (["z.png"], 1)
    report = add_to_index(path, [bad])
    assert (len(report.skipped), report.new_skipped, report.named) == (1, 0, 1)
    shutil.copy(album / "top.png", bad)
    (album / "empty.png").write_bytes(b"other")
    (album / "top.png").write_bytes(b"\x89PNG")
    planned = sync_index(path, album, SyncOptions(dry_run=True))
    assert "dogs/bad.jpg" not in dict(planned.skipped)
    counted.clear()
    report = sync_index(path, album)
    assert sorted(counted) == ["dogs/bad.jpg", "empty.png", "top.png"]
    assert (report.added, report.removed) == (["dogs/bad.jpg"], ["top.png"])
    assert skipped(path).keys() == {"empty.png", "top.png", "z.png"}
    for name in ("empty.png", "top.png", "z.png"):
        (album / name).unlink()
    assert sync_index(path, album).skipped == []


def test_what_cannot_be_opened_now_is_tried_again_without_a_model(
    album, model, tmp_path, counted, monkeypatch
):
    path = tmp_path / "album.index"
    (album / "link.png").symlink_to(tmp_path / "elsewhere.png")
    (album / "loop.png").symlink_to(album / "loop.png")
    os.mkfifo(album / "pipe.png")
    report = sync_index(path, album, model=model)
    assert {skip.name for skip in report.skipped} == {"link.png", "loop.png", "pipe.png"}
    assert "does not exist" in skipped(path)["link.png"]
    with monkeypatch.context() as patch:
        patch.setattr(image_index, "hasher_of", None)
        assert len(sync_index(path, album).skipped) == 3
    shutil.copy(album / "top.png", tmp_path / "elsewhere.png")
    assert sync_index(path, album).added == ["link.png"]


def test_a_file_that_may_not_be_read_stays_in_the_index_and_is_tried_again(
    path, album, monkeypatch
):
    os.utime(album / "top.png", ns=(5, 5))
    shutil.copy(album / "top.png", album / "new.png")
    system_open = os.open

    def denied(file, *arguments, **options):
        if str(file).endswith(("top.png", "new.png")):
            raise PermissionError(errno.EACCES, "Permission denied", file)
        return system_open(file, *arguments, **options)

    with monkeypatch.context() as patch:
        patch.setattr(os, "open", denied)
        report = sync_index(path, album)
        assert counts(report) == (0, 0, 0, 13)
        assert skipped(path) == {"new.png": "permission denied", "top.png": "permission denied"}
        patch.setattr(image_index, "hasher_of", None)
        assert len(sync_index(path, album).skipped) == 2
    assert "top.png" in keys(path)
    report = sync_index(path, album)
    assert (report.added, report.updated) == (["new.png"], ["top.png"])
    assert report.skipped == []


def test_a_folder_that_may_not_be_listed_keeps_its_images(path, album, monkeypatch):
    scan = os.scandir

    def denied(place):
        if os.fspath(place).endswith("dogs"):
            raise PermissionError(errno.EACCES, "Permission denied", place)
        return scan(place)

    with monkeypatch.context() as patch:
        patch.setattr(os, "scandir", denied)
        report = sync_index(path, album)
    assert counts(report) == (0, 0, 0, 10)
    assert any("dogs/ cannot be read" in note for note in report.notes)
    assert keys(path) == names(album)
    # The same for one that suddenly looks like a model.
    (album / "dogs" / "config.json").write_text('{"fisherhash": 1}')
    report = sync_index(path, album)
    assert any("dogs/ was left out: fisherhash wrote it" in note for note in report.notes)
    assert keys(path) == names(album) - {"dogs/config.json"}


def test_a_folder_that_vanished_or_is_empty_never_wipes_the_index(path, album, tmp_path):
    shutil.move(album, tmp_path / "away")
    with pytest.raises(UsageError, match="there is no folder"):
        sync_index(path, album)
    album.mkdir()
    with pytest.raises(UsageError, match=r"holds no images, but .* holds 14 of it; nothing was"):
        sync_index(path, album)
    assert len(keys(path)) == 14
    other = tmp_path / "other"
    other.mkdir()
    for options in ({}, {"allow_empty": True}):
        with pytest.raises(UsageError, match=r"is in sync with .*album, and .*is another folder"):
            sync_index(path, other, SyncOptions(**options))
    with pytest.raises(UsageError, match=r"holds 14 of another folder; nothing was removed"):
        sync_index(path, other, SyncOptions(moved=True))
    assert len(keys(path)) == 14
    report = sync_index(path, album, SyncOptions(allow_empty=True))
    assert len(report.removed) == 14
    assert keys(path) == set()


def test_another_folder_is_refused_and_a_moved_one_is_followed(
    path, album, write_photos, tmp_path, counted
):
    other = write_photos(tmp_path / "other", {"cats": 3}, seed=9)
    with pytest.raises(UsageError, match=r"is in sync with .*album.* would be removed"):
        sync_index(path, other)
    moved = tmp_path / "moved"
    shutil.move(album, moved)
    with pytest.raises(UsageError, match="add --moved"):
        sync_index(path, other)
    counted.clear()
    assert counts(sync_index(path, moved)) == (0, 0, 0, 14)
    assert counted == []
    with ImageIndex.open(path) as images:
        assert images.info()["folder"] == str(moved)
        (found,) = images.search(keys="top.png", k=3)
    assert len(found) == 3
    assert all(Path(hit.path).is_file() for hit in found)
    report = sync_index(path, other, SyncOptions(moved=True))
    assert keys(path) == names(other)
    assert len(report.removed) == 12


def test_items_that_came_another_way_are_left_alone(path, album, write_photos, tmp_path):
    other = write_photos(tmp_path / "other", {"x": 2}, seed=3)
    add_to_index(path, [other], labels=["guest"])
    with Index.open(path, write=True) as index:
        index.add([Entry("product-1", bytes(3)), Entry("a/b.png", bytes(3), size=3, mtime_ns=4)])
        index.add_codes(np.zeros((2, 3), np.uint8))
    (album / "top.png").unlink()
    assert counts(sync_index(path, album)) == (0, 0, 1, 13)
    guests = {(other / "x" / f"0{i}.png").as_posix() for i in (0, 1)}
    assert keys(path) == names(album) | guests | {"product-1", "a/b.png"}


def test_the_index_other_indexes_models_and_hidden_files_are_no_images(album, model, tmp_path):
    path = album / "album.index"
    shutil.copytree(model, album / "my model")
    shutil.copy(album / "top.png", album / "my model" / "plot.png")
    (album / ".hidden").mkdir()
    shutil.copy(album / "top.png", album / ".hidden" / "a.png")
    shutil.copy(album / "top.png", album / ".a.png")
    (album / "again").symlink_to(album)
    report = sync_index(path, album, model=model)
    assert len(report.added) == 14
    second = sync_index(album / "second.index", album, model=model)
    assert len(second.added) == 14
    assert not any(".index" in note for note in second.notes)
    assert counts(sync_index(path, album)) == (0, 0, 0, 14)


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ("missing", "there is no folder"),
        ("album/top.png", "is a file"),
        ("empty", "holds no images"),
        ("text", r"holds no images \(1 x .txt\)"),
        ("album", "at once"),
    ],
)
def test_folders_that_cannot_be_indexed(album, model, tmp_path, given, told):
    (tmp_path / "empty").mkdir()
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "a.txt").touch()
    path = tmp_path / (given if given == "album" else "new.index")
    with pytest.raises(UsageError, match=told):
        sync_index(path, tmp_path / given, model=model)
    assert path == album or not path.exists()


def test_what_is_no_index_is_not_made_one(album, model, tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "diary.txt").write_text("mine")
    for path in (tmp_path / "mine", album / "top.png", tmp_path / "diary.txt"):
        with pytest.raises(UsageError):
            sync_index(path, album, model=model)
    with pytest.raises(UsageError, match=r"an index is a file, and comes first: .* sync .*new"):
        sync_index(album, tmp_path / "new.index")
    assert (tmp_path / "diary.txt").read_text() == "mine"


# Models


def test_the_index_carries_its_model(album, model, tmp_path, make_hasher):
    own = shutil.copytree(model, tmp_path / "own")
    path = tmp_path / "album.index"
    sync_index(path, album, model=own)
    shutil.rmtree(own)
    shutil.copy(album / "top.png", album / "one more.png")
    moved = tmp_path / "elsewhere" / "renamed.index"
    moved.parent.mkdir()
    shutil.move(path, moved)
    assert sync_index(moved, album).added == ["one more.png"]
    with Index.open(moved) as index:
        assert index.model["path"] == str(own)
        assert index.fingerprint == make_hasher().fingerprint()


def test_another_model_is_refused(path, album, model, tmp_path, make_hasher):
    other = tmp_path / "other"
    make_hasher(seed=1).save(other)
    for call in (
        lambda: sync_index(path, album, model=other),
        lambda: add_to_index(path, [album / "top.png"], model=other),
    ):
        with pytest.raises(UsageError, match="were made by another model"):
            call()
    with pytest.raises(UsageError, match="codes of 24 bits, not 32"):
        sync_index(path, album, bits=32, fit="itq")
    with pytest.raises(UsageError, match="--fit is for a new index"):
        sync_index(path, album, fit="itq")
    shutil.copytree(model, tmp_path / "same")
    assert sync_index(path, album, model=tmp_path / "same").unchanged == 14


@pytest.mark.parametrize(
    "damage",
    ["DELETE FROM files", "UPDATE files SET bytes = x'00' WHERE name LIKE '%.safetensors'"],
)
def test_a_damaged_model_in_the_index_is_a_sentence(album, model, tmp_path, damage, monkeypatch):
    monkeypatch.setenv("FISHERHASH_CACHE", str(tmp_path / "cache"))
    path = tmp_path / "album.index"
    own = shutil.copytree(model, tmp_path / "own")
    sync_index(path, album, model=own)
    shutil.rmtree(own)
    with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as database:
        database.execute(damage)
    assert sync_index(path, album).unchanged == 14
    shutil.copy(album / "top.png", album / "new.png")
    with pytest.raises(FisherhashError):
        sync_index(path, album)
    assert len(keys(path)) == 14
    assert "model" in [problem.file for problem in ImageIndex.examine(path)]


def test_codes_without_hamming_distance_are_refused(album, model, tmp_path, monkeypatch):
    monkeypatch.setattr(FinishedHead, "hamming", False)
    with pytest.raises(UsageError, match="lsh are not compared by Hamming distance"):
        sync_index(tmp_path / "new.index", album, model=model)
    assert not (tmp_path / "new.index").exists()


def test_a_hasher_is_fitted_to_the_images(album, tmp_path, monkeypatch, counted):
    from fisherhash.training import fitting as training

    fit = training.fit
    monkeypatch.setattr(
        training, "fit", lambda *a, **options: fit(*a, **options, backbone="tiny", image_size=32)
    )
    (album / "bad.png").write_bytes(b"bad")
    path = tmp_path / "album.index"
    report = sync_index(path, album, fit="itq", bits=8)
    assert counts(report) == (14, 0, 0, 0)
    assert list(skipped(path)) == ["bad.png"]
    # Their codes are known from the fitting.
    assert counted == ["bad.png"]
    with Index.open(path) as index:
        assert index.bits == 8
        assert index.model["fitted"] == "itq"
        hasher = choosing.hasher_of(index)
        for key in names(album) - {"bad.png"}:
            code = index.codes(np.array([index.get(key).id]))
            np.testing.assert_array_equal(code, hasher.encode(album / key))
    assert sync_index(path, album, fit="itq", bits=8).unchanged == 14
    with pytest.raises(UsageError, match="learns from labels"):
        sync_index(tmp_path / "b.index", album, fit="dfh")
    with pytest.raises(UsageError, match="take fewer bits"):
        sync_index(tmp_path / "b.index", album, fit="itq")
    assert not (tmp_path / "b.index").exists()


# add


def test_add_gives_files_the_keys_that_sync_gives_them(album, model, tmp_path, counted):
    path = tmp_path / "album.index"
    report = add_to_index(path, [album / "top.png"], model=model)
    assert report.added == [(album / "top.png").as_posix()]
    path = tmp_path / "second.index"
    sync_index(path, album, model=model)
    counted.clear()
    assert add_to_index(path, [album / "cats", album / "top.png"]).unchanged == 5
    shutil.copy(album / "top.png", album / "dogs" / "zz.png")
    assert add_to_index(path, [album / "dogs"]).added == ["dogs/zz.png"]
    assert counted == ["dogs/zz.png"]
    assert sync_index(path, album).unchanged == 15


def test_labels_and_metadata_stay_when_a_image_changes(path, album, counted):
    counted.clear()
    report = add_to_index(path, [album / "top.png"], labels=["best"], metadata={"year": 2021})
    assert report.updated == ["top.png"]
    assert counted == []
    os.utime(album / "top.png", ns=(7, 7))
    assert sync_index(path, album).updated == ["top.png"]
    with Index.open(path) as index:
        item = index.get("top.png")
        assert (item.labels, item.metadata) == (("best",), {"year": 2021})
        assert item.mtime_ns == 7


def test_nothing_to_do_imports_no_torch(path, album, model):
    script = """if True:
        import sys
        from fisherhash.index.images.creating import sync_index
        print(sync_index(*sys.argv[1:3], model=sys.argv[3]).unchanged)
        print(sorted({"torch", "numba", "onnxruntime"} & sys.modules.keys()))
    """
    done = subprocess.run(
        [sys.executable, "-c", script, path, album, model],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == "14\n[]\n"


def test_a_new_index_is_wholly_there_or_not_at_all(album, model, tmp_path, monkeypatch):
    path = tmp_path / "album.index"

    def full(self, folder):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(Hasher, "save", full)
        with pytest.raises(FisherhashError, match="No space left"):
            sync_index(path, album, model=model)
    assert list(tmp_path.glob("*.index")) == list(tmp_path.glob(".*")) == []
    assert len(sync_index(path, album, model=model).added) == 14


def test_an_index_that_does_not_name_its_model_takes_one(album, model, tmp_path, make_hasher):
    path = tmp_path / "album.index"
    Index.create(path, bits=24, fingerprint=make_hasher().fingerprint()).close()
    with pytest.raises(UsageError, match="does not say which model made its codes"):
        sync_index(path, album)
    assert len(sync_index(path, album, model=model).added) == 14
    make_hasher(seed=1).save(tmp_path / "other")
    with pytest.raises(UsageError, match="another model"):
        add_to_index(path, [album], model=tmp_path / "other")


@pytest.mark.parametrize("error", [CannotWriteError("no room", "make room"), KeyboardInterrupt()])
def test_an_interrupted_import_goes_on_where_it_stopped(
    album, model, tmp_path, monkeypatch, blocks_of, error
):
    path, upsert, calls = tmp_path / "album.index", Index.upsert, []

    def failing(self, entries, **options):
        calls.extend([1] if entries else [])
        if len(calls) == 3:
            raise error
        return upsert(self, entries, **options)

    blocks_of(4)
    with monkeypatch.context() as patch:
        patch.setattr(Index, "upsert", failing)
        with pytest.raises(type(error)) as raised:
            sync_index(path, album, model=model)
    if isinstance(error, CannotWriteError):
        assert str(raised.value) == (
            "no room. What came before is in the index: 8 added, 0 updated, 0 removed; make room, "
            "then run the same command again: it goes on from there"
        )
    assert len(keys(path)) == 8
    assert counts(sync_index(path, album, model=model)) == (6, 0, 0, 8)
    assert keys(path) == names(album)


@pytest.mark.parametrize("was_good", [True, False])
def test_a_file_changed_under_the_same_size_and_time_is_noticed(path, album, counted, was_good):
    target, good = album / "cats" / "01.png", (album / "cats" / "01.png").read_bytes()
    for data in (good, good[::-1])[:: 1 if was_good else -1]:
        counted.clear()
        target.write_bytes(data)
        os.utime(target, ns=(7, 7))
        report = sync_index(path, album)
        assert counted == ["cats/01.png"]
    assert ("cats/01.png" in keys(path)) is not was_good
    assert ("cats/01.png" in dict(report.skipped)) is was_good


def test_a_copy_of_the_folder_is_not_encoded_again(path, album, tmp_path, counted):
    counted.clear()
    copied = shutil.copytree(album, tmp_path / "copy")
    shutil.rmtree(album)
    assert counts(sync_index(path, copied, SyncOptions(moved=True))) == (0, 0, 0, 14)
    assert counted == []
    (copied / "top.png").chmod(0o600)
    assert sync_index(path, copied).updated == ["top.png"]


def photo(path, taken=None, camera=None):
    exif = Image.Exif()
    if camera:
        exif[0x0110] = camera
    if taken:
        exif.get_ifd(0x8769)[0x9003] = taken
    rng = np.random.default_rng(len(os.fspath(path)))
    Image.fromarray(rng.integers(0, 256, (24, 24, 3), dtype=np.uint8)).save(path, exif=exif)


def metadata(path):
    with Index.open(path) as index:
        return {item.key: item.metadata for item in index.items()}


def test_photos_have_fields_to_filter_by(album, model, tmp_path):
    path = tmp_path / "album.index"
    photo(album / "may.jpg", "2021:05:30 10:00:00", "Kodak")
    photo(album / "june.jpg", "2021:06:01 10:00:00")
    sync_index(path, album, model=model)
    stored = metadata(path)
    assert stored["may.jpg"] == {"taken": "2021-05-30T10:00:00", "camera": "Kodak"}
    assert stored["top.png"] == {}
    with ImageIndex.open(path) as images:
        (found,) = images.search(keys="top.png", k=20, where="taken>=2021-06")
        assert [hit.name for hit in found] == ["june.jpg"]
        assert [item.key for item in images.index.items("camera=Kodak")] == ["may.jpg"]
    # What the user wrote stays beside what the file says, whatever changes first.
    add_to_index(path, [album / "may.jpg"], metadata={"trip": "Rome"})
    assert metadata(path)["may.jpg"] == {**stored["may.jpg"], "trip": "Rome"}
    photo(album / "may.jpg", "2022:05:30 10:00:00")
    sync_index(path, album)
    assert metadata(path)["may.jpg"] == {
        "taken": "2022-05-30T10:00:00",
        "camera": "Kodak",
        "trip": "Rome",
    }
    new = tmp_path / "new.jpg"
    photo(new, "2020:01:01 00:00:00", "Leica")
    add_to_index(path, [new], metadata={"camera": "borrowed"})
    assert metadata(path)[new.as_posix()] == {"taken": "2020-01-01T00:00:00", "camera": "borrowed"}


DEADLY = """
import os
from fisherhash.index.images.encoding import FileReader

class Deadly(FileReader):
    def open(self, index, *, enough=None):
        if self.path(index).endswith("dogs/01.png"):
            os._exit(7)
        return super().open(index, enough=enough)
"""


def test_a_decoder_that_dies_costs_its_image_only(album, model, tmp_path, monkeypatch):
    (tmp_path / "deadly_reader.py").write_text(DEADLY)
    path = tmp_path / "album.index"
    with monkeypatch.context() as patch:
        patch.syspath_prepend(tmp_path)
        patch.setattr(encoding, "FileReader", importlib.import_module("deadly_reader").Deadly)
        report = sync_index(path, album, model=model, workers=2)
    assert (len(report.added), list(skipped(path))) == (13, ["dogs/01.png"])
    assert sync_index(path, album).added == ["dogs/01.png"]


def test_files_above_a_limit_load_no_hasher_until_it_is_raised(path, album, monkeypatch):
    shutil.copy(album / "top.png", album / "large.png")
    monkeypatch.setenv("FISHERHASH_MAX_PIXELS", "100")
    assert "--max-pixels" in dict(sync_index(path, album).skipped)["large.png"]
    with monkeypatch.context() as patch:
        patch.setattr(image_index, "hasher_of", None)
        assert len(sync_index(path, album).skipped) == 1
    monkeypatch.setenv("FISHERHASH_MAX_PIXELS", "1000000")
    assert sync_index(path, album).added == ["large.png"]


def test_a_folder_behind_a_link_is_the_same_folder(path, album, tmp_path):
    (tmp_path / "link").symlink_to(album)
    assert counts(sync_index(path, tmp_path / "link")) == (0, 0, 0, 14)
    (album / "more").symlink_to(shutil.copytree(album / "dogs", tmp_path / "elsewhere"))
    assert len(sync_index(path, album).added) == 4
    assert {"more/00.png", "dogs/00.png"} < keys(path)


def test_known_codes_come_in_the_order_of_the_files(album, make_hasher):
    hasher = make_hasher()
    files = walk_images(album).files
    every = {files[n].key: code for n, code in enumerate(hasher.encode([f.path for f in files]))}
    for known in (list(every), list(every)[::3], list(every)[-2:], []):
        codes = {key: every[key] for key in known}
        blocks = list(
            encoding.FileEncoder(lambda: hasher, codes=codes, workers=0).blocks("some", files)
        )
        assert [n for block in blocks for n in block.indices.tolist()] == list(range(len(files)))
        found = np.concatenate([block.codes for block in blocks])
        np.testing.assert_array_equal(found, np.stack(list(every.values())))
