"""Damage anywhere in the file: the right answer or an error that names it, never a wrong answer."""

import os
import random
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest

from fisherhash.codes import hamming
from fisherhash.errors import FisherhashError, UsageError
from fisherhash.index import Entry, Index
from fisherhash.index.local import repair

sys.path.insert(0, str(Path(__file__).parent))
from damaging import ASKED, BITS, QUERIES, edit, fill, pages_of

PAGE = 4096


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    path = tmp_path_factory.mktemp("whole") / "a.index"
    fill(path)
    with Index.open(path) as index:
        answers = {name: ask(index) for name, ask in ASKED.items()}
        return path, path.read_bytes(), answers, {item.id: item for item in index.items()}


@pytest.fixture
def path(whole, tmp_path):
    return Path(shutil.copy(whole[0], tmp_path / "a.index"))


def assert_names(path, error, how):
    assert str(path) in str(error), (how, error)


def check(path, answers, how):
    """Compare all answers; returns how many were refused."""
    refused = 0
    for name, ask in ASKED.items():
        try:
            with Index.open(path) as index:
                found = ask(index)
        except FisherhashError as error:
            refused += 1
            assert_names(path, error, (how, name))
        else:
            assert found == answers[name], (how, name)
    if refused:
        assert Index.examine(path), how
    return refused


def check_left(path, target, items, how):
    """What skip_damaged and repair leave must be right, and what repair lost be counted."""
    try:
        with Index.open(path, skip_damaged=True) as index:
            left = {item.id: item for item in index.items()}
            assert left.items() <= items.items(), how
            assert index.unavailable == len(items) - len(left), how
            assert index.ids().tolist() == sorted(left), how
            ids = np.array(sorted(left))
            codes = np.array([list(left[i].code) for i in ids], np.uint8).reshape(-1, 4)
            order = np.argsort(hamming(QUERIES, codes), axis=1, kind="stable")[:, :9]
            np.testing.assert_array_equal(index.search(QUERIES, 9).ids, ids[order])
            cats = [i for i, item in left.items() if "cat" in item.labels]
            assert index.ids("label=cat").tolist() == cats
    except FisherhashError as error:
        assert_names(path, error, how)
    try:
        report = repair(path, target)
    except FisherhashError as error:
        assert_names(path, error, how)
        return None
    with Index.open(target, write=True) as index:
        kept = {item.id: item for item in index.items()}
        assert kept.items() <= items.items(), how
        assert report.kept == len(kept)
        lost = {item.id for item in report.lost}
        assert all(item.key in (None, items[item.id].key) for item in report.lost), how
        for first, last in report.lost_codes:
            lost |= set(range(first, last + 1))
        if report.lost_count is not None:
            assert report.lost_count == len(items) - len(kept), how
            assert items.keys() - kept.keys() <= lost, how
            assert index.info()["next_id"] == 5330
        assert index.verify() == []
        assert index.add_codes(QUERIES)[0] > max(kept, default=-1)
    target.unlink()
    return report


def damage(rng, data, start, end):
    """Flip a bit, or overwrite a part of some bytes."""
    data, at = bytearray(data), rng.randrange(start, end)
    kind = rng.choice(["bit", "bit", "bit", "byte", "zeros", "noise"])
    if kind == "bit":
        data[at] ^= 1 << rng.randrange(8)
    elif kind == "byte":
        data[at] = rng.randrange(256)
    else:
        some = min(64, end - at)
        data[at : at + some] = bytes(some) if kind == "zeros" else rng.randbytes(some)
    return data, f"{kind} at {at} (page {at // PAGE + 1})"


def run(whole, tmp_path, rounds, seed):
    """Damage every page of every table, mostly where its structure is."""
    source, data, answers, items = whole
    rng, refused, path = random.Random(seed), 0, tmp_path / "a.index"
    for number, table in sorted(pages_of(source).items()):
        for _ in range(rounds):
            start = (number - 1) * PAGE
            # Most bytes of a block are plain codes.
            end = start + (rng.choice([16, 100, PAGE]) if table != "blocks" else PAGE)
            damaged, how = damage(rng, data, start, end)
            path.write_bytes(damaged)
            how = f"{how} of {table}"
            refused += check(path, answers, how) > 0
            if rng.random() < 0.2:
                check_left(path, tmp_path / "b.index", items, how)
            for end in ("-wal", "-shm"):
                Path(f"{path}{end}").unlink(missing_ok=True)
    assert refused > 10


def test_damage_of_every_page(whole, tmp_path):
    run(whole, tmp_path, 2, seed=os.urandom(8))


@pytest.mark.slow
def test_much_damage_of_every_page(whole, tmp_path):
    run(whole, tmp_path, 60, seed=os.urandom(8))


