"""What follows the training of a head: its bits are cut, and the class step is fitted."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fisherhash.errors import NotDefinedError, UsageError
from fisherhash.methods import HashMethod, _centers, _cutting
from fisherhash.methods._pairs import TrainingLabels
from fisherhash.model.heads import Head
from fisherhash.model.outer_heads import ClassStepHead, CutHead
from fisherhash.training.class_step import GRID, fit_class_step
from fisherhash.training.images import FrozenImages, evaluation_mode
from fisherhash.training.measuring import held_out_map
from fisherhash.training.settings import Settings

AFFINITY = 0.5
"""How much the code book that a cut starts from follows the classes' similarity."""


@dataclass
class Ending:
    """What is made of a trained head: the bits are cut, the class step is fitted.

    Attributes:
        learner: the method that trains the head.
        bits: length of the codes.
        settings: how it is trained.
        top: the K of the mAP of held-out images.
        head: the final head; before the end of the training, the one that is trained.
        step: the head with the class step, whether or not it is the final one.
        row: what :meth:`validate` measured last.
    """

    learner: HashMethod
    bits: int
    settings: Settings
    top: float | None
    head: Head = field(init=False)
    step: ClassStepHead | None = field(default=None, init=False)
    row: dict[str, Any] = field(default_factory=dict, init=False)

    @property
    def has_step(self) -> bool:
        """Whether the class step is wanted, and the codes are such that it can change them."""
        wanted = self.settings.step_weight > 0 or self.settings.validation > 0
        return wanted and self.head.hamming

    def finish(
        self, head: Head, features: Tensor, labels: Tensor, scorer: ClassStepHead | None
    ) -> ClassStepHead | None:
        """Make the final head: the class step is added.

        Args:
            head: computes the bits.
            features: (n, d) final features of the training images.
            labels: (n, classes).
            scorer: a class step on the same features, whose classifier is used again.

        Returns:
            The class step, if one was fitted.
        """
        self.head = head
        if self.has_step and bool(labels.any()):
            self.step = fit_class_step(
                head,
                features,
                labels,
                centers=cut_centers(self.learner, head),
                seed=self.settings.seed,
                scorer=scorer,
            )
            if self.settings.step_weight > 0:
                self.head = self.step.with_step(
                    self.settings.step_weight, self.settings.step_sharpness
                )
        return self.step

    def validate(self, features: Tensor, labels: NDArray[np.uint8]) -> dict[str, Any]:
        """mAP of held-out images, each a query against the others.

        Not against the images trained on: most images of a protocol's database were not trained on,
        and a method that memorises its training images would look better than it is.
        """
        head = self.head
        with evaluation_mode(head):
            self.row = {"validation_map": held_out_map(head, features, labels, top=self.top)}
            if self.step is None:
                return self.row
            inner, scores = self.step.inner.logits(features), self.step.scores(features)
            plain = held_out_map(self.step.inner, features, labels, top=self.top)
            # Together, because each copy from a GPU waits for it.
            stepped = torch.stack(
                [
                    self.step.with_step(*one).combine(inner, scores)
                    for one in map(dataclasses.astuple, GRID)
                ]
            ).cpu()
            steps = [
                dataclasses.asdict(one)
                | {"score": held_out_map(self.step, logits, labels, top=self.top, encoded=True)}
                for one, logits in zip(GRID, stepped, strict=True)
            ]
            self.row["validation"] = {"plain": plain, "steps": steps}
            return self.row


