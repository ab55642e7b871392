"""CRH: the loss, the books of words, and the reassignment."""

import math

import numpy as np
import pytest
import torch

from fisherhash.methods import Batch, Progress, create
from fisherhash.methods.crh import head_bits, reassigned


def batch(labels):
    return Batch(labels, torch.arange(len(labels)), torch.zeros(len(labels), 2))


def test_loss_is_the_equation():
    torch.manual_seed(0)
    method = create("crh", bits=12, classes=5)
    labels = torch.tensor([[1.0, 0, 0, 0, 0], [0, 1, 1, 0, 0]])
    u = torch.randn(2, 12)
    scale = max(2.0, math.sqrt(2) * math.log(4))
    expected = 0.0
    for i in range(2):
        share = labels[i] / labels[i].sum()
        scores = []
        for c in range(5):
            code = method.centers[c]
            value = float(u[i] @ code / (u[i].norm() * code.norm()))
            scores.append(scale * (value - 0.2 * float(labels[i, c])))
        total = math.log(sum(math.exp(s) for s in scores))
        expected -= sum(float(share[c]) * (scores[c] - total) for c in range(5)) / 2
    expected += 0.1 * float((u.tanh().abs() - 1).square().mean())
    assert method(u, batch(labels))["loss"].item() == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(("bits", "classes"), [(48, 10), (16, 100), (12, 10), (64, 100)])
def test_no_two_classes_share_a_word(bits, classes):
    method = create("crh", bits=bits, classes=classes)
    size = head_bits(bits, classes)
    for book, part in zip(
        method._books, method.centers.numpy().reshape(classes, -1, size).swapaxes(0, 1), strict=True
    ):
        assert len(np.unique(book, axis=0)) == len(book)
        assert len(np.unique(part, axis=0)) == classes


def test_reassignment_takes_the_word_that_agrees_best():
    rng = np.random.default_rng(0)
    book = np.array([[1, 1, 1], [-1, -1, -1], [1, -1, 1], [-1, 1, -1]], dtype=np.int8)
    sums = np.array([[5, -4, 6], [-3, -3, -3]], dtype=np.float32)
    np.testing.assert_array_equal(reassigned(sums, [book], rng), [[1, -1, 1], [-1, -1, -1]])
    # Both want the same word: only one gets it.
    found = reassigned(np.ones((2, 3), dtype=np.float32), [book], rng)
    assert not np.array_equal(found[0], found[1])


def test_centers_follow_the_codes_of_their_classes():
    torch.manual_seed(0)
    method = create("crh", bits=16, classes=4)
    wanted = method.centers.flip(0).clone()  # each class has another class's codes
    labels = torch.eye(4).repeat(8, 1)
    method.after_step(wanted.repeat(8, 1), batch(labels))
    method.on_epoch_start(Progress(1, 10, 0, 10))
    torch.testing.assert_close(method.centers, wanted)
    assert not method.sums.any()
