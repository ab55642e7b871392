"""Methods with learned centres or several views: slow readings of their equations, authors' values.

The values come from runs of public code, outside this project, on the same numbers:

* ``hyp2``: github.com/JerryXu0129/HyP2-Loss at e9c1c24, model.py, with our threshold;
* ``dhd``: github.com/youngkyunJang/Deep-Hash-Distillation at 0cc9cee, loss.py;
* ``cibhash``: github.com/zexuanqiu/CIBHash at 4c896ee, model/CIBHash.py;
* ``mdsh``: github.com/Wangld5/Center-Hashing at 5c28ab5, loss/ourLoss.py;
* ``crovca``: github.com/ilyassmoummad/cross-view-code-alignment at d025fc9, loss.py.

No code of the authors of CRH could be had.
"""

import itertools
import math

import numpy as np
import pytest
import torch

from fisherhash.methods import Batch, Progress, create
from fisherhash.methods._codebooks import far_apart, minimum_distance, promised_distance

SEVERAL = torch.tensor([[1.0, 0, 0], [0, 1, 1], [1, 1, 1], [0, 0, 1]])


def wave(rows, columns, shift):
    """Numbers between -1.5 and 1.5 that need no random generator."""
    steps = 0.7 * torch.arange(rows * columns, dtype=torch.float32) + shift
    return 1.5 * torch.sin(steps).view(rows, columns)


