"""The hasher: one image has one code, whatever its form and company; a folder loads or says why."""

import hashlib
import json
import os
import re

import numpy as np
import pytest
import torch
from PIL import Image

from fisherhash import backbones, codes
from fisherhash.data.pixels import PixelBank
from fisherhash.data.sources import open_data, open_paths
from fisherhash.errors import FisherhashError, UsageError
from fisherhash.model import builtin, onnx_network
from fisherhash.model.hasher import Hasher
from fisherhash.model.heads import LinearHead
from fisherhash.model.torch_network import TorchNetwork
from fisherhash.system import storage

BITS = 60


def random_hasher(backbone, *, image_size=None, bits=BITS, seed=0):
    """A random linear head that saw some features, so that its logits lie around zero."""
    network = backbones.create(backbone, image_size=image_size)
    torch.manual_seed(seed)
    head = LinearHead(network.features, bits)
    head.start(torch.randn(64, network.features).abs() * 0.1)
    return hasher_of(network, head)


def hasher_of(network, head, **about):
    about = {"method": "lsh", "classes": ("cat", "dog")} | about
    network = TorchNetwork(network, torch.device("cpu"))
    return Hasher(network, head.finished(), **about)


def tiny_hasher(**options):
    return random_hasher("tiny", **options)


def noise(count, seed=0):
    rng = np.random.default_rng(seed)
    shapes = rng.integers(20, 50, (count, 2))
    return [rng.integers(0, 256, (h, w, 3), dtype=np.uint8) for h, w in shapes]


def in_many_batches(count, seed=0):
    """Positions of images in batches of 1 to 9, shuffled anew for every size."""
    rng = np.random.default_rng(seed)
    for size in range(1, 10):
        order = rng.permutation(count)
        yield from (order[start : start + size] for start in range(0, count, size))


def test_an_image_has_the_same_logits_in_every_batch_with_the_tiny_backbone():
    hasher = tiny_hasher()
    images = noise(300)
    alone = np.concatenate([hasher.logits(image) for image in images])
    for some in in_many_batches(len(images)):
        np.testing.assert_array_equal(hasher.logits([images[i] for i in some]), alone[some])
    np.testing.assert_array_equal(hasher.logits(images), alone)
    np.testing.assert_array_equal(hasher.encode(images), codes.pack(alone))


@pytest.fixture(scope="module")
def lite():
    return random_hasher("efficientnet-lite0", image_size=64, bits=128)


@pytest.fixture(scope="module")
def sample_images():
    reader = open_data("sample").reader
    return [np.asarray(reader.open(i)) for i in range(0, 2000, 182)]


def test_an_image_has_the_same_logits_in_every_batch_with_the_default_backbone(lite, sample_images):
    alone = np.concatenate([lite.logits(image) for image in sample_images])
    assert len({row.tobytes() for row in codes.pack(alone)}) == len(sample_images)
    for some in in_many_batches(len(sample_images)):
        np.testing.assert_array_equal(lite.logits([sample_images[i] for i in some]), alone[some])


def test_the_default_backbone_encodes_the_same_after_save_and_load(
    lite, sample_images, tmp_path, monkeypatch
):
    """The network comes with the package, so that the folder has kilobytes; both run it."""
    lite.save(tmp_path)
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) < 1_000_000
    loaded = Hasher.load(tmp_path)
    assert loaded.runtime_name == "onnx-cpu"
    np.testing.assert_allclose(loaded.logits(sample_images), lite.logits(sample_images), atol=1e-3)
    monkeypatch.setattr(onnx_network, "installed", lambda: False)
    again = Hasher.load(tmp_path)
    assert again.runtime_name == "torch-cpu"
    np.testing.assert_array_equal(again.logits(sample_images), lite.logits(sample_images))
    assert again.fingerprint() == loaded.fingerprint() == lite.fingerprint()


