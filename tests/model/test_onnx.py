"""An exported model: the bits of torch, alone and in company; what is wrong says so."""

import contextlib
import json
import logging
import os
import pickle

import numpy as np
import pytest
import torch
from PIL import Image

from fisherhash import backbones, codes, methods
from fisherhash.data.pixels import PixelBank
from fisherhash.data.sources import open_data
from fisherhash.errors import FisherhashError, UsageError
from fisherhash.model import onnx_network
from fisherhash.model.export import compare_logits, export_onnx
from fisherhash.model.hasher import Hasher
from fisherhash.model.heads import ArgmaxHead, BatchNormHead, LinearHead, ProductHead, SlicedHead
from fisherhash.model.onnx_network import LOGITS, OnnxNetwork
from fisherhash.model.torch_network import TorchNetwork

pytest.importorskip("onnx")
pytest.importorskip("onnxscript")
BITS = 60


def tiny_hasher(head=None, backbone="tiny", **options):
    network = backbones.create(backbone, **options)
    torch.manual_seed(0)
    head = head or LinearHead(network.features, BITS)
    head.start(torch.randn(64, network.features).abs() * 0.1)
    details = {"results": {"mAP": 0.5}}
    network = TorchNetwork(network, torch.device("cpu"))
    about = {"method": "lsh", "classes": ("cat", "dog"), "details": details}
    return Hasher(network, head.eval().finished(), **about)


def noise(count, seed=0, side=32):
    rng = np.random.default_rng(seed)
    return rng.integers(0, 256, (count, 3, side, side), dtype=np.uint8)


@pytest.fixture(scope="module")
def exported():
    """A hasher in torch and its ONNX file."""
    hasher = tiny_hasher()
    data, agreement = hasher.export()
    assert agreement.wrong == 0
    return hasher, data


@pytest.fixture(scope="module")
def network_file(exported):
    """The ONNX file of the network alone."""
    return exported[0].network.exported()


@pytest.fixture
def folder(exported, network_file, tmp_path, monkeypatch, exporting):
    """The model folder as it is saved with the extra installed."""
    with monkeypatch.context() as patch:
        patch.setattr(TorchNetwork, "exported", lambda _: network_file)
        exported[0].save(tmp_path / "model")
    return tmp_path / "model"


@pytest.fixture
def by_torch(monkeypatch):
    """A function that loads a model where ONNX Runtime is not installed."""

    def load(path):
        with monkeypatch.context() as patch:
            patch.setattr(onnx_network, "installed", lambda: False)
            return Hasher.load(path)

    return load


def test_the_metadata_say_all_that_encoding_needs(exported):
    hasher, data = exported
    known = OnnxNetwork(data).metadata
    assert known["bits"] == BITS
    assert known["fingerprint"] == hasher.fingerprint()
    assert known["classes"] == ["cat", "dog"]
    assert known["preprocessing"]["size"] == 32
    assert known["preprocessing"]["mean"] == list(hasher.preprocessing.mean)
    assert (known["hamming"], known["int8"]) == (True, False)


def test_the_bits_are_those_of_torch_except_near_zero(exported):
    hasher, data = exported
    pixels = noise(300)
    expected = hasher.head.logits(hasher.network.features(pixels))
    found = compare_logits(expected, OnnxNetwork(data, output=LOGITS).features(pixels))
    assert found.bits == 300 * BITS
    assert found.wrong == 0
    assert found.largest < 1e-4
    features = hasher.network.features(pixels)
    np.testing.assert_allclose(OnnxNetwork(data).features(pixels), features, rtol=1e-4, atol=1e-5)


def test_an_image_has_the_same_logits_alone_and_in_every_company(exported, monkeypatch):
    runtime, pixels = OnnxNetwork(exported[1], output=LOGITS), noise(23)
    alone = np.concatenate([runtime.features(image[None]) for image in pixels])
    for cores in (1, 2, 5):
        monkeypatch.setattr(onnx_network, "available_cores", lambda cores=cores: cores)
        runtime = OnnxNetwork(exported[1], output=LOGITS)
        order = np.random.default_rng(cores).permutation(23)
        np.testing.assert_array_equal(runtime.features(pixels[order]), alone[order])
    assert runtime.features(pixels[:0]).shape == (0, BITS)


