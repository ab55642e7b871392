"""Training on images that stay on disk: the same results, resuming, and bounded memory."""

import dataclasses
import logging
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from fisherhash.errors import FisherhashError, UsageError
from fisherhash.methods import create
from fisherhash.system import memory
from fisherhash.training import fitting, images, jobs
from fisherhash.training.jobs import choose_stream
from fisherhash.training.loop import Loop
from fisherhash.training.settings import Settings

QUICK = Settings(epochs=3, batch_size=8, learning_rate=0.001, head_epochs=2, seed=4)


def trained(photos, *, settings=QUICK, **options):
    return fitting.fit(
        photos, backbone="tiny", bits=8, settings=settings, recipe="best", device="cpu", **options
    )


def state(found):
    head = {name: torch.from_numpy(array) for name, array in found.hasher.head.tensors().items()}
    return {**head, **found.hasher.network.backbone.state_dict()}


def assert_same(one, two):
    first, second = state(one), state(two)
    assert first.keys() == second.keys()
    assert [k for k in first if not torch.equal(first[k], second[k])] == []


@pytest.mark.parametrize("finetune", [True, False])
def test_images_on_disk_are_trained_as_in_memory(photos, finetune):
    held = dataclasses.replace(QUICK, validation=0.2)
    options = {"finetune": finetune, "settings": held}
    resident = trained(photos, stream=False, **options)
    streamed = trained(photos, stream=True, **options)
    assert_same(resident, streamed)
    maps = [[row["loss"] for row in one.history] for one in (resident, streamed)]
    assert maps[0] == maps[1]


def test_an_interrupted_training_continues_to_the_same_bits(photos, tmp_path, monkeypatch):
    expected = trained(photos, finetune=True, stream=True)
    real, calls = Loop.epoch, []

    def stops(self, epoch):
        calls.append(epoch)
        if self.folder is not None and epoch == 2:
            raise KeyboardInterrupt
        return real(self, epoch)

    with monkeypatch.context() as patch:
        patch.setattr(Loop, "epoch", stops)
        with pytest.raises(KeyboardInterrupt):
            trained(photos, finetune=True, stream=True, out=tmp_path / "model")
    with pytest.raises(UsageError, match="stream: True there, None now"):
        trained(photos, finetune=True, stream=False, out=tmp_path / "model")
    # Nothing said: it goes on as it began.
    assert_same(trained(photos, finetune=True, out=tmp_path / "model"), expected)


def test_statistics_of_many_images_come_from_some(photos, monkeypatch):
    monkeypatch.setattr(images, "SAMPLED", 10)
    monkeypatch.setattr(images, "ROWS_AT_ONCE", 7)
    found = trained(photos, finetune=True, stream=True)
    assert np.isfinite(found.history[-1]["loss"])
    assert found.hasher.bits == 8
    whole = trained(photos, finetune=True, stream=True, method="bihalf", options={})
    assert np.isfinite(whole.history[-1]["loss"])


def test_a_damaged_row_stops_the_training_and_the_next_one_repairs_it(
    photos, tmp_path, monkeypatch
):
    monkeypatch.setenv("FISHERHASH_CACHE", str(tmp_path / "cache"))
    expected = trained(photos, finetune=True, stream=True)
    (rows,) = (tmp_path / "cache" / "rows").glob("*-pixels-*/rows.bin")
    content = bytearray(rows.read_bytes())
    numbers = np.fromfile(rows.with_name("sums.u4"), "<u4")
    content[int(np.flatnonzero(numbers)[0]) * 3072 + 5] ^= 1
    rows.write_bytes(content)
    with pytest.raises(FisherhashError, match="is damaged; run the command again"):
        trained(photos, finetune=True, stream=True)
    assert_same(trained(photos, finetune=True, stream=True), expected)


