"""VGG-F from a MatConvNet file against plain numpy, in MatConvNet's own axes and conventions."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import pytest
import torch

from fisherhash import backbones
from fisherhash.backbones.vgg_f import read_mat
from fisherhash.data.preprocessing import Preprocessing
from fisherhash.errors import FisherhashError, UsageError

scipy_io = pytest.importorskip("scipy.io", reason="scipy is in the extra vgg-f")

# Filters as MatConvNet stores them: height, width, inputs, outputs; then stride and padding.
LAYERS = {
    "conv1": ((11, 11, 3, 64), 4, 0),
    "conv2": ((5, 5, 64, 256), 1, 2),
    "conv3": ((3, 3, 256, 256), 1, 1),
    "conv4": ((3, 3, 256, 256), 1, 1),
    "conv5": ((3, 3, 256, 256), 1, 1),
    "fc6": ((6, 6, 256, 4096), 1, 0),
    "fc7": ((1, 1, 4096, 4096), 1, 0),
}
NORM = (5.0, 2.0, 1e-4, 0.75)


def cells(items: list[Any]) -> np.ndarray:
    array = np.empty((1, len(items)), dtype=object)
    array[0, :] = items
    return array


def conv_layer(name: str, filters: np.ndarray, biases: np.ndarray, *, old: bool) -> dict[str, Any]:
    layer: dict[str, Any] = {"name": name, "type": "conv"}
    if old:
        return layer | {"filters": filters, "biases": biases}
    return layer | {"weights": cells([filters, biases])}


def network(weights: dict[str, tuple[np.ndarray, np.ndarray]], *, old: bool, norm=NORM):
    layers = []
    for name, (filters, biases) in weights.items():
        layers += [conv_layer(name, filters, biases, old=old), {"name": "r", "type": "relu"}]
        if name in ("conv1", "conv2"):
            kind = "normalize" if old else "lrn"
            layers.append({"name": f"norm{name[-1]}", "type": kind, "param": np.array([norm])})
        if name in ("conv1", "conv2", "conv5"):
            layers.append({"name": f"pool{name[-1]}", "type": "pool"})
    return cells(layers)


@pytest.fixture(scope="module")
def weights():
    rng = np.random.default_rng(0)
    made = {}
    for name, (shape, _, _) in LAYERS.items():
        # Bytes are quick to draw; He's scale keeps the signal alive through seven layers.
        filters = rng.integers(-100, 101, shape, dtype=np.int8).astype(np.float32)
        filters *= (2 / np.prod(shape[:3])) ** 0.5 / 58
        made[name] = (filters, rng.normal(0, 0.1, (1, shape[3])).astype(np.float32))
    return made


@pytest.fixture(scope="module")
def average():
    return np.random.default_rng(1).uniform(90, 130, (224, 224, 3)).astype(np.float32)


@pytest.fixture(scope="module")
def published(tmp_path_factory, weights, average):
    file = tmp_path_factory.mktemp("vgg") / "imagenet-vgg-f.mat"
    meta = {"normalization": {"averageImage": average, "imageSize": np.array([224, 224, 3])}}
    scipy_io.savemat(file, {"layers": network(weights, old=False), "meta": meta})
    yield file
    file.unlink()  # 250 MB; pytest keeps the folders of three runs


def numpy_conv(x, filters, biases, stride, padding):
    """(height, width, inputs) to (height, width, outputs)."""
    x = np.pad(x, ((padding, padding), (padding, padding), (0, 0)))
    windows = np.lib.stride_tricks.sliding_window_view(x, filters.shape[:2], axis=(0, 1))
    windows = windows[::stride, ::stride]  # rows, columns, inputs, height, width
    return np.einsum("yxihw,hwio->yxo", windows, filters, optimize=True) + biases.reshape(-1)


def numpy_norm(x, window, kappa, alpha, beta):
    out = np.empty_like(x)
    for channel in range(x.shape[2]):
        near = x[:, :, max(channel - 2, 0) : channel + 3].astype(np.float64)
        assert window == 5
        out[:, :, channel] = x[:, :, channel] / (kappa + alpha * (near**2).sum(2)) ** beta
    return out


def numpy_pool(x, pad):
    """3 x 3 with stride 2; ``pad`` pixels at the bottom and at the right, which never win."""
    x = np.pad(x, ((0, pad), (0, pad), (0, 0)), constant_values=-np.inf)
    windows = np.lib.stride_tricks.sliding_window_view(x, (3, 3), axis=(0, 1))[::2, ::2]
    return windows.max((-1, -2))


def numpy_vgg_f(weights, average, image):
    x = image.astype(np.float32) - average
    # The padding of each pooling in MatConvNet's definition of the network.
    pads = {"conv1": 1, "conv2": 0, "conv5": 0}
    for name, (_, stride, padding) in LAYERS.items():
        x = np.maximum(numpy_conv(x, *weights[name], stride, padding), 0)
        if name in ("conv1", "conv2"):
            x = numpy_norm(x, *NORM)
        if name in pads:
            x = numpy_pool(x, pads[name])
    return x.reshape(-1)


def test_features_equal_numpy(published, weights, average):
    backbone = backbones.create("vgg-f", weights=published)
    image = np.random.default_rng(2).integers(0, 256, (224, 224, 3), dtype=np.uint8)
    expected = numpy_vgg_f(weights, average, image)
    with torch.inference_mode():
        found = backbone(torch.from_numpy(image).permute(2, 0, 1)[None])[0].numpy()
    assert expected.shape == found.shape == (4096,)
    assert expected.std() > 0.1
    np.testing.assert_allclose(found, expected, rtol=1e-3, atol=1e-3 * expected.std())
    # The average image and the coefficients are saved with a model.
    again = backbones.restore("vgg-f", backbone.preprocessing)
    assert not torch.equal(again.average, backbone.average)
    again.load_state_dict(backbone.state_dict())
    assert torch.equal(again.average, backbone.average)


def small_network(**options):
    rng = np.random.default_rng(0)
    small = {
        name: (rng.normal(size=(*shape[:2], 2, 3)), rng.normal(size=(3, 1)))
        for name, (shape, _, _) in LAYERS.items()
    }
    return small, network(small, **options)


@pytest.mark.parametrize("old", [False, True])
@pytest.mark.parametrize("nested", [False, True])
def test_both_ages_of_the_format(tmp_path, old, nested):
    small, layers = small_network(old=old)
    colour = np.array([1.0, 2.0, 3.0]).reshape(1, 1, 3)
    normalization = {"averageImage": colour}
    content = {"layers": layers}
    content |= (
        {"normalization": normalization} if old else {"meta": {"normalization": normalization}}
    )
    scipy_io.savemat(tmp_path / "net.mat", {"net": content} if nested else content)
    tensors = read_mat(tmp_path / "net.mat")
    assert tensors["average"].flatten().tolist() == [1, 2, 3]
    assert tensors["norm2.coefficients"].tolist() == pytest.approx(NORM[1:])
    for name, (filters, biases) in small.items():
        expected = filters.transpose(3, 2, 0, 1).astype(np.float32)
        if name.startswith("fc"):
            expected = expected.reshape(3, -1)
        np.testing.assert_array_equal(tensors[f"{name}.weight"].numpy(), expected)
        np.testing.assert_array_equal(
            tensors[f"{name}.bias"].numpy(), biases.reshape(-1).astype(np.float32)
        )


def test_a_mat_file_of_something_else(tmp_path):
    scipy_io.savemat(tmp_path / "data.mat", {"x": np.zeros(3)})
    with pytest.raises(UsageError, match=r"data.mat' is not a MatConvNet network.*layers"):
        backbones.create("vgg-f", weights=tmp_path / "data.mat")


def test_another_window(tmp_path):
    _, layers = small_network(old=False, norm=(3.0, 1.0, 1e-4, 0.75))
    meta = {"normalization": {"averageImage": np.zeros((224, 224, 3))}}
    scipy_io.savemat(tmp_path / "net.mat", {"layers": layers, "meta": meta})
    with pytest.raises(UsageError, match="norm1 spans 3 channels, expected 5"):
        read_mat(tmp_path / "net.mat")


def test_without_scipy(monkeypatch, published):
    monkeypatch.setitem(sys.modules, "scipy.io", None)
    with pytest.raises(FisherhashError, match=r"'scipy'.*fisherhash\[train\]"):
        backbones.create("vgg-f", weights=published)
    assert backbones.restore("vgg-f", Preprocessing(size=64)).features == 4096
