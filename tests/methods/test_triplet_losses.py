"""Methods that learn from triplets: printed objectives, triplet by triplet.

There are no frozen values: the authors' code is MATLAB on MatConvNet (DTSH), a layer of
cuda-convnet (DSRH), or not public (NINH, DRSCH).
"""

import itertools
import math

import pytest
import torch

from fisherhash.methods import Batch, create
from fisherhash.methods.dsrh import DSRH
from fisherhash.methods.dtsh import DTSH
from fisherhash.methods.ninh import NINH
from fisherhash.model.heads import SlicedHead


def batch_of(labels):
    labels = torch.as_tensor(labels, dtype=torch.float32)
    return Batch(labels, torch.arange(len(labels)), torch.empty(len(labels), 1))


def dtsh_toy(images=9, bits=5, classes=3, seed=0):
    outputs = torch.randn(images, bits, generator=torch.Generator().manual_seed(seed))
    labels = torch.eye(classes)[torch.arange(images) % classes]
    return outputs, labels


def dtsh_triplets(labels):
    similar = (labels @ labels.T > 0).tolist()
    images = range(len(labels))
    return [
        (q, p, n)
        for q, p, n in itertools.product(images, repeat=3)
        if p != q and n != q and similar[q][p] and not similar[q][n]
    ]


@pytest.mark.parametrize("several", [False, True])
@pytest.mark.parametrize("margin", [0.0, 0.5])
def test_dtsh_loss_is_the_printed_objective(several, margin):
    outputs, labels = dtsh_toy()
    if several:
        labels[0, 1] = labels[4, 2] = 1
    u = outputs.tolist()

    def theta(i, j):
        return 0.5 * sum(a * b for a, b in zip(u[i], u[j], strict=True))

    alpha = margin * 5
    likelihood = [
        -math.log(1 / (1 + math.exp(-(theta(q, p) - theta(q, n) - alpha))))
        for q, p, n in dtsh_triplets(labels)
    ]
    error = sum(((1 if x > 0 else -1) - x) ** 2 for row in u for x in row) / len(u)
    method = DTSH(bits=5, classes=3, margin=margin, quantization=0.3)
    terms = method.loss(outputs, batch_of(labels))
    expected = sum(likelihood) / len(likelihood)
    assert float(terms["triplets"]) == pytest.approx(expected, rel=1e-5)
    assert float(terms["quantization"]) == pytest.approx(error, rel=1e-5)
    assert float(terms["loss"]) == pytest.approx(expected + 0.3 * error, rel=1e-5)


def ninh_loop_threshold(u, eps):
    s = 1 / (1 + math.exp(-u))
    return 0.0 if s < 0.5 - eps else 1.0 if s > 0.5 + eps else s


@pytest.mark.parametrize("eps", [0.1, 0.4, 0.5])
@pytest.mark.parametrize("several", [False, True])
def test_ninh_loss_is_the_printed_hinge(eps, several):
    outputs = 2 * torch.randn(8, 6, generator=torch.Generator().manual_seed(1))
    labels = torch.eye(3)[torch.arange(8) % 3]
    if several:
        labels[0, 1] = labels[5, 0] = 1
    f = [[ninh_loop_threshold(u, eps) for u in row] for row in outputs.tolist()]

    def distance(i, j):
        return sum((a - b) ** 2 for a, b in zip(f[i], f[j], strict=True))

    hinges = []
    for q, p, n in itertools.product(range(8), repeat=3):
        if q not in (p, n) and labels[q] @ labels[p] > 0 and labels[q] @ labels[n] == 0:
            hinges.append(max(0.0, 1 + distance(q, p) - distance(q, n)))
    method = NINH(bits=6, classes=3, threshold=eps)
    terms = method.loss(outputs, batch_of(labels))
    assert float(terms["triplets"]) == pytest.approx(sum(hinges) / len(hinges), rel=1e-4)
    assert float(terms["loss"]) == pytest.approx(10 * sum(hinges) / len(hinges), rel=1e-4)


def test_ninh_the_threshold_piece_by_piece():
    method = NINH(bits=5, classes=2, threshold=0.2)
    edge = math.log(0.7 / 0.3)
    u = torch.tensor([[-2.0, -edge + 1e-3, 0.0, edge - 1e-3, 2.0]], requires_grad=True)
    f = method.relaxed(u)
    expected = [0.0, 0.3, 0.5, 0.7, 1.0]
    assert f.detach()[0].tolist() == pytest.approx(expected, abs=1e-3)
    f.sum().backward()
    assert (u.grad[0] > 0).tolist() == [False, True, True, True, False]


def test_ninh_a_code_is_f_above_one_half():
    method = NINH(bits=7, classes=2)
    u = torch.randn(50, 7)
    assert torch.equal(method.relaxed(u) > 0.5, u > 0)