@pytest.mark.parametrize("alone", [False, True])
def test_truncated_codes_are_the_first_bits(exported, folder, tmp_path, alone):
    """Of a network and a head, and of a file that has both."""
    (tmp_path / "whole.onnx").write_bytes(exported[1])
    whole = Hasher.load(tmp_path / "whole.onnx" if alone else folder)
    images = list(noise(9).transpose(0, 2, 3, 1))
    short = whole.truncated(20)
    assert (short.bits, short.runtime_name) == (20, "onnx-cpu")
    expected = codes.unpack(whole.encode(images), BITS)[:, :20]
    np.testing.assert_array_equal(codes.unpack(short.encode(images), 20), expected)
    np.testing.assert_array_equal(short.logits(images), whole.logits(images)[:, :20])
    twice = short.truncated(7)
    np.testing.assert_array_equal(codes.unpack(twice.encode(images), 7), expected[:, :7])
    assert len({whole.fingerprint(), short.fingerprint(), twice.fingerprint()}) == 3
    short.save(tmp_path / "short")
    again = Hasher.load(tmp_path / "short")
    assert (again.bits, again.fingerprint()) == (20, short.fingerprint())
    np.testing.assert_array_equal(again.encode(images), short.encode(images))
    data, agreement = short.export()
    assert (agreement.wrong, agreement.bits) == (0, 20 * agreement.images)
    (tmp_path / "short.onnx").write_bytes(data)
    assert Hasher.load(tmp_path / "short.onnx").fingerprint() == short.fingerprint()


def test_a_saved_model_is_loaded_in_onnx_runtime_on_a_cpu(exported, folder, photos, by_torch):
    hasher = exported[0]
    assert sorted(path.name for path in folder.iterdir()) == [
        "README.md",
        "config.json",
        "model.safetensors",
        "network.onnx",
    ]
    loaded, same = Hasher.load(folder), by_torch(folder)
    assert (loaded.runtime_name, same.runtime_name) == ("onnx-cpu", "torch-cpu")
    assert loaded.fingerprint() == same.fingerprint() == hasher.fingerprint()
    for name in ("bits", "method", "classes", "details", "preprocessing", "about"):
        assert getattr(loaded, name) == getattr(same, name), name
    collection = open_data(photos)
    paths = [photos / name for name in collection.names]
    expected = same.logits(paths)
    np.testing.assert_allclose(loaded.logits(paths), expected, atol=1e-4)
    bank = PixelBank(collection, np.arange(42), hasher.preprocessing, torch.device("cpu"))
    for source, options in ((collection, {}), (collection, {"cached": True}), (bank, {})):
        found = loaded.encode_collection(source, queries=True, **options)
        np.testing.assert_array_equal(found.codes, loaded.encode(paths))
        np.testing.assert_array_equal(found.queries, loaded.logits(paths))


def test_the_file_alone_is_a_model(exported, tmp_path):
    path = tmp_path / "mine.onnx"
    path.write_bytes(exported[1])
    loaded = Hasher.load(path)
    assert loaded.fingerprint() == exported[0].fingerprint()
    assert loaded.about["path"] == str(path)
    loaded.save(tmp_path / "model")
    again = Hasher.load(tmp_path / "model")
    np.testing.assert_array_equal(
        again.logits(list(noise(3).transpose(0, 2, 3, 1))),
        loaded.logits(list(noise(3).transpose(0, 2, 3, 1))),
    )
    with pytest.raises(UsageError, match="an exported model has its network"):
        Hasher.load(path, backbone=torch.nn.Identity())


def test_damage_is_named(exported, folder):
    data = bytearray((folder / "network.onnx").read_bytes())
    data[-1000] ^= 1
    (folder / "network.onnx").write_bytes(data)
    with pytest.raises(FisherhashError, match=r"network\.onnx is damaged: its checksum"):
        Hasher.load(folder)


