"""Heads while they are trained, in torch; :meth:`Head.finished` makes plain data of one.

A method that is trained by gradient returns one of these from ``head``, a method that is fitted to
features an :class:`ArrayHead`, which runs the functions of finished heads.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Self

import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from fisherhash.codes import check_bits
from fisherhash.errors import UsageError
from fisherhash.model.head import FinishedHead
from fisherhash.model.head_kinds import KINDS, Parts, distances_to, subspace_bits
from fisherhash.model.torch_batches import LiveHead

__all__ = [
    "ArgmaxHead",
    "ArrayHead",
    "BatchNormHead",
    "Head",
    "LinearHead",
    "ProductHead",
    "SlicedHead",
    "distances_to",
]


class Head(nn.Module):
    """Features (n, in_features) to outputs; codes are cut from the logits (n, bits).

    Every head standardises its input with the mean and scale of the training features, because
    features of different backbones differ in scale by orders of magnitude; ``start`` measures them.
    ``forward`` computes the outputs that a method's loss takes.

    Attributes:
        kind: what it is, in messages and among the finished heads.
        hamming: whether codes are ranked by Hamming distance; if not, they are ranked by the
            ``distances`` of real-valued queries (see :class:`ProductHead`).
        dropout: on the standardised features; the training loop sets it, encoding switches it off.
    """

    kind: str = ""
    hamming: bool = True
    shift: Tensor
    scale: Tensor

    def __init__(self, in_features: int, bits: int) -> None:
        super().__init__()
        self.in_features = in_features
        self.bits = check_bits(bits)
        self.dropout = nn.Dropout(0.0)
        self.register_buffer("shift", torch.zeros(in_features))
        self.register_buffer("scale", torch.ones(in_features))

    def logits(self, features: Tensor) -> Tensor:
        """Features (n, in_features) to logits (n, bits); bit = logit > 0."""
        return self(features)

    @torch.no_grad()
    def start(self, features: Tensor) -> None:
        """Measure the training features (n, in_features) and scale the logits to deviation 1."""
        self.shift.copy_(features.mean(0))
        deviation = features.std(0, correction=0)
        # A feature that never varies carries no information, and has no deviation to divide by.
        self.scale.copy_(torch.where(deviation > 1e-6, 1.0 / deviation.clamp_min(1e-6), 0.0))
        self._initialise(self.standardise(features))

    def _initialise(self, inputs: Tensor) -> None:
        """Set the first weights, for standardised training features (n, in_features)."""

    def standardise(self, features: Tensor) -> Tensor:
        """Features (n, in_features) with the training set's mean 0 and deviation 1."""
        return (features - self.shift) * self.scale

    def prepare(self, features: Tensor) -> Tensor:
        """Standardised features, with dropout while training."""
        return self.dropout(self.standardise(features))

    def finished(self) -> FinishedHead:
        """The head as it is now, without what only training needs."""
        raise NotImplementedError(f"{type(self).__name__} does not say what it is when finished")

    def _finished(self, kind: str, *, inner: Head | None = None, **found: Any) -> FinishedHead:
        """A finished head of these tensors and numbers; standardisation comes with them."""
        arrays = {name: as_array(value) for name, value in found.items() if _is_tensor(value)}
        # A shift of nothing and a scale of one are left out.
        if self.shift.any():
            arrays["shift"] = as_array(self.shift)
        if (self.scale != 1).any():
            arrays["scale"] = as_array(self.scale)
        numbers = {name: value for name, value in found.items() if not _is_tensor(value)}
        within = None if inner is None else inner.finished()
        about = (kind, self.in_features, self.bits, arrays, numbers, within)
        return FinishedHead(*about, live=LiveHead(self))


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
    def from_matrix(cls, weight: Tensor, shift: Tensor) -> Self:
        """The head u = weight (f - shift), for methods in closed form; weight: (bits, d)."""
        head = cls(weight.shape[1], weight.shape[0])
        head.linear.weight.copy_(weight)
        nn.init.zeros_(head.linear.bias)
        head.shift.copy_(shift)
        return head

    def finished(self) -> FinishedHead:
        """W and v."""
        return self._finished("linear", weight=self.linear.weight, offset=self.linear.bias)


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

    def finished(self) -> FinishedHead:
        """A linear head: the normalisation is folded into its matrix."""
        mean, variance = (
            statistic.double()  # type: ignore[union-attr]
            for statistic in (self.norm.running_mean, self.norm.running_var)
        )
        scale = (variance + self.norm.eps).rsqrt()
        weight = (self.linear.weight.double() * scale[:, None]).float()
        return self._finished("linear", weight=weight, offset=(-mean * scale).float())


class ArgmaxHead(LinearHead):
    """A linear classifier; the logits are the code of the class with the largest score.

    Its outputs are the scores (n, classes), which a loss needs. Its logits are -1 and 1, so that
    similar classes are no closer than their codes. ``codes`` (classes, bits) is saved with it.
    """

    kind = "argmax"
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

    def finished(self) -> FinishedHead:
        """The classifier, and the codes of the classes."""
        layer = self.linear
        return self._finished("argmax", weight=layer.weight, offset=layer.bias, codes=self.codes)


