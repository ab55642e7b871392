"""The defining property of each supervised shallow method, on small data."""

import itertools

import numpy as np
import pytest
import torch

from fisherhash import methods
from fisherhash.methods.base import sign
from fisherhash.methods.shallow import _affinity
from fisherhash.methods.shallow._kernels import KernelMap, Ridge, linear_ridge
from fisherhash.methods.shallow.machash import linear_machines

SUPERVISED = ["bre", "cosdish", "fasth", "fsdh", "itq_cca", "ksh", "lfh", "machash", "mlh", "sdh"]


def classes(count=240, number=4, width=12, seed=0, several=False):
    generator = torch.Generator().manual_seed(seed)
    labels = torch.eye(number)[torch.arange(count) % number]
    if several:
        extra = torch.eye(number)[torch.randint(number, (count,), generator=generator)]
        labels = torch.maximum(labels, extra)
    middles = torch.randn(number, width, generator=torch.Generator().manual_seed(9))
    return labels @ middles + 0.7 * torch.randn(count, width, generator=generator), labels


def made(name, bits=8, number=4, **options):
    return methods.create(name, bits=bits, classes=number, options=options)


def kernel_of(features, **options):
    known = {"anchors": 40, "width": 1.0, "name": "sdh"}
    generator = torch.Generator().manual_seed(0)
    return KernelMap(features, generator=generator, **(known | options))


@pytest.mark.parametrize("name", SUPERVISED)
def test_learns_more_than_the_features_show(name):
    """Half of the dimensions are loud noise: without labels a code would follow the noise."""
    features, labels = classes(400)
    noise = 4.0 * torch.randn(400, 12, generator=torch.Generator().manual_seed(3))
    features = torch.cat([features, noise], dim=1)

    def separation(method):
        head = method.fit(features[:300], labels[:300])
        with torch.no_grad():
            codes = sign(head.eval().logits(features[300:]))
        distance = (8 - codes @ codes.T) / 2
        same = labels[300:] @ labels[300:].T > 0
        return float(distance[~same].mean() - distance[same].mean())

    assert separation(made(name)) > separation(made("itq")) + 0.5


def test_kernel_regression_is_the_minimum_of_ridge():
    features, _ = classes()
    kernel = kernel_of(features)
    phi = torch.cat(list(kernel.blocks()))
    assert phi.mean(0).abs().max() < 1e-10
    targets = sign(torch.randn(len(features), 3, generator=torch.Generator().manual_seed(0)))
    weight, offset = Ridge(kernel, 0.1).fit(targets)
    penalty = 0.1 * phi.square().sum(0).mean()

    def loss(W):
        error = (phi @ W + offset - targets.double()).square().sum()
        return float(error + penalty * W.square().sum())

    best = loss(weight)
    generator = torch.Generator().manual_seed(1)
    for _ in range(20):
        moved = weight + 1e-3 * torch.randn(weight.shape, generator=generator).double()
        assert loss(moved) >= best
    head = kernel.head(weight, offset)
    expected = (phi @ weight + offset).float()
    torch.testing.assert_close(head.logits(features), expected, atol=1e-3, rtol=1e-3)


def test_linear_ridge_agrees_with_the_normal_equations():
    features, labels = classes()
    weight, mean, offset = linear_ridge(features, labels, 0.5)
    centred = features.double() - mean
    penalty = 0.5 * centred.square().mean(0).mean() * len(features)
    expected = torch.linalg.solve(
        centred.T @ centred + penalty * torch.eye(12).double(), centred.T @ labels.double()
    )
    torch.testing.assert_close(weight, expected)
    torch.testing.assert_close(offset, labels.double().mean(0))


def test_best_flips_end_where_no_flip_helps_and_reach_the_optimum_from_somewhere():
    generator = torch.Generator().manual_seed(0)
    form = torch.randn(10, 10, generator=generator).double()
    form = form + form.T
    linear = torch.randn(10, generator=generator).double()

    def value(h):
        return float(h @ form @ h + 2 * linear @ h)

    corners = torch.tensor(list(itertools.product((-1.0, 1.0), repeat=10))).double()
    best = max(value(h) for h in corners)
    reached = []
    for start in corners[::37]:
        found = _affinity.best_flips(form, start, linear)
        assert value(found) >= value(start)
        for i in range(10):
            other = found.clone()
            other[i] = -other[i]
            assert value(other) <= value(found) + 1e-9
        reached.append(value(found))
    assert max(reached) == pytest.approx(best)


def test_machash_code_step_and_machines():
    features, labels = classes()
    S = _affinity.similarity(labels)
    generator = torch.Generator().manual_seed(0)
    codes = sign(torch.randn(len(S), 8, generator=generator)).double()
    predicted = sign(torch.randn(len(S), 8, generator=generator)).double()
    method = made("machash")

    def objective(Z):
        return float((Z @ Z.T - 8 * S).square().sum() + 2 * 500.0 * (Z - predicted).square().sum())

    after = method.code_step(codes, S, predicted, 500.0 * 4)
    assert objective(after) < objective(codes)
    weight, offset = linear_machines(features.double(), labels.double() * 2 - 1, 10.0)
    right = (features.double() @ weight + offset).argmax(1) == labels.argmax(1)
    assert right.double().mean() > 0.9


def test_fasth_head_predicts_as_its_trees_do():
    from sklearn.tree import DecisionTreeClassifier

    from fisherhash.methods.shallow.fasth import _store
    from fisherhash.model.heads import ArrayHead

    features, labels = classes()
    wanted = np.where(labels[:, 0].numpy() > 0, 1.0, -1.0)
    tables = {
        "columns": torch.zeros(2, 3, 15, dtype=torch.long),
        "thresholds": torch.zeros(2, 3, 15),
        "votes": torch.zeros(2, 3, 16),
    }
    trees = []
    for number in range(3):
        tree = DecisionTreeClassifier(max_depth=2 + number, random_state=number)
        trees.append(tree.fit(features.numpy(), wanted))
        own = {name: table[1, number] for name, table in tables.items()}
        _store(own, trees[-1], 0.5 + number)
    head = ArrayHead("trees", 12, 2, tables)
    expected = sum((0.5 + n) * tree.predict(features.numpy()) for n, tree in enumerate(trees))
    np.testing.assert_allclose(head(features)[:, 1].numpy(), expected, rtol=1e-5)
    assert (head(features)[:, 0] == 0).all()
