"""Damaged files: an error that names the file or the right answer, never a wrong one."""

import logging
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

from fisherhash.errors import FisherhashError
from fisherhash.index import Entry, Index
from fisherhash.index.local import segments

BITS = 32
QUERIES = np.random.default_rng(9).integers(0, 256, (3, 4), dtype=np.uint8)
DERIVED = ("lock", "catalogue.sqlite-shm", "catalogue.spare", "-sums")
"""Files that no answer depends on; test_repair.py damages the last two."""


def fill(path, *, tables=False):
    """Several files: ids implied, ascending and loose, removed positions, rows, perhaps tables."""
    rng = np.random.default_rng(1)
    index = Index.create(path, bits=BITS)

    def codes(count):
        return rng.integers(0, 256, (count, 4), dtype=np.uint8)

    index.add(
        [
            Entry(f"{i}.jpg", code, size=i, labels=["cat", "dog"][i % 2], metadata={"year": i})
            for i, code in enumerate(codes(300))
        ],
        notes={"skipped": {f"bad {i}.jpg": {"reason": "damaged", "size": i} for i in range(40)}},
    )
    index.remove([f"{i}.jpg" for i in range(0, 100, 7)])
    index.compact()
    index.add_codes(codes(700))
    index.update(Entry(f"{i}.jpg", code) for i, code in enumerate(codes(60), 100))
    index.remove(ids=range(400, 450))
    if tables:
        index.build()
    return index


def answers(path):
    """Everything a user can ask, as plain data."""
    with Index.open(path) as index:
        found = [index.search(QUERIES, 20), index.search(QUERIES, 20, where={"label": "cat"})]
        near = index.within(QUERIES, 9)
        return (
            len(index),
            [(one.ids.tolist(), one.distances.tolist()) for one in found],
            (near.offsets.tolist(), near.ids.tolist()),
            index.files(),
            list(index.items()),
            index.get(index.keys()),
            index.notes("skipped"),
            [(ids.tolist(), codes.tolist()) for ids, codes in index.scan()],
        )


def answers_or_error(path):
    try:
        return answers(path), None
    except FisherhashError as error:
        return None, str(error)


@pytest.fixture(scope="module")
def undamaged(tmp_path_factory):
    """Indexes as they are at rest and as an ended writer leaves them, with their answers."""
    root = tmp_path_factory.mktemp("indexes")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(segments, "TAIL", 100)
        fill(root / "closed", tables=True).close()
    script = dedent(f"""
        import os, sys
        sys.path.insert(0, {str(Path(__file__).parent)!r})
        from pathlib import Path
        import test_corruption
        index = test_corruption.fill(Path({str(root / "killed")!r}))
        os._exit(0)
    """)
    subprocess.run([sys.executable, "-c", script], check=True)
    # As after a kill while the log was moved: rows must be told by their own checksums.
    shutil.copytree(root / "closed", root / "without sums")
    (root / "without sums" / "catalogue.sums").unlink()
    names = ("closed", "killed", "without sums")
    return {name: (root / name, answers(root / name)) for name in names}


def files_of(path):
    return sorted(
        file.relative_to(path).as_posix()
        for file in path.rglob("*")
        if file.is_file() and not file.name.endswith(DERIVED)
    )


def damage(rng, file):
    """Flip bits, overwrite, cut off, or empty a file; how."""
    data = bytearray(file.read_bytes())
    kind = rng.choice(["bit", "bit", "bit", "zeros", "noise", "cut", "empty", "longer"])
    place = rng.randrange(len(data)) if data else 0
    if kind == "bit" and data:
        data[place] ^= 1 << rng.randrange(8)
    elif kind == "zeros":
        data[place : place + 512] = bytes(len(data[place : place + 512]))
    elif kind == "noise":
        data[place : place + 64] = rng.randbytes(len(data[place : place + 64]))
    elif kind == "cut":
        data = data[:place]
    elif kind == "empty":
        data = b""
    else:
        data += rng.randbytes(100)
    same = bytes(data) == file.read_bytes()
    file.write_bytes(data)
    return f"{kind} at {place} of {file.name}", same


