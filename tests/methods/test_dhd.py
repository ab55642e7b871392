"""DHD against a slow reading of its equation."""

import math

import pytest
import torch

from fisherhash.methods import Batch, create

LABELS = [[1, 0, 0], [0, 1, 1], [0, 0, 1]]
OPTIONS = {"temperature": 0.3, "distillation": 0.7, "quantization": 0.2, "width": 0.6}


def two_views(bits=5):
    torch.manual_seed(0)
    method = create("dhd", bits=bits, classes=3, options=OPTIONS)
    labels = torch.tensor(LABELS * 2).float()
    batch = Batch(labels, torch.arange(3).repeat(2), torch.zeros(6, 2), 2)
    return method, torch.randn(6, bits), batch


def cosine(a, b):
    dot = sum(x * y for x, y in zip(a, b, strict=True))
    return dot / math.sqrt(sum(x * x for x in a) * sum(y * y for y in b))


def entropy(g, t):
    return -math.log(g) if t else -math.log(1 - g)


def test_loss_is_the_equation():
    method, outputs, batch = two_views()
    h = [[math.tanh(x) for x in row] for row in outputs.tolist()]
    proxies = method.proxies.tolist()
    proxy = distillation = quantization = 0.0
    for i, (weak, strong) in enumerate(zip(h[:3], h[3:], strict=True)):
        scores = [math.exp(cosine(weak, p) / 0.3) for p in proxies]
        own = [math.log(scores[c] / sum(scores)) for c in range(3) if LABELS[i][c]]
        proxy -= sum(own) / len(own) / 3
        distillation += (1 - cosine(strong, weak)) / 3
        for x in weak:
            upper = math.exp(-((x - 1) ** 2) / (2 * 0.6**2))
            lower = math.exp(-((x + 1) ** 2) / (2 * 0.6**2))
            quantization += (entropy(upper, x > 0) + entropy(lower, x <= 0)) / 15
    terms = method(outputs, batch)
    assert terms["proxy"].item() == pytest.approx(proxy, rel=1e-5)
    assert terms["distillation"].item() == pytest.approx(distillation, rel=1e-5)
    assert terms["quantization"].item() == pytest.approx(quantization, rel=1e-5)
    expected = proxy + 0.7 * distillation + 0.2 * quantization
    assert terms["loss"].item() == pytest.approx(expected, rel=1e-5)


def test_the_strong_view_learns_from_the_weak_one_alone():
    """And the weak one learns nothing from the strong one."""
    method, outputs, batch = two_views()
    given = outputs.clone().requires_grad_()
    terms = method(given, batch)
    (terms["loss"] - 0.7 * terms["distillation"]).backward(retain_graph=True)
    assert not given.grad[3:].any()
    assert given.grad[:3].any()
    given.grad = None
    terms["distillation"].backward()
    assert given.grad[3:].any()
    assert not given.grad[:3].any()
