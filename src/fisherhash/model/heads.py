"""Heads turn features into logits; a head is saved with its model."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from fisherhash.codes import check_bits, unpack
from fisherhash.errors import FisherhashError, UsageError, unknown_name
from fisherhash.model.feature_heads import (
    AnchorGraphHead,
    CubeHead,
    KernelHead,
    PeriodicHead,
    TreesHead,
)
from fisherhash.model.finished_heads import ClassStepHead, CutHead
from fisherhash.model.head_base import DISTANCES_AT_ONCE, Head


class LinearHead(Head):
    """One linear layer without activation: u = W f + v."""

    kind = "linear"

    def __init__(self, in_features: int, bits: int, *, outputs: int | None = None) -> None:
        super().__init__(in_features, bits)
        self.linear = nn.Linear(in_features, bits if outputs is None else outputs)

    def forward(self, features: Tensor) -> Tensor:
        """Features (n, in_features) to outputs; here they are the logits (n, bits)."""
        return self.linear(self.prepare(features))

    def _initialise(self, inputs: Tensor) -> None:
        """Scale every row of W so that its output has mean 0 and deviation 1.

        At u near 0 a pairwise loss has a saddle; a default initialisation starts close to it.
        """
        _draw(self.linear)
        _scale(self.linear, self.linear(inputs))

    @classmethod
    @torch.no_grad()
    def from_matrix(cls, weight: Tensor, shift: Tensor) -> LinearHead:
        """The head u = weight (f - shift), for methods in closed form; weight: (bits, d)."""
        head = cls(weight.shape[1], weight.shape[0])
        head.linear.weight.copy_(weight)
        nn.init.zeros_(head.linear.bias)
        head.shift.copy_(shift)
        return head


class WideHead(LinearHead):
    """A linear layer with ``width`` outputs, and a second, small one that cuts K bits from them.

    Models saved before :class:`CutHead`, which cuts the bits of any head, have this one.

    Args:
        in_features: d.
        bits: K.
        width: outputs of the layer that is trained.
    """

    kind = "cut"
    saved = ("width",)
    mixing: Tensor
    offsets: Tensor

    def __init__(self, in_features: int, bits: int, width: int) -> None:
        if width < 1:
            raise UsageError(f"codes are cut from at least one output, got width {width}")
        super().__init__(in_features, bits, outputs=width)
        self.width = width
        self.register_buffer("mixing", torch.eye(width).repeat(-(-bits // width), 1)[:bits])
        self.register_buffer("offsets", torch.zeros(bits))

    def logits(self, features: Tensor) -> Tensor:
        """Features (n, in_features) to logits (n, bits); bit = logit > 0."""
        return self(features) @ self.mixing.T + self.offsets


class BatchNormHead(Head):
    """A linear layer without bias, then batch normalisation without an affine part.

    Every logit has mean 0, so every bit is balanced, and deviation 1.
    """

    kind = "batch-norm"

    def __init__(self, in_features: int, bits: int) -> None:
        super().__init__(in_features, bits)
        self.linear = nn.Linear(in_features, bits, bias=False)
        self.norm = nn.BatchNorm1d(bits, affine=False)

    def forward(self, features: Tensor) -> Tensor:
        """Features (n, in_features) to logits (n, bits)."""
        if self.training and len(features) < 2:
            raise UsageError(
                "batch normalisation needs at least 2 images per batch while training, got "
                f"{len(features)}; use a larger batch size"
            )
        return self.norm(self.linear(self.prepare(features)))

    def _initialise(self, inputs: Tensor) -> None:
        """Set the normalisation's statistics to those of the training set."""
        _draw(self.linear)
        outputs = self.linear(inputs)
        self.norm.running_mean.copy_(outputs.mean(0))  # type: ignore[union-attr]
        self.norm.running_var.copy_(outputs.var(0, correction=0))  # type: ignore[union-attr]


class ArgmaxHead(LinearHead):
    """A linear classifier; the logits are the code of the class with the largest score.

    Its outputs are the scores (n, classes), which a loss needs. Its logits are -1 and 1, so that
    similar classes are no closer than their codes. ``codes`` (classes, bits) is saved with it.
    """

    kind = "argmax"
    saved = ("classes",)
    codes: Tensor

    def __init__(self, in_features: int, bits: int, classes: int) -> None:
        super().__init__(in_features, bits, outputs=classes)
        self.classes = classes
        self.register_buffer("codes", torch.ones(classes, bits))

    def logits(self, features: Tensor) -> Tensor:
        """Features (n, in_features) to logits (n, bits), -1 or 1; bit = logit > 0."""
        return self.codes[self(features).argmax(1)]

    def _initialise(self, inputs: Tensor) -> None:
        """Set all scores to 0, because the problem is convex and has no saddle."""
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)


