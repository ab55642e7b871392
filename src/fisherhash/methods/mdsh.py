"""Minimal-distance-separated hash centres (Wang et al., CVPR 2023)."""

from typing import Annotated

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fisherhash.methods._codebooks import far_apart
from fisherhash.methods._options import NotNegativeInt
from fisherhash.methods._pairs import (
    MemoryMethod,
    quantization_error,
    sum_in_parts,
    without_self,
)
from fisherhash.methods.base import Batch, MethodInfo, Progress, register
from fisherhash.system.options import Range, Tuned


@register
class MDSH(MemoryMethod):
    """MDSH: fixed class centres with a promised minimum distance, and similar images pulled close.

    With c_m in {-1, 1}^K the centre of class m, p_im = softmax_m(sqrt(K) cos(u_i, c_m)) and s_im
    1 for the image's class, the authors' code minimises

        -mean_im [ s log p + (1 - s) log(1 - p) ]
        + beta * mean over similar (i, j) of log(1 + e^((1 - cos(u_i, u_j)) / 2))
        + gamma * (1/N) sum_i || |u_i| - 1 ||^2.

    The second term starts after some epochs. Any two centres differ in at least d bits, d from the
    Gilbert-Varshamov bound. The code is sgn(u).

    What differs from the paper and the authors' code:

    * The centres come from the search that every method with fixed codes uses; it reaches d, which
      a test checks. Theirs solve a relaxed problem one centre at a time.
    * u_j comes from the memory of last outputs; theirs from a slowly moving copy of the network.
    * An image is not compared with itself in the second term, as it is in theirs.
    * The mean over classes is a sum here, as for every method: the scale of a loss does not matter
      to their optimiser, but does to SGD.
    * u has no tanh and no batch normalisation, as for most methods.

    Args:
        bits: K.
        classes: M.
        pairs: beta, 1 in the authors' code.
        quantization: gamma, 0.0001 in the authors' code.
        pair_start: The epoch, out of 100, after which pairs count; 9 in the authors' code.
        codebook_seed: Selects the centres.
    """

    info = MethodInfo(
        name="mdsh",
        title="Deep Hashing with Minimal-Distance-Separated Hash Centers",
        venue="CVPR",
        year=2023,
        url="https://openaccess.thecvf.com/content/CVPR2023/html/"
        "Wang_Deep_Hashing_With_Minimal-Distance-Separated_Hash_Centers_CVPR_2023_paper.html",
        supervision="pairs and classes",
        multilabel=False,
    )

    codebook = "centers"

    pairs: Annotated[float, Range(least=0), Tuned(0.05, 5.0, "log")] = 1.0
    quantization: Annotated[float, Range(least=0), Tuned(1e-5, 1e-1, "log")] = 1e-4
    pair_start: NotNegativeInt = 9
    codebook_seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        self.centers = nn.Buffer(far_apart(self.classes, self.bits, seed=self.codebook_seed))
        self.pair_weight = nn.Buffer(torch.zeros(()))

    def on_epoch_start(self, progress: Progress) -> None:
        """Switch the pair term on after its share of the epochs."""
        on = 100 * progress.epoch >= self.pair_start * progress.epochs
        self.pair_weight.fill_(self.pairs if on else 0.0)

    def loss(self, outputs: Tensor, batch: Batch) -> dict[str, Tensor]:
        """Return the cross-entropies to the centres, the pair term and the quantisation term."""
        directions = F.normalize(outputs.float(), eps=1e-6)
        scores = directions @ self.centers.T  # sqrt(K) times the cosine: a centre has norm sqrt(K)
        labels = batch.labels.float()
        logs = F.log_softmax(scores, dim=1)
        # log(1 - p), bounded where p is nearly 1.
        rest = torch.log1p(-logs.exp().clamp_max(1.0 - 1e-6))
        center = -(labels * logs + (1.0 - labels) * rest).sum(1).mean()

        def sums(own: Tensor, part: slice) -> tuple[Tensor, Tensor]:
            others = F.normalize(self.memory.outputs[part], eps=1e-6)
            similar = self.memory.labels.similar(batch.index, part)
            similar = without_self(similar, batch.index, part)
            apart = F.softplus((1.0 - own @ others.T) / 2.0)
            return torch.where(similar, apart, 0.0).sum(), similar.sum()

        apart, pairs = sum_in_parts(directions, len(self.memory.outputs), sums)
        pair = apart / pairs.clamp_min(1)
        quantization = quantization_error(outputs)
        loss = center + self.pair_weight * pair + self.quantization * quantization
        return {"loss": loss, "center": center, "pair": pair, "quantization": quantization}
