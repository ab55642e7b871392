"""Batch normalisation and ReLU6 in one pass: the same numbers as PyTorch's, or no such pass.

No pytest in here: :func:`check_against_pytorch` and its parts also run by hand on a GPU machine
that lacks it.
"""

from __future__ import annotations

import copy
import itertools
import unittest
from importlib.util import find_spec

import torch
from torch import nn
from torch.nn import functional

from fisherhash.backbones import fused_norm
from fisherhash.backbones.efficientnet_lite import ConvNorm, SameConv2d

CUDA = torch.cuda.is_available() and find_spec("triton") is not None
needs_cuda = unittest.skipUnless(CUDA, "needs a CUDA device and the package triton")

CHANNELS = (8, 24, 96, 1152)
# Rows are images x height x width: fewer than a tile, and tiles with a rest, up to several splits.
SHAPES = ((2, 2, 2), (1, 3, 5), (3, 7, 11), (5, 31, 29))


def layer(channels, device="cpu", seed=0):
    """A layer as training leaves it, so that ReLU6 cuts on both sides."""
    generator = torch.Generator().manual_seed(seed)
    norm = nn.BatchNorm2d(channels, eps=1e-3, momentum=0.01)
    with torch.no_grad():
        norm.weight.uniform_(0.5, 4.0, generator=generator)
        norm.bias.uniform_(-2.0, 5.0, generator=generator)
        norm.running_mean.normal_(generator=generator)
        norm.running_var.uniform_(0.5, 2.0, generator=generator)
    return norm.to(device)


def images(channels, shape, device="cpu", seed=1):
    count, height, width = shape
    generator = torch.Generator().manual_seed(seed)
    values = 3 * torch.randn(count, channels, height, width, generator=generator) + 1
    return values.to(device).contiguous(memory_format=torch.channels_last)


def reference(norm, values, relu6):
    """What PyTorch gives, before and after ReLU6."""
    linear = norm(values)
    return linear, functional.relu6(linear) if relu6 else linear


def away_from_corners(linear, slope):
    """The gradient without the values where rounding decides on which side of a corner they lie."""
    near = torch.minimum(linear.abs(), (linear - 6).abs()) < 1e-3
    return torch.where(near, 0.0, slope)


def assert_same_statistics(mine, theirs):
    torch.testing.assert_close(mine.running_mean, theirs.running_mean, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(mine.running_var, theirs.running_var, rtol=1e-5, atol=1e-5)


def check_training(device, channels, shape, relu6):
    """Outputs, gradients and running statistics of two steps."""
    mine = layer(channels, device)
    theirs = copy.deepcopy(mine)
    for step in range(2):
        x = images(channels, shape, device, seed=step).requires_grad_()
        assert fused_norm.usable(mine, x)
        y = x.detach().clone(memory_format=torch.preserve_format).requires_grad_()
        got = fused_norm.normalise(mine, x, relu6=relu6)
        linear, expected = reference(theirs, y, relu6)
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)
        assert got.is_contiguous(memory_format=torch.channels_last)
        slope = away_from_corners(linear.detach(), images(channels, shape, device, seed=9))
        mine.zero_grad()
        theirs.zero_grad()
        got.backward(slope)
        expected.backward(slope)
        rows = x.numel() // channels
        # Sums over rows: an error grows with their number at most.
        for a, b in ((mine.weight, theirs.weight), (mine.bias, theirs.bias)):
            torch.testing.assert_close(a.grad, b.grad, rtol=1e-4, atol=1e-5 * rows)
        torch.testing.assert_close(x.grad, y.grad, rtol=1e-3, atol=1e-4)
        assert_same_statistics(mine, theirs)