class SlicedHead(Head):
    """Divide and encode: a hidden layer cut into ``bits`` disjoint slices, one per logit.

    Each bit is computed from its own ``width`` hidden units only; no two bits share a unit.

    Args:
        in_features: d.
        bits: number of slices.
        width: hidden units per slice.
    """

    kind = "sliced"
    saved = ("width",)

    def __init__(self, in_features: int, bits: int, width: int = 50) -> None:
        super().__init__(in_features, bits)
        if width < 1:
            raise UsageError(f"a slice needs at least one hidden unit, got width {width}")
        self.width = width
        self.hidden = nn.Linear(in_features, bits * width)
        self.weight = nn.Parameter(torch.empty(bits, width))
        self.bias = nn.Parameter(torch.zeros(bits))
        nn.init.normal_(self.weight, std=width**-0.5)

    def forward(self, features: Tensor) -> Tensor:
        """Features (n, in_features) to logits (n, bits)."""
        return self._sliced(self.prepare(features))

    def _sliced(self, inputs: Tensor) -> Tensor:
        hidden = F.relu(self.hidden(inputs))
        return (hidden.unflatten(1, (self.bits, self.width)) * self.weight).sum(2) + self.bias

    def _initialise(self, inputs: Tensor) -> None:
        """Scale every slice so that its logit has mean 0 and deviation 1."""
        _draw(self.hidden)
        nn.init.normal_(self.weight, std=self.width**-0.5)
        nn.init.zeros_(self.bias)
        _scale(self, self._sliced(inputs))


