"""Simultaneous Feature Learning and Hash Coding (Lai, Pan, Liu, Yan, CVPR 2015)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from fisherhash.errors import UsageError
from fisherhash.methods._pairs import BatchPairs, check_not_negative, check_positive
from fisherhash.methods._triplets import LIMIT, Triplets, squared_distances
from fisherhash.methods.base import Batch, HashMethod, MethodInfo, register
from fisherhash.model.heads import Head, SlicedHead

# f lies in [0, 1] and a sigmoid's slope is at most 1/4: gradients are about a tenth of those of
# methods that work on the logits themselves.
RATE = 10.0


@register
class NINH(HashMethod):
    """Network in Network Hashing (also DNNH): divide and encode, and a triplet hinge.

    A layer of 50 K units is cut into K disjoint slices of 50; each slice gives one logit u_k, then
    s_k = sigmoid(u_k), then the piece-wise threshold

        f_k = 0 if s_k < 0.5 - eps,   1 if s_k > 0.5 + eps,   s_k between.

    With f(q), f(p), f(n) in [0, 1]^K of a triplet (q is similar to p and not to n) the paper sums

        max(0, 1 + ||f(q) - f(p)||^2 - ||f(q) - f(n)||^2),

    the relaxation of "farther by at least one bit". The code of an image is f > 0.5, i.e. u > 0.

    How the paper is read, and what differs from it:

    * The sliced layer stands on the backbone's features: a linear layer of 50 K units with ReLU
      takes the place of the paper's last convolution of its own network.
    * Triplets are those of the batch, at most ``triplets`` a step by the rule of
      ``methods/_triplets.py``; a query is never its own positive. The sum becomes a mean over them.
    * Outside the threshold's band the gradient is zero, and a bit that is wrong and decided is
      stuck: a small eps stops the learning. The paper does not say its eps; ours is wide.
    * The mean is multiplied by 10, so that one learning rate serves all methods: f lies in [0, 1]
      and the sigmoid is flat, which makes gradients about ten times smaller than others'.
    * A batch without triplets (one class, one image) has loss 0 and no gradient.

    Args:
        bits: K.
        classes: M.
        margin: in bits; the paper's 1.
        threshold: eps, half the width of the band in which s passes unchanged; 0.5 switches the
            threshold off. Ours, the paper names none.
        width: units of a slice; the paper's 50.
        triplets: the most triplets a step takes; ours.
    """

    info = MethodInfo(
        name="ninh",
        title="Simultaneous Feature Learning and Hash Coding with Deep Neural Networks",
        venue="CVPR",
        year=2015,
        url="https://arxiv.org/abs/1504.03410",
        supervision="triplets",
        multilabel=True,
        fit="gradient",
    )

    def __init__(
        self,
        *,
        bits: int,
        classes: int,
        margin: float = 1.0,
        threshold: float = 0.4,
        width: int = 50,
        triplets: int = LIMIT,
    ) -> None:
        super().__init__(bits=bits, classes=classes)
        check_not_negative("ninh", margin=margin)
        check_positive("ninh", width=width, triplets=triplets)
        if not 0 < threshold <= 0.5:
            raise UsageError(f"ninh: threshold must lie in (0, 0.5], got {threshold}")
        self.margin = margin
        self.threshold = threshold
        self.width = width
        self.triplets = triplets

    def head(self, in_features: int) -> Head:
        """Divide and encode."""
        return SlicedHead(in_features, self.bits, self.width)

    def relaxed(self, outputs: Tensor) -> Tensor:
        """Logits (n, bits) to f in [0, 1]: sigmoid, then the piece-wise threshold."""
        s = torch.sigmoid(outputs.float())
        decided = (s - 0.5).abs() > self.threshold
        return torch.where(decided, (s > 0.5).to(s), s)

    def loss(self, outputs: Tensor, batch: Batch) -> dict[str, Tensor]:
        """The mean hinge of the batch's triplets, at ten times the learning rate."""
        pairs = BatchPairs.of(batch.labels)
        chosen = Triplets.of(pairs.similar, pairs.dissimilar, limit=self.triplets)
        gap = chosen.gap(squared_distances(self.relaxed(outputs)))
        hinge = chosen.mean(F.relu(self.margin + gap))
        return {"triplets": hinge, "loss": RATE * hinge}
