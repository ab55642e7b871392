"""Losses for anybody's loop, and methods of anybody's package."""

import importlib.metadata
import subprocess
import sys
from textwrap import dedent

import pytest
import torch

from fisherhash import losses
from fisherhash.errors import UsageError
from fisherhash.methods import Batch, create, find, registry
from fisherhash.methods import base as methods_base
from fisherhash.methods.dhn import DHN

MINE = dedent('''
    """A method in a package of its own."""

    import torch
    from fisherhash.methods import HashMethod, MethodInfo


    class Mine(HashMethod):
        """The classes' numbers as codes."""

        info = MethodInfo(
            name="mine", title="Mine", venue="Nowhere", year=2026, url="https://example.org",
            supervision="classes",
        )
        scale: float = 1.0

        def loss(self, outputs, batch):
            return {"loss": self.scale * (outputs - batch.labels[:, :1]).square().mean()}
''')


@pytest.mark.parametrize("name", losses.LOSSES)
def test_a_loss_is_that_of_the_method(name):
    torch.manual_seed(0)
    outputs = torch.randn(12, 8, requires_grad=True)
    numbers = torch.arange(12) % 3
    found = losses.LOSSES[name]()(outputs, numbers)
    rows = torch.eye(3)[numbers]
    batch = Batch(rows, torch.arange(12), outputs)
    expected = create(name, bits=8, classes=3)(outputs, batch)["loss"]
    assert torch.equal(found, expected)
    assert torch.equal(losses.LOSSES[name]()(outputs, rows), expected)
    found.backward()
    assert outputs.grad.abs().sum() > 0


def test_losses_take_options_and_learn():
    """Outputs that are trained by the loss alone have nearly the same code in each class."""
    loss = losses.DHN(scale=0.3)
    assert str(loss) == "DHN(dhn, scale=0.3)"
    outputs = torch.randn(30, 8, generator=torch.Generator().manual_seed(0)).requires_grad_()
    labels = torch.arange(30) % 2
    optimizer = torch.optim.Adam([outputs], lr=0.1)
    for _ in range(200):
        optimizer.zero_grad()
        loss(outputs, labels).backward()
        optimizer.step()
    codes = (outputs.detach() > 0).float()
    apart, same = torch.cdist(codes, codes, p=1), labels[:, None] == labels
    assert apart[same].mean() < 1
    assert apart[~same].mean() > 4


def test_what_is_no_loss_is_named():
    assert {"dfh", "hashnet", "itq"}.isdisjoint(losses.LOSSES)
    with pytest.raises(AttributeError, match="there is no loss 'DFH'; there are DCH, DHN"):
        losses.DFH()
    with pytest.raises(UsageError, match="Did you mean 'scale'"):
        losses.DHN(scael=1.0)
    with pytest.raises(UsageError, match="labels one row for each"):
        losses.DHN()(torch.randn(4, 8), torch.zeros(3))


@pytest.fixture
def package(tmp_path, monkeypatch):
    """A file with a method, in the current folder."""
    (tmp_path / "mine_of_somebody.py").write_text(MINE)
    monkeypatch.chdir(tmp_path)
    yield "mine_of_somebody:Mine"
    sys.modules.pop("mine_of_somebody", None)


def test_a_method_is_found_by_module_and_class(package):
    before = list(sys.path)
    method = create(package, bits=4, classes=2, options={"scale": "2"})
    assert (type(method).__name__, method.scale) == ("Mine", 2.0)
    assert sys.path == before
    assert find("fisherhash.methods.dhn:DHN") is DHN
    for wrong, said in (
        ("mine_of_somebody:Yours", "cannot be imported: .*Yours"),
        ("nowhere_at_all:Mine", "cannot be imported: No module named 'nowhere_at_all'"),
        ("mine_of_somebody:torch", "is no method"),
    ):
        with pytest.raises(UsageError, match=said):
            find(wrong)


def test_a_method_of_an_installed_package_is_registered(package, monkeypatch):
    entry = importlib.metadata.EntryPoint("mine", package, "fisherhash.methods")
    monkeypatch.setattr(methods_base, "_installed", lambda: {"mine": entry, "dfh": entry})
    assert find("mine").info.name == "mine"
    assert registry()["mine"] is find("mine")
    assert registry()["dfh"].__name__ == "DFH"
    with pytest.raises(UsageError, match="Did you mean 'mine'"):
        find("minne")


def test_the_command_line_trains_a_method_of_ones_own(package, photos, tmp_path):
    """In a process of its own, in the folder of the file."""
    words = f"train {photos} --method {package} --backbone tiny --bits 8 --epochs 2"
    words += f" --out {tmp_path}/m"
    done = subprocess.run(
        [sys.executable, "-c", f"from fisherhash.cli import main; main({words.split()!r})"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "Method: Mine, Nowhere 2026" in (tmp_path / "m" / "README.md").read_text()
