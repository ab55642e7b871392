"""Fast supervised discrete hashing (Gui, Liu, Sun, Tao and Tan, TPAMI 2018)."""

from typing import Annotated

import torch
from torch import Tensor

from fisherhash.methods._options import PositiveInt
from fisherhash.methods.base import FeatureMethod, MethodInfo, register, sign
from fisherhash.methods.shallow._affinity import needed
from fisherhash.methods.shallow._kernels import KernelMap, Ridge
from fisherhash.model.heads import Head
from fisherhash.system.options import Range, Tuned


@register
class FSDH(FeatureMethod):
    """SDH turned round: labels are regressed to codes, so that the code step has a closed form.

    min ||B - W^T Y||^2 + lambda ||W||^2 + nu ||B - P^T phi(X)||^2 over binary B, by turns:
    W = (Y Y^T + lambda I)^-1 Y B^T, B = sgn(W^T Y + nu P^T phi(X)), and P by regression.

    What differs from the paper: as in ``sdh``. There is another method of this name (Koutaki et
    al., CVPR 2017); this is the one of TPAMI 2018.

    Args:
        bits: K.
        classes: M.
        anchors: Anchors of the kernel.
        width: Width of the kernel, in units of the median distance to the anchors.
        ridge: lambda.
        attraction: nu.
        turns: Turns of W, B and P.
    """

    info = MethodInfo(
        name="fsdh",
        title="Fast Supervised Discrete Hashing",
        venue="TPAMI",
        year=2018,
        url="https://arxiv.org/abs/1904.03556",
        supervision="classes",
        fit="closed-form",
    )

    anchors: PositiveInt = 1000
    width: Annotated[float, Range(above=0), Tuned(0.25, 4.0, "log")] = 1.0
    ridge: Annotated[float, Range(above=0), Tuned(0.01, 100.0, "log")] = 1.0
    attraction: Annotated[float, Range(least=0), Tuned(1e-7, 1e-2, "log")] = 1e-5
    turns: PositiveInt = 5

    def solve(self, features: Tensor, labels: Tensor | None, *, seed: int) -> Head:
        """Return a head fitted on features (N, d) and labels (N, classes)."""
        labels = needed(labels, "fsdh").double()
        generator = torch.Generator().manual_seed(seed)
        kernel = KernelMap(
            features, anchors=self.anchors, width=self.width, name="fsdh", generator=generator
        )
        regression = Ridge(kernel, 1e-3)
        gram = labels.T @ labels
        gram.diagonal().add_(self.ridge)
        codes = sign(torch.randn(len(features), self.bits, generator=generator)).to(labels)
        weight, offset = regression.fit(codes)
        for _ in range(self.turns):
            before = codes
            W = torch.linalg.solve(gram, labels.T @ codes)
            codes = sign(labels @ W + self.attraction * (kernel.apply(weight) + offset))
            weight, offset = regression.fit(codes)
            if torch.equal(before, codes):
                break
        return kernel.head(weight, offset)
