"""The hasher: images in, codes out; a folder that can be saved, loaded and shared.

This module imports neither torch nor ONNX Runtime. ``torch_hasher`` and ``onnx_hasher`` implement
the hasher with one of them, and :meth:`Hasher.load` chooses.
"""

from __future__ import annotations

import abc
import importlib
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, cast, get_args, runtime_checkable

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fisherhash import codes
from fisherhash.data.collection import Collection
from fisherhash.data.computing import RowFunction, Rows, Skipped, compute_blocks
from fisherhash.data.images import ImageLike, UnreadableImage, is_one_image
from fisherhash.data.loading import decode_images
from fisherhash.data.preprocessing import Preprocessing
from fisherhash.data.row_cache import cached_rows, stored_rows
from fisherhash.data.vectors import VECTORS_AT_ONCE, check_finite_rows, check_shape, vector_blocks
from fisherhash.errors import NotDefinedError, UsageError, not_installed, unknown_name
from fisherhash.model import builtin, onnx_runtime
from fisherhash.model.folder import is_fitted, usable_onnx
from fisherhash.model.location import locate_model
from fisherhash.model.runtime import UNSURE
from fisherhash.system import storage
from fisherhash.system.devices import is_processor
from fisherhash.system.progress import progress

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from fisherhash.model.heads import Head

    Images = ImageLike | Tensor | Iterable[ImageLike | Tensor]

