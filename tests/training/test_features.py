import subprocess
import sys

import numpy as np
import pytest

from fisherhash import Hasher
from fisherhash.errors import FisherhashError, UsageError
from fisherhash.training.fitting import fit_features
from fisherhash.training.settings import Settings

SHORT = Settings(epochs=3, batch_size=32)


@pytest.fixture
def files(tmp_path):
    random = np.random.default_rng(0)
    classes = random.integers(0, 4, 200)
    centres = 3.0 * random.normal(size=(4, 24))
    np.save(tmp_path / "x.npy", (centres[classes] + random.normal(size=(200, 24))).astype("f4"))
    np.save(tmp_path / "y.npy", np.array(["ant", "bee", "cat", "dog"])[classes])
    return tmp_path


def codes_agree(codes, labels):
    """Whether codes are nearer within classes than between them."""
    bits = np.unpackbits(codes, axis=1).astype(int)
    distances = np.abs(bits[:, None] - bits[None]).sum(2)
    same = labels[:, None] == labels[None]
    return distances[same].mean() < 0.9 * distances[~same].mean()


@pytest.mark.parametrize("method", ["itq", "lsh", "sh", "pcah", "hashing_baseline", "bihalf"])
def test_vectors_without_labels(files, method):
    trained = fit_features(files / "x.npy", method=method, bits=16, settings=SHORT, device="cpu")
    x, y = np.load(files / "x.npy"), np.load(files / "y.npy")
    codes = trained.hasher.encode_features(x)
    assert codes.shape == (200, 2)
    assert codes_agree(codes, y)


@pytest.mark.parametrize("method", ["dfh", "csq", "sdh", "ksh"])
def test_vectors_with_labels(files, method):
    trained = fit_features(
        files / "x.npy", files / "y.npy", method=method, bits=16, settings=SHORT, device="cpu"
    )
    assert trained.hasher.classes == ("ant", "bee", "cat", "dog")
    codes = trained.hasher.encode_features(np.load(files / "x.npy"))
    assert codes_agree(codes, np.load(files / "y.npy"))


def test_a_file_and_its_array_train_the_same_model(files):
    x = np.load(files / "x.npy")
    made = [fit_features(given, bits=8, device="cpu").hasher for given in (files / "x.npy", x)]
    assert made[0].fingerprint() == made[1].fingerprint()


def test_the_model_folder_is_a_normal_one(files):
    made = fit_features(files / "x.npy", bits=12, device="cpu", out=files / "m").hasher
    loaded = Hasher.load(files / "m")
    assert loaded.vectors_only
    assert (loaded.fingerprint(), loaded.feature_width) == (made.fingerprint(), 24)
    x = np.load(files / "x.npy")
    np.testing.assert_array_equal(loaded.encode_features(x), made.encode_features(x))
    assert "vectors of 24 dimensions" in (files / "m" / "README.md").read_text()
    assert '"backbone": null' in (files / "m" / "config.json").read_text()
    with pytest.raises(UsageError, match="already holds a model"):
        fit_features(files / "x.npy", bits=12, device="cpu", out=files / "m")
    loaded.save(files / "copy")
    assert Hasher.load(files / "copy").fingerprint() == made.fingerprint()


def test_a_killed_run_continues(files, monkeypatch):
    from fisherhash.training import loop

    arguments = {"method": "csq", "bits": 8, "settings": SHORT, "device": "cpu"}
    expected = fit_features(files / "x.npy", files / "y.npy", **arguments).hasher
    whole = loop.Loop.epoch

    def killed(self, epoch):
        if epoch == 2:
            raise KeyboardInterrupt
        return whole(self, epoch)

    monkeypatch.setattr(loop.Loop, "epoch", killed)
    with pytest.raises(KeyboardInterrupt):
        fit_features(files / "x.npy", files / "y.npy", out=files / "m", **arguments)
    monkeypatch.setattr(loop.Loop, "epoch", whole)
    resumed = fit_features(files / "x.npy", files / "y.npy", out=files / "m", **arguments)
    assert resumed.hasher.fingerprint() == expected.fingerprint()


def test_what_cannot_be_trained_is_refused(files):
    x = np.load(files / "x.npy")
    with pytest.raises(UsageError, match="learns from labels"):
        fit_features(files / "x.npy", method="dfh", device="cpu")
    with pytest.raises(UsageError, match="no labels"):
        fit_features(x, method="bihalf", bits=8, settings=Settings(validation=0.2), device="cpu")
    with pytest.raises(UsageError, match="neither outputs nor a class step"):
        fit_features(x, method="itq", bits=8, settings=Settings(outputs=32), device="cpu")
    with pytest.raises(FisherhashError, match="at least 2"):
        fit_features(x[:1], bits=8, device="cpu")
    x[3, 1] = np.nan
    with pytest.raises(UsageError, match="in 1 row: 3 "):
        fit_features(x, bits=8, device="cpu")
    np.save(files / "y.npy", np.ones((200, 2), dtype=int))
    with pytest.raises(UsageError, match="several labels"):
        fit_features(files / "x.npy", files / "y.npy", method="mdsh", bits=8, device="cpu")


# A child process, whose own memory is measured: what the file takes in the page cache is not.
CHILD = """
import sys
import threading
from fisherhash.data.vectors import open_vectors
from fisherhash.methods.shallow import itq
from fisherhash.training.fitting import fit_features

itq.ROTATED = 10_000  # its sample is in memory, whatever the size of the file

def anonymous():
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("RssAnon"))

peak, done = [0], threading.Event()
def watch():
    while not done.wait(0.005):
        peak[0] = max(peak[0], anonymous())

path, small = sys.argv[1:]
for method in ("itq", "lsh", "sh", "pcah", "hashing_baseline"):
    # The small one first: it loads what a method needs.
    for given in (small, path):
        before = peak[0] = anonymous()
        done.clear()
        watching = threading.Thread(target=watch)
        watching.start()
        hasher = fit_features(given, method=method, bits=4, device="cpu").hasher
        hasher.encode_features(open_vectors(given))
        done.set()
        watching.join()
    print(method, peak[0] - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_mapped_file_is_not_copied(tmp_path):
    # 154 MB, in blocks of 8 MB in double precision.
    shape = (600_000, 64)
    x = np.lib.format.open_memmap(tmp_path / "x.npy", mode="w+", dtype=np.float32, shape=shape)
    block = np.random.default_rng(0).standard_normal((10_000, 64), dtype=np.float32)
    for start in range(0, len(x), len(block)):
        x[start : start + len(block)] = block
    x.flush()
    np.save(tmp_path / "small.npy", block[:300])
    command = [sys.executable, "-c", CHILD, tmp_path / "x.npy", tmp_path / "small.npy"]
    out = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    grown = {line.split()[0]: int(line.split()[1]) * 1024 for line in out.splitlines()}
    assert len(grown) == 5
    # The allocator keeps up to a hundred megabytes; a copy in double precision would be twice x.
    assert all(0 < size < 1.5 * x.nbytes for size in grown.values()), grown
