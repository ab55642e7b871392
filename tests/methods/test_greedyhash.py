"""Greedy Hash: the printed equation, the straight-through gradient, the authors' value."""

import math

import pytest
import torch

from fisherhash.methods import Batch
from fisherhash.methods.greedyhash import GreedyHash, straight_through


def wave(rows, columns, shift):
    """Numbers between -1.5 and 1.5 that need no random generator."""
    steps = 0.7 * torch.arange(rows * columns, dtype=torch.float32) + shift
    return 1.5 * torch.sin(steps).view(rows, columns)


def batch_of(labels):
    labels = torch.as_tensor(labels, dtype=torch.float32)
    return Batch(labels, torch.arange(len(labels)), torch.empty(len(labels), 1))


def method_with(weight, **options):
    method = GreedyHash(bits=weight.shape[1], classes=weight.shape[0], **options)
    with torch.no_grad():
        method.classifier.weight.copy_(weight)
    return method


def loop_loss(h, weight, labels, alpha):
    """The printed objective, image by image and bit by bit."""
    total = 0.0
    for i in range(len(h)):
        code = [1.0 if float(x) > 0 else -1.0 for x in h[i]]
        scores = [sum(float(w) * b for w, b in zip(row, code, strict=True)) for row in weight]
        normaliser = math.log(sum(math.exp(s) for s in scores))
        own = [c for c in range(len(weight)) if labels[i][c]]
        total += sum(normaliser - scores[c] for c in own) / len(own)
        total += alpha * sum(abs(abs(float(x)) - 1) ** 3 for x in h[i]) / len(h[i])
    return total / len(h)


@pytest.mark.parametrize("alpha", [0.0, 0.1, 1.0])
@pytest.mark.parametrize(
    "labels", [[[1, 0, 0], [0, 0, 1], [0, 1, 0], [0, 0, 1]], [[1, 1, 0], [0, 0, 1]] * 2]
)
def test_loss_is_the_printed_equation(alpha, labels):
    h, weight = wave(4, 8, 0.3), wave(3, 8, 2.0)
    terms = method_with(weight, quantization=alpha).loss(h, batch_of(labels))
    assert float(terms["loss"].detach()) == pytest.approx(
        loop_loss(h, weight, labels, alpha), rel=1e-5
    )


def test_the_authors_code_gives_the_same():
    """ssppp/GreedyHash at e5089b2, cifar1.py: hash_layer, criterion and loss2, run on h =
    wave(4, 8, 0.3), W = wave(3, 8, 2.0), classes 0, 2, 1, 2. Its means are ours.
    """
    h = wave(4, 8, 0.3).requires_grad_()
    method = method_with(wave(3, 8, 2.0), quantization=0.1)
    loss = method.loss(h, batch_of(torch.eye(3)[[0, 2, 1, 2]]))["loss"]
    loss.backward()
    assert float(loss.detach()) == pytest.approx(3.1527583599, rel=1e-5)
    expected = [-0.1163871, 0.2038229, 0.4265082, 0.4458378]
    assert h.grad[0, :4].tolist() == pytest.approx(expected, rel=1e-4)


def test_the_gradient_of_the_code_reaches_the_logits_unclipped():
    h = torch.tensor([[-30.0, -0.2, 0.0, 0.2, 30.0]], requires_grad=True)
    code = straight_through(h)
    assert code.tolist() == [[-1.0, -1.0, -1.0, 1.0, 1.0]]
    slope = torch.tensor([[1.0, -2.0, 3.0, -4.0, 5.0]])
    (code * slope).sum().backward()
    torch.testing.assert_close(h.grad, slope)
