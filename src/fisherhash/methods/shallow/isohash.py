"""Isotropic hashing (Kong and Li, NIPS 2012)."""

import torch
from torch import Tensor

from fisherhash.methods._options import PositiveInt
from fisherhash.methods.base import FeatureMethod, MethodInfo, register
from fisherhash.methods.shallow._features import principal, random_rotation
from fisherhash.model.heads import Head, LinearHead


@register
class IsoHash(FeatureMethod):
    """PCA to K dimensions, then a rotation after which all K variances are equal.

    With L the diagonal matrix of the K largest variances and a their mean, find an orthogonal Q
    such that every diagonal entry of Q^T L Q is a. Lift and projection alternates between the two
    sets: matrices with that diagonal, and matrices with the eigenvalues of L.

    Args:
        bits: K, at most the width of the features.
        classes: Not used.
        iterations: The most turns; it ends early once the variances are equal.
    """

    info = MethodInfo(
        name="isohash",
        title="Isotropic Hashing",
        venue="NIPS",
        year=2012,
        url="https://papers.nips.cc/paper/4846-isotropic-hashing",
        supervision="none",
    )

    iterations: PositiveInt = 100

    def solve(self, features: Tensor, labels: Tensor | None, *, seed: int) -> Head:
        """Return a head fitted on features (N, d); labels are not used."""
        found = principal(features, self.bits, name="isohash")
        variances = found.variances.cpu()
        start = random_rotation(self.bits, torch.Generator().manual_seed(seed))
        rotation = isotropic_rotation(variances, start, self.iterations)
        weight = rotation.T @ found.directions.T.cpu()
        return LinearHead.from_matrix(weight.float(), found.mean.float().cpu())


def isotropic_rotation(variances: Tensor, start: Tensor, iterations: int) -> Tensor:
    """Return Q (K, K), orthogonal, with all diagonal entries of Q^T diag(variances) Q equal.

    Args:
        variances: (K,), largest first.
        start: (K, K) the rotation to start from.
        iterations: The most turns.
    """
    level, Q = variances.mean(), start
    for _ in range(iterations):
        lifted = Q.T @ torch.diag(variances) @ Q
        if torch.allclose(torch.diagonal(lifted), level, rtol=1e-9, atol=0.0):
            break
        lifted.diagonal().fill_(level)
        # eigh sorts upwards, the variances fall.
        Q = torch.linalg.eigh(lifted).eigenvectors.flip(1).T
    return Q
