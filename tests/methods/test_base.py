"""How methods are found, made and refused; tests/test_methods_contract.py has the contract."""

import dataclasses

import pytest
import torch

from fisherhash import methods
from fisherhash.errors import FisherhashError, UsageError
from fisherhash.methods import Batch, base
from fisherhash.model.heads import LinearHead
from fisherhash.system.options import options_of


@pytest.fixture
def clean_registry(monkeypatch):
    """What a test registers is forgotten after it."""
    monkeypatch.setattr(base, "_REGISTRY", dict(base._REGISTRY))


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
        ({"sweeps": "2.5"}, "dfh: sweeps must be a whole number"),
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
        centred: bool = True

    for word, value in (("no", False), ("TRUE", True), ("0", False)):
        assert methods.create("toy", bits=4, classes=2, options={"centred": word}).centred is value
    with pytest.raises(UsageError, match="centred must be true or false, got 'maybe'"):
        methods.create("toy", bits=4, classes=2, options={"centred": "maybe"})

    class Other(base.FeatureMethod):
        info = toy_info

    with pytest.raises(ValueError, match="two methods are called 'toy'"):
        base.register(Other)


def test_a_constructor_of_ones_own_is_refused():
    """A subclass would get a generated one, which never calls it."""
    with pytest.raises(TypeError, match="Toy: declare options as fields and write __post_init__"):

        class Toy(base.FeatureMethod):
            def __init__(self, *, bits, classes):
                super().__init__(bits=bits, classes=classes)


def test_sign_is_never_zero():
    values = torch.tensor([-1.5, -0.0, 0.0, 1e-30, 2.0], dtype=torch.float64)
    found = base.sign(values)
    assert found.tolist() == [-1, -1, -1, 1, 1]
    assert found.dtype == torch.float64


def test_a_value_out_of_range_is_refused_however_the_method_is_made():
    for make in (
        lambda **options: methods.create("dfh", bits=8, classes=3, options=options),
        lambda **options: methods.find("dfh")(bits=8, classes=3, **options),
    ):
        for options, sentence in (
            ({"margin": -1.0}, "dfh: margin must not be negative, got -1.0"),
            ({"margin": float("nan")}, "dfh: margin must not be negative, got nan"),
            ({"sweeps": 0}, "dfh: sweeps must be greater than 0, got 0"),
            ({"affinity": 2.0}, "dfh: affinity must be between 0 and 1, got 2.0"),
            ({"sweeps": 1.5}, "dfh: sweeps must be a whole number, got 1.5"),
            ({"center_step": "exakt"}, "dfh: unknown center_step 'exakt'. Did you mean 'exact'"),
        ):
            with pytest.raises(UsageError, match=sentence):
                make(**options)


class Toy(base.HashMethod):
    """Returns what a test wants it to return."""

    info = base.MethodInfo("toy", "", "", 2024, "", "classes")

    def loss(self, outputs, batch):
        return self.answer(outputs)


def toy(answer):
    method = Toy(bits=6, classes=3)
    method.answer = answer
    return method


def batch_of(count=4, classes=3):
    return Batch(torch.zeros(count, classes), torch.arange(count), torch.zeros(count, 10))


@pytest.mark.parametrize(
    ("answer", "sentence"),
    [
        (lambda u: {"pair": u.mean()}, r"toy: loss\(\) must return a dict with the key 'loss', "
         "got the keys pair"),
        (lambda u: u.mean(), r"toy: loss\(\) must return a dict with the key 'loss', got tensor"),
        (lambda u: None, "toy: .* got None"),
        (lambda u: {"loss": u.mean(1)}, r"toy: .* shape \(\); 'loss' is shape \(4,\)"),
        (lambda u: {"loss": 1.5}, "toy: .*; 'loss' is 1.5"),
        (lambda u: {"loss": u.mean(), "bits": u[0]}, r"toy: .*; 'bits' is shape \(6,\)"),
        (lambda u: {"loss": u.mean().detach()}, "toy: the term 'loss' has no gradient"),
    ],
)  # fmt: skip
def test_a_loss_that_breaks_the_contract_is_named(answer, sentence):
    with pytest.raises(UsageError, match=sentence):
        toy(answer)(torch.zeros(4, 6, requires_grad=True), batch_of())


def test_a_loss_that_keeps_the_contract_passes_unchanged():
    method = toy(lambda u: {"loss": u.square().mean(), "size": u.abs().max()})
    outputs = torch.ones(4, 6, requires_grad=True)
    terms = method(outputs, batch_of())
    assert {name: float(term.detach()) for name, term in terms.items()} == {
        "loss": 1.0,
        "size": 1.0,
    }
    terms["loss"].backward()
    assert outputs.grad is not None
    with torch.no_grad():
        assert not method(outputs, batch_of())["loss"].requires_grad