def test_paths_pictures_arrays_and_tensors_have_the_same_code(tmp_path):
    hasher = tiny_hasher()
    images = noise(7)
    expected = hasher.logits(images)
    paths = [tmp_path / f"{i} ü.png" for i in range(7)]
    for image, path in zip(images, paths, strict=True):
        Image.fromarray(image).save(path)
    tensors = [torch.from_numpy(image).permute(2, 0, 1) for image in images]
    forms = {
        "paths": paths,
        "names": [str(path) for path in paths],
        "bytes": [path.read_bytes() for path in paths],
        "pictures": [Image.fromarray(image) for image in images],
        "tensors": tensors,
        "mixed": [paths[0], images[1], tensors[2], *paths[3:]],
        "an iterator": iter(images),
    }
    for form in forms.values():
        np.testing.assert_array_equal(hasher.logits(form), expected)
    for one in (paths[3], str(paths[3]), images[3], tensors[3], Image.fromarray(images[3])):
        np.testing.assert_array_equal(hasher.logits(one), expected[3:4])
    same_size = np.stack([image[:20, :20] for image in images])
    stacked = hasher.logits(list(same_size))
    np.testing.assert_array_equal(hasher.logits(same_size), stacked)
    batch = torch.from_numpy(same_size).permute(0, 3, 1, 2)
    np.testing.assert_array_equal(hasher.logits(batch), stacked)


def test_unreadable_images_are_skipped_from_a_collection_and_refused_by_encode(tmp_path):
    hasher = tiny_hasher()
    for i, image in enumerate(noise(3)):
        Image.fromarray(image).save(tmp_path / f"{i}.png")
    (tmp_path / "1.png").write_bytes(b"text")
    collection = open_paths([tmp_path])
    for cached in (False, True):
        found = hasher.encode_collection(collection, cached=cached)
        assert found.indices.tolist() == [0, 2]
        np.testing.assert_array_equal(
            found.codes, hasher.encode([tmp_path / "0.png", tmp_path / "2.png"])
        )
        assert [item.name for item in found.skipped] == [(tmp_path / "1.png").as_posix()]
    with pytest.raises(FisherhashError, match=r"1\.png: not an image"):
        hasher.encode([tmp_path / "0.png", tmp_path / "1.png"])
    with pytest.raises(FisherhashError, match=r"none\.png: the file does not exist"):
        hasher.encode(tmp_path / "none.png")


def test_pictures_are_not_all_held_in_memory(monkeypatch):
    """With blocks of 4, the fifth image is requested only after the first four are encoded."""
    hasher = tiny_hasher()
    done = []
    encode = hasher.network.features
    monkeypatch.setattr(
        hasher.network, "features", lambda pixels: done.append(len(pixels)) or encode(pixels)
    )

    def images():
        for i, image in enumerate(noise(10)):
            assert sum(done) == i // 4 * 4
            yield image

    found = list(hasher.encode_blocks(images(), block=4))
    assert [part.indices.tolist() for part in found] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    np.testing.assert_array_equal(
        np.concatenate([part.codes for part in found]), hasher.encode(noise(10))
    )
    del done[3:]
    assert done == [4, 4, 2]


def test_blocks_of_images_list_the_bad_ones_by_their_number(tmp_path):
    hasher, images = tiny_hasher(), noise(9)
    expected = hasher.encode(images)
    given = [*images[:3], b"text", *images[4:8], tmp_path / "none.png"]
    for source in (given, iter(given)):
        parts = list(hasher.encode_blocks(source, block=4))
        assert [part.indices.tolist() for part in parts] == [[0, 1, 2], [4, 5, 6, 7], []]
        for part in parts:
            np.testing.assert_array_equal(part.codes, expected[part.indices])
            assert part.queries is None
        bad = [(s.index, s.name, s.passing) for part in parts for s in part.skipped]
        assert bad == [(3, "image 3", False), (8, str(tmp_path / "none.png"), True)]
    with pytest.raises(FisherhashError, match="image 3: not an image"):
        hasher.encode(given)


