"""The loop by itself: schedules, steps, what a method sees, checkpoints and their faults."""

import dataclasses
import json
import math

import pytest
import torch
from torch import nn

from fisherhash.data.augment import Strength
from fisherhash.errors import FisherhashError, UsageError
from fisherhash.methods import HashMethod, create
from fisherhash.methods.base import MethodInfo
from fisherhash.model.folder import is_unfinished
from fisherhash.model.heads import LinearHead
from fisherhash.training.checkpoints import check_resumable
from fisherhash.training.images import FrozenImages, LiveImages
from fisherhash.training.loop import Loop
from fisherhash.training.settings import Settings

QUICK = Settings(epochs=3, batch_size=8, learning_rate=0.05)


class Spy(HashMethod):
    """A method that writes down what the loop does with it."""

    info = MethodInfo("spy", "", "", 2000, "", "classes")

    def __post_init__(self):
        super().__post_init__()
        self.calls = []
        self.classifier = nn.Linear(self.bits, self.classes)
        self.register_buffer("beta", torch.tensor(0.0))

    def start(self, train):
        assert not torch.is_grad_enabled()
        self.calls.append(("start", train.outputs().shape, train.features().shape))

    def on_epoch_start(self, progress):
        assert not torch.is_grad_enabled()
        self.beta += 1
        self.calls.append(("epoch", dataclasses.astuple(progress)))

    def loss(self, outputs, batch):
        self.calls.append(("loss", batch.index.tolist()))
        assert outputs.requires_grad
        loss = nn.functional.binary_cross_entropy_with_logits(
            self.classifier(outputs), batch.labels
        )
        return {"loss": loss, "other": 2 * loss.detach()}

    def after_step(self, outputs, batch):
        assert not torch.is_grad_enabled()
        assert not outputs.requires_grad
        self.calls.append(("after", batch.index.tolist()))


def features_of(count=20, width=10, classes=2):
    generator = torch.Generator().manual_seed(0)
    labels = torch.eye(classes)[torch.arange(count) % classes]
    return torch.randn(count, width, generator=generator) + 3 * labels[:, :1], labels


def prepared(settings=QUICK, method="dfh", *, count=20, seed=0, **options):
    torch.manual_seed(seed)
    features, labels = features_of(count)
    learner = Spy(bits=6, classes=2) if method == "spy" else create(method, bits=6, classes=2)
    head = learner.head(features.shape[1])
    head.start(features)
    return Loop(learner, FrozenImages(features, labels, head), settings, **options)


def head_of(loop):
    return {k: v.clone() for k, v in loop.images.head.state_dict().items()}


def same(one, two):
    return one.keys() == two.keys() and all(torch.equal(one[k], two[k]) for k in one)


def test_the_order_of_what_a_method_sees():
    loop = prepared(method="spy")
    loop.run()
    calls = loop.method.calls
    assert calls[0] == ("start", (20, 6), (20, 10))
    per_epoch = [calls[1 + 5 * e : 6 + 5 * e] for e in range(3)]
    for epoch, (first, *steps) in enumerate(per_epoch):
        assert first == ("epoch", (epoch, 3, epoch * 2, 6))
        assert [kind for kind, _ in steps] == ["loss", "after"] * 2
        assert steps[0][1] == steps[1][1]
        seen = steps[0][1] + steps[2][1]
        assert len(set(seen)) == 16
    assert len({str(epoch[1][1]) for epoch in per_epoch}) == 3


def test_one_step_of_sgd_is_the_printed_rule():
    settings = Settings(
        epochs=1, batch_size=20, learning_rate=0.1, weight_decay=0.5, dropout=0.0,
        schedule="constant",
    )  # fmt: skip
    loop = prepared(settings, method="spy")
    head, method = loop.images.head, loop.method
    before = head_of(loop)
    features, labels = features_of()
    loss = nn.functional.binary_cross_entropy_with_logits(method.classifier(head(features)), labels)
    weight, bias = torch.autograd.grad(loss, [head.linear.weight, head.linear.bias])
    loop.run()
    after = head_of(loop)
    w = before["linear.weight"]
    torch.testing.assert_close(after["linear.weight"], w - 0.1 * (weight + 0.5 * w))
    torch.testing.assert_close(after["linear.bias"], before["linear.bias"] - 0.1 * bias)


