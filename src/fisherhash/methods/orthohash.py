"""OrthoHash (Hoe et al., NeurIPS 2021)."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from fisherhash.methods._codebooks import far_apart
from fisherhash.methods._pairs import check_not_negative, check_positive, class_proportions
from fisherhash.methods.base import Batch, HashMethod, MethodInfo, register
from fisherhash.model.heads import BatchNormHead, Head


@register
class OrthoHash(HashMethod):
    """OrthoHash: one cross-entropy of the cosines between outputs and fixed orthogonal codes.

    With u_i the K logits of image i after a batch normalisation, which balances the bits, o_c in
    {-1, 1}^K the fixed code of class c and cos_ic = u_i . o_c / (|u_i| |o_c|), the paper minimises

        (1/N) sum_i CE( s * (cos_i - m * y_i), y_i ).

    A cosine near 1 to a binary code is a small quantisation error, so no other term is needed.
    Several labels: the margin is taken off each of them, and the cross-entropy's y_i is 1/m on each
    of m labels, as in the authors' code. The code is sgn(u).

    How it differs from the paper and the authors' code:

    * Codes come from a Hadamard matrix, exactly orthogonal, or a search for the largest minimum
      distance; the authors' default draws each bit at random.
    * The batch normalisation has no scale and shift of its own, theirs learns both: a scale changes
      no bit, and a shift unbalances it.
    * An image without a label adds nothing.
    * A batch of one image has no statistics: in training the head refuses it.

    Args:
        bits: K.
        classes: M.
        scale: s, 8 in the authors' code.
        margin: m, 0.2 in the authors' code, 0.3 in their command for CIFAR-10.
        codebook_seed: which codes.
    """

    info = MethodInfo(
        name="orthohash",
        title="One Loss for All: Deep Hashing with a Single Cosine Similarity based Learning "
        "Objective",
        venue="NeurIPS",
        year=2021,
        url="https://arxiv.org/abs/2109.14449",
        supervision="classes",
        multilabel=True,
        fit="gradient",
    )
    codes: Tensor

    def __init__(
        self,
        *,
        bits: int,
        classes: int,
        scale: float = 8.0,
        margin: float = 0.2,
        codebook_seed: int = 0,
    ) -> None:
        super().__init__(bits=bits, classes=classes)
        check_positive("orthohash", scale=scale)
        check_not_negative("orthohash", margin=margin)
        self.scale = scale
        self.margin = margin
        self.codebook_seed = codebook_seed
        self.register_buffer("codes", far_apart(classes, bits, seed=codebook_seed))

    def head(self, in_features: int) -> Head:
        """A linear layer, then batch normalisation."""
        return BatchNormHead(in_features, self.bits)

    def loss(self, outputs: Tensor, batch: Batch) -> dict[str, Tensor]:
        """Cross-entropy of scaled cosines, the own classes' less the margin."""
        # Identical images leave a batch normalisation as zeros, which have no direction; the bound
        # on the norm keeps their gradient finite.
        directions = F.normalize(outputs.float(), eps=1e-3)
        cosines = directions @ self.codes.T * self.bits**-0.5
        labels = batch.labels.float()
        scores = self.scale * (cosines - self.margin * labels)
        return {"loss": F.cross_entropy(scores, class_proportions(labels))}
