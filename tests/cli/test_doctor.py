"""The doctor: what it finds here, and what it says where something is missing."""

import os
import tomllib
from pathlib import Path

import numpy as np
import torch

from fisherhash import __version__
from fisherhash.cli import doctor
from fisherhash.errors import FisherhashError


def test_a_healthy_machine(monkeypatch, tmp_path):
    monkeypatch.setenv("FISHERHASH_CACHE", str(tmp_path / "not" / "yet"))
    monkeypatch.setenv("FISHERHASH_DATA", f"/one{os.pathsep}/two")
    found = doctor.examine()
    assert found["machine"]["fisherhash"] == __version__
    assert found["packages"]["numpy"] == np.__version__
    assert not any("MISSING" in text for text in found["packages"].values())
    assert found["default backbone"]["weights"] == "efficientnet-lite0 loads"
    assert found["folders"]["cache"].startswith(f"{tmp_path / 'not' / 'yet'} (writable, ")
    assert found["folders"]["data"].startswith("/one, /two, ")
    assert not (tmp_path / "not").exists()
    if not torch.cuda.is_available():
        assert found["machine"]["cuda"].startswith("none")


def test_the_core_packages_are_the_projects_dependencies():
    project = Path(__file__).parents[2] / "pyproject.toml"
    core = tomllib.loads(project.read_text(encoding="utf-8"))["project"]["dependencies"]
    named = {text.split("=")[0].split(">")[0].split("<")[0].strip() for text in core}
    assert {name.replace("-", "_") for name in named} == {
        name.replace("-", "_") for name in doctor.CORE
    }


def test_missing_packages_weights_and_rights_are_named(monkeypatch, tmp_path):
    monkeypatch.setattr(doctor, "CORE", ("torch", "no-such-core"))
    monkeypatch.setattr(doctor, "EXTRAS", {"no-such-extra": "plots"})

    def fail(*_, **__):
        raise FisherhashError("the weights are gone")

    monkeypatch.setattr("fisherhash.backbones.create", fail)
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("FISHERHASH_CACHE", str(tmp_path / "file"))
    found = doctor.examine()
    assert found["packages"]["no-such-core"] == "MISSING: reinstall fisherhash"
    assert found["extras"] == {"no-such-extra": "not installed: pip install 'fisherhash[plots]'"}
    assert found["default backbone"]["weights"] == "PROBLEM: the weights are gone"
    assert "PROBLEM: not writable" in found["folders"]["cache"]
    assert "set FISHERHASH_CACHE" in found["folders"]["cache"]
