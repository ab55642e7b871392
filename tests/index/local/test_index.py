"""What is special about an index in a file: its name, its place on the disk, several writers."""

import os
import shutil
import signal
import sqlite3
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from textwrap import dedent

import numpy as np
import pytest

import fisherhash
from fisherhash.errors import FisherhashError, UsageError
from fisherhash.index import Entry, Index, Item
from fisherhash.index.local import file as file_module

sys.path.insert(0, str(Path(__file__).parent))
from faults import run_script, start_script


def codes(count, seed=0, width=8):
    return np.random.default_rng(seed).integers(0, 256, (count, width), dtype=np.uint8)


@pytest.fixture
def path(tmp_path):
    with Index.create(tmp_path / "a.index", bits=64) as index:
        index.add([Entry(f"k{i}", code, labels="x") for i, code in enumerate(codes(20))])
        index.add_codes(codes(5000, 1))
    return tmp_path / "a.index"


# One file


def test_at_rest_there_is_one_file(path):
    assert os.listdir(path.parent) == ["a.index"]
    with Index.open(path) as reader, Index.open(path, write=True) as writer:
        writer.add([Entry("new", bytes(8))])
        items = reader.items()
        assert next(items).key == "k0"
        assert reader.info()["bytes"] > path.stat().st_size
    items.close()
    assert os.listdir(path.parent) == ["a.index"]
    # Also if nobody closes it.
    Index.open(path, write=True).remove(["k1"])
    assert os.listdir(path.parent) == ["a.index"]
    script = "index = Index.open(path, write=True); index.add([Entry('left', bytes(8))])"
    assert run_script(script, path).returncode == 0
    assert os.listdir(path.parent) == ["a.index"]
    shutil.move(path, path.with_name("b.index"))
    with Index.open(path.with_name("b.index")) as index:
        assert "left" in index
        assert "k1" not in index


def test_removing_much_gives_the_space_back(path):
    with Index.open(path, write=True) as index:
        index.add_codes(codes(400_000, 2))
        assert index.count() == 405_020
    size = path.stat().st_size
    assert size > 3_000_000
    with Index.open(path, write=True) as index, Index.open(path) as reader:
        assert reader.count() == 405_020
        index.remove(ids=range(100, 405_000))
        expected = index.search(codes(3), 5).to_list()
        index.close()
        assert reader.search(codes(3), 5).to_list() == expected
        assert reader.count() == 120
    assert path.stat().st_size < size / 10
    with Index.open(path, write=True) as index:
        assert index.verify() == []
        assert index.add_codes(codes(1)) == range(405_020, 405_021)


def test_ids_may_be_sparse_and_large(tmp_path):
    ids = [3, 4095, 4096, 10**6, 2**40, 2**40 + 1]
    with Index.create(tmp_path / "a", bits=64) as index:
        index.load([Item(i, code.tobytes()) for i, code in zip(ids, codes(6), strict=True)])
        index.add([Entry("k", bytes(8))])
        with Index.open(index.uri) as reader:
            assert reader.ids().tolist() == [*ids, 2**40 + 2]
            index.remove(ids=[4095, 2**40])
            assert reader.ids().tolist() == [3, 4096, 10**6, 2**40 + 1, 2**40 + 2]
            assert reader.get("k").id == 2**40 + 2
            assert reader.verify() == []


def test_ids_that_are_too_large_are_refused(path):
    with Index.open(path, write=True) as index:
        for request in (
            lambda: index.load([Item(2**60, bytes(8))]),
            lambda: index.load([], next_id=2**60),
            lambda: index.load([Item(-1, bytes(8))]),
        ):
            with pytest.raises(UsageError, match=r"too large|must ascend"):
                request()
        assert index.verify() == []


def test_blocks_that_come_in_one_array_are_kept_apart(tmp_path):
    def blocks(buffer):
        for number in range(3):
            buffer[:] = number
            yield buffer

    with Index.create(tmp_path / "a", bits=64) as index:
        index.add_codes(blocks(np.zeros((2, 8), np.uint8)))
        assert index.codes(range(6))[:, 0].tolist() == [0, 0, 1, 1, 2, 2]


