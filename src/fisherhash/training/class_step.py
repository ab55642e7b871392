"""The class step: codes of new images that use what the class centres know.

In training, Deep Fisher Hashing gives an image with classes y the code sgn(mu C y + u). The classes
of a new image are not known, but they can be estimated: its code is sgn(u + mu s C p), with p the
probabilities of a linear classifier of the same features, and s the mean of |u|, so that one mu
suits outputs of any scale. Nothing in this is particular to one method. Where a method has no
centres of its own, C are the signs of the class means of its logits.

The step is fitted after the training, on the final features of the training images, so that one
training can be measured with and without it. mu and beta, the sharpness of p, are chosen on
held-out images from ``GRID``, which is the same for all methods.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fisherhash.methods._pairs import TrainingLabels
from fisherhash.model.heads import Head
from fisherhash.model.outer_heads import ClassStepHead
from fisherhash.training.side_classifier import class_targets, classification_loss

DROPOUT = 0.5
EPOCHS = 30
LEAST_STEPS = 600  # where there are few images
BATCH = 256
RATE = 3e-3
DECAY = 1e-2


@dataclass(frozen=True)
class ClassStep:
    """The two numbers of a class step.

    Attributes:
        weight: mu; 0 leaves the codes as they are.
        sharpness: beta.
    """

    weight: float
    sharpness: float


LIMIT = 1000.0
"""As a weight: the code is that of the estimated classes alone. As a sharpness: no class is partly
estimated; it counts fully or not at all. As 0 it is the other end: all classes are as likely."""
WEIGHTS = (0.125, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0, LIMIT)
SHARPNESSES = (0.0, 0.0625, 0.125, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0, LIMIT)
GRID = tuple(ClassStep(weight, sharpness) for weight in WEIGHTS for sharpness in SHARPNESSES)
"""The steps that are tried on held-out images. Beyond the ends there is nothing else to find."""


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
        fitted = fit_classifier(found.standardise(features), labels, several=several, seed=seed)
    else:
        fitted = scorer.scores_weight, scorer.scores_bias
    found.scores_weight.copy_(fitted[0])
    found.scores_bias.copy_(fitted[1])
    return found


def fit_classifier(
    inputs: Tensor, labels: Tensor, *, several: bool, seed: int
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
    targets = class_targets(labels, several=several)
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
            loss = classification_loss(scores, targets[rows], several=several)
            optimizer.zero_grad()
            loss.backward()
            optimizer.param_groups[0]["lr"] = RATE * (1.0 - step / len(batches))
            optimizer.step()
    return weight.detach(), bias.detach()
