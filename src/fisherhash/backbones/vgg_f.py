"""VGG-F (also CNN-F), the backbone of DPSH, DSDH and DFH: 57 million parameters, 4096 features.

Chatfield et al., *Return of the Devil in the Details* (BMVC 2014). Its weights are published for
MatConvNet: ``imagenet-vgg-f.mat``.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from fisherhash.backbones.alexnet import GRID, to_grid
from fisherhash.backbones.base import Backbone
from fisherhash.backbones.weights import damaged_weights, existing_file, read_weights
from fisherhash.data.preprocessing import IMAGENET_MEAN, Preprocessing
from fisherhash.errors import UsageError, missing_extra

WINDOW = 5
CONVOLUTIONS = ("conv1", "conv2", "conv3", "conv4", "conv5", "fc6", "fc7")


class ResponseNorm(nn.Module):
    """Local response normalisation over five neighbouring channels, as MatConvNet writes it.

    ``y = x / (kappa + alpha * sum of x^2 over the window) ^ beta``. Here alpha multiplies the sum;
    PyTorch divides the sum by the width of the window first. The three numbers are a buffer: they
    come from the weights file and are saved with the model.
    """

    coefficients: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("coefficients", torch.tensor([2.0, 1e-4, 0.75]))

    def forward(self, images: Tensor) -> Tensor:
        """Normalise images (n, channels, height, width)."""
        kappa, alpha, beta = self.coefficients.unbind()
        squares = functional.pad(images.square().unsqueeze(1), (0, 0, 0, 0, *[WINDOW // 2] * 2))
        energy = WINDOW * functional.avg_pool3d(squares, (WINDOW, 1, 1), stride=1).squeeze(1)
        return images / (kappa + alpha * energy).pow(beta)


class VGGF(Backbone):
    """VGG-F up to the rectified output of fc7; dropout after fc6 while training.

    Takes RGB pixels in 0..255 and subtracts the average image of the weights file, a buffer that is
    saved with the model. MatConvNet pads poolings at the bottom and the right only, so that every
    pixel is used; rounding sizes up does the same. At sizes other than 224 pixels the average image
    is resized, and the last feature map is averaged or repeated to 6 x 6.
    """

    average: Tensor
    name = "vgg-f"
    title = "VGG-F, also CNN-F (2014)"
    features = 4096
    # Raw pixels: the average image is subtracted by the network itself.
    preprocessing = Preprocessing(mean=(0.0, 0.0, 0.0), std=(1.0, 1.0, 1.0))
    smallest = 39
    source = "are MatConvNet's: https://www.vlfeat.org/matconvnet/models/imagenet-vgg-f.mat"
    checkpoint = "VGG-F (imagenet-vgg-f.mat of MatConvNet, or a state dict of this class)"

    def __init__(self, preprocessing: Preprocessing) -> None:
        super().__init__(preprocessing)
        average = torch.tensor(IMAGENET_MEAN).view(1, 3, 1, 1)
        side = preprocessing.size
        self.register_buffer("average", average.repeat(1, 1, side, side))
        self.conv1 = nn.Conv2d(3, 64, 11, stride=4)
        self.norm1 = ResponseNorm()
        self.conv2 = nn.Conv2d(64, 256, 5, padding=2)
        self.norm2 = ResponseNorm()
        self.conv3 = nn.Conv2d(256, 256, 3, padding=1)
        self.conv4 = nn.Conv2d(256, 256, 3, padding=1)
        self.conv5 = nn.Conv2d(256, 256, 3, padding=1)
        self.pool = nn.MaxPool2d(3, stride=2, ceil_mode=True)
        self.fc6 = nn.Linear(256 * GRID * GRID, 4096)
        self.fc7 = nn.Linear(4096, 4096)
        self.dropout = nn.Dropout(0.5)

    def extract(self, images: Tensor) -> Tensor:
        """Turn pixels in 0..255 (n, 3, size, size) into non-negative features (n, 4096)."""
        relu = functional.relu
        maps = self.pool(self.norm1(relu(self.conv1(images - self.average))))
        maps = self.pool(self.norm2(relu(self.conv2(maps))))
        maps = relu(self.conv4(relu(self.conv3(maps))))
        maps = self.pool(relu(self.conv5(maps)))
        hidden = relu(self.fc6(to_grid(maps, GRID).flatten(1)))
        return relu(self.fc7(self.dropout(hidden)))

    def read_checkpoint(self, path: Path) -> dict[str, Tensor]:
        """Read MatConvNet's ``imagenet-vgg-f.mat``, or a state dict of this class."""
        file = existing_file(path)
        tensors = read_mat(file) if file.suffix == ".mat" else read_weights(file)
        if "average" in tensors and tensors["average"].ndim == 4:
            # A colour becomes a uniform image, another size is interpolated.
            tensors["average"] = functional.interpolate(
                tensors["average"].float(), size=self.preprocessing.size, mode="bilinear"
            )
        return tensors


