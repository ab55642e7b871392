"""OrthoHash: the printed equation, invariance to scale, the authors' value."""

import math

import pytest
import torch

from fisherhash.methods import Batch
from fisherhash.methods.orthohash import OrthoHash

SINGLE = torch.eye(3)[[0, 2, 1, 2]]
SEVERAL = torch.tensor([[1.0, 0, 0], [0, 1, 1], [1, 1, 1], [0, 0, 1]])


def wave(rows, columns, shift):
    """Numbers between -1.5 and 1.5 that need no random generator."""
    steps = 0.7 * torch.arange(rows * columns, dtype=torch.float32) + shift
    return 1.5 * torch.sin(steps).view(rows, columns)


def batch_of(labels):
    labels = torch.as_tensor(labels, dtype=torch.float32)
    return Batch(labels, torch.arange(len(labels)), torch.empty(len(labels), 1))


def method_with(**options):
    """Eight bits and three classes, with codes that need no random generator."""
    method = OrthoHash(bits=8, classes=3, **options)
    method.codes.copy_(torch.where(wave(3, 8, 1.1) > 0, 1.0, -1.0))
    return method


def loop_loss(u, codes, labels, scale, margin):
    """The printed objective, image by image and class by class."""
    total = 0.0
    for i in range(len(u)):
        norm = math.sqrt(sum(float(x) ** 2 for x in u[i])) * math.sqrt(len(u[i]))
        cosines = [
            sum(float(x) * float(o) for x, o in zip(u[i], code, strict=True)) / norm
            for code in codes
        ]
        own = [c for c in range(len(codes)) if labels[i][c]]
        scores = [scale * (cos - margin * (c in own)) for c, cos in enumerate(cosines)]
        normaliser = math.log(sum(math.exp(s) for s in scores))
        total += sum(normaliser - scores[c] for c in own) / len(own)
    return total / len(u)


@pytest.mark.parametrize(("scale", "margin"), [(8.0, 0.2), (3.0, 0.0), (16.0, 0.5)])
@pytest.mark.parametrize("labels", [SINGLE, SEVERAL])
def test_loss_is_the_printed_equation(scale, margin, labels):
    u, method = wave(4, 8, 0.3), method_with(scale=scale, margin=margin)
    expected = loop_loss(u, method.codes, labels, scale, margin)
    assert float(method.loss(u, batch_of(labels))["loss"]) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(("labels", "value"), [(SINGLE, 2.8297901154), (SEVERAL, 2.5177249908)])
def test_the_authors_code_gives_the_same(labels, value):
    """kamwoh/orthohash at 94c4a03, functions/loss/orthohash.py: OrthoHashLoss() with its defaults,
    multiclass for several labels, run on the cosines of u = wave(4, 8, 0.3) and the signs of
    wave(3, 8, 1.1). Its means are ours.
    """
    loss = method_with().loss(wave(4, 8, 0.3), batch_of(labels))["loss"]
    assert float(loss) == pytest.approx(value, rel=1e-5)


def test_only_the_direction_of_an_output_counts():
    u, method = wave(4, 8, 0.3).requires_grad_(), method_with()
    loss = method.loss(u, batch_of(SINGLE))["loss"]
    torch.testing.assert_close(loss, method.loss(7.0 * u, batch_of(SINGLE))["loss"])
    loss.backward()
    along = (u.grad * u.detach()).sum(1)
    torch.testing.assert_close(along, torch.zeros(4), atol=1e-6, rtol=0)
