"""From images or vectors to codes: a network, a head, and the one path through both."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, cast, runtime_checkable

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fisherhash import codes
from fisherhash.data.collection import Collection
from fisherhash.data.computing import Rows, Skipped, compute_blocks, decode_images
from fisherhash.data.images import ImageLike, UnreadableImage, is_one_image
from fisherhash.data.preprocessing import Preprocessing
from fisherhash.data.row_cache import stored_rows
from fisherhash.data.vectors import VECTORS_AT_ONCE, check_finite_rows, check_shape, vector_blocks
from fisherhash.errors import UsageError
from fisherhash.model.head import FinishedHead
from fisherhash.model.networks import (
    ONNX_CPU,
    TORCH_CPU,
    Network,
    feature_key,
    feature_rows,
)
from fisherhash.model.onnx_network import LOGITS, OnnxNetwork
from fisherhash.system.progress import progress

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
    """

    indices: NDArray[np.int64]
    codes: NDArray[np.uint8]
    queries: NDArray[np.float32] | None
    skipped: list[Skipped]


@runtime_checkable
class DecodedSource(Protocol):
    """Images that are decoded already, such as a :class:`~fisherhash.data.pixels.PixelBank`."""

    def blocks(
        self, indices: NDArray[np.int64] | None = None, *, block: int = ...
    ) -> Iterator[Rows]:
        """The decoded images, one block at a time."""
        ...