@pytest.mark.parametrize(
    ("shape", "batch", "sentence"),
    [
        ((4, 5), batch_of(), r"toy: outputs must have shape \(4, 6\), got \(4, 5\)"),
        ((3, 6), batch_of(), r"toy: outputs must have shape \(4, 6\), got \(3, 6\)"),
        ((4, 6), batch_of(classes=2), r"toy: labels must have shape \(4, 3\), got \(4, 2\)"),
        ((4, 6), dataclasses.replace(batch_of(), features=torch.zeros(5, 2)),
         r"toy: features must have shape \(4, 2\), got \(5, 2\)"),
        ((4, 6), dataclasses.replace(batch_of(), index=torch.zeros(4, 1)),
         r"toy: index must have shape \(4,\), got \(4, 1\)"),
    ],
)  # fmt: skip
def test_shapes_that_do_not_fit_are_named_before_the_method_runs(shape, batch, sentence):
    def never(outputs):
        raise AssertionError("the method was called")

    with pytest.raises(UsageError, match=sentence):
        toy(never)(torch.zeros(shape, requires_grad=True), batch)


class Closed(base.FeatureMethod):
    """Returns the head that a test wants."""

    info = base.MethodInfo("closed", "", "", 2024, "", "none")

    def solve(self, features, labels, *, seed):
        return self.answer()


def closed(answer):
    method = Closed(bits=6, classes=3)
    method.answer = answer
    return method


def broken_head():
    head = LinearHead(10, 6)
    with torch.no_grad():
        head.linear.bias[2] = torch.nan
    return head


@pytest.mark.parametrize(
    ("answer", "error", "sentence"),
    [
        (lambda: LinearHead(10, 8), UsageError,
         "closed: .* from 10 features to 6 bits, got one from 10 to 8"),
        (lambda: LinearHead(9, 6), UsageError, "closed: .* got one from 9 to 6"),
        (lambda: torch.zeros(10, 6), UsageError,
         r"closed: solve\(\) must return a Head, got Tensor"),
        (broken_head, FisherhashError,
         "closed: 'linear.bias' of the head holds NaN or infinite values"),
    ],
)  # fmt: skip
def test_a_head_that_breaks_the_contract_is_named(answer, error, sentence):
    with pytest.raises(error, match=sentence) as caught:
        closed(answer).fit(torch.ones(5, 10))
    assert type(caught.value) is error


def test_features_that_do_not_fit_are_named_before_the_method_runs():
    method = closed(lambda: pytest.fail("the method was called"))
    for features, labels, sentence in (
        (torch.ones(5), None, r"closed: features must have shape \(N, d\).*got \(5,\)"),
        (torch.ones(0, 10), None, r"closed: features must have shape .* got \(0, 10\)"),
        (torch.ones(5, 10), torch.ones(5, 2), r"closed: labels must have shape \(5, 3\).*\(5, 2\)"),
        (torch.ones(5, 10), torch.ones(4, 3), r"closed: labels must have shape \(5, 3\).*\(4, 3\)"),
    ):
        with pytest.raises(UsageError, match=sentence):
            method.fit(features, labels)
    features = torch.ones(5, 10)
    features[3, 1] = torch.inf
    with pytest.raises(FisherhashError, match="infinite values in 1 row, the first is row 3"):
        method.fit(features)
    head = LinearHead(10, 6)
    assert closed(lambda: head).fit(torch.ones(5, 10), torch.ones(5, 3)) is head


# Numbers that a search leaves alone, and why.
NOT_SEARCHED = {
    "loss_scale": "it acts as the learning rate, which is searched",
    "class_weight": "CNNH+ only",
    "positive_weight": "defines a row of the tables",
    "precision": "the authors' value in every experiment",
    "width": "the authors' value in every experiment (DHD)",
}


@pytest.mark.parametrize("name", methods.registry())
def test_hyper_parameters_carry_ranges(name):
    """The tuner needs nothing more: each number is searched, and its default lies in its range."""
    method = methods.find(name)
    for option in options_of(method):
        if option.tuned is None:
            assert option.kind is not float or option.name in NOT_SEARCHED, option.name
        elif not option.tuned.choices:
            default = getattr(method, option.name)
            assert option.tuned.least <= default <= option.tuned.most, option.name
            assert not option.range.fault(option.drawn(0.0)), option.name
            assert not option.range.fault(option.drawn(1.0)), option.name
        elif getattr(method, option.name) not in option.tuned.choices:
            # What the paper prints need not be worth a search, but what is searched must exist.
            assert set(option.tuned.choices) < set(option.choices), option.name
