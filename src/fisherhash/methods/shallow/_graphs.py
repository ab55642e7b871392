"""Anchor graphs: each image is a mixture of its nearest anchors (Liu et al., ICML 2010)."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from fisherhash.errors import NotDefinedError
from fisherhash.methods.shallow import _features
from fisherhash.model.head_kinds import nearest_anchors
from fisherhash.model.heads import ArrayHead


class AnchorGraph:
    """Z (N, m): similarities of N images to m anchors, rows of sum 1, few entries each.

    The graph between images is A = Z L^-1 Z^T, L = diag(Z^T 1); its rows sum to 1.

    Args:
        features: (N, d).
        anchors: m, centres of k-means.
        nearest: Entries per row.
        width: Width of the kernel, in units of the median distance to the nearest anchors.
        name: The method, for errors.
        bits: Bits asked for; they must be fewer than the anchors.
        generator: Draws the first centres of k-means.
    """

    def __init__(
        self,
        features: Tensor,
        *,
        anchors: int,
        nearest: int,
        width: float,
        name: str,
        bits: int,
        generator: torch.Generator,
    ) -> None:
        anchors = min(anchors, len(features))
        if bits >= anchors:
            raise NotDefinedError(
                f"{name}: {bits} bits need more than {bits} anchors, there are {anchors} (at most "
                f"one per image); take fewer bits, or more anchors"
            )
        self.features = features
        self.centre = features.float().mean(0).double()
        points = _features.k_means(features, anchors, generator)
        self.nearest = min(nearest, anchors)
        self.points = points - self.centre
        near = _features.distances_to(features[:2000].double(), points)
        middle = near.topk(self.nearest, largest=False).values.median().clamp_min(1e-12)
        self.gamma = 0.5 / (width**2 * float(middle))
        self._held: list[Tensor] | None = None
        if len(features) * anchors <= _features.HELD:
            self._held = list(self.blocks())
        # Anchors that no image is near to would divide by 0.
        self.sizes = sum((z.sum(0) for z in self.blocks()), start=torch.zeros(())).clamp_min(1e-9)

    def blocks(self) -> Iterator[Tensor]:
        """Yield Z in blocks (b, m)."""
        if self._held is not None:
            yield from self._held
            return
        for block in _features.row_blocks(self.features, 8192):
            yield nearest_anchors(block - self.centre, self.points, self.gamma, self.nearest)

    def eigenvectors(self, count: int) -> tuple[Tensor, Tensor]:
        """Return W (m, count) and the eigenvalues: Z W are the first eigenvectors of A.

        The constant one is left out. The columns of Z W have mean square 1.
        """
        root = self.sizes.rsqrt()
        small = torch.zeros(len(root), len(root), dtype=torch.float64, device=root.device)
        for z in self.blocks():
            scaled = z * root
            small += scaled.T @ scaled
        values, vectors = torch.linalg.eigh(small)
        order = torch.arange(len(root) - 2, len(root) - 2 - count, -1, device=root.device)
        values, vectors = values[order].clamp_min(1e-12), vectors[:, order]
        return root[:, None] * vectors * (len(self.features) / values).sqrt(), values

    def apply(self, weight: Tensor) -> Tensor:
        """Return Z W (N, k) for W (m, k)."""
        return torch.cat([z @ weight for z in self.blocks()])

    def collect(self, targets: Tensor) -> Tensor:
        """Return Z^T T (m, k) for T (N, k)."""
        done, total = 0, torch.zeros(())
        for z in self.blocks():
            total = total + z.T @ targets[done : done + len(z)].double()
            done += len(z)
        return total

    def smooth(self, targets: Tensor) -> Tensor:
        """Return A T (N, k) for T (N, k)."""
        return self.apply(self.collect(targets) / self.sizes[:, None])

    def head(
        self, weight: Tensor, *, high: Tensor | None = None, low: Tensor | None = None
    ) -> ArrayHead:
        """Return the head u = W^T z(x), with second bits where thresholds are given."""
        none = torch.zeros(0)
        arrays = {
            "shift": self.centre,
            "points": self.points,
            "gamma": torch.tensor(self.gamma),
            "weight": weight.T,
            "high": none if high is None else high,
            "low": none if low is None else low,
        }
        arrays = {name: values.cpu() for name, values in arrays.items()}
        bits = weight.shape[1] + len(arrays["high"])
        numbers = {"nearest": self.nearest}
        return ArrayHead("anchors", self.points.shape[1], bits, arrays, numbers=numbers)
