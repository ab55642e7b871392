"""What a hasher takes and gives: images in any form, blocks of codes."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, cast, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from fisherhash.data.computing import Rows, Skipped
from fisherhash.data.images import ImageLike, is_one_image
from fisherhash.errors import UsageError

if TYPE_CHECKING:
    from torch import Tensor

    Images = ImageLike | Tensor | Iterable[ImageLike | Tensor]


@dataclass(frozen=True)
class EncodedBlock:
    """Codes of some images of a source, or of all.

    Attributes:
        indices: (n,) numbers of the images that could be read.
        codes: (n, bytes) their codes.
        queries: (n, …) their real-valued queries for the head, where requested.
        skipped: the images that could not be read.
        unsure: bits of these codes whose logit is within 1e-4 of zero: another runtime, which
            rounds differently, may set them differently.
    """

    indices: NDArray[np.int64]
    codes: NDArray[np.uint8]
    queries: NDArray[np.float32] | None
    skipped: list[Skipped]
    unsure: int = 0


@runtime_checkable
class DecodedSource(Protocol):
    """Images that are decoded already, such as a :class:`~fisherhash.data.pixels.PixelBank`."""

    def blocks(
        self, indices: NDArray[np.int64] | None = None, *, block: int = ...
    ) -> Iterator[Rows]:
        """The decoded images, one block at a time."""
        ...


def one_by_one(images: Any) -> Iterable[ImageLike]:
    """One or many images one by one, each in a form that ``load_image`` takes."""
    if is_one_image(images):
        return [cast("ImageLike", images)]
    if isinstance(images, np.ndarray) or _is_tensor(images):
        images = [images] if images.ndim < 4 else list(images)
    arrays = map(_array, images)
    return list(arrays) if isinstance(images, Sequence) else arrays


def _is_tensor(image: object) -> bool:
    """Whether an object is a tensor; only whoever imported torch can have one."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(image, torch.Tensor)


def _array(image: Any) -> ImageLike:
    if not _is_tensor(image):
        return image
    if str(image.dtype) != "torch.uint8" or image.ndim != 3 or image.shape[0] != 3:
        raise UsageError(
            f"an image tensor must be uint8 of shape (3, height, width), got {image.dtype} "
            f"of shape {tuple(image.shape)}"
        )
    return image.permute(1, 2, 0).cpu().numpy()
