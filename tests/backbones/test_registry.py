from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import nn

from fisherhash import backbones
from fisherhash.data.preprocessing import Preprocessing
from fisherhash.errors import UsageError

NEED_A_FILE = ("squeezenet1.0", "alexnet", "vgg-f")


@pytest.mark.parametrize("name", backbones.names())
def test_contract(name):
    entry = backbones.info(name)
    size = max(entry.smallest, 32)
    backbone = backbones.create(name, pretrained=False, image_size=size)
    assert (backbone.name, backbone.features) == (name, entry.features)
    assert backbone.preprocessing == dataclasses.replace(entry.preprocessing, size=size)
    assert not backbone.training
    pixels = torch.randint(256, (3, 3, size, size), dtype=torch.uint8)
    with torch.inference_mode():
        features = backbone(pixels)
        assert features.shape == (3, entry.features)
        assert features.dtype == torch.float32
        assert torch.equal(features, backbone(pixels.float()))
    assert not {"mean", "std"} & set(backbone.state_dict())


@pytest.mark.parametrize("name", backbones.names())
def test_smallest_image(name):
    smallest = backbones.info(name).smallest
    backbone = backbones.create(name, pretrained=False, image_size=smallest)
    with torch.inference_mode():
        features = backbone(torch.zeros(1, 3, smallest, smallest))
    assert bool(torch.isfinite(features).all())
    if smallest > 8:
        with pytest.raises(UsageError, match=f"at least {smallest} pixels, got {smallest - 1}"):
            backbones.create(name, pretrained=False, image_size=smallest - 1)


@pytest.mark.parametrize("function", [backbones.create, backbones.info])
def test_unknown_name_suggests_the_nearest(function):
    with pytest.raises(UsageError, match=r"'eficientnet'. Did you mean 'efficientnet-lite0'\?"):
        function("eficientnet")
    with pytest.raises(UsageError, match="'torchvision:resnet50', 'timm:resnet50'"):
        function("resnet50")


@pytest.mark.parametrize("name", NEED_A_FILE)
def test_a_backbone_without_installed_weights_says_where_they_are(name):
    with pytest.raises(UsageError, match=rf"{name} needs a weights file .*https://"):
        backbones.create(name)


def test_tiny_is_the_same_everywhere_and_leaves_the_generator_alone():
    torch.manual_seed(7)
    expected = torch.rand(4)
    torch.manual_seed(7)
    first = backbones.create("tiny")
    assert torch.equal(torch.rand(4), expected)
    second = backbones.create("tiny")
    assert all(
        torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True)
    )
    assert sum(parameter.numel() for parameter in first.parameters()) < 10_000
    assert first.preprocessing.size == 32
    pixels = torch.randint(256, (64, 3, 32, 32), dtype=torch.uint8)
    assert first(pixels).std(0).min() > 0  # no dead feature


def test_a_module_by_create_keeps_its_weights():
    module = nn.Sequential(nn.Conv2d(3, 5, 3), nn.ReLU())
    backbone = backbones.create(module, image_size=24)
    assert (backbone.features, backbone.preprocessing.size) == (5, 24)
    assert backbones.create(backbone) is backbone
    with pytest.raises(UsageError, match="takes images of 24 pixels"):
        backbones.create(backbone, image_size=32)


def test_a_wrapped_module_comes_back_only_with_the_module():
    backbone = backbones.wrap(nn.Conv2d(3, 4, 3), preprocessing=Preprocessing(size=16), name="mine")
    assert backbone.name == "module:mine"
    with pytest.raises(UsageError, match=r"network of your own \('mine'\).*pass the network again"):
        backbones.restore(backbone.name, backbone.preprocessing)
    again = backbones.restore(backbone.name, backbone.preprocessing, module=nn.Conv2d(3, 4, 3))
    again.load_state_dict(backbone.state_dict())
    pixels = torch.randint(256, (2, 3, 16, 16), dtype=torch.uint8)
    assert torch.equal(again(pixels), backbone(pixels))
    assert again.name == backbone.name


def test_restore_refuses_a_module_it_does_not_need():
    with pytest.raises(UsageError, match="built on tiny"):
        backbones.restore("tiny", Preprocessing(size=32), module=nn.Conv2d(3, 4, 3))
