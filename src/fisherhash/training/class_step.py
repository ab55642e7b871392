"""The class step: codes of new images that use what the class centres know.

In training, Deep Fisher Hashing gives an image with classes y the code sgn(mu C y + u). The classes
of a new image are not known, but they can be estimated: its code is sgn(u + mu s C p), with p the
probabilities of a linear classifier of the same features, and s the mean of |u|, so that one mu
suits outputs of any scale. Nothing in this is particular to one method. Where a method has no
centres of its own, C are the signs of the class means of its logits.

The step is fitted after the training, on the final features of the training images, so that one
training can be measured with and without it. mu and beta, the sharpness of p, are chosen on
held-out images from ``GRID``, which is the same for all methods.

A :class:`SideClassifier` may also be trained with the network, so that its features tell classes
apart.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fisherhash.methods._pairs import TrainingLabels, class_proportions
from fisherhash.model.heads import Head
from fisherhash.model.outer_heads import ClassStepHead
from fisherhash.training.images import FrozenImages
from fisherhash.training.settings import Settings

DROPOUT = 0.5
EPOCHS = 30
LEAST_STEPS = 600  # where there are few images
BATCH = 256
RATE = 3e-3
DECAY = 1e-2


class ClassStep(NamedTuple):
    """The two numbers of a class step: mu, where 0 leaves the codes as they are, and beta."""

    weight: float
    sharpness: float


LIMIT = 1000.0
"""As a weight: the code is that of the estimated classes alone. As a sharpness: no class is partly
estimated; it counts fully or not at all. As 0 it is the other end: all classes are as likely."""
WEIGHTS = (0.125, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0, LIMIT)
SHARPNESSES = (0.0, 0.0625, 0.125, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0, LIMIT)
GRID = tuple(ClassStep(weight, sharpness) for weight in WEIGHTS for sharpness in SHARPNESSES)
"""The steps that are tried on held-out images. Beyond the ends there is nothing else to find."""


def classification_loss(scores: Tensor, labels: Tensor, several: bool) -> Tensor:
    """Return the cross-entropy of scores (n, classes) with labels (n, classes) 0 or 1.

    With ``several`` every class is predicted by itself, otherwise one class per image.
    """
    if several:
        return F.binary_cross_entropy_with_logits(scores, labels.float())
    return F.cross_entropy(scores, class_proportions(labels.float()))


@torch.no_grad()
def fit_class_step(
    head: Head,
    features: Tensor,
    labels: Tensor,
    *,
    centers: Tensor | None = None,
    seed: int = 0,
    scorer: ClassStepHead | None = None,
) -> ClassStepHead:
    """Return a head that adds the class step to a trained head; its weight is 0 at first.

    Args:
        head: the trained head, in evaluation mode.
        features: (N, d) final features of the training images.
        labels: (N, classes) 0 or 1.
        centers: (classes, bits) the class centres; by default the signs of the class means of the
            logits.
        seed: of the classifier's order and dropout.
        scorer: a class step that was fitted to the same features, labels and seed: its classifier
            is taken, which does not depend on the head.
    """
    classes = labels.shape[1]
    several = bool((labels.sum(1) > 1).any())
    found = ClassStepHead(features.shape[1], head.bits, head, classes, several=several)
    found.to(features.device).eval()
    Head.start(found, features)
    logits = head.logits(features).float()
    found.size.copy_(logits.abs().mean())
    if centers is None:
        known = TrainingLabels().to(features.device)
        known.fill(labels)
        centers = torch.where(known.means(logits) > 0, 1.0, -1.0).T
    found.centers.copy_(centers)
    if scorer is None:
        weight, bias = fit_classifier(found.standardise(features), labels, several, seed=seed)
    else:
        weight, bias = scorer.scores_weight, scorer.scores_bias
    found.scores_weight.copy_(weight)
    found.scores_bias.copy_(bias)
    return found


def fit_classifier(
    inputs: Tensor, labels: Tensor, several: bool, *, seed: int
) -> tuple[Tensor, Tensor]:
    """Fit a linear classifier; return its weights (classes, d) and its biases (classes,).

    Half of the inputs are dropped in each step. Without that the classifier would be as sure of new
    images as it is of the images it was fitted to.

    Args:
        inputs: (N, d) standardised features.
        labels: (N, classes) 0 or 1.
        several: whether every class is predicted by itself, not one class per image.
        seed: of order and dropout.
    """
    generator = torch.Generator(inputs.device).manual_seed(seed)
    order = torch.Generator().manual_seed(seed)
    count, size = len(inputs), min(BATCH, len(inputs))
    weight = torch.zeros(labels.shape[1], inputs.shape[1], device=inputs.device)
    bias = torch.zeros(labels.shape[1], device=inputs.device)
    with torch.enable_grad():
        weight.requires_grad_()
        bias.requires_grad_()
        optimizer = torch.optim.AdamW([weight, bias], lr=RATE, weight_decay=DECAY)
        epochs = max(EPOCHS, -(-LEAST_STEPS // (count // size)))
        orders = [torch.randperm(count, generator=order) for _ in range(epochs)]
        # One copy to the device: copying in every step would wait for the step before.
        batches = torch.cat([one[: count // size * size] for one in orders]).to(inputs.device)
        batches = batches.view(-1, size)
        for step, rows in enumerate(batches):
            keep = torch.rand(size, inputs.shape[1], generator=generator, device=inputs.device)
            batch = inputs[rows] * (keep >= DROPOUT) / (1.0 - DROPOUT)
            scores = batch @ weight.T + bias
            loss = classification_loss(scores, labels[rows], several)
            optimizer.zero_grad()
            loss.backward()
            optimizer.param_groups[0]["lr"] = RATE * (1.0 - step / len(batches))
            optimizer.step()
    return weight.detach(), bias.detach()


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
        scores = self.linear(F.dropout(features, self.dropout, self.training))
        found = classification_loss(scores, labels, self.several)
        if not self._measured:
            # In Python, once: the steps that are captured as a graph come later.
            if not bool(self.unit):
                self.unit.copy_((terms["loss"].abs() / found).detach())
            self._measured = True
        loss = terms["loss"] + self.weight * self.unit * found
        return {**terms, "classifier": found, "loss": loss}
