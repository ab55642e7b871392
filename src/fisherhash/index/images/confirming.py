"""Whether images are copies of each other, by the pixels of their thumbnails.

Near codes are only candidates. Their files are reduced to small grey thumbnails, and one is
laid over the other at the scales and places that crops, borders and bars produce. The best
correlation is their *likeness*. It ignores brightness, contrast and colour. Two beaches under a
clear sky correlate, too, so what is smaller than sky and sand must correlate as well.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from fisherhash.data.formats import UnreadableImage
from fisherhash.data.images import load_image

Thumbnail = NDArray[np.float32]

SIDE = 24
ALIKE = 0.8
"""The likeness from which on two images count as copies; see docs/duplicates.md."""
DETAIL = 0.6
"""The correlation of details that a copy needs, beside ``ALIKE``; see docs/duplicates.md."""
_DETAIL_REACH = 2
"""Pixels around each one whose mean is taken away, so that details are left."""
_MOST_ROUNDS = 8
"""Images of a group with which the others are compared, before the rest counts as unlike."""
_EDGE = 2
"""Pixels at the border that are not compared: frames and captions are there."""
_SCALES = (
    (1.0, 1.0),
    *((share, share) for share in (0.95, 0.9, 0.8, 0.7)),
    *((share, 1.0) for share in (0.9, 0.8, 0.7)),
    *((1.0, share) for share in (0.9, 0.8, 0.7)),
)
"""Shares of width and height that one image may show of the other; the whole image first."""
_FLAT = 2.0
"""Standard deviation of grey levels below which there is nothing to correlate."""
_FLAT_RANGE = 8.0
"""Difference of grey levels at which the likeness of plain images is 1/e."""


def split_by_likeness(paths: Sequence[str | None]) -> list[tuple[list[int], bool | None]]:
    """Split a group of likely copies by what their thumbnails show.

    Args:
        paths: the image files; None where there is none.

    Returns:
        The numbers of the images of each part, and whether they show the same. Images that are
        alike stay together. The others follow behind the first of those, in a part that is not
        confirmed. Without any thumbnail, nothing is known, and all stay together.
    """
    loaded = enumerate(map(load_thumbnail, paths))
    shown = {number: thumbnail for number, thumbnail in loaded if thumbnail is not None}
    left, alone = list(shown), [number for number in range(len(paths)) if number not in shown]
    if not left:
        return [(alone, None)]
    parts: list[tuple[list[int], bool | None]] = []
    for _ in range(_MOST_ROUNDS):
        if len(left) < 2:
            break
        first, *others = left
        same = {n: likeness(shown[first], shown[n]) >= ALIKE for n in others}
        alike, left = [n for n in others if same[n]], [n for n in others if not same[n]]
        if alike:
            parts.append(([first, *alike], True))
        else:
            alone.append(first)
    alone += left
    if not parts:
        return [(list(range(len(paths))), False)]
    return [*parts, ([parts[0][0][0], *alone], False)] if alone else parts


def load_thumbnail(path: str | None) -> Thumbnail | None:
    """A file as (side, side) grey levels; None if it cannot be read."""
    if path is None:
        return None
    try:
        image = load_image(path, enough=2 * SIDE)
    except UnreadableImage:
        return None
    return thumbnail_of(image)


def thumbnail_of(image: Image.Image) -> Thumbnail:
    """An image as (side, side) grey levels."""
    small = image.convert("L").resize((SIDE, SIDE), Image.Resampling.BOX)
    return np.asarray(small, dtype=np.float32)


def likeness(first: Thumbnail, second: Thumbnail) -> float:
    """How much two thumbnails show the same: 1 for a copy, near 0 for different images.

    It is the best correlation found by the time that it suffices for a copy.

    >>> rng = np.random.default_rng(0)
    >>> image = rng.normal(128, 40, (SIDE, SIDE)).astype(np.float32)
    >>> round(likeness(image, 0.5 * image + 10), 3)
    1.0
    >>> likeness(image, rng.normal(128, 40, (SIDE, SIDE)).astype(np.float32)) < ALIKE
    True
    """
    if min(first.std(), second.std()) < _FLAT:
        # Plain areas have no structure: compare the grey levels themselves.
        return float(np.exp(-np.abs(first - second).mean() / _FLAT_RANGE))
    best = 0.0
    for shares in _SCALES:
        for whole, part in ((first, second), (second, first)):
            best = max(best, _best_place(part, whole, shares))
            if best >= ALIKE:
                return best
    return best


def _best_place(part: Thumbnail, whole: Thumbnail, shares: tuple[float, float]) -> float:
    """The best correlation of one thumbnail with any place of another that is enlarged.

    It is less than ``ALIKE`` where the details of that place do not correlate.
    """
    part = part[_EDGE:-_EDGE, _EDGE:-_EDGE]
    size = (round(SIDE / shares[0]), round(SIDE / shares[1]))
    if size != (SIDE, SIDE):
        large = Image.fromarray(whole).resize(size, Image.Resampling.BILINEAR)
        whole = np.asarray(large, dtype=np.float32)
    places = np.lib.stride_tricks.sliding_window_view(whole, part.shape).reshape(-1, part.size)
    mine = part.ravel() - part.mean()
    products = places @ mine
    means = places.mean(axis=1)
    spread = np.einsum("ij,ij->i", places, places) - part.size * means**2
    # A part without structure correlates with nothing.
    spread = np.sqrt(np.maximum(spread, 1e-6)) * np.sqrt(np.maximum((mine**2).sum(), 1e-6))
    correlations = products / spread
    place = int(correlations.argmax())
    best = float(correlations[place])
    if best < ALIKE:
        return best
    details = _details(part), _details(places[place].reshape(part.shape))
    sizes = np.sqrt([float((one**2).sum()) for one in details])
    detail = float((details[0] * details[1]).sum() / max(1e-6, sizes[0] * sizes[1]))
    return best if detail >= DETAIL else min(best, ALIKE * detail / DETAIL)


def _details(thumbnail: Thumbnail) -> Thumbnail:
    """A thumbnail without what is larger than a few pixels."""
    width = 2 * _DETAIL_REACH + 1
    around = np.pad(thumbnail, _DETAIL_REACH, mode="edge")
    smooth = np.lib.stride_tricks.sliding_window_view(around, (width, width)).mean((2, 3))
    rest = thumbnail - smooth
    return rest - rest.mean()
