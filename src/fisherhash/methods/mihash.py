"""MIHash: hashing with mutual information (Cakir, He, Bargal, Sclaroff, ICCV 2017)."""

from typing import Annotated

import torch
import torch.nn.functional as F
from torch import Tensor

from fisherhash.methods._options import Positive, PositiveInt, Tuned
from fisherhash.methods._pairs import BatchPairs
from fisherhash.methods.base import Batch, HashMethod, MethodInfo, register


@register
class MIHash(HashMethod):
    """MIHash: distances that reveal as much as possible about which images are neighbours.

    With h_i = tanh(a u_i) the squashed K logits of image i, d_ij = (K - h_i . h_j) / 2, D the
    distance of an image j drawn from the others to the anchor i, and C whether j is similar to i,
    the paper maximises the mutual information, averaged over the anchors i,

        I(D; C) = H(D) - H(D | C)
        H(D | C) = p(similar) H(D | similar) + p(dissimilar) H(D | dissimilar)

    where H is the entropy of a histogram over [0, K] with bin centres 0, w, 2w, …, K. A distance is
    split between the two nearest bins, max(0, 1 - |d - centre| / w) to each, which makes the
    histogram differentiable. The code of an image is sgn(u).

    Where the paper leaves a choice, or the released code differs:

    * The images j are those of the batch without i, as in the authors' code. An anchor with no
      similar or no dissimilar image in the batch has I = 0 whatever its distances are, and is left
      out of the mean; the authors' sum includes it.
    * Entropies are in bits, as in the authors' code, with log2(p + 1e-12) for a finite slope at
      p = 0.
    * The authors squash by 2 sigma(40 u) - 1 = tanh(20 u), for features of norm 1 and a network
      that starts with small u. Here logits start with deviation 1, where that would be flat: a = 1.
    * With several labels, a pair is similar when it shares at least one.

    Args:
        bits: K.
        classes: Not used; the method sees similarity only.
        bins: K / w, the number of bins less one; 16 in the authors' code.
        sharpness: a; our choice, see above.
        loss_scale: Multiplies the whole loss. All methods share one learning rate, and the gradient
            of a mean over pairs is small. 10 is the authors' rate, 0.1, over the loop's 0.01.
    """

    info = MethodInfo(
        name="mihash",
        title="Hashing with Mutual Information",
        venue="TPAMI",
        year=2019,
        url="https://arxiv.org/abs/1803.00974",
        supervision="pairs",
    )

    bins: Annotated[PositiveInt, Tuned(4, 64, "log")] = 16
    sharpness: Annotated[Positive, Tuned(0.1, 10.0, "log")] = 1.0
    loss_scale: Positive = 10.0

    def loss(self, outputs: Tensor, batch: Batch) -> dict[str, Tensor]:
        """Return minus the mutual information, in bits, averaged over the batch's anchors."""
        h = torch.tanh(self.sharpness * outputs.float())
        pairs = BatchPairs.of(batch.labels)
        distances = 0.5 * (self.bits - h @ h.T)
        width = self.bits / self.bins
        centers = width * torch.arange(self.bins + 1, device=h.device)
        pulses = F.relu(1.0 - (distances[..., None] - centers).abs() / width)
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


def _entropy(shares: Tensor) -> Tensor:
    return -(shares * (shares + 1e-12).log2()).sum(-1)
