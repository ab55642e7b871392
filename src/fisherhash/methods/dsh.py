"""Deep Supervised Hashing (Liu, Wang, Shan, Chen, CVPR 2016)."""

from typing import Annotated

import torch.nn.functional as F
from torch import Tensor

from fisherhash.methods._options import NotNegative, Positive, Tuned
from fisherhash.methods._pairs import BatchPairs
from fisherhash.methods._triplets import squared_distances
from fisherhash.methods.base import Batch, HashMethod, MethodInfo, register


@register
class DSH(HashMethod):
    """Deep Supervised Hashing: a contrastive loss with a margin, and outputs pulled to -1 or 1.

    With u_i the K logits of image i, d_ij = ||u_i - u_j|| and s_ij = 1 for similar pairs, 0 for
    others, the paper minimises, summed over pairs,

        (1/2) s_ij d_ij^2 + (1/2) (1 - s_ij) max(m - d_ij^2, 0)
        + alpha * ( || |u_i| - 1 ||_1 + || |u_j| - 1 ||_1 )

    with m = 2 K: dissimilar images should differ in at least half of their bits, each of which adds
    4 to d^2. The code of an image is sgn(u).

    Where the paper leaves a choice:

    * Pairs are those inside a batch, as in the authors' code. The pair of an image with itself,
      which would add nothing to the first terms, is left out.
    * The sum becomes a mean over pairs. Every image is in equally many pairs, so the mean of the
      regulariser is 2 alpha times its mean over images. alpha needs no conversion.
    * Distances come from inner products, so that memory grows with the pairs, not the bits.
    * With several labels, a pair is similar when it shares at least one.

    Args:
        bits: K.
        classes: Not used; the method sees similarity only.
        margin: m / K; 2 in the paper.
        quantization: alpha; 0.01 in the paper.
    """

    info = MethodInfo(
        name="dsh",
        title="Deep Supervised Hashing for Fast Image Retrieval",
        venue="CVPR",
        year=2016,
        url="https://doi.org/10.1109/CVPR.2016.227",
        supervision="pairs",
    )

    margin: Annotated[Positive, Tuned(0.4, 6.0, "log")] = 2.0
    quantization: Annotated[NotNegative, Tuned(0.0003, 0.3, "log")] = 0.01

    def loss(self, outputs: Tensor, batch: Batch) -> dict[str, Tensor]:
        """Return the contrastive loss of the batch's pairs, plus the regulariser."""
        u = outputs.float()
        pairs = BatchPairs.of(batch.labels)
        distances = squared_distances(u)
        near = distances.where(pairs.similar, F.relu(self.margin * self.bits - distances))
        pair = pairs.mean(0.5 * near)
        quantization = 2.0 * (u.abs() - 1.0).abs().sum(1).mean()
        loss = pair + self.quantization * quantization
        return {"pair": pair, "quantization": quantization, "loss": loss}
