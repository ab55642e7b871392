"""The watch: an index follows its folder while the process runs."""

import contextlib
import signal
import sqlite3
import threading
import time

import numpy as np
import pytest
from PIL import Image

from fisherhash.index import Index
from fisherhash.index.images import creating
from fisherhash.index.images.creating import watch_folder
from fisherhash.index.images.image_index import ImageIndex

pytest.importorskip("watchfiles")


@pytest.fixture
def quick(monkeypatch):
    """Seconds are too long for a test."""
    monkeypatch.setattr(creating, "QUIET_MS", 60)
    monkeypatch.setattr(creating, "LOOK_MS", 100)


def write(path, seed):
    rng = np.random.default_rng(seed)
    Image.fromarray(rng.integers(0, 256, (24, 24, 3), dtype=np.uint8)).save(path)


class Watch:
    """A watch in a thread."""

    def __init__(self, uri, folder):
        self.reports, self.said, self.stop = [], [], threading.Event()
        self._options = {"workers": 0, "stop": self.stop, "say": self.said.append}
        self._thread = threading.Thread(target=self._run, args=(uri, folder), daemon=True)

    def _run(self, uri, folder):
        for report in watch_folder(uri, folder, **self._options):
            self.reports.append(report)

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(self, *_):
        self.stop.set()
        self._thread.join(20)
        assert not self._thread.is_alive()

    def wait(self, done):
        until = time.monotonic() + 30
        while not done():
            assert self._thread.is_alive()
            assert time.monotonic() < until, (self.reports, self.said)
            time.sleep(0.02)


@pytest.fixture
def synced(make_hasher, album, tmp_path):
    hasher = make_hasher()
    with ImageIndex.create(tmp_path / "album.index", hasher) as images:
        images.sync(album, workers=0)
    return tmp_path / "album.index", album


def test_changes_arrive_and_readers_see_them(quick, synced):
    uri, album = synced
    write(album / "before.png", 1)  # before the watch begins
    with Index.open(uri) as reader, Watch(uri, album) as watch:
        watch.wait(lambda: "before.png" in reader)
        write(album / "dogs" / "new.png", 2)
        watch.wait(lambda: "dogs/new.png" in reader)
        (album / "dogs" / "new.png").unlink()
        watch.wait(lambda: "dogs/new.png" not in reader)
        (album / "cats").rename(album / "lions")
        watch.wait(lambda: "lions/01.png" in reader and "cats/01.png" not in reader)
        (album / "notes.txt").write_text("no image")
    added = [key for report in watch.reports for key in report.added]
    assert added[:2] == ["before.png", "dogs/new.png"]


def test_a_sync_that_fails_is_tried_again(quick, synced, monkeypatch):
    uri, album = synced
    monkeypatch.setattr("fisherhash.index.local.file.WAIT_SECONDS", 0.1)
    with Index.open(uri) as reader, Watch(uri, album) as watch:
        with contextlib.closing(sqlite3.connect(uri)) as other:
            other.execute("BEGIN IMMEDIATE")
            write(album / "new.png", 3)
            watch.wait(lambda: watch.said)
            assert "new.png" not in reader
        watch.wait(lambda: "new.png" in reader)
    assert len(watch.said) == 1
    assert watch.said[0].endswith("; trying again")


def test_a_watch_changes_something_or_is_refused(synced, capsys):
    from fisherhash.cli import main

    uri, album = synced
    with pytest.raises(SystemExit) as ended:
        main(["index", "sync", str(uri), str(album), "--watch", "--dry-run"])
    assert ended.value.code == 2
    assert "exclude each other" in capsys.readouterr().err


def test_the_command_watches_until_it_is_interrupted(quick, synced, monkeypatch):
    from fisherhash.cli import main

    uri, album = synced
    said, began = [], threading.Event()

    def say(sentence):
        said.append(sentence)
        if sentence.startswith("watching"):
            began.set()

    monkeypatch.setattr("fisherhash.cli.index.say", say)

    def interrupt():
        began.wait(30)
        with Index.open(uri) as reader:
            write(album / "late.png", 9)
            until = time.monotonic() + 30
            while "late.png" not in reader and time.monotonic() < until:
                time.sleep(0.02)
        while not any(one.startswith("1 added") for one in said) and time.monotonic() < until:
            time.sleep(0.02)
        signal.raise_signal(signal.SIGINT)

    thread = threading.Thread(target=interrupt, daemon=True)
    thread.start()
    with pytest.raises(SystemExit) as ended:
        main(["index", "sync", str(uri), str(album), "--watch", "--workers", "0"])
    thread.join()
    assert ended.value.code == 130
    assert any(sentence.startswith("1 added") for sentence in said)
