"""BiHalf: halves, the gradient's two parts, a value of the authors' code, data without labels."""

import math

import pytest
import torch

from fisherhash.methods import Batch
from fisherhash.methods.bihalf import BiHalf, bi_half


def inputs():
    i, k, d = torch.arange(6.0)[:, None], torch.arange(4.0), torch.arange(5.0)
    outputs = torch.sin(1 + 1.7 * i + 2.3 * k + 0.9 * i * k)
    return outputs, torch.cos(2 + 5 * i + 3 * d + 0.7 * i * d)


def batch_of(features):
    return Batch(torch.empty(len(features), 0), torch.arange(len(features)), features)


def test_value_and_gradient_of_the_authors_code():
    """Frozen: the `hash` function and the loss of ImageHashing/Cifar10_I.py in
    liyunqianggyn/Deep-Unsupervised-Image-Hashing (commit 76397961bb22), with gamma 6, run outside
    this tree on `inputs()` with torch 2.13 on a CPU (`.cuda()` removed, nothing else changed).
    """
    outputs, features = inputs()
    outputs.requires_grad_()
    terms = BiHalf(bits=4, classes=0, gamma=6.0, center=False).loss(outputs, batch_of(features))
    terms["loss"].backward()
    # Our factor is bits / 4 = 1 here.
    assert float(terms["loss"].detach()) == pytest.approx(0.04348623, rel=1e-5)
    expected = torch.tensor(
        [
            [-0.03290509, -0.28270924, 0.09891049, -0.00699183],
            [-0.08513428, 0.21455161, -0.11220475, 0.24221262],
            [-0.00246728, -0.06494498, -0.25616089, 0.02614796],
            [0.19773231, -0.00536530, 0.16120923, -0.06227838],
            [0.05765658, -0.08153199, -0.02148863, -0.21825616],
            [0.21664546, 0.12505384, 0.04076987, -0.01419052],
        ]
    )
    torch.testing.assert_close(outputs.grad, expected, atol=1e-6, rtol=1e-4)


@pytest.mark.parametrize("bits", [4, 12])
@pytest.mark.parametrize("images", [2, 7, 12])
def test_loss_is_the_printed_one(images, bits):
    generator = torch.Generator().manual_seed(images)
    outputs = torch.randn(images, bits, generator=generator)
    features = torch.rand(images, 5, generator=generator)
    codes = [[0.0] * bits for _ in range(images)]
    for k in range(bits):
        order = sorted(range(images), key=lambda i: -float(outputs[i, k]))
        for place, i in enumerate(order):
            codes[i][k] = 1.0 if place < images // 2 else -1.0

    def cosine(a, b):
        product = sum(x * y for x, y in zip(a, b, strict=True))
        return product / math.sqrt(sum(x * x for x in a)) / math.sqrt(sum(y * y for y in b))

    f, half = features.tolist(), images // 2
    errors = [
        (cosine(codes[i], codes[half + i]) - cosine(f[i], f[half + i])) ** 2 for i in range(half)
    ]
    terms = BiHalf(bits=bits, classes=0).loss(outputs, batch_of(features))
    assert float(terms["angles"]) == pytest.approx(sum(errors) / half, rel=1e-4)
    assert float(terms["loss"]) == pytest.approx(bits / 4 * sum(errors) / half, rel=1e-4)


@pytest.mark.parametrize("images", [2, 9, 64])
def test_every_bit_is_a_half(images):
    codes = bi_half(torch.randn(images, 6) + 3, gamma=0.0)
    assert set(codes.unique().tolist()) == {-1.0, 1.0}
    assert ((codes > 0).sum(0) == images // 2).all()
    assert ((bi_half(torch.zeros(images, 6), gamma=0.0) > 0).sum(0) == images // 2).all()


def test_centred_features():
    """A constant added to all features changes nothing, and start() measures it."""
    outputs, features = inputs()

    class Train:
        labels = torch.empty(6, 0)

        def __init__(self, shift):
            self.shift = shift

        def outputs(self):
            return outputs

        def features(self):
            return features + self.shift

    values = []
    for shift in (0.0, 10.0):
        method = BiHalf(bits=4, classes=0)
        method.start(Train(shift))
        values.append(float(method.loss(outputs, batch_of(features + shift))["loss"]))
        raw = BiHalf(bits=4, classes=0, center=False)
        raw.start(Train(shift))
        values.append(float(raw.loss(outputs, batch_of(features + shift))["loss"]))
    assert values[0] == pytest.approx(values[2], rel=1e-3)
    assert abs(values[1] - values[3]) > 0.1
