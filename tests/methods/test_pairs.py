"""The pieces shared by the pairwise methods, and what all of these methods must do alike."""

import itertools
import math

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from fisherhash.methods import (
    Batch,
    Progress,
    _pairs,
    create,
)
from fisherhash.methods._pairs import (
    BatchPairs,
    PairMemory,
    TrainingLabels,
    class_proportions,
    logistic,
)


class Fixed:
    """A training set whose outputs are given."""

    def __init__(self, outputs, labels):
        self._outputs, self.labels = outputs, labels

    def outputs(self):
        return self._outputs

    def features(self):
        return self._outputs


def random_labels(images, classes, seed=0, most=1, least=1):
    rng = np.random.default_rng(seed)
    labels = torch.zeros(images, classes)
    for row in labels:
        row[rng.choice(classes, rng.integers(least, most + 1), replace=False)] = 1.0
    return labels


def filled(labels):
    table = TrainingLabels()
    table.fill(labels)
    return table


CASES = [
    pytest.param(random_labels(30, 4), True, id="single"),
    pytest.param(random_labels(30, 4, least=0), True, id="single, some unlabelled"),
    pytest.param(random_labels(30, 4, most=3), False, id="several"),
    pytest.param(random_labels(30, 4, most=3, least=0), False, id="several, some unlabelled"),
    pytest.param(torch.eye(9)[torch.zeros(30, dtype=torch.int64)], True, id="eight classes absent"),
]


@pytest.mark.parametrize(("labels", "single"), CASES)
@pytest.mark.parametrize("shares", [False, True])
def test_compact_labels_are_the_label_matrix(labels, single, shares, monkeypatch):
    monkeypatch.setattr("fisherhash.methods._pairs.LABEL_ROWS", 7)  # several chunks
    table = filled(labels)
    assert table.single == single
    assert len(table.rows) == (0 if single else 30)
    assert len(table.numbers) == (30 if single else 0)
    index = torch.tensor([3, 0, 29])
    torch.testing.assert_close(table.similar(index), labels[index] @ labels.T > 0)
    Y = class_proportions(labels) if shares else labels
    generator = torch.Generator().manual_seed(0)
    C = torch.randn(5, labels.shape[1], generator=generator)
    V = torch.randn(30, 5, generator=generator)
    torch.testing.assert_close(table.mix(C, shares=shares), Y @ C.T)
    some = slice(4, 23)
    torch.testing.assert_close(table.mix(C, shares=shares, among=some), Y[some] @ C.T)
    torch.testing.assert_close(table.collect(V, shares=shares), V.T @ Y)
    gram = table.gram(shares=shares)
    torch.testing.assert_close(torch.diag(gram) if table.single else gram, Y.T @ Y)


@pytest.mark.parametrize("labels", [case.values[0] for case in CASES])
def test_means_are_those_of_each_class_by_shares(labels, monkeypatch):
    monkeypatch.setattr("fisherhash.methods._pairs.LABEL_ROWS", 7)  # several chunks
    values = torch.randn(30, 5, generator=torch.Generator().manual_seed(0))
    means = filled(labels).means(values)
    assert means.shape == (5, labels.shape[1])
    for number, column in enumerate(labels.T):
        rows = column.nonzero()[:, 0].tolist()
        total, weight = torch.zeros(5), 0.0
        for i in rows:
            share = 1.0 / float(labels[i].sum())
            total += share * values[i]
            weight += share
        expected = total / weight if rows else total  # a class without images has mean 0
        torch.testing.assert_close(means[:, number], expected)


def share_of_similar(labels):
    """Pair by pair, without those of an image with itself."""
    similar = (labels @ labels.T > 0).tolist()
    pairs = [similar[i][j] for i in range(len(labels)) for j in range(len(labels)) if i != j]
    return sum(pairs) / len(pairs)


@pytest.mark.parametrize("labels", [case.values[0] for case in CASES])
def test_the_share_of_similar_pairs(labels):
    assert filled(labels).similar_share() == pytest.approx(share_of_similar(labels))


def test_the_share_of_similar_pairs_is_counted_with_one_label_and_sampled_with_several():
    one, several = random_labels(900, 4, most=1), random_labels(900, 4, most=3)
    assert filled(one).similar_share(most=1) == pytest.approx(share_of_similar(one))
    table = filled(several)
    assert table.similar_share(most=900) == pytest.approx(share_of_similar(several))
    sampled = table.similar_share(most=100)
    assert sampled == pytest.approx(share_of_similar(several), abs=0.03)
    torch.manual_seed(7)
    assert table.similar_share(most=100) == sampled


@pytest.mark.parametrize("labels", [case.values[0] for case in CASES])
@pytest.mark.parametrize("weight", [1.0, 4.0])
def test_memory_pair_loss_pair_by_pair(labels, weight):
    outputs = torch.randn(30, 6, generator=torch.Generator().manual_seed(1))
    memory = PairMemory()
    memory.fill(Fixed(outputs, labels))
    index = torch.tensor([2, 11, 28])
    batch = Batch(labels[index], index, torch.empty(3, 1))
    now = outputs[index] + 0.5  # the network has moved on; the memory has not
    total = weights = 0.0
    for row, i in enumerate(index.tolist()):
        for j in range(30):
            if i == j:
                continue
            theta = 0.5 * float(now[row] @ outputs[j])
            similar = bool((labels[i] * labels[j]).sum() > 0)
            cost = math.log(1 + math.exp(0.7 - theta if similar else 0.7 + theta))
            total += (weight if similar else 1.0) * cost
            weights += weight if similar else 1.0
    got = memory.pair_loss(now, batch, margin=0.7, positive_weight=weight)
    assert float(got) == pytest.approx(total / weights, rel=1e-5)


