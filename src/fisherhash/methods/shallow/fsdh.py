"""Fast supervised discrete hashing (Gui, Liu, Sun, Tao and Tan, TPAMI 2018)."""

import torch
from torch import Tensor

from fisherhash.methods.base import MethodInfo, register, sign
from fisherhash.methods.shallow._turns import DiscreteTurns


@register
class FSDH(DiscreteTurns):
    """SDH turned round: labels are regressed to codes, so that the code step has a closed form.

    min ||B - W^T Y||^2 + lambda ||W||^2 + nu ||B - P^T phi(X)||^2 over binary B, by turns:
    W = (Y Y^T + lambda I)^-1 Y B^T, B = sgn(W^T Y + nu P^T phi(X)), and P by regression.

    What differs from the paper: as in ``sdh``. There is another method of this name (Koutaki et
    al., CVPR 2017); this is the one of TPAMI 2018.

    Args:
        bits: K.
        classes: M.
        anchors: Anchors of the kernel.
        width: Width of the kernel, in units of the median distance to the anchors.
        ridge: lambda.
        attraction: nu.
        turns: Turns of W, B and P.
    """

    info = MethodInfo(
        name="fsdh",
        title="Fast Supervised Discrete Hashing",
        venue="TPAMI",
        year=2018,
        url="https://arxiv.org/abs/1904.03556",
        supervision="classes",
    )

    def code_step(self, codes: Tensor, labels: Tensor, predicted: Tensor) -> Tensor:
        """Take the W-step and the B-step, both in closed form; return the new codes (N, K)."""
        gram = labels.T @ labels
        gram.diagonal().add_(self.ridge)
        W = torch.linalg.solve(gram, labels.T @ codes)
        return sign(labels @ W + self.attraction * predicted)
