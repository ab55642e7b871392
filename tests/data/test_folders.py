"""walk_images: every image once, with its state, whatever else lies in the folder."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from fisherhash.data.folders import FoundImages, ImageFile, open_folder, walk_images
from fisherhash.data.sources import open_data, open_paths
from fisherhash.errors import UsageError


def write(root: Path, *names: str) -> Path:
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(name.encode())
    return root


def keys(found: FoundImages) -> list[str]:
    return [file.key for file in found.files]


def close(monkeypatch, *folders: Path) -> None:
    """Let no one list these folders, whoever runs the tests."""
    scan, closed = os.scandir, {os.fspath(folder) for folder in folders}

    def refuse(path):
        if os.fspath(path) in closed:
            raise PermissionError(13, "Permission denied")
        return scan(path)

    monkeypatch.setattr("fisherhash.data.folders.os.scandir", refuse)


def test_files_are_sorted_by_key_with_their_state(tmp_path):
    write(tmp_path, "b/2.png", "b.png", "b/1.JPG", "Ä/x.webp", "a.gif", "b-c/1.png")
    found = walk_images(tmp_path)
    assert keys(found) == ["a.gif", "b-c/1.png", "b.png", "b/1.JPG", "b/2.png", "Ä/x.webp"]
    os.utime(tmp_path / "a.gif", ns=(5, 7))
    first = walk_images(os.fspath(tmp_path)).files[0]
    state = os.stat(tmp_path / "a.gif")
    assert first == ImageFile("a.gif", str(tmp_path / "a.gif"), 5, 7, state.st_ctime_ns)
    assert not found.broken
    assert not found.closed
    assert found.notes() == []


def test_what_is_skipped_is_counted_or_hidden(tmp_path):
    write(tmp_path, "a.png", ".a.png", ".git/b.png", "notes.txt", "c/more.TXT", "c/README")
    write(tmp_path, "model/x.png", "other/x.png")
    (tmp_path / "model" / "config.json").write_text(json.dumps({"fisherhash": "1"}))
    (tmp_path / "other" / "config.json").write_text("[]")
    found = walk_images(tmp_path)
    assert keys(found) == ["a.png", "other/x.png"]
    assert found.other == {".txt": 2, "no extension": 1, ".json": 1}
    assert found.own == ["model/"]
    own, note = found.notes()
    assert own.startswith("the folder model/ was left out: fisherhash wrote it")
    assert note.startswith("files that are not images were skipped: 2 x .txt, 1 x ")
    assert note.endswith((", 1 x .json", ", 1 x no extension"))


def test_a_link_to_a_folder_comes_after_the_folders(tmp_path):
    write(tmp_path, "z/deep/1.png")
    os.symlink(tmp_path / "z" / "deep", tmp_path / "a link")
    os.symlink(tmp_path, tmp_path / "z" / "loop")
    assert keys(walk_images(tmp_path)) == ["z/deep/1.png"]
    outside = write(tmp_path.parent / f"{tmp_path.name} outside", "2.png")
    os.symlink(outside, tmp_path / "b link")
    os.symlink(outside, tmp_path / "c link")
    assert keys(walk_images(tmp_path)) == ["b link/2.png", "z/deep/1.png"]


def test_what_cannot_be_opened_is_broken(tmp_path):
    write(tmp_path, "good.png")
    os.symlink(tmp_path / "nowhere", tmp_path / "gone.png")
    os.symlink(tmp_path / "self.png", tmp_path / "self.png")
    os.mkfifo(tmp_path / "pipe.png")
    found = walk_images(tmp_path)
    assert keys(found) == ["good.png"]
    assert found.broken["gone.png"] == "the file does not exist (moved or deleted?)"
    assert found.broken["pipe.png"] == "a pipe, socket or device, not a file"
    assert "a loop of links" in found.broken["self.png"]
    # A data set lists them all the same, so that reading and checking report them.
    assert list(open_folder(tmp_path).names) == ["gone.png", "good.png", "pipe.png", "self.png"]


def test_a_folder_that_cannot_be_listed(tmp_path, monkeypatch):
    write(tmp_path, "a/1.png", "b/1.png", "b/c/1.png")
    close(monkeypatch, tmp_path / "b" / "c")
    found = walk_images(tmp_path)
    assert keys(found) == ["a/1.png", "b/1.png"]
    assert found.closed == {"b/c/": "permission denied"}
    assert [found.is_hidden(key) for key in ("b/c/1.png", "b/1.png")] == [True, False]
    assert "b/c/ cannot be read (permission denied)" in found.notes()[0]
    for opened in (open_data, lambda folder: open_paths([folder])):
        with pytest.raises(UsageError, match=r"b/c cannot be read: permission denied"):
            opened(tmp_path)
    close(monkeypatch, tmp_path, tmp_path / "b")
    for opened in (walk_images, open_data, lambda folder: open_paths([folder / "b"])):
        with pytest.raises(UsageError, match="cannot be read: permission denied"):
            opened(tmp_path)


def test_a_link_from_one_class_to_all_does_not_mix_them(tmp_path):
    write(tmp_path, "cat/1.png", "dog/2.png")
    os.symlink(tmp_path, tmp_path / "cat" / "loop")
    os.symlink(tmp_path / "dog", tmp_path / "cat" / "friend")
    data = open_folder(tmp_path)
    assert list(data.names) == ["cat/1.png", "dog/2.png"]


def test_files_without_an_extension_are_images_if_they_begin_like_one(tmp_path, pictures):
    for number, kind in enumerate(("JPEG", "PNG", "GIF", "WEBP", "TIFF", "BMP", "AVIF")):
        pictures.quarters().save(tmp_path / f"image{number}", kind)
    (tmp_path / "README").write_text("BM is no image, nor is this")
    (tmp_path / "empty").touch()
    os.mkfifo(tmp_path / "pipe")
    found = walk_images(tmp_path)
    assert keys(found) == [f"image{number}" for number in range(7)]
    assert found.other == {"no extension": 3}
    data = open_data(tmp_path)
    assert [data.reader.open(number).size for number in range(7)] == [(40, 24)] * 7


def test_raw_files_are_listed_with_the_reason(tmp_path):
    write(tmp_path, "a.jpg", "b/IMG_1.CR2", "b/IMG_2.nef", "video.mp4", "notes.txt", "sheet.ods")
    write(tmp_path, "b/x.xmp", "b/y.aae")
    found = walk_images(tmp_path)
    assert set(found.broken) == {"b/IMG_1.CR2", "b/IMG_2.nef"}
    assert all("raw file of a camera" in reason for reason in found.broken.values())
    (note,) = found.notes()
    assert all(kind in note for kind in (".mp4", ".txt", ".ods", ".xmp", ".aae"))
    # A data set lists them, so that reading reports them.
    assert "b/IMG_1.CR2" in open_folder(tmp_path).names


def make_config(kind: str, path: Path) -> None:
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "deep":
        path.write_text("[" * 1_000_000)
    elif kind == "deep object":
        path.write_text('{"a":' * 200_000)
    elif kind == "20 GB":
        with path.open("wb") as file:
            file.write(b'{"fisherhash": 1, "x": "')
            file.truncate(20 << 30)
    elif kind == "folder":
        path.mkdir()
    elif kind == "link to a device":
        path.symlink_to("/dev/zero")
    elif kind == "loop":
        path.symlink_to(path)
    elif kind == "not UTF-8":
        path.write_bytes(b'{"fisherhash": "\xff\xfe"}')


@pytest.mark.parametrize(
    "kind",
    ["pipe", "deep", "deep object", "20 GB", "folder", "link to a device", "loop", "not UTF-8"],
)
def test_no_config_of_a_sub_folder_stops_a_walk(tmp_path, pictures, kind):
    pictures.classes(tmp_path, {"cat": 2, "dog": 2})
    make_config(kind, tmp_path / "dog" / "config.json")
    found = walk_images(tmp_path)
    assert len(found.files) == 4
    assert not found.own
    assert len(open_data(tmp_path)) == 4
    assert len(open_paths([tmp_path])) == 4
