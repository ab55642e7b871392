"""What follows a training: bits cut from more outputs than bits, or fewer, for any method."""

import dataclasses

import numpy as np
import pytest
import torch

from fisherhash import codes
from fisherhash.errors import NotDefinedError, UsageError
from fisherhash.methods import _centers, create
from fisherhash.methods._cutting import cut
from fisherhash.model.hasher import Hasher
from fisherhash.training.finishing import AFFINITY, cut_bits, cut_centers
from fisherhash.training.fitting import fit
from fisherhash.training.images import FrozenImages
from fisherhash.training.loop import Loop
from fisherhash.training.settings import Settings

BITS, CLASSES, FEATURES = 12, 4, 10
SETTINGS = Settings(epochs=4, batch_size=16, learning_rate=0.05)
SEVERAL = pytest.mark.parametrize("several", [False, True])


@pytest.fixture(autouse=True)
def few_steps(monkeypatch):
    """What a cut is good for is tested elsewhere; here it need not be good."""
    monkeypatch.setattr("fisherhash.methods._cutting.STEPS", 30)
    monkeypatch.setattr("fisherhash.training.class_step.LEAST_STEPS", 30)


def images(count=80, several=False):
    generator = torch.Generator().manual_seed(0)
    labels = torch.eye(CLASSES)[torch.arange(count) % CLASSES]
    if several:
        labels[::3, 1] = 1.0
    middles = 3 * torch.randn(CLASSES, FEATURES, generator=generator)
    return labels @ middles + torch.randn(count, FEATURES, generator=generator), labels


def head_of(method="dfh", outputs=20, several=False):
    features, labels = images(several=several)
    torch.manual_seed(0)
    learner = create(method, bits=outputs, classes=CLASSES)
    head = learner.head(FEATURES)
    head.start(features)
    Loop(learner, FrozenImages(features, labels, head), SETTINGS).run()
    return learner, head, features, labels


def same(one, two):
    return one.keys() == two.keys() and all(torch.equal(one[key], two[key]) for key in one)


@pytest.mark.parametrize("outputs", [20, 7])
@SEVERAL
def test_bits_between_classes_are_cut_from_the_outputs_of_the_training_images(outputs, several):
    _, head, features, labels = head_of(outputs=outputs, several=several)
    with torch.no_grad():
        found = cut_bits(head, features, labels, bits=BITS, how="between")
        logits = head.logits(features)
    shares = labels / labels.sum(1, keepdim=True)
    means = (shares.T @ logits / shares.sum(0)[:, None]).T.double().numpy()
    book = _centers.code_book(_centers.graded(means, BITS, AFFINITY), means)
    mixing, offsets = cut(logits, shares @ torch.from_numpy(book.T).float())
    torch.testing.assert_close(found.mixing, mixing, atol=1e-3, rtol=1e-3)
    torch.testing.assert_close(found.offsets, offsets, atol=1e-3, rtol=1e-3)
    torch.testing.assert_close(found.logits(features), logits @ found.mixing.T + found.offsets)


@pytest.mark.parametrize("method", ["dfh", "orthohash", "ninh", "classifier"])
def test_the_first_outputs_of_any_head_may_be_the_bits(method):
    learner, head, features, labels = head_of(method)
    found = cut_bits(head, features, labels, bits=BITS, how="first")
    assert torch.equal(found.logits(features), head.logits(features)[:, :BITS])
    centers = learner.class_centers()
    if centers is not None:
        assert torch.equal(cut_centers(learner, found), centers[:, :BITS])


def test_centres_of_mixed_outputs_are_not_known():
    learner, head, features, labels = head_of("csq")
    assert torch.equal(cut_centers(learner, head), learner.centers)
    mixed = cut_bits(head, features, labels, bits=BITS, how="between")
    assert cut_centers(learner, mixed) is None


def test_without_labels_the_cut_follows_the_outputs_alone():
    """Points along a line keep their order, though no image has a class."""
    _, head, features, _ = head_of("bihalf")
    found = cut_bits(head, features, torch.zeros(80, 0), bits=BITS, how="between")
    packed = codes.pack(found.logits(features).detach().numpy())
    assert len(np.unique(packed, axis=0)) > 4
    again = cut_bits(head, features, torch.zeros(80, 0), bits=BITS, how="between")
    assert torch.equal(again.mixing, found.mixing)


QUICK = Settings(
    epochs=3, batch_size=8, learning_rate=0.002, head_epochs=2, validation=0.2, outputs=20
)


def trained(data, **arguments):
    return fit(data, **({"bits": BITS, "backbone": "tiny", "settings": QUICK} | arguments))


def encoded(hasher):
    pictures = np.random.default_rng(0).integers(0, 256, (9, 32, 32, 3), dtype=np.uint8)
    return hasher.encode(list(pictures))