@pytest.mark.parametrize(
    ("schedule", "points"),
    [
        ("constant", {0.0: 1.0, 0.5: 1.0, 1.0: 1.0}),
        ("step", {0.0: 1.0, 0.59: 1.0, 0.61: 0.1, 0.84: 0.1, 0.86: 0.01, 1.0: 0.01}),
        ("cosine", {0.0: 1.0, 0.5: 0.5, 1.0: 0.0, 1 / 3: 0.75}),
        ("one-cycle", {0.0: 0.04, 0.125: 0.52, 0.25: 1.0, 0.625: 0.5, 1.0: 0.0}),
    ],
)
def test_schedules(schedule, points):
    settings = Settings(schedule=schedule)
    for done, share in points.items():
        assert settings.rate(done) == pytest.approx(share, abs=1e-9)
    values = [settings.rate(i / 1000) for i in range(1001)]
    assert all(0 <= value <= 1 for value in values)
    if schedule == "one-cycle":
        assert values[:251] == sorted(values[:251])
    peak = values.index(max(values))
    assert values[peak:] == sorted(values[peak:], reverse=True)


def test_biases_are_not_decayed_and_the_backbone_has_its_share_of_the_rate():
    from fisherhash import backbones

    network = backbones.create("tiny")
    pixels = torch.randint(0, 256, (6, 3, 32, 32), dtype=torch.uint8)
    head = LinearHead(32, 6)
    images = LiveImages(pixels, torch.eye(2)[[0, 1, 0, 1, 0, 1]], network, head)
    settings = dataclasses.replace(QUICK, backbone_rate=0.25, weight_decay=0.3)
    loop = Loop(create("dfh", bits=6, classes=2), images, settings)
    for group in loop.optimizer.param_groups:
        for parameter in group["params"]:
            of_backbone = any(parameter is p for p in network.parameters())
            assert group["highest"] == pytest.approx(0.05 * (0.25 if of_backbone else 1.0))
            assert group["weight_decay"] == (0.3 if parameter.ndim > 1 else 0.0)
    counted = sum(len(group["params"]) for group in loop.optimizer.param_groups)
    assert counted == len([*network.parameters(), *head.parameters()])


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        ({"epochs": 0}, "epochs must be between 1 and 100000, got 0"),
        ({"epochs": 2.5}, "epochs must be a whole number, got 2.5"),
        ({"epochs": True}, "epochs must be a whole number"),
        ({"batch_size": 0}, "batch_size must be between 1"),
        ({"learning_rate": 0.0}, "learning_rate must be between"),
        ({"learning_rate": -0.1}, "learning_rate must be between"),
        ({"learning_rate": math.nan}, "learning_rate must be between"),
        ({"learning_rate": math.inf}, "learning_rate must be between"),
        ({"weight_decay": -1e-9}, "weight_decay must be between"),
        ({"backbone_rate": -1.0}, "backbone_rate must be between"),
        ({"dropout": 1.0}, "dropout must be between 0 and 0.99, got 1.0"),
        ({"head_epochs": -1}, "head_epochs must be between"),
        ({"fixed_layers": -2}, "fixed_layers must be between -1 and 1000, got -2"),
        ({"fixed_layers": 1.5}, "fixed_layers must be a whole number, got 1.5"),
        ({"validation": 0.95}, "validation must be between 0 and 0.9"),
        ({"seed": -1}, "seed must be between 0"),
        ({"seed": 2**70}, "seed must be between 0"),
        ({"optimizer": "adam"}, "unknown optimizer 'adam'. Did you mean 'adamw'"),
        ({"schedule": "onecycle"}, "unknown schedule 'onecycle'. Did you mean 'one-cycle'"),
    ],
)
def test_settings_out_of_range(wrong, sentence):
    with pytest.raises(UsageError) as caught:
        Settings(**wrong)
    assert sentence in str(caught.value)


def test_a_loss_that_is_not_finite_asks_for_a_lower_rate(tmp_path):
    settings = Settings(epochs=50, batch_size=10, learning_rate=1000.0, schedule="constant")
    with pytest.raises(
        FisherhashError, match=r"the loss became \S+ in epoch \d+; lower the learning rate \(it is"
    ):
        prepared(settings, folder=tmp_path).run()


def interrupted_after(loop, epochs):
    """Run, and stop after the checkpoint of that many epochs."""
    write = loop._checkpoint

    def checkpoint(epoch):
        write(epoch)
        if epoch + 1 == epochs:
            raise KeyboardInterrupt

    loop._checkpoint = checkpoint
    with pytest.raises(KeyboardInterrupt):
        loop.run()


