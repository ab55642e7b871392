"""How methods are found, made and refused; tests/test_methods_contract.py has the contract."""

import dataclasses

import pytest
import torch

from fisherhash import methods
from fisherhash.errors import UsageError
from fisherhash.methods import base


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
