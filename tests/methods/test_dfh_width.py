"""Deep Fisher Hashing with more outputs than bits, or fewer: what is trained, and what is cut."""

import dataclasses

import numpy as np
import pytest
import torch

from fisherhash import codes
from fisherhash.errors import UsageError
from fisherhash.methods import Batch, Progress, _centers
from fisherhash.methods._cutting import cut
from fisherhash.methods.dfh import DFH
from fisherhash.model.hasher import Hasher
from fisherhash.model.heads import CutHead, LinearHead
from fisherhash.training.fitting import fit
from fisherhash.training.loop import FrozenImages, Loop, Settings

BITS, CLASSES, FEATURES = 12, 4, 10
SETTINGS = Settings(epochs=4, batch_size=16, learning_rate=0.05)
WIDTHS = pytest.mark.parametrize("width", [20, 7])
SEVERAL = pytest.mark.parametrize("several", [False, True])


@pytest.fixture(autouse=True)
def few_steps(monkeypatch):
    """What a cut is good for is tested elsewhere; here it need not be good."""
    monkeypatch.setattr("fisherhash.methods._cutting.STEPS", 30)


def images(count=80, several=False):
    generator = torch.Generator().manual_seed(0)
    labels = torch.eye(CLASSES)[torch.arange(count) % CLASSES]
    if several:
        labels[::3, 1] = 1.0
    middles = 3 * torch.randn(CLASSES, FEATURES, generator=generator)
    return labels @ middles + torch.randn(count, FEATURES, generator=generator), labels


def prepared(width=20, several=False, settings=SETTINGS, **options):
    features, labels = images(several=several)
    torch.manual_seed(0)
    method = DFH(bits=BITS, classes=CLASSES, width=width)
    head = method.head(FEATURES)
    head.start(features)
    return Loop(method, FrozenImages(features, labels, head), settings, **options)


def head_of(loop):
    return {name: value.clone() for name, value in loop.images.head.state_dict().items()}


def same(one, two):
    return one.keys() == two.keys() and all(torch.equal(one[key], two[key]) for key in one)


def test_only_a_width_gives_a_head_that_is_cut():
    assert type(DFH(bits=BITS, classes=CLASSES).head(FEATURES)) is LinearHead
    head = DFH(bits=BITS, classes=CLASSES, width=20).head(FEATURES)
    assert type(head) is CutHead
    assert (head.in_features, head.bits, head.width) == (FEATURES, BITS, 20)


@WIDTHS
@pytest.mark.parametrize("centers", ["means", "far-apart", "graded"])
@pytest.mark.parametrize("step", ["exact", "gradient", "released"])
def test_until_the_end_a_width_is_so_many_bits(width, centers, step):
    """Memory, centres and loss are those of the method with as many bits."""
    features, labels = images()
    head = CutHead(FEATURES, BITS, width)
    head.start(features)
    train = FrozenImages(features, labels, head)
    index = torch.arange(16)
    batch = Batch(labels[index], index, features[index])
    found = []
    for bits, more in ((BITS, {"width": width}), (width, {})):
        method = DFH(bits=bits, classes=CLASSES, initial_centers=centers, center_step=step, **more)
        with torch.no_grad():
            method.start(train)
            method.on_epoch_start(Progress(0, 1, 0, 1))
            method.after_step(train.outputs()[index], batch)
        assert method.memory.outputs.shape == (80, width)
        assert method.centers.shape == method.relaxed.shape == (width, CLASSES)
        outputs = train.outputs()[index].requires_grad_()
        loss = method.loss(outputs, batch)["loss"]
        loss.backward()
        found.append((method.centers, method.relaxed, loss.detach(), outputs.grad))
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


@WIDTHS
@SEVERAL
def test_the_bits_are_cut_after_the_last_epoch_from_the_outputs_of_the_training_images(
    width, several
):
    loop = prepared(width, several)
    start = head_of(loop)
    loop.run()
    head, method = loop.images.head, loop.method
    outputs, labels = loop.images.outputs(), loop.images.labels
    shares = labels / labels.sum(1, keepdim=True)
    means = (shares.T @ outputs / shares.sum(0)[:, None]).T.double().numpy()
    book = _centers.code_book(_centers.graded(means, BITS, method.affinity), means)
    mixing, offsets = cut(outputs, shares @ torch.from_numpy(book.T).float())
    torch.testing.assert_close(head.mixing, mixing, atol=1e-3, rtol=1e-3)
    torch.testing.assert_close(head.offsets, offsets, atol=1e-3, rtol=1e-3)
    assert not torch.equal(head.mixing, start["mixing"])
    logits = head.logits(loop.images.features())
    assert logits.shape == (80, BITS)
    assert torch.isfinite(logits).all()


