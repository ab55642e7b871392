"""MIHash: its mutual information, histogram by histogram (the authors' value: see agreement)."""

import math

import pytest
import torch

from fisherhash.methods import Batch
from fisherhash.methods.mihash import MIHash


def losses(method, outputs, labels):
    return method.loss(
        outputs, Batch(labels, torch.arange(len(labels)), torch.empty(len(labels), 1))
    )


def entropy(counts):
    total = sum(counts)
    return -sum(c / total * math.log2(c / total) for c in counts if c > 0)


def histogram(distances, K, bins):
    """Each distance shared between the two nearest of the centres 0, w, …, K."""
    w = K / bins
    counts = [0.0] * (bins + 1)
    for d in distances:
        for index in range(bins + 1):
            counts[index] += max(0.0, 1 - abs(d - index * w) / w)
    return counts


def loop_information(outputs, labels, bins, sharpness):
    """The mean over anchors of H(D) - p+ H(D|+) - p- H(D|-), in bits."""
    h = [[math.tanh(sharpness * float(u)) for u in row] for row in outputs]
    K = len(h[0])
    values = []
    for i in range(len(h)):
        near, far = [], []
        for j in range(len(h)):
            if i != j:
                d = (K - sum(a * b for a, b in zip(h[i], h[j], strict=True))) / 2
                (near if (labels[i] * labels[j]).sum() > 0 else far).append(d)
        if near and far:
            share = len(near) / (len(near) + len(far))
            values.append(
                entropy(histogram(near + far, K, bins))
                - share * entropy(histogram(near, K, bins))
                - (1 - share) * entropy(histogram(far, K, bins))
            )
    return sum(values) / len(values)


@pytest.mark.parametrize("bins", [1, 5, 16])
@pytest.mark.parametrize("multilabel", [False, True])
def test_loss_is_minus_the_mutual_information(bins, multilabel):
    outputs = torch.randn(11, 6, generator=torch.Generator().manual_seed(0))
    labels = torch.eye(4)[torch.arange(11) % 4]
    labels[10] = 0  # an anchor without a neighbour
    if multilabel:
        labels[:2] += torch.tensor([[0.0, 1, 0, 0], [0, 0, 1, 1]])
    method = MIHash(bits=6, classes=4, bins=bins, sharpness=1.5, loss_scale=2.0)
    expected = loop_information(outputs, labels, bins, 1.5)
    terms = losses(method, outputs, labels)
    assert float(terms["information"]) == pytest.approx(expected, rel=1e-4)
    assert float(terms["loss"]) == pytest.approx(-2 * expected, rel=1e-4)
