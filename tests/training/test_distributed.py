"""Training in two processes (gloo) gives what one process gives, up to rounding.

This file is also the script that the two processes run: see ``main``.
"""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from fisherhash.backbones.tiny import Tiny
from fisherhash.cli import main as command_line
from fisherhash.data.augment import Strength, augment
from fisherhash.data.computing import Rows
from fisherhash.data.row_cache import RowCache, StoredRows
from fisherhash.data.streaming import StreamedRows
from fisherhash.errors import FisherhashError, UsageError
from fisherhash.methods import HashMethod, create, registry
from fisherhash.training import distributed
from fisherhash.training.distributed import Ranks, current_ranks, join
from fisherhash.training.fitting import train
from fisherhash.training.images import FrozenImages, LiveImages
from fisherhash.training.loop import Loop
from fisherhash.training.settings import Settings

GRADIENT = [name for name, method in registry().items() if issubclass(method, HashMethod)]
QUICK = ["dfh", "dsdh", "hashnet", "orthohash", "cibhash"]  # the last one has two views
SLOW = [name for name in GRADIENT if name not in QUICK]
BITS = {"dqn": 4}  # more words than images would be drawn from ties
OPTIONS = {"mihash": {"sharpness": 0.1}}  # saturated outputs would lie on the edges of its bins
IMAGES, BATCH, CLASSES = 45, 9, 3  # two processes have 5 and 4 images of a batch
SETTINGS = Settings(
    epochs=4,
    batch_size=BATCH,
    learning_rate=0.002,
    backbone_rate=0.1,
    schedule="constant",
    classifier_weight=0.5,
)


class Mixed(Tiny):
    """A network whose layers depend on the whole batch: batch normalisation and dropout."""

    def __init__(self):
        super().__init__(Tiny.preprocessing)
        torch.manual_seed(5)
        self.norm = nn.BatchNorm2d(3)
        nn.init.uniform_(self.norm.weight, 0.5, 1.5)
        self.dropout = nn.Dropout(0.2)

    def extract(self, images):
        return self.dropout(super().extract(self.norm(images)))


def use_doubles(patch):
    """Compute with 64 bits, so that what training makes of rounding errors stays tiny."""
    patch.setattr(torch.Tensor, "float", torch.Tensor.double)
    torch.set_default_dtype(torch.float64)


@pytest.fixture
def doubles(monkeypatch):
    use_doubles(monkeypatch)
    yield
    torch.set_default_dtype(torch.float32)


def live_images(name):
    """Images whose class is a colour, a network and a method."""
    generator = torch.Generator().manual_seed(1)
    labels = torch.eye(CLASSES)[torch.arange(IMAGES) % CLASSES]
    patches = torch.randint(0, 160, (IMAGES, 3, 4, 4), generator=generator)
    patches += (90 * labels).long()[:, :, None, None]
    pixels = patches.repeat_interleave(8, 2).repeat_interleave(8, 3)
    torch.manual_seed(0)
    options = OPTIONS.get(name)
    method = create(name, bits=BITS.get(name, 8), classes=CLASSES, options=options)
    network = Mixed()
    head = method.head(network.features)
    for module in (method, network, head):
        module.to(torch.get_default_dtype())
    images = LiveImages(pixels.to(torch.uint8), labels, network, head)
    head.start(images.features())
    return method, images


def state_of(loop):
    """Every tensor that a checkpoint would store, and the mean losses."""
    losses = [float(row["loss"]) for row in loop.history]
    state = {k: v.detach().clone().contiguous() for k, v in loop._state().items()}
    return state | {"losses": torch.tensor(losses, dtype=torch.float64)}


def run_live(name, settings=SETTINGS, **options):
    method, images = live_images(name)
    loop = Loop(method, images, settings, **options)
    loop.run()
    return state_of(loop)


def run_frozen(name):
    method, images = live_images(name)
    frozen = FrozenImages(images.features(), images.labels, images.head)
    loop = Loop(method, frozen, SETTINGS)
    loop.run()
    return state_of(loop)


def run_streamed(name, folder):
    """The pixels are on disk."""
    method, images = live_images(name)
    pixels = images.rows.values.numpy()
    cache = RowCache(folder, IMAGES, pixels.shape[1:], np.uint8)
    cache.store(Rows(pixels, np.arange(IMAGES), []))
    rows = StreamedRows(StoredRows(cache, np.arange(IMAGES)))
    loop = Loop(method, LiveImages(rows, images.labels, images.backbone, images.head), SETTINGS)
    loop.run()
    return state_of(loop)


