"""The honest trivial baseline: a plain classifier, each class a fixed code."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from fisherhash.methods._codebooks import far_apart
from fisherhash.methods._pairs import class_proportions
from fisherhash.methods.base import Batch, HashMethod, MethodInfo, register
from fisherhash.model.heads import ArgmaxHead, Head


@register
class Classifier(HashMethod):
    """A plain classifier; the code of an image is the fixed code of the class it is taken for.

    With f_i the features of image i and a linear classifier (W, v) it minimises

        (1/N) sum_i CE(W f_i + v, y_i)

    and encodes the image as o_c with c = argmax_c (W f_i + v)_c, o_c far-apart codes. Nothing of an
    image but its class survives, and images of a class not trained on land on other classes' codes;
    yet by the usual measure, where similar means same class, this is hard to beat. A hashing method
    that does not beat it has learned to classify and no more.

    Where it comes from: Sablayrolles, Douze, Usunier and Jégou show that a trivial solution, codes
    that hold the output of a classifier, beats published supervised hashing in the usual protocol.

    How it differs from the paper:

    * They point out how few bits the number of a class takes; ours has K bits as every method does,
      and spends them on codes that are far apart.
    * The classifier is one linear layer on the features, trained with the one loop.

    Not defined for images with several labels: an image has one likeliest class.

    Args:
        bits: K.
        classes: M.
        codebook_seed: which codes.
    """

    info = MethodInfo(
        name="classifier",
        title="How should we evaluate supervised hashing?",
        venue="ICASSP",
        year=2017,
        url="https://arxiv.org/abs/1609.06753",
        supervision="classes",
        multilabel=False,
        fit="gradient",
    )

    def __init__(self, *, bits: int, classes: int, codebook_seed: int = 0) -> None:
        super().__init__(bits=bits, classes=classes)
        self.codebook_seed = codebook_seed

    def head(self, in_features: int) -> Head:
        """A classifier that knows the code of every class."""
        head = ArgmaxHead(in_features, self.bits, self.classes)
        head.codes.copy_(far_apart(self.classes, self.bits, seed=self.codebook_seed))
        return head

    def loss(self, outputs: Tensor, batch: Batch) -> dict[str, Tensor]:
        """Cross-entropy of the scores (b, classes)."""
        labels = class_proportions(batch.labels.float())
        return {"loss": F.cross_entropy(outputs.float(), labels)}
