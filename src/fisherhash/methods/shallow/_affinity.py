"""Codes that follow a matrix of similarities, bit by bit: what supervised shallow methods share."""

from __future__ import annotations

import torch
from torch import Tensor

from fisherhash.errors import UsageError
from fisherhash.methods.shallow._features import draw_rows


def needed(labels: Tensor | None, name: str) -> Tensor:
    """Return the labels; a method that learns from them cannot do without."""
    if labels is None:
        raise UsageError(f"{name} learns from labels, and there are none; take itq instead")
    return labels


def similarity(labels: Tensor) -> Tensor:
    """Return S (n, n): 1 where two images share a label, else -1; an image is similar to itself."""
    shared = labels.double() @ labels.double().T > 0
    shared.fill_diagonal_(True)
    return torch.where(shared, 1.0, -1.0).double()


def drawn_pairs(labels: Tensor, wanted: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Return positions (n,) of at most ``wanted`` images, and their similarities S (n, n)."""
    rows = draw_rows(len(labels), wanted, generator).to(labels.device)
    return rows, similarity(labels[rows])


def residue(S: Tensor, codes: Tensor, bits: int, *, without: int | None = None) -> Tensor:
    """Return K S - B B^T (n, n): what the other bits leave to one of K bits.

    Args:
        S: (n, n) similarities, -1 and 1.
        codes: (n, k) the bits found so far, -1 and 1.
        bits: K.
        without: A column of ``codes`` to leave out.
    """
    if without is not None:
        codes = torch.cat([codes[:, :without], codes[:, without + 1 :]], dim=1)
    return bits * S - codes @ codes.T


def best_flips(form: Tensor, bit: Tensor, linear: Tensor | None = None) -> Tensor:
    """Return a bit (n,) that no single flip improves, from the one given.

    It maximises h^T Q h + 2 p^T h over h in {-1, 1}^n. The best single flip is taken until none
    improves, so the objective never falls.

    Args:
        form: (n, n) Q, symmetric.
        bit: (n,) where to start; not changed.
        linear: (n,) p; 0 where it is missing.
    """
    bit = bit.clone()
    diagonal = torch.diagonal(form)
    pull = form @ bit + (0.0 if linear is None else linear)
    for _ in range(20 * len(bit)):
        # A flip of h_i changes the objective by -4 h_i (pull_i - Q_ii h_i).
        gain = -bit * (pull - diagonal * bit)
        best = int(gain.argmax())
        if gain[best] <= 1e-9:
            break
        pull -= 2.0 * bit[best] * form[:, best]
        bit[best] = -bit[best]
    return bit


def spectral_bit(form: Tensor) -> Tensor:
    """Return the signs (n,) of the top eigenvector of a symmetric form (n, n)."""
    vector = torch.ones(len(form), dtype=form.dtype, device=form.device)
    vector[1::2] = -1.0
    # A shift makes the largest eigenvalue the one of largest modulus.
    shift = form.abs().sum(1).max()
    for _ in range(100):
        vector = form @ vector + shift * vector
        vector = vector / vector.norm().clamp_min(1e-300)
    return torch.where(vector > 0, 1.0, -1.0).to(form)
