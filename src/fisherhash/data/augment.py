"""Augmentation of a whole batch on its device: a random crop, resized, and a random flip."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def augment(pixels: Tensor, *, smallest: float = 0.5) -> Tensor:
    """Cut random squares from bytes (n, 3, s, s), resize them back and mirror half of them.

    Uses torch's generator of the batch's device: a captured CUDA graph draws anew each time.

    Args:
        pixels: (n, 3, s, s) bytes.
        smallest: the smallest share of the area that a crop covers.

    Returns:
        (n, 3, s, s) floats in 0..255.
    """
    count, device = len(pixels), pixels.device
    side = torch.empty(count, device=device).uniform_(smallest, 1.0).sqrt()
    shift = torch.empty(2, count, device=device).uniform_(-1.0, 1.0) * (1.0 - side)
    flip = torch.where(torch.rand(count, device=device) < 0.5, -1.0, 1.0)
    zero = torch.zeros_like(side)
    rows = (side * flip, zero, shift[0], zero, side, shift[1])
    grid = F.affine_grid(
        torch.stack(rows, 1).view(count, 2, 3), list(pixels.shape), align_corners=False
    )
    return F.grid_sample(pixels.float(), grid, padding_mode="reflection", align_corners=False)
