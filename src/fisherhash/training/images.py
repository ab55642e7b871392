"""The images that a method is trained on: frozen features, or pixels for a network that learns."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from fisherhash.backbones import Backbone
from fisherhash.data.augment import PLAIN, PLAIN_DRAWS, Strength, augment, masked
from fisherhash.data.streaming import ResidentRows, StreamedRows
from fisherhash.methods.base import Batch
from fisherhash.model.heads import Head
from fisherhash.training.distributed import current_ranks

ROWS_AT_ONCE = 4096
"""Images on disk whose features are in memory at a time."""
SAMPLED = 1 << 15
"""Images on disk that stand for all where only statistics of the features are needed."""


@contextlib.contextmanager
def evaluation_mode(module: nn.Module) -> Iterator[None]:
    """Switch a module to evaluation mode, without gradients; afterwards to the mode it was in."""
    training = module.training
    module.eval()
    with torch.no_grad():
        yield
    module.train(training)


class FrozenImages:
    """Training images as features, computed once; the backbone does not change.

    Args:
        features: (N, d), or their rows on disk.
        labels: (N, classes) on the device of the training.
        head: the head that is trained.
    """

    def __init__(self, features: Tensor | StreamedRows, labels: Tensor, head: Head) -> None:
        self.rows = ResidentRows(features) if isinstance(features, Tensor) else features
        self.labels = labels
        self.head = head
        self.modules: dict[str, nn.Module] = {"head": head}
        self.ranks = current_ranks()
        self.draws = PLAIN_DRAWS

    @property
    def streamed(self) -> bool:
        """Whether the images are on disk."""
        return self.rows.streamed

    @property
    def device(self) -> torch.device:
        """Where the training runs."""
        return self.labels.device

    def batch(self, index: Tensor, strengths: Sequence[Strength] = (PLAIN,)) -> Batch:
        """Return the images at ``index``, in one view per strength."""
        views = len(strengths)
        features = self.batch_features(index, strengths).float()
        if views == 1:
            return Batch(self.labels[index], index, features)
        rows = index.repeat(views)
        return Batch(self.labels[rows], rows, features, views)

    def batch_features(self, index: Tensor, strengths: Sequence[Strength] = (PLAIN,)) -> Tensor:
        """Return features (views * b, d) of the images at ``index``, with the views' masks."""
        features = self.rows.at(index, self.device)
        found = [
            masked(features, self.head.shift, strength.masked, draws=self.draws)
            for strength in strengths
        ]
        return found[0] if len(found) == 1 else torch.cat(found)

    def features(self) -> Tensor:
        """Return all features (N, d)."""
        return self.rows.between(0, len(self.rows), self.device)

    def feature_blocks(self) -> Iterator[Tensor]:
        """Yield all features in blocks (n, d), in order; one block if they are in memory."""
        if not self.streamed:
            yield self.features()
            return
        for first in range(0, len(self.rows), ROWS_AT_ONCE):
            last = min(first + ROWS_AT_ONCE, len(self.rows))
            yield self.rows.between(first, last, self.device)

    def outputs(self) -> Tensor:
        """Return outputs (N, …) of the head as it is now, in evaluation mode."""
        with evaluation_mode(self.head):
            return torch.cat([self.head(features) for features in self.feature_blocks()])

    def sample(self) -> tuple[Tensor, Tensor]:
        """Return features (n, d) and labels of all images in memory, or of some on disk.

        Those are evenly spaced, always the same ones, and at most ``SAMPLED``.
        """
        if not self.streamed or len(self.rows) <= SAMPLED:
            return self.features(), self.labels
        places = torch.linspace(0, len(self.rows) - 1, SAMPLED, dtype=torch.float64).long()
        return self._at(places), self.labels[places.to(self.device)]

    def _at(self, places: Tensor) -> Tensor:
        """Features of the unaugmented images at places (n,) on disk."""
        return self.rows.at(places, self.device)


class LiveImages(FrozenImages):
    """Training images as bytes; the backbone is trained with the head.

    Args:
        pixels: (N, 3, size, size) bytes, or their rows on disk.
        labels: (N, classes) on the device of the training.
        backbone: the network that is trained.
        head: the head that is trained.
    """

    def __init__(
        self, pixels: Tensor | StreamedRows, labels: Tensor, backbone: Backbone, head: Head
    ) -> None:
        super().__init__(pixels, labels, head)
        self.backbone = backbone
        self.modules = {"head": head, "backbone": backbone}

    def batch_features(self, index: Tensor, strengths: Sequence[Strength] = (PLAIN,)) -> Tensor:
        """Return features (views * b, d) of randomly augmented images, with gradient."""
        pixels = self.rows.at(index, self.device)
        found = [augment(pixels, strength, draws=self.draws) for strength in strengths]
        images = found[0] if len(found) == 1 else torch.cat(found)
        images = images.contiguous(memory_format=torch.channels_last)
        # No cast cache: a captured graph must not reuse a cast made before its replay.
        kind, enabled = self.device.type, self.device.type == "cuda"
        with torch.autocast(kind, torch.bfloat16, enabled=enabled, cache_enabled=False):
            return self.backbone(images)

    def features(self) -> Tensor:
        """Return features (N, d) of the unaugmented images, in evaluation mode."""
        return self._computed(0, len(self.rows))

    def feature_blocks(self) -> Iterator[Tensor]:
        """Yield features in blocks (n, d), in order; one block if the pixels are in memory."""
        step = ROWS_AT_ONCE if self.streamed else len(self.rows)
        for first in range(0, len(self.rows), step):
            yield self._computed(first, min(first + step, len(self.rows)))

    def _computed(self, first: int, last: int) -> Tensor:
        def compute(start: int, end: int) -> Tensor:
            return self._network(self.rows.between(first + start, first + end, self.device))

        with evaluation_mode(self.backbone):
            width = self.backbone.features
            return self.ranks.spread(last - first, self._chunk, compute, width)

    def _at(self, places: Tensor) -> Tensor:
        def compute(first: int, last: int) -> Tensor:
            return self._network(self.rows.at(places[first:last], self.device))

        with evaluation_mode(self.backbone):
            return self.ranks.spread(len(places), self._chunk, compute, self.backbone.features)

    @property
    def _chunk(self) -> int:
        return 256 if self.device.type == "cuda" else 8

    def _network(self, pixels: Tensor) -> Tensor:
        return self.backbone(pixels.contiguous(memory_format=torch.channels_last)).float()