class LargestTensor(TorchDispatchMode):
    """Records the most numbers that a tensor had."""

    def __init__(self):
        super().__init__()
        self.most = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        found = result if isinstance(result, (tuple, list)) else (result,)
        # A view takes no memory, though an expanded one may look large.
        sizes = [t.numel() for t in found if isinstance(t, torch.Tensor) and not t._is_view()]
        self.most = max([self.most, *sizes])
        return result


@pytest.mark.parametrize("name", ["adsh", "dfh", "dpsh", "dsdh", "mdsh"])
def test_no_step_holds_the_pairs_of_a_batch_with_all_images(name, monkeypatch):
    """A training set on disk must not be limited by a matrix batch x N."""
    monkeypatch.setattr(_pairs, "MOST_PAIRS", 10_000)
    outputs = torch.randn(2000, 8, generator=torch.Generator().manual_seed(0))
    labels = torch.eye(4)[torch.arange(2000) % 4]
    with LargestTensor() as largest:
        method = started(name, outputs, labels)
        step(method, outputs, labels, range(64))
    assert 0 < largest.most <= outputs.numel()


def test_batch_pairs_by_hand():
    labels = torch.tensor([[1.0, 1, 0], [0, 1, 1], [0, 0, 1], [0, 0, 0]])
    pairs = BatchPairs.of(labels)
    for i, j in itertools.product(range(4), repeat=2):
        a, b = ({c for c in range(3) if labels[k, c]} for k in (i, j))
        assert bool(pairs.similar[i, j]) == (i != j and bool(a & b))
        assert bool(pairs.dissimilar[i, j]) == (i != j and not a & b)
        if a | b:
            assert float(pairs.overlap[i, j]) == pytest.approx(len(a & b) / len(a | b))
    values = torch.arange(16.0).view(4, 4)
    assert float(pairs.mean(values)) == pytest.approx(7.5)
    similar = [values[0, 1], values[1, 0], values[1, 2], values[2, 1]]
    others = values.sum() - values.diag().sum() - sum(similar)
    assert float(pairs.balanced(values)) == pytest.approx(float(sum(similar) / 4 + others / 8))


@pytest.mark.parametrize("theta", [-300.0, -5.0, 0.0, 0.3, 300.0])
def test_logistic_is_the_likelihood_at_any_size(theta):
    value = torch.tensor(theta)
    for similar in (True, False):
        exact = max(theta, 0.0) + math.log1p(math.exp(-abs(theta))) - similar * theta
        assert float(logistic(value, torch.tensor(similar))) == pytest.approx(exact, abs=1e-6)


def started(name, outputs, labels, **options):
    method = create(name, bits=outputs.shape[1], classes=labels.shape[1], options=options)
    method.start(Fixed(outputs, labels))
    method.on_epoch_start(Progress(0, 2, 0, 8))
    return method


def step(method, outputs, labels, index):
    index = torch.as_tensor(index)
    u = outputs[index].clone().requires_grad_()
    terms = method.loss(u, Batch(labels[index], index, torch.empty(len(index), 1)))
    terms["loss"].backward()
    assert all(bool(torch.isfinite(term)) for term in terms.values())
    assert bool(torch.isfinite(u.grad).all())
    return terms, u.grad


@pytest.mark.parametrize("name", ["adsh", "dfh", "dpsh", "dsdh", "mdsh"])
@pytest.mark.parametrize("most", [1, 21, 40])
def test_parts_of_the_pairs_have_the_same_loss_and_gradient(name, most, monkeypatch):
    outputs = torch.randn(30, 6, generator=torch.Generator().manual_seed(1))
    labels, found = random_labels(30, 4, most=1 if name == "mdsh" else 3), []
    for limit in (_pairs.MOST_PAIRS, most):
        monkeypatch.setattr(_pairs, "MOST_PAIRS", limit)
        torch.manual_seed(0)
        found.append(step(started(name, outputs, labels), outputs, labels, [2, 11, 28]))
    torch.testing.assert_close(found[1], found[0])


@pytest.mark.parametrize("name", ["dpsh", "dsdh", "dhn", "hashnet", "dsh", "dch", "mihash"])
@pytest.mark.parametrize("most", [1, 3])
def test_a_step_never_asks_for_a_value(name, most):
    """What a CUDA graph needs: fake tensors have shapes but no values, and refuse ``.item()``,
    branches on values and shapes that depend on them.
    """
    outputs = torch.randn(30, 8, generator=torch.Generator().manual_seed(0))
    labels = random_labels(30, 3, most=most)
    method = started(name, outputs, labels)
    mode = FakeTensorMode()
    for module in method.modules():
        for key, buffer in module._buffers.items():
            module._buffers[key] = mode.from_tensor(buffer)
    u = mode.from_tensor(outputs[:10].clone().requires_grad_())
    own = mode.from_tensor(labels[:10])
    with mode:
        batch = Batch(own, torch.arange(10), torch.empty(10, 1))
        method.loss(u, batch)["loss"].backward()
        method.after_step(u.detach(), batch)
    assert u.grad.shape == u.shape
