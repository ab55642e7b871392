"""Deep Supervised Discrete Hashing (Li, Sun, He, Tan, NIPS 2017)."""

from typing import Annotated

import torch
from torch import Tensor, nn

from fisherhash.methods._discrete import coordinate_descent, ridge_classifier
from fisherhash.methods._options import NotNegative, NotNegativeInt, Positive, Tuned
from fisherhash.methods._pairs import MemoryMethod, quantization_error
from fisherhash.methods.base import Batch, MethodInfo, Progress, TrainingSet, register, sign


@register
class DSDH(MemoryMethod):
    """Deep Supervised Discrete Hashing: likely pairs, and codes a linear classifier can read.

    With u_i the K logits of image i, b_i in {-1, 1}^K its code, B all codes (K x N), y_i its 0/1
    label vector, Y all of them (M x N), W (K x M) a linear classifier on the codes, s_ij = 1 for
    similar pairs and 0 for others, and theta_ij = u_i . u_j / 2 the paper minimises

        sum_ij [ log(1 + e^theta_ij) - s_ij theta_ij ]
        + mu * sum_i ||y_i - W^T b_i||^2 + nu * ||W||^2 + eta * sum_i ||b_i - u_i||^2

    by turns:

    * **W** = (B B^T + (nu / mu) I)^-1 B Y^T, in closed form;
    * **B** by discrete cyclic coordinate descent: bit k of an image is
      sgn(p_k - sum_(l != k) w_k . w_l b_l) with p = W y + (eta / mu) u and w_k row k of W;
    * **U**: back-propagation through the pair term and ||b_i - u_i||^2, with B fixed.

    The class term reaches the network only through B, the codes that u is pulled to.

    Where the paper leaves a choice, or the released code differs:

    * W and B are solved over the whole training set, from the remembered outputs, at the start of
      every epoch. The authors' code solves both on each batch alone, from codes that start at 0.
    * B starts at sgn(u) of the first pass, and later where the last epoch left it.
    * Pairs are batch x all N training images, each of the latter with its last output. One pass
      before the first step fills this memory. The pair of an image with itself is left out.
    * Sums become means: the pair term over its pairs, the others over images. Divided by N^2 the
      paper's weights are mu / N and eta / N; ``classification`` and ``quantization`` stand for
      these, so that one value suits training sets of any size. nu / mu is ``ridge``.
    * sgn(0) is -1, the bit of a logit that is not greater than 0.

    Args:
        bits: K.
        classes: M.
        quantization: eta / N, how strongly u is pulled to b. 0.011 is eta = 55 of the authors'
            code, for the N = 5,000 images of the CIFAR-10 protocol.
        classification: mu / N, how strongly the labels pull b away from u in the B-step, where only
            classification / quantization matters. Our choice: mu = 1 of the authors' code would be
            0.0002, which leaves b = sgn(u) except for logits very near 0.
        ridge: nu / mu; 0.1 as in the authors' code.
        sweeps: Passes over the bits in a B-step, which ends early when nothing flips; 10 as in the
            authors' code.
        loss_scale: Multiplies the whole loss. All methods share one learning rate, and the gradient
            of a mean over pairs is small. Our choice is the value of DPSH, which has the same pair
            term.
    """

    info = MethodInfo(
        name="dsdh",
        title="Deep Supervised Discrete Hashing",
        venue="NIPS",
        year=2017,
        url="https://arxiv.org/abs/1705.10999",
        supervision="pairs and classes",
    )

    quantization: Annotated[NotNegative, Tuned(0.0003, 3.0, "log")] = 0.011
    classification: Annotated[Positive, Tuned(0.003, 20.0, "log")] = 0.2
    ridge: Annotated[Positive, Tuned(0.003, 3.0, "log")] = 0.1
    sweeps: NotNegativeInt = 10
    loss_scale: Positive = 5.0

    def __post_init__(self) -> None:
        super().__post_init__()
        self.codes = nn.Buffer(torch.empty(0, self.bits, dtype=torch.int8))
        self.classifier = nn.Buffer(torch.zeros(self.bits, self.classes))

    def start(self, train: TrainingSet) -> None:
        """Fill the memory of outputs; the codes start at the outputs' signs."""
        super().start(train)
        self.codes = sign(self.memory.outputs).to(torch.int8)

    def on_epoch_start(self, progress: Progress) -> None:
        """Take the W-step, then the B-step, over the whole training set."""
        outputs, labels = self.memory.outputs, self.memory.labels
        codes = self.codes.float()
        W = ridge_classifier(codes, labels.collect(codes, shares=False), ridge=self.ridge)
        pull = labels.mix(W, shares=False) + self.quantization / self.classification * outputs
        # In place, because a captured step reads these very tensors.
        self.classifier.copy_(W)
        self.codes.copy_(coordinate_descent(codes, W @ W.T, pull, sweeps=self.sweeps))

    def loss(self, outputs: Tensor, batch: Batch) -> dict[str, Tensor]:
        """Return the U-step's objective on one batch."""
        pair = self.memory.pair_loss(outputs, batch)
        quantization = quantization_error(outputs, self.codes[batch.index])
        loss = self.loss_scale * (pair + self.quantization * quantization)
        return {"pair": pair, "quantization": quantization, "loss": loss}
