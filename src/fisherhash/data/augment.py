"""Augmentation of a whole batch on its device: crop, flip, colours, blur.

Everything is drawn per image from torch's generator of the batch's device, with shapes that do not
depend on what is drawn, so a captured CUDA graph draws anew each time.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True)
class Strength:
    """How strongly a view of an image is augmented; the default is a crop and a flip.

    Attributes:
        smallest: The smallest share of the area that a crop covers.
        crop: Probability of the crop; an image without one is seen whole.
        flip: Probability that an image is mirrored.
        jitter: The largest change of brightness, contrast and saturation, as a share, and of the
            hue, in turns.
        jittered: Probability that an image's colours change.
        grey: Probability that an image loses its colours.
        blur: Probability that an image is blurred.
        solarise: Probability that the bright half of an image's values is inverted.
        masked: For frozen features, which cannot be augmented: the share of an image's features
            that a view replaces by their mean over the training set.
    """

    smallest: float = 0.5
    crop: float = 1.0
    flip: float = 0.5
    jitter: tuple[float, float, float, float] = (0.0, 0.0, 0.0, 0.0)
    jittered: float = 0.0
    grey: float = 0.0
    blur: float = 0.0
    solarise: float = 0.0
    masked: float = 0.0


PLAIN = Strength()
"""A crop and a flip: the only view of most methods."""


class Draws:
    """Draws random numbers for the images of a batch, from torch's generator of the device."""

    def uniform(
        self,
        shape: Sequence[int],
        low: float = 0.0,
        high: float = 1.0,
        *,
        device: torch.device,
        axis: int = 0,
    ) -> Tensor:
        """Return numbers of this shape between two others; ``axis`` is that of the images."""
        return torch.empty(*shape, device=device).uniform_(low, high)


PLAIN_DRAWS = Draws()
"""For a batch that this process has all images of."""


def augment(pixels: Tensor, strength: Strength = PLAIN, *, draws: Draws = PLAIN_DRAWS) -> Tensor:
    """Draw one view of each image: a square crop, resized back, a flip, colours, a blur.

    Args:
        pixels: (n, 3, s, s) bytes.
        strength: How much of each.
        draws: Where the random numbers come from.

    Returns:
        (n, 3, s, s) floats in 0..255.
    """
    count, device = len(pixels), pixels.device
    side = draws.uniform([count], strength.smallest, 1.0, device=device).sqrt()
    if strength.crop < 1.0:
        side = torch.where(_chosen(pixels, strength.crop, draws), side, 1.0)
    shift = draws.uniform([2, count], -1.0, 1.0, device=device, axis=1) * (1.0 - side)
    flip = torch.where(_chosen(pixels, strength.flip, draws), -1.0, 1.0)
    zero = torch.zeros_like(side)
    rows = (side * flip, zero, shift[0], zero, side, shift[1])
    grid = F.affine_grid(
        torch.stack(rows, 1).view(count, 2, 3), list(pixels.shape), align_corners=False
    )
    found = F.grid_sample(pixels.float(), grid, padding_mode="reflection", align_corners=False)
    # Whether a kind of change is used at all is a constant; whom it affects is drawn.
    if strength.jittered > 0.0:
        found = _jittered(found, strength, draws)
    for share, change in (
        (strength.grey, _grey),
        (strength.blur, functools.partial(blur, draws=draws)),
        (strength.solarise, _solarised),
    ):
        if share > 0.0:
            chosen = _chosen(found, share, draws)[:, None, None, None]
            found = torch.where(chosen, change(found), found)
    return found


def masked(features: Tensor, mean: Tensor, share: float, *, draws: Draws = PLAIN_DRAWS) -> Tensor:
    """Return a view of frozen features (n, d): a share of them is replaced by their mean (d,).

    What is left is moved away from the mean as dropout does, so that its deviation stays.
    """
    if share <= 0.0:
        return features
    kept = draws.uniform(features.shape, device=features.device) >= share
    return torch.where(kept, mean + (features - mean) / (1.0 - share), mean)


def blur(images: Tensor, *, draws: Draws = PLAIN_DRAWS) -> Tensor:
    """Blur each of n images (n, 3, s, s) with a Gaussian of its own width, 0.5 to 2 pixels.

    The widths are those for images of 224 pixels, and shrink with smaller ones.
    """
    count, channels, height, width = images.shape
    largest = 2.0 * min(height, width) / 224.0
    radius = min(max(1, math.ceil(2.5 * largest)), height - 1, width - 1)
    sigma = draws.uniform([count, 1], 0.25 * largest, largest, device=images.device)
    offsets = torch.arange(-radius, radius + 1, device=images.device)
    weights = torch.softmax(-offsets.square() / (2.0 * sigma.square()), dim=1)
    weights = weights.repeat_interleave(channels, 0)[:, None, None, :]
    # One group per image and channel: each has its own filter.
    flat = images.reshape(1, count * channels, height, width)
    flat = F.pad(flat, (radius,) * 4, mode="reflect")
    flat = F.conv2d(flat, weights, groups=count * channels)
    flat = F.conv2d(flat, weights.transpose(2, 3), groups=count * channels)
    return flat.view_as(images)


def _chosen(images: Tensor, share: float, draws: Draws) -> Tensor:
    """(n,) whether a change is applied to each image."""
    return draws.uniform([len(images)], device=images.device) < share


def _solarised(images: Tensor) -> Tensor:
    """Invert the bright half of the values."""
    return torch.where(images >= 128.0, 255.0 - images, images)


def _grey(images: Tensor) -> Tensor:
    """How bright each pixel looks, in all three channels."""
    # Plain numbers: a tensor of constants would be copied to the device, which no graph can hold.
    red, green, blue = images.split(1, dim=1)
    return (0.299 * red + 0.587 * green + 0.114 * blue).expand_as(images)


def _jittered(images: Tensor, strength: Strength, draws: Draws) -> Tensor:
    """Change brightness, contrast, saturation and hue, in this order."""
    chosen = _chosen(images, strength.jittered, draws)

    def drawn(most: float, middle: float) -> Tensor:
        low, high = middle - min(most, 1.0), middle + most
        amount = draws.uniform([len(images)], low, high, device=images.device)
        return torch.where(chosen, amount, middle)[:, None, None, None]

    light, contrast, colour, hue = strength.jitter
    images = (images * drawn(light, 1.0)).clamp(0.0, 255.0)
    middle = _grey(images).mean((1, 2, 3), keepdim=True)
    images = (middle + (images - middle) * drawn(contrast, 1.0)).clamp(0.0, 255.0)
    grey = _grey(images)
    images = (grey + (images - grey) * drawn(colour, 1.0)).clamp(0.0, 255.0)
    if hue <= 0.0:
        return images
    return _turned(images, drawn(hue, 0.0) * 2.0 * math.pi).clamp(0.0, 255.0)


def _turned(images: Tensor, angle: Tensor) -> Tensor:
    """Turn the hue of each image by its angle (n, 1, 1, 1): a rotation around the axis of grey."""
    across = (images.roll(1, 1) - images.roll(-1, 1)) * 3.0**-0.5
    middle = images.mean(1, keepdim=True)
    return middle + (images - middle) * angle.cos() + across * angle.sin()
