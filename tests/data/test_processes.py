"""Worker processes that start before there is work for them."""

import subprocess
import sys

import pytest

from fisherhash.data import processes


@pytest.fixture
def started(monkeypatch):
    """What would be started: the steps of each process."""
    found = []
    monkeypatch.setattr(processes, "_start", lambda steps=(): found.append(steps))
    monkeypatch.setattr(processes, "_waiting", [])
    monkeypatch.setattr(processes, "most_workers", lambda: 4)
    return found


def write(folder, *sizes):
    folder.mkdir(parents=True, exist_ok=True)
    for number, size in enumerate(sizes):
        (folder / f"{number}.jpg").write_bytes(bytes(size))
    return folder


@pytest.mark.parametrize(
    ("count", "expected"), [(None, 3), (1, 1), (2, 2), (200, 3), (0, 0)], ids=str
)
def test_there_are_no_more_than_images_and_cores(started, tmp_path, monkeypatch, count, expected):
    monkeypatch.setattr(processes, "WORTH_STARTING", 0.0)
    processes.start_early(write(tmp_path / "p", 1, 2, 3), count, lambda images: [images])
    assert started == [[3]] * expected
    write(tmp_path / "p", *range(9))
    started.clear()
    processes.start_early(tmp_path / "p", 200)
    assert started == [()] * 4


def test_little_work_hidden_files_and_missing_folders_start_nothing(started, tmp_path, monkeypatch):
    monkeypatch.setattr(processes, "WORTH_STARTING", 0.0025)
    write(tmp_path / "p" / ".thumbs", *range(9))
    (tmp_path / "p" / "notes.txt").write_text("no image")
    processes.start_early(write(tmp_path / "p", 1, 2), None)
    processes.start_early(tmp_path / "nowhere", None)
    assert started == []
    processes.start_early(write(tmp_path / "p" / "q", 1, 2), None)
    processes.start_early(tmp_path / "p", None)
    assert len(started) == 4


def test_folders_may_be_nested_deeply(started, tmp_path, monkeypatch):
    monkeypatch.setattr(processes, "WORTH_STARTING", 0.0)
    folder = tmp_path
    for _ in range(1050):
        folder = folder / "d"
        try:
            folder.mkdir()
        except OSError:
            pytest.skip("this file system has no paths of that length")
    write(folder, 1)
    try:
        processes.start_early(tmp_path, None)
    finally:  # pytest would remove them one inside the other
        (folder / "0.jpg").unlink()
        while folder != tmp_path:
            folder.rmdir()
            folder = folder.parent
    assert len(started) == 1


@pytest.mark.parametrize("sent", [b"", b"\x80\x05\x95"], ids=["nothing", "a part"])
def test_a_process_whose_parent_is_gone_ends_quietly(sent):
    command = [sys.executable, "-P", "-c", processes._BOOT]
    done = subprocess.run(command, input=sent, capture_output=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")
