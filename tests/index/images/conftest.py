"""Hashers, folders of images, and indexes: on the disk, and in memory by URI."""

import importlib
import shutil
from pathlib import Path

import pytest
import torch

from fisherhash import backbones
from fisherhash.index import Index
from fisherhash.index.images import syncing
from fisherhash.model.heads import LinearHead
from fisherhash.model.torch_hasher import TorchHasher


@pytest.fixture(scope="session")
def make_hasher():
    """Makes a small hasher; the same one for the same seed."""

    def make(seed=0, bits=24):
        network = backbones.create("tiny", image_size=32)
        torch.manual_seed(seed)
        head = LinearHead(network.features, bits)
        head.start(torch.randn(64, network.features).abs() * 0.1)
        return TorchHasher(network, head, "lsh")

    return make


@pytest.fixture(scope="session")
def model(make_hasher, tmp_path_factory):
    """A model folder; not to be changed by a test."""
    folder = tmp_path_factory.mktemp("model") / "tiny"
    make_hasher().save(folder)
    return folder


@pytest.fixture
def album(write_photos, tmp_path):
    """Three labels of four images each, one of them in a deeper folder, and two without label."""
    root = write_photos(tmp_path / "album", {"cats": 4, "dogs": 4, "Ünïcode": 4})
    deep = root / "cats" / "old ones"
    deep.mkdir()
    (root / "cats" / "00.png").rename(deep / "00.png")
    shutil.copy(root / "dogs" / "00.png", root / "top.png")
    shutil.copy(root / "dogs" / "01.png", root / "TOP.JPEG")
    return root


@pytest.fixture
def blocks_of(monkeypatch):
    """Sets how many images one commit takes."""
    return lambda count: monkeypatch.setattr(syncing, "IMAGES_PER_COMMIT", count)


@pytest.fixture(params=["path", "memory"])
def new_uri(request, tmp_path, monkeypatch):
    """Where a new index may be created, for each back-end."""
    if request.param == "path":
        return tmp_path / "new.index"
    monkeypatch.syspath_prepend(Path(__file__).parents[1] / "contract")
    importlib.import_module("memory")
    return f"memory://{tmp_path}"


@pytest.fixture
def new_index(new_uri):
    """An empty index of codes of 8 bits, open for writing, for each back-end."""
    with Index.create(new_uri, bits=8) as index:
        yield index
