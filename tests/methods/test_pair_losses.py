"""Methods that learn from pairs: printed objectives by loops, and values of other code.

A value that other code returned is frozen; its test says which code, and how its scale differs.
"""

import itertools
import math

import numpy as np
import pytest
import torch

from fisherhash.errors import UsageError
from fisherhash.methods import Batch, Progress, create
from fisherhash.methods.dch import DCH
from fisherhash.methods.dhn import DHN
from fisherhash.methods.dpsh import DPSH
from fisherhash.methods.dsh import DSH
from fisherhash.methods.hashnet import HashNet
from fisherhash.methods.mihash import MIHash


def wave(rows, columns, shift):
    """Numbers between -1.5 and 1.5 that need no random generator."""
    steps = 0.7 * torch.arange(rows * columns, dtype=torch.float32) + shift
    return 1.5 * torch.sin(steps).view(rows, columns)


def batch_of(labels):
    labels = torch.as_tensor(labels, dtype=torch.float32)
    return Batch(labels, torch.arange(len(labels)), torch.empty(len(labels), 1))


def losses(method, outputs, labels):
    return method.loss(outputs, batch_of(labels))


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


def dpsh_toy(images=12, bits=6, classes=3):
    outputs = torch.randn(images, bits, generator=torch.Generator().manual_seed(0))
    labels = torch.eye(classes)[torch.arange(images) % classes]
    labels[0, 1] = 1  # an image with two labels
    return outputs, labels


def dpsh_losses(method, outputs, labels, index):
    method.start(Fixed(outputs, labels))
    index = torch.tensor(index)
    return method.loss(outputs[index], Batch(labels[index], index, torch.empty(len(index), 1)))


def test_dpsh_loss_is_the_printed_objective():
    outputs, labels = dpsh_toy()
    index = [0, 3, 4, 11]
    pair, quantization = [], 0.0
    for i, j in itertools.product(index, range(12)):
        if i != j:
            theta = (
                sum(float(a) * float(b) for a, b in zip(outputs[i], outputs[j], strict=True)) / 2
            )
            s = float(any(a and b for a, b in zip(labels[i], labels[j], strict=True)))
            pair.append(math.log(1 + math.exp(theta)) - s * theta)
    for i, k in itertools.product(index, range(6)):
        u = float(outputs[i, k])
        quantization += ((1.0 if u > 0 else -1.0) - u) ** 2 / len(index)
    method = DPSH(bits=6, classes=3, quantization=0.3, loss_scale=2.0)
    terms = dpsh_losses(method, outputs, labels, index)
    assert float(terms["pair"]) == pytest.approx(sum(pair) / len(pair), rel=1e-5)
    assert float(terms["quantization"]) == pytest.approx(quantization, rel=1e-5)
    expected = 2.0 * (sum(pair) / len(pair) + 0.3 * quantization)
    assert float(terms["loss"]) == pytest.approx(expected, rel=1e-5)


def test_dpsh_the_authors_value():
    """Frozen from jiangqy/DPSH-pytorch (commit 0423181), DPSH_CIFAR_10.py, Totloss(U, sgn U, S, …).

    It sums over all pairs, self pairs among them, and gave 24.78256607 for the likelihood and
    17.52290344 for the quantisation of these outputs. Ours are means, without self pairs: times the
    number of pairs plus the self pairs' cost, and times the number of images, they must agree.
    """
    outputs = torch.from_numpy(np.random.default_rng(0).normal(size=(6, 8)).astype(np.float32))
    labels = torch.eye(3)[torch.tensor([0, 0, 1, 1, 2, 2])]
    terms = dpsh_losses(DPSH(bits=8, classes=3), outputs, labels, list(range(6)))
    own = 0.5 * outputs.square().sum(1)
    own_cost = float((torch.log1p(own.exp()) - own).sum())
    assert float(terms["pair"]) * 30 + own_cost == pytest.approx(24.78256607, rel=1e-5)
    assert float(terms["quantization"]) * 6 == pytest.approx(17.52290344, rel=1e-5)


def dsh_toy():
    outputs = 1.2 * torch.randn(10, 6, generator=torch.Generator().manual_seed(0))
    labels = torch.eye(4)[torch.arange(10) % 4]
    labels[0, 1] = 1  # an image with two labels
    return outputs, labels


