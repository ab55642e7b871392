"""Folders and indexes of strangers: the command line neither hangs, nor leaks, nor obeys them."""

import json
import os
import re
import subprocess
import sys

import numpy as np
import pytest
import torch
from PIL import Image

from fisherhash import backbones, cli
from fisherhash.index import Entry, Index
from fisherhash.model.hasher import Hasher
from fisherhash.model.head import linear_head
from fisherhash.model.torch_network import TorchNetwork

CONTROL = re.compile(
    rb"[\x00-\x09\x0b-\x1f\x7f]"  # C0 without the line feed
    rb"|\xc2[\x80-\x9f]"  # C1 in UTF-8
    rb"|\xe2\x80[\x8e\x8f\xaa-\xae]|\xe2\x81[\xa6-\xa9]"  # marks that turn the text
    rb"|(?<![\x80-\xff])[\x80-\x9f]"  # C1 as bytes
)
LIE = "fisherhash: all is well"
EVIL = f"\x1b]0;owned\x07\x9b31m\u202egnp.\n{LIE}"
EIGHT_BIT = os.fsdecode(b"\x9b31m\x90\xe9")


@pytest.fixture
def run(capfdbinary):
    """Runs the command in this process: exit code, bytes of stdout, bytes of stderr."""

    def run(*words):
        with pytest.raises(SystemExit) as ended:
            cli.main([os.fspath(word) for word in words])
        captured = capfdbinary.readouterr()
        return ended.value.code or 0, captured.out, captured.err

    return run


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model") / "tiny"
    network = TorchNetwork(backbones.create("tiny", image_size=32), torch.device("cpu"))
    weight = np.random.default_rng(0).normal(size=(network.width, 24))
    head = linear_head(weight, -weight.sum(axis=0) * 0.05)
    Hasher(network, head, method="lsh").save(folder)
    return folder


@pytest.fixture
def folder(tmp_path):
    """Every place where a name can be evil."""
    root = tmp_path / "photos"
    for place in (EVIL, EIGHT_BIT, "model " + EVIL, "empty " + EVIL):
        (root / place).mkdir(parents=True)
    image = Image.new("RGB", (24, 24), (200, 10, 10))
    for place in ("", EVIL, EIGHT_BIT, "model " + EVIL):
        for name in (f"good {EVIL}.png", f"copy {EIGHT_BIT}.png"):
            image.save(root / place / name)
        (root / place / f"bad {EVIL}.jpg").write_bytes(b"no image")
        (root / place / f"bad {EIGHT_BIT}.jpg").write_bytes(b"")
        (root / place / f"raw {EVIL}.CR2").write_bytes(b"x")
        (root / place / f"other.{EVIL}").write_bytes(b"x")
        (root / place / f"other.{EIGHT_BIT}").write_bytes(b"x")
        os.mkfifo(root / place / f"pipe {EVIL}.png")
    (root / f"model {EVIL}" / "config.json").write_text('{"fisherhash": 1}')
    return root


def assert_harmless(*outputs):
    for output in outputs:
        assert not CONTROL.search(output), output
        assert LIE not in output.decode(errors="replace").splitlines()


def test_nothing_that_a_folder_says_reaches_the_terminal_as_it_is(run, folder, model, tmp_path):
    index, image = tmp_path / "photos.index", folder / f"good {EVIL}.png"
    steps = [
        ("index", "sync", index, folder, "--model", model, "--dry-run"),
        ("index", "sync", index, folder, "--model", model),
        ("index", "sync", index, folder, "--json"),
        ("index", "add", index, folder / f"bad {EVIL}.jpg", folder / f"good {EVIL}.png"),
        ("index", "add", index, folder / f"bad {EIGHT_BIT}.jpg"),
        ("index", "skipped", index),
        ("index", "skipped", index, "--json"),
        ("index", "info", index),
        ("index", "info", index, "--json"),
        ("search", image, "--index", index),
        ("search", image, folder / f"bad {EVIL}.jpg", "--index", index),
        ("search", "--key", f"good {EVIL}.png", "--index", index, "--json"),
        ("search", "--key", f"gone {EVIL}.png", "--index", index),
        ("dedup", index),
        ("dedup", index, "--compare-files", "--json"),
        ("index", "remove", index, f"good {EVIL}.png", "--dry-run"),
        ("index", "remove", index, f"gone {EVIL}.png"),
        ("index", "sync", tmp_path / "other.index", folder / f"gone {EVIL}"),
        ("index", "sync", tmp_path / "other.index", folder / f"empty {EVIL}"),
        ("encode", folder, "--model", model),
        ("encode", folder, "--model", model, "--json"),
        ("check-data", folder),
        ("check-data", folder, "--json"),
        ("check-data", folder / f"gone {EVIL}"),
    ]
    said = b""
    for step in steps:
        code, out, err = run(*step)
        assert code in (0, 1, 2), step
        assert_harmless(out, err)
        if "--json" in step and code == 0:
            json.loads(out)
        said += out + err
    # It was all there, as text.
    for part in (rb"\x1b]0;owned\x07\x9b31m", rb"\u202egnp.", rb"\x9b31m\x90", b"CR2"):
        assert part in said, part


