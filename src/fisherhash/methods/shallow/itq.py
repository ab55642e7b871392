"""Iterative quantisation (Gong and Lazebnik, CVPR 2011)."""

import torch
from torch import Tensor

from fisherhash.errors import NotDefinedError
from fisherhash.methods._options import NotNegativeInt
from fisherhash.methods.base import FeatureMethod, MethodInfo, register, sign
from fisherhash.model.heads import Head, LinearHead


@register
class ITQ(FeatureMethod):
    """PCA to K dimensions, then the rotation R that brings the data closest to binary codes.

    min ||B - V R||_F^2 over B in {-1, 1}^(N x K) and orthogonal R, by turns: B = sgn(V R), and
    R = W Z^T from the singular value decomposition V^T B = W S Z^T.

    What differs from the paper: principal directions come from the eigenvectors of the d x d
    covariance, which span the same subspace and do not grow with N.

    Args:
        bits: K, at most the width of the features.
        classes: Not used.
        iterations: Turns of B and R; 50 in the paper.
    """

    info = MethodInfo(
        name="itq",
        title="Iterative Quantization: A Procrustean Approach to Learning Binary Codes",
        venue="CVPR",
        year=2011,
        url="https://doi.org/10.1109/CVPR.2011.5995432",
        supervision="none",
        fit="closed-form",
    )

    iterations: NotNegativeInt = 50

    def solve(self, features: Tensor, labels: Tensor | None, *, seed: int) -> Head:
        """Return a head fitted on features (N, d); labels are not used."""
        count, width = features.shape
        if self.bits > min(width, count - 1):
            raise NotDefinedError(
                f"itq: {self.bits} bits need at least {self.bits} feature dimensions and "
                f"{self.bits + 1} images, there are {width} and {count}; take fewer bits or lsh"
            )
        features = features.double()
        mean = features.mean(0)
        centred = features - mean
        _, vectors = torch.linalg.eigh(centred.T @ centred)
        principal = vectors[:, -self.bits :].flip(1)
        projected = centred @ principal
        generator = torch.Generator().manual_seed(seed)
        start = torch.randn(self.bits, self.bits, generator=generator, dtype=torch.float64)
        rotation = torch.linalg.qr(start.to(features.device)).Q
        for _ in range(self.iterations):
            left, _, right = torch.linalg.svd(projected.T @ sign(projected @ rotation))
            rotation = left @ right
        weight = (principal @ rotation).T
        return LinearHead.from_matrix(weight.float().cpu(), mean.float().cpu())
