"""ITQ against its own objective, LSH against its probability."""

import itertools
import math

import pytest
import torch

from fisherhash import methods


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
