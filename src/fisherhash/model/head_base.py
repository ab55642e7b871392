"""The base class of all heads: features in, logits out."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from fisherhash.codes import check_bits, unpack

DISTANCES_AT_ONCE = 2**20
"""Distances held in memory at a time."""


class Head(nn.Module):
    """Features (n, in_features) to outputs; codes are cut from the logits (n, bits).

    Every head standardises its input with the mean and scale of the training features, because
    features of different backbones differ in scale by orders of magnitude; ``start`` measures them.
    ``forward`` computes the outputs that a method's loss takes.

    Attributes:
        kind: the name that a saved model refers to.
        hamming: whether codes are ranked by Hamming distance; if not, they are ranked by the
            ``distances`` of real-valued queries (see :class:`ProductHead`).
        saved: names of the constructor's own arguments, which are attributes too.
        dropout: on the standardised features; the training loop sets it, encoding switches it off.
    """

    kind: ClassVar[str]
    hamming: ClassVar[bool] = True
    saved: ClassVar[tuple[str, ...]] = ()
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

    def query(self, features: Tensor) -> Tensor:
        """Features (n, in_features) to the real-valued queries that ``distances`` takes.

        They are the logits; only a head without a Hamming distance may compute others.
        """
        return self.logits(features)

    @torch.no_grad()
    def distances(self, queries: Tensor, codes: NDArray[np.uint8]) -> Iterator[Tensor]:
        """Distances of real-valued queries (q, …) to packed codes (n, bytes).

        Yields blocks (b, n) of bounded size, the queries in order. Here the distance is
        ||u - b||^2 of logits u and a code's b in {-1, 1}^K, less the terms that are the same for
        every b.
        """
        # Each distinct code once, so that equal codes are at exactly equal distances.
        distinct, places = np.unique(codes, axis=0, return_inverse=True)
        signs = 2.0 * torch.from_numpy(unpack(distinct, self.bits)).to(queries) - 1.0
        columns = torch.from_numpy(places.reshape(-1)).to(queries.device)
        for block in queries.split(max(1, DISTANCES_AT_ONCE // max(1, len(codes)))):
            yield (-2.0 * block @ signs.T)[:, columns]

    def standardise(self, features: Tensor) -> Tensor:
        """Features (n, in_features) with the training set's mean 0 and deviation 1."""
        return (features - self.shift) * self.scale

    def prepare(self, features: Tensor) -> Tensor:
        """Standardised features, with dropout while training."""
        return self.dropout(self.standardise(features))

    def config(self) -> dict[str, Any]:
        """What :func:`restore_head` needs to build the same head, as JSON."""
        config = {"kind": self.kind, "in_features": self.in_features, "bits": self.bits}
        return config | {name: getattr(self, name) for name in self.saved}
