"""The embedded index: what goes in comes out, whatever was removed, updated or compacted."""

import json
import os
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from textwrap import dedent

import numpy as np
import pytest

import fisherhash
from fisherhash.codes import code_bytes, hamming
from fisherhash.errors import FisherhashError, UsageError
from fisherhash.index import Index, LocalIndex
from fisherhash.index.base import Item
from fisherhash.index.local import lock, segments, writing
from fisherhash.index.local.verify import verify_path


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
    with LocalIndex.create(tmp_path / "a.index", bits=16) as index:
        yield index


@pytest.fixture
def filled(index):
    """Forty items with keys, labels and metadata, then ten codes in bulk."""
    count = 40
    index.add(
        [f"k{i}" for i in range(count)],
        random_codes(count, 16),
        paths=[f"/photos/k{i}.jpg" for i in range(count)],
        sizes=range(count),
        mtimes_ns=[10**18 + i for i in range(count)],
        labels=[["even", "all"] if i % 2 == 0 else "odd" for i in range(count)],
        metadata=[{"year": 2000 + i, "exif": {"camera": f"C{i % 3}"}} for i in range(count)],
    )
    index.add_codes(random_codes(10, 16, seed=1))
    return index


def test_what_was_added_is_found_again_by_another_object(filled, tmp_path):
    expected = dict(enumerate(np.concatenate([random_codes(40, 16), random_codes(10, 16, 1)])))
    queries = random_codes(5, 16, seed=2)
    with LocalIndex.open(tmp_path / "a.index") as reader:
        for one in (filled, reader):
            assert len(one) == one.count() == 50
            assert_found(one, expected, queries, 7)
            assert one.item("k3") == Item(
                3,
                "k3",
                "/photos/k3.jpg",
                3,
                10**18 + 3,
                ("odd",),
                {"year": 2003, "exif": {"camera": "C0"}},
            )
            assert one.items([45, 3])[0] == Item(45)
            assert one.items([45, 3])[1].key == "k3"
            assert one.keys() == [f"k{i}" for i in range(40)]
            assert one.files()["k7"] == (7, 10**18 + 7, 7)
            np.testing.assert_array_equal(one.codes([45, 3]), [expected[45], expected[3]])
            assert one.verify() == []
            assert one.first_query_seconds > 0
        assert not reader.writable
        with pytest.raises(UsageError, match="open for reading only"):
            reader.remove(["k1"])


def test_at_rest_there_is_one_plain_catalogue(filled, tmp_path):
    filled.close()
    names = sorted(path.name for path in (tmp_path / "a.index").iterdir())
    assert names == ["catalogue.sqlite", "catalogue.sums", "codes", "head", "lock", "tables"]
    with LocalIndex.open(tmp_path / "a.index") as reader:
        reader.search(random_codes(1, 16))
        assert sorted(path.name for path in (tmp_path / "a.index").iterdir()) == names
    with pytest.raises(UsageError, match="was closed"):
        reader.count()


@pytest.mark.parametrize("bits", [1, 7, 8, 12, 64, 100, 1024])
def test_every_length_of_code(bits, tmp_path):
    codes = random_codes(30, bits)
    with Index.create(tmp_path / "x", bits=bits) as index:
        assert index.add_codes(codes[:20]) == range(20)
        assert index.add_codes(iter([codes[20:25], codes[25:]])) == range(20, 30)
        index.remove(ids=[3, 29])
        expected = {i: code for i, code in enumerate(codes) if i not in (3, 29)}
        assert_found(index, expected, codes[:6], 40)
        assert index.codes([28]).shape == (1, code_bytes(bits))


