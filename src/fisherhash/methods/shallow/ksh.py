"""Supervised hashing with kernels (Liu, Wang, Ji, Jiang and Chang, CVPR 2012)."""

from typing import Annotated

import torch
from torch import Tensor

from fisherhash.methods._options import NotNegativeInt, PositiveInt
from fisherhash.methods.base import FeatureMethod, MethodInfo, register, sign
from fisherhash.methods.shallow._affinity import drawn_pairs, needed
from fisherhash.methods.shallow._kernels import KernelMap
from fisherhash.model.heads import Head
from fisherhash.system.options import Range, Tuned


@register
class KSH(FeatureMethod):
    """Kernel hash functions whose inner products follow the similarities of labelled images.

    min ||B B^T / K - S||_F^2 with B = sgn(Phi A) on n labelled images, S_ij = 1 or -1. Bits are
    found one after the other: with the residue R = K S - sum of b b^T over earlier bits, the next
    a maximises sgn(Phi a)^T R sgn(Phi a). It starts at the top generalised eigenvector of
    (Phi^T R Phi, Phi^T Phi), climbs with tanh in place of sgn, and the better of the two is kept.

    What differs from the paper: the width of the kernel follows the median distance; the climb is
    L-BFGS.

    Args:
        bits: K.
        classes: M.
        anchors: Anchors of the kernel.
        width: Width of the kernel, in units of the median distance to the anchors.
        sample: n; drawn where there are more images.
        climb: The most steps of a climb.
    """

    info = MethodInfo(
        name="ksh",
        title="Supervised Hashing with Kernels",
        venue="CVPR",
        year=2012,
        url="https://doi.org/10.1109/CVPR.2012.6247912",
        supervision="pairs",
    )

    anchors: PositiveInt = 300
    width: Annotated[float, Range(above=0), Tuned(0.25, 4.0, "log")] = 1.0
    sample: PositiveInt = 2000
    climb: NotNegativeInt = 20

    def solve(self, features: Tensor, labels: Tensor | None, *, seed: int) -> Head:
        """Return a head fitted on features (N, d) and labels (N, classes)."""
        labels = needed(labels, "ksh")
        generator = torch.Generator().manual_seed(seed)
        kernel = KernelMap(
            features, anchors=self.anchors, width=self.width, name="ksh", generator=generator
        )
        rows, S = drawn_pairs(labels, self.sample, generator)
        phi = kernel.of(features[rows])
        gram = phi.T @ phi
        gram.diagonal().add_(1e-6 * torch.diagonal(gram).mean())
        root = torch.linalg.inv(torch.linalg.cholesky(gram))
        weights, R = [], self.bits * S
        inner = phi.T @ (R @ phi)
        for _ in range(self.bits):
            form = root @ inner @ root.T
            start = root.T @ torch.linalg.eigh((form + form.T) / 2.0).eigenvectors[:, -1]
            start = start * (len(phi) / (phi @ start).square().sum().clamp_min(1e-300)).sqrt()
            weight = max(start, self.climbed(phi, R, start), key=lambda a: agreement(phi, R, a))
            weights.append(weight)
            bit = sign(phi @ weight)
            R.addr_(bit, bit, alpha=-1.0)
            inner.addr_(phi.T @ bit, phi.T @ bit, alpha=-1.0)
        return kernel.head(torch.stack(weights, dim=1))

    def climbed(self, phi: Tensor, R: Tensor, start: Tensor) -> Tensor:
        """Return the weights (m,) after a climb of tanh(Phi a)^T R tanh(Phi a)."""
        weight = start.clone().requires_grad_()
        scale = 1.0 / float(R.abs().sum())
        search = torch.optim.LBFGS([weight], max_iter=self.climb, line_search_fn="strong_wolfe")

        def objective() -> float:
            with torch.enable_grad():
                search.zero_grad()
                soft = torch.tanh(phi @ weight)
                # R is symmetric: the gradient is that of twice the product with a constant.
                pull = R @ soft.detach()
                (-2.0 * scale * (soft @ pull)).backward()
            return -scale * float(soft.detach() @ pull)

        if self.climb:
            search.step(objective)
        return weight.detach()


def agreement(phi: Tensor, R: Tensor, weight: Tensor) -> float:
    """Return h^T R h for the bit h = sgn(Phi a)."""
    bit = sign(phi @ weight)
    return float(bit @ (R @ bit))