def interrupted(folder, name="dfh"):
    """Train two of four epochs, with checkpoints."""
    method, images = live_images(name)
    loop = Loop(method, images, SETTINGS, folder=folder)
    loop.start()
    with loop.whole_batches():
        for epoch in range(2):
            loop.history.append(loop.epoch(epoch))
            loop.ranks.on_first(lambda epoch=epoch: loop._checkpoint(epoch))


def main(out, names):
    """What each of two processes does; the first one writes what both found."""
    torch.set_num_threads(1)
    use_doubles(pytest.MonkeyPatch())
    ranks, _ = join("cpu")
    found = {}
    for name in names:
        found |= {f"live/{name}/{k}": v for k, v in run_live(name).items()}
        found |= {f"frozen/{name}/{k}": v for k, v in run_frozen(name).items()}
    streamed = run_streamed("dfh", out / f"rows-{ranks.rank}")
    found |= {f"streamed/{k}": v for k, v in streamed.items()}
    interrupted(out / "by-two")
    found |= {f"by-two/{k}": v for k, v in run_live("dfh", folder=out / "by-one").items()}
    try:
        ranks.on_first(lambda: (_ for _ in ()).throw(UsageError("refused")))
    except UsageError as error:
        found["error"] = torch.tensor(list(str(error).encode()))
    try:
        ranks.check_same("names", b"a" if ranks.rank else b"b")
    except FisherhashError as error:
        found["different"] = torch.tensor(list(str(error).encode()))
    save_file({k: v.contiguous() for k, v in found.items()}, out / f"{ranks.rank}.safetensors")


def start_pair(words, folder):
    """Start two processes as ``torchrun`` would; returns what they printed on stderr."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    source = Path(distributed.__file__).parents[2]
    running = []
    for rank in range(2):
        about = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2}
        about |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "TORCHELASTIC_RUN_ID": "test"}
        about |= {"PYTHONPATH": source, "OMP_NUM_THREADS": 1}
        environment = os.environ | {name: str(value) for name, value in about.items()}
        running.append(
            subprocess.Popen(
                [sys.executable, *map(str, words)],
                env=environment,
                cwd=folder,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
        )
    try:
        results = [(one, *one.communicate(timeout=300)) for one in running]
    finally:
        for one in running:
            one.kill()
    return [(one.returncode, out, err) for one, out, err in results]


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """What two processes found, that of the first and that of the second; and their folder."""
    return run_pair(tmp_path_factory.mktemp("pair"), QUICK)


@pytest.fixture(scope="module")
def slow_pair(tmp_path_factory):
    return run_pair(tmp_path_factory.mktemp("slow-pair"), SLOW)


def run_pair(folder, names):
    with pytest.MonkeyPatch.context() as patch:
        use_doubles(patch)
        interrupted(folder / "by-one")
        torch.set_default_dtype(torch.float32)
    for code, _, err in start_pair([__file__, folder, *names], folder):
        assert code == 0, err
    return *(load_file(folder / f"{rank}.safetensors") for rank in range(2)), folder


def part(found, name):
    return {k.removeprefix(name): v for k, v in found.items() if k.startswith(name)}


def assert_close(found, expected):
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        torch.testing.assert_close(
            found[key], value, rtol=1e-6, atol=1e-8, msg=lambda m, k=key: f"{k}: {m}"
        )


@pytest.mark.parametrize("name", QUICK)
def test_two_processes_train_what_one_trains(pair, doubles, name):
    """After 20 steps: weights, statistics, the optimiser and all of the method's state."""
    assert_close(part(pair[0], f"live/{name}/"), run_live(name))
    assert_close(part(pair[0], f"frozen/{name}/"), run_frozen(name))


@pytest.mark.slow
@pytest.mark.parametrize("name", SLOW)
def test_two_processes_train_every_other_method(slow_pair, doubles, name):
    assert_close(part(slow_pair[0], f"live/{name}/"), run_live(name))
    assert_close(part(slow_pair[0], f"frozen/{name}/"), run_frozen(name))


def test_both_processes_have_the_same_bits(pair):
    first, second, _ = pair
    assert first.keys() == second.keys()
    assert len(first) > 100
    assert [k for k in first if not torch.equal(first[k], second[k])] == []


def test_a_run_continues_on_another_number_of_processes(pair, doubles):
    first, _, folder = pair
    expected = run_live("dfh")
    assert_close(part(first, "by-two/"), expected)
    resumed = run_live("dfh", folder=folder / "by-two")
    assert_close(resumed, expected)
    rows = (folder / "by-one" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(row)["epoch"] for row in rows] == [1, 2, 3, 4]


