"""Repair: one damaged block costs what lies in it, and the rest is there afterwards."""

import json
import os
import random
import shutil
import sqlite3
import subprocess
import sys
from pathlib import Path
from textwrap import dedent

import numpy as np
import pytest

from fisherhash.errors import FisherhashError, UsageError
from fisherhash.index import Entry, Index
from fisherhash.index.items import Item
from fisherhash.index.local import change
from fisherhash.index.local.repair import repair_index

BITS, WIDTH = 60, 8
BLOCK = 4096
DERIVED = ("lock", "catalogue.sqlite-shm")


def fill(path):
    """Thousands of items: ids implied, ascending and loose, removed ones, rows, notes."""
    rng = np.random.default_rng(3)

    def codes(count):
        found = rng.integers(0, 256, (count, WIDTH), dtype=np.uint8)
        found[:, -1] &= 0xF0
        return found

    index = Index.create(path, bits=BITS, fingerprint="f" * 64, model={"method": "none"})
    index.add(
        [
            Entry(f"{i}/photo.jpg", code, f"/data/{i}", i, labels=["cat"], metadata={"n": i})
            for i, code in enumerate(codes(2500))
        ],
        notes={"skipped": {f"bad {i}.jpg": {"reason": "damaged" * 9} for i in range(200)}},
    )
    index.remove([f"{i}/photo.jpg" for i in range(0, 1200, 7)])
    index.compact()
    index.add_codes(codes(3000))
    index.add(Entry(f"new {i}", code) for i, code in enumerate(codes(800)))
    index.update(Entry(f"{i}/photo.jpg", code) for i, code in enumerate(codes(700), 1200))
    index.update(Entry(f"{i}/photo.jpg", code) for i, code in enumerate(codes(300), 1300))
    index.remove(ids=range(3000, 3200))
    return index


def content(path):
    """All items by id, and the notes."""
    with Index.open(path) as index:
        return {item.id: item for item in index.items()}, index.notes("skipped")


def files_of(path):
    return sorted(
        file.relative_to(path).as_posix()
        for file in path.rglob("*")
        if file.is_file() and file.name not in DERIVED
    )


@pytest.fixture(scope="module")
def undamaged(tmp_path_factory):
    """An index at rest and one whose writer was killed, with their content."""
    root = tmp_path_factory.mktemp("indexes")
    fill(root / "closed").close()
    script = dedent(f"""
        import os, sys
        sys.path.insert(0, {str(Path(__file__).parent)!r})
        from pathlib import Path
        import test_repair
        index = test_repair.fill(Path({str(root / "killed")!r}))
        os._exit(0)
    """)
    subprocess.run([sys.executable, "-c", script], check=True)
    return {name: (root / name, *content(root / name)) for name in ("closed", "killed")}


def overwrite(file, block, rng):
    """Damage one block: noise, zeros, or a single bit."""
    data = bytearray(file.read_bytes())
    start, end = block * BLOCK, min((block + 1) * BLOCK, len(data))
    how = rng.choice(["noise", "zeros", "bit"])
    if how == "noise":
        data[start:end] = rng.randbytes(end - start)
    elif how == "zeros":
        data[start:end] = bytes(end - start)
    else:
        data[rng.randrange(start, end)] ^= 1 << rng.randrange(8)
    file.write_bytes(data)
    return how


def check_repair(state, name, block, tmp_path, rng):
    """Damage a block, repair, and compare; returns how many items were lost."""
    source, items, notes = state
    path, out = tmp_path / "copy", tmp_path / "repaired"
    shutil.copytree(source, path)
    try:
        how = overwrite(path / name, block, rng)
        before = {file: (path / file).read_bytes() for file in files_of(path)}
        report = repair_index(path, out)
        what = (name, block, how, report.remarks)
        assert {file: (path / file).read_bytes() for file in files_of(path)} == before, what
        assert Index.examine(out) == [], what
        saved, saved_notes = content(out)
        lost = {item.id for item in report.lost}
        lost |= {i for first, last in report.lost_codes for i in range(first, last + 1)}
        # Removed codes without a key may come back if the page that says so is lost.
        back = saved.keys() - items.keys()
        old = any("newest changes may be missing" in one for one in report.remarks)
        assert not back or old or any("may have been removed" in x for x in report.remarks), what
        assert not back or name.endswith("-wal"), what
        saved = {i: item for i, item in saved.items() if i not in back}
        # Two neighbours in the log may be the page of some rows and the page of their keys.
        bare = {i for i, item in saved.items() if item.key is None and items[i].key is not None}
        assert not bare or name.endswith("-wal"), what
        assert report.without_key == len(bare), what
        assert not bare or any(f"{len(bare):,} items lost" in one for one in report.remarks), what
        assert not bare or f"(up to {len(bare):,} without their keys)" in str(report)
        left = {i: Item(i, x.code) if i in bare else x for i, x in items.items() if i not in lost}
        assert saved == left, what
        assert {item.key for item in report.lost} <= {item.key for item in items.values()}, what
        assert saved_notes.items() <= notes.items(), what
        assert len(notes) - len(saved_notes) == report.lost_notes, what
        assert report.kept == len(saved) + len(back), what
        with Index.open(source) as old, Index.open(out) as new:
            assert new.info()["next_id"] == old.info()["next_id"]
            assert (new.bits, new.fingerprint, new.model) == (old.bits, old.fingerprint, old.model)
        # A block holds 512 codes or ids of 8 bytes; a page of the catalogue fewer rows.
        if name.startswith("codes/"):
            assert len(lost) <= BLOCK // WIDTH, what
        else:
            # A block of the log lies in two pages.
            assert len(lost) <= BLOCK // 28 * (1 + name.endswith("-wal")), what
            assert report.lost_notes <= 60, what
        return len(lost)
    finally:
        shutil.rmtree(path)
        shutil.rmtree(out, ignore_errors=True)


