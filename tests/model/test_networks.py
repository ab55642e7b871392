"""Features do not depend on the company an image is in, and come from the disk the second time."""

import dataclasses
import shutil

import numpy as np
import pytest
import torch

from fisherhash import backbones
from fisherhash.data.sources import open_data
from fisherhash.model import builtin, onnx_network, torch_network
from fisherhash.model.networks import feature_rows
from fisherhash.model.torch_batches import MICRO_BATCH, in_fixed_batches
from fisherhash.model.torch_network import TorchNetwork
from fisherhash.system.cache import cache_dir

CPU = torch.device("cpu")


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """An empty cache."""
    monkeypatch.setenv("FISHERHASH_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


class Counting:
    """A reader that counts what is opened."""

    def __init__(self, reader, mark="1"):
        self.reader, self.mark, self.opened = reader, mark, []

    def open(self, index, *, enough=None):
        self.opened.append(index)
        return self.reader.open(index)

    def fingerprint(self):
        return self.reader.fingerprint() + self.mark


def counted(photos, mark="1"):
    collection = open_data(photos)
    reader = Counting(collection.reader, mark)
    return dataclasses.replace(collection, reader=reader), reader


def test_every_batch_has_one_size_and_the_padding_is_dropped():
    sizes = []

    def double(values):
        sizes.append(len(values))
        return values * 2

    for count in range(10):
        values = np.arange(count * 3, dtype=np.float32).reshape(count, 3)
        rows = in_fixed_batches(double, values, CPU)
        np.testing.assert_array_equal(rows, values * 2)
        assert rows.shape == values.shape
    assert set(sizes) == {MICRO_BATCH}


@pytest.mark.parametrize("name", ["tiny", "squeezenet1.0", "efficientnet-lite0"])
def test_features_are_the_same_bytes_in_any_company(name):
    network = backbones.create(name, pretrained=False, image_size=32)
    pixels = np.random.default_rng(0).integers(0, 256, (9, 3, 32, 32), dtype=np.uint8)
    runtime = TorchNetwork(network, CPU)
    together = runtime.features(pixels)
    for i in range(9):
        np.testing.assert_array_equal(runtime.features(pixels[i : i + 1])[0], together[i])
    order = np.random.default_rng(1).permutation(9)
    np.testing.assert_array_equal(runtime.features(pixels[order]), together[order])


def test_the_backbone_is_left_as_it_was():
    network = backbones.create("efficientnet-lite0", pretrained=False, image_size=32)
    before = {k: v.clone() for k, v in network.state_dict().items()}
    TorchNetwork(network, CPU)
    after = network.state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(before[k], after[k]) for k in before)


def test_the_second_time_nothing_is_decoded(photos, cache):
    runtime = TorchNetwork(backbones.create("tiny"), CPU)
    collection, reader = counted(photos)
    first = feature_rows(runtime, collection, np.array([5, 2, 30]))
    assert {*reader.opened} == {2, 5, 30}
    assert first.indices.tolist() == [5, 2, 30]
    every = feature_rows(runtime, collection)
    assert {*reader.opened} == {*range(len(collection))}
    np.testing.assert_array_equal(every.values[[5, 2, 30]], first.values)
    collection, reader = counted(photos)
    again = feature_rows(runtime, collection)
    assert reader.opened == []
    np.testing.assert_array_equal(again.values, every.values)
    assert cache_dir() == cache


def test_a_row_is_the_feature_of_its_image(photos, cache):
    network = backbones.create("tiny")
    runtime = TorchNetwork(network, CPU)
    collection = open_data(photos)
    rows = feature_rows(runtime, collection)
    for i in (0, 17, 41):
        pixels = network.preprocessing.pixels(collection.reader.open(i)).transpose(2, 0, 1)
        np.testing.assert_array_equal(runtime.features(pixels[None])[0], rows.values[i])
        with torch.inference_mode():
            plain = network(torch.from_numpy(pixels.copy())[None].float())[0].numpy()
        np.testing.assert_allclose(rows.values[i], plain, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("change", ["images", "weights", "size"])
def test_other_images_weights_or_sizes_are_other_features(photos, cache, change):
    collection, _ = counted(photos)
    feature_rows(TorchNetwork(backbones.create("tiny"), CPU), collection)
    collection, reader = counted(photos, mark="2" if change == "images" else "1")
    network = backbones.create("tiny", image_size=40 if change == "size" else 32)
    if change == "weights":
        with torch.no_grad():
            next(network.parameters())[0, 0, 0, 0] += 1e-3
    feature_rows(TorchNetwork(network, CPU), collection)
    assert {*reader.opened} == {*range(len(collection))}


@pytest.mark.parametrize("why", ["few images", "not requested", "uninstalled", "other weights"])
def test_features_of_many_images_are_stored_by_the_packaged_network(
    photos, cache, monkeypatch, why
):
    """Faster on a CPU."""
    monkeypatch.setattr(torch_network, "MANY_PIXELS", 42 * 32 * 32)
    network, images = backbones.create("efficientnet-lite0", image_size=32), open_data(photos)
    by_torch = TorchNetwork(network, CPU)
    expected = feature_rows(by_torch, images)
    shutil.rmtree(cache)
    found = feature_rows(TorchNetwork(network, CPU, via_onnx=True), images)
    assert (found.kind, expected.kind) == ("onnx-cpu", "torch-cpu")
    np.testing.assert_allclose(found.values, expected.values, atol=1e-4)
    packaged = builtin.packaged_network(preprocessing=network.preprocessing)
    assert feature_rows(packaged, images).values.tobytes() == found.values.tobytes()
    shutil.rmtree(cache)
    if why == "few images":
        monkeypatch.setattr(torch_network, "MANY_PIXELS", 42 * 32 * 32 + 1)
    if why == "uninstalled":
        monkeypatch.setattr(onnx_network, "installed", lambda: False)
    if why == "other weights":
        with torch.no_grad():
            next(network.parameters())[0, 0, 0, 0] += 1e-3
    other = TorchNetwork(network, CPU, via_onnx=why != "not requested")
    assert feature_rows(other, images).kind == "torch-cpu"
