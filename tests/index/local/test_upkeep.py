"""Backups and repairs: complete or not there at all, beside writers and after kills."""

import os
import shutil
import signal
import sqlite3
import sys
from pathlib import Path

import numpy as np
import pytest

from fisherhash.errors import FisherhashError, UsageError
from fisherhash.index import Entry, Index
from fisherhash.index.local import backup, repair

sys.path.insert(0, str(Path(__file__).parent))
from damaging import ASKED, FILES, edit, fill, pages_of
from faults import build_library, run_script, start_script

PAGE = 4096


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    path = tmp_path_factory.mktemp("whole") / "a.index"
    fill(path)
    return path


@pytest.fixture
def path(whole, tmp_path):
    return Path(shutil.copy(whole, tmp_path / "a.index"))


def answers(path):
    with Index.open(path) as index:
        return {name: ask(index) for name, ask in ASKED.items()}


@pytest.mark.parametrize("make", [backup, repair])
def test_a_copy_has_everything(path, tmp_path, make):
    report = make(path, tmp_path / "new" / "b.index")
    assert answers(tmp_path / "new" / "b.index") == answers(path)
    assert os.listdir(tmp_path / "new") == ["b.index"]
    assert Index.examine(tmp_path / "new" / "b.index") == []
    if make is backup:
        assert (report.count, report.bytes) == (5265, (tmp_path / "new" / "b.index").stat().st_size)
        assert report.to_json()["target"] == str(tmp_path / "new" / "b.index")
    else:
        assert str(report) == "5,265 items saved, 0 lost"
        assert (report.lost, report.lost_codes, report.lost_notes, report.remarks) == (
            [],
            [],
            0,
            [],
        )
        assert report.to_json()["lost_count"] == 0


@pytest.mark.parametrize("make", [backup, repair])
def test_what_is_refused(path, tmp_path, make):
    (tmp_path / "text").write_text("no index")
    for message, source, target in (
        ("exists already", path, path),
        ("exists already", path, tmp_path / "text"),
        ("does not exist", tmp_path / "nothing", tmp_path / "b"),
        ("is a folder", tmp_path, tmp_path / "b"),
        ("is no index", tmp_path / "text", tmp_path / "b"),
    ):
        with pytest.raises(UsageError, match=message):
            make(source, target)
    assert sorted(os.listdir(tmp_path)) == ["a.index", "text"]


def test_a_damaged_index_is_not_backed_up(path, tmp_path):
    edit(path, "UPDATE items SET size = 1 WHERE id = 101")
    with pytest.raises(FisherhashError, match=r"cannot be backed up.*item 101.*Nothing was kept"):
        backup(path, tmp_path / "b.index")
    assert os.listdir(tmp_path) == ["a.index"]


def test_backups_beside_a_busy_writer(path, tmp_path):
    writer = start_script(
        """
        with Index.open(path, write=True) as index:
            print("ready", flush=True)
            number = 0
            while os.path.exists(path.with_name("go")):
                number += 1
                index.add([Entry(f"w{number}", codes(1, number, 4)[0])], notes={"w": {"n": number}})
                index.add_codes(codes(1000, number, 4))
        """,
        path,
    )
    (tmp_path / "go").touch()
    assert writer.stdout.readline() == "ready\n"
    counts = []
    for number in range(6):
        target = tmp_path / f"{number}.index"
        counts.append(backup(path, target).count)
        with Index.open(target, write=True) as copy:
            last = copy.notes("w").get("n", 0)
            # A commit of the writer is there wholly or not at all.
            assert counts[-1] - 5265 in (last * 1001, last * 1001 - 1000)
            assert copy.verify() == []
            copy.add([Entry("mine", bytes(4))])
    (tmp_path / "go").unlink()
    assert writer.wait() == 0
    assert counts[-1] > counts[0]
    assert Index.examine(path) == []