_DISTANCES_AT_ONCE = 2**20
ComputeRows = Callable[[Any], NDArray[np.float32]]
"""Bytes (n, 3, size, size), an array or a tensor, to rows."""
RuntimeName = Literal["auto", "onnx", "torch"]
HASHERS = {
    "onnx": ("fisherhash.model.onnx_hasher", "OnnxHasher"),
    "torch": ("fisherhash.model.torch_hasher", "TorchHasher"),
    "fitted": ("fisherhash.model.fitted_hasher", "FittedHasher"),
}
"""The hasher of each runtime, and of fitted models; each module is imported at its first use."""


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
        fine: (n, fine bytes) their second codes, where the hasher makes those.
    """

    indices: NDArray[np.int64]
    codes: NDArray[np.uint8]
    queries: NDArray[np.float32] | None
    skipped: list[Skipped]
    unsure: int = 0
    fine: NDArray[np.uint8] | None = None


@dataclass(frozen=True)
class ExportedHead:
    """What is known of a head that is part of an exported network.

    Attributes:
        kind: the name of the head.
        bits: length of the codes.
        hamming: whether codes are ranked by Hamming distance.
    """

    kind: str
    bits: int
    hamming: bool

    def distances(self, queries: Any, codes: NDArray[np.uint8]) -> Iterator[Any]:
        """Distances of logits (q, bits) to packed codes (n, bytes), in blocks (b, n).

        They are those of :meth:`Head.distances`.

        Raises:
            UsageError: the codes have no Hamming distance; then logits are no queries.
        """
        if self.hamming:
            return self._inner_products(np.asarray(queries), codes)
        raise UsageError(
            f"codes of the head '{self.kind}' are ranked by distances of real-valued queries, "
            "which an exported model does not compute; load it with runtime='torch'"
        )

    def _inner_products(
        self, queries: NDArray[np.float32], packed: NDArray[np.uint8]
    ) -> Iterator[NDArray[np.float32]]:
        # Each distinct code once, so that equal codes are at exactly equal distances.
        distinct, places = np.unique(packed, axis=0, return_inverse=True)
        signs = 2 * codes.unpack(distinct, self.bits).astype(np.float32) - 1
        step = max(1, _DISTANCES_AT_ONCE // max(1, len(packed)))
        for start in range(0, len(queries), step):
            yield (-2 * queries[start : start + step] @ signs.T)[:, places.reshape(-1)]


@runtime_checkable
class DecodedSource(Protocol):
    """Images that are decoded already, such as a :class:`~fisherhash.data.pixels.PixelBank`."""

    def blocks(
        self, indices: NDArray[np.int64] | None = None, *, block: int = ...
    ) -> Iterator[Rows]:
        """The decoded images, one block at a time."""
        ...


class Hasher(abc.ABC):
    """Images to codes of ``bits`` bits; :meth:`load` makes one.

    Attributes:
        head: how codes are computed from features and compared.
        method: name of the method that trained the head.
        classes: names of the classes it was trained on, if there were labels.
        details: how it was made (data, split, hyper-parameters, results), for the model card.
        origin: where it came from: ``builtin``, ``path``, or empty if it was made in this process.
    """

    head: Head | ExportedHead
    method: str
    classes: tuple[str, ...]
    details: dict[str, Any]
    origin: dict[str, Any]

    def __repr__(self) -> str:
        return f"Hasher(method={self.method!r}, bits={self.bits}, backbone={self.backbone_name!r})"

    @property
    def bits(self) -> int:
        """Number of bits of a code."""
        return self.head.bits

    @property
    def fine_bits(self) -> int:
        """Number of bits of the second code, which orders results too; 0 without one."""
        return 0

    @property
    def ranking(self) -> Literal["hamming", "real"]:
        """How searches with its queries rank best, as measured when it was trained."""
        found = self.details.get("ranking")
        real = isinstance(found, dict) and found.get("default") == "real" and self.head.hamming
        return "real" if real else "hamming"

    @property
    @abc.abstractmethod
    def backbone_name(self) -> str:
        """Name of the network that turns images into features."""

    @property
    @abc.abstractmethod
    def preprocessing(self) -> Preprocessing:
        """What happens to an image before the backbone."""

    @property
    @abc.abstractmethod
    def runtime_name(self) -> str:
        """What computes the codes, and where: ``onnx-cpu``, ``torch-cuda``, …"""

    @abc.abstractmethod
    def fingerprint(self) -> str:
        """A checksum of everything that decides a code; an index stores it."""

    @abc.abstractmethod
    def files(self) -> dict[str, storage.Content]:
        """The files of the model folder and what goes into them, in the order of their writing."""

    def truncated(self, bits: int) -> Hasher:
        """Return a hasher whose codes are the first bits of this one's.

        They are as good as codes of that length can be where the model was trained for it: see
        ``nested`` in :attr:`details`.

        Args:
            bits: how many, at most those of this hasher.

        Raises:
            UsageError: there are not so many bits.
            NotDefinedError: the codes have no Hamming distance, so their first bits mean nothing.
        """
        if not 1 <= bits <= self.bits:
            raise UsageError(
                f"codes of {self.bits} bits can be cut to 1 to {self.bits} bits, got {bits}"
            )
        if not self.head.hamming:
            raise NotDefinedError(
                f"codes of the head '{self.head.kind}' have no Hamming distance, so their first "
                "bits are no code"
            )
        return self if bits == self.bits else self._truncated(bits)

    @abc.abstractmethod
    def _truncated(self, bits: int) -> Hasher:
        """A hasher of fewer bits."""

    # What a runtime computes of an image is one row: features (torch) or logits (ONNX Runtime).

    @property
    @abc.abstractmethod
    def _compute(self) -> ComputeRows:
        """What computes the rows of images in memory."""

    @property
    @abc.abstractmethod
    def _row_key(self) -> str:
        """What identifies the rows where they are stored on disk."""

    @property
    def _stored_keys(self) -> tuple[str, ...]:
        """What identifies all stored rows that codes can be made from."""
        return (self._row_key,)

    @abc.abstractmethod
    def _row_function(self) -> RowFunction:
        """What computes the rows of a collection's images."""

    @abc.abstractmethod
    def logits_of_rows(self, rows: NDArray[np.float32]) -> NDArray[np.float32]:
        """Rows to logits (n, bits)."""

    def fine_of_rows(self, rows: NDArray[np.float32]) -> NDArray[np.float32]:
        """Rows to the logits of the second code (n, fine_bits)."""
        return np.empty((len(rows), 0), dtype=np.float32)

    @abc.abstractmethod
    def queries_of_rows(self, rows: NDArray[np.float32]) -> NDArray[np.float32]:
        """Rows to the real-valued queries that ``head.distances`` takes."""

    @property
    def rows_are_features(self) -> bool:
        """Whether a row is what the head takes, and not yet the logits."""
        return True

    @property
    @abc.abstractmethod
    def _row_width(self) -> int:
        """Numbers per row."""

    # Vectors: a model may have no backbone; every other one applies its head to given features.

    @property
    def vectors_only(self) -> bool:
        """Whether there is no backbone, so that it encodes vectors and no images."""
        return False

    @property
    @abc.abstractmethod
    def feature_width(self) -> int:
        """Dimensions of the features that the head takes."""

    @abc.abstractmethod
    def logits_of_features(self, features: NDArray[np.float32]) -> NDArray[np.float32]:
        """Features (n, d) to logits (n, bits)."""

    def fine_of_features(self, features: NDArray[np.float32]) -> NDArray[np.float32]:
        """Features (n, d) to the logits of the second code (n, fine_bits)."""
        return self.fine_of_rows(features)

    def check_takes_images(self) -> None:
        """Refuse images where there is no backbone.

        Raises:
            UsageError: it encodes vectors only.
        """
        if self.vectors_only:
            raise UsageError(
                f"this model ({self.method}) was trained on vectors of {self.feature_width} "
                "dimensions and has no backbone, so it cannot encode images; give vectors: "
                "--features FILE.npy, or Hasher.encode_features"
            )

    @property
    def about(self) -> dict[str, Any]:
        """Which model this is, as JSON; an index stores it to find its model again."""
        if "builtin" in self.origin:
            return dict(self.origin)
        summary = {"method": self.method, "backbone": self.backbone_name, "bits": self.bits}
        return self.origin | summary

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
            rows.append(self.logits_of_rows(part.values))
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
            cached: store the features on disk, for a backbone that encodes this collection again.
            queries: also compute the real-valued queries.
            workers: number of processes that read a collection; 0 means this one, None lets the
                work decide. The codes do not depend on it.
        """
        for part in self.row_blocks(source, indices, block, cached, workers):
            yield self._of_rows(part, queries=queries)

    def encode_features(self, features: ArrayLike) -> NDArray[np.uint8]:
        """Codes (n, bytes) of vectors (n, d), which may be a memory map; one vector is one row.

        A model for images applies its head to them: they are features of its backbone.

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

        With ``queries``, the blocks also hold the logits.
        """
        for start, rows in vector_blocks(vectors, block):
            numbers = np.arange(start, start + len(rows))
            logits = self.logits_of_features(rows)
            fine = self.fine_of_features(rows) if self.fine_bits else None
            real = logits if queries else None
            yield self._encoded(Rows(rows, numbers, []), logits, real, fine)

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
        none = Rows(np.empty((0, self._row_width), dtype=np.float32), np.arange(0), [])
        parts = [self._of_rows(none, queries=queries)]
        with bar as advance:
            for part in self.encode_blocks(
                source, indices, block=block, cached=cached, queries=queries, workers=workers
            ):
                parts.append(part)
                advance(len(part.indices) + len(part.skipped))
        real = [part.queries for part in parts if part.queries is not None]
        fine = [part.fine for part in parts if part.fine is not None]
        return EncodedBlock(
            np.concatenate([part.indices for part in parts]),
            np.concatenate([part.codes for part in parts]),
            np.concatenate(real) if real else None,
            [item for part in parts for item in part.skipped],
            sum(part.unsure for part in parts),
            np.concatenate(fine) if fine else None,
        )

    def encode_stored(self, collection: Collection) -> EncodedBlock | None:
        """Codes of the images whose rows are stored on disk, because training needed them.

        None if there are none; nothing is computed but the codes.
        """
        self.check_takes_images()
        shape, how = (self._row_width,), self.preprocessing
        every = [
            stored_rows(collection, how, what=what, shape=shape, dtype=np.float32)
            for what in self._stored_keys
        ]
        found = [rows for rows in every if rows is not None]
        if not found:
            return None
        return self._of_rows(max(found, key=lambda rows: len(rows.indices)))

    def _of_rows(self, rows: Rows, *, queries: bool = False) -> EncodedBlock:
        real = self.queries_of_rows(rows.values) if queries else None
        fine = self.fine_of_rows(rows.values) if self.fine_bits else None
        return self._encoded(rows, self.logits_of_rows(rows.values), real, fine)

    def _encoded(
        self,
        rows: Rows,
        logits: NDArray[np.float32],
        real: NDArray[np.float32] | None,
        fine: NDArray[np.float32] | None,
    ) -> EncodedBlock:
        unsure = int(np.count_nonzero(np.abs(logits) < UNSURE))
        second = None if fine is None else codes.pack(fine)
        return EncodedBlock(rows.indices, codes.pack(logits), real, rows.skipped, unsure, second)

    def row_blocks(
        self,
        source: Collection | DecodedSource | Images,
        indices: NDArray[np.int64] | None = None,
        block: int = 256,
        cached: bool = False,
        workers: int | None = None,
    ) -> Iterator[Rows]:
        """The one way from images to rows, for every source."""
        self.check_takes_images()
        if isinstance(source, Collection):
            if cached:
                return iter([self._cached(source, indices, workers)])
            function = self._row_function()
            return compute_blocks(source, indices, function, block=block, workers=workers)
        if cached:
            raise UsageError("only features of a collection can be cached")
        if isinstance(source, DecodedSource):
            blocks = source.blocks(indices, block=block)
        elif indices is not None:
            raise UsageError("indices select images of a collection; select from a list yourself")
        else:
            blocks = decode_images(_listed(source), self.preprocessing, block=block)
        compute = self._compute
        return (Rows(compute(part.values), part.indices, part.skipped) for part in blocks)

    def _cached(
        self, collection: Collection, indices: NDArray[np.int64] | None, workers: int | None
    ) -> Rows:
        """The rows of images, stored on disk."""
        function, what = self._row_function(), self._row_key
        return cached_rows(collection, indices, function, what=what, workers=workers)

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Write the model folder; an older model in it is replaced only when all is on disk."""
        storage.write_files(Path(folder), self.files())

    @classmethod
    def load(
        cls,
        model: str | os.PathLike[str] | None = None,
        *,
        device: torch.device | str | None = "cpu",
        backbone: nn.Module | None = None,
        runtime: RuntimeName = "auto",
    ) -> Hasher:
        """Load a model from its folder, its ONNX file or the hub, or a built-in one by its name.

        Args:
            model: a model folder, an exported ``.onnx`` file, one of ``builtin.NAMES``, or
                ``hf:user/name`` on the Hugging Face Hub, with the extra ``hub``; by default the
                built-in hasher. A folder comes first where both exist.
            device: where it runs: ``cpu``, ``cuda``, or an execution provider of ONNX Runtime such
                as ``openvino``; ``auto`` or None for CUDA where there is a GPU.
            backbone: the network, if the model was built on one of your own.
            runtime: ``onnx`` or ``torch``. By default ONNX Runtime on a CPU if the model was
                exported, otherwise torch, which ``pip install 'fisherhash[train]'`` brings.

        Raises:
            UsageError: there is no such model; a typo is answered with the nearest name.
            FisherhashError: the model is damaged, or needs a package that is not installed.
        """
        if runtime not in get_args(RuntimeName):
            raise unknown_name("runtime", str(runtime), get_args(RuntimeName))
        place = locate_model(model)
        if isinstance(place, str):
            if backbone is not None:
                raise UsageError(f"the built-in hasher '{place}' has a backbone; pass none with it")
            return cls.load_builtin(place, device=device, runtime=runtime)
        if place.suffix == ".onnx" and place.is_file():
            if runtime == "torch":
                raise UsageError(f"{place} is an exported model, which torch cannot load")
            return _hasher("onnx").from_folder(place, device=device)
        if is_fitted(place):
            if runtime == "torch":
                raise UsageError(f"the model in {place} runs in ONNX Runtime only")
            return _hasher("fitted").from_folder(place, device=device, backbone=backbone)
        exported = runtime != "torch" and backbone is None and usable_onnx(place) is not None
        chosen = _choose(runtime, exported, device, f"the model in {place}")
        return _hasher(chosen).from_folder(place, device=device, backbone=backbone)

    @classmethod
    def load_builtin(
        cls,
        name: str = builtin.DEFAULT_HASHER,
        *,
        device: torch.device | str | None = "cpu",
        runtime: RuntimeName = "auto",
    ) -> Hasher:
        """Load a built-in hasher, whatever folders there are.

        Args:
            name: one of ``builtin.NAMES``.
            device: where it runs, as for :meth:`load`.
            runtime: as for :meth:`load`.

        Raises:
            UsageError: there is no built-in hasher of this name.
            FisherhashError: its files are damaged, or a package that it needs is not installed.
        """
        builtin.folder(name)  # an unknown name is refused first
        if name not in builtin.EXPORTED_ONLY:
            runtime = _choose(runtime, True, device, f"the built-in hasher '{name}'")
        elif runtime == "torch":
            raise UsageError(f"the built-in hasher '{name}' runs in ONNX Runtime only")
        else:
            runtime = "onnx"
        return _hasher(runtime).from_package(name, device=device)


def _hasher(runtime: str) -> Any:
    """The class of the hashers of a runtime.

    Raises:
        FisherhashError: the runtime is not installed.
    """
    module, name = HASHERS[runtime]
    try:
        return getattr(importlib.import_module(module), name)
    except ModuleNotFoundError as error:
        raise not_installed(error, "a model that is not exported to ONNX") from error


def _choose(
    runtime: RuntimeName, exported: bool, device: torch.device | str | None, what: str
) -> RuntimeName:
    """The runtime of a model; ``exported``: it has an ONNX file."""
    if runtime == "onnx" and not exported:
        raise UsageError(f"{what} is not exported; export it with: fisherhash export onnx MODEL")
    if runtime != "auto":
        return runtime
    if not exported or not onnx_runtime.installed():
        return "torch"
    # A GPU is for torch where both can use it; other providers are ONNX Runtime's alone.
    return "onnx" if is_processor(device) or onnx_runtime.provides(device) else "torch"


def _listed(images: Any) -> Iterable[ImageLike]:
    """Images one by one, each in a form that ``load_image`` takes."""
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
