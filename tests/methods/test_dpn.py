"""Deep Polarized Network: the printed equation, its flat parts, the authors' value."""

import pytest
import torch

from fisherhash.methods import Batch
from fisherhash.methods.dpn import DPN

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
    """Eight bits and three classes, with targets that need no random generator."""
    method = DPN(bits=8, classes=3, **options)
    method.targets.copy_(torch.where(wave(3, 8, 1.1) > 0, 1.0, -1.0))
    return method


def loop_loss(u, targets, labels, margin):
    """The printed objective, image by image, label by label and bit by bit."""
    total = 0.0
    for i in range(len(u)):
        own = [c for c in range(len(targets)) if labels[i][c]]
        for c in own:
            for k in range(u.shape[1]):
                total += max(0.0, margin - float(targets[c, k]) * float(u[i, k])) / len(own)
    return total / len(u)


@pytest.mark.parametrize("margin", [0.3, 1.0, 2.0])
@pytest.mark.parametrize("labels", [SINGLE, SEVERAL])
def test_loss_is_the_printed_equation(margin, labels):
    u, method = wave(4, 8, 0.3), method_with(margin=margin)
    expected = loop_loss(u, method.targets, labels, margin)
    assert float(method.loss(u, batch_of(labels))["loss"]) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(("labels", "value"), [(SINGLE, 6.3448600769), (SEVERAL, 6.5249611934)])
def test_the_authors_code_gives_the_same(labels, value):
    """kamwoh/DPN at b4d721e, scripts/train_hashing.py: calculate_loss (sl, margin 1), run on u =
    wave(4, 8, 0.3) with centroids the signs of wave(3, 8, 1.1). For several labels it ran image by
    image, each value divided by the image's number of labels: theirs is a sum over labels.
    """
    loss = method_with().loss(wave(4, 8, 0.3), batch_of(labels))["loss"]
    assert float(loss) == pytest.approx(value, rel=1e-5)


def test_labels_that_disagree_on_a_bit_pull_it_to_both_sides():
    method = method_with(margin=1.0)
    both = batch_of([[1, 1, 0]])
    at_zero = method.loss(torch.zeros(1, 8), both)["loss"]
    assert float(at_zero) == pytest.approx(8.0)
    u = torch.zeros(1, 8, requires_grad=True)
    method.loss(u, both)["loss"].backward()
    mean = (method.targets[0] + method.targets[1]) / 2
    torch.testing.assert_close(u.grad[0], -mean)
