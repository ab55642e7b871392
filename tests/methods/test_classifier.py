"""The trivial baseline: a classifier whose codes are its classes' codes."""

import math

import pytest
import torch

from fisherhash.methods import Batch
from fisherhash.methods._codebooks import far_apart
from fisherhash.methods.classifier import Classifier


def batch_of(labels):
    labels = torch.as_tensor(labels, dtype=torch.float32)
    return Batch(labels, torch.arange(len(labels)), torch.empty(len(labels), 1))


def clusters(images=200, classes=5, seed=0):
    generator = torch.Generator().manual_seed(seed)
    middles = 2.0 * torch.randn(classes, 8, generator=generator)
    numbers = torch.arange(images) % classes
    return middles[numbers] + torch.randn(images, 8, generator=generator), numbers


def test_loss_is_the_printed_equation():
    scores = torch.tensor([[0.5, -1.0, 2.0], [1.5, 0.3, 0.0], [0.0, 0.0, 0.0]])
    total = 0.0
    for row, label in zip(scores.tolist(), (0, 2, 1), strict=True):
        total += math.log(sum(math.exp(s) for s in row)) - row[label]
    loss = Classifier(bits=8, classes=3).loss(scores, batch_of(torch.eye(3)[[0, 2, 1]]))["loss"]
    assert float(loss) == pytest.approx(total / 3, rel=1e-6)


def test_a_code_is_the_code_of_the_likeliest_class():
    torch.manual_seed(0)
    method = Classifier(bits=12, classes=5, codebook_seed=3)
    head = method.head(8).eval()
    features, _ = clusters()
    logits = head.logits(features)
    assert logits.shape == (200, 12)
    codes = far_apart(5, 12, seed=3)
    for row, scores in zip(logits, head(features), strict=True):
        assert row.tolist() == codes[int(scores.argmax())].tolist()


def test_it_is_not_defined_for_several_labels():
    assert not Classifier.info.multilabel
