"""Features of a frozen network by ONNX Runtime: those of torch, exported once, never mixed."""

import logging
import shutil

import numpy as np
import pytest
import torch
from torch import nn

from fisherhash import backbones
from fisherhash.data.sources import open_data
from fisherhash.model import frozen_runtime, onnx_runtime
from fisherhash.model.export import export_features, missing_package
from fisherhash.model.frozen_runtime import FEATURE_TOLERANCE, FrozenRuntime
from fisherhash.model.hasher import Hasher
from fisherhash.model.onnx_runtime import OnnxRuntime
from fisherhash.model.runtime import feature_rows
from fisherhash.model.torch_runtime import TorchRuntime
from fisherhash.training import fitting
from fisherhash.training.loop import Loop
from fisherhash.training.settings import Settings

CPU = torch.device("cpu")
ONNX, TORCH = "onnx-cpu", "cpu"
pytestmark = pytest.mark.skipif(missing_package() is not None, reason="the extra is missing")


def runtime(network=None):
    return TorchRuntime(network or backbones.create("tiny"), CPU, via_onnx=True)


@pytest.fixture(scope="module")
def networks(tmp_path_factory):
    """A folder with the exported network, which is exported once for all tests."""
    folder = tmp_path_factory.mktemp("exported")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FISHERHASH_CACHE", str(folder))
        torch.manual_seed(7)
        FrozenRuntime(runtime(), backbones.create("tiny")).worker_copy()
        drawn = torch.rand(3)
    torch.manual_seed(7)
    assert torch.equal(drawn, torch.rand(3)), "the export changed what is drawn after it"
    return folder / "networks"


