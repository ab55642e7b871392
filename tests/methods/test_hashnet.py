"""HashNet: its printed objective, the continuation, the authors' value."""

import math

import numpy as np
import pytest
import torch

from fisherhash.errors import UsageError
from fisherhash.methods import Batch, Progress
from fisherhash.methods.hashnet import HashNet


def losses(method, outputs, labels):
    return method.loss(
        outputs, Batch(labels, torch.arange(len(labels)), torch.empty(len(labels), 1))
    )


def loop_loss(outputs, labels, alpha, beta):
    """(1/|S|) sum w_ij l_ij, every weight as printed."""
    h = [[math.tanh(beta * float(u)) for u in row] for row in outputs]
    sets = [{c for c in range(labels.shape[1]) if row[c]} for row in labels]
    pairs = [(i, j) for i in range(len(h)) for j in range(len(h)) if i != j]
    similar = [(i, j) for i, j in pairs if sets[i] & sets[j]]
    S, S1 = len(pairs), len(similar)
    total = 0.0
    for i, j in pairs:
        product = alpha * sum(a * b for a, b in zip(h[i], h[j], strict=True))
        if sets[i] & sets[j]:
            weight = len(sets[i] & sets[j]) / len(sets[i] | sets[j]) * S / S1
            total += weight * (math.log(1 + math.exp(product)) - product)
        else:
            total += S / (S - S1) * math.log(1 + math.exp(product))
    return total / S


@pytest.mark.parametrize("multilabel", [False, True])
@pytest.mark.parametrize("beta", [1.0, 3.0])
def test_loss_is_the_printed_objective(multilabel, beta):
    outputs = torch.randn(9, 5, generator=torch.Generator().manual_seed(0))
    labels = torch.eye(4)[torch.arange(9) % 4]
    if multilabel:
        labels[:3] += torch.tensor([[0.0, 1, 0, 0], [0, 0, 1, 1], [1, 0, 0, 0]])
    method = HashNet(bits=5, classes=4, scale=4.0, loss_scale=2.0)
    method.sharpness.fill_(beta)
    got = float(losses(method, outputs, labels)["loss"])
    assert got == pytest.approx(2.0 * loop_loss(outputs, labels, 4.0 / 5, beta), rel=1e-5)


def test_beta_follows_the_released_schedule():
    """sqrt(1 + 0.005 t), t = 0, 200, …, 9800: fifty stages, if beta_end is that of t = 10,000."""
    method = HashNet(bits=4, classes=2, final_sharpness=math.sqrt(51))
    address = method.sharpness.data_ptr()
    for epoch in range(50):
        method.on_epoch_start(Progress(epoch, 50, epoch * 200, 10_000))
        expected = math.sqrt(1 + 0.005 * 200 * epoch)
        assert float(method.sharpness) == pytest.approx(expected, rel=1e-6)
    assert method.sharpness.data_ptr() == address  # a captured step keeps reading it
    assert "sharpness" in method.state_dict()


def test_a_shrinking_beta_is_refused():
    with pytest.raises(UsageError, match="at least 1"):
        HashNet(bits=4, classes=2, final_sharpness=0.5)


def test_the_authors_value():
    """Frozen from thuml/HashNet (commit 85387b8), pytorch/src/loss.py, pairwise_loss with
    sigmoid_param 10/8, on tanh of these outputs: one image against the others that are similar, and
    against those that are dissimilar, because the function pairs two batches. It returns means;
    each row has as many pairs as any other, so their means over the six rows, 0.909536878 and
    0.875525951, add up to the loss with both sides weighted.
    """
    outputs = torch.from_numpy(np.random.default_rng(0).normal(size=(6, 8)).astype(np.float32))
    labels = torch.eye(3)[torch.tensor([0, 0, 1, 1, 2, 2])]
    got = losses(HashNet(bits=8, classes=3, loss_scale=1.0), outputs, labels)["loss"]
    assert float(got) == pytest.approx(0.909536878 + 0.875525951, rel=1e-5)
