"""Bit-scalable deep hashing, DRSCH (Zhang, Lin, Zhang, Zuo and Zhang, TIP 2015)."""

from typing import Annotated

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fisherhash.methods._options import PositiveInt
from fisherhash.methods._pairs import BatchPairs
from fisherhash.methods._triplets import LIMIT, Triplets, squared_distances
from fisherhash.methods.base import Batch, HashMethod, MethodInfo, register
from fisherhash.system.options import Range, Tuned


@register
class DRSCH(HashMethod):
    """DRSCH: triplets on a weighted Hamming distance, with similar images held together.

    With h = tanh(u) and w_k >= 0 the learned weight of bit k, d(i, j) = sum_k w_k^2 (h_ik - h_jk)^2
    / 4. The loss is

        mean over (q, i, j) of max(0, rho + d(q, i) - d(q, j))
        + lambda * mean over similar (i, j) of ||h_i - h_j||^2 / 4,

    i similar to q, j not. The weights tell which bits matter: shorter codes keep the heaviest.
    The code is sgn(u).

    How we read the paper, whose details we could not check, and what differs:

    * Triplets are drawn in the batch by the rule of ``methods/_triplets.py``.
    * The regulariser is the Laplacian of the graph of similar images in the batch.
    * w^2 has mean 1, so that the margin keeps its meaning; rho = margin * K.
    * Codes are ranked by plain Hamming distance, as for every method.
    * The authors' code, a layer of an old version of Caffe, could not be run to compare with.

    Args:
        bits: K.
        classes: M.
        margin: rho / K.
        regularity: lambda.
        triplets: The most (q, i, j) per step.
    """

    info = MethodInfo(
        name="drsch",
        title="Bit-Scalable Deep Hashing with Regularized Similarity Learning for Image Retrieval "
        "and Person Re-Identification",
        venue="TIP",
        year=2015,
        url="https://arxiv.org/abs/1508.04535",
        supervision="triplets",
    )

    margin: Annotated[float, Range(least=0), Tuned(0.05, 0.75)] = 0.25
    regularity: Annotated[float, Range(least=0), Tuned(1e-3, 1.0, "log")] = 0.03
    triplets: PositiveInt = LIMIT

    def __post_init__(self) -> None:
        super().__post_init__()
        self.weights = nn.Parameter(torch.ones(self.bits))

    def loss(self, outputs: Tensor, batch: Batch) -> dict[str, Tensor]:
        """Return the triplet hinge and the regulariser on one batch."""
        h = torch.tanh(outputs.float())
        squares = self.weights.square()
        scaled = h * (squares / squares.mean().clamp_min(1e-6)).sqrt()
        # (h_i - h_j)^2 summed, from inner products.
        distances = squared_distances(scaled) / 4.0
        chosen = Triplets.of_labels(batch.labels, limit=self.triplets)
        ranking = chosen.mean(F.relu(self.margin * self.bits + chosen.gap(distances)))
        similar = BatchPairs.of(batch.labels).similar
        regular = torch.where(
            similar, squared_distances(h) / 4.0, 0.0
        ).sum() / similar.sum().clamp_min(1)
        loss = ranking + self.regularity * regular
        return {"loss": loss, "ranking": ranking, "regularity": regular}
