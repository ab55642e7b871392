"""Layers that stay fixed: no gradient, no moving statistics, and nothing else changes."""

from __future__ import annotations

import pytest
import torch

from fisherhash import backbones
from fisherhash.errors import UsageError

# A backbone, how many of its layers are fixed, and how many it has.
NETWORKS = pytest.mark.parametrize(
    ("name", "count", "total"),
    [("tiny", 2, 3), ("efficientnet-lite0", 5, 18), ("squeezenet1.0", 4, 9)],
)


def made(name):
    torch.manual_seed(0)
    return backbones.create(name, pretrained=False, image_size=32)


def state(module):
    return {name: tensor.clone() for name, tensor in module.state_dict().items()}


def trained(backbone):
    """The backbone after a backward pass in training mode."""
    pixels = torch.randint(256, (4, 3, 32, 32), generator=torch.Generator().manual_seed(1))
    backbone.train()
    backbone.zero_grad(set_to_none=True)
    backbone(pixels).square().sum().backward()
    return backbone


def has_norm(layer):
    return any(isinstance(part, torch.nn.BatchNorm2d) for part in layer.modules())


@NETWORKS
def test_the_layers_in_order_are_the_whole_network(name, count, total):
    backbone = made(name)
    layers = backbone.layers_in_order()
    assert len(layers) == total
    own = [id(p) for layer in layers for p in layer.parameters()]
    assert own == [id(p) for p in backbone.parameters()]


@NETWORKS
def test_fixed_layers_get_no_gradient_and_keep_their_statistics(name, count, total):
    backbone = made(name)
    backbone.fix(count)
    layers = backbone.layers_in_order()
    before = [state(layer) for layer in layers]
    trained(backbone)
    for number, layer in enumerate(layers):
        fixed = number < count
        assert layer.training is not fixed
        for parameter in layer.parameters():
            assert parameter.requires_grad is not fixed
            assert (parameter.grad is None) is fixed
        same = all(torch.equal(before[number][key], value) for key, value in state(layer).items())
        assert same is (fixed or not has_norm(layer))
    assert any(p.grad is not None for p in backbone.parameters())


@NETWORKS
def test_a_wrong_count_says_what_is_possible(name, count, total):
    backbone = made(name)
    backbone.fix(total - 1)
    for wrong in (-1, total, total + 5):
        sentence = (
            rf"{name} has {total} layers with weights; from 0 to {total - 1} of them .* not {wrong}"
        )
        with pytest.raises(UsageError, match=sentence):
            backbone.fix(wrong)
    backbone.train()
    assert [layer.training for layer in backbone.layers_in_order()].count(False) == total - 1