def test_an_empty_index(index):
    found = index.search(random_codes(3, 16), 5)
    assert found.ids.shape == found.distances.shape == (3, 0)
    near = index.within(random_codes(3, 16), 16)
    assert near.offsets.tolist() == [0, 0, 0, 0]
    assert len(near.ids) == 0
    assert index.search(random_codes(0, 16), 5).ids.shape == (0, 0)
    assert list(index.scan()) == []
    assert index.keys() == []
    assert index.files() == {}
    assert index.add([], np.zeros((0, 2), dtype=np.uint8)).tolist() == []
    assert index.add_codes(np.zeros((0, 2), dtype=np.uint8)) == range(0)
    assert index.remove([]) == 0
    assert index.commit == 1
    assert index.compact()["dropped"] == 0
    assert index.verify() == []
    index.add(["a"], random_codes(1, 16))
    index.remove(["a"])
    assert index.search(random_codes(3, 16), 5).ids.shape == (3, 0)
    assert index.compact()["bytes_after"] == 0
    assert index.add(["a"], random_codes(1, 16)).tolist() == [1]
    assert index.search(random_codes(1, 16), 5).ids.tolist() == [[1]]


def test_an_update_keeps_the_id_and_its_place_in_ties(index):
    """The later position of the new code must not show: order is by (distance, id)."""
    same = np.zeros((6, 2), dtype=np.uint8)
    index.add(list("abcdef"), same, labels=["old"] * 6, metadata=[{"n": i} for i in range(6)])
    assert index.update(["c", "a"], same[:2], labels=["new", None]).tolist() == [2, 0]
    assert index.search(same[:1], 6).ids.tolist() == [[0, 1, 2, 3, 4, 5]]
    assert index.search(same[:1], 2).ids.tolist() == [[0, 1]]
    assert index.within(same[:1], 0).of(0)[0].tolist() == [0, 1, 2, 3, 4, 5]
    assert index.item("c").labels == ("new",)
    assert index.item("a").labels == ()
    assert index.item("c").metadata == {"n": 2}
    far = np.full((1, 2), 255, dtype=np.uint8)
    assert index.upsert(["b", "g", "c"], far.repeat(3, axis=0)).tolist() == [1, 6, 2]
    assert index.search(far, 3).ids.tolist() == [[1, 2, 6]]
    assert index.update(["b"], metadata=[{"m": 1}]).tolist() == [1]
    assert index.item("b").metadata == {"m": 1}
    assert index.search(far, 1).ids.tolist() == [[1]]
    index.compact()
    assert index.search(far, 3).ids.tolist() == [[1, 2, 6]]
    assert [ids.tolist() for ids, _ in index.scan()] == [[0, 1, 2, 3, 4, 5, 6]]
    assert index.verify() == []


def test_requests_that_make_no_sense_change_nothing(filled):
    code = random_codes(1, 16)
    before = filled.commit
    for message, request in {
        "already has an item with the key 'k1'": lambda: filled.add(["new", "k1"], [[0, 0]] * 2),
        "the key 'x' is there twice": lambda: filled.add(["x", "x"], [[0, 0]] * 2),
        "no item with the key 'nobody'": lambda: filled.update(["k1", "nobody"], [[0, 0]] * 2),
        "no item with the key 'none'": lambda: filled.remove(["k1", "none"]),
        "no item with the id 99": lambda: filled.remove(ids=[3, 99]),
        "no item with the id 98": lambda: filled.codes([98]),
        "no item with the id 97": lambda: filled.items([97]),
        "ids must be a list of whole numbers": lambda: filled.remove(ids=[1.5]),
        "2 keys, but 1 codes": lambda: filled.add(["x", "y"], code),
        r"codes of 16 bits must have shape \(n, 2\)": lambda: filled.add_codes(random_codes(2, 24)),
        "one entry a key": lambda: filled.add(["x"], code, sizes=[1, 2]),
        "a key must be a text": lambda: filled.add([3], code),
        "got one text": lambda: filled.add("x", code),
        "cannot be written as JSON": lambda: filled.add(["x"], code, metadata=[{"a": {1}}]),
        "must be a mapping": lambda: filled.add(["x"], code, metadata=["text"]),
        "the size of 'x' must be a whole number": lambda: filled.add(["x"], code, sizes=["big"]),
        "too large": lambda: filled.add(["x"], code, sizes=[2**70]),
        "k must be a whole number of at least 1": lambda: filled.search(code, 0),
        "radius must be a whole number": lambda: filled.within(code, -1),
    }.items():
        with pytest.raises(UsageError, match=message):
            request()
    assert filled.commit == before
    assert filled.verify() == []
    assert filled.remove(["k1", "none"], ids=[99], missing_ok=True) == 1


