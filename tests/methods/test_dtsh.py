"""DTSH: the printed likelihood triplet by triplet, and its gradient.

No frozen value: the authors' code (Minione/DTSH) is MATLAB on MatConvNet; the loops below follow
the printed equations.
"""

import itertools
import math

import pytest
import torch

from fisherhash.methods import Batch
from fisherhash.methods.dtsh import DTSH


def toy(images=9, bits=5, classes=3, seed=0):
    outputs = torch.randn(images, bits, generator=torch.Generator().manual_seed(seed))
    labels = torch.eye(classes)[torch.arange(images) % classes]
    return outputs, labels


def batch_of(labels):
    return Batch(labels, torch.arange(len(labels)), torch.empty(len(labels), 1))


def triplets(labels):
    similar = (labels @ labels.T > 0).tolist()
    images = range(len(labels))
    return [
        (q, p, n)
        for q, p, n in itertools.product(images, repeat=3)
        if p != q and n != q and similar[q][p] and not similar[q][n]
    ]


@pytest.mark.parametrize("several", [False, True])
@pytest.mark.parametrize("margin", [0.0, 0.5])
def test_loss_is_the_printed_objective(several, margin):
    outputs, labels = toy()
    if several:
        labels[0, 1] = labels[4, 2] = 1
    u = outputs.tolist()

    def theta(i, j):
        return 0.5 * sum(a * b for a, b in zip(u[i], u[j], strict=True))

    alpha = margin * 5
    likelihood = [
        -math.log(1 / (1 + math.exp(-(theta(q, p) - theta(q, n) - alpha))))
        for q, p, n in triplets(labels)
    ]
    error = sum(((1 if x > 0 else -1) - x) ** 2 for row in u for x in row) / len(u)
    method = DTSH(bits=5, classes=3, margin=margin, quantization=0.3)
    terms = method.loss(outputs, batch_of(labels))
    expected = sum(likelihood) / len(likelihood)
    assert float(terms["triplets"]) == pytest.approx(expected, rel=1e-5)
    assert float(terms["quantization"]) == pytest.approx(error, rel=1e-5)
    assert float(terms["loss"]) == pytest.approx(expected + 0.3 * error, rel=1e-5)