def test_ninh_the_head_is_divided():
    head = NINH(bits=64, classes=10).head(16)
    assert isinstance(head, SlicedHead)
    assert head.hidden.out_features == 3200
    assert NINH(bits=8, classes=2, width=7).head(16).hidden.out_features == 56


def dsrh_several(images=9, classes=5, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return (torch.rand(images, classes, generator=generator) < 0.5).float()


def dsrh_loop_ranking(outputs, labels, margin):
    """The printed sums: weighted hinges and their weights."""
    h = [[math.tanh(u) for u in row] for row in outputs.tolist()]
    bits, images = outputs.shape[1], len(h)
    total = weights = 0.0
    for q in range(images):
        others = [i for i in range(images) if i != q]
        r = {i: int(labels[q] @ labels[i]) for i in others}
        d = {i: (bits - sum(a * b for a, b in zip(h[q], h[i], strict=True))) / 2 for i in others}
        ideal = sum(
            (2**grade - 1) / math.log2(1 + k)
            for k, grade in enumerate(sorted(r.values(), reverse=True), 1)
        )
        for i, j in itertools.product(others, repeat=2):
            if r[i] > r[j]:
                weight = (2 ** r[i] - 2 ** r[j]) / ideal
                total += weight * max(0.0, margin * bits + d[i] - d[j])
                weights += weight
    return total / weights


@pytest.mark.parametrize("margin", [0.0, 0.25, 1.0])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_dsrh_loss_is_the_printed_ranking(margin, seed):
    outputs = torch.randn(9, 6, generator=torch.Generator().manual_seed(seed))
    labels = dsrh_several(seed=seed)
    terms = DSRH(bits=6, classes=5, margin=margin, balance=0.7).loss(outputs, batch_of(labels))
    ranking = dsrh_loop_ranking(outputs, labels, margin)
    balance = sum(float(torch.tanh(outputs[:, k]).mean()) ** 2 for k in range(6)) / 2
    assert float(terms["ranking"]) == pytest.approx(ranking, rel=1e-4)
    assert float(terms["balance"]) == pytest.approx(balance, rel=1e-4)
    assert float(terms["loss"]) == pytest.approx(ranking + 0.7 * balance, rel=1e-4)


def test_dsrh_one_label_an_image_is_a_plain_triplet_hinge():
    """Every class has three images, so every query's weights are the same number."""
    outputs = torch.randn(9, 6, generator=torch.Generator().manual_seed(3))
    labels = torch.eye(3)[torch.arange(9) % 3]
    h = torch.tanh(outputs)
    distances = (6 - h @ h.T) / 2
    hinges = [
        max(0.0, 1.5 + float(distances[q, i] - distances[q, j]))
        for q, i, j in itertools.product(range(9), repeat=3)
        if i != q and i % 3 == q % 3 and j % 3 != q % 3
    ]
    terms = DSRH(bits=6, classes=3).loss(outputs, batch_of(labels))
    assert float(terms["ranking"]) == pytest.approx(sum(hinges) / len(hinges), rel=1e-4)


def test_drsch_loss_is_the_equation():
    torch.manual_seed(0)
    method = create("drsch", bits=6, classes=3, options={"margin": 0.3, "regularity": 0.2})
    with torch.no_grad():
        method.weights.copy_(torch.tensor([1.0, 0.5, 2.0, 1.0, 0.1, 1.5]))
    labels = torch.eye(3)[torch.tensor([0, 0, 1, 1, 2])]
    u = torch.randn(5, 6)
    h = u.tanh()
    weight = method.weights.detach().square()
    weight = weight / weight.mean()

    def distance(i, j, own):
        return float((own * (h[i] - h[j]).square()).sum() / 4)

    hinge = []
    for q, i, j in itertools.permutations(range(5), 3):
        if labels[q] @ labels[i] and not labels[q] @ labels[j]:
            gap = distance(q, i, weight) - distance(q, j, weight)
            hinge.append(max(0.0, 0.3 * 6 + gap))
    near = [
        distance(i, j, torch.ones(6))
        for i, j in itertools.permutations(range(5), 2)
        if labels[i] @ labels[j]
    ]
    expected = sum(hinge) / len(hinge) + 0.2 * sum(near) / len(near)
    batch = Batch(labels, torch.arange(5), torch.zeros(5, 2))
    assert method(u, batch)["loss"].item() == pytest.approx(expected, rel=1e-4)


def test_drsch_weights_keep_the_margin_s_meaning():
    """Only the proportions of the weights matter."""
    method = create("drsch", bits=6, classes=3)
    labels = torch.eye(3)[torch.tensor([0, 0, 1, 1, 2])]
    batch = Batch(labels, torch.arange(5), torch.zeros(5, 2))
    u = torch.randn(5, 6)
    before = method(u, batch)["loss"].item()
    with torch.no_grad():
        method.weights.mul_(7.0)
    assert method(u, batch)["loss"].item() == pytest.approx(before, rel=1e-5)
