"""int8: scales that make sums exact on every processor, and models that stay nearly the same."""

import numpy as np
import pytest
import torch

from fisherhash import backbones
from fisherhash.errors import UsageError
from fisherhash.model.hasher import Hasher
from fisherhash.model.heads import LinearHead
from fisherhash.model.onnx_network import LOGITS, OnnxNetwork
from fisherhash.model.quantise import quantise, weight_scales
from fisherhash.model.torch_network import TorchNetwork

onnx = pytest.importorskip("onnx")
pytest.importorskip("onnxscript")
onnxruntime = pytest.importorskip("onnxruntime")


def heavy_tailed(shape, seed):
    """Weights of which a few are large, next to others of the same sign."""
    rng = np.random.default_rng(seed)
    weight = rng.standard_t(2, shape).astype(np.float32)
    weight[: shape[0] // 2] = np.abs(weight[: shape[0] // 2])
    weight[0] = 1.0  # all pairs at the limit
    return weight


def steps_of(weight, groups):
    scales = weight_scales(weight, groups=groups)
    return np.rint(weight / scales[:, None, None, None]).astype(np.int64)


@pytest.mark.parametrize("inputs", [2, 7, 64])
def test_no_two_products_exceed_16_bits(inputs):
    steps = steps_of(heavy_tailed((50, inputs, 1, 1), 1), 1).reshape(50, -1)
    assert np.abs(steps).max() <= 127
    padded = np.pad(steps, ((0, 0), (0, inputs % 2)))
    pairs = padded.reshape(50, -1, 2) * 255
    assert pairs.clip(max=0).sum(2).min() >= -(2**15)
    assert pairs.clip(min=0).sum(2).max() < 2**15
    spatial = steps_of(heavy_tailed((50, inputs, 3, 3), 2), 1)
    assert np.abs(spatial).max() == 64


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """An exported model in full precision."""
    network = backbones.create("tiny")
    torch.manual_seed(0)
    head = LinearHead(network.features, 48)
    head.start(torch.randn(64, network.features).abs() * 0.1)
    network = TorchNetwork(network, torch.device("cpu"))
    hasher = Hasher(network, head.finished(), method="lsh", classes=("cat", "dog"))
    folder = tmp_path_factory.mktemp("int8") / "model"
    hasher.save(folder)
    (folder / "tiny.onnx").write_bytes(hasher.export()[0])
    return folder


def blobs(count, seed=0):
    coarse = np.random.default_rng(seed).integers(0, 256, (count, 3, 8, 8), dtype=np.uint8)
    return np.ascontiguousarray(coarse.repeat(4, axis=2).repeat(4, axis=3))


def test_a_quantised_network_is_another_model_with_nearly_the_same_codes(model):
    whole = OnnxNetwork(model / "tiny.onnx", output=LOGITS)
    data = quantise(whole, blobs(32))
    assert data == quantise(whole, blobs(32))
    quick = OnnxNetwork(data, output=LOGITS)
    assert quick.metadata["int8"]
    assert quick.metadata["made_from"] == whole.metadata["fingerprint"]
    assert quick.metadata["fingerprint"] != whole.metadata["fingerprint"]
    assert quick.metadata["classes"] == ["cat", "dog"]
    one, other = whole.features(blobs(100, 1)), quick.features(blobs(100, 1))
    differing = ((one > 0) != (other > 0)).mean()
    assert 0 < differing < 0.05
    types = {tensor.data_type for tensor in onnx.load_from_string(data).graph.initializer}
    assert onnx.TensorProto.INT8 in types
    with pytest.raises(UsageError, match="quantised already"):
        quantise(quick, blobs(4))
    with pytest.raises(UsageError, match="needs images"):
        quantise(whole, blobs(0))


def test_a_quantised_model_is_saved_and_loaded(model, tmp_path):
    data = quantise(OnnxNetwork(model / "tiny.onnx"), blobs(16))
    quick = Hasher.of_exported(OnnxNetwork(data), details={"note": 1})
    quick.save(tmp_path / "quick")
    names = sorted(path.name for path in (tmp_path / "quick").iterdir())
    assert names == ["README.md", "config.json", "model.onnx"]
    loaded = Hasher.load(tmp_path / "quick")
    assert loaded.fingerprint() == quick.fingerprint() != Hasher.load(model).fingerprint()
    assert (loaded.details, loaded.classes) == ({"note": 1}, ("cat", "dog"))
    images = list(blobs(4, 3).transpose(0, 2, 3, 1))
    np.testing.assert_array_equal(loaded.encode(images), quick.encode(images))
    with pytest.raises(UsageError, match=r"int8 model, which runs on a CPU only|cannot be used"):
        Hasher.load(tmp_path / "quick", device="cuda")