def test_dsh_loss_is_the_printed_objective():
    """Each unordered pair once, regulariser and all: the mean over pairs is the same."""
    outputs, labels = dsh_toy()
    values, hinged = [], 0
    for i in range(10):
        for j in range(i):
            a, b = outputs[i].tolist(), outputs[j].tolist()
            distance = sum((p - q) ** 2 for p, q in zip(a, b, strict=True))
            s = float((labels[i] * labels[j]).sum() > 0)
            value = 0.5 * s * distance + 0.5 * (1 - s) * max(2 * 6 - distance, 0.0)
            value += 0.3 * sum(abs(abs(p) - 1) for p in a + b)
            values.append(value)
            hinged += not s and distance > 12
    assert hinged  # the margin is tried on both of its sides
    got = losses(DSH(bits=6, classes=4, quantization=0.3), outputs, labels)["loss"]
    assert float(got) == pytest.approx(sum(values) / len(values), rel=1e-5)


def test_dsh_the_value_of_a_port():
    """Frozen from swuxyj/DeepHash-pytorch (commit ab14068), DSH.py, DSHLoss with alpha 0, one batch
    that is the whole bank: 2.63458251953125, a mean over 36 ordered pairs, of which the six self
    pairs cost 0. Ours is the mean over the other 30. With alpha 1 it is 3.160794734954834, where
    the regulariser is a mean over images and bits; ours sums over the 8 bits and over both images.
    The authors' own code is a layer of Caffe and could not be run here.
    """
    outputs = torch.from_numpy(np.random.default_rng(0).normal(size=(6, 8)).astype(np.float32))
    labels = torch.eye(3)[torch.tensor([0, 0, 1, 1, 2, 2])]
    terms = losses(DSH(bits=8, classes=3), outputs, labels)
    assert float(terms["pair"]) * 30 / 36 == pytest.approx(2.63458252, rel=1e-6)
    port = 3.160794735 - 2.63458252
    assert float(terms["quantization"]) / 16 == pytest.approx(port, rel=1e-5)


def dhn_toy(images=9, bits=5, classes=3):
    outputs = 1.5 * torch.randn(images, bits, generator=torch.Generator().manual_seed(0))
    labels = torch.eye(classes)[torch.arange(images) % classes]
    labels[0, 1] = 1  # an image with two labels
    return outputs, labels


@pytest.mark.parametrize("scale", [0.5, 1.0])
def test_dhn_loss_is_the_printed_objective(scale):
    outputs, labels = dhn_toy()
    z = [[math.tanh(float(u)) for u in row] for row in outputs]
    pair, prior = [], 0.0
    for i in range(9):
        for j in range(9):
            if i != j:
                product = scale * sum(a * b for a, b in zip(z[i], z[j], strict=True))
                s = float((labels[i] * labels[j]).sum() > 0)
                pair.append(math.log(1 + math.exp(product)) - s * product)
        prior += sum(math.log(math.cosh(abs(x) - 1)) for x in z[i]) / 9
    method = DHN(bits=5, classes=3, scale=scale, quantization=0.3, loss_scale=2.0)
    terms = losses(method, outputs, labels)
    assert float(terms["pair"]) == pytest.approx(sum(pair) / len(pair), rel=1e-5)
    assert float(terms["quantization"]) == pytest.approx(prior, rel=1e-5)
    expected = 2.0 * (sum(pair) / len(pair) + 0.3 * prior)
    assert float(terms["loss"]) == pytest.approx(expected, rel=1e-5)


def test_dhn_the_value_of_the_groups_code():
    """Frozen from thulab/DeepHash (commit 9907613), DeepHash/model/dhn/dhn.py, cross_entropy with
    alpha 0.5, on tanh of these outputs; TensorFlow 1 is not available here, so numpy's operations
    stood for TensorFlow's of the same names.

    One class, where its weights are 1: 0.6803499931649254, a mean over all 36 ordered pairs with
    the self pairs. Ours is the mean over the other 30.
    """
    outputs = torch.from_numpy(np.random.default_rng(0).normal(size=(6, 8)).astype(np.float32))
    terms = losses(DHN(bits=8, classes=1), outputs, torch.ones(6, 1))
    own = 0.5 * torch.tanh(outputs).square().sum(1)
    own_cost = float((torch.log1p(own.exp()) - own).sum())
    assert (float(terms["pair"]) * 30 + own_cost) / 36 == pytest.approx(0.68034999, rel=1e-6)


def dch_toy():
    outputs = torch.randn(9, 5, generator=torch.Generator().manual_seed(0))
    labels = torch.eye(3)[torch.arange(9) % 3]
    labels[0, 1] = 1  # an image with two labels
    return outputs, labels


def dch_loop_loss(outputs, labels, gamma, quantization):
    """The printed sums, divided by the pairs and by the images."""
    h = [[math.tanh(float(u)) for u in row] for row in outputs]
    K = len(h[0])
    pairs = [(i, j) for i in range(len(h)) for j in range(len(h)) if i != j]
    similar = {(i, j) for i, j in pairs if (labels[i] * labels[j]).sum() > 0}
    S, S1 = len(pairs), len(similar)
    total = 0.0
    for i, j in pairs:
        d = K / 2 * (1 - cosine(h[i], h[j]))
        s = float((i, j) in similar)
        w = S / S1 if s else S / (S - S1)
        total += w * (s * math.log(d / gamma) + math.log(1 + gamma / d)) / S
    for row in h:
        d = K / 2 * (1 - cosine([abs(x) for x in row], [1.0] * K))
        total += quantization * math.log(1 + d / gamma) / len(h)
    return total


