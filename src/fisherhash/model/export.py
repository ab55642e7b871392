"""Exports a model to ONNX: backbone and head as one graph, from pixels to logits.

The file holds all that encoding needs: the normalisation is part of the graph, the geometry of the
images, the bits, the classes and the fingerprint are in its metadata. Needs the extra ``onnx``.
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import json
import logging
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from fisherhash.errors import FisherhashError, counted, missing_extra
from fisherhash.model.head import FinishedHead
from fisherhash.model.networks import Network
from fisherhash.model.onnx_network import (
    FEATURES,
    LOGITS,
    METADATA,
    ONNX_FORMAT,
    PIXELS,
    OnnxNetwork,
)

if TYPE_CHECKING:
    from torch import Tensor, nn

    from fisherhash.backbones import Backbone

logger = logging.getLogger(__name__)

CHECKED = 16
"""Images on which an exported network is compared with the original."""
UNSURE = 1e-4
"""A logit this near to zero may have the other sign in another runtime."""
TOLERANCE = 1e-3
"""Difference of logits, as a share of their size, that is more than rounding."""
_PACKAGES = ("onnx", "onnxscript", "onnxruntime")


@dataclass(frozen=True)
class Agreement:
    """How two runtimes agree on some images.

    Attributes:
        images: number of images.
        bits: number of their bits.
        differing: bits that differ.
        unsure: bits whose logit is within 1e-4 of zero in the first runtime.
        wrong: bits that differ although their logit is not.
        largest: the largest difference of two logits.
    """

    images: int
    bits: int
    differing: int
    unsure: int
    wrong: int
    largest: float

    def __str__(self) -> str:
        return (
            f"{self.differing} of {counted(self.bits, 'bit')} of {counted(self.images, 'image')} "
            f"differ; the logits of {self.unsure} are within 1e-4 of zero; the largest "
            f"difference of a logit is {self.largest:.1e}"
        )


def compare_logits(one: NDArray[np.float32], other: NDArray[np.float32]) -> Agreement:
    """Compare the logits (n, bits) that two runtimes computed of the same images.

    >>> print(compare_logits(np.array([[1.0, 5e-5]]), np.array([[1.0, -5e-5]])))
    1 of 2 bits of 1 image differ; the logits of 1 are within 1e-4 of zero; the largest \
