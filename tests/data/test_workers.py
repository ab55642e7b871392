"""decode: order, skipping, worker processes that hang, die or are interrupted."""

from __future__ import annotations

import csv
import io
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from fisherhash.data import workers
from fisherhash.data.computing import Skipped, decode, decode_images, skipped_csv
from fisherhash.data.preprocessing import Preprocessing
from fisherhash.data.sources import Collection, open_data, open_paths
from fisherhash.errors import FisherhashError, UsageError

SMALL = Preprocessing(size=16)


@pytest.fixture
def mixed(tmp_path, pictures):
    """80 good images with bad files among them."""
    root = pictures.classes(tmp_path / "set", {"a": 40, "b": 40})
    pictures.bad(root / "a")
    return open_data(root)


@pytest.mark.parametrize("count", [0, 2])
def test_blocks_are_in_order_and_bad_files_leave_no_trace(mixed, count):
    order = np.random.default_rng(0).permutation(len(mixed))
    blocks = list(decode(mixed, order, SMALL, block=33, workers=count))
    assert len(blocks) == 3
    read = np.concatenate([block.indices for block in blocks])
    skipped = [item for block in blocks for item in block.skipped]
    bad = {item.name for item in skipped}
    assert len(skipped) == 8
    assert read.tolist() == [index for index in order if mixed.names[index] not in bad]
    for block in blocks:
        assert block.values.shape == (len(block.indices), 3, 16, 16)
        assert block.values.dtype == np.uint8
        assert block.values.flags.c_contiguous
        for index, pixels in zip(block.indices, block.values, strict=True):
            expected = SMALL.pixels(mixed.reader.open(int(index)))
            assert np.array_equal(pixels, expected.transpose(2, 0, 1))
    reasons = {item.name: item.reason for item in skipped}
    assert "truncated" in reasons["a/cut.jpg"]
    assert "limit of" in reasons["a/bomb.png"]


def test_a_file_that_vanishes_is_skipped(tmp_path, pictures):
    data = open_data(pictures.classes(tmp_path, {"a": 2, "b": 2}))
    (tmp_path / "a" / "001.png").unlink()
    (block,) = decode(data, None, SMALL)
    assert block.indices.tolist() == [0, 2, 3]
    reason = "the file does not exist (moved or deleted?)"
    assert block.skipped == [Skipped(1, "a/001.png", reason, passing=True)]


@pytest.mark.parametrize("workers", [-1, 100_000])
def test_impossible_numbers_of_workers(mixed, workers):
    with pytest.raises(UsageError, match="workers must be 0 or more, and at most"):
        list(decode(mixed, [0], SMALL, workers=workers))


def test_when_processes_are_started(monkeypatch):
    monkeypatch.setattr(workers, "available_cores", lambda: 4)
    monkeypatch.setattr(sys, "platform", "linux")
    assert workers.choose_workers([0.001] * 9, 300) == 0
    assert workers.choose_workers([0.001] * 9, 60_000) == 4
    assert workers.choose_workers([0.1], 28) == 2
    assert workers.choose_workers([], 0) == 0
    assert workers.choose_workers([0.1], 60_000) == 4
    monkeypatch.setattr(sys, "platform", "win32")
    assert workers.choose_workers([0.1], 60_000) == 0
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(workers, "available_cores", lambda: 1)
    assert workers.choose_workers([0.1], 60_000) == 0


def test_a_draft_is_the_same_in_memory_and_in_workers(tmp_path):
    """Whether it is read from a path, from bytes, or in another process."""
    rng, draft = np.random.default_rng(0), Preprocessing(size=16, draft=1.5)
    for number in range(4):
        noise = Image.fromarray(rng.integers(0, 256, (24, 32, 3), np.uint8))
        noise.resize((320, 240), Image.Resampling.BICUBIC).save(tmp_path / f"{number}.jpg")
    paths = sorted(tmp_path.iterdir())
    (here,) = decode(open_paths(paths), None, draft, workers=0)
    (there,) = decode(open_paths(paths), None, draft, workers=2)
    (memory,) = decode_images([path.read_bytes() for path in paths], draft)
    (whole,) = decode(open_paths(paths), None, SMALL, workers=0)
    assert np.array_equal(here.values, there.values)
    assert np.array_equal(here.values, memory.values)
    assert not np.array_equal(here.values, whole.values)


