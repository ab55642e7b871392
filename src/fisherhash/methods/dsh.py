"""Deep Supervised Hashing (Liu, Wang, Shan, Chen, CVPR 2016)."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from fisherhash.methods._pairs import BatchPairs, check_not_negative, check_positive
from fisherhash.methods.base import Batch, HashMethod, MethodInfo, register


@register
class DSH(HashMethod):
    """Deep Supervised Hashing: a contrastive loss with a margin, and outputs drawn to -1 or 1."""

    info = MethodInfo(
        name="dsh",
        title="Deep Supervised Hashing for Fast Image Retrieval",
        venue="CVPR",
        year=2016,
        url="https://doi.org/10.1109/CVPR.2016.227",
        supervision="pairs",
        multilabel=True,
        fit="gradient",
    )

    def __init__(
        self, *, bits: int, classes: int, margin: float = 2.0, quantization: float = 0.01
    ) -> None:
        super().__init__(bits=bits, classes=classes)
        check_positive("dsh", margin=margin)
        check_not_negative("dsh", quantization=quantization)
        self.margin = margin
        self.quantization = quantization

    def loss(self, outputs: Tensor, batch: Batch) -> dict[str, Tensor]:
        """The contrastive loss of the batch's pairs, plus the regulariser."""
        u = outputs.float()
        pairs = BatchPairs.of(batch.labels)
        distances = squared_distances(u)
        near = distances.where(pairs.similar, F.relu(self.margin * self.bits - distances))
        pair = pairs.mean(0.5 * near)
        quantization = 2.0 * (u.abs() - 1.0).abs().sum(1).mean()
        loss = pair + self.quantization * quantization
        return {"pair": pair, "quantization": quantization, "loss": loss}


def squared_distances(values: Tensor) -> Tensor:
    """(b, b) squared Euclidean distances of rows (b, K), without a (b, b, K) tensor."""
    norms = values.square().sum(1)
    return F.relu(norms[:, None] + norms - 2.0 * values @ values.T)
