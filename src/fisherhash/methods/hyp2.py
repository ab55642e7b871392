"""HyP² loss (Xu et al., ACM MM 2022)."""

from typing import Annotated

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fisherhash.methods._codebooks import promised_distance
from fisherhash.methods.base import Batch, HashMethod, MethodInfo, TrainingSet, register
from fisherhash.system.options import Range, Tuned


@register
class HyP2(HashMethod):
    """HyP²: learned proxies of the classes, and a push between images that share no class.

    With p_c the learned proxy of class c and all similarities cosines, the authors' code minimises

        mean over (i, c), y_ic = 1, of (1 - cos(u_i, p_c))
        + mean over (i, c), y_ic = 0, of max(0, cos(u_i, p_c) - z)
        + beta * mean over pairs (i, j) in I of max(0, cos(u_i, u_j) - z).

    I are the pairs that share no label, both with at least two labels: a proxy cannot tell such
    images apart. z = 1 - 2 d / K, with d a distance that M codes of K bits can all keep from each
    other. The code is sgn(u).

    What differs from the authors' code:

    * d is the Gilbert-Varshamov distance, computed; theirs is read from a table of linear codes.
    * The proxies share the learning rate of the head; theirs have their own, twice as large.
    * A batch without such pairs adds 0 for them.

    Args:
        bits: K.
        classes: M.
        pairs: beta, 0.5 in the authors' code.
    """

    info = MethodInfo(
        name="hyp2",
        title="HyP² Loss: Beyond Hypersphere Metric Space for Multi-label Image Retrieval",
        venue="ACM MM",
        year=2022,
        url="https://arxiv.org/abs/2208.06866",
        supervision="pairs and classes",
    )

    pairs: Annotated[float, Range(least=0), Tuned(0.05, 5.0, "log")] = 0.5

    def __post_init__(self) -> None:
        super().__post_init__()
        self.proxies = nn.Parameter(torch.empty(self.classes, self.bits))
        nn.init.kaiming_normal_(self.proxies, mode="fan_out")
        self._threshold = 1.0 - 2.0 * promised_distance(self.classes, self.bits) / self.bits
        self._drawn = False

    def start(self, train: TrainingSet) -> None:
        """Draw the proxies with the training's seed, in the first stage only."""
        if not self._drawn:
            nn.init.kaiming_normal_(self.proxies, mode="fan_out")
            self._drawn = True

    def loss(self, outputs: Tensor, batch: Batch) -> dict[str, Tensor]:
        """Return the proxy terms and the term of the pairs on one batch."""
        directions = F.normalize(outputs.float(), eps=1e-6)
        labels = batch.labels.float()
        cosines = directions @ F.normalize(self.proxies, eps=1e-6).T
        attract = _mean_where(1.0 - cosines, labels > 0)
        repel = _mean_where(F.relu(cosines - self._threshold), labels <= 0)
        several = labels.sum(1) > 1
        apart = (labels @ labels.T <= 0) & several[:, None] & several
        pairs = _mean_where(F.relu(directions @ directions.T - self._threshold), apart)
        loss = attract + repel + self.pairs * pairs
        return {"loss": loss, "attract": attract, "repel": repel, "pairs": pairs}


def _mean_where(values: Tensor, where: Tensor) -> Tensor:
    """Return the mean of the values at some places; 0 where there are none."""
    return torch.where(where, values, 0.0).sum() / where.sum().clamp_min(1)
