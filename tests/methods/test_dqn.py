"""DQN: the printed objective, k-means that never gets worse, and the ranking behind evaluate.

No frozen value: the code of the authors' group (thulab/DeepHash) is for TensorFlow 1, which no
longer installs; the loops below follow the printed equations.
"""

import itertools
import math

import numpy as np
import pytest
import torch

from fisherhash.evaluation import metrics
from fisherhash.methods import Batch, Progress
from fisherhash.methods.dqn import DQN, refine
from fisherhash.model.head import word_numbers
from fisherhash.training.fitting import fit
from fisherhash.training.measuring import encode_split, measure
from fisherhash.training.settings import Settings


class Fixed:
    """A training set that is seen through a head."""

    def __init__(self, head, features, labels):
        self.head, self._features, self.labels = head, features, labels

    @torch.no_grad()
    def outputs(self):
        return self.head(self._features)

    def features(self):
        return self._features


def started(bits=6, images=40, width=10, several=False, **options):
    torch.manual_seed(0)
    features = torch.randn(images, 8)
    labels = torch.eye(3)[torch.arange(images) % 3]
    if several:
        labels[::4, 1] = 1
    method = DQN(bits=bits, classes=3, width=width, **options)
    head = method.head(8)
    head.start(features)
    train = Fixed(head, features, labels)
    method.start(train)
    return method, head, train


def batch_of(train, index):
    index = torch.as_tensor(list(index))
    return Batch(train.labels[index], index, train.features()[index])


@pytest.mark.parametrize("several", [False, True])
def test_loss_is_the_printed_objective(several):
    method, head, train = started(several=several, quantization=0.02, warm_up=0)
    index = list(range(12))
    z = train.outputs()[:12]
    rows = z.tolist()
    pairs = []
    for i, j in itertools.permutations(range(12), 2):
        cosine = sum(a * b for a, b in zip(rows[i], rows[j], strict=True))
        cosine /= math.dist(rows[i], [0] * 10) * math.dist(rows[j], [0] * 10)
        similar = float(train.labels[i] @ train.labels[j]) > 0
        pairs.append(((1.0 if similar else -1.0) - cosine) ** 2)
    error = 0.0
    books = head.codebooks.tolist()
    for row in rows:
        for m, book in enumerate(books):
            part = row[m * 10 // len(books) : (m + 1) * 10 // len(books)]
            error += min(math.dist(part, word) ** 2 for word in book) / 12
    terms = method.loss(z, batch_of(train, index))
    similarity = sum(pairs) / len(pairs)
    assert float(terms["similarity"]) == pytest.approx(similarity, rel=1e-4)
    assert float(terms["quantization"]) == pytest.approx(error, rel=1e-3)
    assert float(terms["loss"]) == pytest.approx(10 * (similarity + 0.02 * error), rel=1e-4)


def error_of(head, outputs):
    return float((outputs - head.reconstruct(head.assign(outputs))).square().sum())


def test_a_word_is_the_mean_of_the_outputs_that_choose_it():
    _, head, train = started(bits=3, images=200)
    outputs = train.outputs()
    refine(head, outputs, 50)
    chosen = head.assign(outputs)[:, 0]
    for word in range(8):
        mean = outputs[chosen == word].mean(0)
        torch.testing.assert_close(head.codebooks[0, word], mean, atol=1e-4, rtol=1e-4)


def test_quantisation_waits_for_the_warm_up_and_codebooks_follow_the_outputs():
    method, head, train = started(quantization=0.5, warm_up=2)
    strengths = []
    for epoch in range(4):
        method.on_epoch_start(Progress(epoch, 4, epoch, 4))
        strengths.append(float(method.strength))
    assert strengths == [0.0, 0.0, 0.5, 0.5]
    head.linear.weight.data.mul_(-2.0)
    outputs = train.outputs()
    stale = error_of(head, outputs)
    method.on_epoch_start(Progress(3, 4, 3, 4))
    assert error_of(head, outputs) < 0.9 * stale
    assert "strength" in method.state_dict()
    assert not any("codebooks" in key for key in method.state_dict())  # they are the head's


@pytest.fixture(scope="module")
def trained(photos):
    settings = Settings(epochs=3, batch_size=16, validation=0.2)
    return fit(
        photos, method="dqn", bits=13, backbone="tiny", settings=settings, device="cpu", out=None
    )


def test_evaluate_ranks_by_the_asymmetric_distance(trained, monkeypatch):
    """The same as a full matrix of distances to reconstructed items; and in small blocks, too."""
    collection, split, hasher = trained.collection, trained.split, trained.hasher
    found = trained.evaluate()
    assert "product" in found.ranking
    query = hasher.encode_collection(collection, split.query, queries=True)
    database = hasher.encode_collection(collection, split.database)
    words = zip(
        hasher.head.arrays["codebooks"], word_numbers(database.codes, hasher.bits), strict=True
    )
    items = np.hstack([book[own] for book, own in words]).astype(float)
    matrix = ((query.queries[:, None].astype(float) - items) ** 2).sum(2)
    labels = collection.labels
    expected = metrics([np.round(matrix, 4)], labels[split.query], labels[split.database])
    assert found.map == pytest.approx(expected.map, abs=1e-3)
    monkeypatch.setattr("fisherhash.model.head.DISTANCES_AT_ONCE", 7)
    assert trained.evaluate().map == pytest.approx(found.map, abs=1e-6)
    encoded = encode_split(hasher, collection, split, cached=False)
    assert measure(encoded, top=5).top == 5
    assert all(0 <= row["validation_map"] <= 1 for row in trained.history)
