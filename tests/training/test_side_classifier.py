"""A classifier beside the head: what it adds to a loss, in which units, and what it trains."""

import dataclasses

import pytest
import torch
import torch.nn.functional as F

from fisherhash.backbones.tiny import Tiny
from fisherhash.errors import UsageError
from fisherhash.methods import create
from fisherhash.training.fitting import fit
from fisherhash.training.images import FrozenImages, LiveImages
from fisherhash.training.loop import Loop
from fisherhash.training.settings import Settings
from fisherhash.training.side_classifier import (
    SideClassifier,
    class_targets,
    classification_loss,
    find_side_classifier,
)

SETTINGS = Settings(epochs=3, batch_size=8, learning_rate=0.01, classifier_weight=0.5, dropout=0.0)


def live_images(labels=None):
    torch.manual_seed(0)
    colours = torch.eye(3)[torch.arange(24) % 3]
    pixels = (torch.randint(0, 150, (24, 3, 32, 32)) + 100 * colours[:, :, None, None]).byte()
    labels = colours if labels is None else labels
    network = Tiny(Tiny.preprocessing)
    head = create("dpsh", bits=8, classes=3).head(network.features)
    images = LiveImages(pixels, labels, network, head)
    head.start(images.features())
    return images


def test_the_loss_is_cross_entropy_of_one_class_or_of_each():
    scores = torch.tensor([[2.0, 0.0], [0.0, 1.0]])
    one, several = torch.eye(2), torch.tensor([[1.0, 1.0], [0.0, 1.0]])
    expected = F.cross_entropy(scores, torch.tensor([0, 1]))
    for labels in (one, 7 * one):  # shares of the classes, whatever the labels sum to
        targets = class_targets(labels, several=False)
        torch.testing.assert_close(classification_loss(scores, targets, several=False), expected)
    found = classification_loss(scores, class_targets(several, several=True), several=True)
    by_hand = -torch.where(several > 0, scores.sigmoid().log(), (1 - scores.sigmoid()).log()).mean()
    torch.testing.assert_close(found, by_hand)


@pytest.mark.parametrize("scale", [1e-3, 1.0, -50.0])
def test_its_weight_is_in_units_of_the_first_loss(scale):
    images = live_images()
    classifier = SideClassifier(images, SETTINGS)
    terms = {"loss": torch.tensor(scale), "pair": torch.tensor(1.0)}
    first = classifier(terms, torch.randn(24, images.head.in_features), images.labels)
    assert first["pair"] is terms["pair"]
    assert first["loss"].item() == pytest.approx(scale + 0.5 * abs(scale), rel=1e-5)
    # The units of the first step stay, also after a checkpoint.
    unit = float(classifier.unit)
    again = SideClassifier(images, SETTINGS)
    again.load_state_dict(classifier.state_dict())
    for one in (classifier, again):
        one({"loss": torch.tensor(7.0)}, torch.randn(24, images.head.in_features), images.labels)
        assert float(one.unit) == unit


def test_it_trains_the_network():
    """The network ends where the method alone would not have led it."""
    states = []
    for weight in (0.0, 0.5):
        images = live_images()
        method = create("dpsh", bits=8, classes=3)
        settings = dataclasses.replace(SETTINGS, classifier_weight=weight)
        loop = Loop(method, images, settings)
        history = loop.run()
        assert ("classifier" in history[0]) == (weight > 0)
        assert ("classifier" in loop.modules) == (weight > 0)
        states.append({**images.backbone.state_dict()})
    assert any(not torch.equal(one, states[1][name]) for name, one in states[0].items())
    assert history[-1]["classifier"] < history[0]["classifier"]


def test_frozen_features_have_none():
    images = live_images()
    frozen = FrozenImages(images.features(), images.labels, images.head)
    assert find_side_classifier(frozen, SETTINGS) is None
    assert (
        find_side_classifier(images, dataclasses.replace(SETTINGS, classifier_weight=0.0)) is None
    )
    assert find_side_classifier(images, SETTINGS) is not None


def test_without_a_network_to_train_it_is_refused(photos):
    with pytest.raises(UsageError, match="classifier_weight is for a network that is trained"):
        fit(photos, bits=8, backbone="tiny", finetune=False, settings=SETTINGS)
