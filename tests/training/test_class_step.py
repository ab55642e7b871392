"""The class step, its classifier, and the classifier that is trained beside the head."""

import dataclasses

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from fisherhash.backbones.tiny import Tiny
from fisherhash.data.splits import hash_order
from fisherhash.errors import UsageError
from fisherhash.evaluation import evaluate
from fisherhash.methods import create
from fisherhash.model.heads import LinearHead
from fisherhash.training.class_step import (
    GRID,
    SideClassifier,
    classification_loss,
    fit_class_step,
    fit_classifier,
)
from fisherhash.training.finishing import held_out_top
from fisherhash.training.fitting import fit
from fisherhash.training.images import LiveImages
from fisherhash.training.loop import Loop
from fisherhash.training.settings import Settings

CLASSES, FEATURES, BITS = 6, 24, 8


def clusters(count=600, seed=0, several=False, noise=2.0):
    generator = torch.Generator().manual_seed(seed)
    middles = torch.randn(CLASSES, FEATURES, generator=torch.Generator().manual_seed(9))
    labels = torch.eye(CLASSES)[torch.arange(count) % CLASSES]
    if several:
        labels[::3, 1] = 1.0
    features = labels @ middles + noise * torch.randn(count, FEATURES, generator=generator)
    return features, labels


def plain_head(features):
    torch.manual_seed(0)
    head = LinearHead(FEATURES, BITS)
    head.start(features)
    return head.eval()


@pytest.mark.parametrize("several", [False, True])
def test_the_logits_are_the_printed_ones(several):
    features, labels = clusters(several=several)
    head = plain_head(features)
    found = fit_class_step(head, features, labels).with_step(0.7, 1.3)
    with torch.no_grad():
        u = head.logits(features)
        standard = (features - features.mean(0)) / features.std(0, correction=0)
        scores = standard @ found.scores_weight.T + found.scores_bias
        for i in (0, 7, 100):
            if several:
                p = 1 / (1 + torch.exp(-1.3 * scores[i]))
                p = p / max(1.0, float(p.sum()))
            else:
                p = torch.exp(1.3 * scores[i]) / torch.exp(1.3 * scores[i]).sum()
            expected = u[i] + 0.7 * u.abs().mean() * (p @ found.centers)
            torch.testing.assert_close(found.logits(features)[i], expected, atol=1e-4, rtol=1e-4)
    finished = found.finished().logits(features.numpy())
    torch.testing.assert_close(torch.from_numpy(finished), found.logits(features))


def test_centres_are_the_signs_of_the_class_means_unless_the_method_has_its_own():
    features, labels = clusters()
    head = plain_head(features)
    found = fit_class_step(head, features, labels)
    for number in range(CLASSES):
        mean = head.logits(features[labels[:, number] > 0]).mean(0)
        assert torch.equal(found.centers[number], torch.where(mean > 0, 1.0, -1.0))
    own = torch.where(torch.randn(CLASSES, BITS) > 0, 1.0, -1.0)
    assert torch.equal(fit_class_step(head, features, labels, centers=own).centers, own)


def test_the_classifier_is_as_sure_of_new_images_as_it_is_right():
    """Far more features than it needs: without dropout it is nearly certain and often wrong."""
    generator = torch.Generator().manual_seed(1)
    noise = torch.randn(1200, 300, generator=generator)
    features, labels = clusters(1200, noise=1.5)
    inputs = torch.cat([features, noise], 1)
    inputs = (inputs - inputs.mean(0)) / inputs.std(0)
    weight, bias = fit_classifier(inputs[:300], labels[:300], False, seed=0)
    p = torch.softmax(inputs[300:] @ weight.T + bias, 1)
    right = (p.argmax(1) == labels[300:].argmax(1)).float().mean()
    assert right > 0.4  # chance is 1/6
    assert float(p.max(1).values.mean()) == pytest.approx(float(right), abs=0.12)


@pytest.fixture
def few_steps(monkeypatch):
    """Where it does not matter how good the classifier is."""
    monkeypatch.setattr("fisherhash.training.class_step.LEAST_STEPS", 30)


QUICK = Settings(epochs=3, batch_size=8, learning_rate=0.002, head_epochs=2)


def trained(data, settings=QUICK, **arguments):
    return fit(data, **({"bits": 12, "backbone": "tiny", "settings": settings} | arguments))


@pytest.mark.usefixtures("few_steps")
@pytest.mark.parametrize("finetune", [False, True])
def test_a_trial_measures_every_step_of_the_grid_from_one_training(photos, finetune):
    settings = dataclasses.replace(QUICK, validation=0.25, validation_every=3)
    found = trained(photos, settings, finetune=finetune)
    row = found.history[-1]["validation"]
    assert row["plain"] == found.history[-1]["validation_map"]
    assert [(one["weight"], one["sharpness"]) for one in row["steps"]] == [
        (one.weight, one.sharpness) for one in GRID
    ]
    assert all(0 < one["score"] <= 1 for one in row["steps"])
    plain = found.step.inner.finished().tensors()  # the codes are those without it
    for name, values in found.hasher.head.tensors().items():
        np.testing.assert_array_equal(values, plain[name])
    # The same training with one of these steps has that score.
    one = row["steps"][13]
    settings = dataclasses.replace(
        settings, step_weight=one["weight"], step_sharpness=one["sharpness"]
    )
    again = trained(photos, settings, finetune=finetune)
    assert again.history[-1]["validation_map"] == pytest.approx(one["score"], abs=1e-6)
    assert again.history[-1]["validation"] == row


