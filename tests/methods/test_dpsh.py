"""Deep Pairwise-Supervised Hashing: its printed objective, its gradient, the authors' value."""

import itertools
import math

import numpy as np
import pytest
import torch

from fisherhash.methods import Batch
from fisherhash.methods.dpsh import DPSH


class Fixed:
    """A training set whose outputs are given."""

    def __init__(self, outputs, labels):
        self._outputs, self.labels = outputs, labels

    def outputs(self):
        return self._outputs

    def features(self):
        return self._outputs


def toy(images=12, bits=6, classes=3):
    outputs = torch.randn(images, bits, generator=torch.Generator().manual_seed(0))
    labels = torch.eye(classes)[torch.arange(images) % classes]
    labels[0, 1] = 1  # an image with two labels
    return outputs, labels


def losses(method, outputs, labels, index):
    method.start(Fixed(outputs, labels))
    index = torch.tensor(index)
    return method.loss(outputs[index], Batch(labels[index], index, torch.empty(len(index), 1)))


def test_loss_is_the_printed_objective():
    outputs, labels = toy()
    index = [0, 3, 4, 11]
    pair, quantization = [], 0.0
    for i, j in itertools.product(index, range(12)):
        if i != j:
            theta = (
                sum(float(a) * float(b) for a, b in zip(outputs[i], outputs[j], strict=True)) / 2
            )
            s = float(any(a and b for a, b in zip(labels[i], labels[j], strict=True)))
            pair.append(math.log(1 + math.exp(theta)) - s * theta)
    for i, k in itertools.product(index, range(6)):
        u = float(outputs[i, k])
        quantization += ((1.0 if u > 0 else -1.0) - u) ** 2 / len(index)
    method = DPSH(bits=6, classes=3, quantization=0.3, loss_scale=2.0)
    terms = losses(method, outputs, labels, index)
    assert float(terms["pair"]) == pytest.approx(sum(pair) / len(pair), rel=1e-5)
    assert float(terms["quantization"]) == pytest.approx(quantization, rel=1e-5)
    expected = 2.0 * (sum(pair) / len(pair) + 0.3 * quantization)
    assert float(terms["loss"]) == pytest.approx(expected, rel=1e-5)


def test_the_authors_value():
    """Frozen from jiangqy/DPSH-pytorch (commit 0423181), DPSH_CIFAR_10.py, Totloss(U, sgn U, S, …).

    It sums over all pairs, self pairs among them, and gave 24.78256607 for the likelihood and
    17.52290344 for the quantisation of these outputs. Ours are means, without self pairs: times the
    number of pairs plus the self pairs' cost, and times the number of images, they must agree.
    """
    outputs = torch.from_numpy(np.random.default_rng(0).normal(size=(6, 8)).astype(np.float32))
    labels = torch.eye(3)[torch.tensor([0, 0, 1, 1, 2, 2])]
    terms = losses(DPSH(bits=8, classes=3), outputs, labels, list(range(6)))
    own = 0.5 * outputs.square().sum(1)
    own_cost = float((torch.log1p(own.exp()) - own).sum())
    assert float(terms["pair"]) * 30 + own_cost == pytest.approx(24.78256607, rel=1e-5)
    assert float(terms["quantization"]) * 6 == pytest.approx(17.52290344, rel=1e-5)
