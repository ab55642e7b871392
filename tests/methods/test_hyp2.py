"""HyP² against a slow reading of its equation."""

import itertools

import pytest
import torch

from fisherhash.methods import Batch, create
from fisherhash.methods._codebooks import far_apart, minimum_distance, promised_distance


def batch(labels):
    labels = torch.tensor(labels).float()
    return Batch(labels, torch.arange(len(labels)), torch.zeros(len(labels), 3))


def cosine(a, b):
    return float(a @ b / (a.norm() * b.norm()))


def test_loss_is_the_equation():
    torch.manual_seed(0)
    method = create("hyp2", bits=6, classes=4, options={"pairs": 0.7})
    labels = [[1, 1, 0, 0], [0, 0, 1, 1], [1, 0, 0, 0], [0, 1, 1, 0], [0, 0, 0, 0]]
    u = torch.randn(5, 6)
    z = 1 - 2 * promised_distance(4, 6) / 6
    pull, push = [], []
    for i, c in itertools.product(range(5), range(4)):
        value = cosine(u[i], method.proxies[c].detach())
        (pull if labels[i][c] else push).append(1 - value if labels[i][c] else max(0, value - z))
    pairs = [max(0, cosine(u[0], u[1]) - z)] * 2  # both orders; 0 and 3, 1 and 3 share a label
    expected = sum(pull) / len(pull) + sum(push) / len(push) + 0.7 * sum(pairs) / 2
    assert method(u, batch(labels))["loss"].item() == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("classes", [10, 21, 80, 100])
@pytest.mark.parametrize("bits", [12, 16, 24, 32, 48, 64])
def test_code_books_reach_the_promised_distance(classes, bits):
    found = minimum_distance(far_apart(classes, bits).numpy().astype("int8"))
    assert found >= promised_distance(classes, bits)