def test_a_stream_that_breaks_off_adds_nothing(filled):
    def blocks():
        yield random_codes(100, 16)
        raise RuntimeError("no more")

    before = filled.commit
    with pytest.raises(RuntimeError, match="no more"):
        filled.add_codes(blocks())
    assert (len(filled), filled.commit) == (50, before)
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


def test_ids_are_never_given_twice(index):
    assert index.add(["a", "b"], random_codes(2, 16)).tolist() == [0, 1]
    index.remove(["b"])
    index.compact()
    assert index.add(["b"], random_codes(1, 16)).tolist() == [2]
    index.remove(["a", "b"])
    index.compact()
    index.close()
    with LocalIndex.open(index.path, write=True) as again:
        assert again.add(["c"], random_codes(1, 16)).tolist() == [3]


def test_names_that_are_not_utf_8_and_other_odd_texts(index):
    keys = [os.fsdecode(b"caf\xe9.jpg"), "漢字", "quote'\"", "a\x00b", "line\nend"]
    index.add(keys, random_codes(5, 16), paths=keys, labels=[[key] for key in keys])
    assert index.keys() == keys
    for number, key in enumerate(keys):
        item = index.item(key)
        assert (item.id, item.path, item.labels) == (number, key, (key,))
        for field in ("key", "path", "label"):
            found = index.search(random_codes(1, 16), where={field: key})
            assert found.ids.tolist() == [[number]], (field, key)
    assert index.verify() == []
    with pytest.raises(UsageError, match="neither text"):
        index.add(["\ud800"], np.zeros((1, 2), dtype=np.uint8))


def test_filters_apply_before_the_top_k(filled):
    codes, queries = random_codes(40, 16), random_codes(4, 16, seed=3)

    def check(where, kept):
        expected = {i: codes[i] for i in kept}
        assert_found(filled, expected, queries, 100, where=where)
        assert_found(filled, expected, queries, 3, where=where)
        near = filled.within(queries, 16, where=where)
        assert len(near.ids) == 4 * len(expected)

    everything = range(40)
    check("label=odd", everything[1::2])
    check({"label": "odd"}, everything[1::2])
    check("label!=odd", everything[::2])
    check({"label": ["odd", "all"]}, everything)
    check(["label=even", "year>=2030"], range(30, 40, 2))
    check({"label": "even", "year >=": 2030}, range(30, 40, 2))
    check("year=2007", [7])
    check("year!=2007", [i for i in everything if i != 7])
    check("exif.camera=C1", everything[1::3])
    check({"exif.camera": ["C1", "C2"]}, [i for i in everything if i % 3])
    check("key=k12", [12])
    check("id<3", [0, 1, 2])
    check("size>37", [38, 39])
    check("path=/photos/k5.jpg", [5])
    check("year=text", [])
    check({"year": "2007"}, [])
    for where in ("yaer!=2007", "yaer=2007", {"yaer": 1}, ["label=odd", "yaer<3"]):
        with pytest.raises(UsageError, match=r"has the field 'yaer'\. Did you mean 'year'\?"):
            filled.search(queries, where=where)
    assert filled.search(queries, 100, where={}).ids.shape[1] == 50
    with pytest.raises(UsageError, match="write FIELD=VALUE"):
        filled.search(queries, where="label")
    with pytest.raises(UsageError, match="labels have no order"):
        filled.search(queries, where="label>a")
    with pytest.raises(UsageError, match="size is a number"):
        filled.search(queries, where="size=big")
    filled.update(["k1"], labels=["even"])
    check("label=even", [1, *everything[::2]])
    filled.remove(["k0"])
    check("label=even", [1, *everything[2::2]])


