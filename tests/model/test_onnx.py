"""An exported model: the bits of torch, alone and in company; what is wrong says so."""

import dataclasses
import json
import logging
import pickle

import numpy as np
import pytest
import torch
from fisherhash.model.onnx_hasher import OnnxHasher
from fisherhash.model.onnx_runtime import OnnxRuntime
from fisherhash.model.torch_hasher import TorchHasher
from PIL import Image

from fisherhash import backbones, codes
from fisherhash.data.pixels import PixelBank
from fisherhash.data.sources import open_data
from fisherhash.errors import FisherhashError, UsageError
from fisherhash.index.images.image_index import ImageIndex
from fisherhash.model import early, onnx_runtime
from fisherhash.model.export import compare_logits, export_onnx
from fisherhash.model.hasher import Hasher
from fisherhash.model.heads import (
    ArgmaxHead,
    BatchNormHead,
    CutHead,
    LinearHead,
    ProductHead,
    SlicedHead,
)

pytest.importorskip("onnx")
pytest.importorskip("onnxscript")
BITS = 60


def tiny_hasher(head=None, backbone="tiny", **options):
    network = backbones.create(backbone, **options)
    torch.manual_seed(0)
    head = head or LinearHead(network.features, BITS)
    head.start(torch.randn(64, network.features).abs() * 0.1)
    details = {"results": {"mAP": 0.5}}
    return TorchHasher(network, head.eval(), "lsh", ("cat", "dog"), details)


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


@pytest.fixture
def folder(exported, tmp_path, monkeypatch, exporting):
    """The model folder as it is saved with the extra installed."""
    hasher, data = exported
    monkeypatch.setattr(TorchHasher, "export", lambda _: (data, None))
    hasher.save(tmp_path / "model")
    return tmp_path / "model"


def test_the_metadata_say_all_that_encoding_needs(exported):
    hasher, data = exported
    known = OnnxRuntime(data).metadata
    assert known["bits"] == BITS
    assert known["fingerprint"] == hasher.fingerprint()
    assert known["classes"] == ["cat", "dog"]
    assert known["preprocessing"]["size"] == 32
    assert known["preprocessing"]["mean"] == list(hasher.preprocessing.mean)
    assert (known["hamming"], known["int8"]) == (True, False)


def test_the_bits_are_those_of_torch_except_near_zero(exported):
    hasher, data = exported
    pixels = noise(300)
    expected = hasher.logits_of_rows(hasher._compute(pixels))
    found = compare_logits(expected, OnnxRuntime(data).logits(pixels))
    assert found.bits == 300 * BITS
    assert found.wrong == 0
    assert found.largest < 1e-4
    features = hasher.runtime.features(pixels)
    np.testing.assert_allclose(OnnxRuntime(data).features(pixels), features, rtol=1e-4, atol=1e-5)


def test_an_image_has_the_same_logits_alone_and_in_every_company(exported, monkeypatch):
    runtime, pixels = OnnxRuntime(exported[1]), noise(23)
    alone = np.concatenate([runtime.logits(image[None]) for image in pixels])
    for cores in (1, 2, 5):
        monkeypatch.setattr(onnx_runtime, "available_cores", lambda cores=cores: cores)
        runtime = OnnxRuntime(exported[1])
        order = np.random.default_rng(cores).permutation(23)
        np.testing.assert_array_equal(runtime.logits(pixels[order]), alone[order])
    assert runtime.logits(pixels[:0]).shape == (0, BITS)


def test_truncated_codes_are_the_first_bits(exported, folder, tmp_path):
    whole = Hasher.load(folder, runtime="onnx")
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
    again = Hasher.load(tmp_path / "short", runtime="onnx")
    assert (again.bits, again.fingerprint()) == (20, short.fingerprint())
    np.testing.assert_array_equal(again.encode(images), short.encode(images))
    torch_short = exported[0].truncated(20)
    np.testing.assert_array_equal(codes.unpack(torch_short.encode(images), 20), expected)


def test_the_file_takes_batches_of_any_size(exported):
    import onnxruntime

    session = onnxruntime.InferenceSession(exported[1], providers=["CPUExecutionProvider"])
    for count in (1, 3, 8):
        (logits,) = session.run(["logits"], {"pixels": noise(count)})
        assert logits.shape == (count, BITS)


def test_a_saved_model_is_loaded_in_onnx_runtime_on_a_cpu(exported, folder, photos):
    hasher = exported[0]
    assert sorted(path.name for path in folder.iterdir()) == [
        "README.md",
        "config.json",
        "model.onnx",
        "model.safetensors",
    ]
    loaded, same = Hasher.load(folder), Hasher.load(folder, runtime="torch")
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
        assert found.unsure == np.count_nonzero(np.abs(loaded.logits(paths)) < 1e-4)