def blocks_of(path):
    for name in files_of(path):
        for block in range(-(-(path / name).stat().st_size // BLOCK)):
            yield name, block


def test_nothing_is_lost_of_a_whole_index(undamaged, tmp_path):
    for number, (source, items, notes) in enumerate(undamaged.values()):
        report = repair_index(source, tmp_path / str(number))
        assert report.lost_count == report.lost_notes == 0
        assert report.remarks == []
        assert content(tmp_path / str(number)) == (items, notes)


def chosen_blocks(path, rng, per_file):
    """Some blocks of every file."""
    blocks: dict[str, list[int]] = {}
    for name, block in blocks_of(path):
        blocks.setdefault(name, []).append(block)
    return [
        (name, block)
        for name, own in blocks.items()
        for block in rng.sample(own, min(len(own), per_file.get(Path(name).suffix, 1)))
    ]


def test_a_damaged_block_costs_what_lies_in_it(undamaged, tmp_path):
    """Some blocks of every file; the slow tests damage more of them, the soak test all."""
    rng = random.Random(os.urandom(8))
    lost = {}
    for name, block in chosen_blocks(undamaged["closed"][0], rng, {".sqlite": 4}):
        count = check_repair(undamaged["closed"], name, block, tmp_path, rng)
        lost[name] = lost.get(name, 0) + count
    assert lost["codes/000003.codes"] > 100
    for name, block in chosen_blocks(undamaged["killed"][0], rng, {".sqlite-wal": 4}):
        if name.startswith("catalogue"):
            check_repair(undamaged["killed"], name, block, tmp_path, rng)


def test_the_list_of_code_files_may_be_that_of_an_earlier_commit(undamaged, tmp_path):
    """One block of the log may hold the newest list of code files and the newest state."""
    state = undamaged["killed"]
    blocks = (state[0] / "catalogue.sqlite-wal").stat().st_size // BLOCK
    for block in range(blocks - 6, blocks):
        check_repair(state, "catalogue.sqlite-wal", block, tmp_path, random.Random(0))


@pytest.mark.slow
def test_damage_of_many_blocks(undamaged, tmp_path):
    rng = random.Random(os.urandom(8))
    for state in undamaged.values():
        counts = {".sqlite": 25, ".sqlite-wal": 15, ".codes": 3, ".ids": 2}
        for name, block in chosen_blocks(state[0], rng, counts):
            check_repair(state, name, block, tmp_path, rng)


def test_the_first_page_and_every_page_of_the_small_tables(undamaged, tmp_path):
    """The schema, what the index is, and the checksums of all its codes: nothing is lost."""
    source = undamaged["closed"][0]
    with sqlite3.connect(source / "catalogue.sqlite") as db:
        roots = dict(db.execute("SELECT name, rootpage FROM sqlite_master"))
    db.close()
    rng = random.Random(1)
    for page in (1, roots["facts"], roots["files"], roots["removed"], roots["items"]):
        lost = check_repair(undamaged["closed"], "catalogue.sqlite", page - 1, tmp_path, rng)
        assert lost == 0, page


@pytest.mark.parametrize(
    "name", ["head", "catalogue.sums", "catalogue.spare", "codes/000003.codes-sums"]
)
def test_a_lost_helper_costs_nothing_and_never_keeps_an_index_closed(undamaged, tmp_path, name):
    for state, (source, items, notes) in undamaged.items():
        path = tmp_path / state
        shutil.copytree(source, path)
        for change_ in ("damage", "remove"):
            if (path / name).exists():
                if change_ == "damage":
                    (path / name).write_bytes(b"x" * 100)
                else:
                    (path / name).unlink()
            assert content(path) == (items, notes)
            with Index.open(path, write=True):
                pass
            assert Index.examine(path) == []


def test_files_that_are_missing_or_no_files(undamaged, tmp_path):
    source, items, _ = undamaged["closed"]
    bulk = [item for item in items.values() if item.key is None]
    for number, how in enumerate(["missing", "pipe", "link", "folder", "cut"]):
        path = tmp_path / f"{number}"
        shutil.copytree(source, path)
        file = path / "codes/000003.codes"
        data = file.read_bytes()
        file.unlink()
        if how == "pipe":
            os.mkfifo(file)
        elif how == "link":
            file.symlink_to("/dev/zero")
        elif how == "folder":
            file.mkdir()
        elif how == "cut":
            file.write_bytes(data[: 3 * BLOCK + 5])
        report = repair_index(path, tmp_path / f"{number} repaired")
        saved, _ = content(tmp_path / f"{number} repaired")
        lost = {item.id for item in report.lost}
        lost |= {i for first, last in report.lost_codes for i in range(first, last + 1)}
        assert saved == {i: item for i, item in items.items() if i not in lost}
        if how == "cut":
            assert report.lost_count < len(bulk)
        else:
            assert {item.id for item in bulk} <= lost
        assert any("codes/000003.codes" in remark for remark in report.remarks)


def test_an_index_without_a_catalogue_is_read_through_its_spare_copy(undamaged, tmp_path):
    """All rows are gone; the codes are there, without their keys."""
    source, items, _ = undamaged["closed"]
    path = tmp_path / "copy"
    shutil.copytree(source, path)
    (path / "catalogue.sqlite").unlink()
    report = repair_index(path, tmp_path / "repaired")
    saved, _ = content(tmp_path / "repaired")
    assert {i: item.code for i, item in saved.items()} == {i: x.code for i, x in items.items()}
    keyed = sum(item.key is not None for item in items.values())
    assert any(f"{keyed:,} items lost everything but the code" in one for one in report.remarks)
    assert report.lost_notes == 200


def test_an_index_of_older_versions_has_neither_spare_nor_fine_checksums(undamaged, tmp_path):
    """The loss is then a whole block of the catalogue's checksums."""
    source, items, _ = undamaged["closed"]
    path = tmp_path / "copy"
    shutil.copytree(source, path)
    for file in (path / "catalogue.spare", *path.glob("codes/*-sums")):
        file.unlink()
    overwrite(path / "codes/000003.codes", 0, random.Random(1))
    report = repair_index(path, tmp_path / "repaired")
    saved, _ = content(tmp_path / "repaired")
    assert len(saved) + report.lost_count == len(items)
    assert saved.items() <= items.items()
    assert 0 < report.lost_count < len(items)


def test_codes_whose_removal_is_unknown_are_kept_and_counted(undamaged, tmp_path):
    source, items, _ = undamaged["closed"]
    path = tmp_path / "copy"
    shutil.copytree(source, path)
    (path / "catalogue.spare").unlink()
    with sqlite3.connect(path / "catalogue.sqlite") as db:
        db.execute("UPDATE removed SET crc = crc + 1")
    db.close()
    report = repair_index(path, tmp_path / "repaired")
    saved, _ = content(tmp_path / "repaired")
    assert report.lost_count == 0
    # Items with a key are exactly those that were there; updated ones have their new codes.
    keyed = {i: item for i, item in items.items() if item.key is not None}
    assert {i: item for i, item in saved.items() if item.key is not None} == keyed
    assert items.items() <= saved.items()
    assert any("may have been removed before" in remark for remark in report.remarks)


def test_what_is_refused(undamaged, tmp_path):
    source = undamaged["closed"][0]
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "file").write_text("")
    with pytest.raises(UsageError, match="exists already"):
        repair_index(source, tmp_path / "taken")
    with pytest.raises(UsageError, match="is not an index"):
        repair_index(tmp_path / "taken", tmp_path / "new")
    path = tmp_path / "copy"
    shutil.copytree(source, path)
    with (
        Index.open(path, write=True),
        pytest.raises(FisherhashError, match="is being written"),
    ):
        repair_index(path, tmp_path / "new")
    for file in ("catalogue.spare", "catalogue.sqlite"):
        (path / file).unlink()
    with pytest.raises(FisherhashError, match="how long its codes are is lost"):
        repair_index(path, tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_codes_of_odd_widths_and_several_files(tmp_path, monkeypatch):
    """A code may lie in two blocks: both must be whole."""
    monkeypatch.setattr(change, "MAX_LENGTH", 1500)
    rng = np.random.default_rng(5)
    codes = rng.integers(0, 256, (4000, 11), dtype=np.uint8)
    with Index.create(tmp_path / "a", bits=88) as index:
        index.add_codes(codes)
    overwrite(tmp_path / "a/codes/000002.codes", 1, random.Random(2))
    report = repair_index(tmp_path / "a", tmp_path / "b")
    first, last = 1500 + 4096 // 11, 1500 + 8192 // 11
    assert report.lost_codes == [(first, last)]
    assert json.loads(json.dumps(report.to_json()))["lost_count"] == last - first + 1
    with Index.open(tmp_path / "b") as index:
        left = [i for i in range(4000) if not first <= i <= last]
        assert index.ids().tolist() == left
        assert (index.codes(left) == codes[left]).all()
        assert index.search(codes[:1], 1).to_list() == [[(0, 0)]]