def test_filters_with_thousands_of_values(index):
    count = 3000
    index.add(
        [f"k{i}" for i in range(count)],
        random_codes(count, 16),
        labels=[f"l{i}" for i in range(count)],
        metadata=[{"n": i, "a": {"b": f"t{i}"}} for i in range(count)],
    )
    zero, some = np.zeros((1, 2), dtype=np.uint8), range(500, 2500)
    for where in (
        {"key": [f"k{i}" for i in some]},
        {"label": [f"l{i}" for i in some]},
        {"id": list(some)},
        {"n": [*some, None]},
        {"a.b": [f"t{i}" for i in some]},
    ):
        found = np.sort(index.within(zero, 16, where=where).ids)
        np.testing.assert_array_equal(found, np.array(some))
        (field, values), *_ = where.items()
        assert len(index.within(zero, 16, where={f"{field}!=": values}).ids) == count - len(some)
    with pytest.raises(UsageError, match="the most is"):
        index.search(zero, 1, where={"id": list(range(10_001))})
    with pytest.raises(UsageError, match="in all"):
        index.search(zero, 1, where={f"f{i}": list(range(10_000)) for i in range(4)})


def test_filters_know_types(index):
    values = [1, 1.0, "1", True, None, False, [1], "true", 0.5, "b"]
    index.add(
        [str(i) for i in range(10)], random_codes(10, 16), metadata=[{"v": v} for v in values]
    )

    def matching(where):
        return sorted(index.search(random_codes(1, 16), 100, where=where).ids[0].tolist())

    assert matching("v=1") == [0, 1, 2]
    assert matching({"v": 1}) == [0, 1]
    assert matching({"v": "1"}) == [2]
    assert matching({"v": True}) == [3]
    assert matching("v=true") == [3, 7]
    assert matching({"v": None}) == [4]
    assert matching("v=null") == [4]
    assert matching("v<1") == [8]
    assert matching("v>a") == [7, 9]
    assert matching({"v": [1, "b"]}) == [0, 1, 9]


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
        np.testing.assert_array_equal(within.of(number)[0], expected_ids[number][inside])
        np.testing.assert_array_equal(within.of(number)[1], expected[number][inside])
    index.compact()
    assert_found(index, left, queries, 10)
    assert index.info()["files"][0]["kind"] == "sorted"
    assert index.verify() == []


def test_codes_go_on_in_the_next_file(index, monkeypatch):
    monkeypatch.setattr(writing, "MAX_LENGTH", 100)
    codes = random_codes(350, 16)
    assert index.add_codes(codes[:250]) == range(250)
    index.add([f"k{i}" for i in range(250, 350)], codes[250:])
    expected = dict(enumerate(codes))
    assert len(index.info()["files"]) == 4
    assert_found(index, expected, codes[::50], 20)
    index.update(["k260", "k300"], codes[:2])
    index.remove(ids=[5, 250])
    expected |= {260: codes[0], 300: codes[1]}
    del expected[5], expected[250]
    assert_found(index, expected, codes[::50], 20)
    index.compact()
    assert [file["codes"] for file in index.info()["files"]] == [100, 100, 100, 48]
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
    with LocalIndex.open(index.path) as reader:
        for one in (index, reader):
            assert_found(one, expected, codes[::500], 30)
        assert reader.info()["files"][0]["engine"]["tables"]
        assert reader.info()["files"][0]["engine"]["codes"] == 3000
        index.remove(ids=[10, 3100])
        del expected[10], expected[3100]
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
        LocalIndex.open(filled.path, write=True)
    script = f"""if True:
        from fisherhash.errors import FisherhashError
        from fisherhash.index import LocalIndex
        try:
            LocalIndex.open({str(filled.path)!r}, write=True)
        except FisherhashError as error:
            print(error)
        with LocalIndex.open({str(filled.path)!r}) as reader:
            print(len(reader))
    """
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert f"is being written by process {os.getpid()}." in done.stdout
    assert done.stdout.endswith("50\n")
    filled.close()
    with LocalIndex.open(filled.path, write=True) as again:
        again.remove(["k1"])


