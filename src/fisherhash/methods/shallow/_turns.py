"""What supervised discrete hashing and its fast version share: their options and their turns."""

from typing import Annotated

import torch
from torch import Tensor

from fisherhash.methods._options import PositiveInt
from fisherhash.methods.base import FeatureMethod, sign
from fisherhash.methods.shallow._affinity import needed
from fisherhash.methods.shallow._kernels import KernelMap, Ridge
from fisherhash.model.heads import Head
from fisherhash.system.options import Range, Tuned


class DiscreteTurns(FeatureMethod):
    """Codes that fit the labels, and a kernel regression that predicts them, by turns.

    A subclass defines the code step.
    """

    anchors: PositiveInt = 1000
    width: Annotated[float, Range(above=0), Tuned(0.25, 4.0, "log")] = 1.0
    ridge: Annotated[float, Range(above=0), Tuned(0.01, 100.0, "log")] = 1.0
    attraction: Annotated[float, Range(least=0), Tuned(1e-7, 1e-2, "log")] = 1e-5
    turns: PositiveInt = 5

    def code_step(self, codes: Tensor, labels: Tensor, predicted: Tensor) -> Tensor:
        """Return the new codes (N, K).

        Args:
            codes: (N, K) the codes so far.
            labels: (N, M).
            predicted: (N, K) P^T phi(X).
        """
        raise NotImplementedError

    def solve(self, features: Tensor, labels: Tensor | None, *, seed: int) -> Head:
        """Return a head fitted on features (N, d) and labels (N, classes)."""
        name = self.info.name
        labels = needed(labels, name).double()
        generator = torch.Generator().manual_seed(seed)
        kernel = KernelMap(
            features, anchors=self.anchors, width=self.width, name=name, generator=generator
        )
        regression = Ridge(kernel, 1e-3)
        codes = sign(torch.randn(len(features), self.bits, generator=generator)).to(labels)
        weight, offset = regression.fit(codes)
        for _ in range(self.turns):
            before = codes
            codes = self.code_step(codes, labels, kernel.apply(weight) + offset)
            weight, offset = regression.fit(codes)
            if torch.equal(before, codes):
                break
        return kernel.head(weight, offset)