class Finisher(Spy):
    """A method whose codes are final after the last epoch only."""

    def head(self, in_features):
        self.heads = [super().head(in_features)]
        return self.heads[0]

    def finish(self):
        assert not torch.is_grad_enabled()
        assert not self.heads[0].training
        self.heads[0].linear.bias.fill_(1000.0)


def finishing(settings, **options):
    """A loop with a finisher, and the list of what its validation saw: the largest bias."""
    torch.manual_seed(0)
    features, labels = features_of()
    learner = Finisher(bits=6, classes=2)
    head = learner.head(features.shape[1])
    head.start(features)
    seen = []

    def validate():
        seen.append(float(head.linear.bias.detach().max()))
        return {"validation_map": seen[-1]}

    images = FrozenImages(features, labels, head)
    return Loop(learner, images, settings, validate=validate, **options), seen


@pytest.mark.parametrize(
    ("epochs", "every", "measured"),
    [(3, 1, [1, 2, 3]), (5, 2, [2, 4, 5]), (4, 2, [2, 4]), (3, 9, [3]), (1, 1, [1])],
)
def test_the_last_validation_sees_what_the_method_finished(tmp_path, epochs, every, measured):
    settings = dataclasses.replace(QUICK, epochs=epochs, validation_every=every)
    loop, seen = finishing(settings, folder=tmp_path)
    rows = loop.run()
    assert [row["epoch"] for row in rows if "validation_map" in row] == measured
    assert [row["validation_map"] for row in rows if "validation_map" in row] == seen
    assert seen[-1] == 1000.0
    assert all(value < 100 for value in seen[:-1])
    written = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in written] == rows


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@pytest.mark.parametrize("method", ["dfh", "spy"])
@pytest.mark.parametrize("after", [1, 2, 3])
def test_a_continued_run_ends_like_an_uninterrupted_one(tmp_path, optimizer, method, after):
    settings = dataclasses.replace(QUICK, epochs=4, optimizer=optimizer)
    whole = prepared(settings, method)
    whole.run()
    interrupted_after(prepared(settings, method, folder=tmp_path), after)
    continued = prepared(settings, method, folder=tmp_path)
    torch.manual_seed(99)
    rows = continued.run()
    assert same(head_of(continued), head_of(whole))
    assert same(continued.method.state_dict(), whole.method.state_dict())
    losses = [row["loss"] for row in rows]
    assert losses == [row["loss"] for row in whole.history]
    written = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [row["loss"] for row in written] == losses


