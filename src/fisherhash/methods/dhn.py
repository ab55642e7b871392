"""Deep Hashing Network (Zhu, Long, Wang, Cao, AAAI 2016)."""

from typing import Annotated

import torch
from torch import Tensor

from fisherhash.methods._options import NotNegative, Positive, Tuned
from fisherhash.methods._pairs import BatchPairs, log_cosh, logistic
from fisherhash.methods.base import Batch, HashMethod, MethodInfo, register


@register
class DHN(HashMethod):
    """Deep Hashing Network: a pair likelihood, and a prior that pulls each output to -1 or 1.

    With z_i = tanh(u_i) the squashed K logits of image i, s_ij = 1 for similar pairs and 0 for
    others, and sigma(a z_i . z_j) the probability of s_ij = 1, the paper minimises the negative
    logarithm of the posterior under a bimodal Laplacian prior,

        sum_ij [ log(1 + e^(a z_i . z_j)) - s_ij a z_i . z_j ]
        + lambda * sum_i sum_k log cosh(|z_ik| - 1)

    where log cosh is a smooth |x|. The code of an image is sgn(u).

    Where the paper leaves a choice, or the released code differs:

    * Pairs are those inside a batch, without the pair of an image with itself.
    * Sums become means: the pair term over its pairs, the prior over images (summed over bits).
      ``quantization`` is lambda in this scaling; in the paper's sums over N images and N^2 pairs it
      is lambda / N.
    * With a = 1/2, a z_i . z_j is K/2 minus the Hamming distance for codes, as in DPSH. As we read
      the paper, it has a = 1, which saturates for long codes.
    * The prior is log cosh as printed. The group's TensorFlow code uses (|z| - 1)^2, weights
      similar pairs more and gives the prior the weight 0 in its script.
    * With several labels, a pair is similar when it shares at least one.

    Args:
        bits: K.
        classes: Not used; the method sees similarity only.
        scale: a. 0.5 is the default of the loss in the group's TensorFlow code.
        quantization: lambda, for means; our choice.
        loss_scale: Multiplies the whole loss. All methods share one learning rate, and the gradient
            of a mean over pairs is small. 10 is the factor of the authors' rate for the last layer.
    """

    info = MethodInfo(
        name="dhn",
        title="Deep Hashing Network for Efficient Similarity Retrieval",
        venue="AAAI",
        year=2016,
        url="https://doi.org/10.1609/aaai.v30i1.10235",
        supervision="pairs",
    )

    scale: Annotated[Positive, Tuned(0.1, 3.0, "log")] = 0.5
    quantization: Annotated[NotNegative, Tuned(0.003, 10.0, "log")] = 0.1
    loss_scale: Positive = 10.0

    def loss(self, outputs: Tensor, batch: Batch) -> dict[str, Tensor]:
        """Return the negative log-posterior of one batch."""
        z = torch.tanh(outputs.float())
        pairs = BatchPairs.of(batch.labels)
        pair = pairs.mean(logistic(self.scale * z @ z.T, pairs.similar))
        quantization = log_cosh(z.abs() - 1.0).sum(1).mean()
        loss = self.loss_scale * (pair + self.quantization * quantization)
        return {"pair": pair, "quantization": quantization, "loss": loss}