def test_nothing_is_cut_before_the_end():
    loop = prepared()
    start = head_of(loop)
    for epoch in range(loop.start(), 3):
        loop.epoch(epoch)
    for name in ("mixing", "offsets"):
        assert torch.equal(head_of(loop)[name], start[name])
    assert not torch.equal(head_of(loop)["linear.weight"], start["linear.weight"])


def test_without_a_width_the_end_changes_nothing():
    loop = prepared(width=0)
    loop.run()
    before = head_of(loop)
    with torch.no_grad():
        loop.method.finish()
    assert same(head_of(loop), before)


def test_a_second_stage_trains_on_and_cuts_anew():
    loop = prepared()
    loop.run()
    first = head_of(loop)
    Loop(loop.method, loop.images, dataclasses.replace(SETTINGS, seed=1)).run()
    second = head_of(loop)
    assert not torch.equal(second["linear.weight"], first["linear.weight"])
    assert not torch.equal(second["mixing"], first["mixing"])
    with torch.no_grad():
        loop.method.finish()
    assert same(head_of(loop), second)  # the cut of the outputs as they are


@SEVERAL
@pytest.mark.parametrize("after", [1, 4])
def test_a_continued_run_ends_like_an_uninterrupted_one(tmp_path, several, after):
    whole = prepared(several=several)
    whole.run()
    stopped = prepared(several=several, folder=tmp_path)
    for epoch in range(stopped.start(), after):
        stopped.history.append(stopped.epoch(epoch))
        stopped._checkpoint(epoch)
    continued = prepared(several=several, folder=tmp_path)
    torch.manual_seed(99)
    assert len(continued.run()) == 4
    assert same(head_of(continued), head_of(whole))
    assert same(continued.method.state_dict(), whole.method.state_dict())


QUICK = Settings(epochs=3, batch_size=8, learning_rate=0.002, head_epochs=2, validation=0.2)
OPTIONS = {"width": 20, "initial_centers": "graded", "positive_weight": 0}


def trained(data, **arguments):
    given = {"bits": BITS, "backbone": "tiny", "settings": QUICK, "options": OPTIONS}
    return fit(data, **(given | arguments))


def encoded(hasher):
    pictures = np.random.default_rng(0).integers(0, 256, (9, 32, 32, 3), dtype=np.uint8)
    return hasher.encode(list(pictures))


@pytest.mark.parametrize("finetune", [False, True])
def test_a_model_has_codes_of_its_bits_and_survives_its_folder(photos, tmp_path, finetune):
    found = trained(photos, finetune=finetune, out=tmp_path / "model")
    head = found.hasher.head
    assert (head.kind, head.bits, head.width) == ("cut", BITS, 20)
    assert not head.training
    assert not torch.equal(head.mixing, CutHead(head.in_features, BITS, 20).mixing)
    assert encoded(found.hasher).shape == (9, codes.code_bytes(BITS))
    loaded = Hasher.load(tmp_path / "model")
    np.testing.assert_array_equal(encoded(loaded), encoded(found.hasher))
    assert loaded.head.config() == head.config()
    assert same(loaded.head.state_dict(), head.state_dict())
    assert found.evaluate().map > 0.34  # a third of the images is of a query's class


@pytest.mark.parametrize("finetune", [False, True])
def test_a_model_that_was_interrupted_is_the_one_that_was_not(
    photos, tmp_path, monkeypatch, finetune
):
    whole = trained(photos, finetune=finetune)
    write = Loop._checkpoint

    def checkpoint(self, epoch):
        write(self, epoch)
        if self.folder is not None and epoch == 1:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Loop, "_checkpoint", checkpoint)
        with pytest.raises(KeyboardInterrupt):
            trained(photos, finetune=finetune, out=tmp_path)
    continued = trained(photos, finetune=finetune, out=tmp_path)
    for part in ("head", "backbone"):
        one, other = (getattr(found.hasher, part) for found in (continued, whole))
        assert same(one.state_dict(), other.state_dict())
    maps = [[row.get("validation_map") for row in found.history] for found in (continued, whole)]
    assert maps[0] == maps[1]


def test_bits_may_be_the_signs_of_the_first_outputs():
    features, labels = images()
    method = DFH(bits=BITS, classes=CLASSES, width=20, cut="outputs")
    head = method.head(FEATURES)
    head.start(features)
    Loop(method, FrozenImages(features, labels, head), SETTINGS).run()
    assert torch.equal(head.logits(features), head(features)[:, :BITS])


def test_no_more_bits_than_outputs_can_be_their_signs():
    with pytest.raises(UsageError, match="12 bits cannot be the signs of 7 outputs"):
        DFH(bits=12, classes=CLASSES, width=7, cut="outputs")
    DFH(bits=12, classes=CLASSES, cut="outputs")  # without a width there is nothing to cut
