"""Kernel features: the similarity of an image to some anchor images, and regression on them."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from fisherhash.methods.shallow import _features
from fisherhash.model.heads import ArrayHead, LinearHead


class KernelMap:
    """phi(x) = (exp(-||x - a_j||^2 / (2 w^2)))_j - mean, with m anchors a_j drawn from the data.

    The width w is ``width`` times the median distance between images and anchors.

    Args:
        features: (N, d).
        anchors: How many anchors.
        width: w, in units of the median distance.
        name: The method, for the log.
        generator: Draws the anchors.
    """

    def __init__(
        self,
        features: Tensor,
        *,
        anchors: int,
        width: float,
        name: str,
        generator: torch.Generator,
    ) -> None:
        self._features = features
        rows = _features.draw_rows(len(features), anchors, generator).to(features.device)
        self.anchors = features[rows].double()
        self.gamma = 0.5 / (width * _features.kernel_width(features, self.anchors, name=name)) ** 2
        self.mean = torch.zeros(len(self.anchors), dtype=torch.float64, device=features.device)
        self._held: list[Tensor] | None = None
        self.mean = self.collect(None)[:, 0] / len(features)
        if len(features) * len(self) <= _features.HELD:
            self._held = list(self.blocks())

    def __len__(self) -> int:
        return len(self.anchors)

    def blocks(self) -> Iterator[Tensor]:
        """Yield phi of all images, in blocks (b, m)."""
        if self._held is not None:
            yield from self._held
            return
        for block in _features.row_blocks(self._features, 4096):
            yield self.of(block)

    def of(self, rows: Tensor) -> Tensor:
        """Return phi (n, m) of some features (n, d)."""
        distances = _features.distances_to(rows.double(), self.anchors)
        return torch.exp(-self.gamma * distances) - self.mean

    def gram(self) -> Tensor:
        """Return Phi^T Phi (m, m)."""
        total = torch.zeros(len(self), len(self), dtype=torch.float64, device=self.mean.device)
        for block in self.blocks():
            total += block.T @ block
        return total

    def collect(self, targets: Tensor | None) -> Tensor:
        """Return Phi^T T (m, k) for targets T (N, k); None stands for a column of ones."""
        done, total = 0, torch.zeros(len(self), 1, dtype=torch.float64, device=self.mean.device)
        for block in self.blocks():
            part = block.sum(0)[:, None]
            if targets is not None:
                part = block.T @ targets[done : done + len(block)].double()
            total = total + part
            done += len(block)
        return total

    def apply(self, weight: Tensor) -> Tensor:
        """Return Phi W (N, k) for W (m, k)."""
        return torch.cat([block @ weight for block in self.blocks()])

    def head(self, weight: Tensor, offset: Tensor | None = None) -> ArrayHead:
        """Return the head u = W^T phi(x) + offset, for W (m, bits)."""
        bits = weight.shape[1]
        # Distances of centred vectors lose less to rounding.
        centre = self.anchors.mean(0)
        arrays = {
            "shift": centre,
            "points": self.anchors - centre,
            "gamma": torch.tensor(self.gamma),
            "mean": self.mean,
            "weight": weight.T,
            "offset": torch.zeros(bits) if offset is None else offset,
        }
        arrays = {name: values.cpu() for name, values in arrays.items()}
        return ArrayHead("kernel", self.anchors.shape[1], bits, arrays)


class Ridge:
    """Ridge regression on kernel features; the matrix is decomposed once for all targets.

    Args:
        kernel: The features.
        ridge: Its weight, as a share of the mean of the diagonal of Phi^T Phi.
    """

    def __init__(self, kernel: KernelMap, ridge: float) -> None:
        self._kernel = kernel
        gram = kernel.gram()
        scale = torch.diagonal(gram).mean().clamp_min(1e-12)
        gram.diagonal().add_(ridge * scale)
        self._factor = torch.linalg.cholesky(gram)

    def fit(self, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Return W (m, k) and the offsets (k,) that predict targets (N, k) best."""
        offset = targets.double().mean(0)
        return torch.cholesky_solve(self._kernel.collect(targets), self._factor), offset


def linear_ridge(features: Tensor, targets: Tensor, ridge: float) -> tuple[Tensor, Tensor, Tensor]:
    """Return W (d, k), the mean (d,) and the offsets (k,) of u = W^T (x - mean) + offset.

    Args:
        features: (N, d).
        targets: (N, k).
        ridge: Weight of ||W||^2, as a share of the features' mean variance.
    """
    mean, covariance = _features.mean_and_covariance(features)
    covariance.diagonal().add_(ridge * torch.diagonal(covariance).mean().clamp_min(1e-12))
    offset, done = targets.double().mean(0), 0
    cross = torch.zeros(len(mean), targets.shape[1], dtype=torch.float64, device=features.device)
    for block in _features.row_blocks(features):
        cross += (block - mean).T @ targets[done : done + len(block)].double()
        done += len(block)
    return torch.linalg.solve(covariance, cross / len(features)), mean, offset


def centred_head(weight: Tensor, mean: Tensor, offset: Tensor) -> LinearHead:
    """Return the head u = W^T (x - mean) + offset, for W (d, bits)."""
    head = LinearHead.from_matrix(weight.T.float().cpu(), mean.float().cpu())
    head.linear.bias.data.copy_(offset)
    return head