@pytest.mark.parametrize("gamma", [2.0, 20.0])
def test_dch_loss_is_the_printed_objective(gamma):
    outputs, labels = dch_toy()
    method = DCH(bits=5, classes=3, gamma=gamma, quantization=0.7, loss_scale=2.0)
    got = float(losses(method, outputs, labels)["loss"])
    assert got == pytest.approx(2.0 * dch_loop_loss(outputs, labels, gamma, 0.7), rel=1e-5)


def test_dch_the_distance_of_codes_is_the_hamming_distance():
    """So two codes at distance d cost log(1 + d/gamma), and log(1 + gamma/d) if dissimilar."""
    codes = 30.0 * torch.tensor([[1.0, 1, 1, 1, 1, 1], [1, 1, 1, -1, -1, 1]])
    method = DCH(bits=6, classes=2, gamma=3.0)
    together = losses(method, codes, torch.tensor([[1.0, 0], [1, 0]]))
    apart = losses(method, codes, torch.eye(2))
    assert float(together["pair"]) == pytest.approx(math.log(1 + 2 / 3), rel=1e-5)
    assert float(apart["pair"]) == pytest.approx(math.log(1 + 3 / 2), rel=1e-5)
    assert float(apart["quantization"]) == pytest.approx(0.0, abs=1e-6)


def test_dch_the_authors_value():
    """Frozen from thulab/DeepHash (commit 9907613), DeepHash/model/dch/dch.py,
    cauchy_cross_entropy with gamma 20 and normed (the printed cosine distance, plus 1e-6), on tanh
    of these outputs; TensorFlow 1 is not available here, so numpy's operations stood for
    TensorFlow's of the same names. It leaves self pairs out and takes a mean, but weighs similar
    pairs only; in a batch of one class, and in one of six, its weights are 1, as ours are.
    """
    outputs = torch.from_numpy(np.random.default_rng(0).normal(size=(6, 8)).astype(np.float32))
    method = DCH(bits=8, classes=6)
    one_class = losses(method, outputs, torch.eye(6)[torch.zeros(6, dtype=torch.int64)])
    six = losses(method, outputs, torch.eye(6))
    assert float(one_class["pair"]) == pytest.approx(0.1814760332543966, rel=1e-5)
    assert float(six["pair"]) == pytest.approx(1.9315019459888647, rel=1e-5)


def hashnet_loop_loss(outputs, labels, alpha, beta):
    """(1/|S|) sum w_ij l_ij, every weight as printed."""
    h = [[math.tanh(beta * float(u)) for u in row] for row in outputs]
    sets = [{c for c in range(labels.shape[1]) if row[c]} for row in labels]
    pairs = [(i, j) for i in range(len(h)) for j in range(len(h)) if i != j]
    similar = [(i, j) for i, j in pairs if sets[i] & sets[j]]
    S, S1 = len(pairs), len(similar)
    total = 0.0
    for i, j in pairs:
        product = alpha * sum(a * b for a, b in zip(h[i], h[j], strict=True))
        if sets[i] & sets[j]:
            weight = len(sets[i] & sets[j]) / len(sets[i] | sets[j]) * S / S1
            total += weight * (math.log(1 + math.exp(product)) - product)
        else:
            total += S / (S - S1) * math.log(1 + math.exp(product))
    return total / S


@pytest.mark.parametrize("multilabel", [False, True])
@pytest.mark.parametrize("beta", [1.0, 3.0])
def test_hashnet_loss_is_the_printed_objective(multilabel, beta):
    outputs = torch.randn(9, 5, generator=torch.Generator().manual_seed(0))
    labels = torch.eye(4)[torch.arange(9) % 4]
    if multilabel:
        labels[:3] += torch.tensor([[0.0, 1, 0, 0], [0, 0, 1, 1], [1, 0, 0, 0]])
    method = HashNet(bits=5, classes=4, scale=4.0, loss_scale=2.0)
    method.sharpness.fill_(beta)
    got = float(losses(method, outputs, labels)["loss"])
    assert got == pytest.approx(2.0 * hashnet_loop_loss(outputs, labels, 4.0 / 5, beta), rel=1e-5)