def batch_of(labels, *, index=None, views=1):
    labels = torch.as_tensor(labels, dtype=torch.float32)
    index = torch.arange(len(labels) // views).repeat(views) if index is None else index
    return Batch(labels, index, torch.zeros(len(labels), 1), views)


class Fixed:
    """A training set whose outputs are given."""

    def __init__(self, outputs, labels):
        self._outputs, self.labels = outputs, labels

    def outputs(self):
        return self._outputs

    def features(self):
        return self._outputs


def cosine(a, b):
    dot = sum(float(p) * float(q) for p, q in zip(a, b, strict=True))
    return dot / math.sqrt(sum(float(p) ** 2 for p in a) * sum(float(q) ** 2 for q in b))


def test_hyp2_loss_is_the_equation():
    torch.manual_seed(0)
    method = create("hyp2", bits=6, classes=4, options={"pairs": 0.7})
    labels = [[1, 1, 0, 0], [0, 0, 1, 1], [1, 0, 0, 0], [0, 1, 1, 0], [0, 0, 0, 0]]
    u = torch.randn(5, 6)
    z = 1 - 2 * promised_distance(4, 6) / 6
    pull, push = [], []
    for i, c in itertools.product(range(5), range(4)):
        value = cosine(u[i], method.proxies[c].detach())
        (pull if labels[i][c] else push).append(1 - value if labels[i][c] else max(0, value - z))
    pairs = [max(0, cosine(u[0], u[1]) - z)] * 2  # both orders; 0 and 3, 1 and 3 share a label
    expected = sum(pull) / len(pull) + sum(push) / len(push) + 0.7 * sum(pairs) / 2
    assert method(u, batch_of(labels))["loss"].item() == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("classes", [10, 21, 80, 100])
@pytest.mark.parametrize("bits", [12, 16, 24, 32, 48, 64])
def test_hyp2_code_books_reach_the_promised_distance(classes, bits):
    found = minimum_distance(far_apart(classes, bits).numpy().astype("int8"))
    assert found >= promised_distance(classes, bits)


def test_mdsh_loss_is_the_equation():
    torch.manual_seed(0)
    method = create("mdsh", bits=8, classes=3, options={"pairs": 0.5, "quantization": 0.01})
    labels = torch.eye(3)[torch.tensor([0, 1, 2, 0, 1])]
    memory = torch.randn(5, 8)
    method.start(Fixed(memory, labels))
    index = torch.tensor([0, 1, 3])
    u = torch.randn(3, 8)
    batch = Batch(labels[index], index, torch.zeros(3, 2))
    method.on_epoch_start(Progress(0, 100, 0, 10))
    early = method(u, batch)
    method.on_epoch_start(Progress(50, 100, 0, 10))
    terms = method(u, batch)
    center = pair = count = quantization = 0.0
    for row, i in enumerate(index.tolist()):
        scores = [math.sqrt(8) * cosine(u[row], method.centers[c]) for c in range(3)]
        total = sum(math.exp(s) for s in scores)
        for c in range(3):
            p = math.exp(scores[c]) / total
            center -= math.log(p) if labels[i, c] else math.log(1 - p)
        for j in range(5):
            if j != i and labels[i] @ labels[j]:
                pair += math.log(1 + math.exp((1 - cosine(u[row], memory[j])) / 2))
                count += 1
        quantization += float((u[row].abs() - 1).square().sum())
    assert terms["center"].item() == pytest.approx(center / 3, rel=1e-4)
    assert terms["pair"].item() == pytest.approx(pair / count, rel=1e-4)
    expected = center / 3 + 0.5 * pair / count + 0.01 * quantization / 3
    assert terms["loss"].item() == pytest.approx(expected, rel=1e-4)
    assert early["loss"].item() == pytest.approx(center / 3 + 0.01 * quantization / 3, rel=1e-4)


DHD_LABELS = [[1, 0, 0], [0, 1, 1], [0, 0, 1]]


DHD_OPTIONS = {"temperature": 0.3, "distillation": 0.7, "quantization": 0.2, "width": 0.6}


def dhd_two_views(bits=5):
    torch.manual_seed(0)
    method = create("dhd", bits=bits, classes=3, options=DHD_OPTIONS)
    labels = torch.tensor(DHD_LABELS * 2).float()
    batch = Batch(labels, torch.arange(3).repeat(2), torch.zeros(6, 2), 2)
    return method, torch.randn(6, bits), batch


def dhd_entropy(g, t):
    return -math.log(g) if t else -math.log(1 - g)


def test_dhd_loss_is_the_equation():
    method, outputs, batch = dhd_two_views()
    h = [[math.tanh(x) for x in row] for row in outputs.tolist()]
    proxies = method.proxies.tolist()
    proxy = distillation = quantization = 0.0
    for i, (weak, strong) in enumerate(zip(h[:3], h[3:], strict=True)):
        scores = [math.exp(cosine(weak, p) / 0.3) for p in proxies]
        own = [math.log(scores[c] / sum(scores)) for c in range(3) if DHD_LABELS[i][c]]
        proxy -= sum(own) / len(own) / 3
        distillation += (1 - cosine(strong, weak)) / 3
        for x in weak:
            upper = math.exp(-((x - 1) ** 2) / (2 * 0.6**2))
            lower = math.exp(-((x + 1) ** 2) / (2 * 0.6**2))
            quantization += (dhd_entropy(upper, x > 0) + dhd_entropy(lower, x <= 0)) / 15
    terms = method(outputs, batch)
    assert terms["proxy"].item() == pytest.approx(proxy, rel=1e-5)
    assert terms["distillation"].item() == pytest.approx(distillation, rel=1e-5)
    assert terms["quantization"].item() == pytest.approx(quantization, rel=1e-5)
    expected = proxy + 0.7 * distillation + 0.2 * quantization
    assert terms["loss"].item() == pytest.approx(expected, rel=1e-5)


def test_dhd_the_strong_view_learns_from_the_weak_one_alone():
    """And the weak one learns nothing from the strong one."""
    method, outputs, batch = dhd_two_views()
    given = outputs.clone().requires_grad_()
    terms = method(given, batch)
    (terms["loss"] - 0.7 * terms["distillation"]).backward(retain_graph=True)
    assert not given.grad[3:].any()
    assert given.grad[:3].any()
    given.grad = None
    terms["distillation"].backward()
    assert given.grad[3:].any()
    assert not given.grad[:3].any()


def cibhash_two_views(images, bits, seed=0):
    generator = torch.Generator().manual_seed(seed)
    outputs = torch.randn(2 * images, bits, generator=generator)
    index = torch.arange(images).repeat(2)
    return outputs, Batch(torch.empty(2 * images, 0), index, torch.zeros(2 * images, 3), 2)


def cibhash_sigmoid(x):
    return 1 / (1 + math.exp(-x))


def test_cibhash_loss_is_the_equation():
    n, bits, tau, beta = 4, 6, 0.4, 0.05
    outputs, batch = cibhash_two_views(n, bits)
    signs = [[1 if x > 0 else -1 for x in row] for row in outputs.tolist()]
    p = [[cibhash_sigmoid(x) for x in row] for row in outputs.tolist()]

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


CROVCA_LABELS = [[1, 0, 0], [0, 1, 1], [0, 0, 1], [0, 0, 0]]


def crovca_two_views(labels, bits=5):
    outputs = torch.randn(8, bits, generator=torch.Generator().manual_seed(1))
    rows = torch.tensor(labels * 2).float().reshape(8, -1)
    return outputs, Batch(rows, torch.arange(4).repeat(2), torch.zeros(8, 2), 2)


CROVCA_SCALE = 10.0


def crovca_expected_rate(outputs, eps):
    n, bits = outputs.shape
    rows = outputs / np.linalg.norm(outputs, axis=1, keepdims=True)
    value = np.linalg.slogdet(np.eye(bits) + bits / (n * eps) * rows.T @ rows)[1]
    return -value / 2 * (bits + n) / (bits * n)


def crovca_expected_loss(u, targets, diversity, eps):
    losses = []
    for row, wanted in zip(u, targets, strict=True):
        for x, c in zip(row, wanted, strict=True):
            p = 1 / (1 + math.exp(-x))
            losses.append(-math.log(p) if c else -math.log(1 - p))
    rates = [crovca_expected_rate(half, eps) for half in (u[:4], u[4:])]
    return CROVCA_SCALE * (sum(losses) / len(losses) + diversity * sum(rates) / 2)


def test_crovca_without_labels_the_target_is_the_other_view():
    outputs, batch = crovca_two_views([[], [], [], []])
    u = outputs.double().numpy()
    method = create("crovca", bits=5, classes=0, options={"diversity": 0.4, "precision": 0.1})
    expected = crovca_expected_loss(u, np.roll(u, 4, axis=0) > 0, 0.4, 0.1)
    assert method(outputs, batch)["loss"].item() == pytest.approx(expected, rel=1e-4)
    # Labels that are not used change nothing.
    options = {"diversity": 0.4, "precision": 0.1, "use_labels": False}
    ignoring = create("crovca", bits=5, classes=3, options=options)
    loss = ignoring(outputs, crovca_two_views(CROVCA_LABELS)[1])["loss"]
    assert loss.item() == pytest.approx(expected, rel=1e-4)


def test_crovca_with_labels_the_target_is_the_mean_of_the_class_means():
    outputs, batch = crovca_two_views(CROVCA_LABELS)
    u = outputs.double().numpy()
    means = {
        c: np.mean([u[i] for i in range(8) if CROVCA_LABELS[i % 4][c]], axis=0) for c in range(3)
    }
    targets = []
    for i in range(8):
        own = [means[c] for c in range(3) if CROVCA_LABELS[i % 4][c]]
        targets.append((np.mean(own, axis=0) if own else u[(i + 4) % 8]) > 0)
    method = create("crovca", bits=5, classes=3)
    expected = crovca_expected_loss(u, targets, 0.1, 0.05)
    assert method(outputs, batch)["loss"].item() == pytest.approx(expected, rel=1e-4)


def test_hyp2_of_the_authors():
    method = create("hyp2", bits=6, classes=4)
    method.proxies.data = wave(4, 6, 1.1)
    labels = [[1.0, 1, 0, 0], [0, 0, 1, 1], [1, 0, 0, 0], [0, 1, 1, 0], [0, 0, 0, 1]]
    u = wave(5, 6, 0.3).requires_grad_()
    loss = method.loss(u, batch_of(torch.tensor(labels)))["loss"]
    loss.backward()
    assert float(loss) == pytest.approx(1.5898399, rel=1e-6)
    assert float(u.grad.abs().sum()) == pytest.approx(0.5281562, rel=1e-5)


def test_dhd_of_the_authors():
    method = create("dhd", bits=6, classes=3)
    method.proxies.data = wave(3, 6, 1.1)
    views = torch.cat([wave(4, 6, 0.3), wave(4, 6, 2.0)])
    terms = method.loss(views, batch_of(SEVERAL.repeat(2, 1), views=2))
    expected = {"proxy": 3.2338541, "distillation": 1.0574429, "quantization": 0.4171520}
    assert {name: float(terms[name]) for name in expected} == pytest.approx(expected, rel=1e-5)


def test_cibhash_of_the_authors():
    """Ours is the authors' loss times the number of bits."""
    u = wave(8, 6, 0.3).requires_grad_()
    terms = create("cibhash", bits=6, classes=0).loss(u, batch_of(torch.empty(8, 0), views=2))
    terms["loss"].backward()
    assert float(terms["contrast"]) == pytest.approx(4.0282979, rel=1e-6)
    assert float(terms["agreement"]) == pytest.approx(2.2338934, rel=1e-6)
    assert float(u.grad.abs().sum()) == pytest.approx(6 * 1.2861239, rel=1e-5)


def test_mdsh_of_the_authors():
    """Theirs is a mean over classes and bits too, and an image is similar to itself there."""
    method = create("mdsh", bits=8, classes=3)
    labels = torch.eye(3)[[0, 1, 2, 0, 1]]
    method.start(Fixed(wave(5, 8, 2.0), labels))
    method.centers.copy_(torch.where(wave(3, 8, 1.1) > 0, 1.0, -1.0))
    method.on_epoch_start(Progress(50, 100, 0, 10))
    index = torch.tensor([0, 1, 3])
    terms = method.loss(wave(3, 8, 0.3), batch_of(labels[index], index=index))
    assert float(terms["center"]) == pytest.approx(3 * 1.1297179, rel=1e-5)
    assert float(terms["pair"]) == pytest.approx(0.9100786, rel=1e-6)
    assert float(terms["quantization"]) == pytest.approx(8 * 0.2345554, rel=1e-6)


def test_crovca_of_the_authors():
    """Their regulariser, over two views; the cross-entropy is torch's, here and there."""
    u = wave(8, 6, 0.3).requires_grad_()
    terms = create("crovca", bits=6, classes=0).loss(u, batch_of(torch.empty(8, 0), views=2))
    terms["coding_rate"].backward()
    assert float(terms["coding_rate"]) == pytest.approx(1.6938379, rel=1e-5)
    assert float(u.grad.abs().sum()) == pytest.approx(0.1152747, rel=1e-4)
