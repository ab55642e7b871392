"""The images that a method is trained on: frozen features, or pixels for a network that learns."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor, nn

from fisherhash.backbones import Backbone
from fisherhash.data.augment import PLAIN, Strength, augment, masked
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

    @property
    def streamed(self) -> bool:
        """Whether the images are on disk."""
        return self.rows.streamed

    @property
    def device(self) -> torch.device:
        """Where the training runs."""
        return self.labels.device

    def share(self, batch: int) -> slice:
        """Return which images of a batch this process reads."""
        return slice(0, batch)

    def batch(self, index: Tensor, strengths: Sequence[Strength] = (PLAIN,)) -> Batch:
        """Return the images at ``index``, in one view per strength."""
        views = len(strengths)
        features = self.batch_features(index, strengths).float()
        rows = index.repeat(views) if views > 1 else index
        return Batch(self.labels[rows], rows, features, views)

    def batch_features(self, index: Tensor, strengths: Sequence[Strength] = (PLAIN,)) -> Tensor:
        """Return features (views * b, d) of the images at ``index``, with the views' masks."""
        features = self.rows.at(index, self.device)
        found = [masked(features, self.head.shift, strength.masked) for strength in strengths]
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
        chosen = torch.linspace(0, len(self.rows) - 1, SAMPLED, dtype=torch.float64).long()
        return self._unaugmented(chosen), self.labels[chosen.to(self.device)]

    def _unaugmented(self, index: Tensor) -> Tensor:
        return self.rows.at(index, self.device)


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
        self.ranks = current_ranks()

    def share(self, batch: int) -> slice:
        """Return which images of a batch this process runs through the network."""
        return self.ranks.bounds(batch)

    def batch_features(self, index: Tensor, strengths: Sequence[Strength] = (PLAIN,)) -> Tensor:
        """Return features (views * b, d) of randomly augmented images, with gradient."""
        pixels = self.rows.at(index[self.share(len(index))], self.device)
        draws = self.ranks.draws(len(index))
        found = [augment(pixels, strength, draws=draws) for strength in strengths]
        images = found[0] if len(found) == 1 else torch.cat(found)
        images = images.contiguous(memory_format=torch.channels_last)
        # No cast cache: a captured graph must not reuse a cast made before its replay.
        kind, enabled = self.device.type, self.device.type == "cuda"
        with torch.autocast(kind, torch.bfloat16, enabled=enabled, cache_enabled=False):
            features = self.backbone(images)
        return self.ranks.gather(features, len(index))

    def features(self) -> Tensor:
        """Return features (N, d) of the unaugmented images, in evaluation mode."""
        return self._computed(self._chunks(0, len(self.rows)))

    def feature_blocks(self) -> Iterator[Tensor]:
        """Yield features in blocks (n, d), in order; one block if the pixels are in memory."""
        step = ROWS_AT_ONCE if self.streamed else len(self.rows)
        for first in range(0, len(self.rows), step):
            yield self._computed(self._chunks(first, min(first + step, len(self.rows))))

    def _unaugmented(self, index: Tensor) -> Tensor:
        return self._computed(self.rows.at(i, self.device) for i in index.split(self._chunk))

    def _chunks(self, first: int, last: int) -> Iterator[Tensor]:
        for start in range(first, last, self._chunk):
            yield self.rows.between(start, min(start + self._chunk, last), self.device)

    @property
    def _chunk(self) -> int:
        return 256 if self.device.type == "cuda" else 8

    def _computed(self, chunks: Iterable[Tensor]) -> Tensor:
        with evaluation_mode(self.backbone):
            found = [
                self.backbone(pixels.contiguous(memory_format=torch.channels_last)).float()
                for pixels in chunks
            ]
        return torch.cat(found)
