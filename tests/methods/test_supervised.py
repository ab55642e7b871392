"""The defining property of each supervised shallow method, on small data."""

import itertools

import numpy as np
import pytest
import torch

from fisherhash import methods
from fisherhash.methods.base import sign
from fisherhash.methods.shallow import _affinity
from fisherhash.methods.shallow._kernels import KernelMap, Ridge, linear_ridge
from fisherhash.methods.shallow.bre import search_weights
from fisherhash.methods.shallow.ksh import agreement
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


def test_spectral_bit_follows_the_top_eigenvector():
    generator = torch.Generator().manual_seed(0)
    hidden = sign(torch.randn(60, generator=generator)).double()
    form = torch.outer(hidden, hidden) + 0.1 * torch.randn(60, 60, generator=generator)
    found = _affinity.spectral_bit((form + form.T) / 2)
    assert abs(float(found @ hidden)) > 58


def test_sdh_objective_never_rises():
    features, labels = classes()
    method = made("sdh", attraction=1e-3)
    labels = labels.double()
    generator = torch.Generator().manual_seed(0)
    codes = sign(torch.randn(len(features), 8, generator=generator)).double()
    predicted = torch.randn(len(features), 8, generator=generator).double()
    values = [method.objective(codes, labels, predicted)]
    for _ in range(5):
        codes = method.code_step(codes, labels, predicted)
        values.append(method.objective(codes, labels, predicted))
    assert all(b <= a + 1e-6 for a, b in itertools.pairwise(values))
    assert values[-1] < values[0]


def test_ksh_climb_never_ends_below_its_start():
    features, labels = classes()
    kernel = kernel_of(features)
    phi = kernel.of(features)
    R = 8.0 * _affinity.similarity(labels)
    method = made("ksh")
    generator = torch.Generator().manual_seed(2)
    for _ in range(5):
        start = torch.randn(len(kernel), generator=generator).double()
        climbed = method.climbed(phi, R, start)
        kept = max(start, climbed, key=lambda a: agreement(phi, R, a))
        assert agreement(phi, R, kept) >= agreement(phi, R, start)
        soft = [torch.tanh(phi @ a) for a in (start, climbed)]
        assert soft[1] @ R @ soft[1] >= soft[0] @ R @ soft[0]


def test_lfh_newton_step_never_lowers_the_likelihood():
    generator = torch.Generator().manual_seed(0)
    moved = torch.randn(30, 6, generator=generator).double()
    fixed = torch.randn(10, 6, generator=generator).double()
    similar = (torch.rand(30, 10, generator=generator) < 0.3).double()
    method = made("lfh", bits=6)

    def likelihood(U):
        theta = U @ fixed.T / 2
        fit = (similar * theta - torch.nn.functional.softplus(theta)).sum(1)
        # Both orders of a pair count.
        return 2 * fit - U.square().sum(1) / (2 * method.prior)

    values = [likelihood(moved)]
    for _ in range(6):
        moved = method.newton(moved, fixed, similar)
        values.append(likelihood(moved))
    assert all((b >= a - 1e-9).all() for a, b in itertools.pairwise(values))


def test_cosdish_column_step_never_raises_the_objective():
    _, labels = classes()
    generator = torch.Generator().manual_seed(0)
    labels = labels.double()
    columns, others = labels[:12], labels[12:]
    among = _affinity.similarity(columns)
    across = torch.where(others @ columns.T > 0, 1.0, -1.0).double()
    B = sign(torch.randn(len(labels), 8, generator=generator)).double()

    def objective(own):
        inside = (8 * among - own @ own.T).square().sum()
        return float(inside + 2 * (8 * across - B[12:] @ own.T).square().sum())

    after = made("cosdish").column_step(B[:12], B[12:], among, across)
    assert objective(after) < objective(B[:12])


def test_itq_cca_separates_by_the_labels():
    features, labels = classes(several=True)
    head = made("itq_cca", bits=16).fit(features, labels)
    with torch.no_grad():
        logits = head.logits(features).double()
    # Three independent directions at most, spread over 16 bits by a rotation; labels are centred.
    assert torch.linalg.matrix_rank(logits, rtol=1e-3) <= 4
    assert logits.mean(0).abs().max() < 1e-4


def test_bre_weight_search_is_exact():
    """Along one weight every threshold is tried: no other value of the weight is better."""
    generator = torch.Generator().manual_seed(0)
    form = torch.randn(30, 30, generator=generator).double()
    form = (form + form.T).fill_diagonal_(0)
    phi = torch.randn(30, 1, generator=generator).double()
    weights = torch.tensor([0.3]).double()
    phi_two = torch.cat([phi, torch.randn(30, 1, generator=generator).double()], 1)
    weights_two = torch.tensor([0.5, -0.2]).double()
    for columns, own in ((phi, weights), (phi_two, weights_two)):
        start = sign(columns @ own)
        found = search_weights(form, columns, own)
        assert found @ form @ found >= start @ form @ start
        assert torch.equal(found, sign(columns @ own))
        last = len(own) - 1
        for value in np.linspace(-20, 20, 2001):
            other = own.clone()
            other[last] = value
            h = sign(columns @ other)
            assert h @ form @ h <= found @ form @ found + 1e-9


def test_mlh_inference_is_exact():
    """Against every pair of codes of four bits."""
    method = made("mlh", bits=4)
    generator = torch.Generator().manual_seed(0)
    f, g = torch.randn(2, 30, 4, generator=generator).double()
    similar = torch.arange(30) % 2 == 0
    first, second = method.worst_codes(f, g, similar)
    losses = method.losses(similar)
    corners = torch.tensor(list(itertools.product((-1.0, 1.0), repeat=4))).double()
    for i in range(30):

        def value(a, b, i=i):
            distance = int((a != b).sum())
            return float(losses[i, distance] + a @ f[i] + b @ g[i])

        best = max(value(a, b) for a in corners for b in corners)
        assert value(first[i], second[i]) == pytest.approx(best)


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
