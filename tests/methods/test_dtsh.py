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


def test_gradient_is_the_derived_one():
    """Of a triplet: s (u_n - u_p) / 2 at q, -s u_q / 2 at p, s u_q / 2 at n; s = sigmoid(-x)."""
    outputs, labels = toy()
    method = DTSH(bits=5, classes=3, quantization=0.0)
    u = outputs.clone().requires_grad_()
    method.loss(u, batch_of(labels))["loss"].backward()
    expected = torch.zeros_like(outputs)
    every = triplets(labels)
    for q, p, n in every:
        gap = 0.5 * outputs[q] @ (outputs[p] - outputs[n])
        s = torch.sigmoid(2.5 - gap) / len(every)
        expected[q] += 0.5 * s * (outputs[n] - outputs[p])
        expected[p] -= 0.5 * s * outputs[q]
        expected[n] += 0.5 * s * outputs[q]
    torch.testing.assert_close(u.grad, expected)


def test_the_margin_grows_with_the_code():
    """At equal similarities a triplet costs log(1 + e^alpha), alpha = K / 2."""
    for bits in (12, 48):
        method = DTSH(bits=bits, classes=2)
        labels = torch.eye(2)[torch.tensor([0, 0, 1])]
        cost = method.loss(torch.ones(3, bits), batch_of(labels))["triplets"]
        assert float(cost) == pytest.approx(math.log1p(math.exp(bits / 2)))


@pytest.mark.parametrize("labels", [torch.ones(1, 3), torch.ones(6, 3), torch.zeros(6, 3)])
def test_without_triplets_the_quantisation_is_left(labels):
    outputs = torch.randn(len(labels), 8).requires_grad_()
    terms = DTSH(bits=8, classes=3).loss(outputs, batch_of(labels))
    terms["loss"].backward()
    assert float(terms["triplets"].detach()) == 0.0
    assert torch.isfinite(outputs.grad).all()
    assert outputs.grad.abs().max() > 0
