"""Central Similarity Quantization: the printed equation, centres, the authors' value."""

import math

import pytest
import torch

from fisherhash.methods import Batch
from fisherhash.methods.csq import CSQ

SINGLE = torch.eye(3)[[0, 2, 1, 2]]
SEVERAL = torch.tensor([[1.0, 0, 0], [0, 1, 1], [1, 1, 1], [0, 0, 1]])


def wave(rows, columns, shift):
    """Numbers between -1.5 and 1.5 that need no random generator."""
    steps = 0.7 * torch.arange(rows * columns, dtype=torch.float32) + shift
    return 1.5 * torch.sin(steps).view(rows, columns)


def signs(values):
    return torch.where(values > 0, 1.0, -1.0)


def batch_of(labels):
    labels = torch.as_tensor(labels, dtype=torch.float32)
    return Batch(labels, torch.arange(len(labels)), torch.empty(len(labels), 1))


def method_with(**options):
    """Eight bits and three classes, with centres that need no random generator."""
    method = CSQ(bits=8, classes=3, **options)
    method.centers.copy_(signs(wave(3, 8, 1.1)))
    method.tie.copy_(signs(wave(1, 8, 0.9)[0]))
    return method


def loop_loss(u, centers, tie, labels, weight):
    """The printed objective, image by image and bit by bit, times the number of bits."""
    total = 0.0
    for i, k in torch.cartesian_prod(torch.arange(len(u)), torch.arange(u.shape[1])).tolist():
        votes = sum(float(centers[c, k]) for c in range(len(centers)) if labels[i][c])
        center = 1.0 if votes > 0 else -1.0 if votes < 0 else float(tie[k])
        h = math.tanh(float(u[i, k]))
        total -= math.log((h + 1) / 2) if center > 0 else math.log(1 - (h + 1) / 2)
        total += weight * (abs(h) - 1) ** 2
    return total / len(u)


@pytest.mark.parametrize("weight", [0.0, 0.05, 1.0])
@pytest.mark.parametrize("labels", [SINGLE, SEVERAL])
def test_loss_is_the_printed_equation(weight, labels):
    u, method = wave(4, 8, 0.3), method_with(quantization=weight)
    expected = loop_loss(u, method.centers, method.tie, labels, weight)
    assert float(method.loss(u, batch_of(labels))["loss"]) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(("labels", "value"), [(SINGLE, 0.8225228786), (SEVERAL, 0.9197271466)])
def test_the_authors_code_gives_the_same(labels, value):
    """yuanli2333/Hadamard-Matrix-for-hashing at 55cab00, train.py: center_loss, 0.05 times Q_loss,
    and Hash_center_multilables, run on tanh of u = wave(4, 8, 0.3), centres the signs of
    wave(3, 8, 1.1), random vector those of wave(1, 8, 0.9). A mean over bits: ours is 8 times it.
    """
    loss = method_with(quantization=0.05).loss(wave(4, 8, 0.3), batch_of(labels))["loss"]
    assert float(loss) == pytest.approx(8 * value, rel=1e-5)


def test_centre_of_several_labels_is_the_majority():
    method = method_with()
    a, b, c = method.centers
    torch.testing.assert_close(method.center_of(torch.tensor([[0.0, 1, 0]]))[0], b)
    torch.testing.assert_close(method.center_of(torch.tensor([[1.0, 1, 1]]))[0], signs(a + b + c))
    both = method.center_of(torch.tensor([[1.0, 1, 0]]))[0]
    torch.testing.assert_close(both, torch.where(a == b, a, method.tie))
