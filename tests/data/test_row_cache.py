"""Rows on disk: what is there is not computed again, what is missing is never taken for a row."""

import os
import shutil
import subprocess
import sys
import time
from textwrap import dedent

import numpy as np
import pytest

from fisherhash.data.computing import Rows, Skipped
from fisherhash.data.row_cache import RowCache
from fisherhash.errors import FisherhashError


def block(indices, bad=()):
    """Row i is (i, i + 0.5, i + 0.25)."""
    numbers = np.array(indices, dtype=np.int64)
    rows = numbers[:, None].astype(np.float32) + np.array([0, 0.5, 0.25], np.float32)
    return Rows(rows, numbers, [Skipped(i, f"image {i}", f"reason {i}") for i in bad])


def opened(folder, count=10):
    return RowCache(folder, count, (3,), np.float32)


def _interrupt(*_):
    raise KeyboardInterrupt


def fill(cache, *blocks):
    for one in blocks:
        cache.store(one)


every = np.arange(10)


def test_rows_are_kept_for_the_next_process(tmp_path):
    cache = opened(tmp_path)
    assert cache.missing(every).tolist() == list(range(10))
    fill(cache, block([3, 1], bad=[7]), block([9]))
    for again in (cache, opened(tmp_path)):
        assert again.missing(every).tolist() == [0, 2, 4, 5, 6, 8]
        assert again.readable(every).tolist() == [1, 3, 9]
        assert again.rows[[9, 1]].tolist() == [[9, 9.5, 9.25], [1, 1.5, 1.25]]
        assert again.skipped(every) == [Skipped(7, "image 7", "reason 7")]
        assert again.skipped(np.array([1, 2])) == []


def test_a_row_is_marked_only_after_it_was_written(tmp_path, monkeypatch):
    """An interruption while the second block is written loses that block and no other."""
    cache = opened(tmp_path)

    cache.store(block([0, 1]))
    with monkeypatch.context() as patch:
        patch.setattr(cache, "_mark", _interrupt)
        with pytest.raises(KeyboardInterrupt):
            cache.store(block([2, 3]))
    assert opened(tmp_path).readable(every).tolist() == [0, 1]


@pytest.mark.parametrize("name", ["rows.bin", "state.u8", "sums.u4"])
@pytest.mark.parametrize("damage", ["gone", "cut"])
def test_marks_without_rows_are_forgotten(tmp_path, name, damage):
    fill(opened(tmp_path), block([0, 1, 2]))
    path = tmp_path / name
    if damage == "gone":
        path.unlink()
    else:
        path.write_bytes(path.read_bytes()[:-1])
    cache = opened(tmp_path)
    assert cache.missing(every).tolist() == list(range(10))
    fill(cache, block([2]))
    assert opened(tmp_path).rows[2].tolist() == [2, 2.5, 2.25]


