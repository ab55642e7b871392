"""Central Similarity Quantization (Yuan et al., CVPR 2020)."""

from typing import Annotated

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fisherhash.methods._codebooks import far_apart
from fisherhash.methods._options import NotNegative, Tuned
from fisherhash.methods.base import Batch, HashMethod, MethodInfo, register


@register
class CSQ(HashMethod):
    """Central Similarity Quantization: every image is pulled to its class's fixed, distant code.

    With u_i the K logits of image i, h_i = tanh(u_i), and c_i in {-1, 1}^K the centre of its class,
    a row of a Hadamard matrix or of its negative, the authors' code minimises

        (1/NK) sum_ik [ BCE((h_ik + 1)/2, (c_ik + 1)/2) + lambda * (|h_ik| - 1)^2 ].

    The centre of an image with several labels is the sign of the sum of its classes' centres; bits
    on which they split evenly come from one random vector, drawn once. The code is sgn(u).

    What differs from the paper and the authors' code:

    * The mean over bits is a sum here; the mean over images stays. The scale of a loss does not
      matter to the authors' optimiser, Adam; with SGD a bit would learn K times slower. Our loss is
      K times theirs, with the same lambda.
    * BCE((tanh u + 1)/2, …) is computed as softplus(-2 c u), which it equals, without overflow.
    * The quantisation term is the square, as in their code; the paper prints log cosh.
    * We use Hadamard matrices of every order that Sylvester's and Paley's constructions reach, not
      only powers of two. Elsewhere, and for more than 2 K classes, we search for the largest
      minimum distance instead of drawing random codes with mean distance K / 2.
    * The all-ones row, which is not balanced, is used last.
    * The head is one linear layer, as for every method; theirs has two more layers before it.
    * There is no pair term: its weight is 0 in every command that the authors publish.
    * An image without a label has no centre and adds nothing.

    Args:
        bits: K.
        classes: M.
        quantization: lambda; the authors publish 0.05 for ResNet-50, 0.001 and 0.0001 for AlexNet.
        codebook_seed: Selects the centres and the random vector.
    """

    info = MethodInfo(
        name="csq",
        title="Central Similarity Quantization for Efficient Image and Video Retrieval",
        venue="CVPR",
        year=2020,
        url="https://arxiv.org/abs/1908.00347",
        supervision="classes",
    )

    codebook = "centers"

    quantization: Annotated[NotNegative, Tuned(0.00001, 1.0, "log")] = 0.05
    codebook_seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        self.centers = nn.Buffer(far_apart(self.classes, self.bits, seed=self.codebook_seed))
        drawn = np.random.default_rng([self.codebook_seed, self.bits]).integers(0, 2, self.bits)
        self.tie = nn.Buffer(torch.from_numpy(2.0 * drawn - 1.0).float())

    def center_of(self, labels: Tensor) -> Tensor:
        """Return the centres in {-1, 1} (n, bits) of images with labels (n, classes)."""
        # Whole numbers, so an even split is exactly 0.
        votes = labels.float() @ self.centers
        return torch.where(votes == 0, self.tie, votes.sign())

    def class_centers(self) -> Tensor:
        """Return the fixed centres."""
        return self.centers

    def loss(self, outputs: Tensor, batch: Batch) -> dict[str, Tensor]:
        """Return the binary cross-entropy to the centre, plus the distance of |tanh u| from 1."""
        u = outputs.float()
        weight = (batch.labels.sum(1) > 0).float()
        center = (F.softplus(-2.0 * self.center_of(batch.labels) * u).sum(1) * weight).mean()
        quantization = ((u.tanh().abs() - 1.0).square().sum(1) * weight).mean()
        loss = center + self.quantization * quantization
        return {"loss": loss, "center": center, "quantization": quantization}