class Endings:
    """The endings of one training: other lengths and cuts of the same outputs, other class steps.

    Features are computed once for all, and one classifier is fitted.

    Args:
        every: the endings; the training is described by the first.
    """

    def __init__(self, every: Sequence[Ending]) -> None:
        self.every = tuple(every)
        self.learner, self.settings = every[0].learner, every[0].settings

    def begin(self, head: Head) -> None:
        """Start from the head that is to be trained."""
        for ending in self.every:
            ending.head = head

    def finish(self, images: FrozenImages) -> None:
        """Make the final heads from the trained one, with the training images."""
        step = bool(images.labels.any()) and any(ending.has_step for ending in self.every)
        if not self.settings.outputs and not step:
            return
        with evaluation_mode(self.every[0].head):
            features, labels = images.sample()
        features = features.float()
        heads: dict[Any, Head] = {}
        scorer = None
        for ending in self.every:
            way = (ending.bits, ending.settings.cut)
            if way not in heads:
                heads[way] = self._cut(ending, features, labels)
            scorer = ending.finish(heads[way], features, labels, scorer) or scorer

    def _cut(self, ending: Ending, features: Tensor, labels: Tensor) -> Head:
        if not self.settings.outputs:
            return ending.head
        return cut_bits(ending.head, features, labels, bits=ending.bits, how=ending.settings.cut)

    def validate(self, images: FrozenImages) -> dict[str, Any]:
        """Measure held-out images with every ending; returns what the first one measured."""
        with evaluation_mode(self.every[0].head):
            features = images.features().float()
        labels = images.labels.cpu().numpy().astype(np.uint8)
        found = [ending.validate(features, labels) for ending in self.every]
        return found[0]


def check_cut(method: str, head: Head, bits: int, settings: Settings) -> None:
    """Check before the training whether ``bits`` bits can be cut from a head.

    Raises:
        NotDefinedError: The head's codes are not signs of logits.
        UsageError: There are fewer outputs than bits, and they are not to be mixed.
    """
    if not head.hamming:
        raise NotDefinedError(
            f"{method}: its codes are not signs of outputs, so bits cannot be cut from "
            f"{settings.outputs} outputs; leave outputs at 0"
        )
    if settings.cut == "first" and settings.outputs < bits:
        raise UsageError(
            f"{bits} bits cannot be the signs of the first {settings.outputs} outputs; use at "
            "least as many outputs as bits, or cut between"
        )


@torch.no_grad()
def cut_bits(head: Head, features: Tensor, labels: Tensor, *, bits: int, how: str) -> CutHead:
    """Return a head that cuts bits from the logits of a trained one.

    Args:
        head: the trained head, in evaluation mode.
        features: (N, d) final features of the training images.
        labels: (N, classes) 0 or 1; classes may be 0.
        bits: how many bits.
        how: ``first`` or ``between``, see :class:`Settings`.
    """
    found = CutHead(head.in_features, bits, head).to(features.device)
    if how == "between":
        logits = head.logits(features).float()
        mixing, offsets = _cutting.cut(logits, _first_codes(logits, labels, bits))
        found.mixing.copy_(mixing)
        found.offsets.copy_(offsets)
    return found.eval()


def cut_centers(method: HashMethod, head: Head) -> Tensor | None:
    """Return a method's own centres (classes, bits) as bits of a head, or None.

    The centres of outputs that were mixed are not known; their class means are.
    """
    centers = method.class_centers()
    if centers is None or centers.shape[1] == head.bits:
        return centers
    first = isinstance(head, CutHead) and torch.equal(
        head.mixing, torch.eye(*head.mixing.shape, device=head.mixing.device)
    )
    return centers[:, : head.bits] if first else None


def _first_codes(logits: Tensor, labels: Tensor, bits: int) -> Tensor:
    """Return codes (N, bits) for the cut to start from: of a graded code book of the classes.

    Without labels they are the signs of random projections, always the same ones.
    """
    if not bool(labels.any()):
        generator = torch.Generator().manual_seed(0)
        projection = torch.randn(logits.shape[1], bits, generator=generator).to(logits)
        return torch.where((logits - logits.mean(0)) @ projection > 0, 1.0, -1.0)
    known = TrainingLabels().to(logits.device)
    known.fill(labels)
    means = known.means(logits).double().cpu().numpy()
    book = _centers.code_book(_centers.graded(means, bits, AFFINITY), means)
    return known.mix(torch.from_numpy(book).to(logits), shares=True)