def test_blocks_of_a_collection_a_bank_and_a_list_have_the_same_codes(photos):
    hasher, collection = tiny_hasher(), open_data(photos)
    wanted = np.array([40, 3, 17, 18, 5])
    bank = PixelBank(collection, np.arange(41), hasher.preprocessing, torch.device("cpu"))
    files = [photos / collection.names[i] for i in wanted]
    expected = hasher.logits(files)
    for source, indices in ((collection, wanted), (bank, wanted), (files, None)):
        parts = list(hasher.encode_blocks(source, indices, block=2, queries=True))
        assert [len(part.codes) for part in parts] == [2, 2, 1]
        found = np.concatenate([part.indices for part in parts])
        assert found.tolist() == (list(range(5)) if indices is None else wanted.tolist())
        np.testing.assert_array_equal(
            np.concatenate([part.codes for part in parts]), codes.pack(expected)
        )
        np.testing.assert_array_equal(np.concatenate([part.queries for part in parts]), expected)
    assert sum(len(part.codes) for part in hasher.encode_blocks(bank)) == 41
    with pytest.raises(FisherhashError, match="1 image could be read before and cannot now"):
        bank.of(np.array([3, 41]))


@pytest.mark.parametrize("images", [[], np.empty((0, 8, 8, 3), np.uint8), iter(())])
def test_no_images_give_no_codes(images):
    found = tiny_hasher(bits=12).encode(images)
    assert found.shape == (0, 2)
    assert found.dtype == np.uint8


@pytest.mark.parametrize(
    "image",
    [
        torch.zeros(3, 8, 8),
        torch.zeros(8, 8, 3, dtype=torch.uint8),
        np.zeros((8, 8, 3)),
        3,
    ],
)
def test_what_is_no_image(image):
    with pytest.raises(
        UsageError, match=r"tensor must be uint8|array must be|cannot read an image"
    ):
        tiny_hasher().encode([image])


def test_the_fingerprint_changes_with_everything_that_decides_a_code():
    prints = {tiny_hasher().fingerprint(), tiny_hasher().fingerprint()}
    assert len(prints) == 1
    prints.add(tiny_hasher(seed=1).fingerprint())
    prints.add(tiny_hasher(image_size=40).fingerprint())
    other = tiny_hasher()
    with torch.no_grad():
        other.network.backbone.layers[0].bias[0] += 1e-6
    prints.add(other.fingerprint())
    assert len(prints) == 4
    named = tiny_hasher()
    named.method, named.classes = "itq", ("x",)
    assert named.fingerprint() in prints


@pytest.fixture
def saved(tmp_path):
    """A saved hasher's folder and the codes of some images."""
    hasher = tiny_hasher()
    hasher.details = {
        "reference": "A title, VENUE 2002",
        "data": {"name": "a | b", "images": 3},
        "results": {"mAP": 0.123456},
    }
    hasher.save(tmp_path / "model")
    return tmp_path / "model", hasher.encode(noise(5))


def test_the_folder_holds_a_config_the_weights_and_a_card(saved):
    folder, expected = saved
    assert sorted(path.name for path in folder.iterdir()) == [
        "README.md",
        "config.json",
        "model.safetensors",
    ]
    config = json.loads((folder / "config.json").read_text())
    hasher = Hasher.load(folder)
    assert config["bits"] == BITS
    assert config["method"] == hasher.method == "lsh"
    assert config["backbone"] == hasher.backbone_name == "tiny"
    assert config["classes"] == list(hasher.classes) == ["cat", "dog"]
    assert config["preprocessing"]["size"] == hasher.preprocessing.size == 32
    assert config["head"] == {"kind": "linear", "in_features": 32, "bits": BITS}
    assert config["fingerprint"] == hasher.fingerprint()
    assert config["versions"]["torch"] == torch.__version__
    assert config["details"] == hasher.details
    assert set(storage.read_tensors(folder / "model.safetensors")) == {
        *(f"network.{name}" for name in hasher.network.backbone.state_dict()),
        *(f"head.{name}" for name in ("weight", "offset", "shift", "scale")),
    }
    np.testing.assert_array_equal(hasher.encode(noise(5)), expected)


