"""Deep Hashing Network (Zhu, Long, Wang, Cao, AAAI 2016)."""

from __future__ import annotations

import torch
from torch import Tensor

from fisherhash.methods._pairs import (
    BatchPairs,
    check_not_negative,
    check_positive,
    log_cosh,
    logistic,
)
from fisherhash.methods.base import Batch, HashMethod, MethodInfo, register


@register
class DHN(HashMethod):
    """Deep Hashing Network: likely pairs, and a prior that draws each output to -1 or 1."""

    info = MethodInfo(
        name="dhn",
        title="Deep Hashing Network for Efficient Similarity Retrieval",
        venue="AAAI",
        year=2016,
        url="https://doi.org/10.1609/aaai.v30i1.10235",
        supervision="pairs",
        multilabel=True,
        fit="gradient",
    )

    def __init__(
        self, *, bits: int, classes: int, scale: float = 0.5, quantization: float = 0.1, loss_scale: float = 10.0
    ) -> None:
        super().__init__(bits=bits, classes=classes)
        check_positive("dhn", scale=scale)
        check_not_negative("dhn", quantization=quantization)
        self.scale = scale
        self.quantization = quantization
        self.loss_scale = loss_scale

    def loss(self, outputs: Tensor, batch: Batch) -> dict[str, Tensor]:
        """The negative log-posterior of one batch."""
        z = torch.tanh(outputs.float())
        pairs = BatchPairs.of(batch.labels)
        pair = pairs.mean(logistic(self.scale * z @ z.T, pairs.similar))
        quantization = log_cosh(z.abs() - 1.0).sum(1).mean()
        loss = self.loss_scale * (pair + self.quantization * quantization)
        return {"pair": pair, "quantization": quantization, "loss": loss}
