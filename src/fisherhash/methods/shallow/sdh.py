"""Supervised discrete hashing (Shen, Shen, Liu and Shen, CVPR 2015)."""

from torch import Tensor

from fisherhash.methods._discrete import coordinate_descent, ridge_classifier
from fisherhash.methods._options import PositiveInt
from fisherhash.methods.base import MethodInfo, register
from fisherhash.methods.shallow._turns import DiscreteTurns


@register
class SDH(DiscreteTurns):
    """Codes that a linear classifier tells apart, and a kernel regression that predicts them.

    min ||Y - W^T B||^2 + lambda ||W||^2 + nu ||B - P^T phi(X)||^2 over binary B, by turns:

    * **W**: ridge regression of the labels on the codes;
    * **B**: discrete cyclic coordinate descent, each bit in closed form with the others fixed;
    * **P**: regression of the codes on the kernel features phi.

    A new image gets sgn(P^T phi(x)).

    What differs from the paper: the width of the kernel follows the median distance; phi is
    centred and the regression has an offset; a small ridge keeps P stable.

    Args:
        bits: K.
        classes: M.
        anchors: Anchors of the kernel.
        width: Width of the kernel, in units of the median distance to the anchors.
        ridge: lambda.
        attraction: nu.
        turns: Turns of W, B and P.
        sweeps: The most passes over the bits in a B-step.
    """

    info = MethodInfo(
        name="sdh",
        title="Supervised Discrete Hashing",
        venue="CVPR",
        year=2015,
        url="https://doi.org/10.1109/CVPR.2015.7298598",
        supervision="classes",
    )

    sweeps: PositiveInt = 10

    def code_step(self, codes: Tensor, labels: Tensor, predicted: Tensor) -> Tensor:
        """Take the W-step and the B-step; return the new codes (N, K).

        Args:
            codes: (N, K) the codes so far.
            labels: (N, M).
            predicted: (N, K) P^T phi(X).
        """
        W = ridge_classifier(codes, codes.T @ labels, ridge=self.ridge).double()
        pull = labels @ W.T + self.attraction * predicted
        return coordinate_descent(codes, W @ W.T, pull, sweeps=self.sweeps)