def test_every_bit_of_the_first_bytes(whole, tmp_path):
    path, step = tmp_path / "a.index", 3
    for place in range(0, 100 * 8, step):
        damaged = bytearray(whole[1])
        damaged[place // 8] ^= 1 << place % 8
        path.write_bytes(damaged)
        check(path, whole[2], f"bit {place}")


@pytest.mark.parametrize("size", [0, 1, 100, 512, PAGE, 5 * PAGE, -PAGE, -1])
def test_a_file_that_is_cut_off(whole, tmp_path, size):
    path = tmp_path / "a.index"
    path.write_bytes(whole[1][:size])
    # The last byte is one that nothing uses.
    assert check(path, whole[2], f"cut at {size}") or size == -1
    check_left(path, tmp_path / "b.index", whole[3], f"cut at {size}")


STATEMENTS = {
    "UPDATE notes SET value = '{}' WHERE name = 'bad 3.jpg'": "the note 'bad 3.jpg'",
    "UPDATE notes SET name = 'good 3.jpg' WHERE name = 'bad 3.jpg'": "the note 'good 3.jpg'",
    "DELETE FROM notes WHERE name = 'bad 3.jpg'": "notes of the kind 'skipped' are not complete",
    "UPDATE items SET labels = '[\"cat\"]' WHERE id = 101": "the row of item 101",
    "UPDATE items SET key = 'x' WHERE id = 102": "the row of item 102",
    "UPDATE items SET path = CAST(path AS BLOB) WHERE id = 103": "the row of item 103",
    "UPDATE items SET metadata = '{' WHERE id = 105": "the row of item 105",
    "DELETE FROM items WHERE id = 108": "the row of item 108 is missing",
    "INSERT INTO items SELECT 4000, key, '', 1, 1, '', '', 1 FROM items WHERE id = 8": "item 4000",
    "UPDATE blocks SET codes = zeroblob(length(codes)) WHERE block = 0": "block 0 of its codes",
    "UPDATE blocks SET present = zeroblob(512) WHERE block = 1": "block 1 of its codes",
    "UPDATE blocks SET changed = 1 WHERE block = 1": "block 1 of its codes",
    "DELETE FROM blocks WHERE block = 1": "of its 2 blocks of codes, 1 are as",
    "UPDATE meta SET value = replace(value, '5330', '5329') WHERE name = 'state'": "'state'",
    "UPDATE meta SET value = replace(value, 'fff', 'eee') WHERE name = 'index'": "'index'",
    "DELETE FROM meta WHERE name = 'state'": "'state' of its table meta is missing",
    "UPDATE files SET bytes = 'x' WHERE name = 'config.json'": "the file 'config.json'",
    "DELETE FROM files WHERE name = 'config.json'": "a file that it carries is not complete",
}


@pytest.mark.parametrize("statement", STATEMENTS)
def test_damage_is_called_by_its_name(whole, path, tmp_path, statement):
    edit(path, statement)
    said = ""
    for ask in ASKED.values():
        try:
            with Index.open(path) as index:
                ask(index)
        except FisherhashError as error:
            said += f"{error}\n"
    assert STATEMENTS[statement] in said, said
    assert f"{path} is damaged: " in said
    assert "fisherhash index repair" in said
    assert check(path, whole[2], statement)
    report = check_left(path, tmp_path / "b.index", whole[3], statement)
    assert report is not None
    if "items" in statement:
        lost = {item.id: item.key for item in report.lost}
        expected = {int(part) for part in statement.split() if part.isdigit()}
        assert set(lost) <= expected
        assert report.lost_codes == []
        if "labels" in statement or "path" in statement:
            assert lost == {i: f"{i}.jpg" for i in expected}
    elif "blocks" in statement:
        assert report.lost_count > 1000
        block = 0 if "= 0" in statement.split("WHERE")[1] else 1
        assert all(item.id // 4096 == block for item in report.lost)
        assert [first // 4096 for first, _ in report.lost_codes] == [block]
    else:
        assert report.lost_count in (0, None)
        assert report.lost_notes == ("note" in statement)
    assert report.remarks


def test_a_writer_refuses_what_is_damaged_and_works_on_the_rest(path):
    edit(path, "UPDATE items SET labels = '[\"cat\"]' WHERE id = 101")
    with Index.open(path, write=True) as index:
        before = index.count()
        with pytest.raises(FisherhashError, match="the row of item 101"):
            index.upsert([Entry("101.jpg", labels="x"), Entry("new", bytes(4))])
        assert index.count() == before
        assert "new" not in index
        index.upsert([Entry("102.jpg", labels="x"), Entry("new", bytes(4))])
        assert index.get("102.jpg").labels == ("x",)
        # Removing the item is a way to go on.
        assert index.remove(ids=[101]) == 1
        assert index.verify() == []


def test_skip_damaged_is_for_reading(path):
    with pytest.raises(UsageError, match="only read with skip_damaged"):
        Index.open(path, write=True, skip_damaged=True)
    with Index.open(path, skip_damaged=True) as index:
        assert index.unavailable == 0
        assert index.bits == BITS
        with Index.open(path, write=True) as writer:
            writer.add([Entry("new", bytes(4))])
        assert "new" in index
    with Index.open(path) as index:
        assert index.unavailable is None
