"""Deep Cauchy Hashing: its printed objective, its gradient, the authors' value."""

import math

import numpy as np
import pytest
import torch

from fisherhash.methods import Batch
from fisherhash.methods.dch import DCH


def losses(method, outputs, labels):
    return method.loss(
        outputs, Batch(labels, torch.arange(len(labels)), torch.empty(len(labels), 1))
    )


def cosine(a, b):
    dot = sum(p * q for p, q in zip(a, b, strict=True))
    return dot / math.sqrt(sum(p * p for p in a)) / math.sqrt(sum(q * q for q in b))


def toy():
    outputs = torch.randn(9, 5, generator=torch.Generator().manual_seed(0))
    labels = torch.eye(3)[torch.arange(9) % 3]
    labels[0, 1] = 1  # an image with two labels
    return outputs, labels


def loop_loss(outputs, labels, gamma, quantization):
    """The printed sums, divided by the pairs and by the images."""
    h = [[math.tanh(float(u)) for u in row] for row in outputs]
    K = len(h[0])
    pairs = [(i, j) for i in range(len(h)) for j in range(len(h)) if i != j]
    similar = {(i, j) for i, j in pairs if (labels[i] * labels[j]).sum() > 0}
    S, S1 = len(pairs), len(similar)
    total = 0.0
    for i, j in pairs:
        d = K / 2 * (1 - cosine(h[i], h[j]))
        s = float((i, j) in similar)
        w = S / S1 if s else S / (S - S1)
        total += w * (s * math.log(d / gamma) + math.log(1 + gamma / d)) / S
    for row in h:
        d = K / 2 * (1 - cosine([abs(x) for x in row], [1.0] * K))
        total += quantization * math.log(1 + d / gamma) / len(h)
    return total


@pytest.mark.parametrize("gamma", [2.0, 20.0])
def test_loss_is_the_printed_objective(gamma):
    outputs, labels = toy()
    method = DCH(bits=5, classes=3, gamma=gamma, quantization=0.7, loss_scale=2.0)
    got = float(losses(method, outputs, labels)["loss"])
    assert got == pytest.approx(2.0 * loop_loss(outputs, labels, gamma, 0.7), rel=1e-5)


def test_the_distance_of_codes_is_the_hamming_distance():
    """So two codes at distance d cost log(1 + d/gamma), and log(1 + gamma/d) if dissimilar."""
    codes = 30.0 * torch.tensor([[1.0, 1, 1, 1, 1, 1], [1, 1, 1, -1, -1, 1]])
    method = DCH(bits=6, classes=2, gamma=3.0)
    together = losses(method, codes, torch.tensor([[1.0, 0], [1, 0]]))
    apart = losses(method, codes, torch.eye(2))
    assert float(together["pair"]) == pytest.approx(math.log(1 + 2 / 3), rel=1e-5)
    assert float(apart["pair"]) == pytest.approx(math.log(1 + 3 / 2), rel=1e-5)
    assert float(apart["quantization"]) == pytest.approx(0.0, abs=1e-6)


def test_the_authors_value():
    """Frozen from thulab/DeepHash (commit 9907613), DeepHash/model/dch/dch.py,
    cauchy_cross_entropy with gamma 20 and normed (the printed cosine distance, plus 1e-6), on tanh
    of these outputs; TensorFlow 1 is not available here, so numpy's operations stood for
    TensorFlow's of the same names. It leaves self pairs out and takes a mean, but weighs similar
    pairs only; in a batch of one class, and in one of six, its weights are 1, as ours are.
    """
    outputs = torch.from_numpy(np.random.default_rng(0).normal(size=(6, 8)).astype(np.float32))
    method = DCH(bits=8, classes=6)
    one_class = losses(method, outputs, torch.eye(6)[torch.zeros(6, dtype=torch.int64)])
    six = losses(method, outputs, torch.eye(6))
    assert float(one_class["pair"]) == pytest.approx(0.1814760332543966, rel=1e-5)
    assert float(six["pair"]) == pytest.approx(1.9315019459888647, rel=1e-5)
