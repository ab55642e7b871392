"""Codes that follow a matrix of similarities, bit by bit: what supervised shallow methods share."""

from __future__ import annotations

from typing import Any

import numpy as np
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


def residue(S: Tensor, codes: Tensor, bits: int) -> Tensor:
    """Return K S - B B^T (n, n): what the bits so far leave to the rest of K bits.

    Args:
        S: (n, n) similarities, -1 and 1.
        codes: (n, k) the bits found so far, -1 and 1.
        bits: K.
    """
    return bits * S - codes @ codes.T


def improved_bit(left: Tensor, bit: Tensor, linear: Tensor | None = None) -> Tensor:
    """Return a better bit (n,) in place of one of K; K S - B B^T (n, n) follows, in place.

    Args:
        left: (n, n) :func:`residue` of all bits.
        bit: (n,) one of them.
        linear: (n,) see :func:`best_flips`.
    """
    left.addr_(bit, bit)
    found = best_flips(left, bit, linear)
    left.addr_(found, found, alpha=-1.0)
    return found


def best_flips(form: Tensor, bit: Tensor, linear: Tensor | None = None) -> Tensor:
    """Return a bit (n,) that no single flip improves, from the one given.

    It maximises h^T Q h + 2 p^T h over h in {-1, 1}^n. The best single flip is taken until none
    improves, so the objective never falls.

    Args:
        form: (n, n) Q, symmetric.
        bit: (n,) where to start; not changed.
        linear: (n,) p; 0 where it is missing.
    """
    # Many small steps: numpy takes them several times as fast as torch.
    matrix, own = form.cpu().numpy(), bit.cpu().numpy().copy()
    diagonal = matrix.diagonal()
    pull = matrix @ own if linear is None else matrix @ own + linear.cpu().numpy()
    for _ in range(20 * len(own)):
        # A flip of h_i changes the objective by -4 h_i (pull_i - Q_ii h_i).
        gain = diagonal - own * pull
        best = int(gain.argmax())
        if gain[best] <= 1e-9:
            break
        pull -= 2.0 * own[best] * matrix[best]
        own[best] = -own[best]
    return torch.from_numpy(own).to(form)


def spectral_bit(form: Tensor) -> Tensor:
    """Return the signs (n,) of the top eigenvector of a symmetric form (n, n)."""
    from scipy.sparse.linalg import ArpackError, eigsh

    matrix = form.cpu().numpy()
    start = np.where(np.arange(len(form)) % 2, -1.0, 1.0)
    try:
        # scipy's annotations know whole numbers only, for a tolerance.
        close: Any = 1e-6
        vector = eigsh(matrix, k=1, which="LA", v0=start, tol=close)[1][:, 0]
    except (ArpackError, TypeError):  # no convergence, or too few rows for it
        vector = np.linalg.eigh(matrix)[1][:, -1]
    return torch.from_numpy(np.where(vector > 0, 1.0, -1.0)).to(form)