def test_what_decides(monkeypatch, caplog):
    """A thousand images of 250 features: a million bytes."""
    caplog.set_level(logging.INFO)
    network = SimpleNamespace(features=250, preprocessing=SimpleNamespace(size=32))
    about = {"network": network, "live": False, "train": range(1000), "begun": {}}

    def chosen(stream=None, method="dfh"):
        job = SimpleNamespace(learner=create(method, bits=8, classes=3), **about)
        return choose_stream(job, stream, banked=False)

    for free, streamed, said in (
        (10_000_000, False, ""),
        (2_000_000, False, "1,000 training images (0.0 GB decoded) are held in memory"),
        (1_999_999, True, "are read from the disk in shuffled blocks"),
        (None, False, ""),
    ):
        monkeypatch.setattr(jobs, "available_memory", lambda free=free: free)
        caplog.clear()
        assert chosen() is streamed
        assert said in caplog.text
        assert bool(said) == bool(caplog.text)
        assert (chosen(stream=True), chosen(stream=False)) == (True, False)
    about["begun"] = {"stream": True}  # an unfinished run goes on as it began
    assert chosen() is True
    assert chosen(method="itq") is False
    with pytest.raises(UsageError, match="trained by gradient"):
        chosen(stream=True, method="itq")


def test_available_memory(tmp_path):
    assert 0 < memory.available_memory() < 1 << 50
    (tmp_path / "meminfo").write_text("MemTotal: 9 kB\nMemAvailable:   7 kB\n")
    assert memory._of_system(tmp_path / "meminfo") == 7 * 1024
    assert memory._of_system(tmp_path / "none") is None
    for name, text in {
        "memory.max": "1000",
        "memory.current": "700",
        "memory.stat": "anon 1\ninactive_file 200\n",
    }.items():
        (tmp_path / name).write_text(text)
    assert memory._of_container(tmp_path) == 500
    (tmp_path / "memory.max").write_text("max\n")
    assert memory._of_container(tmp_path) is None


PEAK = """
import resource, sys
from pathlib import Path
import numpy as np, torch
from fisherhash import backbones
from fisherhash.data.computing import Rows
from fisherhash.data.row_cache import RowCache, StoredRows
from fisherhash.data.streaming import StreamedRows
from fisherhash.methods import create
from fisherhash.training.images import LiveImages
from fisherhash.training.loop import Loop
from fisherhash.training.settings import Settings

torch.set_num_threads(1)
folder, count, stream = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3] == "stream"
cache = RowCache(folder, count, (3, 64, 64), np.uint8)
rng = np.random.default_rng(0)
for first in range(0, count, 500):
    rows = rng.integers(0, 256, (500, 3, 64, 64), dtype=np.uint8)
    cache.store(Rows(rows, np.arange(first, first + 500), []))
every = np.arange(count)
pixels = StreamedRows(StoredRows(cache, every), ahead_bytes=4 << 20)
pixels = pixels if stream else torch.from_numpy(cache.rows[every])
method, network = create("csq", bits=8, classes=4), backbones.create("tiny")
head = method.head(network.features)
images = LiveImages(pixels, torch.eye(4)[torch.arange(count) % 4], network, head)
Loop(method, images, Settings(epochs=1, batch_size=100, learning_rate=1e-4)).run()
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
"""


def peak(folder, count, how):
    """Kilobytes of memory at most."""
    source = str(Path(images.__file__).parents[2])
    environment = os.environ | {"PYTHONPATH": source, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", PEAK, str(folder), str(count), how],
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return int(done.stdout)


@pytest.mark.skipif(sys.platform != "linux", reason="units of the peak memory differ")
def test_ten_times_the_images_take_no_more_memory(tmp_path):
    few = peak(tmp_path / "few", 1000, "stream")
    many = peak(tmp_path / "many", 10_000, "stream")
    assert many < 1.2 * few
    # In memory they would take more than that: 122,880 kilobytes of pixels.
    assert many < few + 60_000
