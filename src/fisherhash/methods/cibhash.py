"""Contrastive information bottleneck hashing (CIBHash; Qiu et al., IJCAI 2021)."""

from typing import Annotated

import torch
import torch.nn.functional as F
from torch import Tensor

from fisherhash.data.augment import Strength
from fisherhash.methods.base import Batch, HashMethod, MethodInfo, register, sign
from fisherhash.system.options import Range, Tuned

VIEW = Strength(
    smallest=0.5, jitter=(0.4, 0.4, 0.4, 0.1), jittered=0.7, grey=0.2, blur=0.5, masked=0.3
)


@register
class CIBHash(HashMethod):
    """CIBHash: two views of an image get similar codes, and views of other images different ones.

    It uses no labels. With p = sigmoid(u) of the 2 n outputs of two views of n images, and
    b = sgn(p - 1/2), whose gradient is passed to p unchanged, it minimises

        - (1 / 2n) sum_i log( exp(cos(b_i, b_i') / tau) / sum_(j != i) exp(cos(b_i, b_j) / tau) )
        + beta * (1 / 2n) sum_i KL(p_i || p_i').

    i' is the other view of the image of i, and j runs over all other 2 n - 1 views. KL is the sum
    over the bits of the divergence between two Bernoulli distributions; its second argument is a
    constant. The code is sgn(u).

    What differs from the paper and the authors' code:

    * b is the sign, as in the authors' code; in the paper it is drawn with the probabilities p.
    * The head is linear, as for the other methods here; theirs is a layer of 1024 units more.
    * The loss is multiplied by K. The gradient of a cosine shrinks with K, unlike that of the
      other methods here; with the factor one learning rate suits all.
    * Crops are square, the hue turns around the axis of grey, and half of the views are blurred,
      a share that we chose.
    * On frozen features a view is not an augmented image: 30 % of the features, drawn for each
      view, are replaced by their means. The authors' network drops features as well.

    Args:
        bits: K.
        classes: Not used; 0 for data without labels.
        temperature: tau, 0.3 in the paper.
        agreement: beta, 0.001 in the paper.
    """

    info = MethodInfo(
        name="cibhash",
        title="Unsupervised Hashing with Contrastive Information Bottleneck",
        venue="IJCAI",
        year=2021,
        url="https://arxiv.org/abs/2105.06138",
        supervision="none",
    )

    views = 2
    strengths = (VIEW, VIEW)

    temperature: Annotated[float, Range(above=0), Tuned(0.1, 1.0, "log")] = 0.3
    agreement: Annotated[float, Range(least=0), Tuned(1e-5, 1e-1, "log")] = 0.001

    def loss(self, outputs: Tensor, batch: Batch) -> dict[str, Tensor]:
        """Return the contrastive loss of the codes of two views, plus their divergence."""
        outputs = outputs.float()
        images = len(outputs) // 2
        chances = outputs.sigmoid()
        # The sign forward, the gradient of p backward.
        codes = sign(outputs) + chances - chances.detach()
        directions = F.normalize(codes, dim=1)
        rows = torch.arange(2 * images, device=outputs.device)
        scores = directions @ directions.T / self.temperature
        scores = scores.masked_fill(rows[:, None] == rows, -torch.inf)
        contrast = F.cross_entropy(scores, (rows + images) % (2 * images))
        agreement = bernoulli_divergence(outputs, outputs.detach().roll(images, 0)).mean()
        loss = self.bits * (contrast + self.agreement * agreement)
        return {"loss": loss, "contrast": contrast, "agreement": agreement}


def bernoulli_divergence(first: Tensor, second: Tensor) -> Tensor:
    """Return KL(p || q) (n,), summed over bits, from the logits (n, bits) of p and of q.

    >>> bernoulli_divergence(torch.zeros(1, 2), torch.zeros(1, 2)).tolist()
    [0.0]
    """
    return (first.sigmoid() * (first - second) + F.logsigmoid(-first) - F.logsigmoid(-second)).sum(
        1
    )
