"""Codes that are fitted without torch."""

import dataclasses
import hashlib
import io
import json
import subprocess
import sys

import numpy as np
import pytest
from PIL import Image

from fisherhash import Hasher
from fisherhash.codes import pack
from fisherhash.data.images import load_image
from fisherhash.errors import FisherhashError, NotDefinedError, UsageError
from fisherhash.model import builtin
from fisherhash.model.fitted_hasher import FittedHasher
from fisherhash.model.folder import FITTED_MATRIX, FITTED_NETWORK
from fisherhash.model.itq_fit import fit_itq
from fisherhash.model.onnx_hasher import OnnxHasher


@pytest.fixture(scope="module")
def base():
    return OnnxHasher.from_package(builtin.DEFAULT_HASHER, device="cpu")


@pytest.fixture(scope="module")
def images():
    rng = np.random.default_rng(0)
    return [rng.integers(0, 256, (40, 60, 3), dtype=np.uint8) for _ in range(3)]


@pytest.fixture(scope="module")
def fitted(base):
    features = np.random.default_rng(1).normal(size=(200, base.runtime.width)).astype(np.float32)
    details = {"data": {"images": 200}}
    return FittedHasher(base.runtime, *fit_itq(features, 16), method="itq", details=details)


def test_itq_balances_bits_and_brings_data_close_to_their_signs():
    rng = np.random.default_rng(0)
    mixing = rng.normal(size=(8, 20)) * np.geomspace(3, 0.5, 8)[:, None]
    features = (rng.normal(size=(500, 8)) @ mixing + 5).astype(np.float32)
    weight, offset = fit_itq(features, 8)
    logits = features @ weight.T + offset
    assert np.abs(logits.mean(0)).max() < 1e-3
    # Rows are orthonormal: the head projects and rotates.
    assert np.allclose(weight @ weight.T, np.eye(8), atol=1e-5)
    centred = features - features.mean(0)
    directions = np.linalg.svd(centred, full_matrices=False)[2][:8]
    plain = centred @ directions.T

    def loss(values):
        return np.square(np.where(values > 0, 1.0, -1.0) - values).sum()

    assert loss(logits) < loss(plain)
    assert fit_itq(features, 8)[0].tobytes() == weight.tobytes()


def test_itq_is_the_method_of_that_name():
    torch = pytest.importorskip("torch")
    from fisherhash import methods

    rng = np.random.default_rng(0)
    features = (rng.normal(size=(400, 12)) * np.arange(12, 0, -1)).astype(np.float32)
    weight, offset = fit_itq(features, 6)
    head = methods.create("itq", bits=6, classes=0).fit(torch.from_numpy(features), seed=0)
    with torch.no_grad():
        theirs = head.logits(torch.from_numpy(features)).numpy()
    ours = features @ weight.T + offset

    def loss(values):
        return np.square(np.where(values > 0, 1.0, -1.0) - values).mean()

    # They start from different rotations, and end in minima of about the same height.
    assert loss(ours) == pytest.approx(loss(theirs), rel=0.02)


def test_too_few_images():
    with pytest.raises(NotDefinedError, match="17 images, there are 20 and 16"):
        fit_itq(np.zeros((16, 20), np.float32), 16)


def test_a_folder_holds_all_of_it(fitted, images, tmp_path):
    codes = fitted.encode(images)
    assert codes.shape == (3, 2)
    fitted.save(tmp_path / "m")
    loaded = Hasher.load(tmp_path / "m")
    assert isinstance(loaded, FittedHasher)
    assert loaded.fingerprint() == fitted.fingerprint()
    assert np.array_equal(loaded.encode(images), codes)
    assert np.array_equal(loaded.encode(images[1]), codes[1:2])
    assert loaded.rows_are_features
    assert loaded.feature_width == fitted.runtime.width
    short = loaded.truncated(8)
    assert np.array_equal(short.encode(images), codes[:, :1])
    assert short.fingerprint() != loaded.fingerprint()
    with pytest.raises(UsageError, match="ONNX Runtime only"):
        Hasher.load(tmp_path / "m", runtime="torch")


def test_the_preprocessing_is_a_part_of_it(fitted, tmp_path):
    how = dataclasses.replace(fitted.preprocessing, draft=1.5)
    other = FittedHasher(
        fitted.runtime.decoding(how), fitted.weight, fitted.offset, method="itq", details={}
    )
    assert fitted.preprocessing.draft == 0.0
    # Indexes that were made before a fitted hasher could have its own know this one.
    sums = f"{fitted.runtime.checksum} {fitted._matrix_sum}"
    assert fitted.fingerprint() == hashlib.sha256(sums.encode()).hexdigest()
    assert other.fingerprint() != fitted.fingerprint()
    other.save(tmp_path / "m")
    loaded = Hasher.load(tmp_path / "m")
    assert loaded.preprocessing == how
    assert loaded.fingerprint() == other.fingerprint()
    file = io.BytesIO()
    pixels = np.random.default_rng(0).integers(0, 256, (90, 70, 3), dtype=np.uint8)
    Image.fromarray(pixels).resize((1400, 1800)).save(file, "JPEG")
    reduced = how.pixels(load_image(file.getvalue(), enough=how.enough))
    features = loaded.runtime.features(reduced.transpose(2, 0, 1)[None])
    assert np.array_equal(loaded.encode(file.getvalue()), pack(loaded.logits_of_rows(features)))


def test_vectors_are_encoded_by_the_head(fitted):
    vectors = np.random.default_rng(2).normal(size=(5, fitted.feature_width)).astype(np.float32)
    assert np.array_equal(fitted.encode_features(vectors), pack(fitted.logits_of_rows(vectors)))


@pytest.mark.parametrize("name", [FITTED_MATRIX, FITTED_NETWORK])
def test_damage_is_noticed(fitted, tmp_path, name):
    fitted.save(tmp_path / "m")
    file = tmp_path / "m" / name
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    with pytest.raises(FisherhashError):
        Hasher.load(tmp_path / "m").encode(np.zeros((8, 8, 3), np.uint8))


def test_an_edited_config_is_noticed(fitted, tmp_path):
    fitted.save(tmp_path / "m")
    file = tmp_path / "m" / "config.json"
    config = json.loads(file.read_text())
    config["preprocessing"]["draft"] = 1.5
    file.write_text(json.dumps(config))
    with pytest.raises(FisherhashError, match=r"config.json is damaged"):
        Hasher.load(tmp_path / "m")


def test_it_works_without_torch(fitted, tmp_path):
    fitted.save(tmp_path / "m")
    script = (
        "import sys; sys.modules['torch'] = None\n"
        "import numpy as np\n"
        "from fisherhash import Hasher\n"
        "from fisherhash.model.itq_fit import fit_itq\n"
        "fit_itq(np.random.default_rng(0).normal(size=(50, 9)).astype('f4'), 8)\n"
        "print(Hasher.load(sys.argv[1]).encode(np.zeros((9, 9, 3), np.uint8)).tobytes().hex())\n"
    )
    command = [sys.executable, "-c", script, tmp_path / "m"]
    out = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    assert out.strip() == fitted.encode(np.zeros((9, 9, 3), np.uint8)).tobytes().hex()
