"""K-means hashing (He, Wen and Sun, CVPR 2013)."""

from typing import Annotated

import torch
from torch import Tensor

from fisherhash.methods._options import PositiveInt
from fisherhash.methods.base import FeatureMethod, MethodInfo, register
from fisherhash.methods.shallow._features import distances_to, draw_rows, principal
from fisherhash.model.heads import ArrayHead, Head
from fisherhash.system.options import Range, Tuned


@register
class KMH(FeatureMethod):
    """k-means in subspaces, with words that lie like the corners of a cube.

    In each subspace of b bits there are 2^b words c_i, numbered by the corners of a cube. They
    minimise, with n_i the share of the images nearest to word i and h_ij the Hamming distance of
    two numbers,

        sum_x ||x - c_(i(x))||^2 / N  +  lambda sum_ij n_i n_j (||c_i - c_j|| - s sqrt(h_ij))^2

    by turns: images move to their nearest words, words move downhill. s is set at the start, where
    the words are the corners of a box along the principal directions.

    What differs from the paper: words move by L-BFGS on the whole objective; the subspaces share
    the principal directions out so that each has about the same variance; a subspace takes at most
    ``dimensions`` of them, because later ones hold little variance.

    Args:
        bits: K.
        classes: Not used.
        subspace_bits: b; the last subspace has the rest.
        dimensions: The most dimensions of a subspace; at least b.
        affinity: lambda.
        turns: Turns of images and words.
    """

    info = MethodInfo(
        name="kmh",
        title="K-Means Hashing: An Affinity-Preserving Quantization Method",
        venue="CVPR",
        year=2013,
        url="https://doi.org/10.1109/CVPR.2013.378",
        supervision="none",
    )

    subspace_bits: Annotated[int, Range(1, 8), Tuned(choices=(2, 4, 6))] = 4
    dimensions: PositiveInt = 16
    affinity: Annotated[float, Range(least=0), Tuned(1.0, 100.0, "log")] = 10.0
    turns: PositiveInt = 20

    def solve(self, features: Tensor, labels: Tensor | None, *, seed: int) -> Head:
        """Return a head fitted on features (N, d); labels are not used."""
        own = [self.subspace_bits] * (self.bits // self.subspace_bits)
        if rest := self.bits % self.subspace_bits:
            own.append(rest)
        most = min(features.shape[1], len(features) - 1)
        count = max(self.bits, min(most, len(own) * max(self.dimensions, self.subspace_bits)))
        found = principal(features, count, name="kmh")
        groups = share_out(found.variances.cpu(), own, max(self.dimensions, self.subspace_bits))
        order = torch.cat(groups)
        rows = draw_rows(len(features), 10_000, torch.Generator().manual_seed(seed))
        projected = found.project(features[rows.to(features.device)]).cpu()
        directions = found.directions[:, order.to(found.directions.device)]
        arrays = {"shift": found.mean.cpu(), "projection": directions.cpu()}
        for number, (group, bits) in enumerate(zip(groups, own, strict=True)):
            arrays[f"words_{number}"] = self._words(projected[:, group], bits)
        return ArrayHead("cube", features.shape[1], self.bits, arrays)

    def _words(self, rows: Tensor, bits: int) -> Tensor:
        """Return the words (2^bits, dimensions) of one subspace."""
        corners = cube_corners(bits).double()
        deviations = rows.std(0, correction=0)[:bits].clamp_min(1e-9)
        words = torch.zeros(len(corners), rows.shape[1], dtype=torch.float64)
        words[:, :bits] = corners * deviations
        apart = (bits - corners @ corners.T) / 2.0
        scale = float((torch.cdist(words, words).sum() / apart.sqrt().sum()).clamp_min(1e-9))
        for _ in range(self.turns):
            owner = distances_to(rows, words).argmin(1)
            moved = self._move(rows, words, owner, scale * apart.sqrt())
            if torch.allclose(moved, words, rtol=1e-4, atol=1e-6 * scale):
                break
            words = moved
        return words

    def _move(self, rows: Tensor, words: Tensor, owner: Tensor, target: Tensor) -> Tensor:
        """Move the words downhill, with every image at its word ``owner``."""
        share = torch.bincount(owner, minlength=len(words)).double() / len(rows)
        # The error of the images depends on the words through their sums only, and a constant.
        sums = torch.zeros_like(words).index_add_(0, owner, rows) / len(rows)
        words = words.clone().requires_grad_()
        weight = share[:, None] * share
        search = torch.optim.LBFGS([words], max_iter=10, line_search_fn="strong_wolfe")

        def objective() -> float:
            with torch.enable_grad():
                search.zero_grad()
                between = (distances_to(words, words) + 1e-12).sqrt()
                quantization = (share[:, None] * words.square() - 2.0 * sums * words).sum()
                loss = quantization + self.affinity * (weight * (between - target).square()).sum()
                loss.backward()
            return float(loss.detach())

        search.step(objective)
        return words.detach()


def share_out(variances: Tensor, bits: list[int], most: int) -> list[Tensor]:
    """Return which dimensions each subspace takes, so that each has about the same variance.

    Args:
        variances: Of all dimensions, largest first.
        bits: Of each subspace, which takes at least as many dimensions.
        most: The most dimensions of a subspace.

    >>> [group.tolist() for group in share_out(torch.tensor([4.0, 3.0, 2.0, 1.0]), [2, 2], 2)]
    [[0, 3], [1, 2]]
    """
    groups: list[list[int]] = [[] for _ in bits]
    sums = [0.0] * len(bits)
    left = len(variances)
    for dimension, variance in enumerate(variances.tolist()):
        missing = sum(max(0, own - len(group)) for own, group in zip(bits, groups, strict=True))
        open_ones = [
            k
            for k, group in enumerate(groups)
            if len(group) < most and (left > missing or len(group) < bits[k])
        ]
        if not open_ones:
            break
        chosen = min(open_ones, key=lambda k: (sums[k], k))
        groups[chosen].append(dimension)
        sums[chosen] += variance
        left -= 1
    return [torch.tensor(group) for group in groups]


def cube_corners(bits: int) -> Tensor:
    """Return (2^bits, bits) the corners of a cube, -1 and 1, highest bit first.

    >>> cube_corners(2).tolist()
    [[-1.0, -1.0], [-1.0, 1.0], [1.0, -1.0], [1.0, 1.0]]
    """
    numbers = torch.arange(2**bits)[:, None]
    return 2.0 * ((numbers >> torch.arange(bits - 1, -1, -1)) & 1) - 1.0
