"""MDSH against a slow reading of its equation; its centres keep their promised distance."""

import math

import pytest
import torch

from fisherhash.methods import Batch, Progress, create


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