def check_damage(undamaged, tmp_path, rng, state, name):
    source, expected = undamaged[state]
    path = tmp_path / "copy"
    shutil.copytree(source, path)
    try:
        how, same = damage(rng, path / name)
        problems = [
            problem
            for problem in Index.examine(path)
            if state != "without sums" or (problem.file != "catalogue.sums")
        ]
        found, error = answers_or_error(path)
        if error:
            named = Path(name).name.removesuffix("-wal")
            assert named in error, (how, error)
            assert problems, (how, error)
            return "refused"
        assert found == expected, how
        if not same and not problems:
            # Bytes that nobody reads: behind the committed end, or in a log's old part.
            unread = name.startswith(("codes/", "tables/")) or name.endswith("-wal")
            assert unread or (state, name) == ("without sums", "catalogue.sqlite"), how
            return "unused"
        if problems:
            assert any(Path(name).name in str(problem) for problem in problems), (how, problems)
        return "reported"
    finally:
        shutil.rmtree(path)


def run_damages(undamaged, tmp_path, rounds, seed):
    rng = random.Random(seed)
    logging.disable(logging.WARNING)
    outcomes = {}
    try:
        for _ in range(rounds):
            for state in undamaged:
                for name in files_of(undamaged[state][0]):
                    outcome = check_damage(undamaged, tmp_path, rng, state, name)
                    outcomes.setdefault((state, name), []).append(outcome)
    finally:
        logging.disable(logging.NOTSET)
    return outcomes


def test_damage_of_every_file(undamaged, tmp_path):
    outcomes = run_damages(undamaged, tmp_path, 2, seed=os.urandom(8))
    names = {name for _, name in outcomes}
    assert {"catalogue.sqlite", "catalogue.sqlite-wal", "catalogue.sums", "head"} <= names
    assert {Path(name).suffix for name in names} >= {".codes", ".ids", ".table"}


@pytest.mark.slow
def test_much_damage_of_every_file(undamaged, tmp_path):
    outcomes = run_damages(undamaged, tmp_path, 60, seed=os.urandom(8))
    for (_, name), found in outcomes.items():
        if name.endswith((".codes", ".ids")):
            assert found.count("refused") > 10, name


def test_every_byte_of_the_small_files(undamaged, tmp_path):
    """A flipped bit in head or the sums is told by verify and changes no answer."""
    for name in ("head", "catalogue.sums"):
        source, expected = undamaged["closed"]
        path = tmp_path / "copy"
        shutil.copytree(source, path)
        data = (path / name).read_bytes()
        for place in range(0, len(data), 5):
            changed = bytearray(data)
            changed[place] ^= 4
            (path / name).write_bytes(changed)
            assert [problem.file for problem in Index.examine(path)] == [name], place
        assert answers(path) == expected
        with Index.open(path, write=True):
            pass
        assert Index.examine(path) == []
        shutil.rmtree(path)


def test_every_byte_of_the_schema(undamaged, tmp_path):
    """Names that are no UTF-8, above all: Python's module cannot tell what SQLite says of them."""
    source, expected = undamaged["without sums"]
    path = tmp_path / "copy"
    shutil.copytree(source, path)
    file = path / "catalogue.sqlite"
    data = file.read_bytes()
    start, end = data.index(b"CREATE TABLE items") - 60, 4096
    for place in range(start, end, 3):
        changed = bytearray(data)
        changed[place] |= 0x80
        if changed[place] == data[place]:
            continue
        file.write_bytes(changed)
        found, error = answers_or_error(path)
        problems = Index.examine(path)
        assert found == expected or "catalogue.sqlite" in (error or ""), place
        assert not error or [p.file for p in problems] == ["catalogue.sqlite"], place