class ProductHead(LinearHead):
    """A tanh bottleneck cut into subspaces, with one codebook per subspace: product quantisation.

    An output z (``width`` reals) is encoded as the number of the nearest word in each subspace. A
    code is the sequence of these numbers, each in binary, highest bit first. Codes are ranked by
    the asymmetric quantiser distance between a real query and the words of a database item,

        AQD(q, x) = sum_m || z_q^m - c^m[x_m] ||^2,

    so they have no Hamming distance.

    The rule for any number of bits: as few subspaces as possible with at most 8 bits (256 words)
    each; the bits are spread evenly, and the first subspaces take one more if they do not divide:
    12 = 6 + 6, 13 = 7 + 6, 20 = 7 + 7 + 6, 48 = 6 x 8.

    Args:
        in_features: d.
        bits: bits of all word numbers together.
        width: outputs of the bottleneck, rounded up to a multiple of the number of subspaces.
    """

    kind = "product"
    saved = ("width",)
    hamming = False
    max_bits: ClassVar[int] = 8
    codebooks: Tensor
    unused: Tensor
    shifts: Tensor
    places: Tensor

    def __init__(self, in_features: int, bits: int, width: int = 300) -> None:
        if width < 1:
            raise UsageError(f"the bottleneck needs at least one output, got width {width}")
        subspace_bits = self.divide(check_bits(bits))
        size = -(-width // len(subspace_bits))
        super().__init__(in_features, bits, outputs=size * len(subspace_bits))
        self.subspace_bits = subspace_bits
        self.subspaces = len(subspace_bits)
        self.width = size * self.subspaces
        words = 2 ** self.subspace_bits[0]
        each = torch.tensor(self.subspace_bits)
        self.register_buffer("codebooks", torch.zeros(self.subspaces, words, size))
        # Word numbers that do not fit into a subspace's bits are infinitely far from everything.
        far = torch.where(torch.arange(words) < 2 ** each[:, None], 0.0, torch.inf)
        self.register_buffer("unused", far, persistent=False)
        shifts = torch.cat([torch.arange(count - 1, -1, -1) for count in self.subspace_bits])
        self.register_buffer("shifts", shifts, persistent=False)
        places = torch.arange(self.subspaces).repeat_interleave(each, output_size=bits)
        self.register_buffer("places", places, persistent=False)

    @classmethod
    def divide(cls, bits: int) -> list[int]:
        """Bits of each subspace.

        >>> ProductHead.divide(12), ProductHead.divide(13), ProductHead.divide(20)
        ([6, 6], [7, 6], [7, 7, 6])
        """
        subspaces = -(-bits // cls.max_bits)
        low, more = divmod(bits, subspaces)
        return [low + 1] * more + [low] * (subspaces - more)

    def forward(self, features: Tensor) -> Tensor:
        """Features (n, in_features) to outputs z (n, width) in (-1, 1)."""
        return torch.tanh(super().forward(features))

    def logits(self, features: Tensor) -> Tensor:
        """The bits (n, bits) of the numbers of the nearest words, as -1 and +1."""
        words = self.assign(self(features))
        bits = (words[:, self.places] >> self.shifts) & 1
        return 2.0 * bits - 1.0

    def tables(self, outputs: Tensor) -> Tensor:
        """Squared distances (n, subspaces, words) of outputs (n, width) to every word."""
        parts = outputs.float().unflatten(1, (self.subspaces, -1))
        inner = torch.einsum("nmd,mwd->nmw", parts, self.codebooks)
        squares = parts.square().sum(2, keepdim=True) + self.codebooks.square().sum(2)
        return (squares - 2.0 * inner).clamp_min(0.0) + self.unused

    def assign(self, outputs: Tensor) -> Tensor:
        """Numbers (n, subspaces) of the words nearest to outputs (n, width)."""
        return self.tables(outputs).argmin(2)

    def reconstruct(self, words: Tensor) -> Tensor:
        """Word numbers (n, subspaces) to the vectors (n, width) that they stand for."""
        each = torch.arange(self.subspaces, device=words.device)
        return self.codebooks[each, words].flatten(1)

    def words(self, codes: NDArray[np.uint8]) -> Tensor:
        """Packed codes (n, bytes) to word numbers (n, subspaces)."""
        bits = torch.from_numpy(unpack(codes, self.bits)).to(self.shifts)
        numbers = torch.zeros(len(bits), self.subspaces, dtype=torch.long, device=bits.device)
        return numbers.index_add_(1, self.places, bits << self.shifts)

    def query(self, features: Tensor) -> Tensor:
        """Features (n, in_features) to outputs z (n, width), which are the queries."""
        return self(features)

    @torch.no_grad()
    def distances(self, queries: Tensor, codes: NDArray[np.uint8]) -> Iterator[Tensor]:
        """Asymmetric distances of outputs (q, width) to packed codes (n, bytes), in blocks (b, n).

        The distances of a query to the words are a table; the distance to a code is a sum over
        cells of that table.
        """
        words = self.words(codes)
        for block in queries.split(max(1, DISTANCES_AT_ONCE // max(1, len(words)))):
            tables = self.tables(block.to(self.codebooks.device))
            total = tables[:, 0, words[:, 0]]
            for m in range(1, self.subspaces):
                total += tables[:, m, words[:, m]]
            yield total


def _draw(layer: nn.Linear) -> None:
    """Draw weights that pass the deviation of a layer's inputs on to its outputs."""
    nn.init.normal_(layer.weight, std=layer.in_features**-0.5)
    if layer.bias is not None:
        nn.init.zeros_(layer.bias)


def _scale(layer: nn.Linear | SlicedHead, outputs: Tensor) -> None:
    """Scale a layer's weights and bias so that its outputs (n, k) have mean 0 and deviation 1."""
    deviation = outputs.std(0, correction=0).clamp_min(1e-6)
    layer.weight.div_(deviation[:, None])
    layer.bias.sub_(outputs.mean(0) / deviation)


HEADS: dict[str, type[Head]] = {
    head.kind: head
    for head in (
        LinearHead,
        BatchNormHead,
        ArgmaxHead,
        SlicedHead,
        ProductHead,
        CutHead,
        ClassStepHead,
        WideHead,
        PeriodicHead,
        KernelHead,
        AnchorGraphHead,
        CubeHead,
        TreesHead,
    )
}


def restore_head(config: dict[str, Any]) -> Head:
    """Build the head that a config describes, ready for its saved weights."""
    config = dict(config)
    kind = config.pop("kind", "")
    if kind not in HEADS:
        raise unknown_name("head", str(kind), HEADS)
    if "inner" in config:
        config["inner"] = restore_head(config["inner"])
    try:
        return HEADS[kind](**config)
    except TypeError as error:
        raise FisherhashError(f"the head '{kind}' cannot be built from {config}: {error}") from None
