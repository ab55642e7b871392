"""The defining property of each unsupervised and data-independent method, on small data."""

import math

import torch

from fisherhash import methods
from fisherhash.methods.base import sign
from fisherhash.methods.shallow import _features
from fisherhash.methods.shallow._graphs import AnchorGraph
from fisherhash.methods.shallow.agh import second_cut
from fisherhash.methods.shallow.dgh import uncorrelated
from fisherhash.methods.shallow.isohash import isotropic_rotation
from fisherhash.methods.shallow.kmh import cube_corners


def drawn(count=300, width=20, seed=0):
    generator = torch.Generator().manual_seed(seed)
    mixing = torch.randn(width, width, generator=generator) * torch.logspace(0, -2, width)
    return torch.randn(count, width, generator=generator) @ mixing.T + 4.0


@torch.no_grad()
def fitted(name, features, bits, *, seed=0, **options):
    return methods.create(name, bits=bits, classes=0, options=options).fit(features, seed=seed)


@torch.no_grad()
def bits_of(head, features):
    return head.eval().logits(features) > 0


def test_moments_in_blocks_equal_those_in_one():
    features = drawn(101)
    mean, covariance = _features.mean_and_covariance(features)
    torch.testing.assert_close(mean, features.double().mean(0))
    expected = torch.cov(features.double().T, correction=0)
    torch.testing.assert_close(covariance, expected)
    small = list(_features.row_blocks(features, 10))
    assert [len(block) for block in small] == [10] * 10 + [1]
    torch.testing.assert_close(torch.cat(small), features.double())


def test_random_rotations_are_orthogonal_and_not_all_alike():
    generator = torch.Generator().manual_seed(0)
    drawn_ones = [_features.random_rotation(5, generator) for _ in range(200)]
    for q in drawn_ones[:5]:
        torch.testing.assert_close(q @ q.T, torch.eye(5).double())
    # Uniform among all orthogonal matrices: both determinants, and entries of mean 0.
    assert 60 < sum(torch.linalg.det(q) > 0 for q in drawn_ones) < 140
    assert torch.stack(drawn_ones).mean(0).abs().max() < 0.12


def test_pcah_and_hashing_baseline_span_the_principal_subspace():
    features = drawn()
    centred = features.double() - features.double().mean(0)
    basis = torch.linalg.svd(centred, full_matrices=False).Vh[:6]
    for name in ("pcah", "hashing_baseline"):
        weight = fitted(name, features, 6).linear.weight.detach().double()
        torch.testing.assert_close(weight @ weight.T, torch.eye(6).double(), atol=1e-5, rtol=0)
        torch.testing.assert_close(weight.T @ weight, basis.T @ basis, atol=1e-4, rtol=0)
    pca = fitted("pcah", features, 6)
    logits = pca.logits(features).detach().double()
    # Uncorrelated, the largest variance first.
    covariance = torch.cov(logits.T)
    off = covariance - torch.diag(torch.diagonal(covariance))
    assert off.abs().max() < 1e-4 * covariance.max()
    assert (torch.diagonal(covariance).diff() <= 1e-6).all()


def test_isohash_gives_every_bit_the_same_variance():
    features = drawn()
    variances = fitted("isohash", features, 8).logits(features).detach().var(0, correction=0)
    assert variances.max() / variances.min() < 1.001
    unequal = fitted("pcah", features, 8).logits(features).detach().var(0, correction=0)
    assert unequal.max() / unequal.min() > 2
    start = _features.random_rotation(3, torch.Generator().manual_seed(0))
    Q = isotropic_rotation(torch.tensor([5.0, 2.0, 1.0]).double(), start, 100)
    torch.testing.assert_close(Q @ Q.T, torch.eye(3).double())


def test_e2lsh_bit_is_the_parity_of_the_cell():
    features = drawn(200)
    head = fitted("e2lsh", features, 16)
    # cos(pi z + pi / 2) > 0 exactly where floor(z) is odd.
    z = ((features - head.shift) @ head.weight.T + head.phase - math.pi / 2) / math.pi
    assert torch.equal(bits_of(head, features), z.floor() % 2 == 1)


