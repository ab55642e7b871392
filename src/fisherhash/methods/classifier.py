"""The trivial baseline: a plain classifier with a fixed code per class."""

import torch.nn.functional as F
from torch import Tensor

from fisherhash.methods._codebooks import far_apart
from fisherhash.methods._pairs import class_proportions
from fisherhash.methods.base import Batch, HashMethod, MethodInfo, register
from fisherhash.model.heads import ArgmaxHead, Head


@register
class Classifier(HashMethod):
    """A plain classifier; the code of an image is the fixed code of its predicted class.

    With f_i the features of image i and a linear classifier (W, v) it minimises

        (1/N) sum_i CE(W f_i + v, y_i)

    and encodes the image as o_c with c = argmax_c (W f_i + v)_c, o_c far-apart codes. A code holds
    nothing but the class, and images of a class that was not trained on get other classes' codes.
    Yet by the usual measure, where similar means same class, this is hard to beat. A hashing method
    that does not beat it has only learned to classify.

    Source: Sablayrolles, Douze, Usunier and Jégou show that a trivial solution, codes that hold the
    output of a classifier, beats published supervised hashing in the usual protocol.

    What differs from the paper:

    * They point out how few bits the number of a class takes. Ours has K bits, like every method,
      and uses them for codes that are far apart.
    * The classifier is one linear layer on the features, trained by the loop of all methods.

    It is not defined for images with several labels, because it predicts one class per image.

    Args:
        bits: K.
        classes: M.
        codebook_seed: Selects the codes.
    """

    info = MethodInfo(
        name="classifier",
        title="How should we evaluate supervised hashing?",
        venue="ICASSP",
        year=2017,
        url="https://arxiv.org/abs/1609.06753",
        supervision="classes",
        multilabel=False,
    )

    codebook_seed: int = 0

    @property
    def output_width(self) -> int:
        """The head's outputs are one score per class."""
        return self.classes

    def head(self, in_features: int) -> Head:
        """Return a classifier that stores the code of every class."""
        head = ArgmaxHead(in_features, self.bits, self.classes)
        head.codes.copy_(far_apart(self.classes, self.bits, seed=self.codebook_seed))
        return head

    def loss(self, outputs: Tensor, batch: Batch) -> dict[str, Tensor]:
        """Return the cross-entropy of the scores (b, classes)."""
        labels = class_proportions(batch.labels.float())
        return {"loss": F.cross_entropy(outputs.float(), labels)}
