"""Models on the hub, against a stand-in that speaks its HTTP API."""

import importlib.util
import json
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest

from fisherhash.cli import main
from fisherhash.errors import FisherhashError, UsageError
from fisherhash.model import builtin
from fisherhash.model.hasher import Hasher
from fisherhash.model.hub import download_model, upload_model

constants = pytest.importorskip("huggingface_hub.constants")
_PLACE = Path(__file__).parent / "hub_server.py"
_SPEC = importlib.util.spec_from_file_location("hub_server", _PLACE)
hub_server = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(hub_server)


def connect(monkeypatch, url):
    """What HF_ENDPOINT does to a new process."""
    monkeypatch.setattr(constants, "ENDPOINT", url)
    template = url + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)


@pytest.fixture
def hub(monkeypatch, tmp_path):
    with hub_server.running_hub() as server:
        connect(monkeypatch, server.url)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
        monkeypatch.setenv("HF_TOKEN", hub_server.TOKEN)
        yield server


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models") / "model"
    Hasher.load("general-64-int8").save(folder)
    (folder / "notes.txt").write_text("private")
    return folder


def run(*words):
    with pytest.raises(SystemExit) as ended:
        main([str(word) for word in words])
    return ended.value.code


def test_a_model_is_pushed_and_loaded_by_its_name(hub, saved, photos, capsys):
    assert run("push", saved, "user/name", "--private") in (None, 0)
    assert capsys.readouterr().out == "hf:user/name\n"
    assert hub.private == {"user/name": True}
    _, files = hub.models["user/name"][-1]
    assert set(files) == {"README.md", "config.json", "model.onnx"}  # and not notes.txt
    hasher, image = Hasher.load("hf:user/name"), photos / "a" / "00.png"
    assert hasher.fingerprint() == Hasher.load(saved).fingerprint()
    np.testing.assert_array_equal(hasher.encode(image), Hasher.load(saved).encode(image))
    assert run("encode", image, "--model", "hf:user/name") in (None, 0)
    assert capsys.readouterr().out


def test_a_new_commit_replaces_the_model_and_the_old_one_has_its_revision(hub, saved, tmp_path):
    upload_model(saved, "user/name")
    old, _ = hub.models["user/name"][-1]
    other = tmp_path / "other"
    shutil.copytree(builtin.folder("general-64-int8"), other)
    config = json.loads((saved / "config.json").read_text())
    (other / "config.json").write_text(json.dumps(config | {"details": {"note": "new"}}))
    (other / "README.md").unlink()
    upload_model(other, "user/name")
    _, files = hub.models["user/name"][-1]
    assert set(files) == {"config.json", "model.onnx"}  # no card of the old model
    assert Hasher.load("hf:user/name").details == {"note": "new"}
    assert Hasher.load(f"hf:user/name@{old}").details == config["details"]


def test_without_a_network_the_downloaded_model_is_used(hub, saved, monkeypatch):
    upload_model(saved, "user/name")
    folder = download_model("hf:user/name")
    hub.downloads.clear()
    connect(monkeypatch, "http://127.0.0.1:9")
    assert download_model("hf:user/name") == folder
    assert Hasher.load("hf:user/name").bits == 64
    assert not hub.downloads
    with pytest.raises(FisherhashError, match=r"cannot be reached .* Connect to the network") as no:
        Hasher.load("hf:user/another")
    assert not isinstance(no.value, UsageError)
    with pytest.raises(FisherhashError, match=r"cannot be uploaded: http://127\.0\.0\.1:9 cannot"):
        upload_model(saved, "user/name")


def test_what_is_wrong_is_said(hub, saved, tmp_path, monkeypatch):
    for wrong in ("hf:name", "hf:user/name/more", "hf:user/na me"):
        with pytest.raises(UsageError, match="is called user/name"):
            Hasher.load(wrong)
    with pytest.raises(UsageError, match="there is no user/nothing on http"):
        Hasher.load("hf:user/nothing")
    upload_model(saved, "user/name")
    with pytest.raises(UsageError, match="has no such revision"):
        Hasher.load("hf:user/name@v9")
    hub.commit("user/empty", {"README.md": b"# a card"})
    with pytest.raises(UsageError, match=r"not a model of fisherhash: it has no config\.json"):
        Hasher.load("hf:user/empty")
    with pytest.raises(UsageError, match="does not exist"):
        upload_model(tmp_path / "nothing", "user/name")
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    with pytest.raises(FisherhashError, match="refuses it"):
        upload_model(saved, "user/name")


def test_damage_on_the_hub_is_noticed(hub, saved):
    files = {name: (saved / name).read_bytes() for name in ("config.json", "model.onnx")}
    files["model.onnx"] = files["model.onnx"][:-1] + b"\0"
    hub.commit("user/damaged", files)
    with pytest.raises(FisherhashError, match=r"model\.onnx is damaged"):
        Hasher.load("hf:user/damaged")


def test_without_the_extra_its_name_is_said(saved, monkeypatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    for work in (lambda: Hasher.load("hf:user/name"), lambda: upload_model(saved, "user/name")):
        with pytest.raises(FisherhashError, match=r"pip install 'fisherhash\[hub\]'"):
            work()