def test_sklsh_distance_depends_on_the_kernel_only():
    """Equally distant pairs differ in the same share of bits, nearer pairs in fewer."""
    generator = torch.Generator().manual_seed(0)
    features = torch.randn(400, 8, generator=generator)
    head = fitted("sklsh", features, 1024, width=1.0)
    direction = torch.nn.functional.normalize(torch.randn(50, 8, generator=generator), dim=1)

    def share(step):
        moved = features[:50] + step * direction
        return (bits_of(head, features[:50]) != bits_of(head, moved)).double().mean(1)

    means = [share(step).mean().item() for step in (0.2, 0.5, 1.0, 2.0)]
    assert means == sorted(means)
    assert share(1.0).std() < 0.03


def graph_of(features, **options):
    known = {"anchors": 30, "nearest": 4, "width": 1.0, "name": "agh", "bits": 8}
    generator = torch.Generator().manual_seed(0)
    return AnchorGraph(features, generator=generator, **(known | options))


def dense(graph):
    Z = torch.cat(list(graph.blocks()))
    return Z, Z / graph.sizes @ Z.T


def test_agh_second_cut_is_the_smoothest_balanced_one():
    graph = graph_of(drawn())
    _, A = dense(graph)
    y = graph.apply(graph.eigenvectors(1)[0])[:, 0]
    high, low = second_cut(graph, y)

    def second(b_plus, b_minus):
        return torch.where(y > 0, y - b_plus, b_minus - y)

    found = second(high, low)
    assert abs(found.sum()) < 1e-6
    positive = (y > 0).sum()
    negative = len(y) - positive

    def rough(b_plus):
        b_minus = (positive * b_plus - y.abs().sum()) / negative
        f = second(b_plus, b_minus)
        return f @ (f - A @ f)

    assert all(rough(high) <= rough(high + step) + 1e-9 for step in (-0.5, -0.1, 0.1, 0.5))


def test_dgh_balanced_matrix_and_monotone_code_step():
    generator = torch.Generator().manual_seed(0)
    codes = sign(torch.randn(200, 6, generator=generator).double())
    codes[:, 5] = codes[:, 4]  # dependent columns
    Y = uncorrelated(codes, generator)
    assert Y.sum(0).abs().max() < 1e-8
    torch.testing.assert_close(Y.T @ Y, 200 * torch.eye(6).double(), atol=1e-6, rtol=0)
    graph = graph_of(drawn(200), bits=6)
    _, A = dense(graph)
    method = methods.create("dgh", bits=6, classes=0)

    def objective(B):
        return float((B * (A @ B)).sum() + method.balance * (B * Y).sum())

    assert objective(method.code_step(graph, codes, Y)) >= objective(codes)


def test_kmh_head_takes_the_nearest_word_and_its_objective_falls():
    features = drawn(400)
    head = fitted("kmh", features, 8, subspace_bits=4)
    parts = (features - head.shift) @ head.projection
    sizes = [head.get_buffer(f"words_{number}").shape[1] for number in range(2)]
    parts = parts.split(sizes, dim=1)
    found = bits_of(head, features)
    for number, part in enumerate(parts):
        words = head.get_buffer(f"words_{number}")
        nearest = torch.cdist(part, words).argmin(1)
        assert torch.equal(found[:, 4 * number : 4 * number + 4], cube_corners(4)[nearest] > 0)
    method = methods.create("kmh", bits=4, classes=0)
    rows = parts[0].double()
    corners = cube_corners(4).double()
    start = torch.zeros(16, rows.shape[1]).double()
    start[:, :4] = corners * rows.std(0)[:4]
    owner = torch.cdist(rows, start).argmin(1)
    target = 2.0 * ((4 - corners @ corners.T) / 2).sqrt()
    share = torch.bincount(owner, minlength=16).double() / len(rows)

    def objective(words):
        between = torch.cdist(words, words)
        affinity = (share[:, None] * share * (between - target).square()).sum()
        return float((rows - words[owner]).square().sum() / len(rows) + 10 * affinity)

    assert objective(method._move(rows, start, owner, target)) < objective(start)