def test_an_exported_model_without_weights_is_saved_and_loaded(exported, folder, tmp_path):
    (folder / "model.safetensors").unlink()
    loaded = Hasher.load(folder)
    assert isinstance(loaded, OnnxHasher)
    loaded.save(tmp_path / "copy")
    assert Hasher.load(tmp_path / "copy").fingerprint() == exported[0].fingerprint()
    with pytest.raises(UsageError, match=r"exported model without model\.safetensors"):
        Hasher.load(folder, runtime="torch")


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
    with pytest.raises(UsageError, match="torch cannot load"):
        Hasher.load(path, runtime="torch")


def test_a_file_that_an_older_version_left_behind_is_not_used(exported, folder):
    config = json.loads((folder / "config.json").read_text())
    del config["onnx_sha256"]
    (folder / "config.json").write_text(json.dumps(config))
    assert Hasher.load(folder).runtime_name == "torch-cpu"
    with pytest.raises(UsageError, match="is not exported; export it with"):
        Hasher.load(folder, runtime="onnx")


def test_damage_is_named_and_can_be_mended(exported, folder):
    data = bytearray(exported[1])
    data[-1000] ^= 1
    (folder / "model.onnx").write_bytes(data)
    with pytest.raises(FisherhashError, match=r"model\.onnx is damaged.*fisherhash export onnx"):
        Hasher.load(folder)
    assert Hasher.load(folder, runtime="torch").fingerprint() == exported[0].fingerprint()


def test_a_config_that_was_edited_is_another_model(folder):
    config = json.loads((folder / "config.json").read_text())
    config["preprocessing"]["size"] = 40
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(FisherhashError, match=r"belongs to another model.*preprocessing differs"):
        Hasher.load(folder)


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


def test_an_unknown_device_and_an_unknown_runtime(folder):
    with pytest.raises(UsageError, match="the device 'tpu' cannot be used"):
        Hasher.load(folder, device="tpu", runtime="onnx")
    with pytest.raises(UsageError, match=r"unknown runtime 'onx'\. Did you mean 'onnx'"):
        Hasher.load(folder, runtime="onx")


def test_without_onnx_runtime_torch_is_used(folder, monkeypatch):
    monkeypatch.setattr(onnx_runtime, "installed", lambda: False)
    assert Hasher.load(folder).runtime_name == "torch-cpu"


def test_a_network_that_cannot_be_exported_is_saved_all_the_same(tmp_path, exporting, caplog):
    class Odd(torch.nn.Module):
        def forward(self, images):
            if images.mean() > 0:
                return images.mean((2, 3))
            return images.amax((2, 3))

    network = backbones.create(Odd(), image_size=16)
    hasher = TorchHasher(network, LinearHead(3, 8), "lsh")
    with caplog.at_level(logging.WARNING, logger="fisherhash"):
        hasher.save(tmp_path)
    assert "saved without an ONNX file" in caplog.text
    assert Hasher.load(tmp_path, backbone=Odd()).fingerprint() == hasher.fingerprint()


def test_an_export_that_computes_something_else_is_refused(exported):
    hasher = exported[0]
    with pytest.raises(FisherhashError, match="does not compute what tiny does"):
        export_onnx(
            hasher.backbone,
            hasher.head,
            hasher.config(),
            lambda pixels: np.ones((len(pixels), BITS), dtype=np.float32),
        )


def test_an_index_says_which_runtime_made_its_codes(exported, folder, write_photos, tmp_path):
    root = write_photos(tmp_path / "photos", {"a": 5})
    with ImageIndex.create(tmp_path / "index", Hasher.load(folder)) as images:
        images.sync(root)
        assert images.info()["runtimes"]["onnx-cpu"]["codes"] == 5
    write_photos(root, {"b": 3}, seed=1)
    with ImageIndex.open(tmp_path / "index", write=True) as images:
        images._hasher = Hasher.load(folder, runtime="torch")
        images.sync(root)
        facts = images.info()
        assert {name: made["codes"] for name, made in facts["runtimes"].items()} == {
            "onnx-cpu": 5,
            "torch-cpu": 3,
        }
        assert "torch-cpu: 3 codes" in facts["encoded_by"]
        # The model inside the index is the exported one, with its weights.
        assert images.index.model_folder() is not None
        assert (images.index.model_folder() / "model.onnx").is_file()
    unsure = facts["runtimes"]["onnx-cpu"]["unsure_bits"]
    logits = Hasher.load(folder).logits(sorted((root / "a").iterdir()))
    assert unsure == np.count_nonzero(np.abs(logits) < 1e-4)


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
    function = Hasher.load(folder).runtime.worker_copy()
    sent = pickle.loads(pickle.dumps(function))
    assert np.array_equal(sent(noise(2)), function(noise(2)))
    late = pickle.loads(pickle.dumps(function))
    (folder / "model.onnx").write_bytes(b"another file")
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
    runtime = OnnxRuntime(exported[1])
    runtime.metadata = runtime.metadata | {"hamming": False, "head": {"kind": "product"}}
    hasher = OnnxHasher(runtime)
    with pytest.raises(UsageError, match="which an exported model does not compute"):
        list(hasher.encode_blocks([Image.new("RGB", (40, 40))], queries=True))