class SlicedHead(Head):
    """Divide and encode: a hidden layer cut into ``bits`` disjoint slices, one per logit.

    Each bit is computed from its own ``width`` hidden units only; no two bits share a unit.

    Args:
        in_features: d.
        bits: number of slices.
        width: hidden units per slice.
    """

    kind = "sliced"

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

    def finished(self) -> FinishedHead:
        """Both layers."""
        hidden = {"hidden_weight": self.hidden.weight, "hidden_offset": self.hidden.bias}
        return self._finished("sliced", weight=self.weight, offset=self.bias, **hidden)


class ProductHead(LinearHead):
    """A tanh bottleneck cut into subspaces, with one codebook per subspace: product quantisation.

    An output z (``width`` reals) is encoded as the number of the nearest word in each subspace. A
    code is the sequence of these numbers, each in binary, highest bit first. Codes are ranked by
    the asymmetric quantiser distance between a real query and the words of a database item,

        AQD(q, x) = sum_m || z_q^m - c^m[x_m] ||^2,

    so they have no Hamming distance. ``head_kinds.subspace_bits`` divides the bits.

    Args:
        in_features: d.
        bits: bits of all word numbers together.
        width: outputs of the bottleneck, rounded up to a multiple of the number of subspaces.
    """

    kind = "product"
    hamming = False
    codebooks: Tensor
    unused: Tensor

    def __init__(self, in_features: int, bits: int, width: int = 300) -> None:
        if width < 1:
            raise UsageError(f"the bottleneck needs at least one output, got width {width}")
        own = subspace_bits(check_bits(bits))
        size = -(-width // len(own))
        super().__init__(in_features, bits, outputs=size * len(own))
        self.subspace_bits, self.subspaces, self.width = own, len(own), size * len(own)
        words = 2 ** own[0]
        self.register_buffer("codebooks", torch.zeros(self.subspaces, words, size))
        # Word numbers that do not fit into a subspace's bits are infinitely far from everything.
        most = 2 ** torch.tensor(own)[:, None]
        far = torch.where(torch.arange(words) < most, 0.0, torch.inf)
        self.register_buffer("unused", far, persistent=False)

    def forward(self, features: Tensor) -> Tensor:
        """Features (n, in_features) to outputs z (n, width) in (-1, 1)."""
        return torch.tanh(super().forward(features))

    def logits(self, features: Tensor) -> Tensor:
        """The bits (n, bits) of the numbers of the nearest words, as -1 and +1."""
        words = self.assign(self(features))
        bits = [
            (words[:, number] >> shift) & 1
            for number, own in enumerate(self.subspace_bits)
            for shift in range(own - 1, -1, -1)
        ]
        return 2.0 * torch.stack(bits, dim=1) - 1.0

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

    def finished(self) -> FinishedHead:
        """The bottleneck and the words."""
        layer = {"weight": self.linear.weight, "offset": self.linear.bias}
        return self._finished("product", codebooks=self.codebooks, **layer)


class ArrayHead(Head):
    """A finished head in torch: what a method fits in closed form, or what is exported.

    Its buffers are the arrays of the finished head, and its logits come from the same function.

    Args:
        kind: one of ``KINDS``.
        in_features: d.
        bits: K.
        arrays: what the function computes with, by name; ``shift`` is subtracted from features.
        numbers: the same for single numbers.
        inner: the head that it is built on, if there is one.
    """

    def __init__(
        self,
        kind: str,
        in_features: int,
        bits: int,
        arrays: Mapping[str, Tensor],
        *,
        numbers: Mapping[str, Any] | None = None,
        inner: FinishedHead | None = None,
    ) -> None:
        super().__init__(in_features, bits)
        self.kind, self.numbers = kind, dict(numbers or {})
        for name, values in arrays.items():
            kept = values.detach().clone()
            self.register_buffer(name, kept.float() if kept.is_floating_point() else kept)
        self.inner = None if inner is None else ArrayHead.of(inner)
        self._names = tuple(arrays)

    @classmethod
    def of(cls, head: FinishedHead) -> ArrayHead:
        """The head that computes what a finished head does."""
        arrays = {name: torch.from_numpy(array.copy()) for name, array in head.arrays.items()}
        about = (head.kind, head.in_features, head.bits, arrays)
        return cls(*about, numbers=head.numbers, inner=head.inner)

    def forward(self, features: Tensor) -> Tensor:
        """Features (n, in_features) to logits (n, bits)."""
        arrays = {name: self.get_buffer(name) for name in self._names}
        parts = Parts(self.bits, arrays, self.numbers, self.inner)
        return KINDS[self.kind](parts, features)

    def finished(self) -> FinishedHead:
        """The same arrays."""
        arrays = {name: as_array(self.get_buffer(name)) for name in self._names}
        inner = None if self.inner is None else self.inner.finished()
        about = (self.kind, self.in_features, self.bits, arrays)
        return FinishedHead(*about, dict(self.numbers), inner, live=LiveHead(self))


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


def _is_tensor(value: object) -> bool:
    return isinstance(value, Tensor)


def as_array(values: Tensor) -> NDArray[Any]:
    """A copy of a tensor as an array."""
    return values.detach().cpu().numpy().copy()
