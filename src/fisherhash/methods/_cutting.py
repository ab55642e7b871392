"""Codes cut from trained outputs so that Hamming distances follow the outputs' similarity.

When training ends, the outputs of a class lie in one point, and their signs reveal only the class.
An image between two classes, like many that were not trained on, gets the code of one of them. This
module finds W and t such that the codes sgn(W u + t) of outputs u *and of points between them* are
as similar as the outputs themselves: with h = tanh(beta (W u + t)), it minimises

    sum_ij (1 + 2 max(0, s_ij) / a) (h_i . h_j / K - s_ij)^2,    s_ij = cos(u_i, u_j),

where a is the mean of max(0, s_ij), so that near pairs, which are rarer the more classes there are,
get two thirds of the weight. It runs over batches in which every other point lies at random between
two training outputs, while beta rises from 2 to 8. Labels are used only for the start: the
least-squares map of the outputs to a code book of the classes.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

STEPS = 600
BATCH = 512
CUT_RATE = 0.01
BETWEEN = 0.5
SOFTEST, HARDEST = 2.0, 8.0
NEARNESS = 2.0
RIDGE = 1e-3


def cut(outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Return W (bits, width) and t (bits,) for training outputs.

    Args:
        outputs: u, (N, width).
        targets: (N, bits) the codes of the images' classes, which W and t start from.
    """
    outputs = outputs.detach().float()
    mixing, offsets = least_squares(outputs, targets)
    generator = torch.Generator().manual_seed(0)
    shape = (STEPS, BATCH)
    one = torch.randint(len(outputs), shape, generator=generator).to(outputs.device)
    other = torch.randint(len(outputs), shape, generator=generator).to(outputs.device)
    share = torch.rand(shape, generator=generator)
    alone = torch.rand(shape, generator=generator) >= BETWEEN
    share = torch.where(alone, 1.0, share).to(outputs)[:, :, None]
    with torch.enable_grad():
        mixing, offsets = mixing.clone().requires_grad_(), offsets.clone().requires_grad_()
        optimizer = torch.optim.Adam([mixing, offsets], lr=CUT_RATE)
        for step in range(STEPS):
            done = step / STEPS
            between = share[step]
            points = between * outputs[one[step]] + (1.0 - between) * outputs[other[step]]
            sharpness = SOFTEST + (HARDEST - SOFTEST) * done
            loss = unlikeness(points, points @ mixing.T + offsets, sharpness)
            optimizer.zero_grad()
            loss.backward()
            optimizer.param_groups[0]["lr"] = CUT_RATE * (1.0 - done)
            optimizer.step()
    return mixing.detach(), offsets.detach()


def unlikeness(points: Tensor, logits: Tensor, sharpness: float) -> Tensor:
    """Return how far the soft codes' inner products are from the points' cosines, weighted."""
    directions = F.normalize(points, eps=1e-6)
    wanted = directions @ directions.T
    codes = torch.tanh(sharpness * logits)
    found = codes @ codes.T / logits.shape[1]
    near = wanted.clamp_min(0.0)
    weights = 1.0 + NEARNESS * near / near.mean().clamp_min(1e-6)
    return (weights * (found - wanted).square()).mean() / (1.0 + NEARNESS)


def least_squares(outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Return the affine map of outputs (N, width) to targets (N, bits) of least squared error."""
    inputs = torch.cat([outputs, torch.ones_like(outputs[:, :1])], dim=1).double()
    gram = inputs.T @ inputs
    gram.diagonal().add_(RIDGE * len(inputs))
    found = torch.linalg.solve(gram, inputs.T @ targets.double()).to(outputs)
    return found[:-1].T.contiguous(), found[-1]
