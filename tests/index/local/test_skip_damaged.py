"""Searching a damaged index by explicit wish: without what is damaged, and counted."""

import random
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parent))
from test_repair import BITS, WIDTH, content, fill, overwrite

from fisherhash.errors import FisherhashError, UsageError
from fisherhash.index import Index
from fisherhash.index.engine import small

QUERIES = np.random.default_rng(8).integers(0, 256, (4, WIDTH), dtype=np.uint8) & np.array(
    [255] * 7 + [0xF0], dtype=np.uint8
)


@pytest.fixture(scope="module")
def undamaged(tmp_path_factory):
    path = tmp_path_factory.mktemp("indexes") / "a"
    fill(path).close()
    return path, content(path)[0]


def brute_force(items, k):
    ids = np.array(sorted(items))
    codes = np.frombuffer(b"".join(items[i].code for i in sorted(items)), np.uint8)
    places, distances = small.nearest_by_numpy(QUERIES, codes.reshape(-1, WIDTH), BITS, k)
    return ids[places].tolist(), distances.tolist()


@pytest.mark.parametrize("name", ["000002.codes", "000002.runs", "000003.codes", "000004.ids"])
@pytest.mark.parametrize("how", ["block", "missing", "cut"])
def test_the_rest_is_searched_and_what_is_left_out_is_counted(undamaged, tmp_path, name, how):
    source, items = undamaged
    path = tmp_path / "copy"
    shutil.copytree(source, path)
    file = path / "codes" / name
    if name.endswith(".runs"):
        # Else nothing would be lost.
        file.with_name(f"{name}-copy").unlink()
    if how == "block":
        overwrite(file, 0 if name.endswith(".runs") else 1, random.Random(3))
    elif how == "cut":
        file.write_bytes(file.read_bytes()[:-8])
    else:
        file.unlink()
    with pytest.raises(FisherhashError, match=name), Index.open(path) as index:
        index.search(QUERIES, 5)
    with Index.open(path, skip_damaged=True) as index:
        left = {item.id: item for item in index.items()}
        assert 0 < index.unavailable == len(items) - len(left)
        assert left.items() <= items.items()
        assert len(index) == index.count() == len(left)
        assert index.ids().tolist() == sorted(left)
        found = index.search(QUERIES, 30)
        assert (found.ids.tolist(), found.distances.tolist()) == brute_force(left, 30)
        near = index.within(QUERIES, 20)
        assert set(near.ids.tolist()) <= set(left)
        cats = {i: item for i, item in left.items() if item.labels}
        if cats:
            found = index.search(QUERIES, 30, where="label=cat")
            assert (found.ids.tolist(), found.distances.tolist()) == brute_force(cats, 30)
        assert {item.id for item in index.items("label=cat")} == set(cats)
        assert index.get_items(np.array(sorted(items))) == [left.get(i) for i in sorted(items)]


def test_damaged_runs_have_a_copy(undamaged, tmp_path):
    source, items = undamaged
    shutil.copytree(source, tmp_path / "copy")
    (tmp_path / "copy" / "codes" / "000002.runs").write_bytes(b"no runs")
    with Index.open(tmp_path / "copy", skip_damaged=True) as index:
        assert index.unavailable == 0
        assert {item.id: item for item in index.items()} == items


def test_a_whole_index_leaves_nothing_out(undamaged):
    path, items = undamaged
    with Index.open(path, skip_damaged=True) as index:
        assert index.unavailable == 0
        assert len(index) == len(items)
    with Index.open(path) as index:
        assert index.unavailable is None
    with pytest.raises(UsageError, match="only read with skip_damaged"):
        Index.open(path, write=True, skip_damaged=True)


def test_a_reader_follows_a_writer(undamaged, tmp_path):
    source, _ = undamaged
    path = tmp_path / "copy"
    shutil.copytree(source, path)
    # Bytes of codes that are all removed or updated later do not matter to the writer.
    overwrite(path / "codes/000003.codes", 1, random.Random(3))
    with Index.open(path, skip_damaged=True) as reader:
        before, unavailable = len(reader), reader.unavailable
        with Index.open(path, write=True) as writer:
            writer.add_codes(np.zeros((10, WIDTH), np.uint8))
        assert len(reader) == before + 10
        assert reader.unavailable == unavailable
        assert reader.search(np.zeros((1, WIDTH), np.uint8), 3).distances.tolist() == [[0, 0, 0]]