@pytest.mark.slow
@pytest.mark.parametrize(
    "head",
    [
        CutHead(32, 24, LinearHead(32, 40)),
        BatchNormHead(32, 24),
        ArgmaxHead(32, 24, 5),
        SlicedHead(32, 24),
    ],
)
def test_every_head(head):
    assert tiny_hasher(head).export()[1].wrong == 0


@pytest.mark.slow
def test_a_product_quantiser_says_that_it_cannot():
    with pytest.raises(FisherhashError, match="head 'product' cannot be exported"):
        tiny_hasher(ProductHead(32, 24)).export()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["squeezenet1.0", "alexnet", "vgg-f", "efficientnet-lite0"])
def test_every_backbone(name):
    hasher = tiny_hasher(backbone=name, pretrained=False)
    data, agreement = hasher.export()
    assert agreement.wrong == 0
    assert OnnxRuntime(data).width == hasher.backbone.features


@pytest.mark.slow
def test_the_shipped_file_has_the_bits_of_torch():
    reader = open_data("sample").reader
    images = [np.asarray(reader.open(i)) for i in range(500)]
    one, other = Hasher.load("general-64", runtime="torch"), Hasher.load("general-64")
    assert (one.fingerprint(), other.runtime_name) == (other.fingerprint(), "onnx-cpu")
    found = compare_logits(one.logits(images), other.logits(images))
    print(found)  # pytest -s shows how many differ
    assert (found.images, found.wrong) == (500, 0)


def test_comparing():
    one = np.array([[1.0, -1.0, 5e-5, 0.5]], dtype=np.float32)
    other = np.array([[1.0, -1.0, -5e-5, -0.5]], dtype=np.float32)
    found = compare_logits(one, other)
    assert dataclasses.astuple(found) == (1, 4, 2, 1, 1, 1.0)


def test_a_file_of_the_package_is_loaded_when_it_is_used(folder):
    eager = OnnxRuntime(folder / "model.onnx")
    lazy = OnnxRuntime(folder / "model.onnx", checksum=eager.checksum)
    assert lazy.width == eager.width
    assert "_session" not in vars(lazy)
    assert "_session" not in vars(Hasher.load_builtin("general2-64").runtime)
    assert lazy.metadata == eager.metadata
    assert (lazy.checksum, lazy.width, lazy.kind) == (eager.checksum, eager.width, eager.kind)
    pixels = noise(3)
    np.testing.assert_array_equal(lazy.logits(pixels), eager.logits(pixels))
    assert onnx_runtime._stored_metadata(b"") is None
    assert onnx_runtime._stored_metadata(lazy.content()[:-9]) is None


def test_a_model_folder_may_change_after_it_was_loaded(folder):
    hasher, pixels = Hasher.load(folder, runtime="onnx"), noise(3)
    expected = OnnxRuntime(folder / "model.onnx").logits(pixels)
    for file in folder.iterdir():
        file.unlink()
    np.testing.assert_array_equal(hasher.runtime.logits(pixels), expected)


@pytest.mark.parametrize(
    ("name", "images", "used"),
    [
        ("", 999, "general2-128"),
        ("", 1000, "general-64"),
        ("general2-64", 2000, "general2-64"),
        ("general-64-int8", 5, "general-64-int8"),
        ("some/folder", 5, "general2-64"),
    ],
)
def test_a_network_that_was_loaded_early_is_used(name, images, used, monkeypatch):
    monkeypatch.setattr(onnx_runtime, "_loaded", {})
    early.prepare(name, images)
    runtime = Hasher.load_builtin(used).runtime
    assert set(onnx_runtime._loaded) == (set() if "/" in name else {runtime.checksum})
    function = pickle.loads(pickle.dumps(runtime.worker_copy("logits")))
    pixels = noise(1, side=224)
    np.testing.assert_array_equal(function(pixels), runtime.logits(pixels))
    assert not onnx_runtime._loaded
