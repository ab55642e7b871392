"""The trivial baseline: a classifier whose codes are its classes' codes."""

import math

import pytest
import torch

from fisherhash.methods import Batch
from fisherhash.methods._codebooks import far_apart
from fisherhash.methods.classifier import Classifier
from fisherhash.model.heads import restore_head
from fisherhash.training.images import FrozenImages
from fisherhash.training.loop import Loop
from fisherhash.training.settings import Settings


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


def test_gradient_is_probability_minus_label():
    scores = torch.tensor([[0.5, -1.0, 2.0], [1.5, 0.3, 0.0]], requires_grad=True)
    labels = torch.eye(3)[[0, 2]]
    Classifier(bits=8, classes=3).loss(scores, batch_of(labels))["loss"].backward()
    torch.testing.assert_close(scores.grad, (torch.softmax(scores.detach(), 1) - labels) / 2)


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


def test_training_through_the_loop_learns_the_clusters():
    features, numbers = clusters()
    method = Classifier(bits=12, classes=5)
    head = method.head(8)
    head.start(features)
    assert head(features).abs().max() == 0
    images = FrozenImages(features, torch.eye(5)[numbers], head)
    history = Loop(method, images, Settings(epochs=8, batch_size=32, learning_rate=0.05)).run()
    assert history[-1]["loss"] < 0.5 * history[0]["loss"]
    right = (head.logits(features) == far_apart(5, 12)[numbers]).all(1)
    assert right.float().mean() > 0.9


def test_the_head_is_rebuilt_from_its_config_and_weights():
    torch.manual_seed(1)
    head = Classifier(bits=12, classes=5, codebook_seed=2).head(8).eval()
    features, _ = clusters()
    assert head.config() == {"kind": "argmax", "in_features": 8, "bits": 12, "classes": 5}
    other = restore_head(head.config()).eval()
    other.load_state_dict(head.state_dict())
    torch.testing.assert_close(other.logits(features), head.logits(features))


@pytest.mark.parametrize("labels", [[[1, 0, 0]], [[0, 1, 0]] * 5, [[0, 0, 0]] * 2])
def test_one_image_one_class_no_label(labels):
    scores = torch.zeros(len(labels), 3, requires_grad=True)
    loss = Classifier(bits=8, classes=3).loss(scores, batch_of(labels))["loss"]
    loss.backward()
    assert torch.isfinite(loss)
    assert torch.isfinite(scores.grad).all()


def test_bfloat16_outputs_are_computed_in_float32():
    scores = torch.tensor([[0.51, -1.03, 2.07]]).bfloat16()
    method, batch = Classifier(bits=8, classes=3), batch_of([[1, 0, 0]])
    loss = method.loss(scores, batch)["loss"]
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss, method.loss(scores.float(), batch)["loss"])


def test_it_is_not_defined_for_several_labels():
    assert not Classifier.info.multilabel
