"""What is installed, what is missing, and where files are stored."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import os
import platform
import shutil
import tempfile
from pathlib import Path

from fisherhash.errors import FisherhashError
from fisherhash.model.builtin import WEIGHTS_PACKAGE
from fisherhash.system.cache import cache_dir, data_dirs
from fisherhash.system.version import __version__

CORE = ("numpy", "numba", "pillow", "safetensors", "onnxruntime", "rich", "cyclopts")
EXTRAS = {
    "torch": "train",
    WEIGHTS_PACKAGE: "train",
    "scipy": "train",
    "onnx": "onnx",
    "onnxscript": "onnx",
    "pillow-heif": "heif",
    "huggingface_hub": "hub",
    "matplotlib": "plots",
    "starlette": "web",
    "torchvision": "timm",
    "timm": "timm",
}


def examine() -> dict[str, dict[str, str]]:
    """Return sections of findings; each finding is a name and a sentence."""
    return {
        "machine": {
            "fisherhash": __version__,
            "python": f"{platform.python_version()} on {platform.platform()}",
            "cores": str(os.cpu_count()),
            "cuda": _cuda(),
        },
        "packages": {name: _version(name) or "MISSING: reinstall fisherhash" for name in CORE},
        "extras": {
            name: _version(name) or f"not installed: pip install 'fisherhash[{extra}]'"
            for name, extra in EXTRAS.items()
        },
        "built-in hasher": {"model": _hasher()},
        "default backbone": {"weights": _backbone()},
        "folders": {
            "cache": _folder(cache_dir()),
            "data": ", ".join(str(folder) for folder in data_dirs()),
        },
    }


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _has_torch() -> bool:
    return importlib.util.find_spec("torch") is not None


def _cuda() -> str:
    if not _has_torch():
        return "not used: torch is not installed"
    import torch

    if not torch.cuda.is_available():
        return "none: training uses frozen features by default"
    return ", ".join(torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count()))


def _backbone() -> str:
    if not _has_torch():
        return "not needed: torch is not installed"
    from fisherhash import backbones

    try:
        return f"{backbones.create().name} loads"
    except FisherhashError as error:
        return f"PROBLEM: {error}"


def _hasher() -> str:
    from fisherhash.model.hasher import Hasher

    try:
        hasher = Hasher.load_builtin()
    except FisherhashError as error:
        return f"PROBLEM: {error}"
    return f"{hasher.about['builtin']} loads in {hasher.runtime_name}"


def _folder(path: Path) -> str:
    existing = next(p for p in (path, *path.parents) if p.exists())
    try:
        with tempfile.TemporaryFile(dir=existing):
            free = shutil.disk_usage(existing).free / 2**30
            return f"{path} (writable, {free:.0f} GiB free)"
    except OSError as error:
        return f"{path} (PROBLEM: not writable: {error.strerror}; set FISHERHASH_CACHE)"
