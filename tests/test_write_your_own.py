"""The examples in docs/write-your-own-method.md, typed word for word, do what the page says."""

import importlib.util
import re
from pathlib import Path

import pytest
import torch

from fisherhash import methods
from fisherhash.cli import main
from fisherhash.methods import base

PAGE = Path(__file__).parents[1] / "docs" / "write-your-own-method.md"
LOSS, SOURCE = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
NAME = "prototypes:Prototypes"


@pytest.fixture
def in_its_folder(tmp_path, monkeypatch):
    (tmp_path / "prototypes.py").write_text(SOURCE)
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def registered(in_its_folder):
    """The method under its own name, as if it belonged to the package."""
    base.register(methods.find(NAME))
    yield "prototypes"
    del base._REGISTRY["prototypes"]


@pytest.fixture(scope="module")
def contract():
    path = Path(__file__).with_name("test_methods_contract.py")
    spec = importlib.util.spec_from_file_location("methods_contract", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_loss_has_a_gradient():
    names = {}
    exec(compile(LOSS, str(PAGE), "exec"), names)
    assert names["outputs"].grad.abs().sum() > 0


def test_it_is_short():
    assert len([line for line in SOURCE.splitlines() if line.strip()]) <= 40


def test_it_passes_the_contract(registered, contract):
    contract.test_info_and_options(registered)
    for bits in (12, 48, 64):
        for dtype in (torch.float32, torch.bfloat16):
            contract.test_loss_is_finite_and_has_a_gradient(registered, bits, dtype)
    for index in ([7], list(range(0, 50, 5)), [i for i in range(60) if i % 5 != 3]):
        contract.test_odd_batches(registered, index)
    contract.test_wrong_shapes_are_refused_with_the_name_of_the_method(registered)
    contract.test_learns_clusters_in_fifty_steps(registered)
    contract.test_several_labels(registered)
    contract.test_a_seed_reproduces(registered)
    contract.test_state_round_trips(registered)
    contract.test_the_head_can_be_restored(registered)


def test_a_command_takes_it_from_the_current_folder(in_its_folder, capsys):
    command = "train sample --bits 12 --epochs 1 --backbone tiny --no-evaluate --out model"
    with pytest.raises(SystemExit) as ended:
        main([*command.split(), "--method", NAME, "--set", "scale=2"])
    assert ended.value.code in (None, 0), capsys.readouterr().err
    assert Path("model/config.json").is_file()
