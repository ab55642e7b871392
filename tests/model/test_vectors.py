"""Hashers of vectors, and hashers of images on features of their backbone."""

import numpy as np
import pytest
import torch
from PIL import Image

from fisherhash import Hasher, backbones
from fisherhash.errors import UsageError
from fisherhash.model.heads import LinearHead
from fisherhash.model.torch_network import TorchNetwork


def hasher_of(width, network=None):
    torch.manual_seed(0)
    head = LinearHead(width, 24)
    head.start(torch.randn(64, width))
    return Hasher(network, head.finished(), method="lsh")


def tiny_hasher():
    return hasher_of(32, TorchNetwork(backbones.create("tiny"), torch.device("cpu")))


@pytest.fixture
def vectors():
    return hasher_of(40)


def test_a_vector_has_the_same_logits_alone_and_in_every_block(vectors):
    x = np.random.default_rng(0).normal(size=(600, 40)).astype(np.float32)
    expected = vectors.head.logits(x)
    for row in (0, 1, 255, 256, 511, 599):
        alone = vectors.head.logits(x[row : row + 1])
        np.testing.assert_array_equal(alone, expected[row : row + 1])
    np.testing.assert_array_equal(vectors.head.logits(x[::-1].copy()), expected[::-1])
    blocks = list(vectors.encode_feature_blocks(x, block=100))
    assert np.concatenate([part.indices for part in blocks]).tolist() == list(range(600))
    joined = np.concatenate([part.codes for part in blocks])
    np.testing.assert_array_equal(joined, vectors.encode_features(x))
    np.testing.assert_array_equal(vectors.encode_features(x[7]), joined[7:8])


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (np.zeros((3, 41), np.float32), "vectors of 41 dimensions; the model takes"),
        (np.full((3, 40), np.nan), "in 3 rows: 0, 1, 2"),
        (np.zeros((3, 40), int), "float16, float32 or float64"),
        (np.full((3, 40), None), "not object"),
        (np.zeros((0, 40)), "array"),
    ],
)
def test_other_vectors_are_refused(vectors, given, message):
    with pytest.raises(UsageError, match=message):
        vectors.encode_features(given)


def test_a_model_of_vectors_refuses_images(vectors, photos, tmp_path):
    for use in (vectors.encode, vectors.logits, lambda x: list(vectors.encode_blocks(x))):
        with pytest.raises(UsageError, match="cannot encode images"):
            use(Image.new("RGB", (9, 9)))
    with pytest.raises(UsageError, match="no network to export"):
        vectors.export()
    vectors.save(tmp_path)
    with pytest.raises(UsageError, match="pass no network"):
        Hasher.load(tmp_path, backbone=torch.nn.Identity())


def test_a_model_of_images_applies_its_head_to_features_of_its_backbone(tmp_path):
    hasher = tiny_hasher()
    images = np.random.default_rng(0).integers(0, 256, (5, 3, 64, 64), dtype=np.uint8)
    rows = [part.values for part in hasher.row_blocks(torch.from_numpy(images))]
    features = np.concatenate(rows)
    codes = hasher.encode_features(features)
    np.testing.assert_array_equal(codes, hasher.encode(torch.from_numpy(images)))
    with pytest.raises(UsageError, match="takes images, or the 32 features"):
        hasher.encode_features(features[:, :9])


def test_an_exported_model_encodes_features_too(tmp_path, exporting):
    pytest.importorskip("onnxscript")
    hasher = tiny_hasher()
    hasher.save(tmp_path / "m")
    loaded = Hasher.load(tmp_path / "m")
    assert loaded.runtime_name == "onnx-cpu"
    x = np.random.default_rng(0).normal(size=(9, 32)).astype(np.float32)
    np.testing.assert_array_equal(loaded.encode_features(x), hasher.encode_features(x))
    (tmp_path / "alone.onnx").write_bytes(hasher.export()[0])
    with pytest.raises(UsageError, match="starts from pixels"):
        Hasher.load(tmp_path / "alone.onnx").encode_features(x)
