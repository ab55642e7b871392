"""Kernelised locality-sensitive hashing (Kulis and Grauman, ICCV 2009)."""

from typing import Annotated

import torch
from torch import Tensor

from fisherhash.methods._options import PositiveInt
from fisherhash.methods.base import FeatureMethod, MethodInfo, register
from fisherhash.methods.shallow._kernels import KernelMap
from fisherhash.model.heads import Head
from fisherhash.system.options import Range, Tuned


@register
class KLSH(FeatureMethod):
    """Random hyperplanes in the space of a Gaussian kernel.

    With k(x) the kernel between x and p anchors, centred in the kernel's space, and K_c the centred
    kernel among the anchors, a bit is w . k(x) with w = K_c^(-1/2) e_S, S a random set of t
    anchors. By the central limit theorem such sums behave like Gaussian directions.

    What differs from the paper: the width of the kernel follows the median distance; small
    eigenvalues of K_c are dropped.

    Args:
        bits: K.
        classes: Not used.
        anchors: p.
        sample: t.
        width: Width of the kernel, in units of the median distance to the anchors.
    """

    info = MethodInfo(
        name="klsh",
        title="Kernelized Locality-Sensitive Hashing for Scalable Image Search",
        venue="ICCV",
        year=2009,
        url="https://doi.org/10.1109/ICCV.2009.5459466",
        supervision="none",
    )

    anchors: PositiveInt = 300
    sample: PositiveInt = 30
    width: Annotated[float, Range(above=0), Tuned(0.25, 4.0, "log")] = 1.0

    def solve(self, features: Tensor, labels: Tensor | None, *, seed: int) -> Head:
        """Return a head fitted on features (N, d); labels are not used."""
        generator = torch.Generator().manual_seed(seed)
        kernel = KernelMap(
            features, anchors=self.anchors, width=self.width, name="klsh", generator=generator
        )
        count = len(kernel)
        among = kernel.of(kernel.anchors) + kernel.mean
        centring = torch.eye(count, dtype=torch.float64, device=among.device) - 1.0 / count
        values, vectors = torch.linalg.eigh(centring @ among @ centring)
        safe = torch.where(values > 1e-8 * values.max(), values.clamp_min(1e-300) ** -0.5, 0.0)
        root = vectors * safe @ vectors.T
        chosen = torch.zeros(count, self.bits, dtype=torch.float64)
        for bit in range(self.bits):
            picked = torch.randperm(count, generator=generator)[: min(self.sample, count)]
            chosen[picked, bit] = 1.0
        # Centring the weights too makes the constant part of a query's kernel vanish.
        weight = centring @ (root @ chosen.to(root.device))
        offset = (kernel.mean - among.mean(0)) @ weight
        return kernel.head(weight, offset)