@pytest.fixture
def empty(tmp_path, monkeypatch):
    """An empty cache; the export always pays."""
    monkeypatch.setenv("FISHERHASH_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(frozen_runtime, "WORTH_EXPORTING", 1)
    return tmp_path / "cache"


@pytest.fixture
def cache(empty, networks):
    """A cache with the exported network and nothing else."""
    shutil.copytree(networks, empty / "networks")
    return empty


@pytest.fixture
def no_export(monkeypatch):
    """Any export is an error."""

    def refuse(*_):
        raise AssertionError("exported")

    monkeypatch.setattr(frozen_runtime, "export_features", refuse)


def test_features_are_those_of_torch(photos, cache, no_export):
    images = open_data(photos)
    found, expected = feature_rows(runtime(), images), feature_rows(runtime(), images, kind="")
    assert (found.kind, expected.kind) == (ONNX, TORCH)
    assert len(list((cache / "rows").iterdir())) == 2
    largest = float(np.abs(expected.values).max())
    assert np.abs(found.values - expected.values).max() <= FEATURE_TOLERANCE * largest
    assert largest > 0.1


def test_worker_processes_compute_the_same_bits(photos, cache, no_export):
    images = open_data(photos)
    here = feature_rows(runtime(), images, workers=0)
    shutil.rmtree(cache / "rows")
    there = feature_rows(runtime(), images, workers=2)
    assert there.kind == ONNX
    np.testing.assert_array_equal(here.values, there.values)


def test_an_export_is_stored_under_its_content(networks):
    (path,) = networks.iterdir()
    assert path.stem.endswith(OnnxRuntime(path).checksum[:24])


@pytest.mark.parametrize("why", ["few images", "no extra", "not requested", "uninstalled"])
def test_otherwise_torch_computes(photos, empty, no_export, monkeypatch, why):
    if why == "few images":
        monkeypatch.setattr(frozen_runtime, "WORTH_EXPORTING", 42 * 32 * 32 + 1)
    if why == "no extra":
        monkeypatch.setattr(frozen_runtime, "missing_package", lambda: "onnx")
    if why == "uninstalled":
        monkeypatch.setattr(frozen_runtime, "missing_package", lambda: "onnxruntime")
        monkeypatch.setattr(onnx_runtime, "installed", lambda: False)
    network = backbones.create("tiny")
    one = TorchRuntime(network, CPU) if why == "not requested" else runtime(network)
    assert feature_rows(one, open_data(photos)).kind == TORCH
    assert not (empty / "networks").exists()


def test_the_number_of_images_from_which_on_it_pays(photos, cache, monkeypatch):
    monkeypatch.setattr(frozen_runtime, "WORTH_EXPORTING", 42 * 32 * 32)
    assert feature_rows(runtime(), open_data(photos), np.arange(3)).kind == ONNX


def test_the_runtime_that_began_goes_on(photos, cache, no_export):
    images = open_data(photos)
    feature_rows(TorchRuntime(backbones.create("tiny"), CPU), images, np.arange(5))
    assert feature_rows(runtime(), images).kind == TORCH
    assert len(list((cache / "rows").iterdir())) == 1
    # More rows of the other kind, as from another machine.
    shutil.rmtree(cache / "rows")
    feature_rows(runtime(), images, np.arange(9))
    feature_rows(runtime(), images, np.arange(5), kind="")
    assert feature_rows(runtime(), images, np.arange(20)).kind == ONNX


def test_stored_rows_are_read_where_nothing_is_installed(photos, cache, monkeypatch, caplog):
    caplog.set_level(logging.INFO)
    images = open_data(photos)
    expected = feature_rows(runtime(), images, np.arange(9))
    shutil.rmtree(cache / "networks")
    monkeypatch.setattr(onnx_runtime, "installed", lambda: False)
    found = feature_rows(runtime(), images, np.arange(9))
    assert found.kind == ONNX
    np.testing.assert_array_equal(found.values, expected.values)
    assert "not ONNX Runtime" not in caplog.text
    # What is missing is not written into the file of the other runtime.
    more = feature_rows(runtime(), images, np.arange(12))
    assert more.kind == TORCH
    assert caplog.text.count("torch computes the features of tiny, not ONNX Runtime") == 1
    states = [(f / "state.u8").read_bytes().count(1) for f in (cache / "rows").iterdir()]
    assert sorted(states) == [9, 12]


class Branching(nn.Module):
    """What it computes depends on the values, which no exporter can follow."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 5)

    def forward(self, images):
        means = images.mean((2, 3))
        return self.layer(means) if float(means.sum()) > 0 else self.layer(means) * 2


def test_a_network_that_cannot_be_exported_runs_in_torch(photos, empty, caplog):
    caplog.set_level(logging.INFO)
    network, images = backbones.create(Branching(), image_size=32), open_data(photos)
    rows = feature_rows(runtime(network), images)
    assert rows.kind == TORCH
    assert rows.values.shape == (42, 5)
    lines = [record for record in caplog.records if record.name.startswith("fisherhash")]
    assert ["cannot be exported" in record.getMessage() for record in lines] == [True]
    assert feature_rows(runtime(network), images).kind == TORCH
    assert len([r for r in caplog.records if "cannot be exported" in r.getMessage()]) == 1


def other_network():
    network = backbones.create("tiny")
    with torch.no_grad():
        next(network.parameters())[0] += 0.1
    return network


@pytest.mark.parametrize("what", ["damaged", "empty", "another network", "its bits changed"])
def test_a_wrong_file_in_the_cache_is_not_used(photos, cache, what, monkeypatch, networks):
    (path,) = (cache / "networks").iterdir()
    key, good = path.stem.split("-")[0], path.read_bytes()
    if what == "another network":
        content = export_features(other_network(), "0" * 64)
        digest = frozen_runtime.hashlib.sha256(content).hexdigest()[:24]
        path.unlink()
        path.with_name(f"{key}-{digest}.onnx").write_bytes(content)
    elif what == "its bits changed":
        path.write_bytes(good.replace(b"tiny", b"tony"))
    else:
        path.write_bytes(good[: len(good) // 2] if what == "damaged" else b"")
    exports = []
    monkeypatch.setattr(frozen_runtime, "export_features", lambda *_: exports.append(1) or good)
    found = feature_rows(runtime(), open_data(photos), np.arange(4))
    assert (found.kind, exports) == (ONNX, [1])
    assert path.read_bytes() == good
    expected = feature_rows(runtime(), open_data(photos), np.arange(4), kind="")
    np.testing.assert_allclose(found.values, expected.values, rtol=1e-4, atol=1e-5)


def test_an_export_that_computes_something_else_is_not_used(photos, empty, monkeypatch, caplog):
    caplog.set_level(logging.INFO)
    wrong = export_features(other_network(), "0" * 64)
    monkeypatch.setattr(frozen_runtime, "export_features", lambda *_: wrong)
    assert feature_rows(runtime(), open_data(photos), np.arange(4)).kind == TORCH
    assert "does not compute what it does in torch" in caplog.text


QUICK = Settings(epochs=3, batch_size=8, learning_rate=0.001, seed=4)


def trained(photos, **options):
    return fitting.fit(
        photos, backbone="tiny", bits=8, settings=QUICK, device="cpu", measured=True, **options
    )


def test_a_training_is_that_of_torch(photos, cache, no_export, monkeypatch, tmp_path):
    found = trained(photos, out=tmp_path / "model")
    # Training, second code and measurement: one file of features.
    (folder,) = (cache / "rows").iterdir()
    assert found.features_by == ONNX
    codes = found.hasher.encode_collection(found.collection, cached=True).codes
    assert (folder / "state.u8").read_bytes().count(1) == 42
    monkeypatch.setenv("FISHERHASH_CACHE", str(tmp_path / "other"))
    monkeypatch.setattr(frozen_runtime, "missing_package", lambda: "onnx")
    expected = trained(photos)
    assert expected.features_by == TORCH
    np.testing.assert_array_equal(codes, expected.hasher.encode_collection(found.collection).codes)
    assert found.evaluation.map == pytest.approx(expected.evaluation.map, abs=1e-9)


def test_an_index_reuses_them_and_a_loaded_model_computes_its_own(
    photos, cache, no_export, tmp_path
):
    found = trained(photos, out=tmp_path / "model")
    images, loaded = open_data(photos), Hasher.load(tmp_path / "model", runtime="torch")
    stored = loaded.encode_stored(images)
    assert len(stored.indices) == 42
    np.testing.assert_array_equal(stored.codes, found.hasher.encode_collection(images).codes)
    loaded.encode_collection(images, cached=True)
    assert len(list((cache / "rows").iterdir())) == 2


@pytest.mark.parametrize("begun", [ONNX, TORCH])
def test_an_unfinished_run_goes_on_with_the_features_it_began_with(
    photos, cache, no_export, tmp_path, monkeypatch, begun
):
    real = Loop.epoch

    def stops(self, epoch):
        if epoch == 2:
            raise KeyboardInterrupt
        return real(self, epoch)

    with monkeypatch.context() as patch:
        patch.setattr(Loop, "epoch", stops)
        if begun == TORCH:
            patch.setattr(frozen_runtime, "missing_package", lambda: "onnx")
        with pytest.raises(KeyboardInterrupt):
            trained(photos, out=tmp_path / "model")
    # As on another machine, which has not the features.
    shutil.rmtree(cache / "rows")
    if begun == ONNX:
        monkeypatch.setattr(frozen_runtime, "missing_package", lambda: "onnx")
    assert trained(photos, out=tmp_path / "model").features_by == begun


def test_a_run_that_cannot_go_on_with_them_says_so(
    photos, cache, no_export, tmp_path, monkeypatch, caplog
):
    real = Loop._checkpoint

    def checkpoint(self, epoch):
        real(self, epoch)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Loop, "_checkpoint", checkpoint)
        with pytest.raises(KeyboardInterrupt):
            trained(photos, out=tmp_path / "model")
    shutil.rmtree(cache)
    monkeypatch.setattr(onnx_runtime, "installed", lambda: False)
    assert trained(photos, out=tmp_path / "model").features_by == TORCH
    assert "this run began with features by onnx-cpu and goes on with torch's" in caplog.text
