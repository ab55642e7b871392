"""Asymmetric Deep Supervised Hashing: the printed sums, the V-step, the authors' values."""

import itertools
import math

import pytest
import torch

from fisherhash.methods import Batch
from fisherhash.methods.adsh import ADSH


class Fixed:
    """A training set whose outputs are given."""

    def __init__(self, outputs, labels):
        self._outputs, self.labels = outputs, labels

    def outputs(self):
        return self._outputs

    def features(self):
        return self._outputs


def wave(rows, columns, shift):
    """Numbers between -1.5 and 1.5 that need no random generator."""
    steps = 0.7 * torch.arange(rows * columns, dtype=torch.float32) + shift
    return 1.5 * torch.sin(steps).view(rows, columns)


def started(outputs, labels, **options):
    method = ADSH(bits=outputs.shape[1], classes=labels.shape[1], **options)
    method.start(Fixed(outputs, labels))
    return method


def toy(images=12, bits=4, classes=3, several=False, seed=0):
    outputs = torch.randn(images, bits, generator=torch.Generator().manual_seed(seed))
    labels = torch.eye(classes)[torch.arange(images) % classes]
    if several:
        labels[::3, 1] = 1
    return outputs, labels


def batch_of(labels, index):
    index = torch.as_tensor(index)
    return Batch(labels[index], index, torch.empty(len(index), 1))


def loop_objective(u, codes, labels, omega, gamma, ratio):
    """The printed sums over Omega and all images, pair by pair."""
    bits, total = codes.shape[1], 0.0
    for i, j in itertools.product(omega, range(len(codes))):
        similar = bool((labels[i] * labels[j]).sum() > 0)
        inner = sum(float(u[i, k]) * float(codes[j, k]) for k in range(bits))
        total += (inner - bits * (1.0 if similar else -ratio)) ** 2
    for i, k in itertools.product(omega, range(bits)):
        total += gamma * (float(codes[i, k]) - float(u[i, k])) ** 2
    return total


def loop_ratio(labels, omega):
    pairs = itertools.product(omega, range(len(labels)))
    similar = sum(bool((labels[i] * labels[j]).sum() > 0) for i, j in pairs)
    return min(1.0, similar / (len(omega) * len(labels) - similar))


@pytest.mark.parametrize("several", [False, True])
@pytest.mark.parametrize("gamma", [0.0, 200.0])
def test_loss_is_the_printed_sum_as_a_mean(several, gamma):
    outputs, labels = toy(several=several)
    method = started(outputs, labels, quantization=gamma)
    method.ratio.fill_(0.4)
    index = [0, 3, 4, 7, 11]
    terms = method.loss(outputs[index], batch_of(labels, index))
    expected = loop_objective(outputs.tanh(), method.codes, labels, index, gamma, 0.4)
    assert float(terms["loss"]) == pytest.approx(expected / (12 * 4 * 5), rel=1e-5)


def test_the_authors_loss_gives_the_same():
    """jiangqy/ADSH-AAAI2018 at 2e95574, ADSH_pytorch/utils/adsh_loss.py: ADSHLoss(200, 8, 6) on
    u = tanh(wave(6, 8, 0.3)), its first four rows the batch, V the signs of wave(6, 8, 0.5),
    classes 0 1 2 0 1 2, S from calc_sim of ADSH_CIFAR_10.py. It divides by N |batch|, ours by the
    8 bits, too.
    """
    labels = torch.eye(3)[[0, 1, 2, 0, 1, 2]]
    outputs = wave(6, 8, 0.3)
    method = started(outputs, labels)
    method.codes.copy_(torch.where(wave(6, 8, 0.5) > 0, 1.0, -1.0))
    method.ratio.fill_(0.5)
    loss = method.loss(outputs[:4], batch_of(labels, range(4)))["loss"]
    assert float(loss) == pytest.approx(100.1863021851 / 8, rel=1e-5)


def test_the_authors_v_step_gives_the_same():
    """The lines "learning binary codes" of adsh_algo in ADSH_CIFAR_10.py of the same repository,
    Omega all six images of the test above, gamma 2.
    """
    labels = torch.eye(3)[[0, 1, 2, 0, 1, 2]]
    method = started(wave(6, 8, 0.3), labels, quantization=2.0)
    method.codes.copy_(torch.where(wave(6, 8, 0.5) > 0, 1.0, -1.0))
    method.update_codes(torch.arange(6))
    assert float(method.ratio) == pytest.approx(0.5)
    found = ["".join("1" if bit > 0 else "0" for bit in row) for row in method.codes.tolist()]
    assert found == ["00010000", "00001000", "10000110", "11011010", "11101111", "10100110"]


@pytest.mark.parametrize("bits", [1, 2, 3, 4])
@pytest.mark.parametrize("gamma", [0.0, 5.0])
def test_the_v_step_against_brute_force(bits, gamma):
    """Each image's code is a problem of its own. The best code stays where it is; a converged code
    cannot be improved by one flip; and from all starts together the best is reached.
    """
    outputs, labels = toy(images=9, bits=bits, several=True, seed=2)
    omega = [0, 1, 4, 5, 8]
    method = started(outputs, labels, quantization=gamma, sweeps=50)
    ratio = loop_ratio(labels, omega)
    every = [torch.tensor(code) for code in itertools.product([-1.0, 1.0], repeat=bits)]

    def value(image, code):
        u, total = outputs.tanh(), 0.0
        for i in omega:
            similar = bool((labels[i] * labels[image]).sum() > 0)
            total += float(u[i] @ code - bits * (1.0 if similar else -ratio)) ** 2
        if image in omega:
            total += gamma * float((code - u[image]).square().sum())
        return total

    values = [[value(image, code) for code in every] for image in range(9)]
    best = torch.stack([every[row.index(min(row))] for row in values])
    method.codes.copy_(best)
    method.update_codes(torch.tensor(omega))
    torch.testing.assert_close(method.codes, best)
    reached = [math.inf] * 9
    for start in every:
        method.codes.copy_(start.expand(9, bits))
        method.update_codes(torch.tensor(omega))
        for image, code in enumerate(method.codes):
            found = value(image, code)
            reached[image] = min(reached[image], found)
            for k in range(bits):
                flipped = code.clone()
                flipped[k] *= -1
                assert value(image, flipped) >= found - 1e-4
    assert reached == pytest.approx([min(row) for row in values], abs=1e-4)
