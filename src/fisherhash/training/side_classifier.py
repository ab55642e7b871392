"""A linear classifier that is trained with the network, beside the head."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fisherhash.methods._pairs import class_proportions
from fisherhash.training.images import FrozenImages
from fisherhash.training.settings import Settings


def class_targets(labels: Tensor, *, several: bool) -> Tensor:
    """Return what a classifier is to predict of images with labels (n, classes) 0 or 1.

    Args:
        labels: (n, classes).
        several: whether every class is predicted by itself, not one class per image.
    """
    return labels.float() if several else class_proportions(labels.float())


def classification_loss(scores: Tensor, targets: Tensor, *, several: bool) -> Tensor:
    """Return the cross-entropy of scores (n, classes) with :func:`class_targets`."""
    if several:
        return F.binary_cross_entropy_with_logits(scores, targets)
    return F.cross_entropy(scores, targets)


class SideClassifier(nn.Module):
    """Makes the network tell classes apart, whatever the method asks of it; not part of a hasher.

    A loss of pairs or of centres need not lead to features from which the classes can be read,
    and the class step reads them. Losses differ in scale by orders of magnitude, so the weight is
    in units of the method's own loss: with 1, both are equally large in the first step.

    Args:
        images: the training images, which its width and its classes are of.
        settings: the weight of its loss and the share of features that are dropped.
    """

    def __init__(self, images: FrozenImages, settings: Settings) -> None:
        super().__init__()
        self.linear = nn.Linear(images.head.in_features, images.labels.shape[1])
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)
        self.several = bool((images.labels.sum(1) > 1).any())
        self.weight, self.dropout = settings.classifier_weight, settings.dropout
        # The method's loss in units of ours; 0 before the first step. Saved with a checkpoint.
        self.unit = nn.Buffer(torch.zeros(()))
        self._measured = False
        self.to(images.device)

    def forward(
        self, terms: dict[str, Tensor], features: Tensor, labels: Tensor
    ) -> dict[str, Tensor]:
        """Add its cross-entropy to the terms of a method's loss.

        Args:
            terms: of the loss, with their sum ``loss``.
            features: (n, d) standardised.
            labels: (n, classes).
        """
        # Not a layer: processes that train together see the whole batch here, not their share.
        scores = self.linear(F.dropout(features, self.dropout, self.training))
        targets = class_targets(labels, several=self.several)
        found = classification_loss(scores, targets, several=self.several)
        if not self._measured:
            # In Python, once: the steps that are captured as a graph come later.
            if not bool(self.unit):
                self.unit.copy_((terms["loss"].abs() / found).detach())
            self._measured = True
        loss = terms["loss"] + self.weight * self.unit * found
        return {**terms, "classifier": found, "loss": loss}


def find_side_classifier(images: FrozenImages, settings: Settings) -> SideClassifier | None:
    """Return a classifier where one is wanted and there is a network to train; else None."""
    wanted = settings.classifier_weight > 0 and "backbone" in images.modules
    return SideClassifier(images, settings) if wanted else None