def test_two_processes_read_their_images_from_disk(pair, doubles, tmp_path):
    expected = run_streamed("dfh", tmp_path / "rows")
    assert_close(part(pair[0], "streamed/"), expected)


def test_an_error_of_the_first_process_is_everybodys(pair):
    for found in pair[:2]:
        assert bytes(found["error"].tolist()).decode() == "refused"
        assert "process 1 has other names" in bytes(found["different"].tolist()).decode()


def fake_rank(rank):
    return Ranks(rank, 2)


STRONG = Strength(
    crop=0.7, jitter=(0.4, 0.4, 0.4, 0.1), jittered=0.5, grey=0.5, blur=0.5, solarise=0.5
)


@pytest.mark.parametrize("strength", [Strength(), STRONG])
def test_each_image_is_augmented_as_in_the_whole_batch(strength):
    pixels = torch.randint(0, 256, (5, 3, 32, 32), dtype=torch.uint8)
    torch.manual_seed(3)
    expected = augment(pixels, strength)
    after = torch.rand(3)
    for rank, rows in ((0, slice(0, 3)), (1, slice(3, 5))):
        torch.manual_seed(3)
        found = augment(pixels[rows], strength, draws=fake_rank(rank).draws(5))
        torch.testing.assert_close(found, expected[rows])
        assert torch.equal(torch.rand(3), after)


class DropPath(nn.Module):
    drop_prob = 0.0

    def __init__(self, drop_prob):
        super().__init__()
        self.drop_prob = drop_prob


@pytest.mark.parametrize("layer", [DropPath(0.1), nn.BatchNorm3d(2), nn.Dropout2d(0.5)])
def test_layers_that_cannot_be_shared_are_refused(layer):
    refused = pytest.raises(UsageError, match=f"{type(layer).__name__}.*one process")
    with refused, fake_rank(0).whole_batches(nn.Sequential(layer), 4):
        pass
    with fake_rank(0).whole_batches(nn.Sequential(layer).eval(), 4):
        pass
    with fake_rank(0).whole_batches(DropPath(0.0), 4):
        pass


def test_what_cannot_be_shared_is_refused():
    with (
        pytest.raises(UsageError, match="a batch of 1 images cannot be shared by 2 processes"),
        fake_rank(0).whole_batches(nn.Sequential(), 1),
    ):
        pass
    with pytest.raises(UsageError, match="itq is not trained by gradient"):
        fake_rank(0).check_trainable(registry()["itq"])
    fake_rank(0).check_trainable(registry()["dfh"])


def test_a_process_alone_joins_nobody():
    ranks, device = join("cpu")
    assert (ranks.size, current_ranks().size) == (1, 1)
    assert device.type == "cpu"


def test_the_command_line_under_torchrun(photos, tmp_path):
    """Two processes write one model, print once, and find what one process finds."""
    words = ["-m", "fisherhash", "train", photos, "--backbone", "tiny", "--finetune"]
    words += ["--bits", 8, "--epochs", 2, "--batch-size", 8, "--learning-rate", 0.0005]
    words += ["--head-epochs", 1, "--validation", 0.2, "--device", "cpu", "--json"]
    (first, out, err), (second, silent, nothing) = start_pair(
        [*words, "--out", tmp_path / "two"], tmp_path
    )
    assert first == second == 0, err + nothing
    assert json.loads(out)["evaluation"]["map"] > 0.3
    assert (silent, nothing) == ("", "")
    settings = Settings(epochs=2, batch_size=8, learning_rate=0.0005, head_epochs=1, validation=0.2)
    train(
        photos,
        backbone="tiny",
        finetune=True,
        bits=8,
        settings=settings,
        device="cpu",
        out=tmp_path / "one",
    )
    one, two = (load_file(tmp_path / name / "model.safetensors") for name in ("one", "two"))
    assert one.keys() == two.keys()
    for name, values in one.items():
        torch.testing.assert_close(two[name], values, rtol=1e-3, atol=1e-4)
    names = [{p.name for p in (tmp_path / name).iterdir()} for name in ("one", "two")]
    assert names[0] == names[1] - {"network.onnx"}


def test_other_commands_refuse_torchrun(monkeypatch, capsys):
    for name, value in {"TORCHELASTIC_RUN_ID": "x", "RANK": "1", "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit, match="2"):
        command_line(["methods"])
    assert "run 'fisherhash methods' without torchrun" in capsys.readouterr().err
    monkeypatch.setenv("WORLD_SIZE", "1")
    with pytest.raises(SystemExit, match="0"):
        command_line(["methods"])
    assert capsys.readouterr().out == ""


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
