"""Every way in which a weights file can be wrong ends in one sentence with its path."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from fisherhash import backbones
from fisherhash.backbones.weights import copy_weights, read_weights
from fisherhash.errors import FisherhashError, UsageError


@pytest.fixture
def state():
    return backbones.create("tiny").state_dict()


@pytest.fixture(params=["w.safetensors", "w.pth"])
def file(request, tmp_path, state):
    path = tmp_path / request.param
    if path.suffix == ".safetensors":
        save_file(state, path)
    else:
        torch.save(state, path)
    return path


def refused(path: Path, kind: type[FisherhashError], *words: str) -> str:
    with pytest.raises(FisherhashError) as caught:
        backbones.create("tiny", weights=path)
    assert caught.type is kind
    message = str(caught.value)
    assert str(path) in message
    assert all(word in message for word in words), message
    assert "\n" not in message
    return message


def test_a_good_file_is_read(file, state):
    found = backbones.create("tiny", weights=file).state_dict()
    assert found.keys() == state.keys()
    assert all(torch.equal(found[name], state[name]) for name in state)


@pytest.mark.parametrize("key", ["state_dict", "model"])
def test_nested_and_parallel(tmp_path, state, key):
    torch.save({key: {f"module.{n}": t for n, t in state.items()}, "epoch": 3}, tmp_path / "w.pth")
    assert read_weights(tmp_path / "w.pth").keys() == state.keys()


def test_missing_file_and_folder(tmp_path):
    refused(tmp_path / "none.pth", UsageError, "does not exist")
    refused(tmp_path, UsageError, "is a folder")


@pytest.mark.parametrize("share", [0.0, 0.5, 0.99])
def test_cut_file(file, share):
    whole = file.read_bytes()
    file.write_bytes(whole[: int(share * len(whole))])
    refused(file, FisherhashError, "damaged, cut short", "again")


class Evil:
    def __reduce__(self):
        return exec, ("raise SystemExit('the pickle ran')",)


def test_a_pickle_that_runs_code_is_not_opened(tmp_path):
    torch.save({"layers.0.weight": Evil()}, tmp_path / "evil.pth")
    refused(tmp_path / "evil.pth", FisherhashError, "could run code", "was not opened")
    (tmp_path / "plain.pth").write_bytes(pickle.dumps(Evil(), protocol=2))
    refused(tmp_path / "plain.pth", FisherhashError, "could run code")


def test_a_whole_model_instead_of_its_tensors(tmp_path):
    torch.save(nn.Linear(2, 2), tmp_path / "model.pth")
    refused(tmp_path / "model.pth", FisherhashError, "state_dict()")


@pytest.mark.parametrize("content", [[1, 2], {"a": 1}, torch.zeros(3), {"layers.0.weight": "x"}])
def test_no_state_dict(tmp_path, content):
    torch.save(content, tmp_path / "w.pth")
    refused(tmp_path / "w.pth", UsageError, "not a state dict")


def test_another_architecture(tmp_path):
    other = backbones.create("squeezenet1.0", pretrained=False).state_dict()
    save_file(other, tmp_path / "squeezenet.safetensors")
    refused(
        tmp_path / "squeezenet.safetensors",
        UsageError,
        "4 missing (layers.2.bias, layers.2.weight, layers.4.bias, …)",
        "unexpected (layers.10.expand1x1.bias, layers.10.expand1x1.weight, ",
        ", …)",
        "layers.0.weight is (96, 3, 7, 7), expected (8, 3, 3, 3)",
        "Expected: a state dict of tiny",
    )
    with pytest.raises(UsageError, match=r"missing \(blocks.*Expected: EfficientNet-Lite0"):
        backbones.create("efficientnet-lite0", weights=tmp_path / "squeezenet.safetensors")


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_values_that_are_not_finite(tmp_path, state, value):
    state["layers.2.weight"][0, 0] = value
    torch.save(state, tmp_path / "w.pth")
    refused(tmp_path / "w.pth", FisherhashError, "layers.2.weight holds values that are not finite")


def test_nothing_is_copied_when_anything_is_wrong(state):
    network = backbones.create("tiny")
    bad = {name: tensor + 1 for name, tensor in state.items()}
    bad["layers.4.bias"] = torch.zeros(5)
    with pytest.raises(UsageError):
        copy_weights(network, bad, path="w.pth", what="tiny")
    assert all(torch.equal(network.state_dict()[name], state[name]) for name in state)
