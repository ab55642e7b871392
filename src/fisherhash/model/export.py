"""Exports a model to ONNX: backbone and head as one graph, from pixels to logits.

The file holds all that encoding needs: the normalisation is part of the graph, the geometry of the
images, the bits, the classes and the fingerprint are in its metadata. Needs the extra ``onnx``.
"""

from __future__ import annotations

import contextlib
import copy
import importlib.util
import io
import json
import logging
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from fisherhash.errors import FisherhashError, counted, missing_extra
from fisherhash.model.onnx_runtime import (
    ALL_LOGITS,
    FEATURES,
    LOGITS,
    METADATA,
    ONNX_FORMAT,
    PIXELS,
    OnnxRuntime,
)
from fisherhash.model.runtime import UNSURE

if TYPE_CHECKING:
    from fisherhash.backbones import Backbone
    from fisherhash.model.heads import Head

logger = logging.getLogger(__name__)

CHECKED = 16
"""Images on which an exported network is compared with the original."""
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
    backbone: Backbone,
    head: Head,
    config: dict[str, Any],
    logits: Callable[[NDArray[np.uint8]], NDArray[np.float32]],
    *,
    fine: Head | None = None,
) -> tuple[bytes, Agreement]:
    """Export backbone and head as one graph, and compare it with the original.

    Args:
        backbone: images to features.
        head: features to logits.
        config: what describes the model.
        logits: the original: bytes (n, 3, size, size) to logits (n, bits), with those of the second
            code behind them.
        fine: features to the logits of the second code.

    Returns:
        The bytes of the ONNX file, and how it agrees with the original on random images.

    Raises:
        FisherhashError: the extra is not installed, a layer has no counterpart in ONNX, or the
            exported network computes something else.
    """
    missing_package(required="exporting a model")
    known = metadata(config, hamming=head.hamming)
    data = with_metadata(_translated(backbone, head, fine), known)
    runtime, pixels = OnnxRuntime(data), random_images(backbone.preprocessing.size)
    expected, found = logits(pixels), runtime.all_logits(pixels)
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
    known = metadata(
        {
            "bits": 0,
            "method": "",
            "backbone": backbone.name,
            "preprocessing": backbone.preprocessing.to_config(),
            "head": {},
            "classes": [],
            "fingerprint": checksum,
        },
        hamming=False,
    )
    return with_metadata(_translated(backbone, None, None), known)


def metadata(config: dict[str, Any], *, hamming: bool, int8: bool = False) -> dict[str, Any]:
    """What an ONNX file says about its model.

    Args:
        config: the config of the model.
        hamming: whether its codes are ranked by Hamming distance.
        int8: whether the network is quantised.
    """
    names = ("bits", "method", "backbone", "preprocessing", "head", "classes", "fingerprint")
    known = {name: config[name] for name in names}
    if config.get("fine_bits"):
        known["fine_bits"] = config["fine_bits"]
    return {"format": ONNX_FORMAT, **known, "hamming": hamming, "int8": int8}


def with_metadata(model: Any, known: dict[str, Any]) -> bytes:
    """The bytes of an ONNX model with this metadata."""
    import onnx

    onnx.helper.set_model_props(model, {METADATA: json.dumps(known)})
    return model.SerializeToString(deterministic=True)


def cut_logits(runtime: OnnxRuntime, config: dict[str, Any]) -> bytes:
    """Cut an exported network to the first of its logits.

    Args:
        runtime: the exported network.
        config: what describes the model with fewer bits.

    Returns:
        The bytes of the ONNX file.

    Raises:
        FisherhashError: the extra is not installed.
    """
    missing_package(required="cutting an exported model to fewer bits")
    import onnx

    model = onnx.load_from_string(runtime.content())
    graph, every = model.graph, f"{LOGITS}.all"
    for node in graph.node:
        for names in (node.input, node.output):
            names[:] = [every if name == LOGITS else name for name in names]
    bounds = {"first": 0, "last": config["bits"], "axis": 1}
    for name, value in bounds.items():
        array = np.array([value], dtype=np.int64)
        graph.initializer.append(onnx.numpy_helper.from_array(array, f"{LOGITS}.{name}"))
    inputs = [every, *(f"{LOGITS}.{name}" for name in bounds)]
    graph.node.append(onnx.helper.make_node("Slice", inputs, [LOGITS]))
    output = next(output for output in graph.output if output.name == LOGITS)
    output.type.tensor_type.shape.dim[1].dim_value = config["bits"]
    known = metadata(
        config, hamming=runtime.metadata["hamming"], int8=bool(runtime.metadata["int8"])
    )
    return with_metadata(model, known)


def _translated(backbone: Backbone, head: Head | None, fine: Head | None) -> Any:
    """The ONNX model of a backbone and its heads; without a head it ends with the features."""
    import torch

    from fisherhash.backbones import fold_batch_norm

    class Whole(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.backbone, self.head = fold_batch_norm(backbone), copy.deepcopy(head)
            self.fine = copy.deepcopy(fine)

        def forward(self, pixels: torch.Tensor) -> tuple[torch.Tensor, ...]:
            features = self.backbone(pixels)
            if self.head is None:
                return (features,)
            logits = self.head.logits(features)
            if self.fine is None:
                return logits, features
            return logits, features, torch.cat([logits, self.fine.logits(features)], 1)

    side = backbone.preprocessing.size
    example = torch.zeros(2, 3, side, side, dtype=torch.uint8)
    outputs = [FEATURES] if head is None else [LOGITS, FEATURES]
    try:
        # What an exporter draws at random must not change the training that follows.
        with _quiet(), torch.no_grad(), torch.random.fork_rng(devices=[]):
            program = torch.onnx.export(
                Whole().cpu().eval(),
                (example,),
                dynamo=True,
                verbose=False,
                input_names=[PIXELS],
                output_names=outputs + ([] if fine is None else [ALL_LOGITS]),
                dynamic_shapes={PIXELS: {0: torch.export.Dim("images")}},
                opset_version=18,
            )
    # The exporter raises many classes for what it cannot translate, some with pages of text.
    except Exception as error:
        reason = str(error).strip().splitlines()[0][:200]
        what = backbone.name if head is None else f"{backbone.name} with the head '{head.kind}'"
        raise FisherhashError(f"{what} cannot be exported: {reason}") from error
    if program is None:
        raise FisherhashError(f"{backbone.name} cannot be exported by torch {torch.__version__}")
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
