"""Simultaneous Feature Learning and Hash Coding (Lai, Pan, Liu, Yan, CVPR 2015)."""

from typing import Annotated

import torch
import torch.nn.functional as F
from torch import Tensor

from fisherhash.methods._options import NotNegative, PositiveInt, Range, Tuned
from fisherhash.methods._triplets import LIMIT, Triplets, squared_distances
from fisherhash.methods.base import Batch, HashMethod, MethodInfo, register
from fisherhash.model.heads import Head, SlicedHead

# f lies in [0, 1] and a sigmoid's slope is at most 1/4: gradients are about a tenth of those of
# methods that work on the logits themselves.
LOSS_SCALE = 10.0


@register
class NINH(HashMethod):
    """Network in Network Hashing (also DNNH): divide and encode, and a triplet hinge.

    A layer of 50 K units is cut into K disjoint slices of 50; each slice yields one logit u_k, then
    s_k = sigmoid(u_k), then the piece-wise threshold

        f_k = 0 if s_k < 0.5 - eps,   1 if s_k > 0.5 + eps,   s_k between.

    With f(q), f(p), f(n) in [0, 1]^K of a triplet (q is similar to p and not to n) the paper sums

        max(0, 1 + ||f(q) - f(p)||^2 - ||f(q) - f(n)||^2),

    the relaxation of "farther by at least one bit". The code of an image is f > 0.5, i.e. u > 0.

    How we read the paper, and what differs:

    * The sliced layer reads the backbone's features: a linear layer of 50 K units with ReLU
      replaces the last convolution of the paper's network.
    * Triplets are those of the batch, at most ``triplets`` per step by the rule of
      ``methods/_triplets.py``; a query is never its own positive. The sum becomes a mean over them.
    * Outside the threshold's band the gradient is zero, and a bit that is decided wrongly is stuck:
      a small eps stops the learning. The paper does not state its eps; ours is wide.
    * The mean is multiplied by 10, so that one learning rate suits all methods: f lies in [0, 1]
      and the sigmoid is flat, so its gradients are about ten times smaller than others'.
    * A batch without triplets (one class, one image) has loss 0 and zero gradient.

    Args:
        bits: K.
        classes: M.
        margin: In bits; the paper's 1.
        threshold: eps, half the width of the band in which s passes unchanged; 0.5 switches the
            threshold off. Our choice; the paper states none.
        width: Units per slice; the paper's 50.
        triplets: The most triplets per step; our choice.
    """

    info = MethodInfo(
        name="ninh",
        title="Simultaneous Feature Learning and Hash Coding with Deep Neural Networks",
        venue="CVPR",
        year=2015,
        url="https://arxiv.org/abs/1504.03410",
        supervision="triplets",
    )

    margin: Annotated[NotNegative, Tuned(0.2, 8.0, "log")] = 1.0
    threshold: Annotated[float, Range(above=0, most=0.5), Tuned(0.1, 0.5)] = 0.4
    width: Annotated[PositiveInt, Tuned(12, 160, "log")] = 50
    triplets: PositiveInt = LIMIT

    def head(self, in_features: int) -> Head:
        """Return a head that divides and encodes."""
        return SlicedHead(in_features, self.bits, self.width)

    def relaxed(self, outputs: Tensor) -> Tensor:
        """Return f in [0, 1] of logits (n, bits): sigmoid, then the piece-wise threshold."""
        s = torch.sigmoid(outputs.float())
        decided = (s - 0.5).abs() > self.threshold
        return torch.where(decided, (s > 0.5).to(s), s)

    def loss(self, outputs: Tensor, batch: Batch) -> dict[str, Tensor]:
        """Return the mean hinge of the batch's triplets, scaled."""
        chosen = Triplets.of_labels(batch.labels, limit=self.triplets)
        gap = chosen.gap(squared_distances(self.relaxed(outputs)))
        hinge = chosen.mean(F.relu(self.margin + gap))
        return {"triplets": hinge, "loss": LOSS_SCALE * hinge}
