"""Discrete steps of methods that regress labels from codes: first the classifier, then the codes.

They minimise over W (K x M, real) and the codes b_i in {-1, 1}^K, by turns,

    sum_i ||y_i - W^T b_i||^2 + ridge * ||W||^2 + attraction * sum_i ||b_i - u_i||^2.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fisherhash.methods.base import sign


def ridge_classifier(codes: Tensor, sums: Tensor, *, ridge: float) -> Tensor:
    """Take the W-step: W = (B B^T + ridge I)^-1 B Y^T, the exact minimum.

    Args:
        codes: (N, K) the codes, -1 and 1.
        sums: (K, M) B Y^T, the sum of the codes of each class.
        ridge: Greater than 0, which makes the matrix invertible.

    Returns:
        W, (K, M).
    """
    # Counts are exact in double precision for any N.
    codes = codes.double()
    eye = torch.eye(codes.shape[1], dtype=torch.float64, device=codes.device)
    return torch.linalg.solve(codes.T @ codes + ridge * eye, sums.double()).float()


def coordinate_descent(codes: Tensor, gram: Tensor, pull: Tensor, *, sweeps: int) -> Tensor:
    """Take the B-step, discrete cyclic coordinate descent; return the new codes.

    It minimises b^T G b - 2 b^T p for each image separately. The objective above has this form with
    G = W W^T and p = W y + attraction * u, because ||b||^2 = K is constant. Bit by bit, with the
    other bits fixed, b_k = sgn(p_k - sum_(l != k) G_kl b_l) is the exact minimum. So the objective
    never rises, and the result is a code that no single flip improves.

    Args:
        codes: (N, K) where to start, -1 and 1; not changed.
        gram: (K, K) G, symmetric.
        pull: (N, K) the vectors p.
        sweeps: The most passes over the bits; it ends early when nothing flips.
    """
    # The same bit of all images is contiguous in memory, because the loop goes bit by bit.
    pull = pull.T.contiguous()
    codes = codes.T.to(pull).clone(memory_format=torch.contiguous_format)
    others = gram.to(pull).clone().fill_diagonal_(0.0)
    for _ in range(sweeps):
        before = codes.clone()
        for k in range(len(codes)):
            codes[k] = sign(pull[k] - others[k] @ codes)
        if torch.equal(codes, before):
            break
    return codes.T.contiguous()
