"""The local index: its files, its processes and its tables; the contract has a suite of its own."""

import os
import subprocess
import sys
import tempfile
from pathlib import Path
from textwrap import dedent

import numpy as np
import pytest

import fisherhash
from fisherhash.codes import hamming
from fisherhash.errors import FisherhashError, UsageError
from fisherhash.index import Entry, Index
from fisherhash.index.local import change, folder, lock, segments, verify
from fisherhash.index.local.index import LocalIndex
from fisherhash.index.local.stored import StoredBytes


def put(index, keys, codes, **fields):
    """Add or update items, all with the same further fields."""
    return index.upsert(Entry(k, c, **fields) for k, c in zip(keys, codes, strict=True))


def random_codes(count, bits, seed=0):
    rng = np.random.default_rng(seed)
    return np.packbits(rng.integers(0, 2, (count, bits), dtype=np.uint8), axis=1)


def brute(items, queries, k):
    """Nearest (ids, distances) by (distance, id) among {id: code}."""
    ids = np.array(sorted(items), dtype=np.int64)
    codes = np.array([items[i] for i in ids], dtype=np.uint8).reshape(len(ids), queries.shape[1])
    distances = hamming(queries, codes).astype(np.int64)
    order = np.argsort(distances, axis=1, kind="stable")[:, :k]
    return ids[order], np.take_along_axis(distances, order, axis=1)


def assert_found(index, items, queries, k, **where):
    ids, distances = brute(items, queries, k)
    found = index.search(queries, k, **where)
    assert found.ids.dtype == found.distances.dtype == np.int64
    np.testing.assert_array_equal(found.ids, ids)
    np.testing.assert_array_equal(found.distances, distances)


@pytest.fixture
def index(tmp_path):
    with Index.create(tmp_path / "a.index", bits=16) as index:
        yield index


@pytest.fixture
def filled(index):
    """Forty items with keys, labels and metadata, then ten codes in bulk."""
    index.add(
        Entry(f"k{i}", code, labels=["even" if i % 2 == 0 else "odd"])
        for i, code in enumerate(random_codes(40, 16))
    )
    index.add_codes(random_codes(10, 16, seed=1))
    return index


def test_at_rest_there_is_one_plain_catalogue(filled, tmp_path):
    filled.close()
    names = sorted(path.name for path in (tmp_path / "a.index").iterdir())
    catalogue = ["catalogue.spare", "catalogue.sqlite", "catalogue.sums"]
    assert names == [*catalogue, "codes", "head", "lock", "tables"]
    with Index.open(tmp_path / "a.index") as reader:
        reader.search(random_codes(1, 16))
        assert sorted(path.name for path in (tmp_path / "a.index").iterdir()) == names
    with pytest.raises(UsageError, match="was closed"):
        reader.count()


def test_a_stream_that_breaks_off_leaves_no_bytes(filled):
    def blocks():
        yield random_codes(100, 16)
        raise RuntimeError("no more")

    with pytest.raises(RuntimeError, match="no more"):
        filled.add_codes(blocks())
    assert (filled.path / "codes" / "000001.codes").stat().st_size == 100
    assert filled.add_codes(random_codes(3, 16)) == range(50, 53)
    assert filled.verify() == []


def test_an_interruption_just_behind_the_commit_loses_nothing(filled, monkeypatch):
    """The signal is delivered when SQLite returns: the codes count already."""
    from fisherhash.index.local.catalogue_writer import CatalogueWriter

    commit = CatalogueWriter.commit

    def interrupted(self):
        commit(self)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(CatalogueWriter, "commit", interrupted)
        with pytest.raises(KeyboardInterrupt):
            filled.add_codes(random_codes(5, 16, seed=8))
    assert len(filled) == 55
    np.testing.assert_array_equal(filled.codes(range(50, 55)), random_codes(5, 16, seed=8))
    assert filled.verify() == []


