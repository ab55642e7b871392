"""Disks that fail: the file is named, nothing is lost, and the diagnosis is right."""

import contextlib
import errno
import os
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest

from fisherhash.errors import FisherhashError, UsageError
from fisherhash.index import Entry, Index
from fisherhash.index.local import segments
from fisherhash.index.local.schema import INSERT_ITEM

sys.path.insert(0, str(Path(__file__).parent))
from faults import build_library, run_script

pytestmark = pytest.mark.skipif(os.name != "posix", reason="faults of POSIX")


def codes(count, seed=0, width=8):
    return np.random.default_rng(seed).integers(0, 256, (count, width), dtype=np.uint8)


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    return build_library(tmp_path_factory.mktemp("faults"))


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """An index with items, tables and two commits."""
    path = tmp_path_factory.mktemp("whole") / "a.index"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(segments, "TAIL", 100)
        with Index.create(path, bits=64) as index:
            index.add(Entry(f"k{i}", code, labels="x") for i, code in enumerate(codes(200)))
            index.add_codes(codes(150_000, seed=1))
            index.build()
    return path


@pytest.fixture
def path(whole, tmp_path):
    return Path(shutil.copytree(whole, tmp_path / "a.index"))


# 1: errors while reading

READER = """
import fisherhash.index.local.segments as segments
segments.TAIL = 100
kind = sys.argv[2]
if kind == "mapped":
    import fisherhash.index.local.stored as stored
    stored.most_in_memory = lambda: 0
    segments.most_in_memory = lambda: 0
with Index.open(path) as index:
    print(len(index), flush=True)
    if kind != "early":
        first = index.search(codes(50, seed=3), 5)
    for file in [*path.glob("codes/*"), *path.glob("tables/*")]:
        os.truncate(file, 4096)
    try:
        again = index.search(codes(50, seed=3), 5)
        if kind != "early":
            assert (again.ids == first.ids).all()
        items = list(index.items())
        print("right", len(items))
    except FisherhashError as error:
        print(type(error).__name__, error)
    print([problem.file for problem in index.verify()])
"""


@pytest.mark.parametrize("kind", ["early", "late", "mapped"])
def test_a_reader_survives_files_that_are_cut_off(path, kind):
    done = run_script(READER, path, kind)
    assert done.returncode == 0, (done.returncode, done.stderr)
    count, answer, problems = done.stdout.splitlines()
    assert count == "150200"
    if kind == "late":
        assert answer == "right 150200"
    else:
        assert answer.startswith(f"DamagedError {path}/codes/000001.codes is cut off: 4096 bytes")
    assert "codes/000001.codes" in problems


def test_a_bad_sector_is_named_with_its_place(path, library):
    script = """
    print(*Index.examine(path), sep="\\n")
    with Index.open(path) as index:
        try:
            index.search(codes(1))
        except FisherhashError as error:
            print(type(error).__name__, error)
    """
    fault = {"path": ".codes", "call": "read", "from": 1 << 20}
    done = run_script(script, path, library=library, **fault)
    assert done.returncode == 0, done.stderr
    problem, error = done.stdout.splitlines()
    assert problem.startswith("codes/000001.codes cannot be read at byte ")
    assert "Input/output error" in problem
    assert error.startswith(f"CannotReadError {path}/codes/000001.codes cannot be read at byte ")
    assert "restore" not in (problem + error).lower()
    # It was the disk, not the index.
    assert Index.examine(path) == []


# 5: a commit whose outcome is not known

COMMIT = """
index = Index.open(path, write=True)
before = len(index)
Path(sys.argv[2]).touch()
try:
    index.add([Entry("new", codes(1, seed=9)[0])])
except FisherhashError as error:
    print(type(error).__name__, error)
if sys.argv[3] == "passing":
    os.unlink(sys.argv[2])
    print(len(index) - before)
    try:
        index.add([Entry("second", codes(1, seed=9)[0])])
        print("added")
    except FisherhashError as error:
        print(error)
os._exit(0)
"""


