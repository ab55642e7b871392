"""Iterative quantisation after canonical correlation analysis (Gong et al., TPAMI 2013)."""

from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor

from fisherhash.methods._options import NotNegativeInt
from fisherhash.methods.base import FeatureMethod, MethodInfo, register
from fisherhash.methods.shallow._affinity import needed
from fisherhash.methods.shallow._features import mean_and_covariance, row_blocks
from fisherhash.methods.shallow.itq import quantizing_rotation
from fisherhash.model.heads import Head, LinearHead
from fisherhash.system.options import Range, Tuned


@register
class ITQCCA(FeatureMethod):
    """The directions that correlate most with the labels, then the rotation of ITQ.

    Canonical correlation analysis solves C_xy C_yy^-1 C_yx w = r^2 C_xx w. Directions are scaled by
    their correlation r. There are at most as many as classes; with more bits the rotation spreads
    them over all bits.

    Args:
        bits: K.
        classes: M.
        ridge: Added to the diagonals of C_xx and C_yy, as a share of their means.
        iterations: Turns of the rotation.
    """

    info = MethodInfo(
        name="itq_cca",
        title="Iterative Quantization: A Procrustean Approach to Learning Binary Codes for "
        "Large-Scale Image Retrieval",
        venue="TPAMI",
        year=2013,
        url="https://doi.org/10.1109/TPAMI.2012.193",
        supervision="classes",
    )

    ridge: Annotated[float, Range(above=0), Tuned(1e-4, 10.0, "log")] = 0.01
    iterations: NotNegativeInt = 50

    def solve(self, features: Tensor, labels: Tensor | None, *, seed: int) -> Head:
        """Return a head fitted on features (N, d) and labels (N, classes)."""
        found = correlated(features, needed(labels, "itq_cca").double(), self.ridge)
        count = min(self.bits, found.directions.shape[1])
        directions = found.directions.new_zeros(len(found.mean), self.bits)
        directions[:, :count] = found.directions[:, :count] * found.correlations[:count]
        projected = torch.cat([(block - found.mean) @ directions for block in row_blocks(features)])
        rotation = quantizing_rotation(projected, self.iterations, seed)
        weight = (directions @ rotation).T
        return LinearHead.from_matrix(weight.float().cpu(), found.mean.float().cpu())


@dataclass(frozen=True)
class Correlated:
    """The directions of some features that correlate most with labels.

    Attributes:
        mean: (d,) the features' mean.
        directions: (d, count), each of variance 1, the largest correlation first.
        correlations: (count,).
    """

    mean: Tensor
    directions: Tensor
    correlations: Tensor


def correlated(features: Tensor, labels: Tensor, ridge: float) -> Correlated:
    """Take canonical correlation analysis between features (N, d) and labels (N, M).

    Args:
        features: (N, d).
        labels: (N, M).
        ridge: Added to the diagonals of both covariances, as a share of their means.
    """
    mean, Cxx = mean_and_covariance(features)
    centred = labels - labels.mean(0)
    Cyy = centred.T @ centred / len(labels)
    for matrix in (Cxx, Cyy):
        scale = torch.diagonal(matrix).mean().clamp_min(1e-12)
        matrix.diagonal().add_(ridge * scale)
    Cxy, done = torch.zeros(()), 0
    for block in row_blocks(features):
        Cxy = Cxy + (block - mean).T @ centred[done : done + len(block)] / len(labels)
        done += len(block)
    root = torch.linalg.inv(torch.linalg.cholesky(Cxx))
    whitened = root @ Cxy
    left, correlations, _ = torch.linalg.svd(
        whitened @ torch.linalg.inv(torch.linalg.cholesky(Cyy)).T, full_matrices=False
    )
    return Correlated(mean, root.T @ left, correlations)
