"""CNNH: stage 1 against brute force and finite differences, stage 2 against its printed sum.

No frozen value: no code of the authors is public; the loops below follow the printed equations.
"""

import itertools
import logging
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fisherhash.methods import Batch
from fisherhash.methods.cnnh import CNNH, LabelRows, Sharing, newton_sweep, target_codes


class Fixed:
    def __init__(self, labels):
        self.labels = labels

    def outputs(self):
        raise AssertionError("stage 1 needs labels only")

    features = outputs


def random_rows(rows, classes, seed):
    """Different label rows, each with at least one label."""
    rng = np.random.default_rng(seed)
    every = np.array(list(itertools.product([False, True], repeat=classes))[1:])
    return every[rng.permutation(len(every))[:rows]]


def similarity(labels):
    return np.where(labels.astype(float) @ labels.T > 0, 1.0, -1.0)


def loop_objective(H, labels, weights):
    """The printed norm, entry by entry, times K^2; every row counts as often as its weight."""
    S, K = similarity(labels), H.shape[1]
    total = 0.0
    for r, s in itertools.product(range(len(H)), repeat=2):
        product = sum(H[r, k] * H[s, k] for k in range(K))
        total += weights[r] * weights[s] * (K * S[r, s] - product) ** 2
    return total


@given(rows=st.integers(1, 7), bits=st.integers(1, 5), seed=st.integers(0, 10_000))
@settings(max_examples=50, deadline=None)
def test_a_sweep_lowers_the_objective_by_what_it_says(rows, bits, seed):
    labels = random_rows(rows, 3, seed)
    rng = np.random.default_rng(seed)
    H = rng.uniform(-1, 1, (len(labels), bits))
    weights = rng.integers(1, 5, len(labels)).astype(float)
    before = loop_objective(H, labels, weights)
    fallen = newton_sweep(H, weights, Sharing(labels), rng)
    assert np.abs(H).max() <= 1.0
    assert fallen >= 0
    after = loop_objective(H, labels, weights)
    assert after == pytest.approx(before - fallen, rel=1e-9, abs=1e-9)


@pytest.mark.parametrize(("rows", "bits"), [(2, 4), (3, 3), (4, 3)])
@pytest.mark.parametrize("single", [True, False])
def test_codes_against_brute_force(rows, bits, single):
    """The best of a few starts is the best of all binary H."""
    labels = np.eye(rows, dtype=bool) if single else random_rows(rows, 3, 5)
    groups = LabelRows.of(np.repeat(labels, 2, axis=0))
    weights = groups.counts
    best = min(
        loop_objective(np.array(cells).reshape(rows, bits), groups.labels, weights)
        for cells in itertools.product([-1.0, 1.0], repeat=rows * bits)
    )
    reached = min(
        loop_objective(
            target_codes(groups, bits, 20, 100, np.random.default_rng(seed)),
            groups.labels,
            weights,
        )
        for seed in range(20)
    )
    assert reached == pytest.approx(best)


def started(labels, **options):
    torch.manual_seed(0)
    method = CNNH(bits=6, classes=labels.shape[1], **options)
    method.start(Fixed(labels))
    return method


def batch_of(labels, index, features=None):
    index = torch.as_tensor(index)
    features = torch.empty(len(index), 1) if features is None else features
    return Batch(labels[index], index, features)


def test_targets_follow_the_index_and_the_loss_is_the_printed_sum():
    """Batches in another order than the data set meet their own codes."""
    labels = torch.eye(4)[torch.arange(20) % 4]
    labels[3] = 0
    method = started(labels)
    index = [7, 3, 12, 0, 19]
    outputs = torch.randn(5, 6)
    total = 0.0
    for row, i in enumerate(index):
        if i == 3:
            continue
        code = method.targets[method.rows[i]]
        for j in range(20):
            if j != 3 and j % 4 == i % 4:
                assert torch.equal(method.targets[method.rows[j]], code)
        for k in range(6):
            total += (math.tanh(float(outputs[row, k])) - float(code[k])) ** 2
    loss = method.loss(outputs, batch_of(labels, index))["loss"]
    assert float(loss) == pytest.approx(total / 4, rel=1e-5)


def test_plus_adds_the_classes_beside():
    labels = torch.eye(3)[torch.arange(9) % 3]
    labels[0, 1] = 1
    method = CNNH(bits=6, classes=3, plus=True, class_weight=0.5)
    head = method.head(4)
    method.start(Fixed(labels))
    assert head.logits(torch.randn(9, 4)).shape == (9, 6)
    features = torch.randn(9, 4, requires_grad=True)
    terms = method.loss(torch.randn(9, 6), batch_of(labels, range(9), features))
    normal = torch.nn.functional.layer_norm(features, (4,))
    scores = torch.log_softmax(method.classifier(normal), 1).tolist()
    total = 0.0
    for row, wanted in zip(scores, labels.tolist(), strict=True):
        total -= sum(w / sum(wanted) * s for w, s in zip(wanted, row, strict=True))
    assert float(terms["classes"].detach()) == pytest.approx(total / 9, rel=1e-5)
    expected = terms["codes"] + 0.5 * terms["classes"]
    torch.testing.assert_close(terms["loss"], expected)
    terms["loss"].backward()
    assert features.grad.abs().max() > 0  # so a backbone that is fine-tuned learns the classes
    assert "classifier.weight" in method.state_dict()


def test_too_few_bits_for_the_classes_warns(caplog):
    with caplog.at_level(logging.WARNING):
        CNNH(bits=2, classes=9).start(Fixed(torch.eye(9)))
    assert "9 classes share" in caplog.text