@pytest.mark.parametrize("lasts", ["lasting", "passing"])
def test_what_is_said_of_a_commit_that_could_not_be_flushed_is_true(path, library, tmp_path, lasts):
    """SQLite has written the whole commit to its log, and a kill makes it count."""
    switch = tmp_path / "on"
    fault = {"path": "catalogue.sqlite-wal", "call": "sync", "file": switch}
    if lasts == "passing":
        fault["count"] = 1
    done = run_script(COMMIT, path, switch, lasts, library=library, **fault)
    assert done.returncode == 0, done.stderr
    first, *rest = done.stdout.splitlines()
    with Index.open(path) as index:
        stored = "new" in index
        assert index.verify() == []
    if "Nothing was added or changed" in first:
        assert not stored
    else:
        assert "It is not known whether the last change was stored" in first
    if lasts == "passing":
        # The log could be emptied: nothing was stored, for certain, and the writer goes on.
        assert first.startswith("CannotWriteError")
        assert rest == ["0", "added"]
        with Index.open(path) as index:
            assert "second" in index
            assert "new" not in index


# 7: what is wrong: damaged, unreadable just now, full or misused


@pytest.mark.parametrize("write", [False, True])
def test_a_catalogue_that_cannot_be_read_is_not_called_damaged(path, library, write):
    script = f"""
    try:
        with Index.open(path, write={write}) as index:
            print(index.get("k7").id, index.count("label=x"))
    except FisherhashError as error:
        print(type(error).__name__, error)
    print(*Index.examine(path), sep="\\n")
    """
    fault = {"path": "catalogue.sqlite", "call": "read", "from": 8192}
    done = run_script(script, path, library=library, **fault)
    assert done.returncode == 0, done.stderr
    said = done.stdout
    assert "CannotReadError" in said
    assert "catalogue.sqlite cannot be read" in said
    assert "damaged" not in said
    assert "estore" not in said
    assert Index.examine(path) == []


@pytest.mark.parametrize("name", ["-shm", "-wal", "catalogue.sqlite", "head", "sums"])
def test_a_disk_that_is_full_at_the_creation_is_not_called_damage(tmp_path, library, name):
    script = """
    try:
        Index.create(path, bits=8)
        print("created")
    except FisherhashError as error:
        print(error)
    """
    fault = {"path": name, "errno": errno.ENOSPC}
    for call in ("write", "truncate"):
        place = tmp_path / f"{call}.index"
        done = run_script(script, place, library=library, call=call, **fault)
        assert done.returncode == 0, done.stderr
        assert "damaged" not in done.stdout
        assert "estore" not in done.stdout
        if done.stdout != "created\n":
            assert "no room" in done.stdout or "cannot be written" in done.stdout, done.stdout


def test_two_spellings_of_a_key_are_one_key(path):
    """The bytes of a name, escaped one by one although they are UTF-8, clashed with the name."""
    escaped = "caf\udcc3\udca9"
    with Index.open(path, write=True) as index:
        index.add([Entry(escaped, codes(1)[0])])
        for name in (escaped, "caf\u00e9"):
            with pytest.raises(UsageError, match="already has an item with the key"):
                index.add([Entry(name, codes(1)[0])])
            assert index.count({"key": name}) == 1
        assert index.keys()[-1] == "caf\u00e9"
        index.upsert([Entry(escaped, labels="both")])
        assert index.remove([escaped]) == 1


def test_rows_that_clash_are_not_called_damage(path):
    """A program that knows nothing of the lock has written to the catalogue."""
    with Index.open(path, write=True) as index:
        index.count()
        add_row = "INSERT INTO items VALUES (150200, 'theirs', '', 0, 0, '[]', '{}', 0)"

        def blocks():
            index._catalogue._db.execute(add_row)
            index._catalogue.write(INSERT_ITEM, [(150200, "mine", None, 0, 0, "[]", "{}", 0)])
            yield codes(1)

        with pytest.raises(FisherhashError, match=r"refused a change: UNIQUE") as caught:
            index.add_codes(blocks())
        assert "damaged" not in str(caught.value)
        assert "estore" not in str(caught.value)
        assert index.verify() == []


# 10, 16: the lock