@pytest.mark.usefixtures("few_steps")
def test_what_is_measured_is_what_the_hasher_encodes(photos):
    found = trained(photos, dataclasses.replace(QUICK, step_weight=1.0, step_sharpness=0.5))
    collection, split = found.collection, found.split
    encode = found.hasher.encode_collection
    query, database = (encode(collection, part).codes for part in (split.query, split.database))
    labels = collection.labels[split.query], collection.labels[split.database]
    expected = evaluate(query, database, *labels, bits=12, top=split.top)
    assert found.evaluate().map == pytest.approx(expected.map, abs=1e-6)
    assert "class-step" in found.evaluate(real_queries=True).ranking


@pytest.mark.usefixtures("few_steps")
def test_the_metric_of_held_out_images_is_the_table_s_cut_to_their_number(photos):
    found = trained(photos, dataclasses.replace(QUICK, validation=0.4))
    split = dataclasses.replace(found.split, top=len(found.split.database) // 2)
    assert held_out_top(found.split) is None
    assert held_out_top(split) == pytest.approx(0.5, abs=0.05)
    again = trained(photos, dataclasses.replace(QUICK, validation=0.4), protocol=split)
    numbers = found.split.train
    order = hash_order(found.collection.names, numbers.tolist(), 0)
    held = np.array(sorted(order[: round(len(numbers) * 0.4)]))
    packed = again.hasher.encode_collection(found.collection, held).codes
    labels = found.collection.labels[held]
    top = max(10, round(held_out_top(split) * (len(held) - 1)))
    expected = evaluate(
        packed, packed, labels, labels, bits=12, top=top, self_index=np.arange(len(held))
    )
    assert again.history[-1]["validation"]["plain"] == pytest.approx(expected.map, abs=1e-6)
    assert again.history[-1]["validation_map"] != found.history[-1]["validation_map"]


BESIDE = Settings(epochs=3, batch_size=8, learning_rate=0.01, classifier_weight=0.5, dropout=0.0)


def live_images():
    torch.manual_seed(0)
    colours = torch.eye(3)[torch.arange(24) % 3]
    pixels = (torch.randint(0, 150, (24, 3, 32, 32)) + 100 * colours[:, :, None, None]).byte()
    network = Tiny(Tiny.preprocessing)
    head = create("dpsh", bits=8, classes=3).head(network.features)
    images = LiveImages(pixels, colours, network, head)
    head.start(images.features())
    return images


def test_the_loss_is_cross_entropy_of_one_class_or_of_each():
    scores = torch.tensor([[2.0, 0.0], [0.0, 1.0]])
    one, several = torch.eye(2), torch.tensor([[1.0, 1.0], [0.0, 1.0]])
    expected = F.cross_entropy(scores, torch.tensor([0, 1]))
    for labels in (one, 7 * one):  # shares of the classes, whatever the labels sum to
        torch.testing.assert_close(classification_loss(scores, labels, False), expected)
    found = classification_loss(scores, several, True)
    by_hand = -torch.where(several > 0, scores.sigmoid().log(), (1 - scores.sigmoid()).log()).mean()
    torch.testing.assert_close(found, by_hand)


@pytest.mark.parametrize("scale", [1e-3, 1.0, -50.0])
def test_its_weight_is_in_units_of_the_first_loss(scale):
    images = live_images()
    classifier = SideClassifier(images, BESIDE)
    terms = {"loss": torch.tensor(scale), "pair": torch.tensor(1.0)}
    first = classifier(terms, torch.randn(24, images.head.in_features), images.labels)
    assert first["pair"] is terms["pair"]
    assert first["loss"].item() == pytest.approx(scale + 0.5 * abs(scale), rel=1e-5)
    # The units of the first step stay, also after a checkpoint.
    unit = float(classifier.unit)
    again = SideClassifier(images, BESIDE)
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
        settings = dataclasses.replace(BESIDE, classifier_weight=weight)
        loop = Loop(method, images, settings)
        history = loop.run()
        assert ("classifier" in history[0]) == (weight > 0)
        assert ("classifier" in loop.modules) == (weight > 0)
        states.append({**images.backbone.state_dict()})
    assert any(not torch.equal(one, states[1][name]) for name, one in states[0].items())
    assert history[-1]["classifier"] < history[0]["classifier"]


def test_without_a_network_to_train_it_is_refused(photos):
    with pytest.raises(UsageError, match="classifier_weight is for a network that is trained"):
        fit(photos, bits=8, backbone="tiny", finetune=False, settings=BESIDE)
