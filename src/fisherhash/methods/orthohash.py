"""OrthoHash (Hoe et al., NeurIPS 2021)."""

from typing import Annotated

import torch.nn.functional as F
from torch import Tensor, nn

from fisherhash.methods._codebooks import far_apart
from fisherhash.methods._options import NotNegative, Positive, Tuned
from fisherhash.methods._pairs import class_proportions
from fisherhash.methods.base import Batch, HashMethod, MethodInfo, register
from fisherhash.model.heads import BatchNormHead, Head


@register
class OrthoHash(HashMethod):
    """OrthoHash: one cross-entropy of the cosines between outputs and fixed orthogonal codes.

    With u_i the K logits of image i after a batch normalisation, which balances the bits, o_c in
    {-1, 1}^K the fixed code of class c and cos_ic = u_i . o_c / (|u_i| |o_c|), the paper minimises

        (1/N) sum_i CE( s * (cos_i - m * y_i), y_i ).

    A cosine near 1 to a binary code is a small quantisation error, so no other term is needed.
    With several labels, the margin is subtracted for each of them, and the cross-entropy's y_i is
    1/m on each of m labels, as in the authors' code. The code is sgn(u).

    What differs from the paper and the authors' code:

    * Codes come from a Hadamard matrix, exactly orthogonal, or from a search for the largest
      minimum distance; the authors' default draws each bit at random.
    * The batch normalisation learns no scale and no shift; theirs learns both. A scale changes no
      bit, and a shift unbalances it.
    * An image without a label adds nothing.
    * A batch of one image has no statistics, so the head refuses it in training.

    Args:
        bits: K.
        classes: M.
        scale: s, 8 in the authors' code.
        margin: m, 0.2 in the authors' code, 0.3 in their command for CIFAR-10.
        codebook_seed: Selects the codes.
    """

    info = MethodInfo(
        name="orthohash",
        title="One Loss for All: Deep Hashing with a Single Cosine Similarity based Learning "
        "Objective",
        venue="NeurIPS",
        year=2021,
        url="https://arxiv.org/abs/2109.14449",
        supervision="classes",
    )

    codebook = "codes"

    scale: Annotated[Positive, Tuned(2.0, 32.0, "log")] = 8.0
    margin: Annotated[NotNegative, Tuned(0.0, 0.6)] = 0.2
    codebook_seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        self.codes = nn.Buffer(far_apart(self.classes, self.bits, seed=self.codebook_seed))

    def head(self, in_features: int) -> Head:
        """Return a linear layer with batch normalisation."""
        return BatchNormHead(in_features, self.bits)

    def class_centers(self) -> Tensor:
        """Return the fixed codes."""
        return self.codes

    def loss(self, outputs: Tensor, batch: Batch) -> dict[str, Tensor]:
        """Return the cross-entropy of scaled cosines, with a margin for the image's own classes."""
        # Batch normalisation turns identical images into zeros, which have no direction; the bound
        # on the norm keeps their gradient finite.
        directions = F.normalize(outputs.float(), eps=1e-3)
        cosines = directions @ self.codes.T * self.bits**-0.5
        labels = batch.labels.float()
        scores = self.scale * (cosines - self.margin * labels)
        return {"loss": F.cross_entropy(scores, class_proportions(labels))}
