"""CroVCA against a slow reading of its equation."""

import math

import numpy as np
import pytest
import torch

from fisherhash.methods import Batch, create

LABELS = [[1, 0, 0], [0, 1, 1], [0, 0, 1], [0, 0, 0]]


def two_views(labels, bits=5):
    outputs = torch.randn(8, bits, generator=torch.Generator().manual_seed(1))
    rows = torch.tensor(labels * 2).float().reshape(8, -1)
    return outputs, Batch(rows, torch.arange(4).repeat(2), torch.zeros(8, 2), 2)


SCALE = 10.0


def expected_rate(outputs, eps):
    n, bits = outputs.shape
    rows = outputs / np.linalg.norm(outputs, axis=1, keepdims=True)
    value = np.linalg.slogdet(np.eye(bits) + bits / (n * eps) * rows.T @ rows)[1]
    return -value / 2 * (bits + n) / (bits * n)


def expected_loss(u, targets, diversity, eps):
    losses = []
    for row, wanted in zip(u, targets, strict=True):
        for x, c in zip(row, wanted, strict=True):
            p = 1 / (1 + math.exp(-x))
            losses.append(-math.log(p) if c else -math.log(1 - p))
    rates = [expected_rate(half, eps) for half in (u[:4], u[4:])]
    return SCALE * (sum(losses) / len(losses) + diversity * sum(rates) / 2)


def test_without_labels_the_target_is_the_other_view():
    outputs, batch = two_views([[], [], [], []])
    u = outputs.double().numpy()
    method = create("crovca", bits=5, classes=0, options={"diversity": 0.4, "precision": 0.1})
    expected = expected_loss(u, np.roll(u, 4, axis=0) > 0, 0.4, 0.1)
    assert method(outputs, batch)["loss"].item() == pytest.approx(expected, rel=1e-4)
    # Labels that are not used change nothing.
    options = {"diversity": 0.4, "precision": 0.1, "use_labels": False}
    ignoring = create("crovca", bits=5, classes=3, options=options)
    loss = ignoring(outputs, two_views(LABELS)[1])["loss"]
    assert loss.item() == pytest.approx(expected, rel=1e-4)


def test_with_labels_the_target_is_the_mean_of_the_class_means():
    outputs, batch = two_views(LABELS)
    u = outputs.double().numpy()
    means = {c: np.mean([u[i] for i in range(8) if LABELS[i % 4][c]], axis=0) for c in range(3)}
    targets = []
    for i in range(8):
        own = [means[c] for c in range(3) if LABELS[i % 4][c]]
        targets.append((np.mean(own, axis=0) if own else u[(i + 4) % 8]) > 0)
    method = create("crovca", bits=5, classes=3)
    expected = expected_loss(u, targets, 0.1, 0.05)
    assert method(outputs, batch)["loss"].item() == pytest.approx(expected, rel=1e-4)
