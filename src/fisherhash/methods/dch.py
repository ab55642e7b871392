"""Deep Cauchy Hashing (Cao, Long, Liu, Wang, CVPR 2018)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from fisherhash.methods._pairs import BatchPairs, check_not_negative, check_positive
from fisherhash.methods.base import Batch, HashMethod, MethodInfo, register

NEAREST = 1e-6


@register
class DCH(HashMethod):
    """Deep Cauchy Hashing: a heavy-tailed probability that asks for small Hamming distances."""

    info = MethodInfo(
        name="dch",
        title="Deep Cauchy Hashing for Hamming Space Retrieval",
        venue="CVPR",
        year=2018,
        url="https://doi.org/10.1109/CVPR.2018.00134",
        supervision="pairs",
        multilabel=True,
        fit="gradient",
    )

    def __init__(
        self, *, bits: int, classes: int, gamma: float = 20.0, quantization: float = 0.1, loss_scale: float = 10.0
    ) -> None:
        super().__init__(bits=bits, classes=classes)
        check_positive("dch", gamma=gamma)
        check_not_negative("dch", quantization=quantization)
        self.gamma = gamma
        self.quantization = quantization
        self.loss_scale = loss_scale

    def loss(self, outputs: Tensor, batch: Batch) -> dict[str, Tensor]:
        """The negative log-posterior of one batch."""
        h = torch.tanh(outputs.float())
        pairs = BatchPairs.of(batch.labels)
        directions = F.normalize(h, eps=1e-3)
        d = self._distance(directions @ directions.T)
        near = torch.log1p(d / self.gamma)
        pair = pairs.balanced(torch.where(pairs.similar, near, near + (self.gamma / d).log()))
        vertex = h.new_full((self.bits,), self.bits**-0.5)
        error = self._distance(directions.abs() @ vertex)
        quantization = torch.log1p(error / self.gamma).mean()
        loss = self.loss_scale * (pair + self.quantization * quantization)
        return {"pair": pair, "quantization": quantization, "loss": loss}

    def _distance(self, cosine: Tensor) -> Tensor:
        """The Hamming distance that codes with this cosine have; at least ``NEAREST``."""
        return (0.5 * self.bits * (1.0 - cosine)).clamp_min(NEAREST)
