"""Supervised hashing with latent factor models (Zhang, Zhang, Li and Guo, SIGIR 2014)."""

from typing import Annotated

import torch
from torch import Tensor

from fisherhash.methods._options import NotNegativeInt, PositiveInt
from fisherhash.methods.base import FeatureMethod, MethodInfo, register, sign
from fisherhash.methods.shallow._affinity import needed
from fisherhash.methods.shallow._features import principal, random_rotation
from fisherhash.methods.shallow._kernels import centred_head, linear_ridge
from fisherhash.model.heads import Head
from fisherhash.system.options import Range, Tuned


@register
class LFH(FeatureMethod):
    """A latent vector u_i per training image, from the likelihood of the similarities.

    max sum_ij (s_ij theta_ij - log(1 + e^theta_ij)) - ||U||^2 / (2 beta), theta_ij = u_i . u_j / 2.
    In each turn the similarities to a random set of images are used, whose vectors stay fixed. The
    others take a Newton step on a quadratic lower bound,

        u_i <- u_i + (sum_j u_j u_j^T / 8 + I / beta)^-1 (sum_j (s_ij - sigma(theta_ij)) u_j
               - u_i / beta),

    so the likelihood of these pairs never falls. Linear ridge regression predicts sgn(u).

    What differs from the paper: the vectors start at rotated principal components; the features are
    centred and the regression has an offset.

    Args:
        bits: K.
        classes: M.
        prior: beta.
        turns: Turns.
        sample: Images per turn; 0 for K.
        ridge: Weight of the regression's penalty, as a share of the features' mean variance.
    """

    info = MethodInfo(
        name="lfh",
        title="Supervised Hashing with Latent Factor Models",
        venue="SIGIR",
        year=2014,
        url="https://doi.org/10.1145/2600428.2609600",
        supervision="pairs",
    )

    prior: Annotated[float, Range(above=0), Tuned(0.3, 100.0, "log")] = 30.0
    turns: PositiveInt = 50
    sample: NotNegativeInt = 0
    ridge: Annotated[float, Range(above=0), Tuned(1e-3, 10.0, "log")] = 0.1

    def solve(self, features: Tensor, labels: Tensor | None, *, seed: int) -> Head:
        """Return a head fitted on features (N, d) and labels (N, classes)."""
        labels = needed(labels, "lfh").double()
        generator = torch.Generator().manual_seed(seed)
        count = min(self.bits, features.shape[1], len(features) - 1)
        start = principal(features, count, name="lfh").project(features)
        start = start / start.std(0, correction=0).clamp_min(1e-9)
        vectors = torch.zeros(len(features), self.bits, dtype=torch.float64, device=start.device)
        vectors[:, :count] = start
        vectors = vectors @ random_rotation(self.bits, generator).to(start.device)
        size = min(self.sample or self.bits, len(features) - 1)
        for _ in range(self.turns):
            order = torch.randperm(len(features), generator=generator).to(labels.device)
            fixed, moved = order[:size], order[size:]
            similar = (labels[moved] @ labels[fixed].T > 0).double()
            vectors[moved] = self.newton(vectors[moved], vectors[fixed], similar)
        weight, mean, offset = linear_ridge(features, sign(vectors), self.ridge)
        return centred_head(weight, mean, offset)

    def newton(self, moved: Tensor, fixed: Tensor, similar: Tensor) -> Tensor:
        """Return the vectors (n, K) after one step.

        Args:
            moved: (n, K).
            fixed: (m, K) the vectors of the images they are compared with.
            similar: (n, m) 1 or 0.
        """
        bound = fixed.T @ fixed / 8.0
        bound.diagonal().add_(1.0 / self.prior)
        slope = (similar - torch.sigmoid(moved @ fixed.T / 2.0)) @ fixed - moved / self.prior
        return moved + torch.linalg.solve(bound, slope.T).T
