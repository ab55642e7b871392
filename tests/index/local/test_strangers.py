"""Files from strangers, with right checksums: no crash, no hang, nothing written elsewhere."""

import json
import os
import shutil
import sqlite3
import sys
import zlib
from pathlib import Path

import numpy as np
import pytest

from fisherhash.errors import FisherhashError
from fisherhash.index import Entry, Index
from fisherhash.index.local import repair
from fisherhash.index.local.blocks import read_block
from fisherhash.index.local.rows import SUMMED
from fisherhash.index.local.schema import State

sys.path.insert(0, str(Path(__file__).parent))
from damaging import edit
from faults import run_script

pytestmark = pytest.mark.skipif(os.name != "posix", reason="links and pipes of POSIX")


def codes(count, width=4, seed=0):
    rng = np.random.default_rng(seed)
    return rng.integers(0, 256, (count, width), dtype=np.uint8)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    path = tmp_path_factory.mktemp("strangers") / "a.index"
    with Index.create(path, bits=32, files={"config.json": b"{}"}) as index:
        index.add(
            Entry(f"k{i}", code, f"/p/{i}", labels="x", metadata={"i": i})
            for i, code in enumerate(codes(3000))
        )
        index.add_codes(codes(3000))
        index.write_notes({"skipped": {"a": 1}})
    return path


@pytest.fixture
def path(whole, tmp_path):
    return Path(shutil.copy(whole, tmp_path / "a.index"))


USES = (
    lambda index: index.search(codes(2)),
    lambda index: index.search(codes(2), where="label=x"),
    lambda index: list(index.items()),
    lambda index: index.get_items(["k3", "k2999"]),
    lambda index: index.files(),
    lambda index: index.notes("skipped"),
    lambda index: index.model_files(),
    lambda index: index.verify(),
    lambda index: index.upsert([Entry("new", codes(1)[0]), Entry("k7", codes(1)[0])]),
    lambda index: index.add_codes(codes(5000)),
    lambda index: index.write_notes({"skipped": {"a": None}}),
    lambda index: index.remove(["k8"], ids=[3, 4]),
)


def refusals(path, write=True):
    """What the uses of an index say that fail."""
    said = []
    for use in USES if write else USES[:8]:
        try:
            with Index.open(path, write=write) as index:
                use(index)
        except FisherhashError as error:
            said.append(str(error))
    return said


@pytest.mark.parametrize("end", ["-wal", "-shm", "-journal"])
@pytest.mark.parametrize("kind", ["link", "pipe", "folder"])
def test_what_lies_beside_it_is_never_followed(path, tmp_path, end, kind):
    outside, beside = tmp_path / "outside", Path(f"{path}{end}")
    outside.write_bytes(b"precious" * 1000)
    if kind == "link":
        beside.symlink_to(outside)
    elif kind == "pipe":
        os.mkfifo(beside)
    else:
        beside.mkdir()
    for write in (False, True):
        with pytest.raises(FisherhashError, match="is not a regular file; delete it"):
            Index.open(path, write=write)
    assert outside.read_bytes() == b"precious" * 1000


def test_a_journal_is_refused(path, tmp_path):
    """SQLite would play it back, and delete the file that its last bytes name."""
    Path(f"{path}-journal").write_bytes(bytes.fromhex("d9d505f920a163d7") * 100)
    with pytest.raises(FisherhashError, match="no index has such a file"):
        Index.open(path)
    assert Index.examine(path)[0].what.startswith("cannot be opened")


@pytest.mark.parametrize(
    "statement",
    [
        "CREATE VIEW v AS SELECT 1",
        "CREATE TRIGGER t AFTER INSERT ON items BEGIN DELETE FROM blocks; END",
        "CREATE TABLE more (a)",
        "CREATE INDEX again ON items (key)",
        "DROP INDEX blocks_changed",
        "ALTER TABLE items ADD COLUMN a GENERATED ALWAYS AS (zeroblob(1000000000))",
        "DROP TABLE items; CREATE VIEW items AS WITH RECURSIVE c(x) AS "
        "(SELECT 1 UNION ALL SELECT x + 1 FROM c) SELECT x AS id FROM c",
    ],
)
def test_other_tables_are_refused_before_they_are_queried(path, statement):
    edit(path, *statement.split("; ", 1) if statement.startswith("DROP T") else [statement])
    for write in (False, True):
        with pytest.raises(FisherhashError, match="its tables are not those of an index"):
            Index.open(path, write=write)


def set_meta(path, name, value):
    text = json.dumps(value)
    crc = zlib.crc32(text.encode(), zlib.crc32(name.encode()))
    db = sqlite3.connect(path)
    with db:
        db.execute("UPDATE meta SET value = ?, crc = ? WHERE name = ?", (text, crc, name))
    db.close()


