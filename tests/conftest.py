"""For every test: a cache of the session's own, one thread of torch; small pictures to ask for."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path
from textwrap import dedent

import numpy as np
import pytest
import torch
from PIL import Image

from fisherhash.model import folder


@pytest.fixture(scope="session", autouse=True)
def session_cache(tmp_path_factory):
    """Tests neither read nor fill the cache of the machine they run on."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FISHERHASH_CACHE", str(tmp_path_factory.mktemp("session-cache")))
        yield


@pytest.fixture(scope="session", autouse=True)
def interrupts_are_not_ignored():
    """A shell ignores SIGINT in what it starts in the background, and children inherit that."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session", autouse=True)
def one_thread():
    """Workers of pytest-xdist share the cores; rounding is then the same in each of them, too."""
    torch.set_num_threads(1)


@pytest.fixture(scope="session", autouse=True)
def no_export_with_every_save():
    """Exporting takes seconds; tests of the export ask for it with :func:`exporting`."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(folder, "missing_package", lambda: "onnx")
        yield


@pytest.fixture
def exporting(monkeypatch):
    """Saving a model exports it, as it does where the extra is installed."""
    monkeypatch.setattr(folder, "missing_package", lambda: None)


@pytest.fixture(scope="session")
def write_photos():
    """A function that writes small pictures, one tint a class, into one sub-folder a class."""

    def write(root: Path, sizes: dict[str, int], *, seed: int = 0) -> Path:
        rng = np.random.default_rng(seed)
        for name, count in sizes.items():
            (root / name).mkdir(parents=True, exist_ok=True)
            tint = rng.integers(40, 216, 3)
            for number in range(count):
                pixels = np.clip(tint + rng.normal(0, 40, (20, 24, 3)), 0, 255).astype(np.uint8)
                Image.fromarray(pixels).save(root / name / f"{number:02d}.png")
        return root

    return write


@pytest.fixture(scope="session")
def photos(write_photos, tmp_path_factory):
    """Three classes of 14 pictures; not to be changed by a test."""
    return write_photos(tmp_path_factory.mktemp("data") / "photos", {"a": 14, "b": 14, "c": 14})


LIMITED = """
import resource, signal
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, ({0}, {0}))
"""


@pytest.fixture(scope="session")
def run_limited():
    """Runs a script in a process of its own that can write files of so many bytes at most.

    The process limits itself: a function between fork and exec may die in threads of gRPC, which
    another test has started.
    """

    def run(most: int, script: str, *arguments: object) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [
                *(sys.executable, "-B", "-c"),
                LIMITED.format(most) + dedent(script),
                *map(str, arguments),
            ],
            capture_output=True,
            text=True,
            check=False,
        )

    return run


@pytest.fixture(scope="session")
def run_command_limited(run_limited):
    """Runs the command fisherhash in such a process."""
    script = "import torch; torch.set_num_threads(1); from fisherhash.cli import main; main()"
    return lambda most, *words: run_limited(most, script, *words)