class Encoder:
    """A network and a head: images, or vectors, to codes.

    Args:
        network: turns images into features; None where vectors are encoded.
        head: turns features into logits.
        method: name of the method that trained the head, for messages.
    """

    def __init__(self, network: Network | None, head: FinishedHead, method: str) -> None:
        self.network, self.head, self.method = network, head, method

    @property
    def bits(self) -> int:
        """Number of bits of a code."""
        return self.head.bits

    @property
    def backbone_name(self) -> str:
        """Name of the network that turns images into features."""
        return "features" if self.network is None else self.network.name

    @property
    def preprocessing(self) -> Preprocessing:
        """What happens to an image before the network."""
        return Preprocessing() if self.network is None else self.network.preprocessing

    @property
    def runtime_name(self) -> str:
        """What computes the features, and where: ``onnx-cpu``, ``torch-cuda``, …"""
        return "numpy" if self.network is None else self.network.kind

    @property
    def rows_are_features(self) -> bool:
        """Whether the network computes features, and not the logits themselves."""
        return not (isinstance(self.network, OnnxNetwork) and self.network.output == LOGITS)

    @property
    def vectors_only(self) -> bool:
        """Whether there is no network, so that it encodes vectors and no images."""
        return self.network is None

    def check_takes_images(self) -> Network:
        """Return the network; refuse images where there is none.

        Raises:
            UsageError: it encodes vectors only.
        """
        if self.network is None:
            raise UsageError(
                f"this model ({self.method}) was trained on vectors of {self.feature_width} "
                "dimensions and has no backbone, so it cannot encode images; give vectors: "
                "--features FILE.npy, or Hasher.encode_features"
            )
        return self.network

    @property
    def features_network(self) -> Network:
        """What computes features of images, also where codes come from a network with a head."""
        network = self.check_takes_images()
        if not self.rows_are_features:
            return cast("OnnxNetwork", network).computing("features")
        return network

    def encode(self, images: Images) -> NDArray[np.uint8]:
        """Codes (n, bytes) of images: one or many; paths, files, bytes, images, arrays, tensors.

        An array has shape (height, width, 3), a tensor (3, height, width) or (n, 3, height, width);
        both hold bytes. One image returns one row.

        Raises:
            UnreadableImage: an image cannot be read; :meth:`encode_blocks` skips it instead.
        """
        return codes.pack(self.logits(images))

    def logits(self, images: Images) -> NDArray[np.float32]:
        """The real outputs (n, bits) that the codes are cut from: bit = logit > 0."""
        rows = [np.empty((0, self.bits), dtype=np.float32)]
        for part in self.row_blocks(images):
            for item in part.skipped:
                raise UnreadableImage(f"{item.name}: {item.reason}", passing=item.passing)
            rows.append(self.head.logits(part.values))
        return np.concatenate(rows)

    def encode_blocks(
        self,
        source: Collection | DecodedSource | Images,
        indices: NDArray[np.int64] | None = None,
        *,
        block: int = 256,
        cached: bool = False,
        queries: bool = False,
        workers: int | None = None,
    ) -> Iterator[EncodedBlock]:
        """Encode images one block at a time; those that cannot be read are skipped and listed.

        Args:
            source: a collection, images as for :meth:`encode`, or a bank of decoded images.
            indices: (n,) which images of a collection or a bank, in which order; None for all.
            block: images per block; cached features are one block.
            cached: store the features on disk, for a network that encodes this collection again.
            queries: also compute the real-valued queries.
            workers: number of processes that read a collection; 0 means this one, None lets the
                work decide. The codes do not depend on it.
        """
        for part in self.row_blocks(source, indices, block, cached, workers):
            yield self._of_rows(part, queries=queries)

    def encode_collection(
        self,
        source: Collection | DecodedSource,
        indices: NDArray[np.int64] | None = None,
        *,
        block: int = 256,
        cached: bool = False,
        queries: bool = False,
        workers: int | None = None,
    ) -> EncodedBlock:
        """What :meth:`encode_blocks` yields, as one block, with a progress bar."""
        bar = nullcontext(lambda _: None)  # cached features have a bar of their own
        if isinstance(source, Collection) and not cached:
            bar = progress(f"encoding {source.name}", len(source if indices is None else indices))
        none = Rows(np.empty((0, self.head.in_features), dtype=np.float32), np.arange(0), [])
        parts = [self._of_rows(none, queries=queries)]
        with bar as advance:
            for part in self.encode_blocks(
                source, indices, block=block, cached=cached, queries=queries, workers=workers
            ):
                parts.append(part)
                advance(len(part.indices) + len(part.skipped))
        real = [part.queries for part in parts if part.queries is not None]
        return EncodedBlock(
            np.concatenate([part.indices for part in parts]),
            np.concatenate([part.codes for part in parts]),
            np.concatenate(real) if real else None,
            [item for part in parts for item in part.skipped],
        )

    def encode_stored(self, collection: Collection) -> EncodedBlock | None:
        """Codes of the images whose features are stored on disk, because training needed them.

        None if there are none; nothing is computed but the codes.
        """
        network = self.check_takes_images()
        # Training on a CPU may have stored what the other runtime computed of the same weights.
        both = (ONNX_CPU, TORCH_CPU)
        every = [
            stored_rows(
                collection,
                network.preprocessing,
                what=feature_key(network, kind),
                shape=(network.width,),
                dtype=np.float32,
            )
            for kind in (both if network.kind in both else (network.kind,))
        ]
        found = [rows for rows in every if rows is not None]
        return self._of_rows(max(found, key=lambda r: len(r.indices))) if found else None

    def row_blocks(
        self,
        source: Collection | DecodedSource | Images,
        indices: NDArray[np.int64] | None = None,
        block: int = 256,
        cached: bool = False,
        workers: int | None = None,
    ) -> Iterator[Rows]:
        """The one path from images to what the head takes, for every source."""
        network = self.check_takes_images()
        if isinstance(source, Collection):
            if cached:
                return iter([feature_rows(network, source, indices, workers=workers)])
            function = network.row_function()
            return compute_blocks(source, indices, function, block=block, workers=workers)
        if cached:
            raise UsageError("only features of a collection can be cached")
        if isinstance(source, DecodedSource):
            blocks = source.blocks(indices, block=block)
        elif indices is not None:
            raise UsageError("indices select images of a collection; select from a list yourself")
        else:
            blocks = decode_images(one_by_one(source), network.preprocessing, block=block)
        return (Rows(network.features(b.values), b.indices, b.skipped) for b in blocks)

    def _of_rows(self, rows: Rows, *, queries: bool = False) -> EncodedBlock:
        logits = self.head.logits(rows.values)
        real = None
        if queries:
            real = logits if self.head.hamming else self.head.query(rows.values)
        return EncodedBlock(rows.indices, codes.pack(logits), real, rows.skipped)

    # Vectors: a model may have no network; others apply their head to given features.

    @property
    def feature_width(self) -> int:
        """Dimensions of the features that the head takes."""
        return int(self.head.numbers.get("features", self.head.in_features))

    def encode_features(self, features: ArrayLike) -> NDArray[np.uint8]:
        """Codes (n, bytes) of vectors (n, d), which may be a memory map; one vector is one row.

        A model for images applies its head to them: they are features of its network.

        Raises:
            UsageError: they have other dimensions, are not floats, or hold NaN.
        """
        values = np.atleast_2d(np.asanyarray(features))
        self.check_vectors(values, "the array")
        return np.concatenate([part.codes for part in self.encode_feature_blocks(values)])

    def check_vectors(self, vectors: NDArray[Any], name: str) -> None:
        """Refuse vectors that this model cannot encode; ``name`` is theirs in the message.

        Raises:
            UsageError: they have other dimensions, are not floats, or hold NaN.
        """
        if not self.rows_are_features:
            raise UsageError(
                "an exported network starts from pixels, so it cannot encode features; load the "
                "model folder it was exported from"
            )
        check_shape(vectors, name)
        if vectors.shape[1] != self.feature_width and not self.vectors_only:
            raise UsageError(
                f"{name} has vectors of {vectors.shape[1]} dimensions; this model takes images, or "
                f"the {self.feature_width} features that its backbone {self.backbone_name} "
                "computes of an image"
            )
        check_shape(vectors, name, width=self.feature_width)
        check_finite_rows(vectors, name)

    def encode_feature_blocks(
        self, vectors: NDArray[Any], *, block: int = VECTORS_AT_ONCE, queries: bool = False
    ) -> Iterator[EncodedBlock]:
        """Encode vectors (n, d) one block at a time; :meth:`check_vectors` must have passed.

        With ``queries``, the blocks also hold the real-valued queries.
        """
        for start, rows in vector_blocks(vectors, block):
            numbers = np.arange(start, start + len(rows))
            yield self._of_rows(Rows(rows, numbers, []), queries=queries)


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