@pytest.mark.parametrize("make", ["backup", "repair"])
def test_killed_anywhere_it_is_complete_or_not_there(path, tmp_path, make):
    library = build_library(tmp_path)
    target, expected, ends = tmp_path / "b.index", answers(path), set()
    script = f"""
    from fisherhash.index.local import {make}
    {make}(path, path.with_name("b.index"))
    """
    for call, points in (("write", (0, 5, 40, 90)), ("sync", (0, 1, 2, 3, 5)), ("truncate", (0,))):
        for skip in points:
            fault = {"path": "b.index", "call": call, "skip": skip, "kill": 1}
            died = run_script(script, path, library=library, **fault)
            assert died.returncode in (0, -signal.SIGKILL), died.stderr
            ends.add((died.returncode, target.exists()))
            assert target.exists() >= (died.returncode == 0)
            if target.exists():
                assert answers(target) == expected
                target.unlink()
    assert (-signal.SIGKILL, False) in ends
    assert answers(path) == expected
    (backup if make == "backup" else repair)(path, target)
    assert {name for name in os.listdir(tmp_path) if "index" in name} == {"a.index", "b.index"}


# What a repair loses


def assert_lost(table, error):
    assert table == "meta", error
    assert "cannot be repaired: what says how long its codes are is lost" in str(error)


@pytest.mark.parametrize("table", ["items", "blocks", "notes", "files", "meta"])
def test_a_damaged_page_costs_what_lies_on_it(path, tmp_path, table):
    """Pages of rows, overwritten with noise; only the first page of a table may cost more."""
    before, data = answers(path), path.read_bytes()
    items = {item.id: item for item in before["items"]}
    db = sqlite3.connect(path)
    query = "SELECT rootpage FROM sqlite_master WHERE name = ?"
    (root,) = db.execute(query, (table,)).fetchone()
    db.close()
    pages = [n for n, name in pages_of(path).items() if name == table and n != root]
    rng = np.random.default_rng(0)
    for number in pages[:: max(1, len(pages) // 6)] or [root]:
        damaged = bytearray(data)
        damaged[(number - 1) * PAGE : number * PAGE] = rng.bytes(PAGE)
        path.write_bytes(damaged)
        try:
            report = repair(path, tmp_path / "b.index")
        except FisherhashError as error:
            assert_lost(table, error)
            continue
        assert report.remarks
        with Index.open(tmp_path / "b.index") as index:
            kept = {item.id: item for item in index.items()}
            notes, files = index.notes("skipped"), index.model_files()
        assert kept.items() <= items.items()
        lost = items.keys() - kept.keys()
        if table == "items":
            assert 0 < len(lost) < 100
            assert lost == {item.id for item in report.lost}
        elif table == "blocks":
            assert len({i // 4096 for i in lost}) == 1
            assert {item.key for item in report.lost} == {items[i].key for i in lost} - {None}
        else:
            assert not lost
            if table == "notes":
                assert report.lost_notes > 0
                assert notes.items() <= before["notes"].items()
            elif table == "files":
                assert files == {}
                assert "the model that the index carries is damaged" in report.remarks[-1]
        (tmp_path / "b.index").unlink()


def test_facts_are_stored_twice(path, tmp_path):
    edit(path, "UPDATE meta SET value = 'x' WHERE name = 'index'", "DELETE FROM items WHERE id = 5")
    with pytest.raises(FisherhashError, match="the row 'index' of its table meta is damaged"):
        Index.open(path)
    report = repair(path, tmp_path / "b.index")
    assert [(item.key, item.id, item.reason) for item in report.lost] == [(None, 5, "is missing")]
    with Index.open(tmp_path / "b.index") as index:
        assert (index.bits, index.fingerprint, index.model_files()) == (32, "f" * 64, FILES)
    edit(path, "UPDATE meta SET value = 'x'")
    with pytest.raises(FisherhashError, match="how long its codes are is lost"):
        repair(path, tmp_path / "c.index")
    assert sorted(os.listdir(tmp_path)) == ["a.index", "b.index"]
