"""Deep Quantization Network (Cao, Long, Wang, Zhu, Wen, AAAI 2016)."""

from typing import Annotated

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fisherhash.errors import UsageError
from fisherhash.methods._options import NotNegative, NotNegativeInt, PositiveInt, Tuned
from fisherhash.methods._pairs import BatchPairs
from fisherhash.methods.base import Batch, HashMethod, MethodInfo, Progress, TrainingSet, register
from fisherhash.model.heads import Head, ProductHead

SEED_ROWS = 16_384  # images from which the first words are drawn
TABLE_CELLS = 2**22  # distances to words in memory at once


@register
class DQN(HashMethod):
    """Deep Quantization Network: angles that follow the pairs, encoded by product codebooks.

    With z_i the outputs of a tanh bottleneck (R reals), s_ij = 1 for similar and -1 for dissimilar
    pairs, C the codebooks of all subspaces (block-diagonal) and h_i the word chosen in each, the
    paper minimises

        sum_(i,j) ( s_ij - cos(z_i, z_j) )^2 + lambda sum_i || z_i - C h_i ||^2

    by turns: z by back-propagation, C by k-means in each subspace, h by the nearest word. A code
    consists of the word numbers. A database is ranked by the asymmetric quantiser distance of a
    real query to the words, which is not a Hamming distance.
    :class:`fisherhash.model.heads.ProductHead` explains how bits become subspaces.

    How we read the paper, and what differs:

    * Sums become means, over the pairs of different images in the batch and over images. Both are
      then multiplied by R: a cosine divides an inner product of R numbers, and so its gradient, by
      about R, unlike the losses of other methods. With the factor one learning rate suits all.
    * At the start of every epoch, k-means refines the current codebooks on the current outputs of
      the whole training set; the released code starts afresh every two epochs. The first codebooks
      come from k-means++ seeding. A word that no image chooses moves to the image that is farthest
      from its own word.
    * h is the nearest word in each subspace. Codebooks of different subspaces do not overlap, so
      that is the exact minimum, which the paper's ICM sweeps also reach.
    * lambda is 0 for the first ``warm_up`` epochs, as in the released code: words found before the
      network has learned anything would hold the outputs where they started.
    * The paper's words have 8 bits per subspace; ours at most 8, so that any length is possible.
    * A batch of one image has the quantisation term alone.

    Args:
        bits: Of all word numbers together.
        classes: M.
        width: R of the bottleneck; 300 in the paper, as far as we remember.
        quantization: lambda; 0.0001 is the default of a public CIFAR-10 script derived from the
            released code, which itself states none; we do not know the paper's.
        warm_up: Epochs without quantisation; 2 in the released code.
        sweeps: k-means steps at the start of an epoch; our choice.
    """

    info = MethodInfo(
        name="dqn",
        title="Deep Quantization Network for Efficient Image Retrieval",
        venue="AAAI",
        year=2016,
        url="https://ojs.aaai.org/index.php/AAAI/article/view/10455",
        supervision="pairs",
    )

    width: Annotated[PositiveInt, Tuned(64, 640, "log")] = 300
    quantization: Annotated[NotNegative, Tuned(0.000001, 0.03, "log")] = 0.0001
    warm_up: NotNegativeInt = 2
    sweeps: PositiveInt = 5

    def __post_init__(self) -> None:
        super().__post_init__()
        self.strength = nn.Buffer(torch.tensor(0.0 if self.warm_up else self.quantization))
        # Others own both: the head is saved with the model, the images are not saved.
        self._heads: list[ProductHead] = []
        self._train: TrainingSet | None = None

    @property
    def output_width(self) -> int:
        """Width of the bottleneck, a multiple of the number of subspaces."""
        return self._head.width

    def head(self, in_features: int) -> Head:
        """Return a tanh bottleneck with codebooks."""
        self._heads = [ProductHead(in_features, self.bits, self.width)]
        return self._heads[0]

    def start(self, train: TrainingSet) -> None:
        """Find the first codebooks."""
        self._train = train
        outputs = train.outputs()
        seed(self._head, outputs)
        refine(self._head, outputs, self.sweeps)

    def refresh(self, train: TrainingSet) -> None:
        """Go on from the codebooks found so far, which the next epoch refines."""
        self._train = train

    def on_epoch_start(self, progress: Progress) -> None:
        """Refine the codebooks on the current outputs of the whole training set."""
        self.strength.fill_(self.quantization if progress.epoch >= self.warm_up else 0.0)
        self.finish()

    def finish(self) -> None:
        """Fit the codebooks to the current outputs."""
        if self._train is not None:
            refine(self._head, self._train.outputs(), self.sweeps)

    def loss(self, outputs: Tensor, batch: Batch) -> dict[str, Tensor]:
        """Return the objective on the pairs of one batch."""
        z = outputs.float()
        unit = F.normalize(z, dim=1)
        pairs = BatchPairs.of(batch.labels)
        wanted = pairs.similar.to(z) - pairs.dissimilar.to(z)
        similarity = pairs.mean((wanted - unit @ unit.T).square())
        with torch.no_grad():
            nearest = self._head.reconstruct(self._head.assign(z))
        quantization = (z - nearest).square().sum(1).mean()
        loss = self._head.width * (similarity + self.strength * quantization)
        return {"similarity": similarity, "quantization": quantization, "loss": loss}

    @property
    def _head(self) -> ProductHead:
        if not self._heads:
            raise UsageError("dqn: the codebooks live in the head; call head() before training")
        return self._heads[0]


@torch.no_grad()
def seed(head: ProductHead, outputs: Tensor) -> None:
    """Set the first words of every subspace by k-means++.

    Each word is an image, drawn with a probability that grows with the square of its distance to
    the words before it. outputs: (n, width).
    """
    some = outputs[torch.randperm(len(outputs))[:SEED_ROWS].to(outputs.device)].float()
    points = some.unflatten(1, (head.subspaces, -1)).transpose(0, 1)  # (subspaces, n, d)
    each = torch.arange(head.subspaces, device=points.device)
    nearest = torch.ones(points.shape[:2], device=points.device)
    for word in range(head.codebooks.shape[1]):
        # With fewer distinct images than words all distances are 0, and any image will do.
        drawn = torch.multinomial((nearest + 1e-12).cpu(), 1)[:, 0].to(points.device)
        chosen = points[each, drawn]
        head.codebooks[:, word] = chosen
        distance = (points - chosen[:, None]).square().sum(2)
        nearest = distance if word == 0 else torch.minimum(nearest, distance)


@torch.no_grad()
def refine(head: ProductHead, outputs: Tensor, sweeps: int) -> None:
    """Run Lloyd's k-means in every subspace; no step raises the quantisation error."""
    parts = outputs.float().unflatten(1, (head.subspaces, -1))
    blocks = outputs.split(max(1, TABLE_CELLS // head.unused.numel()))
    for _ in range(sweeps):
        nearest = [head.tables(block).min(2) for block in blocks]
        chosen = torch.cat([found.indices for found in nearest])  # (n, subspaces)
        errors = torch.cat([found.values for found in nearest])
        for m, book in enumerate(head.codebooks):
            used = 2 ** head.subspace_bits[m]
            counts = torch.bincount(chosen[:, m], minlength=used)
            sums = torch.zeros_like(book).index_add_(0, chosen[:, m], parts[:, m])
            taken = torch.nonzero(counts > 0)[:, 0]
            book[taken] = sums[taken] / counts[taken, None]
            idle = torch.nonzero(counts == 0)[:, 0]
            far = errors[:, m].topk(min(len(idle), len(errors))).indices
            book[idle[: len(far)]] = parts[far, m]
