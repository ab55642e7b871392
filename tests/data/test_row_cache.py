"""Rows on disk: what is there is not computed again, what is missing is never taken for a row."""

import os
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


def fill(cache, *blocks):
    for one in blocks:
        cache.store(one)


every = np.arange(10)


def test_rows_are_kept_for_the_next_process(tmp_path):
    cache = opened(tmp_path)
    assert cache.missing(every).tolist() == list(range(10))
    fill(cache, block([3, 1], bad=[7]), block([9]))
    for again in (cache, opened(tmp_path)):
        assert again.missing(every).tolist() == [0, 2, 4, 5, 6, 7, 8]
        assert again.readable(every).tolist() == [1, 3, 9]
        assert again.rows[[9, 1]].tolist() == [[9, 9.5, 9.25], [1, 1.5, 1.25]]


def test_a_file_that_lost_its_end_is_completed(tmp_path):
    fill(opened(tmp_path), block([0, 1, 9]))
    path = tmp_path / "rows.bin"
    path.write_bytes(path.read_bytes()[:-1])
    cache = opened(tmp_path)
    assert cache.missing(every).tolist() == list(range(2, 10))
    fill(cache, block([9]))
    assert opened(tmp_path).rows[9].tolist() == [9, 9.5, 9.25]


def test_a_flipped_bit_anywhere_is_computed_again_and_never_returned(tmp_path, caplog):
    caplog.set_level("INFO", "fisherhash")
    fill(opened(tmp_path), block([0, 1, 2]))
    whole = {name: (tmp_path / name).read_bytes() for name in ("rows.bin", "sums.u4")}
    for name, data in whole.items():
        for bit in range(0, 8 * len(data), 5):
            for other, content in whole.items():
                (tmp_path / other).write_bytes(content)
            changed = bytearray(data)
            changed[bit // 8] ^= 1 << bit % 8
            (tmp_path / name).write_bytes(changed)
            cache = opened(tmp_path)
            missing = cache.missing(every).tolist()
            kept = cache.readable(every)
            assert cache.rows[kept].tolist() == block(kept).values.tolist()
            assert sorted([*missing, *kept]) == list(range(10))
            assert len(kept) >= 2
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


def test_what_could_not_be_read_is_tried_again(tmp_path):
    cache = opened(tmp_path)
    fill(cache, block([0], bad=[2]))
    assert cache.skipped == {2: Skipped(2, "image 2", "reason 2")}
    assert 2 in opened(tmp_path).missing(every)


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
