"""Deep Supervised Discrete Hashing: its steps against brute force, its printed objective."""

import itertools
import math

import numpy as np
import pytest
import torch

from fisherhash.methods import Batch, Progress
from fisherhash.methods._discrete import coordinate_descent, ridge_classifier
from fisherhash.methods.dsdh import DSDH


class Fixed:
    """A training set whose outputs are given."""

    def __init__(self, outputs, labels):
        self._outputs, self.labels = outputs, labels

    def outputs(self):
        return self._outputs

    def features(self):
        return self._outputs


def problem(images=40, bits=6, classes=4, seed=0, multilabel=False):
    rng = np.random.default_rng(seed)
    outputs = torch.from_numpy(rng.normal(size=(images, bits)).astype(np.float32))
    labels = torch.zeros(images, classes)
    for row in labels:
        row[rng.choice(classes, rng.integers(1, 3) if multilabel else 1, replace=False)] = 1.0
    return outputs, labels


def loop_objective(codes, W, outputs, labels, *, mu, nu, eta):
    """The terms of the paper's objective that W and B enter, number by number."""
    value = nu * sum(float(w) ** 2 for w in W.flatten())
    for b, u, y in zip(codes.tolist(), outputs.tolist(), labels.tolist(), strict=True):
        for m in range(len(y)):
            value += mu * (y[m] - sum(float(W[k, m]) * b[k] for k in range(len(b)))) ** 2
        value += eta * sum((p - q) ** 2 for p, q in zip(b, u, strict=True))
    return value


@pytest.mark.parametrize("multilabel", [False, True])
def test_w_step_solves_the_normal_equations(multilabel):
    outputs, labels = problem(multilabel=multilabel)
    B = torch.where(outputs > 0, 1.0, -1.0)
    W = ridge_classifier(B, B.T @ labels, ridge=0.3)
    torch.testing.assert_close((B.T @ B + 0.3 * torch.eye(6)) @ W, B.T @ labels)
    weights = {"mu": 2.0, "nu": 0.6, "eta": 0.0}  # nu / mu is the ridge
    best = loop_objective(B, W, outputs, labels, **weights)
    generator = torch.Generator().manual_seed(0)
    for _ in range(20):
        moved = W + 0.02 * torch.randn(W.shape, generator=generator)
        assert loop_objective(B, moved, outputs, labels, **weights) > best


@pytest.mark.parametrize("bits", [1, 2, 3, 4])
@pytest.mark.parametrize("multilabel", [False, True])
def test_b_step_against_brute_force(bits, multilabel):
    """Image by image, over all codes: the best one stays, and some start leads to it."""
    outputs, labels = problem(images=12, bits=bits, seed=bits, multilabel=multilabel)
    B = torch.where(outputs > 0, 1.0, -1.0)
    W = ridge_classifier(B, B.T @ labels, ridge=0.1)
    pull = labels @ W.T + 0.05 * outputs
    every = torch.tensor(list(itertools.product([-1.0, 1.0], repeat=bits)))
    reached = torch.stack(
        [coordinate_descent(start.expand(12, bits), W @ W.T, pull, sweeps=50) for start in every]
    )
    for i in range(12):
        weights = {"mu": 1.0, "nu": 0.0, "eta": 0.05}
        one, label = outputs[i : i + 1], labels[i : i + 1]
        values = [loop_objective(b[None], W, one, label, **weights) for b in every]
        best = every[int(np.argmin(values))]
        stayed = coordinate_descent(best[None], W @ W.T, pull[i : i + 1], sweeps=50)
        torch.testing.assert_close(stayed[0], best)
        ends = [loop_objective(b[None], W, one, label, **weights) for b in reached[:, i]]
        assert min(ends) == pytest.approx(min(values), abs=1e-6)


def started(outputs, labels, **options):
    method = DSDH(bits=outputs.shape[1], classes=labels.shape[1], **options)
    method.start(Fixed(outputs, labels))
    return method


def test_loss_is_the_printed_objective():
    outputs, labels = problem(images=15, multilabel=True)
    method = started(outputs, labels, quantization=0.3, classification=0.9, loss_scale=2.0)
    method.on_epoch_start(Progress(0, 1, 0, 1))
    index = [0, 3, 9]
    pair, quantization = [], 0.0
    for i, j in itertools.product(index, range(15)):
        if i != j:
            theta = 0.5 * float(outputs[i] @ outputs[j])
            s = float((labels[i] * labels[j]).sum() > 0)
            pair.append(math.log(1 + math.exp(theta)) - s * theta)
    for i, k in itertools.product(index, range(6)):
        quantization += (float(method.codes[i, k]) - float(outputs[i, k])) ** 2 / 3
    rows = torch.tensor(index)
    terms = method.loss(outputs[rows], Batch(labels[rows], rows, torch.empty(3, 1)))
    assert float(terms["pair"]) == pytest.approx(sum(pair) / len(pair), rel=1e-5)
    assert float(terms["quantization"]) == pytest.approx(quantization, rel=1e-5)
    expected = 2.0 * (sum(pair) / len(pair) + 0.3 * quantization)
    assert float(terms["loss"]) == pytest.approx(expected, rel=1e-5)


def test_the_value_of_a_released_port():
    """Frozen from TreezzZ/DSDH_PyTorch (commit c60b7ae), dsdh.py: its W-step, then solve_dcc with
    eta 0.05, mu 1, nu 0.1, from the signs of U; 60 of 320 bits flip. Below are the packed codes.

    The authors' own code is MATLAB and could not be run here. Theirs is one sweep; no reduction
    enters, so ours must give the same bits.
    """
    outputs = torch.from_numpy(np.random.default_rng(1).normal(size=(40, 8)).astype(np.float32))
    labels = torch.eye(3)[torch.arange(40) % 3]
    weights = {"quantization": 0.05, "classification": 1.0, "ridge": 0.1}
    method = started(outputs, labels, sweeps=1, **weights)
    method.on_epoch_start(Progress(0, 1, 0, 1))
    packed = np.packbits(method.codes.numpy() > 0, axis=1).tobytes().hex()
    assert packed == (
        "2951831e500488dc9630ccb21dc8b59954a49a50851d51850ad1a01d51b429d8a42940961d70a511"
    )
