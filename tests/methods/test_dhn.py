"""Deep Hashing Network: its printed objective, its gradient, a value of the group's code."""

import math

import numpy as np
import pytest
import torch

from fisherhash.methods import Batch
from fisherhash.methods.dhn import DHN


def toy(images=9, bits=5, classes=3):
    outputs = 1.5 * torch.randn(images, bits, generator=torch.Generator().manual_seed(0))
    labels = torch.eye(classes)[torch.arange(images) % classes]
    labels[0, 1] = 1  # an image with two labels
    return outputs, labels


def losses(method, outputs, labels):
    return method.loss(
        outputs, Batch(labels, torch.arange(len(labels)), torch.empty(len(labels), 1))
    )


@pytest.mark.parametrize("scale", [0.5, 1.0])
def test_loss_is_the_printed_objective(scale):
    outputs, labels = toy()
    z = [[math.tanh(float(u)) for u in row] for row in outputs]
    pair, prior = [], 0.0
    for i in range(9):
        for j in range(9):
            if i != j:
                product = scale * sum(a * b for a, b in zip(z[i], z[j], strict=True))
                s = float((labels[i] * labels[j]).sum() > 0)
                pair.append(math.log(1 + math.exp(product)) - s * product)
        prior += sum(math.log(math.cosh(abs(x) - 1)) for x in z[i]) / 9
    method = DHN(bits=5, classes=3, scale=scale, quantization=0.3, loss_scale=2.0)
    terms = losses(method, outputs, labels)
    assert float(terms["pair"]) == pytest.approx(sum(pair) / len(pair), rel=1e-5)
    assert float(terms["quantization"]) == pytest.approx(prior, rel=1e-5)
    expected = 2.0 * (sum(pair) / len(pair) + 0.3 * prior)
    assert float(terms["loss"]) == pytest.approx(expected, rel=1e-5)


def test_the_value_of_the_groups_code():
    """Frozen from thulab/DeepHash (commit 9907613), DeepHash/model/dhn/dhn.py, cross_entropy with
    alpha 0.5, on tanh of these outputs; TensorFlow 1 is not available here, so numpy's operations
    stood for TensorFlow's of the same names.

    One class, where its weights are 1: 0.6803499931649254, a mean over all 36 ordered pairs with
    the self pairs. Ours is the mean over the other 30.
    """
    outputs = torch.from_numpy(np.random.default_rng(0).normal(size=(6, 8)).astype(np.float32))
    terms = losses(DHN(bits=8, classes=1), outputs, torch.ones(6, 1))
    own = 0.5 * torch.tanh(outputs).square().sum(1)
    own_cost = float((torch.log1p(own.exp()) - own).sum())
    assert (float(terms["pair"]) * 30 + own_cost) / 36 == pytest.approx(0.68034999, rel=1e-6)
