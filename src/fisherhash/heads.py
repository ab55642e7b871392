"""Heads: what turns features into logits, and is saved with the model."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from fisherhash.codes import check_bits
from fisherhash.errors import FisherhashError, unknown_name


class Head(nn.Module):
    """Features (n, in_features) to outputs; a code is cut from the logits (n, bits) among them.

    Every head standardises its input with the mean and scale of the training features, because
    features of different backbones differ in scale by orders of magnitude; ``start`` measures them.

    Attributes:
        kind: the name a saved model refers to.
        dropout: on the standardised features, set by the training loop, off while encoding.
    """

    kind: ClassVar[str]
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

    def prepare(self, features: Tensor) -> Tensor:
        """Standardised features, with dropout while training."""
        return self.dropout((features - self.shift) * self.scale)

    def config(self) -> dict[str, Any]:
        """What :func:`restore` needs to build the same head, as JSON."""
        return {"kind": self.kind, "in_features": self.in_features, "bits": self.bits}


class LinearHead(Head):
    """One linear layer without activation: u = W f + v."""

    kind = "linear"

    def __init__(self, in_features: int, bits: int) -> None:
        super().__init__(in_features, bits)
        self.linear = nn.Linear(in_features, bits)

    def forward(self, features: Tensor) -> Tensor:
        """Features (n, in_features) to logits (n, bits)."""
        return self.linear(self.prepare(features))

    @torch.no_grad()
    def start(self, features: Tensor) -> None:
        """Standardise, then scale every row of W so that its logit has mean 0 and deviation 1.

        At u near 0 a pairwise loss has a saddle; a default initialisation starts close to it.
        """
        super().start(features)
        nn.init.normal_(self.linear.weight, std=self.in_features**-0.5)
        nn.init.zeros_(self.linear.bias)
        was_training = self.training
        self.eval()
        logits = self(features)
        self.train(was_training)
        deviation = logits.std(0, correction=0).clamp_min(1e-6)
        self.linear.weight.div_(deviation[:, None])
        self.linear.bias.sub_(logits.mean(0) / deviation)

    @classmethod
    @torch.no_grad()
    def from_matrix(cls, weight: Tensor, shift: Tensor) -> LinearHead:
        """The head u = weight (f - shift), for methods with a closed form. weight: (bits, d)."""
        head = cls(weight.shape[1], weight.shape[0])
        head.linear.weight.copy_(weight)
        nn.init.zeros_(head.linear.bias)
        head.shift.copy_(shift)
        return head


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
        return self.norm(self.linear(self.prepare(features)))

    @torch.no_grad()
    def start(self, features: Tensor) -> None:
        """Standardise, and give the normalisation the statistics of the training set."""
        super().start(features)
        nn.init.normal_(self.linear.weight, std=self.in_features**-0.5)
        was_training = self.training
        self.eval()
        outputs = self.linear(self.prepare(features))
        self.train(was_training)
        self.norm.running_mean.copy_(outputs.mean(0))  # type: ignore[union-attr]
        self.norm.running_var.copy_(outputs.var(0, correction=0))  # type: ignore[union-attr]


HEADS: dict[str, type[Head]] = {head.kind: head for head in (LinearHead, BatchNormHead)}


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