def test_removed_items_when_they_are_the_nearest_and_when_they_are_many(index):
    """Asking on until enough are left, and searching only what is left."""
    rng = np.random.default_rng(5)
    codes = np.concatenate([np.zeros((3000, 2), dtype=np.uint8), random_codes(5000, 16)])
    codes = codes[rng.permutation(len(codes))]
    index.add_codes(codes)
    queries = np.concatenate([np.zeros((1, 2), dtype=np.uint8), random_codes(3, 16, 7)])
    near = np.flatnonzero((codes == 0).all(axis=1))
    index.remove(ids=near[:-2])
    left = dict(enumerate(codes))
    for gone in near[:-2].tolist():
        del left[gone]
    assert_found(index, left, queries, 10)
    for gone in rng.permutation(sorted(left))[:4000].tolist():
        del left[gone]
    index.remove(ids=[i for i in range(len(codes)) if i not in left and i not in near[:-2]])
    assert_found(index, left, queries, 10)
    assert_found(index, left, queries, len(codes))
    within = index.within(queries, 5)
    expected_ids, expected = brute(left, queries, len(codes))
    for number in range(len(queries)):
        inside = expected[number] <= 5
        np.testing.assert_array_equal(
            [hit.id for hit in within[number]], expected_ids[number][inside]
        )
        np.testing.assert_array_equal(
            [hit.distance for hit in within[number]], expected[number][inside]
        )
    index.compact()
    assert_found(index, left, queries, 10)
    assert index.info()["files"][0]["kind"] == "runs"
    assert index.verify() == []


def test_codes_go_on_in_the_next_file(index, monkeypatch):
    monkeypatch.setattr(change, "MAX_LENGTH", 100)
    codes = random_codes(350, 16)
    assert index.add_codes(codes[:250]) == range(250)
    put(index, [f"k{i}" for i in range(250, 350)], codes[250:])
    expected = dict(enumerate(codes))
    assert len(index.info()["files"]) == 4
    assert_found(index, expected, codes[::50], 20)
    put(index, ["k260", "k300"], codes[:2])
    index.remove(ids=[5, 250])
    expected |= {260: codes[0], 300: codes[1]}
    del expected[5], expected[250]
    assert_found(index, expected, codes[::50], 20)
    index.compact()
    assert [file["codes"] for file in index.info()["files"]] == [100, 100, 99, 50]
    assert_found(index, expected, codes[::50], 20)
    index.add_codes(codes[:1])
    expected[350] = codes[0]
    assert_found(index, expected, codes[::50], 20)
    assert index.verify() == []


def test_tables_are_kept_and_go_on_with_what_is_added(index, monkeypatch):
    monkeypatch.setattr(segments, "TAIL", 500)
    codes = random_codes(4000, 16)
    index.add_codes(codes[:3000])
    index.build()
    (table,) = (index.path / "tables").iterdir()
    assert table.name == "000001-3000.table"
    expected = dict(enumerate(codes[:3000]))
    assert_found(index, expected, codes[::500], 30)
    index.add_codes(codes[3000:3400])
    expected = dict(enumerate(codes[:3400]))
    with Index.open(index.path) as reader:
        for one in (index, reader):
            assert_found(one, expected, codes[::500], 30)
        assert reader.info()["files"][0]["engine"]["tables"]
        assert reader.info()["files"][0]["engine"]["codes"] == 3000
        index.remove(ids=[*range(10, 30), 3100])
        expected = {i: code for i, code in expected.items() if i not in (*range(10, 30), 3100)}
        for one in (index, reader):
            assert_found(one, expected, codes[::500], 30)
    index.add_codes(codes[3400:])
    expected |= {i: codes[i] for i in range(3400, 4000)}
    assert_found(index, expected, codes[::500], 30)
    index.build()
    assert [path.name for path in (index.path / "tables").iterdir()] == ["000001-4000.table"]
    assert_found(index, expected, codes[::500], 30)
    index.compact()
    assert list((index.path / "tables").iterdir()) == []
    assert_found(index, expected, codes[::500], 30)


def test_a_second_writer_is_told_who_is_first(filled):
    with pytest.raises(FisherhashError, match=rf"written by this process \({os.getpid()}\)"):
        Index.open(filled.path, write=True)
    script = f"""if True:
        from fisherhash.errors import FisherhashError
        from fisherhash.index import Entry, Index
        try:
            Index.open({str(filled.path)!r}, write=True)
        except FisherhashError as error:
            print(error)
        with Index.open({str(filled.path)!r}) as reader:
            print(len(reader))
    """
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert f"is being written by process {os.getpid()}." in done.stdout
    assert done.stdout.endswith("50\n")
    filled.close()
    with Index.open(filled.path, write=True) as again:
        again.remove(["k1"])


