"""MDSH against a slow reading of its equation; its centres keep their promised distance."""

import math

import pytest
import torch

from fisherhash.methods import Batch, Progress, _pairs, create
from fisherhash.methods._codebooks import minimum_distance, promised_distance


class Train:
    def __init__(self, outputs, labels):
        self._outputs, self.labels = outputs, labels

    def outputs(self):
        return self._outputs

    def features(self):
        return self._outputs


def cosine(a, b):
    return float(a @ b / (a.norm() * b.norm()))


def test_loss_is_the_equation():
    torch.manual_seed(0)
    method = create("mdsh", bits=8, classes=3, options={"pairs": 0.5, "quantization": 0.01})
    labels = torch.eye(3)[torch.tensor([0, 1, 2, 0, 1])]
    memory = torch.randn(5, 8)
    method.start(Train(memory, labels))
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


@pytest.mark.parametrize("most", [1, 10, 50])
def test_parts_of_the_pairs_change_nothing(most, monkeypatch):
    generator = torch.Generator().manual_seed(0)
    memory, now = (torch.randn(n, 8, generator=generator) for n in (20, 3))
    labels = torch.eye(3)[torch.arange(20) % 3]
    index, found = torch.tensor([0, 7, 18]), []
    for limit in (_pairs.MOST_PAIRS, most):
        monkeypatch.setattr(_pairs, "MOST_PAIRS", limit)
        method = create("mdsh", bits=8, classes=3)
        method.start(Train(memory, labels))
        method.on_epoch_start(Progress(50, 100, 0, 10))
        outputs = now.clone().requires_grad_()
        terms = method(outputs, Batch(labels[index], index, torch.zeros(3, 2)))
        terms["loss"].backward()
        found.append([*(term.detach() for term in terms.values()), outputs.grad])
    torch.testing.assert_close(found[1], found[0])


@pytest.mark.parametrize(("classes", "bits"), [(10, 12), (100, 16), (100, 48)])
def test_centers_keep_the_promised_distance(classes, bits):
    centers = create("mdsh", bits=bits, classes=classes).centers.numpy().astype("int8")
    assert minimum_distance(centers) >= promised_distance(classes, bits)


def test_a_confident_wrong_class_stays_finite():
    method = create("mdsh", bits=64, classes=2)
    labels = torch.eye(2)
    method.start(Train(torch.randn(2, 64), labels))
    u = (1e4 * method.centers.flip(0)).requires_grad_()
    loss = method(u, Batch(labels, torch.arange(2), torch.zeros(2, 2)))["loss"]
    loss.backward()
    assert torch.isfinite(loss)
    assert torch.isfinite(u.grad).all()
