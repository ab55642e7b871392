"""The folders that an index was filled from are noted outside of it."""

import os

import pytest

from fisherhash.index.images.creating import add_to_index, sync_index
from fisherhash.index.images.folders import is_inside, known_folders, remember_folders
from fisherhash.index.images.options import SyncOptions
from fisherhash.system.cache import cache_dir


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("FISHERHASH_CACHE", str(tmp_path / "cache"))


def test_sync_and_add_note_where_images_came_from(album, model, write_photos, tmp_path):
    path = tmp_path / "album.index"
    sync_index(path, album, SyncOptions(dry_run=True), model=model)
    assert known_folders(path) == []
    sync_index(path, album, model=model)
    assert known_folders(path) == [str(album)]
    other = write_photos(tmp_path / "other", {"x": 2})
    add_to_index(path, [other / "x" / "00.png"])
    assert known_folders(path) == [str(album), str(other / "x")]
    # A copy of an index, or one of a stranger, has no such folders.
    assert known_folders(tmp_path / "another.index") == []
    assert known_folders("postgresql://host/images") == []


def test_damaged_notes_are_no_notes(tmp_path, monkeypatch):
    remember_folders("x.index", [tmp_path])
    (record,) = (cache_dir() / "indexes").iterdir()
    for content in ("", "[]", "{", '{"folders": 7}', "[" * 100_000):
        record.write_text(content)
        assert known_folders("x.index") == []
    record.write_text('{"folders": [7, "/a"]}')
    assert known_folders("x.index") == ["/a"]
    # Without a folder to write to, nothing is noted.
    monkeypatch.setenv("FISHERHASH_CACHE", str(record))
    remember_folders("x.index", [tmp_path])
    assert known_folders("x.index") == []


def test_inside_means_after_links(tmp_path):
    inside, outside = tmp_path / "in", tmp_path / "out"
    inside.mkdir()
    outside.mkdir()
    (inside / "a").touch()
    (outside / "a").touch()
    (inside / "link").symlink_to(outside)
    (tmp_path / "way in").symlink_to(inside)
    assert is_inside(inside / "a", [str(inside)])
    assert is_inside(tmp_path / "way in" / "a", [str(inside)])
    assert is_inside(inside / "a", [str(tmp_path / "way in")])
    for path in (inside / "link" / "a", inside / ".." / "out" / "a", f"{inside}x", "a\0b"):
        assert not is_inside(os.fspath(path), [str(inside)])