def test_a_reader_loads_what_changed_only(path, monkeypatch):
    from fisherhash.index.local import blocks as index_module

    loaded, read_block = [], index_module.read_block
    monkeypatch.setattr(
        index_module,
        "read_block",
        lambda row, width: (loaded.append(row[0]), read_block(row, width))[1],
    )
    with Index.open(path) as reader, Index.open(path, write=True) as writer:
        for change, blocks in (
            (lambda: None, [0, 1]),
            (lambda: writer.add([Entry("a", bytes(8))]), [1]),
            (lambda: writer.upsert([Entry("k3", bytes(8))]), [0]),
            (lambda: writer.upsert([Entry("k3", labels="y")]), []),
            (lambda: writer.write_notes({"sync": {"a": 1}}), []),
            (lambda: writer.add_codes(codes(9000)), [1, 2, 3]),
            (lambda: writer.remove(ids=[5000, 9000]), [1, 2]),
        ):
            change()
            writer.count()
            loaded.clear()
            assert len(reader) == len(writer)
            assert loaded == blocks
            query = codes(2, seed=5)
            assert reader.search(query, 9).to_list() == writer.search(query, 9).to_list()


def test_a_change_that_says_nothing_makes_no_commit(path):
    with Index.open(path, write=True) as index:
        commit = index.info()["commit"]
        index.add([])
        index.remove([], ids=[])
        index.write_notes({"sync": {"never there": None}})
        index.add_codes(np.zeros((0, 8), np.uint8))
        assert index.info()["commit"] == commit


def test_labels_are_matched_exactly(path):
    """By SQL on the JSON text of the labels."""
    labels = ["x", 'a", "x', '["x"]', ' "x"', "x\\", 'x\\"', "", "caf\udce9", ", ", '" "', "X"]
    with Index.open(path, write=True) as index:
        index.remove(index.keys())
        for number, label in enumerate(labels):
            index.add([Entry(f"k{number}", bytes(8), labels=[label, "other"])])
        index.add([Entry("none", bytes(8))])
        for number, label in enumerate(labels):
            expected = [f"k{number}"] + ["none"] * (label == "")
            found = [item.key for item in index.items({"label": label})]
            assert sorted(found) == sorted(expected), label
        many = [f"never {i}" for i in range(300)]
        found = [item.key for item in index.items({"label": [*many, labels[1], labels[7]]})]
        assert found == ["k1", "k7"]
        assert index.count({"label": "other"}) == len(labels)


# What is no index


def test_files_that_are_no_index(tmp_path):
    folder, old = tmp_path / "folder", tmp_path / "old"
    folder.mkdir()
    old.mkdir()
    (old / "catalogue.sqlite").touch()
    (tmp_path / "text").write_text("no index at all" * 100)
    (tmp_path / "empty").touch()
    sqlite3.connect(tmp_path / "other").executescript(
        "CREATE TABLE a (b); INSERT INTO a VALUES (1)"
    )
    os.mkfifo(tmp_path / "pipe")
    for name, message in {
        "nothing": "does not exist",
        "nowhere/a.index": "does not exist",
        "folder": "is a folder, and an index is a file",
        "old": "a folder, as an earlier version of fisherhash made it.*index sync again",
        "text": "is no index, or its first bytes are damaged",
        "empty": "is no index of fisherhash",
        "other": "is no index of fisherhash, but another file of SQLite",
        "pipe": "is not a regular file",
    }.items():
        for write in (False, True):
            with pytest.raises(FisherhashError, match=message):
                Index.open(tmp_path / name, write=write)
        if (tmp_path / name).exists():
            with pytest.raises(UsageError, match="exists already"):
                Index.create(tmp_path / name, bits=8)
            assert Index.exists(tmp_path / name)
    assert not list(tmp_path.glob("*-*"))


def test_a_newer_format_is_refused(path):
    db = sqlite3.connect(path)
    db.execute("PRAGMA user_version = 2")
    db.close()
    with pytest.raises(FisherhashError, match=r"has the format 2.*update fisherhash"):
        Index.open(path)


def test_an_index_is_created_complete_or_not_at_all(tmp_path, monkeypatch):
    path = tmp_path / "new" / "deep" / "a.index"
    synced, fsync = [], os.fsync

    def note(fd):
        synced.append(os.readlink(f"/proc/self/fd/{fd}"))
        return fsync(fd)

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", note)
        Index.create(path, bits=8).close()
    # Also the names of the folders are on the disk.
    assert {str(tmp_path), str(tmp_path / "new"), str(path.parent)} <= set(synced)
    assert os.listdir(path.parent) == ["a.index"]

    def fail(*_, **__):
        raise OSError(28, "No space left on device")

    for name in ("link", "fsync"):
        with monkeypatch.context() as patch:
            patch.setattr(os, name, fail)
            patch.setattr(os, "rename", fail)
            with pytest.raises(FisherhashError, match="No space left on device"):
                Index.create(tmp_path / "b.index", bits=8)
        assert os.listdir(tmp_path) == ["new"]
    with monkeypatch.context() as patch:
        patch.setattr(os, "link", fail)
        # As on file systems that have no links.
        Index.create(tmp_path / "b.index", bits=8).close()
    assert Index.examine(tmp_path / "b.index") == []


