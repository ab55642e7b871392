"""Heads of methods that are fitted on features: waves, kernels, anchor graphs, words and trees."""

from __future__ import annotations

import torch
from torch import Tensor

from fisherhash.errors import UsageError
from fisherhash.model.head_base import Head


class PeriodicHead(Head):
    """u = cos(W f + phase) + offset: bits that change several times along a direction."""

    kind = "periodic"
    weight: Tensor
    phase: Tensor
    offset: Tensor

    def __init__(self, in_features: int, bits: int) -> None:
        super().__init__(in_features, bits)
        self.register_buffer("weight", torch.zeros(bits, in_features))
        self.register_buffer("phase", torch.zeros(bits))
        self.register_buffer("offset", torch.zeros(bits))

    def forward(self, features: Tensor) -> Tensor:
        """Features (n, in_features) to logits (n, bits)."""
        return torch.cos(self.standardise(features) @ self.weight.T + self.phase) + self.offset

    @classmethod
    def from_waves(
        cls, weight: Tensor, phase: Tensor, *, mean: Tensor, offset: Tensor | None = None
    ) -> PeriodicHead:
        """The head u = cos(weight (f - mean) + phase) + offset; weight: (bits, d)."""
        head = cls(weight.shape[1], weight.shape[0])
        head.weight.copy_(weight)
        head.phase.copy_(phase)
        head.shift.copy_(mean)
        if offset is not None:
            head.offset.copy_(offset)
        return head


class KernelHead(Head):
    """u = W (k(f) - mean) + offset, k_j(f) = exp(-gamma ||f - a_j||^2) for each anchor a_j.

    Args:
        in_features: d.
        bits: K.
        anchors: m.
    """

    kind = "kernel"
    saved = ("anchors",)
    points: Tensor
    gamma: Tensor
    mean: Tensor
    weight: Tensor
    offset: Tensor

    def __init__(self, in_features: int, bits: int, anchors: int) -> None:
        super().__init__(in_features, bits)
        _at_least_one("anchor", anchors)
        self.anchors = anchors
        self.register_buffer("points", torch.zeros(anchors, in_features))
        self.register_buffer("gamma", torch.ones(()))
        self.register_buffer("mean", torch.zeros(anchors))
        self.register_buffer("weight", torch.zeros(bits, anchors))
        self.register_buffer("offset", torch.zeros(bits))

    def forward(self, features: Tensor) -> Tensor:
        """Features (n, in_features) to logits (n, bits)."""
        kernel = torch.exp(-self.gamma * distances_to(self.standardise(features), self.points))
        return (kernel - self.mean) @ self.weight.T + self.offset

    @classmethod
    def from_kernel(
        cls, anchors: Tensor, gamma: float, mean: Tensor, weight: Tensor, offset: Tensor | None
    ) -> KernelHead:
        """The head with these anchors (m, d), kernel means (m,) and weights (bits, m)."""
        head = cls(anchors.shape[1], weight.shape[0], len(anchors))
        # Distances of centred vectors lose less to rounding.
        head.shift.copy_(anchors.mean(0))
        head.points.copy_(anchors - anchors.mean(0))
        head.gamma.fill_(gamma)
        head.mean.copy_(mean)
        head.weight.copy_(weight)
        if offset is not None:
            head.offset.copy_(offset)
        return head


class AnchorGraphHead(Head):
    """u = W z(f) + offset, with z the similarities to the ``nearest`` anchors, which sum to 1.

    With ``folds`` > 0 the last ``folds`` logits are second bits of the first ``folds`` outputs:
    an output y > 0 is compared with ``high``, another one with ``low``, so that each side of a cut
    is cut again.

    Args:
        in_features: d.
        bits: K.
        anchors: m.
        nearest: Anchors that count for an image.
        folds: Logits that cut an output a second time.
    """

    kind = "anchor-graph"
    saved = ("anchors", "nearest", "folds")
    points: Tensor
    gamma: Tensor
    weight: Tensor
    high: Tensor
    low: Tensor

    def __init__(
        self, in_features: int, bits: int, anchors: int, nearest: int, folds: int = 0
    ) -> None:
        super().__init__(in_features, bits)
        _at_least_one("anchor", anchors)
        if not 1 <= nearest <= anchors or not 0 <= folds <= bits // 2:
            raise UsageError(
                f"an anchor graph needs 1 to {anchors} nearest anchors and at most {bits // 2} "
                f"second bits, got {nearest} and {folds}"
            )
        self.anchors, self.nearest, self.folds = anchors, nearest, folds
        self.register_buffer("points", torch.zeros(anchors, in_features))
        self.register_buffer("gamma", torch.ones(()))
        self.register_buffer("weight", torch.zeros(bits - folds, anchors))
        self.register_buffer("high", torch.zeros(folds))
        self.register_buffer("low", torch.zeros(folds))

    def similarities(self, features: Tensor) -> Tensor:
        """Features (n, in_features) to z (n, anchors), whose rows sum to 1."""
        distances = distances_to(self.standardise(features), self.points)
        near, places = distances.topk(self.nearest, dim=1, largest=False)
        return torch.zeros_like(distances).scatter(1, places, torch.softmax(-self.gamma * near, 1))

    def forward(self, features: Tensor) -> Tensor:
        """Features (n, in_features) to logits (n, bits)."""
        outputs = self.similarities(features) @ self.weight.T
        folded = outputs[:, : self.folds]
        again = torch.where(folded > 0, folded - self.high, self.low - folded)
        return torch.cat([outputs, again], dim=1)


