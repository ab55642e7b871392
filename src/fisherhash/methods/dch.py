"""Deep Cauchy Hashing (Cao, Long, Liu, Wang, CVPR 2018)."""

from typing import Annotated

import torch
import torch.nn.functional as F
from torch import Tensor

from fisherhash.methods._options import NotNegative, Positive, Tuned
from fisherhash.methods._pairs import BatchPairs
from fisherhash.methods.base import Batch, HashMethod, MethodInfo, register

NEAREST = 1e-6


@register
class DCH(HashMethod):
    """Deep Cauchy Hashing: a heavy-tailed probability that favours small Hamming distances.

    With h_i = tanh(u_i) the squashed K logits of image i, d(x, y) = (K/2) (1 - cos(x, y)), which is
    the Hamming distance of codes, d_ij = d(h_i, h_j), s_ij = 1 for similar pairs and 0 for others,
    and gamma / (gamma + d_ij) the probability of s_ij = 1, the paper minimises

        sum_ij w_ij [ s_ij log(d_ij / gamma) + log(1 + gamma / d_ij) ]
        + lambda * sum_i log(1 + d(|h_i|, 1) / gamma)

    with w_ij = |S| / |S1| for similar and |S| / |S0| for dissimilar pairs (S all pairs, S1 the
    similar, S0 the dissimilar ones) and 1 the vector of ones. Unlike a logistic probability, this
    one already drops at small distances. The code of an image is sgn(u).

    Where the paper leaves a choice, or the released code differs:

    * A similar pair is computed as log(1 + d / gamma), a dissimilar one as that plus
      log(gamma / d). This equals the printed loss and avoids the difference of two large numbers. d
      is at least 1e-6, so the loss of two dissimilar images with the same direction is finite, and
      has no gradient.
    * Pairs are those inside a batch, without the pair of an image with itself. S, S1 and S0 are the
      batch's.
    * Sums become means: the pair term is divided by |S|, so it is a mean over the similar pairs
      plus a mean over the dissimilar pairs; the quantisation term is a mean over images.
    * The authors' code uses squared Euclidean distances by default, weights similar pairs only, and
      gives a quantisation term (|h| - 1)^2 the weight 0. We use the printed loss.
    * With several labels, a pair is similar when it shares at least one.

    The paper reports precision within Hamming radius 2, which cannot be compared with the mean
    average precision of a whole ranking.

    Args:
        bits: K.
        classes: Not used; the method sees similarity only.
        gamma: The distance at which a pair is as likely similar as not; 20 in the authors' code.
        quantization: lambda, for means; our choice.
        loss_scale: Multiplies the whole loss. All methods share one learning rate, and the gradient
            of a mean over pairs is small. 10 is the factor of the authors' rate for the last layer.
    """

    info = MethodInfo(
        name="dch",
        title="Deep Cauchy Hashing for Hamming Space Retrieval",
        venue="CVPR",
        year=2018,
        url="https://doi.org/10.1109/CVPR.2018.00134",
        supervision="pairs",
    )

    gamma: Annotated[Positive, Tuned(2.0, 200.0, "log")] = 20.0
    quantization: Annotated[NotNegative, Tuned(0.001, 10.0, "log")] = 0.1
    loss_scale: Positive = 10.0

    def loss(self, outputs: Tensor, batch: Batch) -> dict[str, Tensor]:
        """Return the negative log-posterior of one batch."""
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
        """Return the Hamming distance of codes with this cosine; at least ``NEAREST``."""
        return (0.5 * self.bits * (1.0 - cosine)).clamp_min(NEAREST)
