"""The cache folder follows its variables."""

from __future__ import annotations

from pathlib import Path

from fisherhash.system.cache import cache_dir, data_dirs


def test_cache_dir(monkeypatch, tmp_path):
    monkeypatch.setenv("FISHERHASH_CACHE", str(tmp_path / "own"))
    assert cache_dir() == tmp_path / "own"
    monkeypatch.delenv("FISHERHASH_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_dir() == tmp_path / "fisherhash"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_dir() == tmp_path / ".cache" / "fisherhash"
    assert not cache_dir().exists()


def test_data_dirs(monkeypatch, tmp_path):
    monkeypatch.setenv("FISHERHASH_CACHE", str(tmp_path))
    assert data_dirs() == [tmp_path / "data"]
    monkeypatch.setenv("FISHERHASH_DATA", "/a:~/b")
    monkeypatch.setenv("HOME", "/home/x")
    assert data_dirs() == [Path("/a"), Path("/home/x/b"), tmp_path / "data"]
