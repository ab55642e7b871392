"""What follows the training of a head: its bits are cut, and the class step is fitted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fisherhash.codes import pack
from fisherhash.data.splits import Split
from fisherhash.errors import NotDefinedError, UsageError
from fisherhash.methods import HashMethod, _centers, _cutting
from fisherhash.methods._pairs import TrainingLabels
from fisherhash.model.heads import Head
from fisherhash.model.outer_heads import ClassStepHead, CutHead
from fisherhash.training.class_step import GRID, fit_class_step
from fisherhash.training.images import FrozenImages, evaluation_mode
from fisherhash.training.measuring import EncodedSplit, measure
from fisherhash.training.settings import Settings

AFFINITY = 0.5
"""How much the code book that a cut starts from follows the classes' similarity."""
LEAST_TOP = 10
"""The smallest K of the mAP of held-out images."""
MOST_QUERIES = 2000
"""The most held-out images that are queries; of more, evenly spaced ones are."""


@dataclass
class Ending:
    """What is made of a trained head: the bits are cut, the class step is fitted.

    Attributes:
        learner: the method that trains the head.
        bits: length of the codes.
        settings: how it is trained.
        head: the final head; before the end of the training, the one that is trained.
        step: the head with the class step, whether or not it is the final one.
        row: what :meth:`validate` measured last.
    """

    learner: HashMethod
    bits: int
    settings: Settings
    head: Head
    step: ClassStepHead | None = field(default=None, init=False)
    row: dict[str, Any] = field(default_factory=dict, init=False)

    @property
    def has_step(self) -> bool:
        """Whether the class step is wanted, and the codes are such that it can change them."""
        wanted = self.settings.step_weight > 0 or self.settings.validation > 0
        return wanted and self.head.hamming

    def add_step(self, features: Tensor, labels: Tensor, scorer: ClassStepHead | None) -> None:
        """Fit the class step to the final features (n, d) and the labels of the training images.

        The classifier of ``scorer``, a class step on the same features, is used again.
        """
        plain = self.head
        centers, seed = cut_centers(self.learner, plain), self.settings.seed
        self.step = fit_class_step(
            plain, features, labels, centers=centers, seed=seed, scorer=scorer
        )
        if self.settings.step_weight > 0:
            self.head = self.step.with_step(self.settings.step_weight, self.settings.step_sharpness)

    def validate(self, features: Tensor, labels: NDArray[np.uint8], top: float | None) -> None:
        """Measure the mAP of held-out images, each a query against the others.

        Not against the images trained on: most images of a protocol's database were not trained on,
        and a method that memorises its training images would look better than it is.
        """
        with evaluation_mode(self.head):
            score = partial(held_out_map, labels=labels, top=top)
            self.row = {"validation_map": score(self.head, features)}
            if self.step is None:
                return
            inner, scores = self.step.inner.logits(features), self.step.scores(features)
            # Together, because each copy from a GPU waits for it.
            stepped = [self.step.with_step(*one).combine(inner, scores) for one in GRID]
            logits = torch.stack(stepped).cpu()
            self.row["validation"] = {
                "plain": score(self.step.inner, features),
                "steps": [
                    one._asdict() | {"score": score(self.step, own, encoded=True)}
                    for one, own in zip(GRID, logits, strict=True)
                ],
            }


def finish_endings(endings: Sequence[Ending], images: FrozenImages) -> None:
    """Make the final heads of a training's endings from the trained one, with its images.

    Features are computed once for all, bits are cut once for each way, and one classifier is
    fitted.
    """
    step = bool(images.labels.any()) and any(ending.has_step for ending in endings)
    if not endings[0].settings.outputs and not step:
        return
    with evaluation_mode(endings[0].head):
        features, labels = images.sample()
    features = features.float()
    heads: dict[Any, Head] = {}
    scorer = None
    for ending in endings:
        bits, how = ending.bits, ending.settings.cut
        if ending.settings.outputs:
            if (bits, how) not in heads:
                heads[bits, how] = cut_bits(ending.head, features, labels, bits=bits, how=how)
            ending.head = heads[bits, how]
        if step and ending.has_step:
            ending.add_step(features, labels, scorer)
            scorer = scorer or ending.step


def validate_endings(
    endings: Sequence[Ending], images: FrozenImages, top: float | None
) -> dict[str, Any]:
    """Measure held-out images with every ending; returns what the first one measured."""
    with evaluation_mode(endings[0].head):
        features = images.features().float()
    labels = images.labels.cpu().numpy().astype(np.uint8)
    for ending in endings:
        ending.validate(features, labels, top)
    return endings[0].row


def held_out_top(split: Split) -> float | None:
    """Return the K of the mAP of held-out training images, as a share of them.

    It is the share of the database that the protocol's K is, so that a measurement among few images
    has as many relevant ones for each of its first K as the table's; None for all images.
    """
    return None if split.top is None else split.top / max(1, len(split.database))


def held_out_map(
    head: Head,
    values: Tensor,
    labels: NDArray[np.uint8],
    *,
    top: float | None,
    encoded: bool = False,
) -> float:
    """Return the mAP of images that were not trained on, each queried against the others.

    Args:
        head: computes the codes.
        values: features (n, d), or logits (n, bits).
        labels: (n, classes).
        top: K as a share of the images, see :func:`held_out_top`; at least ``LEAST_TOP`` images.
        encoded: whether the values are logits.
    """
    packed = pack((values if encoded else head.logits(values)).cpu().numpy())
    queries = np.arange(len(packed))
    if len(queries) > MOST_QUERIES:
        queries = np.linspace(0, len(queries) - 1, MOST_QUERIES).astype(np.int64)
    finished, real = head.finished(), None
    if not head.hamming:
        real = finished.query(values[torch.from_numpy(queries)].cpu().numpy())
    where = labels[queries], labels, finished, [], real, values.device.type
    split = EncodedSplit(packed[queries], packed, *where)
    most = None if top is None else max(LEAST_TOP, round(top * (len(packed) - 1)))
    return float(measure(split, top=most, self_index=queries).map)


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