READERS = """
    import os, signal, time
    from PIL import Image

    class Awkward:
        def __init__(self, kind, log=None):
            self.kind, self.log = kind, log
        def open(self, index, *, enough=None):
            if self.log:
                with open(self.log, "a") as file:
                    file.write(f"{os.getpid()} {index}\\n")
            if self.kind == "all die" or index == 5 and self.kind in ("die", "log"):
                os.kill(os.getpid(), signal.SIGKILL)
            if index == 5 and self.kind == "once" and not os.path.exists(self.log + ".died"):
                open(self.log + ".died", "w").close()
                os.kill(os.getpid(), signal.SIGKILL)
            if index == 5 and self.kind == "hang":
                time.sleep(600)
            if index == 5 and self.kind == "bug":
                raise KeyError("no such thing")
            if self.kind == "slow":
                time.sleep(0.05)
            if self.kind == "talk":
                print("noise on stdout", flush=True)
                os.write(1, b"more noise")
            return Image.new("RGB", (8, 8), (index % 256, 0, 0))
        def fingerprint(self):
            return self.kind
"""


@pytest.fixture
def awkward(tmp_path, monkeypatch):
    """A collection whose reader lives in a module that workers find through sys.path."""
    (tmp_path / "awkward_readers.py").write_text(textwrap.dedent(READERS))
    monkeypatch.syspath_prepend(tmp_path)
    sys.modules.pop("awkward_readers", None)
    from importlib import import_module

    def make(kind: str, count: int = 200) -> Collection:
        reader = import_module("awkward_readers").Awkward(kind, str(tmp_path / "log"))
        names = [f"item {number}" for number in range(count)]
        return Collection("awkward", names, np.zeros((count, 0), np.uint8), (), reader)

    yield make
    sys.modules.pop("awkward_readers", None)


def all_but_item_5(blocks):
    """Check that only item 5 is missing; returns why."""
    (block,) = blocks
    assert block.indices.tolist() == [i for i in range(200) if i != 5]
    assert block.values[:, 0, 0, 0].tolist() == block.indices.tolist()
    (skipped,) = block.skipped
    assert (skipped.index, skipped.name, skipped.passing) == (5, "item 5", True)
    return skipped.reason


def test_a_decoder_that_crashes_costs_its_image_only(awkward):
    reason = all_but_item_5(decode(awkward("die"), None, SMALL, workers=2))
    assert "signal 9" in reason
    assert "while it read 'item 5'" in reason


def test_a_decoder_that_hangs_costs_its_image_only(awkward, monkeypatch):
    start = time.monotonic()
    monkeypatch.setattr(workers, "TIMEOUT", 1.5)
    blocks = decode(awkward("hang"), None, SMALL, workers=2)
    assert "no answer for 1.5 s while it read 'item 5'" in all_but_item_5(blocks)
    assert time.monotonic() - start < 20


def test_an_image_that_crashed_by_chance_is_read_the_second_time(awkward):
    (block,) = decode(awkward("once"), None, SMALL, workers=2)
    assert block.indices.tolist() == list(range(200))
    assert block.skipped == []


def test_workers_that_always_crash_are_an_error(awkward):
    """A few images may crash their decoders; a whole folder of them means something else."""
    with pytest.raises(FisherhashError, match=r"signal 9.* while it read 'item 8'"):
        list(decode(awkward("all die", 12), None, SMALL, workers=1))


def test_a_bug_in_a_reader_is_no_skipped_image(awkward):
    with pytest.raises(FisherhashError, match="reading 'item 5' failed: KeyError"):
        list(decode(awkward("bug"), None, SMALL, workers=1))
    with pytest.raises(KeyError):
        list(decode(awkward("bug"), None, SMALL, workers=0))