@pytest.mark.parametrize("name", ["checkpoint-2.safetensors", "checkpoint.json"])
def test_a_flipped_bit_of_a_checkpoint_never_trains_another_model(tmp_path, name):
    interrupted_after(prepared(folder=tmp_path, identity={"bits": 6}), 2)
    path = tmp_path / name
    data = path.read_bytes()
    text = name.endswith("json")
    start = 0 if text else 8 + int.from_bytes(data[:8], "little")
    for place in range(start, len(data), 7 if text else max(1, (len(data) - start) // 20)):
        changed = bytearray(data)
        changed[place] ^= 1
        if text and json_or_none(changed) == json.loads(data):
            continue
        path.write_bytes(changed)
        with pytest.raises(FisherhashError, match=r"checkpoint.* is damaged"):
            prepared(folder=tmp_path, identity={"bits": 6}).run()
        if text:
            with pytest.raises(FisherhashError, match=r"checkpoint\.json is damaged"):
                check_resumable(tmp_path, {"bits": 6}, overwrite=False)


def json_or_none(data):
    try:
        return json.loads(data.decode())
    except ValueError:
        return None


def test_a_checkpoint_of_another_training_set_is_a_sentence(tmp_path):
    interrupted_after(prepared(folder=tmp_path), 2)
    with pytest.raises(FisherhashError, match=r"cannot be continued .*size mismatch"):
        prepared(folder=tmp_path, count=24).run()


def test_a_kill_before_the_new_checkpoint_counts_continues_from_the_old_one(tmp_path, monkeypatch):
    """Stopped at every single file operation of the second checkpoint."""
    import os

    whole = prepared()
    whole.run()
    for stop in range(4):
        folder = tmp_path / str(stop)
        loop = prepared(folder=folder)
        loop.history.append(loop.epoch(loop.start()))
        loop._checkpoint(0)
        loop.history.append(loop.epoch(1))
        replace, count = os.replace, iter(range(10))

        def killed(source, target, *, stop=stop, count=count, replace=replace):
            if next(count) == stop:
                raise KeyboardInterrupt
            replace(source, target)

        with monkeypatch.context() as patch:
            patch.setattr(os, "replace", killed)
            try:
                loop._checkpoint(1)
            except KeyboardInterrupt:
                assert stop < 3
        again = prepared(folder=folder)
        assert len(again.run()) == 3
        assert same(head_of(again), head_of(whole))


def test_who_may_continue_and_who_may_not(tmp_path):
    identity = {"bits": 6, "settings": {"epochs": 3, "seed": 0}, "split": None}
    check_resumable(tmp_path / "none", identity, overwrite=False)
    interrupted_after(prepared(folder=tmp_path, identity=identity), 1)
    check_resumable(tmp_path, identity, overwrite=False)
    other = identity | {"bits": 8}
    with pytest.raises(
        UsageError, match=r"unfinished run with other settings \(bits: 6 there, 8 now\)"
    ):
        check_resumable(tmp_path, other, overwrite=False)
    assert is_unfinished(tmp_path)
    check_resumable(tmp_path, other, overwrite=True)
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]
    (tmp_path / "config.json").write_text('{"files": {}}')
    with pytest.raises(UsageError, match=r"already holds a model.*--overwrite"):
        check_resumable(tmp_path, identity, overwrite=False)
    check_resumable(tmp_path, identity, overwrite=True)
    assert (tmp_path / "config.json").exists()


def test_live_images_give_the_features_of_the_pictures_as_they_are():
    from fisherhash import backbones

    network = backbones.create("tiny")
    pixels = torch.randint(0, 256, (11, 3, 32, 32), dtype=torch.uint8)
    images = LiveImages(pixels, torch.ones(11, 2), network, LinearHead(32, 6))
    with torch.no_grad():
        expected = network(pixels.float())
    torch.testing.assert_close(images.features(), expected)
    index = torch.tensor([4, 0, 4])
    torch.manual_seed(0)
    one = images.batch_features(index)
    assert one.shape == (3, 32)
    assert one.requires_grad
    torch.manual_seed(0)
    assert torch.equal(images.batch_features(index), one)
    assert not torch.allclose(one[0], one[2])


def test_views_are_rows_one_view_after_the_other():
    """Every row of a view is the same image as that row of the first view, augmented anew."""
    from fisherhash import backbones

    labels = torch.eye(11)
    still, dark = Strength(smallest=1.0, flip=0.0), Strength(solarise=1.0)
    pixels = torch.randint(0, 256, (11, 3, 32, 32), dtype=torch.uint8)
    network = backbones.create("tiny").eval()
    live = LiveImages(pixels, labels, network, LinearHead(32, 6))
    index = torch.tensor([4, 0, 7])
    batch = live.batch(index, (still, dark))
    assert batch.views == 2
    assert batch.features.shape == (6, 32)
    assert batch.index.tolist() == [4, 0, 7, 4, 0, 7]
    assert torch.equal(batch.labels, labels[batch.index])
    expected = live.features()[index]
    torch.testing.assert_close(batch.features[:3], expected, atol=1e-3, rtol=1e-3)
    assert (batch.features[3:] - expected).abs().max() > 0.01
    assert batch.first.views == 1
    assert torch.equal(batch.first.features, batch.features[:3])

    frozen = FrozenImages(torch.randn(11, 32), labels, LinearHead(32, 6))
    batch = frozen.batch(index, (still, Strength(masked=0.5)))
    assert torch.equal(batch.features[:3], frozen.features()[index])
    assert ((batch.features[3:] == 0) | (batch.features[3:] == 2 * batch.features[:3])).all()
    assert frozen.batch(index).index is index


def test_a_step_of_two_views_is_one_forward_and_after_step_sees_the_first():
    seen = []

    class Both(HashMethod):
        info = MethodInfo("both", "", "", 2024, "", "none")
        views = 2
        strengths = (Strength(), Strength(masked=0.5))

        def loss(self, outputs, batch):
            seen.append((len(outputs), batch.views))
            return {"loss": outputs.square().mean()}

        def after_step(self, outputs, batch):
            seen.append((len(outputs), batch.views))
            assert torch.equal(batch.features, images.features()[batch.index])

    images = FrozenImages(torch.randn(20, 8), torch.zeros(20, 0), LinearHead(8, 6))
    method = Both(bits=6, classes=0)
    Loop(method, images, Settings(epochs=1, batch_size=10)).run()
    assert seen == [(20, 2), (10, 1)] * 2
    with pytest.raises(TypeError, match="Wrong: declare one strength per view, got 1 for 2 views"):

        class Wrong(HashMethod):
            views = 2