def test_the_card_says_what_it_is_and_its_example_runs(saved):
    folder, expected = saved
    card = (folder / "README.md").read_text()
    for text in (
        "---\nlibrary_name: fisherhash\npipeline_tag: image-feature-extraction\ntags:\n",
        f"# {BITS}-bit image hasher (lsh)",
        "Method: A title, VENUE 2002",
        "| backbone | tiny |",
        "| image size | 32 px |",
        "| classes | 2: cat, dog |",
        r"| name | a \| b |",
        "| mAP | 0.1235 |",
    ):
        assert text in card
    code = re.search(r"```python\n(.*?)```", card, re.DOTALL).group(1)
    Image.fromarray(noise(5)[0]).save(folder / "photo.png")
    scope = {}
    exec(
        code.replace('"this folder"', repr(str(folder))).replace(
            '"photo.jpg"', repr(str(folder / "photo.png"))
        ),
        scope,
    )
    np.testing.assert_array_equal(scope["codes"], expected[:1])
    assert "# uint8, 8 bytes per image" in code


@pytest.mark.parametrize("damage", ["flip", "cut", "missing"])
def test_damaged_weights(saved, damage):
    path = saved[0] / "model.safetensors"
    data = bytearray(path.read_bytes())
    sentence = r"model\.safetensors is damaged: its checksum"
    if damage == "flip":
        data[-1] ^= 1
        path.write_bytes(data)
    elif damage == "cut":
        path.write_bytes(data[:100])
    else:
        path.unlink()
        sentence = r"model\.safetensors is missing"
    with pytest.raises(FisherhashError, match=sentence):
        Hasher.load(saved[0])


def write_weights(folder, change):
    """Other tensors, with the checksum that belongs to them."""
    tensors = storage.read_tensors(folder / "model.safetensors")
    change(tensors)
    storage.write_files(folder, {"model.safetensors": storage.write_tensors(tensors)})
    data = (folder / "model.safetensors").read_bytes()
    edit(folder, files={"model.safetensors": hashlib.sha256(data).hexdigest()})


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda t: t.pop("head.offset"), "tensors of the head 'linear' do not fit"),
        (lambda t: t.update({"head.weight": torch.zeros(3, 5)}), "'linear' do not fit"),
        (lambda t: t.update({"head.weight": torch.zeros(8, 32)}), "do not fit"),
        (lambda t: t.pop("network.layers.0.bias"), "weights of another architecture than config"),
    ],
)
def test_weights_that_do_not_belong_to_the_config(saved, change, sentence):
    folder, _ = saved
    write_weights(folder, change)
    with pytest.raises(FisherhashError, match=sentence):
        Hasher.load(folder)


def edit(folder, **changes):
    path = folder / "config.json"
    config = json.loads(path.read_text())
    for key, value in changes.items():
        if value is None:
            del config[key]
        else:
            config[key] = value
    path.write_text(json.dumps(config))


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"format": 99}, "has format 99, this version reads 2"),
        ({"backbone": "tiney"}, r"unknown backbone 'tiney'\. Did you mean 'tiny'"),
        ({"network": None}, "is damaged: 'network'"),
        ({"head": {"kind": "linaer", "in_features": 32, "bits": 8}}, "Did you mean 'linear'"),
        ({"head": {"kind": [], "in_features": 32, "bits": 8}}, "is damaged"),
        ({"head": {"kind": "linear", "in_features": 64, "bits": 60}}, "do not fit"),
        ({"head": {"kind": "linear", "in_features": 32, "bits": 0}}, "between 1 and 1024"),
        ({"preprocessing": {"size": 32}}, r"config\.json is damaged: 'mean'"),
        ({"preprocessing": {"size": 2, "mean": [1, 2, 3], "std": [1, 1, 1]}}, "image size must"),
        ({"classes": 3}, r"config\.json is damaged"),
        ({"details": 3}, r"config\.json is damaged"),
        ({"files": {"../other": "0"}}, "'files' is no table of files"),
        ({"fingerprint": None}, "is damaged: 'fingerprint'"),
        ({"files": {"model.safetensors": "0"}}, "its checksum is not the one"),
    ],
)
def test_a_damaged_config(saved, changes, sentence):
    folder, _ = saved
    edit(folder, **changes)
    with pytest.raises(FisherhashError, match=sentence):
        Hasher.load(folder)


