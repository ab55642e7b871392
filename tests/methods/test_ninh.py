"""NINH: the piece-wise threshold, the hinge triplet by triplet, where gradients vanish.

No frozen value: no code of the authors is public; the loops below follow the printed equations.
"""

import itertools
import math

import pytest
import torch

from fisherhash.methods import Batch
from fisherhash.methods.ninh import NINH
from fisherhash.model.heads import SlicedHead


def batch_of(labels):
    return Batch(labels, torch.arange(len(labels)), torch.empty(len(labels), 1))


def loop_threshold(u, eps):
    s = 1 / (1 + math.exp(-u))
    return 0.0 if s < 0.5 - eps else 1.0 if s > 0.5 + eps else s


@pytest.mark.parametrize("eps", [0.1, 0.4, 0.5])
@pytest.mark.parametrize("several", [False, True])
def test_loss_is_the_printed_hinge(eps, several):
    outputs = 2 * torch.randn(8, 6, generator=torch.Generator().manual_seed(1))
    labels = torch.eye(3)[torch.arange(8) % 3]
    if several:
        labels[0, 1] = labels[5, 0] = 1
    f = [[loop_threshold(u, eps) for u in row] for row in outputs.tolist()]

    def distance(i, j):
        return sum((a - b) ** 2 for a, b in zip(f[i], f[j], strict=True))

    hinges = []
    for q, p, n in itertools.product(range(8), repeat=3):
        if q not in (p, n) and labels[q] @ labels[p] > 0 and labels[q] @ labels[n] == 0:
            hinges.append(max(0.0, 1 + distance(q, p) - distance(q, n)))
    method = NINH(bits=6, classes=3, threshold=eps)
    terms = method.loss(outputs, batch_of(labels))
    assert float(terms["triplets"]) == pytest.approx(sum(hinges) / len(hinges), rel=1e-4)
    assert float(terms["loss"]) == pytest.approx(10 * sum(hinges) / len(hinges), rel=1e-4)


def test_the_threshold_piece_by_piece():
    method = NINH(bits=5, classes=2, threshold=0.2)
    edge = math.log(0.7 / 0.3)
    u = torch.tensor([[-2.0, -edge + 1e-3, 0.0, edge - 1e-3, 2.0]], requires_grad=True)
    f = method.relaxed(u)
    expected = [0.0, 0.3, 0.5, 0.7, 1.0]
    assert f.detach()[0].tolist() == pytest.approx(expected, abs=1e-3)
    f.sum().backward()
    assert (u.grad[0] > 0).tolist() == [False, True, True, True, False]


def test_a_code_is_f_above_one_half():
    method = NINH(bits=7, classes=2)
    u = torch.randn(50, 7)
    assert torch.equal(method.relaxed(u) > 0.5, u > 0)


def test_the_head_is_divided():
    head = NINH(bits=64, classes=10).head(16)
    assert isinstance(head, SlicedHead)
    assert head.hidden.out_features == 3200
    assert NINH(bits=8, classes=2, width=7).head(16).hidden.out_features == 56
