"""The contract every registered method keeps, and how methods are found, made and refused."""

import dataclasses
import re

import pytest
import torch

from fisherhash import methods
from fisherhash.errors import UsageError
from fisherhash.loop import FrozenImages, Loop, Settings
from fisherhash.methods import base

every = pytest.mark.parametrize("name", sorted(methods.registry()))
trained = pytest.mark.parametrize(
    "name", [n for n, m in methods.registry().items() if m.info.fit == "gradient"]
)


@pytest.fixture
def clean_registry(monkeypatch):
    """What a test registers is forgotten after it."""
    monkeypatch.setattr(base, "_REGISTRY", dict(base._REGISTRY))


def training_set(count=24, width=16, classes=3, *, multilabel=False):
    generator = torch.Generator().manual_seed(0)
    labels = torch.eye(classes)[torch.arange(count) % classes]
    if multilabel:
        labels[::5, 0] = 1
    centres = torch.randn(classes, width, generator=generator)
    return labels @ centres + 0.3 * torch.randn(count, width, generator=generator), labels


@every
def test_info_names_the_paper(name):
    info = methods.find(name).info
    assert info.name == name
    assert re.fullmatch(r"[a-z0-9-]+", name)
    assert info.title
    assert info.venue
    assert 1990 < info.year < 2030
    assert info.url.startswith("https://")
    closed = issubclass(methods.find(name), methods.FeatureMethod)
    assert info.fit == ("closed-form" if closed else "gradient")


@every
def test_options_are_keywords_with_defaults_kept_under_their_names(name):
    method = methods.find(name)
    made = methods.create(name, bits=8, classes=3)
    for key, parameter in methods.hyper_parameters(method).items():
        assert parameter.kind is parameter.KEYWORD_ONLY
        assert parameter.default is not parameter.empty
        assert methods.resolved_options(made)[key] == parameter.default
    assert made.bits == 8


@every
def test_an_unknown_option_names_the_nearest_and_bits_are_checked(name):
    with pytest.raises(UsageError, match=f"unknown option of {name} 'no_such_thing'"):
        methods.create(name, bits=8, classes=3, options={"no_such_thing": 1})
    for bits in (0, 5000):
        with pytest.raises(UsageError, match=f"between 1 and 1024, got {bits}"):
            methods.create(name, bits=bits, classes=3)


@every
def test_every_method_gives_a_head_with_its_bits(name):
    learner = methods.create(name, bits=8, classes=3)
    features, labels = training_set()
    torch.manual_seed(0)
    if isinstance(learner, methods.HashMethod):
        head = learner.head(features.shape[1])
        head.start(features)
    else:
        head = learner.fit(features, labels, seed=0)
    logits = head.eval().logits(features)
    assert logits.shape == (24, 8)
    assert torch.isfinite(logits).all()


@trained
@pytest.mark.parametrize("multilabel", [False, True])
def test_every_trained_method_trains_and_its_loss_changes_nothing(name, multilabel):
    if multilabel and not methods.find(name).info.multilabel:
        pytest.skip(f"{name} is not defined for several labels")
    features, labels = training_set(multilabel=multilabel)
    learner = methods.create(name, bits=8, classes=3)
    torch.manual_seed(0)
    head = learner.head(features.shape[1])
    head.start(features)
    loop = Loop(learner, FrozenImages(features, labels, head), Settings(epochs=2, batch_size=8))
    loop.start()
    before = {k: v.clone() for k, v in learner.state_dict().items()}
    index = torch.arange(8)
    batch = methods.Batch(labels[index], index, features[index])
    outputs = head(features[index])
    terms = learner.loss(outputs, batch)
    assert "loss" in terms
    assert all(value.ndim == 0 and torch.isfinite(value) for value in terms.values())
    terms["loss"].backward()
    assert any(p.grad is not None and p.grad.abs().sum() > 0 for p in head.parameters())
    after = learner.state_dict()
    assert all(torch.equal(before[k], after[k]) for k in before)
    loop.run()


def test_a_typo_gets_the_nearest_method():
    with pytest.raises(UsageError, match=r"unknown method 'dfhh'\. Did you mean 'dfh'"):
        methods.find("dfhh")
    with pytest.raises(UsageError, match=r"unknown option of dfh 'margn'\. Did you mean 'margin'"):
        methods.create("dfh", bits=8, classes=3, options={"margn": 1.0})


def test_text_options_become_what_the_method_declares():
    made = methods.create(
        "dfh",
        bits=8,
        classes=3,
        options={"margin": "1.5", "sweeps": "7", "center_step": "gradient", "parts": "pair"},
    )
    assert (made.margin, made.sweeps, made.center_step) == (1.5, 7, "gradient")
    for wrong, sentence in (
        ({"margin": "wide"}, "dfh: margin must be a number, got 'wide'"),
        ({"sweeps": "2.5"}, "dfh: sweeps must be a number"),
        ({"center_step": "exakt"}, "Did you mean 'exact'"),
        ({"parts": "pear"}, "Did you mean 'pair'"),
    ):
        with pytest.raises(UsageError, match=sentence):
            methods.create("dfh", bits=8, classes=3, options=wrong)


@pytest.mark.usefixtures("clean_registry")
def test_truth_values_and_names_that_clash():
    toy_info = dataclasses.replace(methods.find("lsh").info, name="toy")

    @base.register
    class Toy(base.FeatureMethod):
        info = toy_info

        def __init__(self, *, bits: int, classes: int = 0, centred: bool = True) -> None:
            super().__init__(bits=bits, classes=classes)
            self.centred = centred

    for word, value in (("no", False), ("TRUE", True), ("0", False)):
        assert methods.create("toy", bits=4, classes=2, options={"centred": word}).centred is value
    with pytest.raises(UsageError, match="centred must be true or false, got 'maybe'"):
        methods.create("toy", bits=4, classes=2, options={"centred": "maybe"})

    class Other(base.FeatureMethod):
        info = toy_info

    with pytest.raises(ValueError, match="two methods are called 'toy'"):
        base.register(Other)


def test_sign_is_never_zero():
    values = torch.tensor([-1.5, -0.0, 0.0, 1e-30, 2.0], dtype=torch.float64)
    found = base.sign(values)
    assert found.tolist() == [-1, -1, -1, 1, 1]
    assert found.dtype == torch.float64
