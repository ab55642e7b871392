"""Deep Quantization Network (Cao, Long, Wang, Zhu, Wen, AAAI 2016)."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from fisherhash.errors import UsageError
from fisherhash.methods._pairs import BatchPairs, check_not_negative, check_positive
from fisherhash.methods.base import (
    Batch,
    HashMethod,
    MethodInfo,
    Progress,
    TrainingSet,
    register,
)
from fisherhash.model.heads import Head, ProductHead

SEED_ROWS = 16_384  # images among which the first words are drawn
TABLE_CELLS = 2**22  # distances to words held at a time


@register
class DQN(HashMethod):
    """Deep Quantization Network: angles that follow the pairs, and product codebooks for them.

    With z_i the outputs of a tanh bottleneck (R reals), s_ij = 1 for similar and -1 for dissimilar
    pairs, C the codebooks of all subspaces (block-diagonal) and h_i the word chosen in each, the
    paper minimises

        sum_(i,j) ( s_ij - cos(z_i, z_j) )^2 + lambda sum_i || z_i - C h_i ||^2

    by turns: z by back-propagation, C by k-means in each subspace, h by the nearest word. A code is
    the word numbers; a database is ranked by the asymmetric quantiser distance, a real query
    against words: it is no Hamming distance. How bits become subspaces: see
    :class:`fisherhash.model.heads.ProductHead`.

    How the paper is read, and what differs from it:

    * Sums become means, over the pairs of different images in the batch and over images. Both are
      then multiplied by R: a cosine divides an inner product of R numbers by about R, and with it
      the gradient, which those of other methods are not; so one learning rate serves all.
    * Codebooks are refined by k-means on the outputs of the whole training set (as they are then)
      at the start of every epoch, from where they stand; the released code begins anew every two
      epochs. They start by k-means++ seeding, and a word that no image chooses moves to the image
      that is farthest from its own word.
    * h is the nearest word in each subspace. Codebooks of different subspaces do not overlap, so
      that is the exact minimum, which the paper's ICM sweeps also reach.
    * lambda is 0 for the first ``warm_up`` epochs, as in the released code: words found before
      anything is learnt would hold the outputs where they started.
    * The paper's words are 8 bits a subspace; ours at most 8, so that any length is possible.
    * A batch of one image has the quantisation term alone.

    Args:
        bits: of all word numbers together.
        classes: M.
        width: R of the bottleneck; 300 by our memory of the paper.
        quantization: lambda; 0.0001 is the default of a public CIFAR-10 script derived from the
            released code, which itself names none; the paper's is not known to us.
        warm_up: epochs without quantisation; the released code's 2.
        sweeps: k-means steps at the start of an epoch; ours.
    """

    info = MethodInfo(
        name="dqn",
        title="Deep Quantization Network for Efficient Image Retrieval",
        venue="AAAI",
        year=2016,
        url="https://ojs.aaai.org/index.php/AAAI/article/view/10455",
        supervision="pairs",
        multilabel=True,
        fit="gradient",
    )
    strength: Tensor

    def __init__(
        self,
        *,
        bits: int,
        classes: int,
        width: int = 300,
        quantization: float = 0.0001,
        warm_up: int = 2,
        sweeps: int = 5,
    ) -> None:
        super().__init__(bits=bits, classes=classes)
        check_not_negative("dqn", quantization=quantization, warm_up=warm_up)
        check_positive("dqn", width=width, sweeps=sweeps)
        self.width = width
        self.quantization = quantization
        self.warm_up = warm_up
        self.sweeps = sweeps
        self.register_buffer("strength", torch.tensor(0.0 if warm_up else quantization))
        # Both belong to others and are saved there: the codebooks in the head, the images nowhere.
        self._heads: list[ProductHead] = []
        self._train: TrainingSet | None = None

    def head(self, in_features: int) -> Head:
        """A tanh bottleneck with codebooks."""
        self._heads = [ProductHead(in_features, self.bits, self.width)]
        return self._heads[0]

    def start(self, train: TrainingSet) -> None:
        """The first codebooks."""
        self._train = train
        outputs = train.outputs()
        seed(self._head, outputs)
        refine(self._head, outputs, self.sweeps)

    def on_epoch_start(self, progress: Progress) -> None:
        """Refine the codebooks on the outputs of the whole training set."""
        self.strength.fill_(self.quantization if progress.epoch >= self.warm_up else 0.0)
        self.finish()

    def finish(self) -> None:
        """Fit the codebooks to the outputs as they are now."""
        if self._train is not None:
            refine(self._head, self._train.outputs(), self.sweeps)

    def loss(self, outputs: Tensor, batch: Batch) -> dict[str, Tensor]:
        """The objective on the pairs of one batch."""
        z = outputs.float()
        unit = F.normalize(z, dim=1)
        pairs = BatchPairs.of(batch.labels)
        wanted = pairs.similar.to(z) - pairs.dissimilar.to(z)
        similarity = pairs.mean((wanted - unit @ unit.T).square())
        with torch.no_grad():
            nearest = self._head.reconstruct(self._head.assign(z))
        quantization = (z - nearest).square().sum(1).mean()
        return {
            "similarity": similarity,
            "quantization": quantization,
            "loss": self._head.width * (similarity + self.strength * quantization),
        }

    @property
    def _head(self) -> ProductHead:
        if not self._heads:
            raise UsageError("dqn: the codebooks live in the head; call head() before training")
        return self._heads[0]


@torch.no_grad()
def seed(head: ProductHead, outputs: Tensor) -> None:
    """First words of every subspace by k-means++: images drawn with the square of their distance
    to the words before them. outputs: (n, width).
    """
    some = outputs[torch.randperm(len(outputs))[:SEED_ROWS].to(outputs.device)].float()
    points = some.unflatten(1, (head.subspaces, -1)).transpose(0, 1)  # (subspaces, n, d)
    each = torch.arange(head.subspaces, device=points.device)
    nearest = torch.ones(points.shape[:2], device=points.device)
    for word in range(head.codebooks.shape[1]):
        # Where fewer different images than words exist, all are at 0: then any will do.
        drawn = torch.multinomial((nearest + 1e-12).cpu(), 1)[:, 0].to(points.device)
        chosen = points[each, drawn]
        head.codebooks[:, word] = chosen
        distance = (points - chosen[:, None]).square().sum(2)
        nearest = distance if word == 0 else torch.minimum(nearest, distance)


@torch.no_grad()
def refine(head: ProductHead, outputs: Tensor, sweeps: int) -> None:
    """Steps of Lloyd's k-means in every subspace; none raises the quantisation error."""
    parts = outputs.float().unflatten(1, (head.subspaces, -1))
    for _ in range(sweeps):
        chosen, errors = (torch.cat(some) for some in zip(*_nearest(head, outputs), strict=True))
        for m, book in enumerate(head.codebooks):
            used = 2 ** head.subspace_bits[m]
            counts = torch.bincount(chosen[:, m], minlength=used)
            sums = torch.zeros_like(book).index_add_(0, chosen[:, m], parts[:, m])
            taken = torch.nonzero(counts > 0)[:, 0]
            book[taken] = sums[taken] / counts[taken, None]
            idle = torch.nonzero(counts == 0)[:, 0]
            far = errors[:, m].topk(min(len(idle), len(errors))).indices
            book[idle[: len(far)]] = parts[far, m]


def _nearest(head: ProductHead, outputs: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Nearest words (n, subspaces) and squared distances to them, for blocks of outputs."""
    rows = max(1, TABLE_CELLS // head.unused.numel())
    for block in outputs.split(rows):
        errors, chosen = head.tables(block).min(2)
        yield chosen, errors
