"""CIBHash against a slow reading of its equation."""

import math

import pytest
import torch

from fisherhash.methods import Batch, create


def two_views(images, bits, seed=0):
    generator = torch.Generator().manual_seed(seed)
    outputs = torch.randn(2 * images, bits, generator=generator)
    index = torch.arange(images).repeat(2)
    return outputs, Batch(torch.empty(2 * images, 0), index, torch.zeros(2 * images, 3), 2)


def sigmoid(x):
    return 1 / (1 + math.exp(-x))


def test_loss_is_the_equation():
    n, bits, tau, beta = 4, 6, 0.4, 0.05
    outputs, batch = two_views(n, bits)
    signs = [[1 if x > 0 else -1 for x in row] for row in outputs.tolist()]
    p = [[sigmoid(x) for x in row] for row in outputs.tolist()]

    def similarity(i, j):
        return math.exp(sum(a * b for a, b in zip(signs[i], signs[j], strict=True)) / bits / tau)

    contrast = agreement = 0.0
    for i in range(2 * n):
        other = (i + n) % (2 * n)
        everyone = sum(similarity(i, j) for j in range(2 * n) if j != i)
        contrast -= math.log(similarity(i, other) / everyone) / (2 * n)
        for a, b in zip(p[i], p[other], strict=True):
            kl = a * math.log(a / b) + (1 - a) * math.log((1 - a) / (1 - b))
            agreement += kl / (2 * n)
    method = create(
        "cibhash", bits=bits, classes=0, options={"temperature": tau, "agreement": beta}
    )
    terms = method(outputs, batch)
    assert terms["contrast"].item() == pytest.approx(contrast, rel=1e-5)
    assert terms["agreement"].item() == pytest.approx(agreement, rel=1e-4)
    assert terms["loss"].item() == pytest.approx(bits * (contrast + beta * agreement), rel=1e-5)


def test_the_sign_passes_the_gradient_of_the_sigmoid():
    """The gradient is that of a loss of codes b, times p (1 - p)."""
    outputs, batch = two_views(5, 8)
    method = create("cibhash", bits=8, classes=0, options={"agreement": 0.0})
    given = outputs.clone().requires_grad_()
    method(given, batch)["contrast"].backward()
    codes = torch.where(outputs > 0, 1.0, -1.0).requires_grad_()
    cosines = torch.nn.functional.cosine_similarity(codes[:, None], codes[None], dim=2) / 0.3
    same = torch.eye(10, dtype=torch.bool)
    chances = cosines.masked_fill(same, -1e9).log_softmax(1)
    (-chances[torch.arange(10), torch.arange(10).roll(5)].mean()).backward()
    slope = outputs.sigmoid() * (1 - outputs.sigmoid())
    torch.testing.assert_close(given.grad, codes.grad * slope)


def test_the_other_view_is_a_constant_in_the_divergence():
    outputs, batch = two_views(1, 4)
    given = outputs.clone().requires_grad_()
    create("cibhash", bits=4, classes=0)(given, batch)["agreement"].backward()
    u, v = outputs
    p = u.sigmoid()
    torch.testing.assert_close(given.grad[0], p * (1 - p) * (u - v) / 2)