@pytest.mark.parametrize(
    "statement",
    [
        "UPDATE notes SET value = '{}' WHERE name = 'bad 3.jpg'",
        "UPDATE notes SET name = 'good 3.jpg' WHERE name = 'bad 3.jpg'",
        "UPDATE notes SET value = x'7b7d' WHERE name = 'bad 3.jpg'",
        "UPDATE notes SET value = 7 WHERE name = 'bad 3.jpg'",
        "DELETE FROM notes WHERE name = 'bad 3.jpg'",
        "INSERT INTO notes VALUES ('skipped', 'old.jpg', '1', 1)",
        "DELETE FROM notes",
        "DROP TABLE notes",
    ],
)
def test_a_note_that_is_not_what_was_written_is_noticed(undamaged, tmp_path, statement):
    path = tmp_path / "copy"
    shutil.copytree(undamaged["without sums"][0], path)
    db = sqlite3.connect(path / "catalogue.sqlite")
    db.execute(statement)
    db.commit()
    db.close()
    assert [problem.file for problem in Index.examine(path)] == ["catalogue.sqlite"]
    for write in (False, True):
        with pytest.raises(FisherhashError, match=r"catalogue\.sqlite is damaged: .*note"):
            Index.open(path, write=write)


def test_a_missing_file_is_named(undamaged, tmp_path):
    for state in undamaged:
        source, expected = undamaged[state]
        for name in files_of(source):
            path = tmp_path / "copy"
            shutil.copytree(source, path)
            (path / name).unlink()
            found, error = answers_or_error(path)
            if error:
                assert "catalogue.sqlite" in error or Path(name).name in error
                (problem,) = Index.examine(path)[:1]
                assert problem.file in (name, "catalogue.sqlite", str(path))
            else:
                assert found == expected
                assert name == "head" or name.startswith(("tables", "catalogue.sums")), name
            shutil.rmtree(path)


