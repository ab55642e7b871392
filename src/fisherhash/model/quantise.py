"""Quantises an exported network to int8: a third of the size, and faster on a CPU.

Activations are unsigned bytes, weights signed bytes with one scale per output channel, sums have 32
bits. A processor without VNNI adds the products of two neighbouring input channels in 16 bits
first, which overflow if both weights are large. :func:`weight_scales` chooses scales at which they
cannot, so that every processor computes the same sums. The head stays in full precision.

Needs the extra ``onnx``, not torch.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fisherhash.data.preprocessing import Preprocessing
from fisherhash.errors import UsageError
from fisherhash.model.export import missing_package, with_metadata
from fisherhash.model.onnx_network import FEATURES, PIXELS, OnnxNetwork

CALIBRATION_IMAGES = 128
QUANTISED = ("Conv", "Clip", "Relu", "Add", "MaxPool", "Concat")


def quantise(network: OnnxNetwork, pixels: NDArray[np.uint8]) -> bytes:
    """Quantise an exported network.

    Args:
        network: the exported network in full precision.
        pixels: (n, 3, size, size) images to measure the ranges of all activations on.

    Returns:
        The bytes of the ONNX file. It has a fingerprint of its own: its codes are others.

    Raises:
        UsageError: the network is quantised already, or there are no images.
        FisherhashError: the extra is not installed.
    """
    missing_package(required="quantising a model")
    if network.metadata["int8"]:
        raise UsageError("this model is quantised already; give the one in full precision")
    if len(pixels) == 0:
        raise UsageError("quantising needs images to measure the activations on")
    import onnx
    from onnxruntime.quantization import QuantFormat, QuantType, quantize_static
    from onnxruntime.quantization.calibrate import CalibrationMethod

    # A copy, because the quantiser moves the tensors of its model into files of its own.
    model = onnx.shape_inference.infer_shapes(onnx.load_from_string(network.content()))
    with tempfile.TemporaryDirectory() as folder, _silent():
        file = Path(folder) / "quantised.onnx"
        quantize_static(
            model,
            file,
            _Reader(pixels),  # type: ignore[arg-type]
            quant_format=QuantFormat.QDQ,
            per_channel=True,
            activation_type=QuantType.QUInt8,
            weight_type=QuantType.QInt8,
            op_types_to_quantize=list(QUANTISED),
            nodes_to_exclude=_head_nodes(model),
            calibrate_method=CalibrationMethod.MinMax,
            extra_options={
                "ActivationSymmetric": False,
                # The mean over images of the largest value: one odd image does not cost precision.
                "CalibMovingAverage": True,
                "TensorQuantOverrides": _scales(model, network.preprocessing),
            },
        )
        quantised = onnx.load(file)
    digest = hashlib.sha256(quantised.graph.SerializeToString(deterministic=True))
    known = network.metadata | {"int8": True, "made_from": network.metadata["fingerprint"]}
    text = f"{digest.hexdigest()} {known['preprocessing']} {known['backbone']}"
    known["fingerprint"] = hashlib.sha256(text.encode()).hexdigest()
    return with_metadata(quantised, known)


def weight_scales(weight: NDArray[np.float32], *, groups: int = 1) -> NDArray[np.float32]:
    """The step (out,) of each output channel's weights, so that no sum of two products overflows.

    A product of an activation and a weight is at most 255 · |w|. Two of them fit into 16 bits if
    |w| + |w'| is at most 128. Where it is known which two weights meet (a convolution with a 1 x 1
    kernel: neighbouring input channels), only these pairs are limited, and weights keep almost 8
    bits. Elsewhere every weight has 7 bits. A depthwise convolution adds nothing in 16 bits.

    Args:
        weight: (out, in / groups, height, width).
        groups: of the convolution.

    >>> pair = np.array([[[[1.0]], [[-0.5]]], [[[1.0]], [[0.27]]]], dtype=np.float32)
    >>> (pair[:, :, 0, 0] / weight_scales(pair)[:, None]).round().tolist()
    [[127.0, -64.0], [100.0, 27.0]]
    """
    out, inputs, height, width = weight.shape
    rows = weight.reshape(out, -1).astype(np.float64)
    largest = np.abs(rows).max(1)
    if inputs == 1 and groups > 1:
        limit = largest / 127
    elif (height, width, groups) == (1, 1, 1):
        pairs = np.pad(rows, ((0, 0), (0, inputs % 2))).reshape(out, -1, 2)
        # Rounding adds half a step to each of the two, so that 127 stays within 128.
        limit = np.maximum(largest, np.abs(pairs.sum(2)).max(1)) / 127
    else:
        limit = largest / 64
    return np.where(limit > 0, limit, 1.0).astype(np.float32)


def _scales(model: Any, preprocessing: Preprocessing) -> dict[str, list[dict[str, Any]]]:
    """The scales of all convolutions and of the input, as the quantiser takes them."""
    from onnx import numpy_helper
    from onnxruntime.quantization import QuantType

    tensors = {tensor.name: tensor for tensor in model.graph.initializer}
    scales: dict[str, list[dict[str, Any]]] = {}
    for node in model.graph.node:
        if node.op_type != "Conv" or node.input[1] not in tensors:
            continue
        groups = next((a.i for a in node.attribute if a.name == "group"), 1)
        steps = weight_scales(numpy_helper.to_array(tensors[node.input[1]]), groups=groups)
        zero = np.array(0, dtype=np.int8)
        scales[node.input[1]] = [
            {"axis": 0, "quant_type": QuantType.QInt8, "scale": step, "zero_point": zero}
            for step in steps
        ]
    mean, std = preprocessing.mean, preprocessing.std
    if len({*mean}) == len({*std}) == 1 and mean[0] == int(mean[0]):
        # The bytes of the image themselves, unrounded.
        exact = {
            "scale": np.array(1 / std[0], dtype=np.float32),
            "zero_point": np.array(int(mean[0]), dtype=np.uint8),
        }
        scales[_normalised(model)] = [{"quant_type": QuantType.QUInt8} | exact]
    return scales


def _normalised(model: Any) -> str:
    """The name of the first convolution's input: the normalised image."""
    return next(node.input[0] for node in model.graph.node if node.op_type == "Conv")


def _head_nodes(model: Any) -> list[str]:
    """The nodes after the features."""
    after, names = {FEATURES}, []
    for node in model.graph.node:
        if after & {*node.input}:
            after |= {*node.output}
            names.append(node.name)
    return names


class _Reader:
    """Hands images to the calibration, one by one."""

    def __init__(self, pixels: NDArray[np.uint8]) -> None:
        self._images: Iterator[NDArray[np.uint8]] = iter(pixels)

    def get_next(self) -> dict[str, NDArray[np.uint8]] | None:
        image = next(self._images, None)
        return None if image is None else {PIXELS: image[None]}

    def __len__(self) -> int:
        return 0

    def set_range(self, *_: int) -> None:
        """All images are used at once."""


@contextlib.contextmanager
def _silent() -> Iterator[None]:
    """Without the advice that the quantiser logs for every model."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(before)