def test_what_a_killed_creation_left_is_deleted(tmp_path):
    script = """
    import shutil
    import fisherhash.index.local.create as file
    file.fsync_file = lambda _: os.kill(os.getpid(), 9)
    Index.create(path, bits=8)
    """
    died = run_script(script, tmp_path / "a.index")
    assert died.returncode == -signal.SIGKILL
    assert [name[:8] for name in os.listdir(tmp_path)] == [".a.index"]
    assert not Index.exists(tmp_path / "a.index")
    Index.create(tmp_path / "a.index", bits=8).close()
    assert os.listdir(tmp_path) == ["a.index"]


def test_an_index_is_reached_through_a_link(path, tmp_path):
    (tmp_path / "links").mkdir()
    link = tmp_path / "links" / "to.index"
    link.symlink_to(path)
    with Index.open(link, write=True) as index, Index.open(path) as reader:
        index.add([Entry("new", bytes(8))])
        assert "new" in reader
    assert (os.listdir(link.parent), Index.examine(link)) == (["to.index"], [])
    broken = tmp_path / "broken"
    broken.symlink_to(tmp_path / "nothing")
    assert Index.exists(broken)
    with pytest.raises(UsageError, match="exists already"):
        Index.create(broken, bits=8)


def test_names_of_any_kind(tmp_path):
    for name in ("a b?c#d%41.index", "é漢.index", os.fsdecode(b"caf\xe9.index"), "-x", "file:y"):
        with Index.create(tmp_path / name, bits=64) as index:
            index.add([Entry("a", bytes(8))])
        with Index.open(tmp_path / name) as index:
            assert "a" in index
    assert len(os.listdir(tmp_path)) == 5


def test_the_package_shows_the_index_without_torch():
    script = "import sys, fisherhash; fisherhash.Index; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", script], check=True)
    assert fisherhash.Index is Index


# Several processes and threads


def test_an_index_made_again_is_not_mistaken_for_the_one_that_was_opened(path):
    with Index.open(path) as reader, Index.open(path, write=True) as writer:
        assert len(reader) == 5020
        path.rename(path.with_name("away"))
        Index.create(path, bits=64).close()
        for one in (reader, writer):
            with pytest.raises(FisherhashError, match="or another index took its name"):
                one.search(codes(1))
        with pytest.raises(FisherhashError, match="open it again"):
            writer.add([Entry("lost", bytes(8))])
    with Index.open(path) as index:
        assert len(index) == 0


def test_a_forked_child_must_open_it_again(path):
    script = """
    index = Index.open(path, write=True)
    child = os.fork()
    if not child:
        try:
            index.count()
        except UsageError as error:
            print(error, flush=True)
        index.close()
        with Index.open(path, write=True) as own:
            own.add([Entry("child", bytes(8))])
        sys.exit()
    os.waitpid(child, 0)
    index.add([Entry("mine", bytes(8))])
    index.close()
    print(Index.examine(path), Index.open(path).keys()[-2:])
    """
    done = run_script(script, path)
    assert done.returncode == 0, done.stderr
    refused, rest = done.stdout.splitlines()
    assert "before this process was forked; open it again" in refused
    assert rest == "[] ['child', 'mine']"


def test_several_processes_write_in_turn(path):
    script = """
    with Index.open(path, write=True) as index:
        print("ready", flush=True)
        sys.stdin.readline()
        for number in range(25):
            index.add([Entry(f"{sys.argv[2]}-{number}", codes(1, number)[0])])
            index.upsert([Entry("k0", metadata={"by": sys.argv[2]}), Entry("k1", bytes(8))])
            index.add_codes(codes(3, number))
            index.remove([f"{sys.argv[2]}-{number}"] if number % 2 else [])
            index.search(codes(2), 3)
    """
    writers = [start_script(script, path, name) for name in "abc"]
    with Index.open(path) as reader:
        for writer in writers:
            assert writer.stdout.readline() == "ready\n"
        for writer in writers:
            writer.stdin.write("\n")
            writer.stdin.flush()
        while any(writer.poll() is None for writer in writers):
            # Each commit of three codes is seen whole.
            bare = [item.id for item in reader.items() if item.key is None]
            assert len(bare) % 3 == 5000 % 3
            assert len(reader.search(codes(1), 10_000).ids[0]) >= len(bare)
        for writer in writers:
            assert writer.communicate()[0] == ""
            assert writer.returncode == 0
        assert len(reader) == 5020 + 3 * (13 + 75)
        assert reader.verify() == []
        assert sorted(reader.keys()[20:]) == sorted(
            f"{name}-{number}" for name in "abc" for number in range(0, 25, 2)
        )