def test_a_flipped_bit_anywhere_is_computed_again_and_never_returned(tmp_path, caplog):
    caplog.set_level("INFO", "fisherhash")
    fill(opened(tmp_path), block([0, 1, 2], bad=[5]))
    for name in ("rows.bin", "state.u8", "sums.u4", "skipped.jsonl"):
        path = tmp_path / name
        data = path.read_bytes()
        for bit in range(0, 8 * len(data), 5):
            changed = bytearray(data)
            changed[bit // 8] ^= 1 << bit % 8
            path.write_bytes(changed)
            cache = opened(tmp_path)
            missing = cache.missing(every).tolist()
            kept = cache.readable(every)
            assert cache.rows[kept].tolist() == block(kept).values.tolist()
            skipped = cache.skipped(every)
            assert skipped in ([], [Skipped(5, "image 5", "reason 5")])
            assert sorted([*missing, *kept, *(item.index for item in skipped)]) == list(range(10))
            # Marks of damaged rows were taken back; start again from what was stored.
            shutil.rmtree(tmp_path)
            fill(opened(tmp_path), block([0, 1, 2], bad=[5]))
    assert "damaged rows are computed again" in caplog.text


def test_a_folder_that_cannot_be_made(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(FisherhashError, match="FISHERHASH_CACHE"):
        opened(tmp_path / "file" / "cache")


DISK_FULL = """
    import os, subprocess, sys
    from pathlib import Path
    import numpy as np
    from fisherhash.data.computing import Rows
    from fisherhash.errors import FisherhashError
    from fisherhash.data.row_cache import RowCache

    place = Path(sys.argv[1])
    mount = ["mount", "-t", "tmpfs", "-o", "size=256k", "none", place]
    if subprocess.run(mount, capture_output=True).returncode:
        sys.exit(77)
    cache = RowCache(place / "cache", 100, (4096,), np.float32)
    blocks = [
        Rows(np.full((4, 4096), i, np.float32), np.arange(i, i + 4), [])
        for i in range(0, 100, 4)
    ]
    try:
        for block in blocks:
            cache.store(block)
    except FisherhashError as error:
        print(error)
    again = RowCache(place / "cache", 100, (4096,), np.float32)
    kept = again.readable(np.arange(100))
    assert 4 <= len(kept) < 16, kept
    assert all((again.rows[i] == i // 4 * 4).all() for i in kept)
"""


def test_a_full_disk_is_a_sentence_and_keeps_the_rows_that_fit(tmp_path):
    """On a real full disk: the file is sparse, so only writing finds out."""
    command = [sys.executable, "-c", dedent(DISK_FULL), str(tmp_path)]
    if os.name != "posix":
        pytest.skip("needs a file system of its own")
    try:
        done = subprocess.run(
            ["unshare", "-Urm", *command], capture_output=True, text=True, check=False
        )
    except FileNotFoundError:
        pytest.skip("needs unshare to mount a small file system")
    if done.returncode == 77 or "unshare" in done.stderr:
        pytest.skip("not allowed to mount a small file system here")
    assert done.returncode == 0, done.stderr
    assert "No space left on device" in done.stdout
    assert "FISHERHASH_CACHE" in done.stdout


def test_what_could_not_be_opened_is_tried_again(tmp_path):
    cache = RowCache(tmp_path / "c", 3, (2,), np.float32)
    gone = Skipped(1, "b", "permission denied", passing=True)
    broken = Skipped(2, "c", "truncated")
    block = Rows(np.ones((1, 2), np.float32), np.array([0]), [gone, broken])
    cache.store(block)
    everything = np.arange(3)
    assert cache.skipped(everything) == [gone, broken]
    again = RowCache(tmp_path / "c", 3, (2,), np.float32)
    assert again.missing(everything).tolist() == [1]
    assert again.skipped(everything) == [broken]


def test_two_processes_may_open_a_new_cache_at_once(tmp_path):
    """Whoever comes second uses the files of the first, and never empties them."""
    script = (
        "import sys, numpy as np; from pathlib import Path; "
        "from fisherhash.data.row_cache import RowCache; "
        "from fisherhash.data.computing import Rows; "
        "sys.stdin.readline(); c = RowCache(Path(sys.argv[1]), 64, (4,), np.float32); "
        "own = np.arange(int(sys.argv[2]), 64, 4); "
        "rows = np.repeat(own[:, None], 4, 1).astype(np.float32) + 1; "
        "c.store(Rows(rows, own, []))"
    )
    folder = tmp_path / "c"
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", script, str(folder), str(i)], stdin=subprocess.PIPE, text=True
        )
        for i in range(4)
    ]
    time.sleep(2.0)
    for process in processes:
        process.stdin.write("go\n")
        process.stdin.flush()
    for process in processes:
        assert process.wait(60) == 0
        process.stdin.close()
    cache = RowCache(folder, 64, (4,), np.float32)
    assert len(cache.missing(np.arange(64))) == 0
    np.testing.assert_array_equal(cache.rows[:, 0], np.arange(64) + 1)
    assert not list(tmp_path.glob(".*"))
