"""Heads around a trained head: its bits are cut, or an estimate of the classes pulls at them."""

from __future__ import annotations

import copy

import numpy as np
import torch
from torch import Tensor

from fisherhash.errors import NotDefinedError
from fisherhash.model.head import FinishedHead
from fisherhash.model.heads import Head, as_array
from fisherhash.model.torch_batches import LiveHead


class CutHead(Head):
    """K bits cut from the logits u of a trained head that has more of them, or fewer: sgn(W u + t).

    Its outputs, which a loss takes, are those of the inner head. W and t are computed after the
    training (``methods/_cutting.py``). Until then the bits are the signs of the first logits, which
    come again where there are fewer than bits.

    Args:
        in_features: d.
        bits: K.
        inner: the trained head, whose codes have a Hamming distance.
    """

    kind = "cut"
    mixing: Tensor
    offsets: Tensor

    def __init__(self, in_features: int, bits: int, inner: Head) -> None:
        super().__init__(in_features, bits)
        if not inner.hamming:
            raise NotDefinedError(
                f"the codes of the head '{inner.kind}' are not signs of logits, so nothing can be "
                "cut from them or added to them"
            )
        self.inner = inner
        self.dropout = inner.dropout
        first = torch.eye(inner.bits).repeat(-(-bits // inner.bits), 1)[:bits]
        self.register_buffer("mixing", first)
        self.register_buffer("offsets", torch.zeros(bits))

    def forward(self, features: Tensor) -> Tensor:
        """Features (n, in_features) to the outputs of the inner head."""
        return self.inner(features)

    def logits(self, features: Tensor) -> Tensor:
        """Features (n, in_features) to logits (n, bits); bit = logit > 0."""
        return self.inner.logits(features) @ self.mixing.T + self.offsets

    def start(self, features: Tensor) -> None:
        """Start the inner head with training features (n, in_features)."""
        self.inner.start(features)

    def standardise(self, features: Tensor) -> Tensor:
        """Features (n, in_features) as the inner head takes them."""
        return self.inner.standardise(features)

    def finished(self) -> FinishedHead:
        """W, t and the inner head; of a linear head another linear one."""
        inner, live = self.inner.finished(), LiveHead(self)
        arrays = {"mixing": as_array(self.mixing), "offset": as_array(self.offsets)}
        if inner.kind != "linear":
            return FinishedHead("cut", self.in_features, self.bits, arrays, {}, inner, live)
        mixing = arrays["mixing"].astype(np.float64)
        weight, offset = (mixing @ inner.arrays[name] for name in ("weight", "offset"))
        both = {"weight": weight, "offset": offset + arrays["offset"]}
        both = inner.arrays | {name: value.astype(np.float32) for name, value in both.items()}
        return FinishedHead("linear", self.in_features, self.bits, both, live=live)


class ClassStepHead(Head):
    """The class step: logits that an estimate of the image's classes pulls to the class centres.

    With u the logits of the inner head, s the mean of |u| over the training images, C the class
    centres (K x M, -1 and 1) and p the probabilities of the M classes, the logits are

        u + mu s C p,    p = softmax(beta (W f + v)),

    W f + v the scores of a linear classifier of the standardised features f. Where images have
    several labels, p are the sigmoids of the scores, divided by their sum where it exceeds 1.
    ``training/class_step.py`` fits the classifier.

    Args:
        in_features: d.
        bits: K.
        inner: the head that was trained.
        classes: M.
        several: whether images have several labels.
        weight: mu; with 0 the logits are those of the inner head.
        sharpness: beta.
    """

    kind = "class-step"
    scores_weight: Tensor
    scores_bias: Tensor
    centers: Tensor
    size: Tensor

    def __init__(
        self,
        in_features: int,
        bits: int,
        inner: Head,
        classes: int,
        *,
        several: bool = False,
        weight: float = 0.0,
        sharpness: float = 1.0,
    ) -> None:
        super().__init__(in_features, bits)
        self.inner, self.dropout = inner, inner.dropout
        self.classes, self.several = classes, several
        self.weight, self.sharpness = weight, sharpness
        self.register_buffer("scores_weight", torch.zeros(classes, in_features))
        self.register_buffer("scores_bias", torch.zeros(classes))
        self.register_buffer("centers", torch.ones(classes, bits))
        self.register_buffer("size", torch.ones(()))

    def with_step(self, weight: float, sharpness: float) -> ClassStepHead:
        """Return a head that shares all tensors with this one and has another step."""
        other = copy.copy(self)
        other.weight, other.sharpness = weight, sharpness
        return other

    def forward(self, features: Tensor) -> Tensor:
        """Features (n, in_features) to the outputs of the inner head."""
        return self.inner(features)

    def scores(self, features: Tensor) -> Tensor:
        """Features (n, in_features) to the scores (n, classes) of the classifier."""
        return self.standardise(features) @ self.scores_weight.T + self.scores_bias

    def probabilities(self, scores: Tensor) -> Tensor:
        """Scores (n, classes) to the probabilities p of the classes (n, classes)."""
        scores = self.sharpness * scores
        if not self.several:
            return torch.softmax(scores, 1)
        likely = torch.sigmoid(scores)
        return likely / likely.sum(1, keepdim=True).clamp_min(1.0)

    def logits(self, features: Tensor) -> Tensor:
        """Features (n, in_features) to logits (n, bits); bit = logit > 0."""
        return self.combine(self.inner.logits(features), self.scores(features))

    def combine(self, logits: Tensor, scores: Tensor) -> Tensor:
        """Logits (n, bits) of the inner head and scores (n, classes) to the logits of this one."""
        return logits + self.weight * self.size * (self.probabilities(scores) @ self.centers)

    def finished(self) -> FinishedHead:
        """The classifier, the centres and the inner head."""
        return self._finished(
            "class-step",
            inner=self.inner,
            scores_weight=self.scores_weight,
            scores_offset=self.scores_bias,
            centers=self.centers,
            size=self.size,
            several=self.several,
            weight=self.weight,
            sharpness=self.sharpness,
        )