FACTS = {"bits": 32, "fingerprint": None, "model": {}}
STATE = State(4, 6000, 6000, 2, 1)._asdict()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("index", FACTS | {"bits": bits}) for bits in (0, 1025, "32", True, None, 40)),
        *(("index", value) for value in ([], 7, FACTS | {"model": []}, FACTS | {"fingerprint": 1})),
        ("index", {"bits": 32}),
        *(("state", STATE | {"next_id": id_}) for id_ in (-1, 5, 2**62, 1.5, "6000")),
        *(("state", STATE | {"live": live}) for live in (0, 6001, 2**61)),
        *(("state", STATE | {"blocks": blocks}) for blocks in (0, 3, 2**60)),
        *(("state", STATE | {"notes": notes}) for notes in ([], {"a": 1}, {"a": [1]}, {"a": "bc"})),
        *(("state", STATE | {"files": files}) for files in (3, [1], [1, 2, 3], [1, None])),
        ("state", STATE | {"more": 1}),
        ("state", []),
    ],
)
def test_facts_that_no_writer_stores_are_refused(path, tmp_path, name, value):
    set_meta(path, name, value)
    said = refusals(path)
    assert said
    assert all("is damaged" in one or "codes of 40 bits" in one for one in said), said
    assert Index.examine(path)
    try:
        repair(path, tmp_path / "b.index")
    except FisherhashError:
        assert name == "index"


def recompute(path, block):
    """Right checksums of a block, and of the state."""
    from fisherhash.index.local import blocks as module

    db = sqlite3.connect(path)
    row = db.execute(f"{module.SELECT_BLOCKS} WHERE block = ?", (block,)).fetchone()
    with db:
        crc = module._crc(block, row[1], row[3:])
        db.execute("UPDATE blocks SET crc = ? WHERE block = ?", (crc, block))
        (total,) = db.execute("SELECT sum(crc) FROM blocks").fetchone()
        (text,) = db.execute("SELECT value FROM meta WHERE name = 'state'").fetchone()
    db.close()
    set_meta(path, "state", json.loads(text) | {"blocks_sum": total})


@pytest.mark.parametrize(
    "change",
    [
        "present = zeroblob(511)",
        "present = zeroblob(512)",
        "named = zeroblob(0)",
        "hashes = zeroblob(4)",
        "codes = substr(codes, 2)",
        "codes = zeroblob(10000000)",
        "named = present, present = named",
        "codes = CAST('' AS BLOB)",
    ],
)
@pytest.mark.parametrize("block", [0, 1])
def test_blocks_that_no_writer_stores_are_refused(path, change, block):
    edit(path, f"UPDATE blocks SET {change} WHERE block = {block}")
    recompute(path, block)
    said = refusals(path)
    assert all(f"block {block} of its codes" in one or "blocks of codes" in one for one in said)
    # The second block has no names to exchange.
    assert said or (block, change[:5]) == (1, "named")


@pytest.mark.parametrize(
    "change",
    [
        *(f"labels = {value}" for value in ("'['", "'null'", "'[1]'", "'{}'", "x'ff'", "1.5")),
        *(f"metadata = {value}" for value in ("'['", "'[]'", "x'7b7d'", "7")),
        "path = 1.5, size = 'x', mtime_ns = x'ff'",
    ],
)
def test_rows_that_no_writer_stores_give_no_traceback(path, change):
    edit(path, f"UPDATE items SET {change} WHERE id = 7")
    db = sqlite3.connect(path)
    (text,) = db.execute(f"SELECT {SUMMED} FROM items WHERE id = 7").fetchone()
    with db:
        db.execute("UPDATE items SET crc = ? WHERE id = 7", (zlib.crc32(text),))
    db.close()
    for said in refusals(path):
        assert "damaged" in said
    Index.examine(path)


def test_blocks_are_read_with_care():
    for row in ((0, 1, 5, None, None, None, None), (0, None, "x", b"", b"", b"", b"")):
        with pytest.raises(ValueError, match="checksum"):
            read_block(row, 4)


def test_a_tree_whose_pages_repeat_ends(path):
    """A tree whose branches all lead to the same leaves has more rows than anybody can read."""
    db = sqlite3.connect(path, isolation_level=None)
    (root,) = db.execute("SELECT rootpage FROM sqlite_master WHERE name = 'items'").fetchone()
    (pages,) = db.execute("PRAGMA page_count").fetchone()
    db.close()
    data, size = bytearray(path.read_bytes()), 4096
    top = data[(root - 1) * size : root * size]
    assert top[0] == 5, "the table is not a tree of several pages"
    # Interior pages: 300 cells that all lead to the page below, twelve levels deep.
    new, child = [], int.from_bytes(top[8:12], "big")
    for level in range(12):
        page = bytearray(size)
        page[0], page[3:5], page[8:12] = 5, (300).to_bytes(2, "big"), child.to_bytes(4, "big")
        place = size
        for cell in range(300):
            body = child.to_bytes(4, "big") + bytes([0x81 + cell // 128 % 64, cell % 128])
            place -= len(body)
            page[place : place + len(body)] = body
            page[12 + 2 * cell : 14 + 2 * cell] = place.to_bytes(2, "big")
        page[5:7] = place.to_bytes(2, "big")
        if level == 11:
            data[(root - 1) * size : root * size] = page
        else:
            new.append(page)
            child = pages + len(new)
    data += b"".join(new)
    data[28:32] = (pages + len(new)).to_bytes(4, "big")
    path.write_bytes(data)
    script = """
    for ask in (lambda i: i.count("label=y"), lambda i: list(i.items()), lambda i: i.files()):
        try:
            with Index.open(path) as index:
                print(ask(index))
        except FisherhashError as error:
            print(error)
    print(len(Index.examine(path)) > 0)
    """
    done = run_script(script, path, timeout=100)
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) == 4
    assert done.stdout.count("is damaged") == 3, done.stdout
    assert done.stdout.endswith("True\n")