def deep(depth):
    return b'{"a":' * depth + b"1" + b"}" * depth


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
@pytest.mark.parametrize("how", ["pipe", "deep", "long", "folder", "link to itself", "device"])
def test_a_file_of_a_model_that_is_no_such_file_is_a_sentence(saved, name, how):
    folder, _ = saved
    path = folder / name
    path.unlink()
    if how == "pipe":
        os.mkfifo(path)
    elif how == "deep":
        data = deep(200_000)
        head = b"" if name.endswith("json") else len(data).to_bytes(8, "little")
        path.write_bytes(head + data)
    elif how == "long":
        with path.open("wb") as file:
            file.write((8 << 20).to_bytes(8, "little"))
            file.truncate(1 << 40)
    elif how == "folder":
        path.mkdir()
    elif how == "device":
        path.symlink_to("/dev/zero")
    else:
        path.symlink_to(path)
    with pytest.raises(FisherhashError, match=name.replace(".", r"\.")):
        Hasher.load(folder)


def test_no_folder_and_a_folder_without_a_model(tmp_path):
    with pytest.raises(UsageError, match=r"none does not exist\. Make a model with"):
        Hasher.load(tmp_path / "none")
    with pytest.raises(UsageError, match=r"is not a model folder: it has no config\.json"):
        Hasher.load(tmp_path)


def test_a_network_of_ones_own_must_be_passed_again(tmp_path):
    class Mine(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = torch.nn.Conv2d(3, 6, 3)

        def forward(self, images):
            return self.conv(images).mean((2, 3))

    network = backbones.create(Mine(), image_size=16)
    hasher = hasher_of(network, LinearHead(6, 8))
    hasher.save(tmp_path)
    with pytest.raises(UsageError, match="network of your own"):
        Hasher.load(tmp_path)
    loaded = Hasher.load(tmp_path, backbone=Mine())
    np.testing.assert_array_equal(loaded.logits(noise(3)), hasher.logits(noise(3)))


def test_a_model_says_where_it_came_from(saved, monkeypatch):
    folder, _ = saved
    summary = {"method": "lsh", "backbone": "tiny", "bits": BITS}
    assert tiny_hasher().about == summary
    monkeypatch.chdir(folder.parent)
    assert Hasher.load("model").about == {"path": str(folder)} | summary
    assert Hasher.load("general-64").about == {"builtin": "general-64"}
    assert Hasher.load().about == {"builtin": builtin.DEFAULT_HASHER}


def test_a_folder_comes_before_a_built_in_name(saved, monkeypatch):
    folder, _ = saved
    folder.rename(folder.parent / "general-64")
    monkeypatch.chdir(folder.parent)
    assert Hasher.load("general-64").bits == BITS
    assert Hasher.load_builtin("general-64").bits == 64


def test_a_name_with_a_typo_and_a_backbone_that_is_not_needed():
    with pytest.raises(UsageError, match=r"no model 'generl-64'\. Did you mean 'general-64'\?"):
        Hasher.load("generl-64")
    with pytest.raises(UsageError, match="'general-64' has a backbone; pass none with it"):
        Hasher.load("general-64", backbone=torch.nn.Identity())