def test_a_writer_that_does_not_end_its_commit_is_named(path, monkeypatch):
    monkeypatch.setattr(file_module, "WAIT_SECONDS", 0.5)
    other = sqlite3.connect(path, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    with Index.open(path, write=True) as index:
        with pytest.raises(FisherhashError, match=f"{path} is being changed by another process"):
            index.add([Entry("new", bytes(8))])
        assert index.count() == 5020
        other.execute("ROLLBACK")
        index.add([Entry("new", bytes(8))])
    other.close()


def test_threads_read_and_write_with_one_object(path):
    wrong, query = [], codes(4, 3)
    with Index.open(path, write=True) as index:
        nearest = index.search(query, 5).to_list()

        def run(number):
            try:
                for i in range(15):
                    index.add([Entry(f"{number} {i}", codes(1)[0], labels="new")])
                    index.remove([f"{number} {i}"])
                    index.count("label=x")
                    if index.get("k3").id != 3 or index.search(query, 5).to_list() != nearest:
                        wrong.append(number)
                    for _ in zip(index.items(), range(3), strict=False):
                        pass
            except Exception as error:
                wrong.append(error)

        threads = [threading.Thread(target=run, args=[number]) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert wrong == []
        assert index.count() == 5020
        assert index.verify() == []


def test_codes_may_come_from_the_index_itself(path):
    with Index.open(path, write=True) as index:
        index.add_codes(part for _, part in index.scan())
        index.load(Item(item.id + 20_000, item.code) for item in index.items())
        assert index.count() == 4 * 5020
        assert index.verify() == []


# Folders that cannot be written


def run_as_guest(script, folder):
    """Run a script that may read a folder but not write there, whoever runs the tests."""
    for place in (*folder.iterdir(), folder):
        place.chmod(0o555 if place.is_dir() else 0o444)
    # Permissions do not hold for root. A guest may not be able to read the package.
    start = """
        import os
        from fisherhash.errors import FisherhashError
        from fisherhash.index import Index
        import fisherhash.index.local
        if os.geteuid() == 0:
            os.setgroups([])
            os.setgid(65534)
            os.setuid(65534)
    """
    command = [sys.executable, "-c", dedent(start) + dedent(script)]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=False)
    finally:
        for place in (folder, *folder.iterdir()):
            place.chmod(0o755)


@pytest.mark.parametrize("left", ["closed", "killed", "killed without shared memory"])
def test_a_folder_that_cannot_be_written_is_read(left):
    """Also with a log that an ended writer left there."""
    with tempfile.TemporaryDirectory() as root:
        folder = Path(root) / "folder"
        path = folder / "a.index"
        Path(root).chmod(0o755)
        folder.mkdir()
        script = f"""
            index = Index.create(path, bits=16)
            index.add([Entry("a", [1, 2]), Entry("b", [3, 4])])
            if {left == "closed"}:
                index.close()
            os._exit(0)
        """
        assert run_script(script, path).returncode == 0
        if left.endswith("memory"):
            Path(f"{path}-shm").unlink()
        before = {file.name: file.stat().st_size for file in folder.iterdir()}
        assert ("a.index-wal" in before) == (left != "closed")
        done = run_as_guest(
            f"""
            try:
                with Index.open({str(path)!r}) as index:
                    print(index.search(index.codes([1]), 5).ids.tolist(), index.keys())
                    print(index.verify(), [item.key for item in index.items("key>a")])
            except FisherhashError as error:
                print(error)
                print("[] ['b']")
            try:
                Index.open({str(path)!r}, write=True)
            except FisherhashError as error:
                print(error)
            """,
            folder,
        )
        assert done.returncode == 0, done.stderr
        answer, more, refused = done.stdout.splitlines()
        if left.endswith("memory"):
            assert "cannot be read" in answer
            assert "copy it with the files beside it" in answer
        else:
            assert answer == "[[1, 0]] ['a', 'b']"
        assert more == "[] ['b']"
        assert refused.startswith(f"{path} cannot be opened for writing: no permission")
        assert {file.name: file.stat().st_size for file in folder.iterdir()} == before
        with Index.open(path, write=True) as index:
            index.remove(["a"])
            assert index.verify() == []
