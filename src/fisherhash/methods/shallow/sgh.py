"""Scalable graph hashing with feature transformation (Jiang and Li, IJCAI 2015)."""

import math
from typing import Annotated

import torch
from torch import Tensor

from fisherhash.methods._options import PositiveInt
from fisherhash.methods.base import FeatureMethod, MethodInfo, register, sign
from fisherhash.methods.shallow import _features
from fisherhash.methods.shallow._kernels import KernelMap
from fisherhash.model.heads import Head
from fisherhash.system.options import Range, Tuned


@register
class SGH(FeatureMethod):
    """Codes whose inner products follow the graph S_ij = 2 exp(-||x_i - x_j||^2 / rho) - 1.

    min ||K S - B B^T||_F^2 with B = sgn(Phi W), without computing S: exp(t) is nearly linear for
    |t| <= 1, which factors S into P Q^T of d + 2 columns. Bits are found one after the other. The
    k-th w is the top generalised eigenvector of

        K (Phi^T P)(Phi^T Q)^T - sum_(j != k) v_j v_j^T   against   Phi^T Phi + epsilon I,

    v_j = Phi^T sgn(Phi w_j). After all bits, each is solved once more with the others fixed.

    What differs from the paper: features are centred and divided by their largest norm, which
    keeps |t| <= 1 for rho = 2; the width of the kernel Phi follows the median distance.

    Args:
        bits: K.
        classes: Not used.
        anchors: Bases of the kernel.
        width: Width of the kernel, in units of the median distance to the anchors.
        spread: rho, for features of norm at most 1.
    """

    info = MethodInfo(
        name="sgh",
        title="Scalable Graph Hashing with Feature Transformation",
        venue="IJCAI",
        year=2015,
        url="https://www.ijcai.org/Proceedings/15/Papers/319.pdf",
        supervision="none",
    )

    anchors: PositiveInt = 300
    width: Annotated[float, Range(above=0), Tuned(0.25, 4.0, "log")] = 1.0
    spread: Annotated[float, Range(least=2), Tuned(choices=(2.0, 3.0, 4.0, 8.0))] = 2.0

    def solve(self, features: Tensor, labels: Tensor | None, *, seed: int) -> Head:
        """Return a head fitted on features (N, d); labels are not used."""
        generator = torch.Generator().manual_seed(seed)
        kernel = KernelMap(
            features, anchors=self.anchors, width=self.width, name="sgh", generator=generator
        )
        mean, _ = _features.mean_and_covariance(features[:20_000])
        radius = max(float((b - mean).norm(dim=1).max()) for b in _features.row_blocks(features))
        left, right = self._factors(features, kernel, mean, max(radius, 1e-12))
        graph = self.bits * left @ right.T
        gram = kernel.gram()
        gram.diagonal().add_(1e-6 * torch.diagonal(gram).mean())
        root = torch.linalg.inv(torch.linalg.cholesky(gram))
        weights: list[Tensor | None] = [None] * self.bits
        collected: dict[int, Tensor] = {}
        again = torch.randperm(self.bits, generator=generator).tolist()
        for bit in [*range(self.bits), *again]:
            others = sum((torch.outer(v, v) for k, v in collected.items() if k != bit), graph * 0.0)
            residue = root @ (graph - others) @ root.T
            vector = torch.linalg.eigh((residue + residue.T) / 2.0).eigenvectors[:, -1]
            weight = root.T @ vector
            weights[bit] = weight
            collected[bit] = kernel.collect(sign(kernel.apply(weight[:, None])))[:, 0]
        return kernel.head(torch.stack([w for w in weights if w is not None], dim=1))

    def _factors(
        self, features: Tensor, kernel: KernelMap, mean: Tensor, radius: float
    ) -> tuple[Tensor, Tensor]:
        """Return Phi^T P and Phi^T Q (m, d + 2)."""
        rho, e = self.spread, math.e
        left, right = torch.zeros(()), torch.zeros(())
        for phi, block in zip(kernel.blocks(), _features.row_blocks(features, 4096), strict=True):
            rows = (block - mean) / radius
            decay = torch.exp(-rows.square().sum(1, keepdim=True) / rho)
            shared = [
                math.sqrt(2.0 * (e * e - 1.0) / (e * rho)) * decay * rows,
                math.sqrt((e * e + 1.0) / e) * decay,
            ]
            ones = torch.ones_like(decay)
            left = left + phi.T @ torch.cat([*shared, ones], dim=1)
            right = right + phi.T @ torch.cat([*shared, -ones], dim=1)
        return left, right
