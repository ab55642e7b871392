"""The doctor: what it finds here, and what it says where something is missing."""

import json
import os
import tomllib
from pathlib import Path

import numpy as np
import pytest

from fisherhash import __version__
from fisherhash.cli import tools
from fisherhash.errors import FisherhashError


@pytest.fixture
def examine(run):
    """What the doctor finds."""

    def examine():
        code, out, err = run("doctor", "--json")
        assert (code, err) == (0, "")
        return json.loads(out)

    return examine


def test_a_healthy_machine(examine, monkeypatch, tmp_path):
    monkeypatch.setenv("FISHERHASH_CACHE", str(tmp_path / "not" / "yet"))
    monkeypatch.setenv("FISHERHASH_DATA", f"/one{os.pathsep}/two")
    found = examine()
    assert found["machine"]["fisherhash"] == __version__
    assert found["packages"]["numpy"] == np.__version__
    assert not any("MISSING" in text for text in found["packages"].values())
    assert found["default backbone"]["weights"] == "efficientnet-lite0 loads"
    assert found["folders"]["cache"].startswith(f"{tmp_path / 'not' / 'yet'} (writable, ")
    assert found["folders"]["data"].startswith("/one, /two, ")
    assert not (tmp_path / "not").exists()


def test_the_core_packages_are_the_projects_dependencies():
    project = Path(__file__).parents[2] / "pyproject.toml"
    core = tomllib.loads(project.read_text(encoding="utf-8"))["project"]["dependencies"]
    named = {text.split("=")[0].split(">")[0].split("<")[0].strip() for text in core}
    assert named == set(tools.CORE)


def test_missing_packages_weights_and_rights_are_named(examine, monkeypatch, tmp_path):
    monkeypatch.setattr(tools, "CORE", ("torch", "no-such-core"))
    monkeypatch.setattr(tools, "EXTRAS", {"no-such-extra": "plots"})

    def fail(*_, **__):
        raise FisherhashError("the weights are gone")

    monkeypatch.setattr("fisherhash.backbones.create", fail)
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("FISHERHASH_CACHE", str(tmp_path / "file"))
    found = examine()
    assert found["packages"]["no-such-core"] == "MISSING: reinstall fisherhash"
    assert found["extras"] == {"no-such-extra": "not installed: pip install 'fisherhash[plots]'"}
    assert found["default backbone"]["weights"] == "PROBLEM: the weights are gone"
    assert "PROBLEM: not writable" in found["folders"]["cache"]
    assert "set FISHERHASH_CACHE" in found["folders"]["cache"]