def test_a_config_that_was_edited_is_another_model(folder, caplog):
    config = json.loads((folder / "config.json").read_text())
    config["preprocessing"]["draft"] = 1.5
    (folder / "config.json").write_text(json.dumps(config))
    with caplog.at_level(logging.WARNING, logger="fisherhash"):
        assert Hasher.load(folder).fingerprint() != config["fingerprint"]
    assert "makes other codes than before" in caplog.text


@pytest.mark.parametrize("content", [b"", b"text", "cut"])
def test_what_is_no_exported_model(exported, tmp_path, content):
    path = tmp_path / "bad.onnx"
    path.write_bytes(exported[1][:2000] if content == "cut" else content)
    with pytest.raises(FisherhashError, match=r"bad\.onnx"):
        Hasher.load(path)


def test_a_foreign_file(tmp_path):
    import onnx
    from onnx import TensorProto, helper

    value = helper.make_tensor_value_info
    graph = helper.make_graph(
        [helper.make_node("Identity", ["a"], ["b"])],
        "foreign",
        [value("a", TensorProto.FLOAT, [1])],
        [value("b", TensorProto.FLOAT, [1])],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)
    onnx.save(model, tmp_path / "foreign.onnx")
    with pytest.raises(UsageError, match="was not exported by fisherhash"):
        Hasher.load(tmp_path / "foreign.onnx")


def test_a_network_that_cannot_be_exported_is_saved_all_the_same(tmp_path, exporting, caplog):
    class Odd(torch.nn.Module):
        def forward(self, images):
            if images.mean() > 0:
                return images.mean((2, 3))
            return images.amax((2, 3))

    network = backbones.create(Odd(), image_size=16)
    network = TorchNetwork(network, torch.device("cpu"))
    hasher = Hasher(network, LinearHead(3, 8).finished(), method="lsh")
    with caplog.at_level(logging.WARNING, logger="fisherhash"):
        hasher.save(tmp_path)
    assert "saved without an ONNX file" in caplog.text
    assert Hasher.load(tmp_path, backbone=Odd()).fingerprint() == hasher.fingerprint()


def test_an_export_that_computes_something_else_is_refused(exported, network_file, monkeypatch):
    hasher = exported[0]
    monkeypatch.setattr(TorchNetwork, "exported", lambda _: network_file)
    monkeypatch.setattr(TorchNetwork, "features", lambda _, pixels: np.ones((len(pixels), 32)))
    with pytest.raises(FisherhashError, match="does not compute what tiny does"):
        export_onnx(hasher.network, hasher.head, hasher.config())


def test_worker_processes_compute_the_same_codes(folder):
    hasher, images = Hasher.load(folder), open_data("sample")
    some = np.arange(40)
    here = hasher.encode_collection(images, some, workers=0)
    there = hasher.encode_collection(images, some, workers=2)
    assert np.array_equal(here.codes, there.codes)
    blocks = hasher.encode_blocks(
        PixelBank(images, some, hasher.preprocessing, torch.device("cpu"))
    )
    assert np.array_equal(here.codes, np.concatenate([block.codes for block in blocks]))


def test_a_worker_notices_that_its_file_was_replaced(folder):
    function = Hasher.load(folder).network.row_function().compute
    sent = pickle.loads(pickle.dumps(function))
    assert np.array_equal(sent(noise(2)), function(noise(2)))
    late = pickle.loads(pickle.dumps(function))
    (folder / "network.onnx").write_bytes(b"another file")
    with pytest.raises(FisherhashError, match="was replaced while it was used"):
        late(noise(1))


def test_features_that_training_stored_become_codes(folder, exported, tmp_path, monkeypatch):
    # A cache of its own: other tests store rows of the same images.
    monkeypatch.setenv("FISHERHASH_CACHE", str(tmp_path / "cache"))
    images = open_data("sample")
    assert Hasher.load(folder).encode_stored(images) is None
    list(exported[0].encode_blocks(images, np.arange(5), cached=True))
    stored = Hasher.load(folder).encode_stored(images)
    assert stored.indices.tolist() == list(range(5))
    assert np.array_equal(stored.codes, exported[0].encode_collection(images, np.arange(5)).codes)