def check_evaluation(device, channels, shape, relu6):
    """The same output, and statistics that stay; with a gradient PyTorch's layers are to run."""
    norm = layer(channels, device).eval()
    before = copy.deepcopy(norm.state_dict())
    x = images(channels, shape, device)
    assert not fused_norm.usable(norm, x)  # the weight asks for its gradient
    with torch.no_grad():
        assert fused_norm.usable(norm, x)
        got = fused_norm.normalise(norm, x, relu6=relu6)
        torch.testing.assert_close(got, reference(norm, x, relu6)[1], rtol=1e-4, atol=1e-4)
    norm.requires_grad_(False)
    assert fused_norm.usable(norm, x)
    assert not fused_norm.usable(norm, x.requires_grad_())
    for name, value in norm.state_dict().items():
        assert torch.equal(value, before[name])


def check_graph(device, channels, shape):
    """A captured graph, replayed on other images, gives what a step outside it gives."""
    inside = layer(channels, device)
    outside = copy.deepcopy(inside)
    x = images(channels, shape, device).requires_grad_()
    slope = images(channels, shape, device, seed=9)

    def step(norm, values):
        norm.weight.grad = norm.bias.grad = values.grad = None
        out = fused_norm.normalise(norm, values, relu6=True)
        out.backward(slope)
        return out.detach()

    start = copy.deepcopy(inside.state_dict())
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            step(inside, x)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step(inside, x)
    inside.load_state_dict(start)
    for seed in (2, 3):
        new = images(channels, shape, device, seed=seed)
        with torch.no_grad():
            x.copy_(new)
        graph.replay()
        new.requires_grad_()
        expected = step(outside, new)
        assert torch.equal(out, expected)
        assert torch.equal(x.grad, new.grad)
        assert torch.equal(inside.weight.grad, outside.weight.grad)
        assert torch.equal(inside.bias.grad, outside.bias.grad)
        assert torch.equal(inside.running_mean, outside.running_mean)
        assert torch.equal(inside.running_var, outside.running_var)


def check_against_pytorch(device):
    """Everything that needs a GPU."""
    for channels, shape, relu6 in itertools.product(CHANNELS, SHAPES, (False, True)):
        check_training(device, channels, shape, relu6)
        check_evaluation(device, channels, shape, relu6)
    for channels in CHANNELS:
        check_graph(device, channels, (3, 7, 11))


@needs_cuda
def test_training_and_evaluation_are_those_of_pytorch():
    check_against_pytorch("cuda")


def one_by_one(conv, x):
    """Convolution, normalisation and ReLU6 with PyTorch's own layers."""
    values = nn.BatchNorm2d.forward(conv.norm, SameConv2d.forward(conv.conv, x))
    return values if conv.linear else functional.relu6(values)


def test_on_a_cpu_the_layers_run_as_they_are():
    for training in (True, False):
        norm = layer(24).train(training)
        assert not fused_norm.usable(norm, images(24, (2, 4, 4)))
        with torch.no_grad():
            assert not fused_norm.usable(norm, images(24, (2, 4, 4)))


def test_conv_norm_is_its_parts_one_by_one():
    for linear, training in itertools.product((False, True), repeat=2):
        torch.manual_seed(0)
        conv = ConvNorm(6, 16, kernel=3, stride=2, linear=linear).train(training)
        conv.norm = layer(16).train(training)
        parts = copy.deepcopy(conv)
        x = images(6, (4, 9, 9)).requires_grad_()
        y = x.detach().clone().requires_grad_()
        got, expected = conv(x), one_by_one(parts, y)
        assert torch.equal(got, expected)
        slope = images(16, (4, 5, 5), seed=9)
        got.backward(slope)
        expected.backward(slope)
        assert torch.equal(x.grad, y.grad)
        for (name, a), b in zip(conv.named_parameters(), parts.parameters(), strict=True):
            assert torch.equal(a.grad, b.grad), name
        for name, value in conv.state_dict().items():
            assert torch.equal(value, parts.state_dict()[name]), name
        with torch.no_grad():
            assert torch.equal(conv.eval()(x), one_by_one(parts.eval(), x))
