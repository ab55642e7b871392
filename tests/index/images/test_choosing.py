"""Which hasher a new index gets, and that it stays."""

import numpy as np
import pytest
import torch
from PIL import Image

from fisherhash import ImageIndex
from fisherhash.errors import UsageError
from fisherhash.index.images import choosing
from fisherhash.index.images.choosing import describe_model
from fisherhash.index.images.creating import add_to_index, sync_index
from fisherhash.model import onnx_network


@pytest.fixture
def photos(tmp_path, monkeypatch):
    """A function that writes some photos; the cache is empty."""
    monkeypatch.setenv("FISHERHASH_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(choosing, "FEWEST_FITTED", 12)
    monkeypatch.setattr(choosing, "FITTED_BITS", 8)
    folder = tmp_path / "photos"
    folder.mkdir()

    def write(first, last):
        for number in range(first, last):
            rng = np.random.default_rng(number)
            pixels = rng.integers(0, 256, (4, 4, 3), dtype=np.uint8)
            image = Image.fromarray(pixels).resize((48, 48), Image.Resampling.BICUBIC)
            image.save(folder / f"{number:02}.png")
        return folder

    return write


def test_few_images_get_the_built_in_hasher(photos, tmp_path):
    report = sync_index(tmp_path / "i", photos(0, 5), workers=0)
    assert "128-bit codes of general2-128: fewer than 12 images are too few" in report.notes[-1]
    with ImageIndex.open(tmp_path / "i") as images:
        assert images.index.bits == 128
        assert "general2-128 (fewer than 12 images" in describe_model(images.index.model)
    photos(5, 14)
    report = sync_index(tmp_path / "i", tmp_path / "photos", workers=0)
    assert len(report.added) == 9
    assert report.notes == []
    (tmp_path / "other").mkdir()
    (tmp_path / "photos" / "00.png").rename(tmp_path / "other" / "00.png")
    with pytest.raises(UsageError, match=r"--bits 16 needs .* choose one of 64, 128, 256, or add"):
        sync_index(tmp_path / "j", tmp_path / "other", bits=16, workers=0)
    sync_index(tmp_path / "j", tmp_path / "other", bits=256, workers=0)
    with ImageIndex.open(tmp_path / "j") as images:
        assert images.index.model["builtin"] == "general2-256"


def test_enough_images_get_codes_of_their_own_which_stay(photos, tmp_path, monkeypatch):
    monkeypatch.setattr(choosing, "FIT_SAMPLE", 13)
    report = sync_index(tmp_path / "i", photos(0, 14), workers=0)
    assert "8-bit codes, fitted to 13 of 14 images (itq)" in report.notes[-1]
    assert len(report.added) == 14
    with ImageIndex.open(tmp_path / "i") as images:
        assert images.index.bits == 8
        assert describe_model(images.index.model) == "itq, fitted to 13 of its images"
        assert images.hasher.preprocessing.draft == choosing.DRAFT
        before = {item.key: item.code for item in images.index.items()}
        fingerprint = images.index.fingerprint
        # Codes from fitting are those that the hasher computes.
        paths = [tmp_path / "photos" / key for key in before]
        assert images.hasher.encode(paths).tobytes() == b"".join(before.values())
        found = images.search(tmp_path / "photos" / "03.png", k=1)[0]
        assert found[0].distance == 0
    photos(14, 18)
    assert len(sync_index(tmp_path / "i", tmp_path / "photos", workers=0).added) == 4
    with ImageIndex.open(tmp_path / "i") as images:
        assert images.index.fingerprint == fingerprint
        after = {item.key: item.code for item in images.index.items()}
        assert before.items() <= after.items()
    assert ImageIndex.examine(tmp_path / "i") == []


def contents(path):
    """Codes by the names of the files, and what made them."""
    with ImageIndex.open(path) as images:
        codes = {item.path: item.code for item in images.index.items()}
        return images.index.fingerprint, codes


@pytest.mark.parametrize("count", [5, 14])
def test_every_door_and_every_device_gives_the_same_codes(photos, tmp_path, count, caplog):
    folder = photos(0, count)
    report = sync_index(tmp_path / "sync", folder, workers=0)
    added = add_to_index(tmp_path / "add", [folder], workers=0)
    assert added.notes[-1] == report.notes[-1]
    shuffled = sorted(folder.iterdir(), reverse=True)
    add_to_index(tmp_path / "files", shuffled, workers=0)
    expected = contents(tmp_path / "sync")
    assert contents(tmp_path / "add") == contents(tmp_path / "files") == expected
    if not onnx_network.provides("cuda") and not torch.cuda.is_available():
        sync_index(tmp_path / "cuda", folder, device="cuda", workers=0)
        assert contents(tmp_path / "cuda") == expected
        assert "Images are encoded on the CPU" in caplog.text
        with pytest.raises(UsageError, match="'cud' cannot be used"):
            sync_index(tmp_path / "typo", folder, device="cud", workers=0)


@pytest.mark.parametrize("count", [5, 14])
def test_a_trained_model_gets_fitted_bits_behind_its_own(photos, tmp_path, make_hasher, count):
    """Few images get those that were fitted to the training images."""
    hasher = make_hasher(classes=("a", "b"))
    width = hasher.feature_width
    hasher.fitted = np.eye(width, 6, dtype=np.float32), np.zeros(6, np.float32)
    hasher.save(tmp_path / "model")
    folder = photos(0, count)
    report = sync_index(tmp_path / "i", folder, model=tmp_path / "model", workers=0)
    expected = "6 fitted to the images that it was trained on"
    if count == 14:
        expected = "8 fitted to 14 of 14 images"
    assert f"24 bits that the model learned, {expected}" in report.notes[-1]
    with ImageIndex.open(tmp_path / "i") as images:
        assert images.index.bits == 24 + (8 if count == 14 else 6)
        for item in images.index.items():
            own = hasher.encode(item.path)[0].tobytes()
            assert item.code[:3] == own
            assert item.code == images.hasher.encode(item.path)[0].tobytes()
    # The same command again knows its model.
    again = sync_index(tmp_path / "i", folder, model=tmp_path / "model", workers=0)
    assert (again.unchanged, again.notes) == (count, [])


def test_a_model_that_learned_without_labels_keeps_its_own_code(photos, tmp_path, make_hasher):
    hasher = make_hasher(classes=("a", "b"))
    hasher.save(tmp_path / "model")
    sync_index(tmp_path / "i", photos(0, 14), model=tmp_path / "model", workers=0)
    with ImageIndex.open(tmp_path / "i") as images:
        assert images.index.fingerprint == hasher.fingerprint()


def test_a_named_model_and_a_named_length_are_taken(photos, tmp_path):
    sync_index(tmp_path / "i", photos(0, 12), model="general-64-int8", workers=0)
    with ImageIndex.open(tmp_path / "i") as images:
        assert images.index.model == {"builtin": "general-64-int8"}
    report = sync_index(tmp_path / "j", tmp_path / "photos", bits=5, workers=0)
    assert "5-bit codes, fitted to 12 of 12 images" in report.notes[-1]
    with pytest.raises(UsageError, match="--bits and --model exclude each other"):
        sync_index(tmp_path / "k", tmp_path / "photos", bits=5, model="general-64")


def test_unreadable_images_do_not_count(photos, tmp_path):
    folder = photos(0, 11)
    for number in range(5):
        (folder / f"bad{number}.png").write_bytes(b"\x89PNG\r\n\x1a\n")
    report = sync_index(tmp_path / "i", folder, workers=0)
    assert "too few to fit codes to" in report.notes[-1]
    assert len(report.skipped) == 5
