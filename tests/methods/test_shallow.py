"""ITQ against its own objective, LSH against its probability."""

import itertools
import math

import pytest
import torch

from fisherhash import methods
from fisherhash.errors import UsageError


def clusters(count=300, width=20, seed=0):
    generator = torch.Generator().manual_seed(seed)
    mixing = torch.randn(width, width, generator=generator) * torch.logspace(0, -2, width)
    return torch.randn(count, width, generator=generator) @ mixing.T + 4.0


@torch.no_grad()
def fitted(name, features, bits, *, seed=0, **options):
    head = methods.create(name, bits=bits, classes=0, options=options).fit(features, seed=seed)
    return head.eval().requires_grad_(False)


def quantisation_error(logits):
    return (torch.where(logits > 0, 1.0, -1.0) - logits).square().sum().item()


def test_itq_projects_on_an_orthonormal_basis_of_the_principal_subspace():
    features = clusters()
    head = fitted("itq", features, 6)
    weight = head.linear.weight.double()
    torch.testing.assert_close(weight @ weight.T, torch.eye(6).double(), atol=1e-5, rtol=0)
    centred = (features - features.mean(0)).double()
    principal = torch.linalg.svd(centred, full_matrices=False).Vh[:6]
    # Two bases of one subspace: the projections on it are the same matrix.
    torch.testing.assert_close(weight.T @ weight, principal.T @ principal, atol=1e-4, rtol=0)
    rotation = principal @ weight.T
    torch.testing.assert_close(rotation @ rotation.T, torch.eye(6).double(), atol=1e-4, rtol=0)


@pytest.mark.parametrize("seed", range(5))
def test_itq_never_raises_the_quantisation_error(seed):
    features = clusters(seed=seed)
    errors = [
        quantisation_error(fitted("itq", features, 8, seed=seed, iterations=n)(features))
        for n in range(12)
    ]
    assert all(after <= before + 1e-3 for before, after in itertools.pairwise(errors))
    assert errors[-1] < errors[0] - 1


def test_itq_finds_the_best_rotation_of_the_plane():
    """In two dimensions every rotation and reflection can be tried."""
    generator = torch.Generator().manual_seed(3)
    corners = torch.tensor([[1.0, 1], [1, -1], [-1, 1], [-1, -1]]).repeat(40, 1)
    points = corners + 0.1 * torch.randn(160, 2, generator=generator)
    points *= torch.tensor([1.2, 1.0])
    points -= points.mean(0)
    head = fitted("itq", points, 2)
    best = math.inf
    for i in range(720):
        c, s = math.cos(math.pi * i / 360), math.sin(math.pi * i / 360)
        best = min(best, quantisation_error(points @ torch.tensor([[c, -s], [s, c]])))
    assert quantisation_error(head(points)) <= best * 1.001


def test_itq_is_reproducible_and_depends_on_its_seed():
    features = clusters()
    one, two, other = (fitted("itq", features, 8, seed=s, iterations=2) for s in (0, 0, 1))
    assert torch.equal(one.linear.weight, two.linear.weight)
    assert not torch.equal(one.linear.weight, other.linear.weight)


@pytest.mark.parametrize(("count", "width", "bits"), [(300, 20, 21), (10, 20, 10)])
def test_itq_with_too_many_bits(count, width, bits):
    with pytest.raises(UsageError, match=f"itq: {bits} bits need .* {width} and {count}; take few"):
        fitted("itq", clusters(count, width), bits)
    assert fitted("itq", clusters(count, width), bits - 1).bits == bits - 1


def test_lsh_is_reproducible_centred_and_has_any_number_of_bits():
    features = clusters()
    one, two, other = (fitted("lsh", features, 100, seed=s) for s in (0, 0, 1))
    assert torch.equal(one.linear.weight, two.linear.weight)
    assert not torch.equal(one.linear.weight, other.linear.weight)
    torch.testing.assert_close(one(features).mean(0), torch.zeros(100), atol=1e-3, rtol=0)
    torch.testing.assert_close(one.shift, features.mean(0))


@pytest.mark.parametrize("angle", [0.1, 0.5, 1.0, 2.0, 3.0])
def test_lsh_collides_in_proportion_to_the_angle(angle):
    """The share of different bits is angle / pi, within four standard deviations."""
    bits = 1024
    generator = torch.Generator().manual_seed(0)
    basis = torch.linalg.qr(torch.randn(20, 2, generator=generator)).Q.T
    pair = torch.stack([basis[0], math.cos(angle) * basis[0] + math.sin(angle) * basis[1]])
    # The mean of the features is the origin of the angles.
    features = torch.cat([pair, -pair]) + 7.0
    logits = torch.cat([fitted("lsh", features, bits, seed=s)(features) for s in range(4)], dim=1)
    differ = ((logits[0] > 0) != (logits[1] > 0)).float().mean()
    p = angle / math.pi
    assert float(differ) == pytest.approx(p, abs=4 * math.sqrt(p * (1 - p) / (4 * bits)))
