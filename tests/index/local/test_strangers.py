"""Indexes from strangers, with right checksums: no crash, no hang, nothing written elsewhere."""

import json
import os
import shutil
import sqlite3
import sys
import threading
import zlib
from pathlib import Path

import numpy as np
import pytest

from fisherhash.codes import hamming
from fisherhash.errors import FisherhashError
from fisherhash.index import Entry, Index
from fisherhash.index.engine import Engine
from fisherhash.index.local import segments

sys.path.insert(0, str(Path(__file__).parent))
from faults import run_script

pytestmark = pytest.mark.skipif(os.name != "posix", reason="links and pipes of POSIX")

COUNT = 6000


def codes(count=COUNT, width=4, seed=0):
    rng = np.random.default_rng(seed)
    return rng.integers(0, 256, (count, width), dtype=np.uint8)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A closed index with items, removed ones, updated ones and tables."""
    path = tmp_path_factory.mktemp("strangers") / "a.index"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(segments, "TAIL", 100)
        with Index.create(path, bits=32) as index:
            index.add(Entry(f"k{i}", code, labels="x") for i, code in enumerate(codes(100)))
            index.add_codes(codes()[100:])
            index.update([Entry("k5", codes()[5])])
            index.build()
    return path


@pytest.fixture
def path(whole, tmp_path):
    return Path(shutil.copytree(whole, tmp_path / "a.index"))


def use(path, write):
    """Everything a user does with an index."""
    with Index.open(path, write=write) as index:
        index.search(codes(2))
        index.search(codes(2), where="label=x")
        list(index.items())
        index.files()
        index.notes("skipped")
        index.verify()
        if write:
            index.add([Entry("new", codes(1)[0])])
            index.update([Entry("k7", codes(1)[0])])
            index.remove(["new"])
            index.build()
            index.compact()


def use_or_refuse(path, write):
    try:
        use(path, write)
    except FisherhashError as error:
        return str(error)
    return None


# 4: links

FILES = [
    "catalogue.sqlite",
    "catalogue.sqlite-wal",
    "catalogue.sqlite-shm",
    "catalogue.sqlite-journal",
    "catalogue.sums",
    "catalogue.sums.new",
    "head",
    "head.new",
    "lock",
    "codes/000001.codes",
    "codes/000002.ids",
    "codes/000002.codes",
    "codes/000003.codes",
    "folder.json",
    "skipped.csv",
]


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("write", [False, True])
def test_a_link_to_a_file_is_never_written_through(path, tmp_path, name, write):
    outside = tmp_path / "outside"
    if (path / name).exists():
        shutil.move(path / name, outside)
    else:
        outside.write_bytes(b"precious" * 100)
    before = outside.read_bytes()
    (path / name).symlink_to(outside)
    refused = use_or_refuse(path, write)
    assert outside.read_bytes() == before
    assert refused is None or str(path) in refused
    if name.startswith(("codes/000001", "codes/000002", "catalogue.sqlite")):
        assert refused
        assert Index.examine(path)


@pytest.mark.parametrize("folder", ["codes", "tables"])
@pytest.mark.parametrize("write", [False, True])
def test_a_link_to_a_folder_is_never_written_or_deleted_through(path, tmp_path, folder, write):
    outside = tmp_path / "outside"
    shutil.move(path / folder, outside)
    for name in ("000077.codes", "000077.ids", "000001-5.table", "000099-7.table", ".x.new"):
        (outside / name).write_bytes(b"precious")
        os.utime(outside / name, (0, 0))
    before = {file.name: file.read_bytes() for file in outside.iterdir()}
    (path / folder).symlink_to(outside)
    refused = use_or_refuse(path, write)
    assert {file.name: file.read_bytes() for file in outside.iterdir()} == before
    if folder == "codes":
        assert "a link" in refused
    else:
        assert refused is None
        assert "tables" in {problem.file for problem in Index.examine(path)}


def test_the_index_itself_may_be_reached_through_a_link(path, tmp_path):
    (tmp_path / "link").symlink_to(path)
    assert use_or_refuse(tmp_path / "link", write=True) is None


def test_a_journal_that_names_another_file_deletes_nothing(path, tmp_path):
    """SQLite deletes the file that a hot journal names as its super-journal."""
    victim = tmp_path / "victim"
    victim.write_bytes(b"precious\0")
    db = sqlite3.connect(path / "catalogue.sqlite", isolation_level=None)
    db.execute("PRAGMA cache_size = 1")
    db.execute("BEGIN")
    db.execute("UPDATE items SET path = 'x'")
    journal = (path / "catalogue.sqlite-journal").read_bytes()
    catalogue = (path / "catalogue.sqlite").read_bytes()
    db.execute("ROLLBACK")
    db.close()
    name = os.fsencode(victim)
    total = sum(name) & 0xFFFFFFFF
    tail = b"\0\0\1\1" + name + len(name).to_bytes(4, "big") + total.to_bytes(4, "big")
    magic = bytes.fromhex("d9d505f920a163d7")
    (path / "catalogue.sqlite").write_bytes(catalogue)
    (path / "catalogue.sqlite-journal").write_bytes(journal + tail + magic)
    for write in (False, True):
        refused = use_or_refuse(path, write)
        assert victim.exists()
        assert "names another file" in refused


# 15: pipes, and catalogues that no writer made


@pytest.mark.parametrize("name", [*FILES, "tables/000001-6000.table"])
@pytest.mark.parametrize("write", [False, True])
def test_a_pipe_does_not_hang(path, name, write):
    (path / name).unlink(missing_ok=True)
    os.mkfifo(path / name)
    done = []
    thread = threading.Thread(target=lambda: done.append(use_or_refuse(path, write)), daemon=True)
    thread.start()
    thread.join(60)
    assert done, "it hangs"
    if name.startswith(("codes/000001", "codes/000002", "catalogue.sqlite")):
        assert name in done[0]


def recompute(path):
    """Give a catalogue the sums of its bytes, as its maker would."""
    from fisherhash.index.local.guards import SUM_BLOCK

    data = (path / "catalogue.sqlite").read_bytes()
    commit = int((path / "head").read_bytes()[7:27])
    sums = [zlib.crc32(data[i : i + SUM_BLOCK]) for i in range(0, len(data), SUM_BLOCK)]
    text = json.dumps({"commit": commit, "size": len(data), "sums": sums}).encode()
    (path / "catalogue.sums").write_bytes(text + f"\n{zlib.crc32(text):08x}\n".encode())


def craft(path, *statements):
    db = sqlite3.connect(path / "catalogue.sqlite", isolation_level=None)
    db.create_function("crc", 1, lambda text: zlib.crc32(text.encode()))
    for statement in statements:
        db.execute(statement)
    db.close()
    recompute(path)


ENDLESS = "WITH RECURSIVE c(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM c) SELECT x"


OTHER_TABLES = {
    "view of items": [
        "DROP TABLE items",
        f"CREATE VIEW items AS {ENDLESS} AS id, 'k' AS key, '' AS path, 0 AS size, 0 AS mtime_ns, "
        "'[]' AS labels, '{}' AS metadata, 0 AS crc FROM c",
    ],
    "view of facts": [
        "ALTER TABLE facts RENAME TO old",
        "CREATE VIEW facts AS SELECT name, value, crc FROM old "
        f"WHERE EXISTS ({ENDLESS} FROM c WHERE x < 0)",
    ],
    "trigger": [
        "CREATE TRIGGER t AFTER INSERT ON items BEGIN DELETE FROM items WHERE id IN "
        f"(SELECT x FROM ({ENDLESS} FROM c)); END"
    ],
    "index": ["CREATE INDEX i ON items (json_extract(metadata, '$.a'))"],
    "table": ["CREATE TABLE other (x)"],
    "column": ["ALTER TABLE items ADD COLUMN extra AS (length(hex(zeroblob(1000000000))))"],
}


def test_a_catalogue_with_other_tables_is_refused_before_it_is_queried(path, tmp_path):
    for name, statements in OTHER_TABLES.items():
        craft(Path(shutil.copytree(path, tmp_path / "crafted" / name)), *statements)
    done = run_script(
        """
        for place in sorted(path.iterdir()):
            for write in (False, True):
                try:
                    with Index.open(place, write=write) as index:
                        list(index.items())
                        index.search(codes(1, width=4), where="label=x")
                        index.add([Entry("new", codes(1, width=4)[0])])
                    print(place.name, "opened")
                except FisherhashError as error:
                    print(place.name, error)
        """,
        tmp_path / "crafted",
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) == 2 * len(OTHER_TABLES)
    for line in lines:
        assert "is damaged: its tables are not those of an index" in line or "unsafe use" in line


FACTS = "UPDATE facts SET value = {0}, crc = crc({0}) WHERE name = '{1}'"


@pytest.mark.parametrize(
    "statement",
    [
        FACTS.format("'[]'", "state"),
        FACTS.format("'7'", "index"),
        FACTS.format("json_set(value, '$.more', 1)", "state"),
        FACTS.format("json_set(value, '$.commit', 'x')", "state"),
        FACTS.format("json_set(value, '$.live', -5)", "state"),
        FACTS.format("json_set(value, '$.next_id', 1e300)", "state"),
        FACTS.format("json_set(value, '$.bits', 1000000)", "index"),
        FACTS.format("json_set(value, '$.bits', 'many')", "index"),
        FACTS.format("json_remove(value, '$.bits')", "index"),
        FACTS.format("json_set(value, '$.fingerprint', 5)", "index"),
        FACTS.format("json_remove(value, '$.model')", "index"),
        FACTS.format(f"'{'[' * 20000}'", "state"),
    ],
)
def test_facts_that_no_writer_stores_are_refused(path, statement):
    craft(path, statement)
    for write in (False, True):
        refused = use_or_refuse(path, write)
        assert "catalogue.sqlite is damaged: its row" in refused


def file_row(path, number, **changes):
    """Change a row of a code file and every checksum that covers it."""
    from fisherhash.index.local.schema import FileRow, State

    db = sqlite3.connect(path / "catalogue.sqlite", isolation_level=None)
    names = ", ".join(FileRow._fields)
    rows = [FileRow(*row) for row in db.execute(f"SELECT {names} FROM files")]
    rows = [row._replace(**changes) if row.number == number else row for row in rows]
    db.execute("DELETE FROM files")
    for row in rows:
        marks = ", ".join("?" * (len(row) + 1))
        db.execute(f"INSERT INTO files VALUES ({marks})", (*row, row.crc()))
    (text,) = db.execute("SELECT value FROM facts WHERE name = 'state'").fetchone()
    total = sum(row.crc() for row in rows) % 2**64
    text = json.dumps(State(**json.loads(text))._replace(files_sum=total)._asdict())
    db.execute(
        "UPDATE facts SET value = ?, crc = ? WHERE name = 'state'",
        (text, zlib.crc32(text.encode())),
    )
    db.close()
    recompute(path)


@pytest.mark.parametrize(
    "changes",
    [
        {"length": 1 << 40},
        {"length": -1},
        {"length": "many"},
        {"kind": "odd"},
        {"kind": "runs"},
        {"kind": "sorted"},
        {"removed": 10**9},
        {"first_id": -(1 << 62)},
        {"first_id": (1 << 63) - 2},
        {"code_sums": b"abc"},
        {"code_sums": b""},
        {"code_sums": "text"},
    ],
)
def test_rows_of_code_files_that_no_writer_stores_are_refused(path, changes):
    try:
        file_row(path, 1, **changes)
    except (TypeError, AttributeError):
        pytest.skip("has no checksum")
    for write in (False, True):
        assert use_or_refuse(path, write)


@pytest.mark.parametrize("column", ["labels", "metadata"])
@pytest.mark.parametrize("value", ["{", "7", "[" * 50_000, '{"a": 1e999}', "[[1]]"])
def test_rows_of_items_that_no_writer_stores_give_no_traceback(path, column, value):
    from fisherhash.index.local.rows import item_crc

    db = sqlite3.connect(path / "catalogue.sqlite", isolation_level=None)
    db.execute(f"UPDATE items SET {column} = ? WHERE id = 9", (value,))
    row = db.execute("SELECT * FROM items WHERE id = 9").fetchone()
    db.execute("UPDATE items SET crc = ? WHERE id = 9", (item_crc(row[:-1]),))
    db.close()
    recompute(path)
    for write in (False, True):
        use_or_refuse(path, write)


def test_a_catalogue_whose_pages_repeat_ends(path):
    """A tree whose branches all lead to the same leaves has more rows than anybody can read."""
    with Index.open(path, write=True) as index:
        index.add(Entry(f"more {i}", code, metadata={"i": i}) for i, code in enumerate(codes(3000)))
    db = sqlite3.connect(path / "catalogue.sqlite", isolation_level=None)
    (page_size,) = db.execute("PRAGMA page_size").fetchone()
    (root,) = db.execute("SELECT rootpage FROM sqlite_master WHERE name = 'items'").fetchone()
    (pages,) = db.execute("PRAGMA page_count").fetchone()
    db.close()
    file = path / "catalogue.sqlite"
    data = bytearray(file.read_bytes())
    leaf = data[(root - 1) * page_size : root * page_size]
    assert leaf[0] == 5, "the table is not a tree of several pages"
    # Interior pages: 300 cells that all lead to the page below, ten levels deep.
    new = []
    child = int.from_bytes(leaf[8:12], "big")
    for level in range(12):
        page = bytearray(page_size)
        cells = 300
        page[0] = 5
        page[3:5] = cells.to_bytes(2, "big")
        page[8:12] = child.to_bytes(4, "big")
        place = page_size
        for cell in range(cells):
            body = child.to_bytes(4, "big") + bytes([0x81 + cell // 128 % 64, cell % 128])
            place -= len(body)
            page[place : place + len(body)] = body
            page[12 + 2 * cell : 14 + 2 * cell] = place.to_bytes(2, "big")
        page[5:7] = place.to_bytes(2, "big")
        if level == 11:
            data[(root - 1) * page_size : root * page_size] = page
        else:
            new.append(page)
            child = pages + len(new)
    data += b"".join(new)
    data[28:32] = (pages + len(new)).to_bytes(4, "big")
    file.write_bytes(data)
    recompute(path)
    done = run_script(
        """
        for ask in (lambda i: i.count("label=y"), lambda i: list(i.items()), lambda i: i.files()):
            try:
                with Index.open(path) as index:
                    print(ask(index))
            except FisherhashError as error:
                print(error)
        """,
        path,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) == 3
    assert done.stdout.count("is damaged") == 3, done.stdout


# 3: search tables


def forge(path, change):
    """Change arrays in a file of tables, with right checksums."""
    from fisherhash.index.local.table_files import read_tables, save_tables

    (name,) = ["tables/" + p.name for p in (path / "tables").glob("000001-*.table")]
    found = read_tables(path, name)
    arrays = {n: array.copy() for n, array in found.arrays.items()}
    change(arrays)
    assert save_tables(path, name, arrays, found.facts)


def swapped(arrays):
    arrays["words"][0, 0, [5, 6]] = arrays["words"][0, 0, [6, 5]]


def other_items(arrays):
    arrays["bucket_items"][0, :2] = arrays["bucket_items"][0, 1::-1]


def outside_items(arrays):
    arrays["bucket_items"][-1, 100:200] = 2**31


def falling(arrays):
    arrays["directory"][0, 5:-1] = arrays["directory"][0, 5:-1][::-1]


def huge(arrays):
    arrays["directory"][0, 9] = 2**32 - 1


def other_planes(arrays):
    arrays["planes"][7] ^= 1


def lists(arrays):
    total = int(arrays["layout"][1])
    arrays["layout"][3] = 1
    arrays["starts"] = np.array([0, total], dtype=np.uint32)
    arrays["positions"] = np.arange(total, dtype=np.uint32)


def wild_layout(arrays):
    arrays["layout"][4] = -3


def many_sides(arrays):
    arrays["starts"] = np.zeros((3, 3), dtype=np.uint32)


FORGED = [
    *(swapped, other_items, outside_items, falling, huge),
    *(other_planes, lists, wild_layout, many_sides),
]


def test_forged_tables_change_no_answer(path, tmp_path):
    for change in FORGED:
        forge(Path(shutil.copytree(path, tmp_path / "forged" / change.__name__)), change)
    script = """
    import logging
    logging.basicConfig(level=logging.WARNING, stream=sys.stdout)
    import fisherhash.index.local.segments as segments
    segments.TAIL = 100
    from fisherhash.index.engine import planner
    planner._SMALL = planner._TINY = 0
    queries = codes(200, seed=8, width=4)
    for place in sorted(path.iterdir()):
        with Index.open(place) as index:
            found, near = index.search(queries, 7), index.within(queries, 6)
        print(place.name, "done")
        np.savez(place / "found.npz", ids=found.ids, near=near.ids)
    """
    done = run_script(script, tmp_path / "forged")
    assert done.returncode == 0, (done.returncode, done.stdout, done.stderr)
    assert done.stdout.count("built again") == len(FORGED)
    distances = hamming(codes(200, seed=8), codes())
    order = np.argsort(distances, axis=1, kind="stable")
    near = np.concatenate([row[distances[i, row] <= 6] for i, row in enumerate(order)])
    for change in FORGED:
        found = np.load(tmp_path / "forged" / change.__name__ / "found.npz")
        np.testing.assert_array_equal(found["ids"], order[:, :7])
        np.testing.assert_array_equal(found["near"], near)


@pytest.mark.parametrize("bits", [8, 12, 32, 64, 200])
@pytest.mark.parametrize("distinct", [3, 5000])
def test_every_entry_of_tables_is_proven(bits, distinct):
    """One entry changed anywhere, out of range or not: the engine notices and is right."""
    width = -(-bits // 8)
    rng = np.random.default_rng(bits)
    some = codes(distinct, width, seed=1)[rng.integers(0, distinct, 5000)]
    some[:, -1] &= 0xFF << (-bits % 8) & 0xFF
    queries = some[:20]
    made = Engine(some, bits, path="buckets" if bits <= 128 else "unique")
    right = made.tables()
    expected = made.search(queries, 9)
    for name, array in right.items():
        for _ in range(0 if name == "layout" or not array.size else 3):
            changed = {n: a.copy() for n, a in right.items()}
            flat = changed[name].reshape(-1)
            items = int(right["layout"][3])
            if name == "words":
                place = int(rng.integers(items))
            elif name == "planes":
                place = int(rng.integers(PLANES)) if items >= PLANES else 0
            else:
                place = int(rng.integers(len(flat)))
            flat[place] = flat[place] ^ (1 << int(rng.integers(8 * flat.itemsize)))
            try:
                engine = Engine(some, bits, tables=changed, path=made.path)
            except FisherhashError:
                continue
            found = engine.search(queries, 9)
            assert engine.rejected, (name, place)
            for one, other in zip(found, expected, strict=True):
                np.testing.assert_array_equal(one, other)
    engine = Engine(some, bits, tables=right, path=made.path)
    engine.search(queries, 9)
    assert not engine.rejected


PLANES = 256