class CubeHead(Head):
    """The nearest word in each subspace; words are numbered like the corners of a cube.

    Near words have numbers that differ in few bits, so codes are ranked by Hamming distance. The
    logit of a bit is the squared distance to the nearest word where that bit is 0, less that to
    the nearest word where it is 1.

    Args:
        in_features: d.
        bits: K.
        dimensions: Dimensions of each subspace.
        subspace_bits: Bits of each subspace, ``bits`` in all.
    """

    kind = "cube"
    saved = ("dimensions", "subspace_bits")
    projection: Tensor

    def __init__(
        self, in_features: int, bits: int, dimensions: list[int], subspace_bits: list[int]
    ) -> None:
        super().__init__(in_features, bits)
        if sum(subspace_bits) != bits or len(dimensions) != len(subspace_bits):
            raise UsageError(f"the bits of the subspaces must sum to {bits}, got {subspace_bits}")
        if min(subspace_bits) < 1 or max(subspace_bits) > 8 or min(dimensions) < 1:
            raise UsageError(
                f"a subspace has 1 to 8 bits and at least 1 dimension, got {subspace_bits} bits "
                f"and {dimensions} dimensions"
            )
        if sum(dimensions) > in_features:
            raise UsageError(f"{sum(dimensions)} dimensions do not fit into {in_features} features")
        self.dimensions, self.subspace_bits = list(dimensions), list(subspace_bits)
        self.register_buffer("projection", torch.zeros(in_features, sum(dimensions)))
        for number, (size, own) in enumerate(zip(dimensions, subspace_bits, strict=True)):
            self.register_buffer(f"words_{number}", torch.zeros(2**own, size))

    def forward(self, features: Tensor) -> Tensor:
        """Features (n, in_features) to logits (n, bits)."""
        parts = (self.standardise(features) @ self.projection).split(self.dimensions, dim=1)
        logits = []
        for number, (part, own) in enumerate(zip(parts, self.subspace_bits, strict=True)):
            words = self.get_buffer(f"words_{number}")
            distances = distances_to(part, words)
            corners = cube_corners(own).to(words) > 0
            for bit in range(own):
                zero = distances[:, ~corners[:, bit]].amin(1)
                logits.append(zero - distances[:, corners[:, bit]].amin(1))
        return torch.stack(logits, dim=1)


class TreesHead(Head):
    """A weighted vote of small decision trees per bit.

    All trees have ``depth`` levels: node 0 splits first, and the children of node i are 2 i + 1
    (feature at most the threshold) and 2 i + 2. A branch that ends early repeats its vote below.

    Args:
        in_features: d.
        bits: K.
        trees: Trees per bit.
        depth: Splits from the root to a leaf.
    """

    kind = "trees"
    saved = ("trees", "depth")
    columns: Tensor
    thresholds: Tensor
    votes: Tensor

    def __init__(self, in_features: int, bits: int, trees: int, depth: int) -> None:
        super().__init__(in_features, bits)
        if trees < 1 or not 1 <= depth <= 12:
            raise UsageError(f"trees need 1 to 12 levels and at least 1 tree, got {depth}, {trees}")
        self.trees, self.depth = trees, depth
        inner = 2**depth - 1
        self.register_buffer("columns", torch.zeros(bits, trees, inner, dtype=torch.long))
        self.register_buffer("thresholds", torch.zeros(bits, trees, inner))
        self.register_buffer("votes", torch.zeros(bits, trees, inner + 1))

    def forward(self, features: Tensor) -> Tensor:
        """Features (n, in_features) to logits (n, bits)."""
        return torch.cat([self._votes(block) for block in self.standardise(features).split(256)])

    def _votes(self, inputs: Tensor) -> Tensor:
        inner = 2**self.depth - 1
        # Tables are flat, so that one number per image and tree finds a node in them.
        first = torch.arange(self.bits * self.trees, device=inputs.device)
        node = torch.zeros(len(inputs), len(first), dtype=torch.long, device=inputs.device)
        for _ in range(self.depth):
            at = node + inner * first
            values = inputs.gather(1, self.columns.take(at))
            node = 2 * node + 1 + (values > self.thresholds.take(at)).long()
        votes = self.votes.take(node - inner + (inner + 1) * first)
        return votes.view(len(inputs), self.bits, self.trees).sum(2)


def cube_corners(bits: int) -> Tensor:
    """Return (2^bits, bits) the corners of a cube, -1 and 1, highest bit first.

    >>> cube_corners(2).tolist()
    [[-1.0, -1.0], [-1.0, 1.0], [1.0, -1.0], [1.0, 1.0]]
    """
    numbers = torch.arange(2**bits)[:, None]
    return 2.0 * ((numbers >> torch.arange(bits - 1, -1, -1)) & 1) - 1.0


def distances_to(rows: Tensor, others: Tensor) -> Tensor:
    """Return the squared distances (n, m) of rows (n, d) to others (m, d)."""
    squares = rows.square().sum(1, keepdim=True) + others.square().sum(1)
    return (squares - 2.0 * rows @ others.T).clamp_min(0.0)


def _at_least_one(what: str, count: int) -> None:
    if count < 1:
        raise UsageError(f"a head needs at least one {what}, got {count}")