def test_a_damaged_table_is_made_again(undamaged, tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(segments, "TAIL", 100)
    source, expected = undamaged["closed"]
    path = tmp_path / "copy"
    shutil.copytree(source, path)
    tables = sorted((path / "tables").glob("*.table"))
    assert len(tables) == 2
    for table in tables:
        data = bytearray(table.read_bytes())
        data[len(data) // 2] ^= 1
        table.write_bytes(data)
    assert {problem.file for problem in Index.examine(path)} == {
        table.relative_to(path).as_posix() for table in tables
    }
    assert answers(path) == expected
    assert "is damaged and will be built again" in caplog.text
    with Index.open(path, write=True) as index:
        index.build()
    assert Index.examine(path) == []


def test_lost_commits_are_noticed(undamaged, tmp_path):
    """Without its log the catalogue opens as an older one; head knows better."""
    path = tmp_path / "copy"
    shutil.copytree(undamaged["killed"][0], path)
    for end in ("-wal", "-shm"):
        (path / f"catalogue.sqlite{end}").unlink()
    for write in (False, True):
        with pytest.raises(FisherhashError, match="has lost commits: it holds commit"):
            Index.open(path, write=write)


def test_a_writer_that_refuses_an_index_leaves_it_alone(undamaged, tmp_path):
    path, name = tmp_path / "copy", "catalogue.sqlite-wal"
    shutil.copytree(undamaged["killed"][0], path)
    data = bytearray((path / name).read_bytes())
    data[20] ^= 1
    data[len(data) // 2 + 20] ^= 1
    (path / name).write_bytes(data)
    before = {file: (path / file).read_bytes() for file in files_of(path)}
    with pytest.raises(FisherhashError, match=r"lost commits"):
        Index.open(path, write=True)
    assert {file: (path / file).read_bytes() for file in files_of(path)} == before


def test_a_reader_meets_a_change_that_sqlite_must_roll_back(undamaged, tmp_path):
    """What a kill leaves while the catalogue goes to or from its log: a hot journal."""
    source, expected = undamaged["without sums"]
    path = tmp_path / "copy"
    shutil.copytree(source, path)
    script = dedent(f"""
        import os, sqlite3
        db = sqlite3.connect({str(path / "catalogue.sqlite")!r}, isolation_level=None)
        db.execute("PRAGMA cache_size = 1")
        db.execute("BEGIN")
        db.execute("UPDATE items SET path = 'wrong', crc = crc + 1")
        db.execute("DELETE FROM files")
        os._exit(0)
    """)
    subprocess.run([sys.executable, "-c", script], check=True)
    assert (path / "catalogue.sqlite-journal").stat().st_size > 0
    assert answers(path) == expected
    assert Index.examine(path) == []
    with Index.open(path, write=True) as index:
        index.add_codes(QUERIES)
        assert index.verify() == []
    assert Index.examine(path) == []


def limited(script, limit):
    """Run a script in a process that cannot write files longer than ``limit`` bytes."""
    # The process lowers its own limit: between fork and exec, threads of other tests' servers may
    # abort it.
    lower = f"import resource\nresource.setrlimit(resource.RLIMIT_FSIZE, ({limit}, {limit}))\n"
    return subprocess.run(
        [sys.executable, "-c", lower + dedent(script)],
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize("limit", [150_000, 300_000, 600_000, 1_300_000])
def test_a_full_disk_leaves_the_index_as_it_was(limit, tmp_path):
    """Code files, SQLite's log or its checkpoint meet the limit, whichever is first."""
    path = tmp_path / "a.index"
    codes = np.random.default_rng(0).integers(0, 256, (30_000, 8), dtype=np.uint8)
    with Index.create(path, bits=64) as index:
        index.add(Entry(f"a{i}", codes[i]) for i in range(1000))
    script = f"""
        import numpy as np
        from fisherhash.errors import FisherhashError
        from fisherhash.index import Entry, Index
        codes = np.random.default_rng(0).integers(0, 256, (30_000, 8), dtype=np.uint8)
        added = 1000
        with Index.open({str(path)!r}, write=True) as index:
            try:
                while True:
                    more = range(added, added + 1500)
                    index.add(Entry(f"a{{i}}", codes[i]) for i in more)
                    added += 1500
            except FisherhashError as error:
                print(error)
            assert len(index) == added, (len(index), added)
            assert index.verify() == []
            try:
                index.add_codes(np.zeros((200_000, 8), dtype=np.uint8))
            except FisherhashError as error:
                print(error)
            index.remove(["a7"])
            index.search(codes[:1])
        print(added)
    """
    done = limited(script, limit)
    assert done.returncode == 0, done.stderr
    first, second, added = done.stdout.splitlines()
    assert first.startswith(f"no room to write {path} (")
    assert second.startswith(f"no room to write {path} (")
    added = int(added)
    assert Index.examine(path) == []
    with Index.open(path, write=True) as index:
        assert len(index) == added - 1
        more = range(added, added + 1500)
        assert index.add(Entry(f"a{i}", codes[i]) for i in more).tolist() == list(more)
        kept = [i for i in range(added + 1500) if i != 7]
        assert sorted(index.files()) == sorted(f"a{i}" for i in kept)
        np.testing.assert_array_equal(index.codes(kept), codes[kept])
        assert index.verify() == []


def test_making_an_index_on_a_full_disk(tmp_path):
    done = limited(
        f"""
        from fisherhash.errors import FisherhashError
        from fisherhash.index import Entry, Index
        try:
            Index.create({str(tmp_path / "a")!r}, bits=8)
        except FisherhashError as error:
            print(error)
        """,
        8000,
    )
    assert done.returncode == 0, done.stderr
    assert str(tmp_path / "a") in done.stdout
    with Index.create(tmp_path / "a", bits=8) as index:
        assert index.verify() == []
