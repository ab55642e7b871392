"""HashNet (Cao, Long, Wang, Yu, ICCV 2017)."""

import math
from typing import Annotated

import torch
from torch import Tensor, nn

from fisherhash.methods._options import Positive, Range, Tuned
from fisherhash.methods._pairs import BatchPairs, logistic
from fisherhash.methods.base import Batch, HashMethod, MethodInfo, Progress, register


@register
class HashNet(HashMethod):
    """HashNet: tanh sharpens into sgn during training, so that nothing is left to quantise.

    With h_i = tanh(beta u_i) the squashed K logits of image i, s_ij = 1 for similar pairs and 0 for
    others, and sigma(alpha h_i . h_j) the probability of s_ij = 1, the paper minimises

        sum_ij w_ij [ log(1 + e^(alpha h_i . h_j)) - s_ij alpha h_i . h_j ]

    where w_ij = c_ij |S| / |S1| for similar and |S| / |S0| for dissimilar pairs balances the two
    (S all pairs, S1 the similar, S0 the dissimilar ones), and c_ij is the number of labels that a
    pair shares over the number that either image has: 1 for single-label data. Beta grows in
    stages, and each stage starts from the weights of the last: tanh(beta u) goes to sgn(u). The
    code is sgn(u).

    Where the paper leaves a choice, or the released code differs:

    * Pairs are those inside a batch (the authors draw two batches and pair one with the other),
      without the pair of an image with itself. S, S1 and S0 are the batch's.
    * The sum is divided by |S|, so the loss is a mean over the similar pairs plus a mean over the
      dissimilar pairs. A batch that lacks one kind has the other mean only.
    * Both kinds are weighted, as printed. The authors' PyTorch default multiplies similar pairs by
      a constant per data set instead, and leaves c_ij out.
    * Stages are epochs: beta = sqrt(1 + (beta_end^2 - 1) t) with t the share of the training that
      is over. That is the authors' released schedule, sqrt(1 + 0.005 t) over t = 10,000 steps in 50
      stages, which ends at 7.1, for training of any length. In the paper beta goes to infinity.
    * Where a network is fine-tuned, beta rises twice: over the epochs that train the head alone,
      and again from 1 over those that train the network.

    Args:
        bits: K.
        classes: Not used; the method sees similarity only.
        scale: alpha K; 10 as in the authors' code.
        final_sharpness: beta_end, of the authors' released schedule.
        loss_scale: Multiplies the whole loss. All methods share one learning rate, and the gradient
            of a mean over pairs is small. Our choice, made on CIFAR-10.
    """

    info = MethodInfo(
        name="hashnet",
        title="HashNet: Deep Learning to Hash by Continuation",
        venue="ICCV",
        year=2017,
        url="https://arxiv.org/abs/1702.00758",
        supervision="pairs",
    )

    scale: Annotated[Positive, Tuned(2.0, 50.0, "log")] = 10.0
    final_sharpness: Annotated[float, Range(least=1), Tuned(1.5, 30.0, "log")] = 7.0
    loss_scale: Positive = 3.0

    def __post_init__(self) -> None:
        super().__post_init__()
        self.sharpness = nn.Buffer(torch.ones(()))

    def on_epoch_start(self, progress: Progress) -> None:
        """Start the next stage of the continuation."""
        done = progress.step / max(progress.steps, 1)
        self.sharpness.fill_(math.sqrt(1.0 + (self.final_sharpness**2 - 1.0) * done))

    def loss(self, outputs: Tensor, batch: Batch) -> dict[str, Tensor]:
        """Return the weighted negative log-likelihood of the batch's pairs."""
        h = torch.tanh(self.sharpness * outputs.float())
        pairs = BatchPairs.of(batch.labels)
        losses = logistic(self.scale / self.bits * h @ h.T, pairs.similar)
        losses = torch.where(pairs.similar, pairs.overlap * losses, losses)
        loss = self.loss_scale * pairs.balanced(losses)
        return {"loss": loss, "sharpness": self.sharpness.clone()}
