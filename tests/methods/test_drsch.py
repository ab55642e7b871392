"""DRSCH against a slow reading of its equation."""

import itertools

import pytest
import torch

from fisherhash.methods import Batch, create


def test_loss_is_the_equation():
    torch.manual_seed(0)
    method = create("drsch", bits=6, classes=3, options={"margin": 0.3, "regularity": 0.2})
    with torch.no_grad():
        method.weights.copy_(torch.tensor([1.0, 0.5, 2.0, 1.0, 0.1, 1.5]))
    labels = torch.eye(3)[torch.tensor([0, 0, 1, 1, 2])]
    u = torch.randn(5, 6)
    h = u.tanh()
    weight = method.weights.detach().square()
    weight = weight / weight.mean()

    def distance(i, j, own):
        return float((own * (h[i] - h[j]).square()).sum() / 4)

    hinge = []
    for q, i, j in itertools.permutations(range(5), 3):
        if labels[q] @ labels[i] and not labels[q] @ labels[j]:
            gap = distance(q, i, weight) - distance(q, j, weight)
            hinge.append(max(0.0, 0.3 * 6 + gap))
    near = [
        distance(i, j, torch.ones(6))
        for i, j in itertools.permutations(range(5), 2)
        if labels[i] @ labels[j]
    ]
    expected = sum(hinge) / len(hinge) + 0.2 * sum(near) / len(near)
    batch = Batch(labels, torch.arange(5), torch.zeros(5, 2))
    assert method(u, batch)["loss"].item() == pytest.approx(expected, rel=1e-4)


def test_weights_keep_the_margin_s_meaning():
    """Only the proportions of the weights matter."""
    method = create("drsch", bits=6, classes=3)
    labels = torch.eye(3)[torch.tensor([0, 0, 1, 1, 2])]
    batch = Batch(labels, torch.arange(5), torch.zeros(5, 2))
    u = torch.randn(5, 6)
    before = method(u, batch)["loss"].item()
    with torch.no_grad():
        method.weights.mul_(7.0)
    assert method(u, batch)["loss"].item() == pytest.approx(before, rel=1e-5)
