"""Deep hash distillation (DHD; Jang et al., ECCV 2022)."""

from typing import Annotated

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fisherhash.data.augment import Strength
from fisherhash.methods._options import Positive
from fisherhash.methods._pairs import class_proportions
from fisherhash.methods.base import Batch, HashMethod, MethodInfo, TrainingSet, register
from fisherhash.model.heads import BatchNormHead, Head
from fisherhash.system.options import Range, Tuned

STRONG = Strength(jitter=(0.4, 0.8, 0.8, 0.2), jittered=0.8, grey=0.2, blur=0.5, masked=0.4)
WEAK = Strength(
    crop=0.5, flip=0.25, jitter=STRONG.jitter, jittered=0.4, grey=0.1, blur=0.25, masked=0.0
)


@register
class DHD(HashMethod):
    """DHD: a weakly augmented view learns the classes, a strongly augmented one imitates its code.

    With h = tanh(u), h_w of the weak view and h_s of the strong one, P the learned proxies of the
    classes and y the class proportions, it minimises

        CE(softmax(cos(h_w, P) / tau), y)
        + l1 * mean (1 - cos(h_s, h_w))
        + l2 * mean [ BCE(g+(h_w), t) + BCE(g-(h_w), 1 - t) ].

    h_w is a constant in the second term, so the strong view learns from nothing else. In the third,
    g+(x) = exp(-(x - 1)^2 / (2 s^2)), g-(x) = exp(-(x + 1)^2 / (2 s^2)), and t is 1 where h_w > 0:
    it pulls each output to the nearer of -1 and 1. The code is sgn(u).

    What differs from the authors' code:

    * The head ends in batch normalisation, as the authors later advise; theirs ends in layer
      normalisation.
    * A weak view has half of the strong one's probabilities, theirs for all networks but AlexNet.
    * Crops are square and cover at least half of an image; the hue turns around the axis of grey.
    * The proxies share the learning rate of the head.
    * On frozen features the weak view is the features as they are. In the strong one 40 % of the
      features are replaced by their means.

    Args:
        bits: K.
        classes: M.
        temperature: tau.
        distillation: l1.
        quantization: l2.
        width: s.
    """

    info = MethodInfo(
        name="dhd",
        title="Deep Hash Distillation for Image Retrieval",
        venue="ECCV",
        year=2022,
        url="https://arxiv.org/abs/2112.08816",
        supervision="classes",
    )

    views = 2
    strengths = (WEAK, STRONG)

    temperature: Annotated[float, Range(above=0), Tuned(0.05, 1.0, "log")] = 0.2
    distillation: Annotated[float, Range(least=0), Tuned(0.01, 1.0, "log")] = 0.1
    quantization: Annotated[float, Range(least=0), Tuned(0.01, 1.0, "log")] = 0.1
    width: Positive = 0.5

    def __post_init__(self) -> None:
        super().__post_init__()
        self.proxies = nn.Parameter(torch.empty(self.classes, self.bits))
        nn.init.xavier_uniform_(self.proxies)

    def head(self, in_features: int) -> Head:
        """Return a linear layer with batch normalisation."""
        return BatchNormHead(in_features, self.bits)

    def start(self, train: TrainingSet) -> None:
        """Draw the proxies with the training's seed."""
        nn.init.xavier_uniform_(self.proxies)

    def loss(self, outputs: Tensor, batch: Batch) -> dict[str, Tensor]:
        """Return the proxy, distillation and quantisation terms on one batch."""
        weak, strong = outputs.float().tanh().chunk(2)
        labels = batch.first.labels.float()
        cosines = F.normalize(weak, eps=1e-6) @ F.normalize(self.proxies, eps=1e-6).T
        proxy = F.cross_entropy(cosines / self.temperature, class_proportions(labels))
        distillation = (1.0 - F.cosine_similarity(strong, weak.detach())).mean()
        wanted = (weak > 0).to(weak.dtype)
        upper = torch.exp((weak - 1.0).square() / (-2.0 * self.width**2))
        lower = torch.exp((weak + 1.0).square() / (-2.0 * self.width**2))
        quantization = F.binary_cross_entropy(upper, wanted)
        quantization = quantization + F.binary_cross_entropy(lower, 1.0 - wanted)
        loss = proxy + self.distillation * distillation + self.quantization * quantization
        return {
            "loss": loss,
            "proxy": proxy,
            "distillation": distillation,
            "quantization": quantization,
        }
