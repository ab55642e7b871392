"""Learning to hash with binary reconstructive embeddings (Kulis and Darrell, NIPS 2009)."""

import math
from typing import Annotated

import torch
from torch import Tensor

from fisherhash.methods._options import PositiveInt
from fisherhash.methods.base import FeatureMethod, MethodInfo, register, sign
from fisherhash.methods.shallow._affinity import drawn_pairs, needed
from fisherhash.methods.shallow._kernels import KernelMap
from fisherhash.model.heads import Head
from fisherhash.system.options import Range, Tuned


@register
class BRE(FeatureMethod):
    """Hamming distances that reconstruct given distances, by exact coordinate search.

    min sum_ij (t_ij - d_H(b_i, b_j) / K)^2 over n images, with t_ij = 0 for similar and 1 for
    dissimilar images (the supervised form). A bit is sgn(sum_j w_j k(x, a_j)), with its own few
    anchors. Along one weight w_j the code changes at n thresholds only. All of them are tried and
    the best is taken, so the objective never rises.

    What differs from the paper: kernel features are centred, Gaussian, with a width from the
    median distance; all pairs of n images are used, where the paper draws some pairs of more.

    Args:
        bits: K.
        classes: M.
        anchors: Anchors per bit.
        width: Width of the kernel, in units of the median distance to the anchors.
        sample: n.
        sweeps: The most passes over all weights; it ends early when no bit changes.
    """

    info = MethodInfo(
        name="bre",
        title="Learning to Hash with Binary Reconstructive Embeddings",
        venue="NIPS",
        year=2009,
        url="https://papers.nips.cc/paper/3667-learning-to-hash",
        supervision="pairs",
    )

    anchors: PositiveInt = 20
    width: Annotated[float, Range(above=0), Tuned(0.25, 4.0, "log")] = 1.0
    sample: PositiveInt = 400
    sweeps: PositiveInt = 3

    def solve(self, features: Tensor, labels: Tensor | None, *, seed: int) -> Head:
        """Return a head fitted on features (N, d) and labels (N, classes)."""
        labels = needed(labels, "bre")
        generator = torch.Generator().manual_seed(seed)
        kernel = KernelMap(features, anchors=300, width=self.width, name="bre", generator=generator)
        rows, S = drawn_pairs(labels, self.sample, generator)
        phi = kernel.of(features[rows])
        # Scaling phi for the search is undone in the weights.
        scale = phi.std(0, correction=0).clamp_min(1e-12)
        phi = phi / scale
        own = [
            torch.randperm(len(kernel), generator=generator)[: self.anchors].to(rows.device)
            for _ in range(self.bits)
        ]
        weights = [
            torch.randn(len(used), generator=generator, dtype=torch.float64).to(phi) for used in own
        ]
        codes = torch.stack([sign(phi[:, u] @ w) for u, w in zip(own, weights, strict=True)], 1)
        for _ in range(self.sweeps):
            before = codes.clone()
            for bit, used in enumerate(own):
                form = self.form(S, codes, bit)
                codes[:, bit] = search_weights(form, phi[:, used], weights[bit])
            if torch.equal(before, codes):
                break
        weight = torch.zeros(len(kernel), self.bits, dtype=torch.float64, device=phi.device)
        for bit, used in enumerate(own):
            weight[used, bit] = weights[bit] / scale[used]
        return kernel.head(weight)

    def form(self, S: Tensor, codes: Tensor, bit: int) -> Tensor:
        """Return Q (n, n): as a function of one bit h the objective is a constant - h^T Q h.

        The diagonal, which adds a constant, is 0.
        """
        targets = (1.0 - S) / 2.0
        others = codes.clone()
        others[:, bit] = 0.0
        rest = targets - (self.bits - 1 - others @ others.T) / (2.0 * self.bits)
        form = -(rest - 1.0 / (2.0 * self.bits)) / self.bits
        return form.fill_diagonal_(0.0)


def search_weights(form: Tensor, phi: Tensor, weights: Tensor) -> Tensor:
    """Set each weight (m,) to its best value in turn, in place; return the bit (n,).

    It maximises h^T Q h with h = sgn(phi w).
    """
    outputs = phi @ weights
    for j in range(len(weights)):
        outputs = search_weight(form, phi[:, j], weights, j, outputs)
    return sign(outputs)


def search_weight(form: Tensor, column: Tensor, weights: Tensor, j: int, outputs: Tensor) -> Tensor:
    """Set weight j to its best value, in place; return the new outputs phi w (n,).

    As w_j grows, each image flips once, at its own threshold; after the first r flips the objective
    has fallen by 4 times the sum of h_i Q_il h_l over i flipped and l not.

    Args:
        form: (n, n) Q.
        column: (n,) column j of phi.
        weights: (m,).
        j: Which weight.
        outputs: (n,) phi w so far.
    """
    thresholds = torch.where(column != 0, weights[j] - outputs / column, torch.inf)
    order = thresholds.argsort()
    sorted_thresholds = thresholds[order]
    # Below every threshold the sign of an image is that of -column.
    bit = torch.where(column > 0, -1.0, 1.0).to(form)[order]
    bit = torch.where(column[order] == 0, sign(outputs[order]), bit)
    table = bit[:, None] * form[order][:, order] * bit
    inside = torch.tril(table, -1).sum(1).cumsum(0)
    crossing = table.sum(1).cumsum(0) - 2.0 * inside - torch.diagonal(table).cumsum(0)
    best = int(crossing.argmin())
    if crossing[best] >= 0:  # no flips: below every threshold
        value = float(sorted_thresholds[0]) - 1.0
    elif best + 1 < len(order) and torch.isfinite(sorted_thresholds[best + 1]):
        value = float(sorted_thresholds[best] + sorted_thresholds[best + 1]) / 2.0
    else:
        value = float(sorted_thresholds[best]) + 1.0
    if not math.isfinite(value):
        return outputs
    candidate = outputs + (value - weights[j]) * column
    old, new = sign(outputs), sign(candidate)
    # Equal thresholds cannot be separated: the new value must really be better.
    if new @ form @ new <= old @ form @ old:
        return outputs
    weights[j] = value
    return candidate