def test_hashnet_beta_follows_the_released_schedule():
    """sqrt(1 + 0.005 t), t = 0, 200, …, 9800: fifty stages, if beta_end is that of t = 10,000."""
    method = HashNet(bits=4, classes=2, final_sharpness=math.sqrt(51))
    address = method.sharpness.data_ptr()
    for epoch in range(50):
        method.on_epoch_start(Progress(epoch, 50, epoch * 200, 10_000))
        expected = math.sqrt(1 + 0.005 * 200 * epoch)
        assert float(method.sharpness) == pytest.approx(expected, rel=1e-6)
    assert method.sharpness.data_ptr() == address  # a captured step keeps reading it
    assert "sharpness" in method.state_dict()


def test_hashnet_a_shrinking_beta_is_refused():
    with pytest.raises(UsageError, match="at least 1"):
        HashNet(bits=4, classes=2, final_sharpness=0.5)


def test_hashnet_the_authors_value():
    """Frozen from thuml/HashNet (commit 85387b8), pytorch/src/loss.py, pairwise_loss with
    sigmoid_param 10/8, on tanh of these outputs: one image against the others that are similar, and
    against those that are dissimilar, because the function pairs two batches. It returns means;
    each row has as many pairs as any other, so their means over the six rows, 0.909536878 and
    0.875525951, add up to the loss with both sides weighted.
    """
    outputs = torch.from_numpy(np.random.default_rng(0).normal(size=(6, 8)).astype(np.float32))
    labels = torch.eye(3)[torch.tensor([0, 0, 1, 1, 2, 2])]
    got = losses(HashNet(bits=8, classes=3, loss_scale=1.0), outputs, labels)["loss"]
    assert float(got) == pytest.approx(0.909536878 + 0.875525951, rel=1e-5)


def mihash_entropy(counts):
    total = sum(counts)
    return -sum(c / total * math.log2(c / total) for c in counts if c > 0)


def mihash_histogram(distances, K, bins):
    """Each distance shared between the two nearest of the centres 0, w, …, K."""
    w = K / bins
    counts = [0.0] * (bins + 1)
    for d in distances:
        for index in range(bins + 1):
            counts[index] += max(0.0, 1 - abs(d - index * w) / w)
    return counts


def mihash_loop_information(outputs, labels, bins, sharpness):
    """The mean over anchors of H(D) - p+ H(D|+) - p- H(D|-), in bits."""
    h = [[math.tanh(sharpness * float(u)) for u in row] for row in outputs]
    K = len(h[0])
    values = []
    for i in range(len(h)):
        near, far = [], []
        for j in range(len(h)):
            if i != j:
                d = (K - sum(a * b for a, b in zip(h[i], h[j], strict=True))) / 2
                (near if (labels[i] * labels[j]).sum() > 0 else far).append(d)
        if near and far:
            share = len(near) / (len(near) + len(far))
            values.append(
                mihash_entropy(mihash_histogram(near + far, K, bins))
                - share * mihash_entropy(mihash_histogram(near, K, bins))
                - (1 - share) * mihash_entropy(mihash_histogram(far, K, bins))
            )
    return sum(values) / len(values)


@pytest.mark.parametrize("bins", [1, 5, 16])
@pytest.mark.parametrize("multilabel", [False, True])
def test_mihash_loss_is_minus_the_mutual_information(bins, multilabel):
    outputs = torch.randn(11, 6, generator=torch.Generator().manual_seed(0))
    labels = torch.eye(4)[torch.arange(11) % 4]
    labels[10] = 0  # an anchor without a neighbour
    if multilabel:
        labels[:2] += torch.tensor([[0.0, 1, 0, 0], [0, 0, 1, 1]])
    method = MIHash(bits=6, classes=4, bins=bins, sharpness=1.5, loss_scale=2.0)
    expected = mihash_loop_information(outputs, labels, bins, 1.5)
    terms = losses(method, outputs, labels)
    assert float(terms["information"]) == pytest.approx(expected, rel=1e-4)
    assert float(terms["loss"]) == pytest.approx(-2 * expected, rel=1e-4)


def test_mihash_of_the_authors():
    """Frozen from fcakir/mihash (commit e6ba59e), mi_forward.m and mi_backward.m, in Octave 7.3.

    Theirs is a sum over anchors; 2 sigma(3 u) - 1 there is tanh(1.5 u) here.
    """
    options = {"bins": 5, "sharpness": 1.5, "loss_scale": 1.0}
    u = wave(9, 6, 0.3).requires_grad_()
    labels = torch.eye(3)[[0, 0, 1, 2, 1, 0, 2, 1, 2]]
    loss = create("mihash", bits=6, classes=3, options=options).loss(u, batch_of(labels))["loss"]
    loss.backward()
    assert float(loss) == pytest.approx(-0.1490270, rel=1e-5)
    assert float(u.grad.abs().sum()) == pytest.approx(0.3050706, rel=1e-4)
