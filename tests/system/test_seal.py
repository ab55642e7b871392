"""Seals: what was changed, added or removed is named, and a seal without the key is worthless."""

import json
import os

import pytest

from fisherhash.errors import FisherhashError, UsageError
from fisherhash.system.seal import check_seal, read_key, seal_folder

KEY = bytes(range(32))


@pytest.fixture
def folder(tmp_path):
    root = tmp_path / "model"
    (root / "codes").mkdir(parents=True)
    for name in ("config.json", "codes/1", "codes/2", "lock"):
        (root / name).write_text(name)
    assert seal_folder(root, KEY) == 3
    return root


def test_an_untouched_folder_is_intact(folder):
    assert check_seal(folder, KEY).intact
    (folder / "lock").write_text("123")
    assert check_seal(folder, KEY).intact
    assert seal_folder(folder, KEY) == 3
    assert check_seal(folder, KEY).intact


def test_what_changed_is_named(folder):
    (folder / "codes/1").write_text("other")
    (folder / "codes/2").unlink()
    (folder / "more").write_text("")
    report = check_seal(folder, KEY)
    assert not report.intact
    assert (report.changed, report.missing, report.added) == (("codes/1",), ("codes/2",), ("more",))


def test_links_and_pipes_are_changes(folder, tmp_path):
    (tmp_path / "same").write_text("codes/1")
    (folder / "codes/1").unlink()
    (folder / "codes/1").symlink_to(tmp_path / "same")
    os.mkfifo(folder / "pipe")
    (folder / "away").symlink_to(tmp_path)
    report = check_seal(folder, KEY)
    assert report.changed == ("codes/1",)
    assert set(report.added) == {"pipe", "away"}
    with pytest.raises(FisherhashError, match="not a regular file"):
        seal_folder(folder, KEY)


def test_a_seal_of_another_key_or_with_other_files_is_forged(folder):
    assert check_seal(folder, KEY[::-1]).forged
    path = folder / "seal.json"
    seal = json.loads(path.read_text())
    (folder / "codes/1").write_text("other")
    del seal["files"]["codes/1"]
    for text in (json.dumps(seal), json.dumps(seal | {"hmac_sha256": 7}), "{}"):
        path.write_text(text)
        assert check_seal(folder, KEY).forged


def test_what_is_refused(folder, tmp_path):
    (folder / "seal.json").write_text("{")
    with pytest.raises(FisherhashError, match=r"seal\.json is damaged"):
        check_seal(folder, KEY)
    (folder / "seal.json").unlink()
    with pytest.raises(FisherhashError, match=r"seal\.json is missing"):
        check_seal(folder, KEY)
    with pytest.raises(UsageError, match=r"cannot be read.*urandom"):
        read_key(tmp_path / "none")
    (tmp_path / "short").write_bytes(b"secret")
    with pytest.raises(UsageError, match="too short"):
        read_key(tmp_path / "short")
    with pytest.raises(UsageError, match="is not a folder"):
        seal_folder(tmp_path / "none", KEY)
