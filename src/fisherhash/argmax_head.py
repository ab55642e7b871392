"""The head of a classifier that hashes: an image's code is the code of its likeliest class."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from fisherhash.heads import Head


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
        """What is needed to build the same head, as JSON."""
        return {**super().config(), "classes": self.classes}
