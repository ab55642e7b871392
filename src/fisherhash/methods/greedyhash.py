"""Greedy Hash (Su, Zhang, Han, Tian, NeurIPS 2018)."""

from typing import Annotated

import torch.nn.functional as F
from torch import Tensor, nn

from fisherhash.methods._options import NotNegative, Tuned
from fisherhash.methods._pairs import class_proportions
from fisherhash.methods.base import Batch, HashMethod, MethodInfo, TrainingSet, register, sign


@register
class GreedyHash(HashMethod):
    """Greedy Hash: a classifier on the code itself, with the gradient passed through sgn.

    With h_i the K logits of image i, its code b_i = sgn(h_i) and a linear classifier W (M x K,
    without bias) on the code, the paper minimises

        (1/N) sum_i [ CE(W b_i, y_i) + alpha * (1/K) sum_k | |h_ik| - 1 |^3 ].

    Backward, sgn counts as the identity: the gradient of b_i becomes that of h_i, unclipped. The
    cubic term keeps h near -1 and 1, where that is nearly true. The code of an image is sgn(h).

    What differs from the paper and the authors' code:

    * With several labels, the cross-entropy takes y_i = 1/m on each of m labels. The paper has one
      label per image; others take the first of several, or one binary cross-entropy per class.
    * sgn(0) is -1, the bit of a logit that is not greater than 0; theirs is 0.
    * W is trained with the head's learning rate, schedule and weight decay.
    * The unsupervised variant, without classes, is left out.

    Args:
        bits: K.
        classes: M.
        quantization: alpha; the authors' code has 0.1 for CIFAR-10 and 1 for ImageNet.
    """

    info = MethodInfo(
        name="greedyhash",
        title="Greedy Hash: Towards Fast Optimization for Accurate Hash Coding in CNN",
        venue="NeurIPS",
        year=2018,
        url="https://github.com/ssppp/GreedyHash",
        supervision="classes",
    )

    quantization: Annotated[NotNegative, Tuned(0.001, 10.0, "log")] = 0.1

    def __post_init__(self) -> None:
        super().__post_init__()
        self.classifier = nn.Linear(self.bits, self.classes, bias=False)

    def start(self, train: TrainingSet) -> None:
        """Draw the classifier's weights with the training's seed."""
        self.classifier.reset_parameters()

    def loss(self, outputs: Tensor, batch: Batch) -> dict[str, Tensor]:
        """Return the cross-entropy of the code's classification, plus the cubic term."""
        h = outputs.float()
        scores = self.classifier(straight_through(h))
        classification = F.cross_entropy(scores, class_proportions(batch.labels.float()))
        quantization = (h.abs() - 1.0).abs().pow(3).mean()
        loss = classification + self.quantization * quantization
        return {"loss": loss, "classification": classification, "quantization": quantization}


def straight_through(values: Tensor) -> Tensor:
    """Return sgn(values), with the gradient of the identity."""
    return sign(values.detach()) + (values - values.detach())
