"""Affinity-based binary hashing with auxiliary coordinates (Raziperchikolaei et al., NIPS 2016)."""

from typing import Annotated

import torch
from torch import Tensor

from fisherhash.methods._options import PositiveInt
from fisherhash.methods.base import FeatureMethod, MethodInfo, register, sign
from fisherhash.methods.shallow._affinity import drawn_pairs, improved_bit, needed, residue
from fisherhash.methods.shallow._features import principal
from fisherhash.methods.shallow._kernels import centred_head
from fisherhash.model.heads import Head
from fisherhash.system.options import Range, Tuned


@register
class MACHash(FeatureMethod):
    """Codes and hash functions fitted to each other, with a penalty that grows.

    min ||Z Z^T - K S||_F^2 + mu ||Z - h(X)||^2 over binary Z and linear h, for mu from small to
    large, by turns: Z bit by bit, each a binary quadratic problem; h by one linear SVM per bit. It
    ends once Z = h(X).

    What differs from the paper: the quadratic problem starts from the current bit and takes the
    best single flips; the SVMs have the squared hinge and are fitted together by L-BFGS; x is
    projected to principal components of variance 1; mu is in units of K n. No code of the authors
    could be had to compare with.

    Args:
        bits: K.
        classes: M.
        sample: n; drawn where there are more images.
        penalties: How many values mu takes, each twice the one before.
        first_penalty: The first mu.
        slack: C of the SVMs, per image.
        dimensions: The most principal components.
    """

    info = MethodInfo(
        name="machash",
        title="Optimizing Affinity-Based Binary Hashing Using Auxiliary Coordinates",
        venue="NIPS",
        year=2016,
        url="https://arxiv.org/abs/1501.05352",
        supervision="pairs",
    )

    sample: PositiveInt = 2000
    penalties: PositiveInt = 8
    first_penalty: Annotated[float, Range(above=0), Tuned(0.001, 0.1, "log")] = 0.01
    slack: Annotated[float, Range(above=0), Tuned(0.01, 10.0, "log")] = 0.3
    dimensions: PositiveInt = 256

    def solve(self, features: Tensor, labels: Tensor | None, *, seed: int) -> Head:
        """Return a head fitted on features (N, d) and labels (N, classes)."""
        labels = needed(labels, "machash")
        generator = torch.Generator().manual_seed(seed)
        rows, S = drawn_pairs(labels, self.sample, generator)
        count = min(self.dimensions, features.shape[1], len(features) - 1)
        found = principal(features, count, name="machash")
        scale = found.whitening
        inputs = found.project(features[rows]) * scale
        codes = sign(torch.randn(len(rows), self.bits, generator=generator)).to(S)
        codes = self.code_step(codes, S, None, 0.0)
        weight, offset = linear_machines(inputs, codes, self.slack)
        for turn in range(self.penalties):
            predicted = sign(inputs @ weight + offset)
            if torch.equal(predicted, codes):
                break
            penalty = self.first_penalty * 2.0**turn * self.bits * len(rows)
            codes = self.code_step(codes, S, predicted, penalty)
            weight, offset = linear_machines(inputs, codes, self.slack)
        matrix = (found.directions * scale) @ weight
        return centred_head(matrix, found.mean, offset)

    def code_step(
        self, codes: Tensor, S: Tensor, predicted: Tensor | None, penalty: float
    ) -> Tensor:
        """Return the codes (n, K) after one pass over the bits; the objective never rises."""
        codes = codes.clone()
        left = residue(S, codes, self.bits)
        for bit in range(self.bits):
            linear = None if predicted is None else penalty / 2.0 * predicted[:, bit]
            codes[:, bit] = improved_bit(left, codes[:, bit], linear)
        return codes


def linear_machines(inputs: Tensor, codes: Tensor, slack: float) -> tuple[Tensor, Tensor]:
    """Return W (d, K) and offsets (K,) of one linear SVM per bit, with the squared hinge.

    Args:
        inputs: (n, d).
        codes: (n, K) what to predict, -1 and 1.
        slack: C: weight of the mean squared hinge against ||w||^2 / (2 d).
    """
    width = inputs.shape[1]
    parameters = torch.zeros(width + 1, codes.shape[1], dtype=inputs.dtype, device=inputs.device)
    parameters.requires_grad_()
    search = torch.optim.LBFGS([parameters], max_iter=60, line_search_fn="strong_wolfe")

    def objective() -> float:
        with torch.enable_grad():
            search.zero_grad()
            margin = codes * (inputs @ parameters[:-1] + parameters[-1])
            hinge = (1.0 - margin).clamp_min(0.0).square().mean(0).sum()
            loss = slack * hinge + parameters[:-1].square().sum() / (2.0 * width)
            loss.backward()
        return float(loss.detach())

    search.step(objective)
    found = parameters.detach()
    return found[:-1], found[-1]
