"""Iterative quantisation (Gong and Lazebnik, CVPR 2011)."""

import torch
from torch import Tensor

from fisherhash.methods._options import NotNegativeInt
from fisherhash.methods.base import FeatureMethod, MethodInfo, register, sign
from fisherhash.methods.shallow._features import draw_rows, principal, row_blocks
from fisherhash.model.heads import Head, LinearHead

ROTATED = 200_000
"""Images that the rotation is fitted on, where there are more."""


@register
class ITQ(FeatureMethod):
    """PCA to K dimensions, then the rotation R that brings the data closest to binary codes.

    min ||B - V R||_F^2 over B in {-1, 1}^(N x K) and orthogonal R, by turns: B = sgn(V R), and
    R = W Z^T from the singular value decomposition V^T B = W S Z^T.

    What differs from the paper: principal directions come from the eigenvectors of the d x d
    covariance, which span the same subspace and do not grow with N; past 200,000 images R is
    fitted on a random 200,000 of them.

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
    )

    iterations: NotNegativeInt = 50

    def solve(self, features: Tensor, labels: Tensor | None, *, seed: int) -> Head:
        """Return a head fitted on features (N, d); labels are not used."""
        found = principal(features, self.bits, name="itq")
        if len(features) > ROTATED:
            rows = draw_rows(len(features), ROTATED, torch.Generator().manual_seed(seed))
            features = features[rows.to(features.device)]
        rotation = quantizing_rotation(found.project(features), self.iterations, seed)
        weight = (found.directions @ rotation).T
        return LinearHead.from_matrix(weight.float().cpu(), found.mean.float().cpu())


def quantizing_rotation(projected: Tensor, iterations: int, seed: int) -> Tensor:
    """Return R (K, K), orthogonal, that brings projected features (N, K) close to their signs.

    Args:
        projected: (N, K), with mean 0.
        iterations: Turns of the codes and the rotation.
        seed: Draws the rotation it starts from.
    """
    bits = projected.shape[1]
    generator = torch.Generator().manual_seed(seed)
    start = torch.randn(bits, bits, generator=generator, dtype=torch.float64)
    return improved_rotation(projected, torch.linalg.qr(start.to(projected.device)).Q, iterations)


def improved_rotation(projected: Tensor, rotation: Tensor, iterations: int) -> Tensor:
    """Return the rotation (K, K) after some turns of the codes and the rotation.

    Args:
        projected: (N, K), with mean 0.
        rotation: (K, K) where to start; orthogonal.
        iterations: Turns.
    """
    for _ in range(iterations):
        cross = torch.zeros_like(rotation)
        for block in row_blocks(projected):
            cross += block.T @ sign(block @ rotation)
        left, _, right = torch.linalg.svd(cross)
        rotation = left @ right
    return rotation