def test_a_reader_that_cannot_travel(monkeypatch, awkward):
    class Local:
        def open(self, index: int, *, enough: int | None = None) -> Image.Image:
            return Image.new("RGB", (8, 8), (index, 0, 0))

        def fingerprint(self) -> str:
            return ""

    names = [str(number) for number in range(50)]
    data = Collection("local", names, np.zeros((50, 0), np.uint8), (), Local())
    with pytest.raises(UsageError, match="a Local cannot be sent to worker processes"):
        list(decode(data, None, SMALL, workers=2))
    monkeypatch.setattr(workers, "choose_workers", lambda *_: 2)
    (block,) = decode(data, None, SMALL)
    assert block.values[:, 0, 0, 0].tolist() == list(range(50))


def test_noise_on_stdout_does_not_disturb(awkward, capfd):
    (block,) = decode(awkward("talk", 40), None, SMALL, workers=1)
    assert block.values[:, 0, 0, 0].tolist() == list(range(40))
    assert "noise" not in capfd.readouterr().out


SCRIPT = """
    import sys
    sys.path[:0] = {path!r}
    import numpy as np
    from awkward_readers import Awkward
    from fisherhash.data.computing import decode
    from fisherhash.data.sources import Collection
    from fisherhash.data.preprocessing import Preprocessing

    names = [str(i) for i in range({count})]
    data = Collection("x", names, np.zeros(({count}, 0), np.uint8), (), Awkward({kind!r}, {log!r}))
    total = 0
    for block in decode(data, None, Preprocessing(size=16), block=32, workers=2):
        total += len(block.indices)
    print(total)
"""


def run_script(tmp_path: Path, kind: str, count: int) -> tuple[subprocess.Popen[str], Path]:
    """A script without a main guard, with worker processes that log their ids."""
    log = tmp_path / "pids"
    (tmp_path / "awkward_readers.py").write_text(textwrap.dedent(READERS))
    path = [str(tmp_path), str(Path(workers.__file__).parents[2])]
    script = textwrap.dedent(SCRIPT).format(path=path, kind=kind, count=count, log=str(log))
    (tmp_path / "script.py").write_text(script)
    process = subprocess.Popen(
        [sys.executable, str(tmp_path / "script.py")],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    return process, log


def wait_for(condition, seconds: float = 20.0) -> bool:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if condition():
            return True
        time.sleep(0.05)
    return False


def pids_in(log: Path) -> list[str]:
    return [line.split()[0] for line in log.read_text().splitlines() if line.strip()]


def alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except OSError:
        return False
    return state != "Z"


def test_a_script_needs_no_main_guard(tmp_path):
    process, log = run_script(tmp_path, "plain", 100)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out.strip(), err) == (0, "100", "")
    pids = set(pids_in(log))
    assert 1 <= len(pids) <= 2
    assert str(process.pid) not in pids


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="looks into /proc")
@pytest.mark.parametrize(
    "signal_number", [signal.SIGINT, signal.SIGKILL], ids=["Ctrl-C", "kill -9"]
)
def test_workers_end_with_their_parent(tmp_path, signal_number):
    process, log = run_script(tmp_path, "slow", 400)
    assert wait_for(lambda: log.is_file() and len(set(pids_in(log))) == 2)
    pids = [int(pid) for pid in set(pids_in(log))]
    if signal_number == signal.SIGINT:
        os.killpg(process.pid, signal_number)  # as a terminal does
    else:
        os.kill(process.pid, signal_number)
    _, err = process.communicate(timeout=20)
    assert process.returncode != 0
    if signal_number == signal.SIGINT:
        assert err.count("Traceback") == 1
        assert "KeyboardInterrupt" in err
    assert wait_for(lambda: not any(alive(pid) for pid in pids))


def test_the_list_of_skipped_images():
    items = [Skipped(0, "a, b/ü 1.jpg", 'truncated: "x"'), Skipped(1, "c.jpg", "empty")]
    rows = list(csv.reader(io.StringIO(skipped_csv(items), newline="")))
    assert rows == [["name", "reason"], ["a, b/ü 1.jpg", 'truncated: "x"'], ["c.jpg", "empty"]]
    assert skipped_csv([]) == "name,reason\n"
