"""Minimal loss hashing for compact binary codes (Norouzi and Fleet, ICML 2011)."""

from typing import Annotated

import torch
from torch import Tensor

from fisherhash.methods._options import PositiveInt
from fisherhash.methods.base import FeatureMethod, MethodInfo, register, sign
from fisherhash.methods.shallow._affinity import needed
from fisherhash.methods.shallow._features import principal, random_rotation
from fisherhash.model.heads import Head, LinearHead
from fisherhash.system.options import Range, Tuned


@register
class MLH(FeatureMethod):
    """A linear hash function that minimises a hinge on Hamming distances, through a bound.

    For a pair at distance d the loss is max(d - rho + 1, 0) if it is similar, and
    lambda max(rho - d + 1, 0) if not. The codes that maximise loss + score, (g, g'), are found
    exactly: sorted by what each bit gains from differing, the best number of differing bits is
    tried. The bound's gradient then moves W towards sgn(W x) x^T and away from g x^T.

    What differs from the paper: x is projected to principal components of variance 1; W starts at
    random directions of length 1, the steps have momentum, and rows of W are kept at length 1 or
    less; W is the mean over the second half of the steps.

    Args:
        bits: K.
        classes: M.
        radius: rho, as a share of K.
        dissimilar: lambda.
        steps: Steps of a batch of pairs.
        batch: Pairs per step, half of them similar.
        rate: Step size.
        dimensions: The most principal components.
    """

    info = MethodInfo(
        name="mlh",
        title="Minimal Loss Hashing for Compact Binary Codes",
        venue="ICML",
        year=2011,
        url="https://icml.cc/2011/papers/239_icmlpaper.pdf",
        supervision="pairs",
    )

    radius: Annotated[float, Range(above=0, most=1), Tuned(0.1, 0.5)] = 0.3
    dissimilar: Annotated[float, Range(above=0), Tuned(0.1, 2.0, "log")] = 0.5
    steps: PositiveInt = 1000
    batch: PositiveInt = 128
    rate: Annotated[float, Range(above=0), Tuned(0.003, 1.0, "log")] = 0.05
    dimensions: PositiveInt = 256

    def solve(self, features: Tensor, labels: Tensor | None, *, seed: int) -> Head:
        """Return a head fitted on features (N, d) and labels (N, classes)."""
        labels = needed(labels, "mlh").double()
        generator = torch.Generator().manual_seed(seed)
        count = min(self.dimensions, features.shape[1], len(features) - 1)
        found = principal(features, count, name="mlh")
        scale = found.whitening
        rows = found.project(features) * scale
        W = torch.randn(self.bits, count, generator=generator, dtype=torch.float64).to(rows)
        if count >= self.bits:
            W[:] = random_rotation(count, generator).to(rows)[: self.bits]
        W = W / W.norm(dim=1, keepdim=True)
        momentum, mean = torch.zeros_like(W), torch.zeros_like(W)
        for step in range(self.steps):
            first, second = self._pairs(labels, generator)
            x, y = rows[first], rows[second]
            similar = (labels[first] * labels[second]).sum(1) > 0
            momentum = 0.9 * momentum + self.slope(W, x, y, similar) / len(x)
            W = W - self.rate * momentum
            W = W / W.norm(dim=1, keepdim=True).clamp_min(1.0)
            if step >= self.steps // 2:
                mean += W
        weight = (found.directions * scale) @ mean.T / (self.steps - self.steps // 2)
        return LinearHead.from_matrix(weight.T.float().cpu(), found.mean.float().cpu())

    def _pairs(self, labels: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Draw pairs; half of them are made similar where a similar image exists."""
        count = len(labels)
        first = torch.randint(count, (self.batch,), generator=generator).to(labels.device)
        second = torch.randint(count, (self.batch,), generator=generator).to(labels.device)
        half = self.batch // 2
        similar = labels[first[:half]] @ labels.T > 0
        similar[torch.arange(half), first[:half]] = False
        similar[~similar.any(1)] = True
        upto = similar.cumsum(1)
        share = torch.rand(half, 1, generator=generator).to(labels.device)
        wanted = (share * upto[:, -1:]).long().clamp_max(upto[:, -1:] - 1)
        second[:half] = torch.searchsorted(upto, wanted, right=True)[:, 0]
        return first, second

    def slope(self, W: Tensor, x: Tensor, y: Tensor, similar: Tensor) -> Tensor:
        """Return the gradient (K, d) of the bound, summed over pairs x, y (n, d)."""
        f, g = x @ W.T, y @ W.T
        worst_f, worst_g = self.worst_codes(f, g, similar)
        return (worst_f - sign(f)).T @ x + (worst_g - sign(g)).T @ y

    def losses(self, similar: Tensor) -> Tensor:
        """Return the loss (n, K + 1) of n pairs at each Hamming distance."""
        distance = torch.arange(self.bits + 1, device=similar.device, dtype=torch.float64)
        rho = self.radius * self.bits
        near = (distance - rho + 1.0).clamp_min(0.0)
        far = self.dissimilar * (rho - distance + 1.0).clamp_min(0.0)
        return torch.where(similar[:, None], near, far)

    def worst_codes(self, f: Tensor, g: Tensor, similar: Tensor) -> tuple[Tensor, Tensor]:
        """Return the codes (n, K) of pairs that maximise loss + score, for outputs f, g (n, K)."""
        equal, different = (f + g).abs(), (f - g).abs()
        gain = different - equal
        order = gain.argsort(dim=1, descending=True)
        total = torch.zeros(len(f), self.bits + 1, dtype=f.dtype, device=f.device)
        total[:, 1:] = gain.gather(1, order).cumsum(1)
        best = (total + self.losses(similar)).argmax(1)
        rank = torch.empty_like(order).scatter_(
            1, order, torch.arange(self.bits, device=f.device).expand_as(order)
        )
        differs = rank < best[:, None]
        first = torch.where(differs, sign(f - g), sign(f + g))
        return first, torch.where(differs, -first, first)
