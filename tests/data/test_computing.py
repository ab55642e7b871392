"""Rows computed beside the decoder: the same whatever the number of workers."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap

import numpy as np
import pytest

from fisherhash.data import workers
from fisherhash.data.computing import RowFunction, compute_blocks
from fisherhash.data.preprocessing import Preprocessing
from fisherhash.data.sources import open_data
from fisherhash.errors import UsageError

SIZE = Preprocessing(size=16)
FUNCTIONS = """
    import os, sys
    import numpy as np

    class Means:
        def __init__(self, deadly=None):
            self.deadly = deadly
        def __call__(self, pixels):
            if self.deadly is not None and int(pixels.sum()) == self.deadly:
                os._exit(7)
            torch = "torch" in sys.modules
            rows = pixels.reshape(len(pixels), 3, -1).mean(2, dtype=np.float64)
            extra = [os.getpid(), torch]
            return np.concatenate([rows, np.tile(extra, (len(rows), 1))], 1)
"""


@pytest.fixture
def means(tmp_path, monkeypatch):
    """A function that worker processes can import."""
    (tmp_path / "pixel_functions.py").write_text(textwrap.dedent(FUNCTIONS))
    monkeypatch.syspath_prepend(tmp_path)
    import importlib

    sys.modules.pop("pixel_functions", None)
    yield importlib.import_module("pixel_functions").Means
    sys.modules.pop("pixel_functions", None)


@pytest.fixture
def images(tmp_path, pictures):
    root = pictures.classes(tmp_path / "set", {"a": 30, "b": 30})
    pictures.bad(root / "a")
    return open_data(root)


def rows_of(images, compute, *, portable=True, **options):
    function = RowFunction(compute, SIZE, (5,), np.float64, portable=portable)
    parts = list(compute_blocks(images, None, function, block=16, **options))
    skipped = [(s.index, s.name, s.reason) for part in parts for s in part.skipped]
    values = np.concatenate([part.values for part in parts])
    return np.concatenate([part.indices for part in parts]), values, skipped


def test_rows_do_not_depend_on_the_number_of_workers(images, means):
    here = rows_of(images, means(), workers=0)
    blocks = rows_of(images, means(), portable=False, workers=0)
    assert len(here[0]) == 60
    assert len(here[2]) == 8
    for other in (blocks, *(rows_of(images, means(), workers=n) for n in (1, 2, 3))):
        assert other[0].tolist() == here[0].tolist()
        assert np.array_equal(other[1][:, :3], here[1][:, :3])
        assert other[2] == here[2]


def test_workers_compute_and_do_not_import_torch(images, means):
    _, values, _ = rows_of(images, means(), workers=2)
    assert os.getpid() not in values[:, 3]
    assert not values[:, 4].any()


def test_what_must_stay_here_is_computed_here(images, means):
    _, values, _ = rows_of(images, means(), portable=False, workers=2)
    assert set(values[:, 3]) == {os.getpid()}


def test_an_image_that_kills_its_worker_is_named_and_skipped(images, means):
    index = images.names.index("b/007.png")
    deadly = int(SIZE.pixels(images.reader.open(index)).sum())
    found, _, skipped = rows_of(images, means(deadly), workers=2)
    assert index not in found
    assert len(found) == 59
    (reason,) = [reason for number, _, reason in skipped if number == index]
    assert "exit code 7" in reason
    assert "'b/007.png'" in reason


def test_a_function_that_cannot_travel(images, monkeypatch):
    function = RowFunction(lambda pixels: pixels[:, :, 0, 0], SIZE, (3,), np.uint8, portable=True)
    with pytest.raises(UsageError, match="cannot be sent to worker processes"):
        list(compute_blocks(images, None, function, workers=2))
    monkeypatch.setattr(workers, "choose_workers", lambda *_: 2)
    assert sum(len(part.indices) for part in compute_blocks(images, None, function)) == 60


DAEMON = """
    import multiprocessing, sys
    from fisherhash.data.computing import decode
    from fisherhash.data.preprocessing import Preprocessing
    from fisherhash.data.sources import open_data

    def read(answers):
        blocks = decode(open_data(sys.argv[1]), None, Preprocessing(size=16), workers=2)
        answers.put(sum(len(block.indices) for block in blocks))

    context = multiprocessing.get_context("fork")
    answers = context.Queue()
    process = context.Process(target=read, args=(answers,), daemon=True)
    process.start()
    print(answers.get(timeout=60))
    process.join()
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_process_that_must_not_start_others_reads_by_itself(images):
    """In an interpreter of its own: threads of other tests do not survive a fork."""
    command = [sys.executable, "-c", textwrap.dedent(DAEMON), images.reader.root]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert done.stdout.strip() == "60", done.stderr
