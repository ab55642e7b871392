"""Asymmetric Deep Supervised Hashing (Jiang, Li, AAAI 2018), on the training split alone."""

from typing import Annotated

import torch
from torch import Tensor, nn

from fisherhash.methods._discrete import coordinate_descent
from fisherhash.methods._options import NotNegative, PositiveInt, Tuned
from fisherhash.methods._pairs import MemoryMethod, parts_of, sum_in_parts
from fisherhash.methods.base import Batch, MethodInfo, Progress, TrainingSet, register, sign

SAMPLE_ROWS = 256  # sampled images whose similarity to others is in memory at once


@register
class ADSH(MemoryMethod):
    """Asymmetric Deep Supervised Hashing: a network's outputs against free binary codes.

    With u_i = tanh of the K logits of image i, v_j in {-1, 1}^K a free code for every training
    image (V all of them), Omega a sample of images and S_ij = 1 for similar pairs, -r for others,
    r the number of similar pairs divided by that of dissimilar ones, the paper minimises

        sum_(i in Omega) sum_j (u_i . v_j - K S_ij)^2 + gamma * sum_(i in Omega) ||v_i - u_i||^2

    by turns:

    * **U**: back-propagation with V fixed;
    * **V**: bit by bit for all images, v_jk = sgn(p_jk - sum_(l != k) G_kl v_jl) with G = U U^T and
      p_j = K sum_i S_ij u_i, plus gamma u_j for j in Omega: the exact minimum over that bit.

    The code of an image is sgn(u), for queries and for the database.

    What differs from the paper and the authors' code:

    * Only the training split is used. In the paper V are the codes of the whole database, learned
      from the labels of the whole database, which the other methods do not see. Here V is used for
      training and then dropped, and the network encodes all images.
    * U learns on batches from all training images, not from Omega, because the loop that all
      methods share passes over the whole training set. The V-step, at the start of every epoch,
      samples Omega as in the paper; U are the last outputs of each image.
    * Sums become means: our loss is the sum divided by N K |batch|. The authors' code divides by
      N |batch|; our additional K makes a bit's gradient independent of the number of bits. gamma
      keeps its scale, so the quantisation term has the weight gamma / (N K).
    * r is at most 1, because no inner product is below -K. Without dissimilar pairs it has no
      effect.
    * V starts at the signs of the first outputs; theirs starts at 0.
    * sgn(0) is -1, the bit of a logit that is not greater than 0; no bit is ever 0.

    Args:
        bits: K.
        classes: M.
        quantization: gamma, 200 in the paper.
        sample: Size of Omega, 2,000 in the paper; the V-step's work grows with it.
        sweeps: Passes over the bits in a V-step, 1 in the authors' code.
    """

    info = MethodInfo(
        name="adsh",
        title="Asymmetric Deep Supervised Hashing",
        venue="AAAI",
        year=2018,
        url="https://arxiv.org/abs/1707.08325",
        supervision="pairs",
    )

    quantization: Annotated[NotNegative, Tuned(10.0, 2000.0, "log")] = 200.0
    sample: PositiveInt = 2000
    sweeps: PositiveInt = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        self.codes = nn.Buffer(torch.empty(0, self.bits))
        self.ratio = nn.Buffer(torch.zeros(()))

    def start(self, train: TrainingSet) -> None:
        """Fill the memory of outputs; V starts at their signs."""
        super().start(train)
        self.codes = sign(self.memory.outputs)

    def loss(self, outputs: Tensor, batch: Batch) -> dict[str, Tensor]:
        """Return the U-step's objective on one batch."""
        u = outputs.float().tanh()

        def sums(own: Tensor, part: slice) -> tuple[Tensor, Tensor]:
            similar = self.memory.labels.similar(batch.index, part)
            target = torch.where(similar, 1.0, -self.ratio)
            errors = (own @ self.codes[part].T / self.bits - target).square()
            return errors.sum(), errors.new_full((), errors.numel())

        error, pairs = sum_in_parts(u, len(self.codes), sums)
        pair = self.bits * error / pairs
        quantization = (self.codes[batch.index] - u).square().sum(1).mean()
        weight = self.quantization / (len(self.codes) * self.bits)
        loss = pair + weight * quantization
        return {"loss": loss, "pair": pair, "quantization": quantization}

    def on_epoch_start(self, progress: Progress) -> None:
        """Draw Omega from the generator that the loop seeds each epoch; take the V-step."""
        order = torch.randperm(len(self.codes))
        self.update_codes(order[: self.sample].sort().values.to(self.codes.device))

    def update_codes(self, omega: Tensor) -> None:
        """Take the V-step, with Omega the images at ``omega`` (n,); set r from their pairs."""
        U = self.memory.outputs[omega].tanh()
        sums = torch.zeros_like(self.codes)
        similar_pairs = torch.zeros((), dtype=torch.float64, device=omega.device)
        for index, rows in zip(omega.split(SAMPLE_ROWS), U.split(SAMPLE_ROWS), strict=True):
            for part in parts_of(len(sums), len(index), sums.device):
                similar = self.memory.labels.similar(index, part)
                similar_pairs += similar.sum()
                sums[part] += similar.float().T @ rows
        others = len(omega) * len(self.codes) - similar_pairs
        self.ratio.copy_((similar_pairs / others.clamp_min(1.0)).clamp_max(1.0))
        pull = self.bits * ((1.0 + self.ratio) * sums - self.ratio * U.sum(0))
        pull[omega] += self.quantization * U
        self.codes.copy_(coordinate_descent(self.codes, U.T @ U, pull, sweeps=self.sweeps))
