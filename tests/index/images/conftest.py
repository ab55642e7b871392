"""Hashers, folders of images, and indexes."""

import shutil

import numpy as np
import pytest
import torch

from fisherhash import backbones
from fisherhash.index import Index
from fisherhash.index.images import encoding
from fisherhash.model.hasher import Hasher
from fisherhash.model.head import linear_head
from fisherhash.model.torch_network import TorchNetwork


@pytest.fixture(scope="session")
def make_hasher():
    """Makes a small hasher; the same one for the same seed."""

    def make(seed=0, bits=24, classes=()):
        network = TorchNetwork(backbones.create("tiny", image_size=32), torch.device("cpu"))
        rng = np.random.default_rng(seed)
        weight = rng.normal(size=(network.width, bits))
        features = np.abs(rng.normal(size=(64, network.width))) * 0.1
        head = linear_head(weight, -(features @ weight).mean(axis=0))
        return Hasher(network, head, method="lsh", classes=classes)

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
    return lambda count: monkeypatch.setattr(encoding, "IMAGES_PER_COMMIT", count)


@pytest.fixture
def new_index(tmp_path):
    """An empty index of codes of 8 bits, open for writing."""
    with Index.create(tmp_path / "new.index", bits=8) as index:
        yield index
