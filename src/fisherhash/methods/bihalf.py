"""Deep Unsupervised Image Hashing by Maximizing Bit Entropy (Li, van Gemert, AAAI 2021)."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fisherhash.methods._pairs import check_not_negative
from fisherhash.methods.base import Batch, HashMethod, MethodInfo, register


PAPER_BITS = 16


@register
class BiHalf(HashMethod):
    """The bi-half layer: every bit is +1 on half of the batch, so that it carries a whole bit.

    Without labels. Forward, over a batch of n logits U (n x K), each bit is +1 on the n/2 images
    with the largest logits and -1 on the others; that B is the nearest one whose bits have maximal
    entropy. Backward, the gradient g of B is handed to U with a pull towards B:

        dL/dU = g + gamma (U - B) / (n K).

    The batch is cut into two halves, image i of the first beside image j of the second, and B is to
    keep the angles of the features f:

        L = mean_(i,j) ( cos(b_i, b_j) - cos(f_i, f_j) )^2.

    The code of an image is sgn(u): the threshold that half of a batch passes is learnt to be 0.

    How the paper is read, and what differs from it:

    * Both parts of the gradient are multiplied by K / 16. In the paper they shrink with K, as those
      of other methods here do not; now they are what the paper has at its shortest code, 16 bits,
      and one learning rate serves all lengths.
    * An odd batch of n has +1 on floor(n/2) images; the last image has no partner in L.
    * In a batch of one image there is no half and no pair: loss 0, no gradient.
    * The features in L are constants, also while the backbone is fine-tuned (the paper freezes it).
    * Equal logits are told apart by their order in the batch.

    Args:
        bits: K.
        classes: not used; 0 for data without labels.
        gamma: weight of the pull; the paper's and the released code's 6.
    """

    info = MethodInfo(
        name="bihalf",
        title="Deep Unsupervised Image Hashing by Maximizing Bit Entropy",
        venue="AAAI",
        year=2021,
        url="https://arxiv.org/abs/2012.12334",
        supervision="none",
        multilabel=True,
        fit="gradient",
    )

    def __init__(self, *, bits: int, classes: int, gamma: float = 6.0) -> None:
        super().__init__(bits=bits, classes=classes)
        check_not_negative("bihalf", gamma=gamma)
        self.gamma = gamma

    def loss(self, outputs: Tensor, batch: Batch) -> dict[str, Tensor]:
        """The difference of angles between codes and features, on the pairs of two halves."""
        outputs = outputs.float()
        half = len(outputs) // 2
        if half == 0:
            return {"angles": (zero := 0.0 * outputs.sum()), "loss": zero}
        scale = self.bits / PAPER_BITS
        codes = bi_half(outputs, self.gamma * scale)
        features = batch.features.detach().float()
        found, wanted = (
            F.cosine_similarity(values[:half], values[half : 2 * half])
            for values in (codes, features)
        )
        angles = F.mse_loss(found, wanted)
        return {"angles": angles, "loss": scale * angles}


def bi_half(outputs: Tensor, gamma: float) -> Tensor:
    """Codes (n, bits): +1 on the upper half of each column of outputs (n, bits), else -1.

    The gradient of outputs is that of the codes plus gamma (outputs - codes) / (n bits).

    >>> bi_half(torch.tensor([[3.0], [1.0], [2.0], [5.0]]), gamma=0.0).flatten().tolist()
    [1.0, -1.0, -1.0, 1.0]
    """
    return _BiHalf.apply(outputs, gamma)  # type: ignore[no-any-return]


class _BiHalf(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, outputs: Tensor, gamma: float) -> Tensor:
        order = torch.argsort(outputs, dim=0, descending=True, stable=True)
        upper = torch.arange(len(outputs), device=outputs.device) < len(outputs) // 2
        signs = torch.where(upper, 1.0, -1.0).to(outputs)[:, None].expand_as(outputs)
        codes = torch.empty_like(outputs).scatter_(0, order, signs)
        ctx.save_for_backward(outputs, codes)
        ctx.gamma = gamma
        return codes

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        outputs, codes = ctx.saved_tensors
        return grads[0] + ctx.gamma * (outputs - codes) / codes.numel(), None
