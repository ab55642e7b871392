"""Pieces shared by the methods that learn from pairs: similarity, and the memory of outputs."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fisherhash.methods.base import Batch, TrainingSet


class PairMemory(nn.Module):
    """The outputs of all N training images as each was last seen, with their labels.

    Pairs are then batch x N instead of batch x batch. Rows of the memory are constants: the
    gradient reaches the batch's own outputs only.
    """

    outputs: Tensor
    labels: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("outputs", torch.empty(0, 0))
        # The labels are the training set's own; a checkpoint has no need of a second copy.
        self.register_buffer("labels", torch.empty(0, 0), persistent=False)

    def fill(self, train: TrainingSet) -> None:
        """One pass over the training set: no row starts at zero, where the pair loss is flat."""
        self.outputs = train.outputs().float().clone()
        self.labels = train.labels.to(self.outputs)

    def refresh(self, outputs: Tensor, batch: Batch) -> None:
        """Remember the batch's outputs (b, bits)."""
        self.outputs.index_copy_(0, batch.index, outputs.detach().to(self.outputs))

    def pair_loss(
        self, outputs: Tensor, batch: Batch, *, margin: float = 0.0, positive_weight: float = 1.0
    ) -> Tensor:
        """Mean logistic loss of the pairs batch x memory, self pairs left out.

        With theta = u_i . u_j / 2 a similar pair costs log(1 + exp(margin - theta)), a dissimilar
        one log(1 + exp(margin + theta)).
        """
        # float32 even under autocast: theta grows with the number of bits, bfloat16 would round it.
        theta = 0.5 * outputs.float() @ self.outputs.T
        similar = (batch.labels.to(self.labels) @ self.labels.T) > 0
        losses = F.softplus(margin - torch.where(similar, theta, -theta))
        weights = torch.where(similar, positive_weight, 1.0)
        weights = weights.scatter(1, batch.index[:, None], 0.0)
        return (losses * weights).sum() / weights.sum().clamp_min(1.0)


def class_proportions(labels: Tensor) -> Tensor:
    """Rows that sum to 1: 1/m on each of an image's m labels; an unlabelled row stays zero.

    >>> class_proportions(torch.tensor([[1.0, 0.0, 1.0], [0.0, 1.0, 0.0]])).tolist()
    [[0.5, 0.0, 0.5], [0.0, 1.0, 0.0]]
    """
    return labels / labels.sum(1, keepdim=True).clamp_min(1.0)