difference of a logit is 1.0e-04
    """
    differ, unsure = (one > 0) != (other > 0), np.abs(one) < UNSURE
    return Agreement(
        images=len(one),
        bits=one.size,
        differing=int(np.count_nonzero(differ)),
        unsure=int(np.count_nonzero(unsure)),
        wrong=int(np.count_nonzero(differ & ~unsure)),
        largest=float(np.abs(one - other).max(initial=0.0)),
    )


def missing_package(*, required: str | None = None) -> str | None:
    """The first package that an export needs and that is not installed.

    Args:
        required: what needs it, if it is required.

    Raises:
        FisherhashError: it is required.
    """
    package = next((name for name in _PACKAGES if importlib.util.find_spec(name) is None), None)
    if package is not None and required is not None:
        raise missing_extra(package, "onnx", required)
    return package


def export_onnx(
    network: Network, head: FinishedHead, config: dict[str, Any]
) -> tuple[bytes, Agreement]:
    """Export network and head as one graph, and compare it with the original.

    Args:
        network: images to features.
        head: features to logits.
        config: what describes the model.

    Returns:
        The bytes of the ONNX file, and how it agrees with the original on random images.

    Raises:
        FisherhashError: the extra is not installed, a layer has no counterpart in ONNX, or the
            exported network computes something else.
    """
    missing_package(required="exporting a model")
    import onnx

    exported = network if isinstance(network, OnnxNetwork) else network.exported()  # type: ignore[attr-defined]
    data = exported.content() if isinstance(exported, OnnxNetwork) else exported
    output = exported.output if isinstance(exported, OnnxNetwork) else FEATURES
    int8 = isinstance(exported, OnnxNetwork) and bool(exported.metadata["int8"])
    if output == FEATURES or head.bits < head.in_features:
        model = onnx.load_from_string(data)
        _append(model, _head_graph(head), output)
        if output == LOGITS:
            known = {"kind": head.numbers["of"], "in_features": head.numbers["features"]}
            config = config | {"head": known | {"bits": head.bits}}
        data = with_metadata(model, metadata(config, hamming=head.hamming, int8=int8))
    runtime = OnnxNetwork(data, output=LOGITS)
    pixels = random_images(network.preprocessing.size)
    expected, found = head.logits(network.features(pixels)), runtime.features(pixels)
    agreement = compare_logits(expected, found)
    size = float(np.abs(expected).max(initial=0.0)) or 1.0
    if not np.isfinite(found).all() or agreement.largest > TOLERANCE * size:
        raise FisherhashError(
            f"the exported network does not compute what {runtime.name} does: {agreement}"
        )
    return data, agreement


def export_features(backbone: Backbone, checksum: str) -> bytes:
    """Export a backbone alone, from pixels to features; nothing is compared.

    Args:
        backbone: images to features.
        checksum: SHA-256 of its weights.

    Returns:
        The bytes of the ONNX file.

    Raises:
        FisherhashError: the extra is not installed, or a layer has no counterpart in ONNX.
    """
    missing_package(required="exporting a network")
    import torch

    from fisherhash.backbones import fold_batch_norm

    known = {"bits": 0, "method": "", "backbone": backbone.name, "head": {}, "classes": []}
    known |= {"preprocessing": backbone.preprocessing.to_config(), "fingerprint": checksum}
    if backbone.architecture is not None:
        known["architecture"] = backbone.architecture
    side = backbone.preprocessing.size
    example = torch.zeros(2, 3, side, side, dtype=torch.uint8)
    model = _translated(fold_batch_norm(backbone), example, PIXELS, FEATURES, backbone.name)
    return with_metadata(model, metadata(known, hamming=False))


def metadata(config: dict[str, Any], *, hamming: bool, int8: bool = False) -> dict[str, Any]:
    """What an ONNX file says about its model.

    Args:
        config: the config of the model.
        hamming: whether its codes are ranked by Hamming distance.
        int8: whether the network is quantised.
    """
    names = ("bits", "method", "backbone", "preprocessing", "head", "classes", "fingerprint")
    known = {name: config[name] for name in (*names, "architecture") if name in config}
    return {"format": ONNX_FORMAT, **known, "hamming": hamming, "int8": int8}


def with_metadata(model: Any, known: dict[str, Any]) -> bytes:
    """The bytes of an ONNX model with this metadata."""
    import onnx

    onnx.helper.set_model_props(model, {METADATA: json.dumps(known)})
    return model.SerializeToString(deterministic=True)


def _head_graph(head: FinishedHead) -> Any:
    """The ONNX model of a head, from features to logits."""
    import torch

    from fisherhash.model.heads import ArrayHead

    example = torch.zeros(2, head.in_features)
    module = ArrayHead.of(head).eval()
    return _translated(module, example, FEATURES, LOGITS, f"the head '{head.kind}'")


def _append(model: Any, head: Any, source: str) -> None:
    """Append a head to a network, in place: ``source`` is the output that the head takes."""
    every = f"{LOGITS}.all"
    if source == LOGITS:
        # The network's own logits, of which the head takes the first.
        for names in (names for node in model.graph.node for names in (node.input, node.output)):
            names[:] = [every if name == LOGITS else name for name in names]
    known = {FEATURES: every if source == LOGITS else source, LOGITS: LOGITS, "": ""}
    for tensor in head.graph.initializer:
        tensor.name = known.setdefault(tensor.name, f"head.{tensor.name}")
    for node in head.graph.node:
        node.name = f"head.{node.name}"
        for names in (node.input, node.output):
            names[:] = [known.setdefault(name, f"head.{name}") for name in names]
    model.graph.initializer.extend(head.graph.initializer)
    model.graph.node.extend(head.graph.node)
    outputs = [output for output in model.graph.output if output.name != LOGITS]
    del model.graph.output[:]
    model.graph.output.extend([*head.graph.output, *outputs])


def _translated(module: nn.Module, example: Tensor, given: str, found: str, what: str) -> Any:
    """The ONNX model of a module with one input and one output, for any number of images."""
    import torch

    try:
        # What an exporter draws at random must not change the training that follows.
        with _quiet(), torch.no_grad(), torch.random.fork_rng(devices=[]):
            program = torch.onnx.export(
                module.cpu().eval(),
                (example,),
                dynamo=True,
                verbose=False,
                input_names=[given],
                output_names=[found],
                dynamic_shapes=({0: torch.export.Dim("images")},),
                opset_version=18,
            )
    # The exporter raises many classes for what it cannot translate, some with pages of text.
    except Exception as error:
        reason = str(error).strip().splitlines()[0][:200]
        raise FisherhashError(f"{what} cannot be exported: {reason}") from error
    if program is None:
        raise FisherhashError(f"{what} cannot be exported by torch {torch.__version__}")
    return program.model_proto


def random_images(side: int) -> NDArray[np.uint8]:
    """Images of random colours on which two runtimes are compared."""
    coarse = np.random.default_rng(0).integers(0, 256, (CHECKED, 3, 8, 8), dtype=np.uint8)
    pixels = np.repeat(np.repeat(coarse, -(-side // 8), axis=2), -(-side // 8), axis=3)
    return np.ascontiguousarray(pixels[:, :, :side, :side])


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without the exporter's talk, which is about its own parts."""
    names = [name for name in logging.root.manager.loggerDict if name.startswith(("torch", "onnx"))]
    # Those that the export is the first to import are quiet through their packages.
    packages = ("torch.onnx", "onnx_ir", "onnxscript")
    levels = {name: logging.getLogger(name).level for name in {*names, *packages}}
    for name in levels:
        logging.getLogger(name).setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        for name, level in levels.items():
            logging.getLogger(name).setLevel(level)
