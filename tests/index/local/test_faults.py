"""Disks that fail: the file is named, nothing is lost, and the diagnosis is right."""

import errno
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest

from fisherhash.errors import UsageError
from fisherhash.index import Entry, Index

sys.path.insert(0, str(Path(__file__).parent))
from faults import build_library, run_script

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="faults of Linux")


def codes(count, seed=0, width=8):
    return np.random.default_rng(seed).integers(0, 256, (count, width), dtype=np.uint8)


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    return build_library(tmp_path_factory.mktemp("faults"))


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    path = tmp_path_factory.mktemp("whole") / "a.index"
    with Index.create(path, bits=64) as index:
        index.add(Entry(f"k{i}", code, labels="x") for i, code in enumerate(codes(2000)))
        index.add_codes(codes(20_000, seed=1))
    return path


@pytest.fixture
def path(whole, tmp_path):
    return Path(shutil.copy(whole, tmp_path / "a.index"))


@pytest.mark.parametrize("write", [False, True])
def test_a_file_that_cannot_be_read_is_not_called_damaged(path, library, write):
    script = f"""
    for ask in (lambda index: index.get("k7"), lambda index: index.search(codes(1))):
        try:
            with Index.open(path, write={write}) as index:
                print(ask(index))
        except FisherhashError as error:
            print(type(error).__name__, error)
    print(*Index.examine(path), sep="\\n")
    """
    fault = {"path": "a.index", "call": "read", "from": 1 << 15}
    done = run_script(script, path, library=library, **fault)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count(f"CannotReadError {path} cannot be read: Input/output error") == 2
    assert "check the disk" in done.stdout.splitlines()[-1].lower()
    assert "estore" not in done.stdout
    # It was the disk, not the index.
    assert Index.examine(path) == []


WRITE = """
index = Index.open(path, write=True)
before = [index.count(), index.notes("n")]
open(sys.argv[2], "w").close()
for number, change in enumerate((
    lambda: index.add([Entry("new", codes(1)[0])], notes={"n": {"a": 1}}),
    lambda: index.upsert([Entry("k3", codes(1)[0], labels="y")]),
    lambda: index.add_codes(codes(50_000)),
    lambda: index.remove(["k5"], ids=range(100, 9000)),
    lambda: index.write_notes({"n": {"a": 2}}),
)):
    try:
        change()
        print("done")
    except FisherhashError as error:
        print(type(error).__name__, error)
    assert [index.count(), index.notes("n")] == before
    assert index.get("k3").labels == ("x",)
os.unlink(sys.argv[2])
assert index.verify() == []
index.add([Entry("afterwards", codes(1)[0])])
index.close()
"""


@pytest.mark.parametrize(
    ("call", "number", "says"),
    [
        ("write", errno.ENOSPC, "no room to write"),
        ("write", errno.EIO, "cannot be written|no room to write"),
        ("sync", errno.EIO, "cannot be written"),
    ],
)
def test_a_change_that_cannot_be_stored_leaves_everything(
    path, library, tmp_path, call, number, says
):
    switch = tmp_path / "on"
    fault = {"path": "a.index", "call": call, "errno": number, "file": switch}
    done = run_script(WRITE, path, switch, library=library, **fault)
    assert done.returncode == 0, (done.stdout, done.stderr)
    lines = done.stdout.splitlines()
    assert len(lines) == 5
    for line in lines:
        assert line.startswith(f"CannotWriteError {says.split('|')[0]}") or any(
            part in line for part in says.split("|")
        ), line
        assert "Nothing was added or changed" in line or "It is not known whether" in line
        assert "damaged" not in line
    with Index.open(path) as index:
        assert index.count() == 22_001
        assert index.keys()[-1] == "afterwards"
        assert index.verify() == []


COMMIT = """
index = Index.open(path, write=True)
index.count()
open(sys.argv[2], "w").close()
try:
    index.add([Entry("new", codes(1, seed=9)[0])])
except FisherhashError as error:
    print(type(error).__name__, error)
if sys.argv[3] == "passing":
    os.unlink(sys.argv[2])
    index.add([Entry("second", codes(1, seed=9)[0])])
os._exit(0)
"""


@pytest.mark.parametrize("lasts", ["lasting", "passing", "once"])
def test_what_is_said_of_a_commit_that_could_not_be_flushed_is_true(path, library, tmp_path, lasts):
    """SQLite has written the whole commit to its log, and a kill makes it count."""
    switch = tmp_path / "on"
    fault = {"path": "a.index-wal", "call": "sync", "file": switch}
    if lasts == "once":
        fault["count"] = 1
    done = run_script(COMMIT, path, switch, lasts, library=library, **fault)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("CannotWriteError"), done.stdout
    with Index.open(path) as index:
        stored = "new" in index
        assert index.verify() == []
        if lasts == "passing":
            assert "second" in index
    if "Nothing was added or changed" in done.stdout:
        assert not stored
    else:
        assert "It is not known whether the last change was stored" in done.stdout
        assert lasts != "once"


@pytest.mark.parametrize("call", ["write", "sync", "truncate"])
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO])
def test_a_disk_that_fails_at_the_creation_is_not_called_damage(tmp_path, library, call, number):
    script = """
    try:
        Index.create(path, bits=8)
        print("created")
    except FisherhashError as error:
        print(error)
    """
    folder = tmp_path / "folder"
    folder.mkdir()
    for skip in (0, 1, 3, 8):
        fault = {"path": "a.index", "call": call, "errno": number, "skip": skip}
        done = run_script(script, folder / "a.index", library=library, **fault)
        assert done.returncode == 0, done.stderr
        if done.stdout != "created\n":
            assert "no room" in done.stdout or "cannot be written" in done.stdout, done.stdout
            if not Index.exists(folder / "a.index"):
                Index.create(folder / "a.index", bits=8).close()
        assert Index.examine(folder / "a.index") == []
        assert [path.name for path in folder.iterdir()] == ["a.index"]
        (folder / "a.index").unlink()


def test_two_spellings_of_a_key_are_one_key(path):
    """The bytes of a name, escaped one by one although they are UTF-8, are that name."""
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