def test_a_second_writer_after_the_lock_was_deleted(path):
    first = Index.open(path, write=True)
    first.add([Entry("one", codes(1)[0])])
    (path / "lock").unlink()
    with Index.open(path, write=True) as second:
        second.add([Entry("two", codes(1)[0])])
        for change in (
            lambda: first.add([Entry("three", codes(1)[0])]),
            lambda: first.add_codes(codes(10)),
            lambda: first.remove(["one"]),
            lambda: first.compact(),
        ):
            with pytest.raises(FisherhashError, match="lock was deleted or replaced"):
                change()
        second.add([Entry("four", codes(1)[0])])
        first.close()
        second.add([Entry("five", codes(1)[0])])
        assert second.verify() == []
    assert Index.examine(path) == []
    with Index.open(path) as index:
        assert index.keys()[-4:] == ["one", "two", "four", "five"]
        assert len(index) == 150_204


def test_a_state_that_another_process_changed_is_seen_before_anything_is_written(path):
    """Two writers whose locks are both right, as on a file system that has none."""
    first = Index.open(path, write=True)
    first.count()
    second = Index.open(path)
    os.rename(path / "lock", path / "kept")
    other = Index.open(path, write=True)
    other.add([Entry("other", codes(1)[0])])
    other.close()
    os.replace(path / "kept", path / "lock")
    state = first._snapshot.state
    # As if the first writer had looked just before the other one committed.
    view = first._catalogue.view
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(first._catalogue, "view", lambda: contextlib.nullcontext(state))
        with pytest.raises(FisherhashError, match="changed by another process"):
            first.add([Entry("mine", codes(1)[0])])
    assert view is not None
    first.add([Entry("mine", codes(1)[0])])
    first.close()
    assert second.keys()[-2:] == ["other", "mine"]
    second.close()
    assert Index.examine(path) == []


def test_a_forked_child_does_not_keep_the_lock(path):
    script = """
    import time
    index = Index.open(path, write=True)
    child = os.fork()
    if not child:
        try:
            index.count()
        except UsageError as error:
            print(error, flush=True)
        time.sleep(3)
        sys.exit()
    time.sleep(0.5)
    index.add([Entry("mine", codes(1)[0])])
    index.close()
    with Index.open(path, write=True) as again:
        again.add([Entry("later", codes(1)[0])])
    os.waitpid(child, 0)
    print(Index.examine(path), Index.open(path).keys()[-2:])
    """
    done = run_script(script, path)
    assert done.returncode == 0, done.stderr
    refused, rest = done.stdout.splitlines()
    assert "before this process was forked; open it again" in refused
    assert rest == "[] ['mine', 'later']"


# 17, 19, 20: names of drafts, the folder above, the end


def test_two_objects_store_the_same_tables_at_once(path, monkeypatch):
    """One in the middle of the other: each has a draft of its own."""
    from fisherhash.index.local import files

    monkeypatch.setattr(segments, "TAIL", 100)
    for table in (path / "tables").iterdir():
        table.unlink()
    seen, fsync = [], os.fsync

    def late(fd):
        name = os.readlink(f"/proc/self/fd/{fd}")
        if ".table" in name and not seen:
            seen.append(name)
            with Index.open(path) as other:
                other.build()
        return fsync(fd)

    monkeypatch.setattr(files.os, "fsync", late)
    with Index.open(path) as index:
        index.build()
    assert seen
    names = [table.name for table in (path / "tables").iterdir()]
    assert names == ["000001-150200.table"]
    assert Index.examine(path) == []


def test_the_folders_above_a_new_index_are_on_the_disk(tmp_path, monkeypatch):
    synced, fsync = [], os.fsync

    def note(fd):
        synced.append(os.readlink(f"/proc/self/fd/{fd}"))
        return fsync(fd)

    monkeypatch.setattr(os, "fsync", note)
    Index.create(tmp_path / "new" / "deep" / "a.index", bits=8).close()
    assert {str(tmp_path), str(tmp_path / "new"), str(tmp_path / "new" / "deep")} <= set(synced)


@pytest.mark.parametrize("call", ["unlink", "fsync", "ftruncate", "close", "open"])
def test_the_end_of_a_writer_raises_no_error_of_the_system(path, monkeypatch, call):
    index = Index.open(path, write=True)
    index.add([Entry("last", codes(1)[0])])

    def failing(*_, **__):
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(os, call, failing)
        index.close()
        index.close()
    with Index.open(path) as reader:
        assert "last" in reader
    with pytest.raises(UsageError, match="was closed"):
        index.count()