def test_nothing_that_an_index_says_reaches_the_terminal_as_it_is(run, tmp_path):
    path = tmp_path / "stranger.index"
    with Index.create(path, bits=8, model={"path": EVIL, "fitted": EVIL}) as index:
        evil = Entry(EVIL, b"\0", path=f"/{EVIL}", labels=[EVIL], metadata={EVIL: EVIL})
        index.add([evil, Entry(EIGHT_BIT, b"\0", path="/dev/zero", metadata={"a": EVIL})])
        index.write_notes(
            {
                "sync": {"folder": {"folder": f"/{EVIL}"}},
                "skipped": {EVIL: {"reason": EVIL, "size": None, "mtime_ns": None}},
            }
        )
    for step in (
        ("index", "info", path),
        ("index", "info", path, "--json"),
        ("index", "skipped", path),
        ("index", "skipped", path, "--json"),
        ("index", "verify", path),
        ("search", "--key", EVIL, "--index", path),
        ("search", "--key", EVIL, "--index", path, "--json"),
        ("search", "--key", EVIL, "--index", path, "--where", "b=1"),
        ("search", "x.jpg", "--index", path),
        ("dedup", path, "--compare-files"),
        ("dedup", path, "--compare-files", "--json"),
        ("index", "remove", path, "--where", "a!=1", "--dry-run"),
        ("index", "sync", path, tmp_path),
    ):
        code, out, err = run(*step)
        assert code in (0, 1, 2), step
        assert_harmless(out, err)


def test_the_page_of_a_strangers_index_shows_none_of_this_machines_images(run, tmp_path):
    secret = tmp_path / "home" / "secret.png"
    secret.parent.mkdir()
    Image.new("RGB", (9, 9), (7, 77, 177)).save(secret)
    path, page = tmp_path / "stranger.index", tmp_path / "page.html"
    with Index.create(path, bits=8) as index:
        index.add(
            [
                Entry("a.png", b"\0", path=str(secret), size=1, mtime_ns=1),
                Entry(str(secret), b"\0", path=str(secret), size=1, mtime_ns=1),
                Entry("home/secret.png", b"\0", size=1, mtime_ns=1),
            ]
        )
        index.write_notes({"sync": {"folder": {"folder": str(tmp_path)}}})
    for words in (("search", "--key", "a.png", "--index", path), ("dedup", path)):
        code, _, err = run(*words, "--html", page)
        assert code == 0
        assert b"--show-from" in err
        embedded = set(re.findall(r"data:image/\w+;base64,[^\"]+", page.read_text()))
        # One image, many times: the placeholder.
        assert len(embedded) == 1
        placeholder = embedded
        run(*words, "--html", page, "--show-from", secret.parent)
        embedded = set(re.findall(r"data:image/\w+;base64,[^\"]+", page.read_text()))
        assert len(embedded - placeholder) == 1


def test_a_config_that_blocks_stops_neither_sync_nor_check(write_photos, model, tmp_path):
    """In a process of its own, because what it must not do is wait."""
    root = write_photos(tmp_path / "photos", {"a": 2, "b": 2})
    os.mkfifo(root / "b" / "config.json")
    words = ["index", "sync", str(tmp_path / "i.index"), str(root), "--model", str(model)]
    script = f"""
from fisherhash.cli import main
for words in ({words!r}, ["check-data", {str(root)!r}]):
    try:
        main(words)
    except SystemExit as ended:
        print("ended", ended.code)
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False, timeout=100
    )
    assert done.stdout.count("ended 0") == 2, done.stderr
    assert "4 added" in done.stderr
