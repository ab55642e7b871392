"""MIHash: hashing with mutual information (Cakir, He, Bargal, Sclaroff, ICCV 2017)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from fisherhash.methods._pairs import BatchPairs, check_positive
from fisherhash.methods.base import Batch, HashMethod, MethodInfo, register


@register
class MIHash(HashMethod):
    """MIHash: distances that tell as much as possible about who is a neighbour."""

    info = MethodInfo(
        name="mihash",
        title="Hashing with Mutual Information",
        venue="TPAMI",
        year=2019,
        url="https://arxiv.org/abs/1803.00974",
        supervision="pairs",
        multilabel=True,
        fit="gradient",
    )

    def __init__(
        self, *, bits: int, classes: int, bins: int = 16, sharpness: float = 1.0, loss_scale: float = 10.0
    ) -> None:
        super().__init__(bits=bits, classes=classes)
        check_positive("mihash", bins=bins, sharpness=sharpness, loss_scale=loss_scale)
        self.bins = bins
        self.sharpness = sharpness
        self.loss_scale = loss_scale

    def loss(self, outputs: Tensor, batch: Batch) -> dict[str, Tensor]:
        """Minus the mutual information, in bits, averaged over the batch's anchors."""
        h = torch.tanh(self.sharpness * outputs.float())
        pairs = BatchPairs.of(batch.labels)
        distances = 0.5 * (self.bits - h @ h.T)
        pulses = self._pulses(distances)
        near = torch.einsum("ijl,ij->il", pulses, pairs.similar.float())
        far = torch.einsum("ijl,ij->il", pulses, pairs.dissimilar.float())
        similar, dissimilar = pairs.similar.sum(1), pairs.dissimilar.sum(1)
        everyone = (similar + dissimilar).clamp_min(1)
        share = similar / everyone
        information = (
            _entropy((near + far) / everyone[:, None])
            - share * _entropy(near / similar.clamp_min(1)[:, None])
            - (1.0 - share) * _entropy(far / dissimilar.clamp_min(1)[:, None])
        )
        usable = (similar > 0) & (dissimilar > 0)
        information = torch.where(usable, information, 0.0).sum() / usable.sum().clamp_min(1)
        return {"information": information, "loss": -self.loss_scale * information}

    def _pulses(self, distances: Tensor) -> Tensor:
        width = self.bits / self.bins
        centers = width * torch.arange(self.bins + 1, device=distances.device)
        return F.relu(1.0 - (distances[..., None] - centers).abs() / width)


def _entropy(shares: Tensor) -> Tensor:
    return -(shares * (shares + 1e-12).log2()).sum(-1)
