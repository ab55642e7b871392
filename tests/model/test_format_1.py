"""Models written before the model room was rebuilt load, and encode to the same codes."""

import json
import tarfile
from pathlib import Path

import pytest

from fisherhash import codes
from fisherhash.data.sources import open_data
from fisherhash.model.hasher import Hasher

ARCHIVE = Path(__file__).parents[1] / "fixtures" / "format-1.tar.xz"


@pytest.fixture(scope="module")
def format_1(tmp_path_factory):
    folder = tmp_path_factory.mktemp("fixture")
    with tarfile.open(ARCHIVE) as archive:
        archive.extractall(folder, filter="data")
    return folder / "format-1"


@pytest.mark.parametrize("place", ["model", "photos.index/model"])
def test_an_old_model_has_its_fingerprint_and_its_codes(format_1, place):
    expected = json.loads((format_1 / "expected.json").read_text())["model"]
    hasher = Hasher.load(format_1 / place)
    assert hasher.fingerprint() == expected["fingerprint"]
    assert (hasher.method, list(hasher.classes)) == (expected["method"], expected["classes"])
    assert hasher.about["path"] == str(format_1 / place)
    found = hasher.encode([format_1 / name for name in expected["images"]])
    assert codes.to_hex(found) == expected["codes"]
    for cached in (False, True):
        collection = open_data(format_1 / "photos")
        encoded = hasher.encode_collection(collection, cached=cached)
        names = [f"photos/{collection.names[i]}" for i in encoded.indices]
        assert names == expected["images"]
        assert codes.to_hex(encoded.codes) == expected["codes"]
        assert [item.name for item in encoded.skipped] == ["a/broken.png"]


def test_an_old_model_saved_again_is_the_same_model(format_1, tmp_path):
    old = Hasher.load(format_1 / "model")
    old.save(tmp_path)
    new = Hasher.load(tmp_path)
    assert new.fingerprint() == old.fingerprint()
    assert new.details == old.details
    before, after = (
        json.loads((folder / "config.json").read_text())
        for folder in (format_1 / "model", tmp_path)
    )
    for config in (before, after):
        del config["versions"]
    assert after == before
