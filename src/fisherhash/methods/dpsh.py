"""Deep Pairwise-Supervised Hashing (Li, Wang, Kang, IJCAI 2016)."""

from typing import Annotated

from torch import Tensor

from fisherhash.methods._options import NotNegative, Positive, Tuned
from fisherhash.methods._pairs import MemoryMethod, quantization_error
from fisherhash.methods.base import Batch, MethodInfo, register


@register
class DPSH(MemoryMethod):
    """Deep Pairwise-Supervised Hashing: codes under which similar pairs are likely.

    With u_i the K logits of image i, b_i = sgn(u_i) its code, s_ij = 1 for similar pairs and 0 for
    others, and theta_ij = u_i . u_j / 2, so that sigma(theta_ij) is the probability of s_ij = 1,
    the paper minimises

        sum_ij [ log(1 + e^theta_ij) - s_ij theta_ij ] + eta * sum_i ||b_i - u_i||^2

    by turns: b_i = sgn(u_i), then back-propagation with b fixed. It is Deep Fisher Hashing without
    margin and without class centres, and shares its code.

    Where the paper leaves a choice:

    * Pairs are batch x all N training images, each of the latter with its last output, as in the
      authors' code. One pass before the first step fills this memory (theirs starts at zero, where
      a pair has no gradient). The pair of an image with itself is left out.
    * Sums become means: the pair term over its pairs, the quantisation term over images. Divided by
      the b N pairs of a batch, the authors' loss is the mean pair term plus (eta / N) times the
      mean of ||b - u||^2. ``quantization`` stands for eta / N, so that one value suits training
      sets of any size.
    * sgn(0) is -1, the bit of a logit that is not greater than 0.
    * With several labels, a pair is similar when it shares at least one.

    Args:
        bits: K.
        classes: Not used; the method sees similarity only.
        quantization: eta / N. 0.01 is eta = 50, the value in the authors' code, for the N = 5,000
            images of its CIFAR-10 protocol.
        loss_scale: Multiplies the whole loss. All methods share one learning rate, and the gradient
            of a mean over pairs is small. 5 is the authors' rate, 0.05, over the loop's 0.01.
    """

    info = MethodInfo(
        name="dpsh",
        title="Feature Learning based Deep Supervised Hashing with Pairwise Labels",
        venue="IJCAI",
        year=2016,
        url="https://arxiv.org/abs/1511.03855",
        supervision="pairs",
    )

    quantization: Annotated[NotNegative, Tuned(0.0003, 3.0, "log")] = 0.01
    loss_scale: Positive = 5.0

    def loss(self, outputs: Tensor, batch: Batch) -> dict[str, Tensor]:
        """Return the negative log-likelihood of the batch's pairs, plus the quantisation term."""
        pair = self.memory.pair_loss(outputs, batch)
        quantization = quantization_error(outputs)
        loss = self.loss_scale * (pair + self.quantization * quantization)
        return {"pair": pair, "quantization": quantization, "loss": loss}
