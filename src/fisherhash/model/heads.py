"""Heads: what turns features into logits, and is saved with the model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from fisherhash.codes import check_bits, unpack
from fisherhash.errors import FisherhashError, UsageError, unknown_name

BLOCK_PAIRS = 2**20  # distances held at a time


class Head(nn.Module):
    """Features (n, in_features) to outputs; a code is cut from the logits (n, bits) among them.

    Every head standardises its input with the mean and scale of the training features, because
    features of different backbones differ in scale by orders of magnitude; ``start`` measures them.

    Attributes:
        kind: the name a saved model refers to.
        hamming: whether codes are ranked by Hamming distance; where not, by ``distances`` of
            real-valued queries (see :class:`ProductHead`).
        dropout: on the standardised features, set by the training loop, off while encoding.
    """

    kind: ClassVar[str]
    hamming: ClassVar[bool] = True
    shift: Tensor
    scale: Tensor

    def __init__(self, in_features: int, bits: int) -> None:
        super().__init__()
        self.in_features = in_features
        self.bits = check_bits(bits)
        self.dropout = nn.Dropout(0.0)
        self.register_buffer("shift", torch.zeros(in_features))
        self.register_buffer("scale", torch.ones(in_features))

    def forward(self, features: Tensor) -> Tensor:
        """Features (n, in_features) to the outputs a method's loss takes."""
        raise NotImplementedError

    def logits(self, features: Tensor) -> Tensor:
        """Features (n, in_features) to logits (n, bits); bit = logit > 0."""
        return self(features)

    @torch.no_grad()
    def start(self, features: Tensor) -> None:
        """Measure the training features (n, in_features), and give the logits unit scale."""
        self.shift.copy_(features.mean(0))
        deviation = features.std(0, correction=0)
        # A feature that never varies carries nothing; dividing by its deviation would be infinite.
        self.scale.copy_(torch.where(deviation > 1e-6, 1.0 / deviation.clamp_min(1e-6), 0.0))

    def query(self, features: Tensor) -> Tensor:
        """Features (n, in_features) to what ``distances`` takes in place of a query's code."""
        return self.logits(features)

    @torch.no_grad()
    def distances(self, queries: Tensor, codes: NDArray[np.uint8]) -> Iterator[Tensor]:
        """Distances of real-valued queries (q, …) to packed codes (n, bytes): blocks (b, n) of
        bounded size, the queries in order.

        Here ||u - b||^2 of logits u and a code's b in {-1, 1}^K, less what is the same for all b.
        """
        # Each code once: equal codes are exactly equally far.
        distinct, places = np.unique(codes, axis=0, return_inverse=True)
        signs = 2.0 * torch.from_numpy(unpack(distinct, self.bits)).to(queries) - 1.0
        columns = torch.from_numpy(places.reshape(-1)).to(queries.device)
        for block in queries.split(max(1, BLOCK_PAIRS // max(1, len(codes)))):
            yield (-2.0 * block @ signs.T)[:, columns]

    def prepare(self, features: Tensor) -> Tensor:
        """Standardised features, with dropout while training."""
        return self.dropout((features - self.shift) * self.scale)

    @torch.no_grad()
    def without_dropout(self, function: Callable[[Tensor], Tensor], features: Tensor) -> Tensor:
        """What a function of this head gives for features in evaluation mode."""
        was_training = self.training
        self.eval()
        values = function(features)
        self.train(was_training)
        return values

    def config(self) -> dict[str, Any]:
        """What :func:`restore` needs to build the same head, as JSON."""
        return {"kind": self.kind, "in_features": self.in_features, "bits": self.bits}


class LinearHead(Head):
    """One linear layer without activation: u = W f + v."""

    kind = "linear"

    def __init__(self, in_features: int, bits: int, *, outputs: int | None = None) -> None:
        super().__init__(in_features, bits)
        self.linear = nn.Linear(in_features, bits if outputs is None else outputs)

    def forward(self, features: Tensor) -> Tensor:
        """Features (n, in_features) to outputs, which are the logits (n, bits) here."""
        return self.linear(self.prepare(features))

    @torch.no_grad()
    def start(self, features: Tensor) -> None:
        """Standardise, then scale every row of W so that its logit has mean 0 and deviation 1.

        At u near 0 a pairwise loss has a saddle; a default initialisation starts close to it.
        """
        super().start(features)
        _unit_scale(self.linear, self.without_dropout(self.prepare, features))

    @classmethod
    @torch.no_grad()
    def from_matrix(cls, weight: Tensor, shift: Tensor) -> LinearHead:
        """The head u = weight (f - shift), for methods with a closed form. weight: (bits, d)."""
        head = cls(weight.shape[1], weight.shape[0])
        head.linear.weight.copy_(weight)
        nn.init.zeros_(head.linear.bias)
        head.shift.copy_(shift)
        return head


class CutHead(LinearHead):
    """A linear layer of ``width`` outputs, and K bits cut from them by a second, small one.

    The outputs a loss takes are the first layer's; what the bits are cut with is found after the
    training (``methods/_cutting.py``), and until then the first outputs' signs.

    Args:
        in_features: d.
        bits: K.
        width: outputs of the layer that is trained.
    """

    kind = "cut"
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

    def config(self) -> dict[str, Any]:
        """What :func:`restore` needs."""
        return super().config() | {"width": self.width}


class BatchNormHead(Head):
    """A bias-free linear layer, then batch normalisation without an affine part: every logit is
    centred, so every bit is balanced, and has deviation 1.
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
                "batch normalisation needs at least 2 images a batch while training, got "
                f"{len(features)}; take a larger batch size"
            )
        return self.norm(self.linear(self.prepare(features)))

    @torch.no_grad()
    def start(self, features: Tensor) -> None:
        """Standardise, and give the normalisation the statistics of the training set."""
        super().start(features)
        nn.init.normal_(self.linear.weight, std=self.in_features**-0.5)
        outputs = self.linear(self.without_dropout(self.prepare, features))
        self.norm.running_mean.copy_(outputs.mean(0))  # type: ignore[union-attr]
        self.norm.running_var.copy_(outputs.var(0, correction=0))  # type: ignore[union-attr]


class ArgmaxHead(Head):
    """A linear classifier; the logits are the code of the class with the largest score.

    Its outputs are the scores (n, classes), which a loss needs; its logits are -1 and 1, so that
    similar classes are no nearer than their codes. ``codes`` (classes, bits) is saved with it.
    """

    kind = "argmax"
    codes: Tensor

    def __init__(self, in_features: int, bits: int, classes: int) -> None:
        super().__init__(in_features, bits)
        self.classes = classes
        self.linear = nn.Linear(in_features, classes)
        self.register_buffer("codes", torch.ones(classes, bits))

    def forward(self, features: Tensor) -> Tensor:
        """Features (n, in_features) to the classes' scores (n, classes)."""
        return self.linear(self.prepare(features))

    def logits(self, features: Tensor) -> Tensor:
        """Features (n, in_features) to logits (n, bits), -1 or 1; bit = logit > 0."""
        return self.codes[self(features).argmax(1)]

    @torch.no_grad()
    def start(self, features: Tensor) -> None:
        """Standardise; all scores start at 0, because the problem is convex and has no saddle."""
        super().start(features)
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)

    def config(self) -> dict[str, Any]:
        """What :func:`restore` needs."""
        return super().config() | {"classes": self.classes}


class SlicedHead(Head):
    """Divide and encode: a hidden layer cut into ``bits`` disjoint slices, each giving one logit.

    A bit sees its own ``width`` hidden units only, so that no two bits share a unit.

    Args:
        in_features: d.
        bits: number of slices.
        width: hidden units of one slice.
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
        hidden = F.relu(self.hidden(self.prepare(features)))
        return (hidden.unflatten(1, (self.bits, self.width)) * self.weight).sum(2) + self.bias

    @torch.no_grad()
    def start(self, features: Tensor) -> None:
        """Standardise, then scale every slice so that its logit has mean 0 and deviation 1."""
        super().start(features)
        nn.init.normal_(self.hidden.weight, std=self.in_features**-0.5)
        nn.init.zeros_(self.hidden.bias)
        nn.init.normal_(self.weight, std=self.width**-0.5)
        nn.init.zeros_(self.bias)
        logits = self.without_dropout(self, features)
        deviation = logits.std(0, correction=0).clamp_min(1e-6)
        self.weight.div_(deviation[:, None])
        self.bias.sub_(logits.mean(0) / deviation)

    def config(self) -> dict[str, Any]:
        """What :func:`restore` needs."""
        return super().config() | {"width": self.width}


class ProductHead(Head):
    """A tanh bottleneck cut into subspaces, and a code book for each: product quantisation.

    An output z (``width`` reals) is encoded as the number of the nearest word in each subspace; a
    code is those numbers one after the other, each in binary, highest bit first. Codes are ranked
    by the asymmetric quantiser distance between a real query and the words of a database item,

        AQD(q, x) = sum_m || z_q^m - c^m[x_m] ||^2,

    so they have no Hamming distance.

    The rule for any number of bits: as few subspaces as possible with at most 8 bits (256 words)
    each, the bits spread evenly, the first subspaces taking one more where they do not divide:
    12 = 6 + 6, 13 = 7 + 6, 20 = 7 + 7 + 6, 48 = 6 x 8.

    Args:
        in_features: d.
        bits: of all word numbers together.
        width: of the bottleneck, rounded up to a multiple of the number of subspaces.
    """

    kind = "product"
    hamming = False
    max_bits: ClassVar[int] = 8
    codebooks: Tensor
    unused: Tensor
    shifts: Tensor
    places: Tensor

    def __init__(self, in_features: int, bits: int, width: int = 300) -> None:
        super().__init__(in_features, bits)
        if width < 1:
            raise UsageError(f"the bottleneck needs at least one output, got width {width}")
        self.subspace_bits = self.divide(self.bits)
        self.subspaces = len(self.subspace_bits)
        self.width = -(-width // self.subspaces) * self.subspaces
        self.linear = nn.Linear(in_features, self.width)
        words = 2 ** self.subspace_bits[0]
        each = torch.tensor(self.subspace_bits)
        self.register_buffer(
            "codebooks", torch.zeros(self.subspaces, words, self.width // self.subspaces)
        )
        # Word numbers that the bits of a subspace cannot name: infinitely far from everything.
        far = torch.where(torch.arange(words) < 2 ** each[:, None], 0.0, torch.inf)
        self.register_buffer("unused", far, persistent=False)
        shifts = torch.cat([torch.arange(count - 1, -1, -1) for count in self.subspace_bits])
        self.register_buffer("shifts", shifts, persistent=False)
        places = torch.arange(self.subspaces).repeat_interleave(each)
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
        return torch.tanh(self.linear(self.prepare(features)))

    def logits(self, features: Tensor) -> Tensor:
        """The bits (n, bits) of the nearest words' numbers, as -1 and +1."""
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
        """Word numbers (n, subspaces) to the vectors (n, width) they stand for."""
        each = torch.arange(self.subspaces, device=words.device)
        return self.codebooks[each, words].flatten(1)

    def words(self, codes: NDArray[np.uint8]) -> Tensor:
        """Packed codes (n, bytes) to word numbers (n, subspaces)."""
        bits = torch.from_numpy(unpack(codes, self.bits)).to(self.shifts)
        numbers = torch.zeros(len(bits), self.subspaces, dtype=torch.long, device=bits.device)
        return numbers.index_add_(1, self.places, bits << self.shifts)

    def query(self, features: Tensor) -> Tensor:
        """The outputs."""
        return self(features)

    @torch.no_grad()
    def distances(self, queries: Tensor, codes: NDArray[np.uint8]) -> Iterator[Tensor]:
        """Asymmetric distances of outputs (q, width) to packed codes (n, bytes), in blocks (b, n).

        A query's distances to the words are a table; a code's distance is a sum of its cells.
        """
        words = self.words(codes)
        for block in queries.split(max(1, BLOCK_PAIRS // max(1, len(words)))):
            tables = self.tables(block.to(self.codebooks.device))
            total = tables[:, 0, words[:, 0]]
            for m in range(1, self.subspaces):
                total += tables[:, m, words[:, m]]
            yield total

    @torch.no_grad()
    def start(self, features: Tensor) -> None:
        """Standardise, and scale every row so that tanh is given mean 0 and deviation 1."""
        super().start(features)
        _unit_scale(self.linear, self.without_dropout(self.prepare, features))

    def config(self) -> dict[str, Any]:
        """What :func:`restore` needs."""
        return super().config() | {"width": self.width}


@torch.no_grad()
def _unit_scale(layer: nn.Linear, inputs: Tensor) -> None:
    """A random start at which every output has mean 0 and deviation 1 over the inputs (n, d)."""
    nn.init.normal_(layer.weight, std=layer.in_features**-0.5)
    nn.init.zeros_(layer.bias)
    outputs = layer(inputs)
    deviation = outputs.std(0, correction=0).clamp_min(1e-6)
    layer.weight.div_(deviation[:, None])
    layer.bias.sub_(outputs.mean(0) / deviation)


HEADS: dict[str, type[Head]] = {
    head.kind: head
    for head in (LinearHead, CutHead, BatchNormHead, ArgmaxHead, SlicedHead, ProductHead)
}


def restore(config: dict[str, Any]) -> Head:
    """Build the head a config describes, ready for its saved weights."""
    config = dict(config)
    kind = config.pop("kind", "")
    if kind not in HEADS:
        raise unknown_name("head", str(kind), HEADS)
    try:
        return HEADS[kind](**config)
    except TypeError as error:
        raise FisherhashError(f"the head '{kind}' cannot be built from {config}: {error}") from None