@pytest.mark.parametrize("finetune", [False, True])
@pytest.mark.parametrize("step", [0.0, 1.0])
def test_a_model_has_codes_of_its_bits_and_survives_its_folder(photos, tmp_path, finetune, step):
    settings = dataclasses.replace(QUICK, step_weight=step)
    found = trained(photos, finetune=finetune, out=tmp_path / "model", settings=settings)
    head = found.hasher.head
    assert (head.kind, head.bits) == ("class-step" if step else "linear", BITS)
    assert encoded(found.hasher).shape == (9, codes.code_bytes(BITS))
    loaded = Hasher.load(tmp_path / "model")
    np.testing.assert_array_equal(encoded(loaded), encoded(found.hasher))
    assert loaded.head.config() == head.config()
    assert loaded.head.checksum() == head.checksum()
    assert found.evaluate().map > 0.34  # a third of the images is of a query's class


@pytest.mark.parametrize("finetune", [False, True])
def test_a_model_that_was_interrupted_is_the_one_that_was_not(
    photos, tmp_path, monkeypatch, finetune
):
    settings = dataclasses.replace(QUICK, step_weight=0.5)
    options = {"initial_centers": "graded", "positive_weight": 0}
    arguments = {"finetune": finetune, "settings": settings, "options": options}
    whole = trained(photos, **arguments)
    write = Loop._checkpoint

    def checkpoint(self, epoch):
        write(self, epoch)
        if self.folder is not None and epoch == 1:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Loop, "_checkpoint", checkpoint)
        with pytest.raises(KeyboardInterrupt):
            trained(photos, out=tmp_path, **arguments)
    continued = trained(photos, out=tmp_path, **arguments)
    assert continued.hasher.fingerprint() == whole.hasher.fingerprint()
    measured = [found.history[-1]["validation"] for found in (continued, whole)]
    assert measured[0] == measured[1]


def test_what_cannot_be_cut_is_refused_before_the_training(photos, tmp_path):
    def attempt(**changes):
        method = changes.pop("method", "dfh")
        settings = dataclasses.replace(QUICK, **changes)
        trained(photos, method=method, settings=settings, out=tmp_path / "m")

    with pytest.raises(UsageError, match="12 bits cannot be the signs of the first 7 outputs"):
        attempt(outputs=7, cut="first")
    with pytest.raises(NotDefinedError, match="dqn: its codes are not signs of outputs"):
        attempt(method="dqn")
    with pytest.raises(UsageError, match="itq is not trained by gradient"):
        attempt(method="itq", validation=0.0)
    assert not (tmp_path / "m").exists()


@pytest.mark.parametrize("finetune", [False, True])
def test_one_training_ends_as_trainings_of_their_own_would(photos, finetune):
    """To the last bit: a table may share what only its bits, cuts and class steps set apart."""
    ways = [
        (BITS, QUICK),
        (BITS, dataclasses.replace(QUICK, cut="first", step_weight=2.0)),
        (8, dataclasses.replace(QUICK, step_weight=0.5, step_sharpness=2.0)),
        (8, dataclasses.replace(QUICK, cut="first")),
    ]
    together = trained(photos, finetune=finetune, endings=ways[1:])
    for found, (bits, settings) in zip([together, *together.others], ways, strict=True):
        alone = trained(photos, finetune=finetune, bits=bits, settings=settings)
        assert found.hasher.fingerprint() == alone.hasher.fingerprint()
        assert same(found.step.state_dict(), alone.step.state_dict())
        assert found.history[-1]["validation"] == alone.history[-1]["validation"]
        assert found.history[-1]["validation_map"] == alone.history[-1]["validation_map"]
        assert found.evaluate().map == alone.evaluate().map


@pytest.mark.parametrize(
    ("bits", "changes", "sentence"),
    [
        (BITS, {"learning_rate": 0.1}, "may differ in its bits, its cut and its class step"),
        (BITS, {"seed": 1}, "may differ in its bits, its cut and its class step"),
        (24, {"cut": "first"}, "24 bits cannot be the signs of the first 20 outputs"),
    ],
)
def test_an_ending_that_a_training_cannot_have_is_refused(photos, bits, changes, sentence):
    with pytest.raises(UsageError, match=sentence):
        trained(photos, endings=[(bits, dataclasses.replace(QUICK, **changes))])


def test_outputs_that_are_the_bits_end_in_one_length(photos):
    plain = dataclasses.replace(QUICK, outputs=0)
    with pytest.raises(UsageError, match="12 outputs cannot end as 8 bits; set outputs"):
        trained(photos, settings=plain, endings=[(8, plain)])
    found = trained(
        photos, settings=plain, endings=[(BITS, dataclasses.replace(plain, cut="first"))]
    )
    heads = [each.hasher.head.tensors() for each in (found, found.others[0])]
    assert all(np.array_equal(heads[1][name], values) for name, values in heads[0].items())


def test_endings_are_for_a_training_alone(photos, tmp_path):
    for more in ({"out": tmp_path / "m"}, {"measured": True}, {"recipe": "best"}):
        with pytest.raises(UsageError, match="endings do not go together with recipe, out"):
            trained(photos, endings=[(8, QUICK)], **more)
