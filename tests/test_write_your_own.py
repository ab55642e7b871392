"""The method in docs/write-your-own-method.md, typed word for word, passes the contract."""

import importlib.util
import re
from pathlib import Path

import pytest
import torch

from fisherhash.methods import base

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def documented():
    text = (ROOT / "docs" / "write-your-own-method.md").read_text(encoding="utf-8")
    source = re.search(r"```python\n(.*?)```", text, re.DOTALL).group(1)
    before = dict(base._REGISTRY)
    base._REGISTRY.pop("prototypes", None)  # whoever follows the page has it already
    others = set(base._REGISTRY)
    exec(compile(source, "write-your-own-method.md", "exec"), {"__name__": "documented"})
    (name,) = set(base._REGISTRY) - others
    yield name, source
    base._REGISTRY.clear()
    base._REGISTRY.update(before)


@pytest.fixture(scope="module")
def contract():
    path = Path(__file__).with_name("test_methods_contract.py")
    spec = importlib.util.spec_from_file_location("methods_contract", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_it_is_short(documented):
    lines = [line for line in documented[1].splitlines() if line.strip()]
    assert len(lines) <= 40


def test_it_passes_the_contract(documented, contract):
    name = documented[0]
    contract.test_info_and_options(name)
    for bits in (12, 48, 64):
        for dtype in (torch.float32, torch.bfloat16):
            contract.test_loss_is_finite_and_has_a_gradient(name, bits, dtype)
    for index in ([7], list(range(0, 50, 5)), [i for i in range(60) if i % 5 != 3]):
        contract.test_odd_batches(name, index)
    contract.test_wrong_shapes_are_refused_with_the_name_of_the_method(name)
    contract.test_learns_clusters_in_fifty_steps(name)
    contract.test_several_labels(name)
    contract.test_a_seed_reproduces(name)
    contract.test_state_round_trips(name)
    contract.test_the_head_can_be_restored(name)
