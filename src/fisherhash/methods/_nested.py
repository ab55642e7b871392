"""Nested codes: one head whose first bits are good codes of every shorter length.

After the nested hash layer of He et al. (NHL, arXiv 2412.08922): with u the K outputs of the head,
b_1 < ... < b_m = K the lengths, and L_k the method's own loss for codes of b_k bits, with its own
state, the network minimises

    sum_k L_k(u[:, :b_k]).

All lengths have weight 1, and no length is distilled into another. The paper weights them by how
their gradients conflict, and adds a distillation term. Centres that a method fixes before training
have the same first bits at every length.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from fisherhash.errors import NotDefinedError, UsageError
from fisherhash.methods.base import (
    Batch,
    HashMethod,
    MethodInfo,
    Progress,
    TrainingSet,
    create,
    find,
)
from fisherhash.model.heads import Head


class _FirstOutputs:
    """A training set of which a method sees the first outputs only."""

    def __init__(self, train: TrainingSet, bits: int) -> None:
        self._train, self._bits = train, bits

    @property
    def labels(self) -> Tensor:
        return self._train.labels

    def outputs(self) -> Tensor:
        return self._train.outputs()[:, : self._bits]

    @property
    def streamed(self) -> bool:
        return self._train.streamed

    def features(self) -> Tensor:
        return self._train.features()

    def feature_blocks(self) -> Iterator[Tensor]:
        return self._train.feature_blocks()


class Nested(HashMethod):
    """A method at several lengths at once; :func:`nested` makes one.

    Every hook calls that of each length, with the first outputs.

    Args:
        bits: The longest length.
        classes: Number of classes.
    """

    info = MethodInfo(
        name="nested",
        title="The nested hash layer (NHL)",
        venue="arXiv",
        year=2024,
        url="https://arxiv.org/abs/2412.08922",
        supervision="none",
    )

    def fill(self, parts: Sequence[HashMethod]) -> None:
        """Take the method at each length, the longest last."""
        self._parts = nn.ModuleList(parts)
        longest = parts[-1]
        # It is the same method, so it goes by its name and has its views.
        self.info = longest.info  # type: ignore[misc]
        self.views, self.strengths = longest.views, longest.strengths  # type: ignore[misc]

    @property
    def parts(self) -> list[HashMethod]:
        """The method at each length, the longest last."""
        return [cast("HashMethod", part) for part in self._parts]

    @property
    def capturable(self) -> bool:
        """Whether a step stays on the device, at every length."""
        return all(part.capturable for part in self.parts)

    def head(self, in_features: int) -> Head:
        """Return the head of the longest length.

        Raises:
            NotDefinedError: Its outputs are not the logits, so the first of them are no code.
        """
        found = self.parts[-1].head(in_features)
        if not found.hamming or type(found).logits is not Head.logits:
            raise NotDefinedError(
                f"{self.info.name}: its bits are not the signs of its outputs, so the first of "
                "them are no shorter code; train it without nested lengths"
            )
        return found

    def begin(self, train: TrainingSet) -> None:
        """Begin a stage at every length."""
        for part in self.parts:
            part.begin(_FirstOutputs(train, part.bits))

    def class_centers(self) -> Tensor | None:
        """Return the centres of the longest length."""
        return self.parts[-1].class_centers()

    def epoch_metrics(self) -> dict[str, float]:
        """Return the numbers of every length; its bits are part of their names."""
        return {
            f"{name}_{part.bits}": value
            for part in self.parts
            for name, value in part.epoch_metrics().items()
        }

    def loss(self, outputs: Tensor, batch: Batch) -> dict[str, Tensor]:
        """Return the sum of the losses of all lengths, and each of them."""
        losses = {
            f"loss_{part.bits}": part(outputs[:, : part.bits], batch)["loss"] for part in self.parts
        }
        return {"loss": torch.stack(list(losses.values())).sum(), **losses}

    def after_step(self, outputs: Tensor, batch: Batch) -> None:
        """Update the state of every length."""
        for part in self.parts:
            part.after_step(outputs[:, : part.bits], batch)

    def on_epoch_start(self, progress: Progress) -> None:
        """Update the state of every length before each epoch."""
        for part in self.parts:
            part.on_epoch_start(progress)

    def finish(self) -> None:
        """Finish every length."""
        for part in self.parts:
            part.finish()


def nested(
    name: str,
    lengths: Sequence[int],
    *,
    bits: int,
    classes: int,
    options: Mapping[str, Any] | None = None,
) -> Nested:
    """Build a method that learns codes of several lengths, each the first bits of the longest.

    Args:
        name: The method's name.
        lengths: The shorter lengths; ``bits`` may be among them.
        bits: The longest length.
        classes: Number of classes.
        options: Hyper-parameters, the same at every length.

    Raises:
        UsageError: A length is not between 1 and ``bits``, or the method has no gradient.
    """
    for length in lengths:
        if not 1 <= length <= bits:
            raise UsageError(
                f"a nested length must be between 1 and the {bits} bits of the whole code, got "
                f"{length}"
            )
    if not issubclass(find(name), HashMethod):
        raise UsageError(f"{name} is not trained by gradient; it takes no nested lengths")
    method = Nested(bits=bits, classes=classes)
    parts = [
        create(name, bits=length, classes=classes, options=options)
        for length in sorted({*lengths, bits})
    ]
    method.fill([cast("HashMethod", part) for part in parts])
    _share_centers(name, method.parts, options or {})
    return method


def _share_centers(name: str, parts: Sequence[HashMethod], options: Mapping[str, Any]) -> None:
    """Give fixed centres the same first bits at every length; the shortest length chooses first.

    Centres chosen for each length separately would pull the first bits to different codes. The bits
    that a length adds are centres of so many bits, drawn with a seed of their own; their smallest
    distance adds to that of the shorter length.
    """
    longest = parts[-1]
    if not (book := longest.codebook):
        return
    for number in range(1, len(parts)):
        shorter, longer = parts[number - 1], parts[number]
        drawn = dict(options) | {"codebook_seed": int(options.get("codebook_seed", 0)) + number}
        added = create(
            name,
            bits=longer.bits - shorter.bits,
            classes=longest.classes,
            options=drawn,
        )
        centers = [getattr(shorter, book), getattr(added, book)]
        getattr(longer, book).copy_(torch.cat(centers, dim=1))
