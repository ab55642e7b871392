"""HashNet (Cao, Long, Wang, Yu, ICCV 2017)."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from fisherhash.errors import UsageError
from fisherhash.methods._pairs import BatchPairs, check_positive, logistic
from fisherhash.methods.base import Batch, HashMethod, MethodInfo, Progress, register


@register
class HashNet(HashMethod):
    """HashNet: tanh grows into sgn while training goes on, so that nothing is left to quantise."""

    info = MethodInfo(
        name="hashnet",
        title="HashNet: Deep Learning to Hash by Continuation",
        venue="ICCV",
        year=2017,
        url="https://arxiv.org/abs/1702.00758",
        supervision="pairs",
        multilabel=True,
        fit="gradient",
    )
    sharpness: Tensor

    def __init__(
        self, *, bits: int, classes: int, scale: float = 10.0, final_sharpness: float = 7.0, loss_scale: float = 3.0
    ) -> None:
        super().__init__(bits=bits, classes=classes)
        check_positive("hashnet", scale=scale)
        if final_sharpness < 1:
            raise UsageError(f"hashnet: final_sharpness must be 1 or more, got {final_sharpness}")
        self.scale = scale
        self.loss_scale = loss_scale
        self.final_sharpness = final_sharpness
        self.register_buffer("sharpness", torch.ones(()))

    def on_epoch_start(self, progress: Progress) -> None:
        """The next stage of the continuation."""
        done = progress.step / max(progress.steps, 1)
        self.sharpness.fill_(math.sqrt(1.0 + (self.final_sharpness**2 - 1.0) * done))

    def loss(self, outputs: Tensor, batch: Batch) -> dict[str, Tensor]:
        """The weighted negative log-likelihood of the batch's pairs."""
        h = torch.tanh(self.sharpness * outputs.float())
        pairs = BatchPairs.of(batch.labels)
        losses = logistic(self.scale / self.bits * h @ h.T, pairs.similar)
        losses = torch.where(pairs.similar, pairs.overlap * losses, losses)
        return {"loss": self.loss_scale * pairs.balanced(losses), "sharpness": self.sharpness.clone()}