def test_readers_that_look_for_a_writer_keep_none_out(tmp_path, monkeypatch):
    LocalIndex.create(tmp_path / "b.index", bits=16).close()
    place = os.open(tmp_path / "b.index" / "lock", os.O_RDWR)
    lock._take(place)
    monkeypatch.setattr(lock.time, "sleep", lambda _: os.close(place))
    LocalIndex.open(tmp_path / "b.index", write=True).close()


def test_a_catalogue_without_the_right_to_write_is_not_called_damaged(filled, monkeypatch):
    filled.close()
    name = os.fspath(filled.path / "catalogue.sqlite")
    monkeypatch.setattr(os, "access", lambda place, _: os.fspath(place) != name)
    before = sorted(os.listdir(filled.path))
    with pytest.raises(FisherhashError, match="may not be written"):
        LocalIndex.open(filled.path, write=True)
    assert sorted(os.listdir(filled.path)) == before
    with LocalIndex.open(filled.path) as index:
        assert len(index) == 50


def test_a_reader_sees_every_commit_and_survives_compact(filled):
    queries = random_codes(3, 16, seed=4)
    with LocalIndex.open(filled.path) as reader:
        first = reader.search(queries, 100)
        held = reader.scan(4)
        filled.remove(["k0"])
        assert reader.commit == filled.commit
        assert len(reader) == 49
        assert 0 not in reader.search(queries, 100).ids
        filled.compact()
        assert sum(len(ids) for ids, _ in held) == 50
        assert 0 not in reader.search(queries, 100).ids
        assert reader.verify() == []
        filled.add_codes(random_codes(1, 16))
        assert reader.search(queries, 100).ids.shape == (3, 50)
        assert first.ids.shape == (3, 50)


