"""Hashing-Baseline (Moummad et al., 2025): PCA and a random rotation."""

import torch
from torch import Tensor

from fisherhash.methods.base import FeatureMethod, MethodInfo, register
from fisherhash.methods.shallow._features import principal, random_rotation
from fisherhash.model.heads import Head, LinearHead


@register
class HashingBaseline(FeatureMethod):
    """u = R V^T (f - mean): PCA to K dimensions, then a random orthogonal R.

    The rotation gives every bit about the same variance, at no cost. The paper proposes it for
    features of foundation models. Thresholds are 0.

    What differs from the paper: the principal directions are exact, not from a randomised
    decomposition; one rotation is drawn, not the mean over ten; codes are ranked by Hamming
    distance. Its ranking, a real-valued query against bits, is what ``real_queries`` measures.

    Args:
        bits: K, at most the width of the features.
        classes: Not used.
    """

    info = MethodInfo(
        name="hashing_baseline",
        title="Hashing-Baseline: Rethinking Hashing in the Age of Pretrained Models",
        venue="arXiv",
        year=2025,
        url="https://arxiv.org/abs/2509.14427",
        supervision="none",
    )

    def solve(self, features: Tensor, labels: Tensor | None, *, seed: int) -> Head:
        """Return a head fitted on features (N, d); labels are not used."""
        found = principal(features, self.bits, name="hashing_baseline")
        rotation = random_rotation(self.bits, torch.Generator().manual_seed(seed))
        weight = rotation @ found.directions.T.cpu()
        return LinearHead.from_matrix(weight.float(), found.mean.float().cpu())
