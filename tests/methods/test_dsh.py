"""Deep Supervised Hashing: its printed objective, its gradient, a value of a port."""

import numpy as np
import pytest
import torch

from fisherhash.methods import Batch
from fisherhash.methods.dsh import DSH


def losses(method, outputs, labels):
    return method.loss(
        outputs, Batch(labels, torch.arange(len(labels)), torch.empty(len(labels), 1))
    )


def toy():
    outputs = 1.2 * torch.randn(10, 6, generator=torch.Generator().manual_seed(0))
    labels = torch.eye(4)[torch.arange(10) % 4]
    labels[0, 1] = 1  # an image with two labels
    return outputs, labels


def test_loss_is_the_printed_objective():
    """Each unordered pair once, regulariser and all: the mean over pairs is the same."""
    outputs, labels = toy()
    values, hinged = [], 0
    for i in range(10):
        for j in range(i):
            a, b = outputs[i].tolist(), outputs[j].tolist()
            distance = sum((p - q) ** 2 for p, q in zip(a, b, strict=True))
            s = float((labels[i] * labels[j]).sum() > 0)
            value = 0.5 * s * distance + 0.5 * (1 - s) * max(2 * 6 - distance, 0.0)
            value += 0.3 * sum(abs(abs(p) - 1) for p in a + b)
            values.append(value)
            hinged += not s and distance > 12
    assert hinged  # the margin is tried on both of its sides
    got = losses(DSH(bits=6, classes=4, quantization=0.3), outputs, labels)["loss"]
    assert float(got) == pytest.approx(sum(values) / len(values), rel=1e-5)


def test_the_value_of_a_port():
    """Frozen from swuxyj/DeepHash-pytorch (commit ab14068), DSH.py, DSHLoss with alpha 0, one batch
    that is the whole bank: 2.63458251953125, a mean over 36 ordered pairs, of which the six self
    pairs cost 0. Ours is the mean over the other 30. With alpha 1 it is 3.160794734954834, where
    the regulariser is a mean over images and bits; ours sums over the 8 bits and over both images.
    The authors' own code is a layer of Caffe and could not be run here.
    """
    outputs = torch.from_numpy(np.random.default_rng(0).normal(size=(6, 8)).astype(np.float32))
    labels = torch.eye(3)[torch.tensor([0, 0, 1, 1, 2, 2])]
    terms = losses(DSH(bits=8, classes=3), outputs, labels)
    assert float(terms["pair"]) * 30 / 36 == pytest.approx(2.63458252, rel=1e-6)
    port = 3.160794735 - 2.63458252
    assert float(terms["quantization"]) / 16 == pytest.approx(port, rel=1e-5)