def test_readers_in_other_processes_see_whole_commits_only(index):
    """Every commit adds ten equal codes, or updates or compacts; a reader never sees a part."""
    script = dedent(f"""
        import sys
        import numpy as np
        from fisherhash.index import LocalIndex
        query = np.zeros((1, 2), dtype=np.uint8)
        seen = set()
        with LocalIndex.open({str(index.path)!r}) as reader:
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
        index.add(keys, same)
        if number % 3 == 1:
            index.update(keys, same)
        if number % 10 == 9:
            index.compact()
    for reader in readers:
        out, _ = reader.communicate(timeout=60)
        assert reader.returncode == 0
        assert int(out) > 3
    assert index.verify() == []


@pytest.mark.parametrize("step", ["add", "remove"])
def test_a_commit_between_code_files_and_rows_is_no_error(filled, step, monkeypatch):
    zero = np.zeros((1, 2), dtype=np.uint8)
    with LocalIndex.open(filled.path) as reader:
        reader.refresh()
        current = LocalIndex._current

        def late(self):
            snapshot = current(self)
            if self is reader:
                monkeypatch.setattr(LocalIndex, "_current", current)
                if step == "add":
                    filled.add(["late"], zero, labels=["odd"])
                else:
                    filled.remove(["k1"])
            return snapshot

        monkeypatch.setattr(LocalIndex, "_current", late)
        if step == "add":
            found = reader.within(zero, 16, where="label=odd").ids
            assert sorted(found.tolist()) == [*range(1, 40, 2), 50]
        else:
            with pytest.raises(UsageError, match="no item with the id 1"):
                reader.items([1])
        there, items, codes = reader.still_there([1, 3])
        assert there.tolist() == [step == "add", True]
        assert items[-1].key == "k3"
        np.testing.assert_array_equal(codes[-1], random_codes(40, 16)[3])


def test_a_compact_while_everything_is_verified_is_no_problem(filled, monkeypatch):
    filled.update(["k1"], random_codes(1, 16, seed=9))
    with LocalIndex.open(filled.path) as reader:
        stat, seen = Path.stat, []

        def late(self, **options):
            if self.suffix == ".codes" and not seen:
                seen.append(self)
                found = stat(self, **options)
                filled.compact()
                return found
            return stat(self, **options)

        reader.refresh()
        monkeypatch.setattr(Path, "stat", late)
        assert reader.verify() == []
        assert seen
        assert not seen[0].exists()


def test_threads_share_one_object(filled):
    queries = random_codes(8, 16, seed=6)
    expected = filled.search(queries, 20).ids.tolist()
    wrong = []

    def work():
        for _ in range(50):
            if filled.search(queries, 20).ids.tolist() != expected or len(filled.keys()) != 40:
                wrong.append(1)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_codes_of_another_model_are_refused(tmp_path):
    code = random_codes(1, 16)
    with LocalIndex.create(
        tmp_path / "a", bits=16, fingerprint="a" * 64, model={"builtin": "general"}
    ) as index:
        index.add(["x"], code, fingerprint="a" * 64)
        index.add(["y"], code)
        for request in (
            lambda: index.add(["z"], code, fingerprint="b" * 64),
            lambda: index.update(["x"], code, fingerprint="b" * 64),
            lambda: index.add_codes(code, fingerprint="b" * 64),
            lambda: index.search(code, fingerprint="b" * 64),
        ):
            with pytest.raises(UsageError, match="codes of model aaaaaaaaaaaa, these are of model"):
                request()
    with LocalIndex.open(tmp_path / "a") as reader:
        assert reader.fingerprint == "a" * 64
        assert reader.model == {"builtin": "general"}
        assert reader.info()["fingerprint"] == "a" * 64
        assert len(reader) == 2
    with LocalIndex.create(tmp_path / "b", bits=16) as index:
        index.add(["x"], code, fingerprint="c" * 64)
    with LocalIndex.open(tmp_path / "b", write=True) as index:
        assert index.fingerprint == "c" * 64
    with LocalIndex.create(tmp_path / "c", bits=16) as index:
        index.add(["x"], code)
        with pytest.raises(UsageError, match="whose model was not named"):
            index.add(["y"], code, fingerprint="c" * 64)


def test_folders_that_are_no_index(tmp_path):
    photos = tmp_path / "photos"
    photos.mkdir()
    with pytest.raises(UsageError, match=r"holds no catalogue\.sqlite"):
        LocalIndex.open(photos)
    with pytest.raises(UsageError, match="does not exist"):
        LocalIndex.open(tmp_path / "nowhere", write=True)
    with pytest.raises(UsageError, match="does not exist"):
        verify_path(tmp_path / "nowhere")
    (photos / "a.jpg").write_bytes(b"picture")
    with pytest.raises(UsageError, match=r"holds other files \(a.jpg\)"):
        LocalIndex.create(photos, bits=8)
    assert [path.name for path in photos.iterdir()] == ["a.jpg"]
    with pytest.raises(UsageError, match="is a file"):
        LocalIndex.open(photos / "a.jpg")
    with pytest.raises(UsageError, match="is a file"):
        LocalIndex.create(photos / "a.jpg", bits=8)
    with pytest.raises(UsageError, match="no index of the kind postgresql://"):
        Index.open("postgresql://host/images")
    with pytest.raises(UsageError, match="bits must be between 1 and 1024"):
        LocalIndex.create(tmp_path / "b", bits=1025)
    (photos / "catalogue.sqlite").write_bytes(b"not SQLite" * 1000)
    with pytest.raises(FisherhashError, match=r"catalogue.sqlite is damaged"):
        LocalIndex.open(photos)
    LocalIndex.create(tmp_path / "c", bits=8).close()
    with pytest.raises(UsageError, match="is an index already"):
        LocalIndex.create(tmp_path / "c", bits=8)


def test_an_interrupted_making_is_made_again(tmp_path, monkeypatch):
    from fisherhash.index.local import index as local

    folder = tmp_path / "a"
    with monkeypatch.context() as patch:
        patch.setattr(
            local, "create_catalogue", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt)
        )
        with pytest.raises(KeyboardInterrupt):
            LocalIndex.create(folder, bits=8)
    (folder / "catalogue.sqlite.new-journal").write_bytes(b"half")
    with pytest.raises(UsageError, match="making was interrupted"):
        LocalIndex.open(folder)
    with LocalIndex.create(folder, bits=8) as index:
        index.add(["a"], [[1]])
    (folder / "catalogue.sqlite").unlink()
    with pytest.raises(FisherhashError, match=r"catalogue\.sqlite is missing"):
        LocalIndex.open(folder)
    with pytest.raises(UsageError, match="holds other files"):
        LocalIndex.create(folder, bits=8)


def test_a_newer_format_is_refused(filled):
    import sqlite3

    filled.close()
    db = sqlite3.connect(filled.path / "catalogue.sqlite")
    db.execute("PRAGMA user_version = 2")
    db.close()
    (filled.path / "catalogue.sums").unlink()
    with pytest.raises(FisherhashError, match="has format 2, this version of fisherhash reads"):
        LocalIndex.open(filled.path)


def test_info_is_json(filled):
    filled.search(random_codes(1, 16))
    info = json.loads(json.dumps(filled.info()))
    assert (info["count"], info["keyed"], info["bits"], info["next_id"]) == (50, 40, 16, 50)
    assert info["files"][0]["codes"] == 50
    assert info["first_query_seconds"] > 0


def test_the_package_shows_the_index_without_torch():
    script = """if True:
        import sys
        from fisherhash.index import LocalIndex
        from fisherhash import Index
        assert "torch" not in sys.modules and "numba" not in sys.modules
    """
    subprocess.run([sys.executable, "-c", script], check=True)
    assert fisherhash.Index is Index
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        fisherhash.index.nothing  # noqa: B018


def run_as_guest(script, folder):
    """Run a script that may read a folder but not write there, whoever runs the tests."""
    for place in (folder, *folder.rglob("*")):
        place.chmod(0o555 if place.is_dir() else 0o444)
    # Permissions do not hold for root. A guest may not be able to read the package.
    start = """
        import mmap, os
        from fisherhash.errors import FisherhashError
        from fisherhash.index import LocalIndex
        import fisherhash.index.engine.small
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
            from fisherhash.index import LocalIndex
            index = LocalIndex.create({str(path)!r}, bits=16)
            index.add(["a", "b"], np.array([[1, 2], [3, 4]], dtype=np.uint8))
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
            with LocalIndex.open({str(path)!r}) as index:
                print(index.search(index.codes([1]), 5).ids.tolist(), index.keys())
                print(index.verify())
            try:
                LocalIndex.open({str(path)!r}, write=True)
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
        with LocalIndex.open(path, write=True) as index:
            index.remove(["a"])
            assert index.verify() == []


def test_an_index_made_again_is_not_mistaken_for_the_one_that_was_opened(tmp_path):
    path = tmp_path / "x.index"
    with LocalIndex.create(path, bits=8) as index:
        index.add(["old"], np.zeros((1, 1), np.uint8))
    with LocalIndex.open(path) as reader:
        assert len(reader) == 1
        path.rename(tmp_path / "away.index")
        with pytest.raises(FisherhashError, match="was deleted, or another index"):
            reader.search(np.zeros((1, 1), np.uint8))
        with LocalIndex.create(path, bits=8) as index:
            index.add(["new"], np.full((1, 1), 255, np.uint8))
        with pytest.raises(FisherhashError, match="open it again"):
            len(reader)
    with LocalIndex.open(path) as reader:
        assert reader.item("new").id == 0
