"""Second codes on disk: in one record with the codes, so that whatever keeps those keeps both."""

import sqlite3
import tarfile
from pathlib import Path

import numpy as np
import pytest

from fisherhash.errors import FisherhashError
from fisherhash.index import Entry, Index
from fisherhash.index.local import schema
from fisherhash.index.local.backup import backup_index
from fisherhash.index.local.repair import repair_index

BITS, WIDTH = 44, 6
FINE, FINE_WIDTH = 100, 13


def make(count, seed, width, bits):
    found = np.random.default_rng(seed).integers(0, 256, (count, width), dtype=np.uint8)
    found[:, -1] &= 0xFF << (8 * width - bits) & 0xFF
    return found


def codes(count, seed=0):
    # few values, so that distances tie
    return make(40, 0, WIDTH, BITS)[np.random.default_rng(seed).integers(0, 40, count)]


def fine(count, seed=0):
    return make(count, 100 + seed, FINE_WIDTH, FINE)


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "a.index"
    with Index.create(path, bits=BITS, fine_bits=FINE, model={"method": "none"}) as index:
        index.add(
            Entry(f"{i}.jpg", code, fine=second, labels="even" if i % 2 == 0 else "odd")
            for i, (code, second) in enumerate(zip(codes(400), fine(400), strict=True))
        )
        index.add_codes(codes(3000, 1), fine=fine(3000, 1))
        index.update(
            Entry(f"{i}.jpg", code, fine=second)
            for i, (code, second) in enumerate(zip(codes(50, 2), fine(50, 2), strict=True))
        )
        index.remove(ids=range(1000, 1100))
    return path


def content(path):
    with Index.open(path) as index:
        found = index.search(codes(3, 9), 60, fine=fine(3, 9))
        filtered = index.search(codes(3, 9), 60, fine=fine(3, 9), where="label=odd")
        lists = (found.to_list(), found.fines.tolist(), filtered.to_list())
        return {item.id: item for item in index.items()}, lists


def expected(path):
    """What a search returns, from the items alone."""
    with Index.open(path) as index:
        items = list(index.items())
    rows = []
    for code, second in zip(codes(3, 9), fine(3, 9), strict=True):
        apart = [
            (
                int(np.bitwise_count(np.frombuffer(item.code, np.uint8) ^ code).sum()),
                int(np.bitwise_count(np.frombuffer(item.fine, np.uint8) ^ second).sum()),
                item.id,
            )
            for item in items
        ]
        rows.append([(id_, distance) for distance, _, id_ in sorted(apart)[:60]])
    return rows


def test_an_index_on_disk_is_ranked_by_both_codes(path):
    items, (found, *_) = content(path)
    assert len(items) == 3300
    assert items[3].fine == fine(50, 2)[3].tobytes()
    assert found == expected(path)
    with Index.open(path) as index:
        info = index.info()
    assert (info["format"], info["fine_bits"]) == (4, FINE)
    # removed ones and those before the update are still there, and ids of the updated ones
    assert info["bytes"]["codes"] == 3450 * (WIDTH + FINE_WIDTH) + 50 * 8
    assert info["fine_bytes"] == 3450 * FINE_WIDTH


def test_compaction_backup_and_repair_keep_second_codes(path, tmp_path):
    before = content(path)
    backup_index(path, tmp_path / "backup")
    assert content(tmp_path / "backup") == before
    with Index.open(path, write=True) as index:
        assert index.compact()["dropped"] == 150
        assert index.verify() == []
    assert content(path) == before
    backup_index(path, tmp_path / "backup")
    assert content(tmp_path / "backup") == before
    assert repair_index(path, tmp_path / "repaired").lost_count == 0
    assert content(tmp_path / "repaired") == before
    with Index.open(tmp_path / "repaired") as index:
        assert index.fine_bits == FINE


def test_damage_of_a_second_code_is_noticed_and_costs_little(path, tmp_path):
    items, _ = content(path)
    file = path / "codes" / "000001.codes"
    data = bytearray(file.read_bytes())
    # in the second code of the item with id 2000
    data[2000 * (WIDTH + FINE_WIDTH) + WIDTH + 3] ^= 1
    file.write_bytes(data)
    with Index.open(path) as index:
        with pytest.raises(FisherhashError, match=r"000001\.codes is damaged"):
            index.search(codes(1), 3)
        assert index.verify()
    with Index.open(path, skip_damaged=True) as index:
        found = {item.id: item for item in index.items()}
        assert index.unavailable == len(items) - len(found) > 0
        assert index.search(codes(1, 9), 5, fine=fine(1, 9)).ids.shape == (1, 5)
    assert found.items() <= items.items()
    report = repair_index(path, tmp_path / "repaired")
    kept, _ = content(tmp_path / "repaired")
    assert 2000 not in kept
    assert kept.items() <= items.items()
    assert len(kept) + report.lost_count == len(items)
    assert report.lost_count <= 4096 // (WIDTH + FINE_WIDTH) + 2


def test_without_second_codes_the_format_is_as_before(tmp_path):
    with Index.create(tmp_path / "plain", bits=BITS) as index:
        index.add_codes(codes(10))
        assert index.info()["format"] == 3
        assert index.info()["fine_bytes"] == 0
        assert "fine_bits" not in index._catalogue.facts
    fixture = Path(__file__).parents[2] / "fixtures" / "format-1.tar.xz"
    with tarfile.open(fixture) as archive:
        archive.extractall(tmp_path, filter="data")
    with Index.open(tmp_path / "format-1" / "photos.index", write=True) as old:
        item = next(iter(old.items()))
        assert item.fine is None
        old.add([Entry("new", item.code)])
        assert old.info()["format"] == 3
        logits = np.ones((1, old.bits))
        found = old.search(None, 3, ranking="real", logits=logits)
        assert found.distances[0].tolist() == sorted(found.distances[0].tolist())


def test_an_older_version_refuses_an_index_with_second_codes(path, monkeypatch):
    from fisherhash.index.local import catalogue

    monkeypatch.setattr(catalogue, "CATALOGUE_FORMAT", 3)
    with pytest.raises(FisherhashError, match="pip install --upgrade fisherhash"):
        Index.open(path)


@pytest.mark.parametrize("value", [True, -1, 1025, "64"])
def test_a_length_that_no_writer_stored_is_refused(path, value):
    facts = {"bits": 8, "fingerprint": None, "model": {}, "fine_bits": value}
    with pytest.raises(ValueError, match="fine_bits"):
        schema.check_facts("index", facts)
    db = sqlite3.connect(path / schema.CATALOGUE)
    assert db.execute("PRAGMA user_version").fetchone() == (4,)
    db.close()


def test_stored_tables_belong_to_the_records(tmp_path, monkeypatch):
    from fisherhash.index.local import segments

    monkeypatch.setattr(segments, "TAIL", 100)
    path = tmp_path / "a.index"
    with Index.create(path, bits=BITS, fine_bits=FINE) as index:
        index.add_codes(codes(5000), fine=fine(5000))
        index.build()
    assert list((path / "tables").iterdir())
    want = expected(path)
    for _ in range(2):
        with Index.open(path) as index:
            assert index.search(codes(3, 9), 60, fine=fine(3, 9)).to_list() == want
            real = index.search(None, 9, ranking="real", logits=np.ones((1, BITS)))
            assert (
                real.to_list()
                == index.search(np.packbits(np.ones((1, BITS), bool), axis=1), 9).to_list()
            )