def test_readers_that_look_for_a_writer_keep_none_out(tmp_path, monkeypatch):
    Index.create(tmp_path / "b.index", bits=16).close()
    place = os.open(tmp_path / "b.index" / "lock", os.O_RDWR)
    lock._take(place)
    monkeypatch.setattr(lock.time, "sleep", lambda _: os.close(place))
    Index.open(tmp_path / "b.index", write=True).close()


def test_a_catalogue_without_the_right_to_write_is_not_called_damaged(filled, monkeypatch):
    filled.close()
    name = os.fspath(filled.path / "catalogue.sqlite")
    monkeypatch.setattr(os, "access", lambda place, _: os.fspath(place) != name)
    before = sorted(os.listdir(filled.path))
    with pytest.raises(FisherhashError, match="may not be written"):
        Index.open(filled.path, write=True)
    assert sorted(os.listdir(filled.path)) == before
    with Index.open(filled.path) as index:
        assert len(index) == 50


def test_readers_in_other_processes_see_whole_commits_only(index):
    """Every commit adds ten equal codes, or updates or compacts; a reader never sees a part."""
    script = dedent(f"""
        import sys
        import numpy as np
        from fisherhash.index import Entry, Index
        query = np.zeros((1, 2), dtype=np.uint8)
        seen = set()
        with Index.open({str(index.path)!r}) as reader:
            print("ready", flush=True)
            while True:
                found = reader.search(query, 10_000)
                assert found.ids.shape[1] % 10 == 0, found.ids.shape
                assert (np.diff(found.ids) > 0).all()
                assert set(found.distances[0].tolist()) <= {{0}}
                seen.add(found.ids.shape[1])
                if found.ids.shape[1] == 600:
                    break
            assert reader.verify() == []
        print(len(seen))
    """)
    readers = [
        subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    for reader in readers:
        assert reader.stdout.readline() == "ready\n"
    same = np.zeros((10, 2), dtype=np.uint8)
    for number in range(60):
        keys = [f"{number} {i}" for i in range(10)]
        put(index, keys, same)
        if number % 3 == 1:
            put(index, keys, same)
        if number % 10 == 9:
            index.compact()
    for reader in readers:
        out, _ = reader.communicate(timeout=60)
        assert reader.returncode == 0
        assert int(out) > 3
    assert index.verify() == []


@pytest.mark.parametrize("step", ["add", "remove"])
def test_a_commit_between_code_files_and_rows_is_seen_by_the_next_call(filled, step, monkeypatch):
    zero = np.zeros((1, 2), dtype=np.uint8)
    with Index.open(filled.path) as reader:
        load = LocalIndex._load

        def late(self, state):
            snapshot = load(self, state)
            if self is reader:
                monkeypatch.setattr(LocalIndex, "_load", load)
                if step == "add":
                    put(filled, ["late"], zero, labels=["odd"])
                else:
                    filled.remove(["k1"])
            return snapshot

        monkeypatch.setattr(LocalIndex, "_load", late)
        for seen in (False, True):
            if step == "add":
                found = reader.within(zero, 16, where="label=odd").ids
                assert sorted(found.tolist()) == [*range(1, 40, 2), *[50] * seen]
            first, third = reader.get_items([1, 3])
            assert (first is None) == (step == "remove" and seen)
            assert (third.key, third.code) == ("k3", random_codes(40, 16)[3].tobytes())
        if step == "remove":
            with pytest.raises(UsageError, match="no item with the id 1"):
                reader.get([1])


def test_a_compact_while_everything_is_verified_is_no_problem(filled, monkeypatch):
    put(filled, ["k1"], random_codes(1, 16, seed=9))
    with Index.open(filled.path) as reader:
        seen = []

        def late(folder, name, *more):
            if not seen:
                seen.append(folder / name)
                filled.compact()
            return StoredBytes(folder, name, *more)

        reader.count()
        monkeypatch.setattr(verify, "StoredBytes", late)
        assert reader.verify() == []
        assert seen
        assert not seen[0].exists()


def test_folders_that_are_no_index(tmp_path):
    images = tmp_path / "images"
    images.mkdir()
    with pytest.raises(UsageError, match=r"holds no catalogue\.sqlite"):
        Index.open(images)
    with pytest.raises(UsageError, match="does not exist"):
        Index.open(tmp_path / "nowhere", write=True)
    with pytest.raises(UsageError, match="does not exist"):
        Index.examine(tmp_path / "nowhere")
    (images / "a.jpg").write_bytes(b"image")
    with pytest.raises(UsageError, match="is not empty; nothing in it was changed"):
        Index.create(images, bits=8)
    assert [path.name for path in images.iterdir()] == ["a.jpg"]
    with pytest.raises(UsageError, match="is a file"):
        Index.open(images / "a.jpg")
    with pytest.raises(UsageError, match="is a file"):
        Index.create(images / "a.jpg", bits=8)
    (images / "catalogue.sqlite").write_bytes(b"not SQLite" * 1000)
    with pytest.raises(FisherhashError, match=r"catalogue.sqlite is damaged"):
        Index.open(images)
    Index.create(tmp_path / "c", bits=8).close()
    with pytest.raises(UsageError, match="is an index already"):
        Index.create(tmp_path / "c", bits=8)


def test_an_index_is_created_complete_or_not_at_all(tmp_path, monkeypatch):
    place = tmp_path / "deep" / "a"

    def interrupted(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(folder, "create_catalogue", interrupted)
        with pytest.raises(KeyboardInterrupt):
            Index.create(place, bits=8)
    assert list(place.parent.iterdir()) == []
    place.mkdir()
    with Index.create(place, bits=8) as index:
        put(index, ["a"], [[1]])
    assert [path.name for path in place.parent.iterdir()] == ["a"]
    (place / "catalogue.sqlite").unlink()
    with pytest.raises(FisherhashError, match=r"catalogue\.sqlite is missing"):
        Index.open(place)
    with pytest.raises(UsageError, match="is not empty"):
        Index.create(place, bits=8)


def test_errors_of_a_model_that_cannot_be_saved_name_the_index(tmp_path):
    def save(place):
        raise FisherhashError(f"{place} cannot be written")

    with pytest.raises(FisherhashError, match=rf"^{tmp_path}/a.index/model cannot be written$"):
        Index.create(tmp_path / "a.index", bits=8, save_model=save)
    assert list(tmp_path.iterdir()) == []


def test_what_a_killed_creation_left_is_deleted(tmp_path):
    place = tmp_path / "a.index"
    ended = tmp_path / ".a.index.999999999-1f.new"
    running = tmp_path / f".a.index.{os.getpid()}-1f.new"
    other = tmp_path / ".b.index.999999999-1f.new"
    for draft in (ended, running, other):
        (draft / "codes").mkdir(parents=True)
    Index.create(place, bits=8).close()
    assert [draft.exists() for draft in (ended, running, other)] == [False, True, True]
    ended.mkdir()
    Index.open(place, write=True).close()
    assert not ended.exists()
    os.utime(running, (0, 0))
    Index.open(place, write=True).close()
    assert not running.exists()


def test_an_index_is_created_where_a_link_leads(tmp_path):
    (tmp_path / "disk").mkdir()
    link = tmp_path / "a.index"
    link.symlink_to(tmp_path / "disk" / "real.index")
    with Index.create(link, bits=8) as index:
        put(index, ["a"], [[1]])
        assert index.uri == str(link)
    assert link.is_symlink()
    with Index.open(tmp_path / "disk" / "real.index") as reader:
        assert len(reader) == 1


def test_a_newer_format_is_refused(filled):
    import sqlite3

    filled.close()
    db = sqlite3.connect(filled.path / "catalogue.sqlite")
    db.execute("PRAGMA user_version = 5")
    db.close()
    (filled.path / "catalogue.sums").unlink()
    with pytest.raises(FisherhashError, match="has format 5, this version of fisherhash reads"):
        Index.open(filled.path)


def test_info_of_the_files(filled):
    filled.search(random_codes(1, 16))
    info = filled.info()
    assert (info["next_id"], info["format"], info["path"]) == (50, 3, str(filled.path))
    assert info["files"][0]["codes"] == 50
    assert info["first_query_seconds"] > 0


def test_the_package_shows_the_index_without_torch():
    script = """if True:
        import sys
        import fisherhash.index.local
        from fisherhash import Index
        assert "torch" not in sys.modules and "numba" not in sys.modules
    """
    subprocess.run([sys.executable, "-c", script], check=True)
    assert fisherhash.Index is Index
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        fisherhash.nothing  # noqa: B018


def run_as_guest(script, folder):
    """Run a script that may read a folder but not write there, whoever runs the tests."""
    for place in (folder, *folder.rglob("*")):
        place.chmod(0o555 if place.is_dir() else 0o444)
    # Permissions do not hold for root. A guest may not be able to read the package.
    start = """
        import mmap, os
        from fisherhash.errors import FisherhashError
        from fisherhash.index import Index
        import fisherhash.index.engine.small
        import fisherhash.index.local
        if os.geteuid() == 0:
            os.setgroups([])
            os.setgid(65534)
            os.setuid(65534)
    """
    try:
        return subprocess.run(
            [sys.executable, "-c", dedent(start) + dedent(script)],
            capture_output=True,
            text=True,
            check=False,
        )
    finally:
        folder.chmod(0o755)
        for place in folder.rglob("*"):
            place.chmod(0o755)


@pytest.mark.skipif(os.name != "posix", reason="permissions of POSIX")
@pytest.mark.parametrize("left", ["closed", "killed", "killed without shared memory"])
def test_a_folder_that_cannot_be_written_is_read(left):
    """Also with a log that an ended writer left there."""
    with tempfile.TemporaryDirectory() as root:
        Path(root).chmod(0o755)
        path = Path(root) / "a.index"
        script = f"""
            import os
            import numpy as np
            from fisherhash.index import Entry, Index
            index = Index.create({str(path)!r}, bits=16)
            index.add([Entry("a", [1, 2]), Entry("b", [3, 4])])
            if {left == "closed"}:
                index.close()
            os._exit(0)
        """
        subprocess.run([sys.executable, "-c", dedent(script)], check=True)
        if left.endswith("memory"):
            (path / "catalogue.sqlite-shm").unlink()
        before = {file.name: file.stat().st_size for file in path.rglob("*") if file.is_file()}
        assert ("catalogue.sqlite-wal" in before) == (left != "closed")
        done = run_as_guest(
            f"""
            with Index.open({str(path)!r}) as index:
                print(index.search(index.codes([1]), 5).ids.tolist(), index.keys())
                print(index.verify())
            try:
                Index.open({str(path)!r}, write=True)
            except FisherhashError as error:
                print(error)
            """,
            path,
        )
        assert done.returncode == 0, done.stderr
        answer, problems, refused = done.stdout.splitlines()
        assert answer == "[[1, 0]] ['a', 'b']"
        assert problems == "[]"
        assert refused.startswith(f"{path} cannot be opened for writing: Permission denied.")
        after = {file.name: file.stat().st_size for file in path.rglob("*") if file.is_file()}
        assert after == before
        with Index.open(path, write=True) as index:
            index.remove(["a"])
            assert index.verify() == []


def test_an_index_made_again_is_not_mistaken_for_the_one_that_was_opened(tmp_path):
    path = tmp_path / "x.index"
    with Index.create(path, bits=8) as index:
        put(index, ["old"], [[0]])
    with Index.open(path) as reader:
        assert len(reader) == 1
        path.rename(tmp_path / "away.index")
        with pytest.raises(FisherhashError, match="was deleted, or another index"):
            reader.search(np.zeros((1, 1), np.uint8))
        with Index.create(path, bits=8) as index:
            put(index, ["new"], [[255]])
        with pytest.raises(FisherhashError, match="open it again"):
            len(reader)
    with Index.open(path) as reader:
        assert reader.get("new").id == 0