def read_mat(path: Path) -> dict[str, Tensor]:
    """Read the tensors of a MatConvNet network, under the names they have in ``VGGF``.

    Both versions of the format are read: ``filters`` and ``biases`` or ``weights``,
    ``normalization`` at the top or inside ``meta``, the network at the top or inside ``net``.

    Raises:
        FisherhashError: the file is damaged, or scipy is not installed.
        UsageError: the file does not hold a network like VGG-F.
    """
    try:
        from scipy.io import loadmat
    except ImportError as error:
        raise missing_extra("scipy", "train", "reading a MatConvNet .mat file") from error
    try:
        content: Mapping[str, Any] = loadmat(path, simplify_cells=True)
    # For a truncated file, scipy raises IndexError, TypeError, zlib.error and more.
    except Exception as error:
        raise damaged_weights(path, error) from error
    network = content.get("net", content)
    try:
        layers = [dict(layer) for layer in network["layers"]]
        convolutions = [layer for layer in layers if layer["type"] == "conv"]
        norms = [layer for layer in layers if layer["type"] in ("normalize", "lrn")]
        meta = network.get("meta", network)
        tensors = {"average": _average(meta["normalization"]["averageImage"])}
        for name, layer in zip(CONVOLUTIONS, convolutions, strict=False):
            filters, biases = _filters(layer, dense=name.startswith("fc"))
            tensors[f"{name}.weight"], tensors[f"{name}.bias"] = filters, biases
        for name, layer in zip(("norm1", "norm2"), norms, strict=False):
            window, *numbers = (float(number) for number in layer["param"])
            if window != WINDOW:
                raise UsageError(f"'{path}': {name} spans {window:g} channels, expected {WINDOW}")
            tensors[f"{name}.coefficients"] = torch.tensor(numbers)
    except (KeyError, TypeError, ValueError) as error:
        raise UsageError(
            f"'{path}' is not a MatConvNet network like imagenet-vgg-f.mat: {error!r} while "
            "reading its layers and its average image"
        ) from error
    return tensors


def _filters(layer: Mapping[str, Any], *, dense: bool) -> tuple[Tensor, Tensor]:
    """Return filters (out, in, height, width), or (out, inputs) if dense, and biases (out,)."""
    if "weights" in layer:
        filters, biases = layer["weights"]
    else:
        filters, biases = layer["filters"], layer["biases"]
    weight = np.asarray(filters, np.float32)
    if weight.ndim == 2:  # 1 x 1 filters, which scipy returns without their two unit axes
        weight = weight.reshape(1, 1, *weight.shape)
    weight = np.ascontiguousarray(weight.transpose(3, 2, 0, 1))
    weight = weight.reshape(len(weight), -1) if dense else weight
    return torch.from_numpy(weight), torch.from_numpy(np.array(biases, np.float32).reshape(-1))


def _average(image: Any) -> Tensor:
    """Return the average image or colour as (1, 3, height, width)."""
    return torch.from_numpy(np.array(image, np.float32, ndmin=3).transpose(2, 0, 1)[None].copy())
