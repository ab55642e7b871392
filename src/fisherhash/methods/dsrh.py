"""Deep Semantic Ranking Based Hashing (Zhao, Huang, Wang, Tan, CVPR 2015)."""

from typing import Annotated

import torch
import torch.nn.functional as F
from torch import Tensor

from fisherhash.methods._options import NotNegative, PositiveInt, Tuned
from fisherhash.methods._triplets import LIMIT, Triplets
from fisherhash.methods.base import Batch, HashMethod, MethodInfo, register


@register
class DSRH(HashMethod):
    """Deep Semantic Ranking Hashing: images are ranked by how many labels they share with a query.

    With h = tanh(u) in (-1, 1)^K, d(q, i) = (K - h_q . h_i) / 2 (the Hamming distance, for codes)
    and r_i the number of labels that i shares with q, the paper minimises

        sum_q sum_(i,j: r_i > r_j) w(r_i, r_j) max(0, rho + d(q, i) - d(q, j))
        + alpha / 2 ||mean_i h_i||^2 + beta / 2 ||W||^2,     w(r_i, r_j) = (2^r_i - 2^r_j) / Z_q:

    swapping two images costs what it costs in NDCG. The code of an image is sgn(u).

    How we read the paper, and what differs:

    * The ranked list of a query is the rest of its batch, with at most ``triplets`` pairs (i, j)
      per step by the rule of ``methods/_triplets.py``: i shares a label, j is any image that shares
      fewer.
    * Z_q is the ideal DCG of that list, sum_k (2^r_(k) - 1) / log2(1 + k) with r in descending
      order.
    * Sums become means: the hinge is the weighted mean over (q, i, j), so the weights set the
      proportions but not the scale. With one label per image all weights of a query are equal, and
      this is a plain triplet loss.
    * The paper's hash layer reads the last two layers of its network; ours reads the backbone's
      features.
    * beta is the weight decay of the optimiser, which every method has.
    * rho grows with the code, rho = margin * K. We do not know the paper's rho and alpha.
    * A batch in which no pair (i, j) differs (one class, one image) has the balance term alone.

    Args:
        bits: K.
        classes: M.
        margin: rho / K; our choice.
        balance: alpha, on the mean of h over the batch; our choice.
        triplets: The most (q, i, j) per step; our choice.
    """

    info = MethodInfo(
        name="dsrh",
        title="Deep Semantic Ranking Based Hashing for Multi-Label Image Retrieval",
        venue="CVPR",
        year=2015,
        url="https://arxiv.org/abs/1501.06272",
        supervision="triplets",
    )

    margin: Annotated[NotNegative, Tuned(0.03, 1.5, "log")] = 0.25
    balance: Annotated[NotNegative, Tuned(0.003, 3.0, "log")] = 0.1
    triplets: PositiveInt = LIMIT

    def loss(self, outputs: Tensor, batch: Batch) -> dict[str, Tensor]:
        """Return the weighted ranking hinge and the balance of the bits, on one batch."""
        h = torch.tanh(outputs.float())
        distances = 0.5 * (self.bits - h @ h.T)
        labels = batch.labels.float()
        shared = labels @ labels.T
        others = ~torch.eye(len(labels), dtype=torch.bool, device=labels.device)
        chosen = Triplets.of((shared > 0) & others, others, limit=self.triplets)
        weights = chosen.gap(_gains(torch.where(others, shared, 0.0))).clamp_min(0.0)
        hinge = F.relu(self.margin * self.bits + chosen.gap(distances))
        ranking = chosen.mean(hinge, weights)
        balance = 0.5 * h.mean(0).square().sum()
        return {"ranking": ranking, "balance": balance, "loss": ranking + self.balance * balance}


def _gains(shared: Tensor) -> Tensor:
    """Return 2^r / Z of every image (b, b) in the list of every query; r = 0 on the diagonal."""
    # Both parts of the fraction are scaled by the largest gain: 2^r itself may overflow.
    largest = shared.amax(1, keepdim=True)
    gains = torch.exp2(shared - largest)
    nothing = torch.exp2(-largest)
    places = torch.arange(2, shared.shape[1] + 2, device=shared.device).float()
    ideal = ((gains - nothing).sort(1, descending=True).values / torch.log2(places)).sum(1)
    return torch.where(largest > 0, gains / ideal.clamp_min(1e-30)[:, None], 0.0)
