"""Compaction: never larger, in steps, and ids as runs."""

import numpy as np
import pytest

from fisherhash.index import Entry, Index
from fisherhash.index.local import change
from fisherhash.index.local.runs import RunsWriter, decode_runs, decode_varints, encode_varints


def random_codes(count, bits, seed=0):
    rng = np.random.default_rng(seed)
    return np.packbits(rng.integers(0, 2, (count, bits), dtype=np.uint8), axis=1)


def size_of(path):
    return sum(file.stat().st_size for file in path.rglob("*") if file.is_file())


@pytest.mark.parametrize("bits", [8, 12, 64])
@pytest.mark.parametrize("share", ["one", "few", "third", "most", "half in a row"])
def test_compact_never_enlarges(tmp_path, bits, share):
    count = 40_000
    rng = np.random.default_rng(3)
    codes = random_codes(count, bits)
    gone = {
        "one": np.array([count // 2]),
        "few": rng.choice(count, 400, replace=False),
        "third": np.arange(0, count, 3),
        "most": rng.choice(count, 39_000, replace=False),
        "half in a row": np.arange(1000, count // 2),
    }[share]
    path = tmp_path / "a.index"
    with Index.create(path, bits=bits) as index:
        index.add_codes(codes)
        index.remove(ids=gone)
    before = size_of(path)
    with Index.open(path, write=True) as index:
        result = index.compact()
        assert result["bytes_after"] <= result["bytes_before"]
        assert result["dropped"] in (0, len(gone))
        if bits == 64:
            assert result["dropped"] == len(gone)
        left = np.setdiff1d(np.arange(count), gone)
        np.testing.assert_array_equal(index.ids(), left)
        np.testing.assert_array_equal(index.codes(left[::97]), codes[left[::97]])
        assert index.get_items([int(gone[0]), int(left[-1])])[0] is None
        assert index.verify() == []
        again = index.compact()
        assert again["dropped"] == 0
        assert again["bytes_after"] == result["bytes_after"]
    # A checksum in catalogue.sums may have a digit more.
    assert size_of(path) <= before + 16
    assert Index.examine(path) == []


def test_one_of_a_million_leaves_a_file_of_runs_of_a_few_bytes(tmp_path):
    with Index.create(tmp_path / "a.index", bits=64) as index:
        index.add_codes(random_codes(1_000_000, 64))
        index.remove(ids=[500_000])
        assert index.compact() == {
            "dropped": 1,
            "bytes_before": 8_000_000,
            "bytes_after": 7_999_992 + 8,
            "left": 0,
        }
        (file,) = index.info()["files"]
        assert (file["kind"], file["codes"]) == ("runs", 999_999)
        assert index.codes([499_999, 500_001]).tolist() == [
            random_codes(1_000_000, 64)[i].tolist() for i in (499_999, 500_001)
        ]


def test_compact_goes_on_where_it_stopped(tmp_path, monkeypatch):
    monkeypatch.setattr(change, "MAX_LENGTH", 100)
    codes = random_codes(1000, 64)
    with Index.create(tmp_path / "a.index", bits=64) as index:
        index.add(Entry(f"k{i}", code) for i, code in enumerate(codes))
        index.remove([f"k{i}" for i in range(0, 1000, 9)])
        index.update([Entry("k55", codes[0]), Entry("k955", codes[1])])
        expected = {item.key: item.code for item in index.items()}
        steps = 0
        while (result := index.compact(seconds=0))["left"]:
            steps += 1
            assert {item.key: item.code for item in index.items()} == expected
            assert index.verify() == []
            if steps == 2:
                break
        assert index.compact()["left"] == 0
        assert {item.key: item.code for item in index.items()} == expected
        assert index.info()["removed"] == 0
        assert result["left"] > 0
    assert Index.examine(tmp_path / "a.index") == []


def test_a_step_needs_room_for_its_own_files_only(tmp_path, monkeypatch):
    """Ten files: at no time are there more than ten and the one that is being written."""
    monkeypatch.setattr(change, "MAX_LENGTH", 1000)
    seen = []
    with Index.create(tmp_path / "a.index", bits=64) as index:
        index.add_codes(random_codes(10_000, 64))
        index.remove(ids=range(0, 10_000, 5))
        finish = change.Change.finish

        def note(self):
            seen.append(sum(f.stat().st_size for f in (index.path / "codes").iterdir()))
            return finish(self)

        monkeypatch.setattr(change.Change, "finish", note)
        index.compact()
    assert len(seen) == 10
    assert max(seen) <= 80_000 + 8000


def test_runs_and_varints_come_back():
    rng = np.random.default_rng(1)
    numbers = np.concatenate([[0, 1, 127, 128, 2**62, 2**35], rng.integers(0, 2**40, 1000)])
    data = np.frombuffer(encode_varints(numbers), np.uint8)
    np.testing.assert_array_equal(decode_varints(data), numbers)
    ids = np.unique(rng.integers(10**12, 10**12 + 5000, 3000))
    writer = RunsWriter()
    for part in np.array_split(ids, 7):
        writer.add(part)
    data = np.frombuffer(writer.encode(), np.uint8)
    runs = decode_runs(data, writer.first_id, len(ids))
    np.testing.assert_array_equal(runs.at(np.arange(len(ids))), ids)
    wanted = np.arange(ids[0] - 3, ids[-1] + 3)
    places, there = runs.locate(wanted)
    np.testing.assert_array_equal(there, np.isin(wanted, ids))
    np.testing.assert_array_equal(ids[places[there]], wanted[there])


@pytest.mark.parametrize(
    "data",
    [
        b"\x00",
        b"\x00\x80",
        b"\x00\x00",
        b"\x00\x04",
        b"\x00\x01\x00\x02",
        b"\xff" * 9 + b"\x01\x03",
        b"\xff" * 8 + b"\x7f\x03",
        b"\x00\x03\x01",
        b"",
    ],
)
def test_runs_that_no_writer_stores_are_refused(data):
    with pytest.raises(ValueError, match=r"\w"):
        decode_runs(np.frombuffer(data, np.uint8), 0, 3)


def test_files_of_ids_of_older_formats_are_read_and_compacted(tmp_path):
    """Format 2 stored ascending ids as eight bytes each."""
    from fisherhash.index.local.schema import FileRow

    path = tmp_path / "a.index"
    codes = random_codes(300, 16)
    kept = np.setdiff1d(np.arange(300), [7, 250])
    with Index.create(path, bits=16) as index:
        index.add(Entry(f"k{i}", code) for i, code in enumerate(codes))
        index.remove(["k7", "k250"])
        with index._guard, index._commit(None) as step:
            for segment in step.before.segments:
                step.drop(segment)
            row = step._new_file("sorted", 0)
            code_sums = step._write(f"codes/{row.number:06d}.codes", b"", 0, codes[kept])
            id_sums = step._write(f"codes/{row.number:06d}.ids", b"", 0, kept.astype("<i8"))
            step._put_file(FileRow(row.number, "sorted", 0, len(kept), 0, code_sums, id_sums))
    with Index.open(path, write=True) as index:
        assert [file["kind"] for file in index.info()["files"]] == ["sorted"]
        np.testing.assert_array_equal(index.ids(), kept)
        assert index.verify() == []
        index.remove(["k9"])
        index.compact()
        assert [file["kind"] for file in index.info()["files"]] == ["runs"]
        np.testing.assert_array_equal(index.ids(), np.setdiff1d(kept, [9]))
        assert index.get("k11").code == codes[11].tobytes()
    assert Index.examine(path) == []