def test_only_those_with_a_hamming_distance_are_ranked(exported):
    runtime = OnnxNetwork(exported[1], output=LOGITS)
    runtime.metadata = runtime.metadata | {
        "hamming": False,
        "head": {"kind": "product", "in_features": 32},
    }
    hasher = Hasher.of_exported(runtime)
    with pytest.raises(UsageError, match="which an exported model does not compute"):
        list(hasher.encode_blocks([Image.new("RGB", (40, 40))], queries=True))


@pytest.mark.slow
@pytest.mark.parametrize(
    "head",
    [
        BatchNormHead(32, 24),
        ArgmaxHead(32, 24, 5),
        SlicedHead(32, 24),
        ProductHead(32, 24),
    ],
)
def test_every_trained_head(head):
    assert tiny_hasher(head).export()[1].wrong == 0


@pytest.mark.slow
@pytest.mark.parametrize("name", ["agh", "fasth", "kmh", "ksh", "sh"])
def test_every_fitted_head(name):
    """A head of each kind that methods fit to features."""
    generator = torch.Generator().manual_seed(0)
    features = torch.randn(300, 32, generator=generator).abs()
    labels = torch.nn.functional.one_hot(features[:, :4].argmax(1), 4).float()
    head = methods.create(name, bits=8, classes=4).fit(features, labels, seed=0)
    network = TorchNetwork(backbones.create("tiny"), torch.device("cpu"))
    assert Hasher(network, head.finished(), method=name).export()[1].wrong == 0


@pytest.mark.slow
@pytest.mark.parametrize("name", ["squeezenet1.0", "alexnet", "vgg-f", "efficientnet-lite0"])
def test_every_backbone(name):
    hasher = tiny_hasher(backbone=name, pretrained=False)
    data, agreement = hasher.export()
    assert agreement.wrong == 0
    assert OnnxNetwork(data).width == hasher.network.width


@pytest.mark.slow
def test_the_shipped_file_has_the_bits_of_torch(by_torch):
    reader = open_data("sample").reader
    images = [np.asarray(reader.open(i)) for i in range(500)]
    one, other = by_torch("general-64"), Hasher.load("general-64")
    assert (one.fingerprint(), other.runtime_name) == (other.fingerprint(), "onnx-cpu")
    found = compare_logits(one.logits(images), other.logits(images))
    print(found)  # pytest -s shows how many differ
    assert (found.images, found.wrong) == (500, 0)


def test_a_file_of_the_package_is_loaded_when_it_is_used(folder):
    for name in ("general-64", "general2-64"):
        assert "_session" not in vars(Hasher.load_builtin(name).network)
    assert "_session" in vars(Hasher.load(folder).network)


def test_images_of_another_size_are_refused(folder):
    with pytest.raises(FisherhashError, match="tiny in ONNX Runtime: "):
        Hasher.load(folder).network.features(noise(1, side=40))


@pytest.fixture(scope="module")
def other():
    """A hasher with another network and another head, and the network's ONNX file."""
    backbone = backbones.create("tiny")
    with torch.no_grad():
        backbone.layers[0].bias += 0.5
    network = TorchNetwork(backbone, torch.device("cpu"))
    return Hasher(network, LinearHead(32, 20).finished(), method="lsh"), network.exported()


@pytest.mark.parametrize("moves", range(5))
def test_a_save_killed_between_the_moves_leaves_one_whole_model(folder, other, monkeypatch, moves):
    """With a network beside the weights: the old model, and the new one from the first move on."""
    new, content = other
    old = Hasher.load(folder)
    monkeypatch.setattr(TorchNetwork, "exported", lambda _: content)
    replace, count = os.replace, iter(range(10))

    def killed(source, target):
        if next(count) == moves:
            raise KeyboardInterrupt
        replace(source, target)

    monkeypatch.setattr(os, "replace", killed)
    with pytest.raises(KeyboardInterrupt) if moves < 4 else contextlib.nullcontext():
        new.save(folder)
    loaded, expected = Hasher.load(folder), old if moves == 0 else new
    assert (loaded.fingerprint(), loaded.runtime_name) == (expected.fingerprint(), "onnx-cpu")
