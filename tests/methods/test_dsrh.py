"""DSRH: NDCG weights and the hinge, pair by pair; what is left with one label an image.

No frozen value: the authors' code is a layer of cuda-convnet, which needs a GPU of its time; the
loops below follow the printed equations.
"""

import itertools
import math

import pytest
import torch

from fisherhash.methods import Batch
from fisherhash.methods.dsrh import DSRH


def batch_of(labels):
    return Batch(labels, torch.arange(len(labels)), torch.empty(len(labels), 1))


def several(images=9, classes=5, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return (torch.rand(images, classes, generator=generator) < 0.5).float()


def loop_ranking(outputs, labels, margin):
    """The printed sums: weighted hinges and their weights."""
    h = [[math.tanh(u) for u in row] for row in outputs.tolist()]
    bits, images = outputs.shape[1], len(h)
    total = weights = 0.0
    for q in range(images):
        others = [i for i in range(images) if i != q]
        r = {i: int(labels[q] @ labels[i]) for i in others}
        d = {i: (bits - sum(a * b for a, b in zip(h[q], h[i], strict=True))) / 2 for i in others}
        ideal = sum(
            (2**grade - 1) / math.log2(1 + k)
            for k, grade in enumerate(sorted(r.values(), reverse=True), 1)
        )
        for i, j in itertools.product(others, repeat=2):
            if r[i] > r[j]:
                weight = (2 ** r[i] - 2 ** r[j]) / ideal
                total += weight * max(0.0, margin * bits + d[i] - d[j])
                weights += weight
    return total / weights


@pytest.mark.parametrize("margin", [0.0, 0.25, 1.0])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_loss_is_the_printed_ranking(margin, seed):
    outputs = torch.randn(9, 6, generator=torch.Generator().manual_seed(seed))
    labels = several(seed=seed)
    terms = DSRH(bits=6, classes=5, margin=margin, balance=0.7).loss(outputs, batch_of(labels))
    ranking = loop_ranking(outputs, labels, margin)
    balance = sum(float(torch.tanh(outputs[:, k]).mean()) ** 2 for k in range(6)) / 2
    assert float(terms["ranking"]) == pytest.approx(ranking, rel=1e-4)
    assert float(terms["balance"]) == pytest.approx(balance, rel=1e-4)
    assert float(terms["loss"]) == pytest.approx(ranking + 0.7 * balance, rel=1e-4)


def test_one_label_an_image_is_a_plain_triplet_hinge():
    """Every class has three images, so every query's weights are the same number."""
    outputs = torch.randn(9, 6, generator=torch.Generator().manual_seed(3))
    labels = torch.eye(3)[torch.arange(9) % 3]
    h = torch.tanh(outputs)
    distances = (6 - h @ h.T) / 2
    hinges = [
        max(0.0, 1.5 + float(distances[q, i] - distances[q, j]))
        for q, i, j in itertools.product(range(9), repeat=3)
        if i != q and i % 3 == q % 3 and j % 3 != q % 3
    ]
    terms = DSRH(bits=6, classes=3).loss(outputs, batch_of(labels))
    assert float(terms["ranking"]) == pytest.approx(sum(hinges) / len(hinges), rel=1e-4)
