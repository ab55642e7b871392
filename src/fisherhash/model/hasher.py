"""The hasher: images in, codes out; a folder that can be saved, loaded and shared."""

from __future__ import annotations

import hashlib
import itertools
import logging
import os
import platform
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor, nn

from fisherhash import __version__, backbones, codes
from fisherhash.backbones import Backbone
from fisherhash.data.loading import ImageLike, Skipped, UnreadableImage, decode, load_image
from fisherhash.data.preprocessing import Preprocessing
from fisherhash.data.sources import Collection
from fisherhash.errors import FisherhashError, UsageError
from fisherhash.model import heads
from fisherhash.model.features import Extractor, in_fixed_batches, on_device
from fisherhash.model.heads import Head
from fisherhash.system import storage
from fisherhash.system.devices import choose_device
from fisherhash.system.progress import progress
from fisherhash.training.checkpoints import is_unfinished

logger = logging.getLogger(__name__)

CONFIG, WEIGHTS, CARD = "config.json", "model.safetensors", "README.md"
FORMAT = 1
# Images decoded and held in memory at once by ``encode``.
BLOCK = 256

Images = ImageLike | Tensor | Sequence[ImageLike | Tensor]


@dataclass(frozen=True)
class Encoded:
    """The codes of a collection.

    Attributes:
        codes: (n, bytes) of the images that could be read.
        indices: (n,) their numbers in the collection.
        skipped: the others, with reasons.
        queries: (n, …) what the head ranks real-valued queries with, where it was asked for.
    """

    codes: NDArray[np.uint8]
    indices: NDArray[np.int64]
    skipped: list[Skipped]
    queries: NDArray[np.float32] | None = None


@dataclass(repr=False)
class Hasher:
    """A backbone and a head: images to codes of ``bits`` bits.

    Attributes:
        backbone: images to features.
        head: features to logits.
        method: the name of the method that trained the head.
        classes: the names of the classes it was trained on, where there were labels.
        details: how it was made (data, split, hyper-parameters, results), for the model card.
        device: where it runs.
    """

    backbone: Backbone
    head: Head
    method: str
    classes: tuple[str, ...] = ()
    details: dict[str, Any] = field(default_factory=dict)
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))

    def __post_init__(self) -> None:
        self.to(self.device)

    def __repr__(self) -> str:
        return f"Hasher(method={self.method!r}, bits={self.bits}, backbone={self.backbone.name!r})"

    @property
    def bits(self) -> int:
        """Bits of a code."""
        return self.head.bits

    @property
    def preprocessing(self) -> Preprocessing:
        """What happens to an image before the backbone."""
        return self.backbone.preprocessing

    def to(self, device: torch.device | str) -> Hasher:
        """Move to a device and into evaluation mode."""
        self.device = torch.device(device)
        on_device(self.backbone, self.device).eval()
        self.head.to(self.device).eval()
        self._extractor = Extractor(self.backbone, self.device)
        return self

    def encode(self, images: Images) -> NDArray[np.uint8]:
        """Codes (n, bytes) of images: one or many; paths, Pillow images, arrays or tensors.

        An array is (height, width, 3) bytes, a tensor (3, height, width) or (n, 3, height, width)
        bytes. One image gives one row. A file that cannot be read is an error here; see
        :meth:`encode_collection` for skipping.
        """
        return codes.pack(self.logits(images))

    def logits(self, images: Images) -> NDArray[np.float32]:
        """The real outputs (n, bits) the codes are cut from: bit = logit > 0."""
        rows = [np.empty((0, self.bits), dtype=np.float32)]
        waiting = iter(_listed(images))
        while some := list(itertools.islice(waiting, BLOCK)):
            pixels = np.stack([self.preprocessing.pixels(_picture(image)) for image in some])
            rows.append(
                self.logits_of_features(self._extractor.of_pixels(pixels.transpose(0, 3, 1, 2)))
            )
        return np.concatenate(rows)

    def encode_collection(
        self,
        collection: Collection,
        indices: NDArray[np.int64] | None = None,
        *,
        cached: bool = False,
        queries: bool = False,
    ) -> Encoded:
        """Codes of a collection's images; unreadable ones are skipped and listed.

        Args:
            collection: the images.
            indices: (n,) which ones; all without.
            cached: keep the features on disk, for a backbone that encodes these images again.
            queries: also give what the head ranks real-valued queries with.
        """
        if cached:
            rows = self._extractor.of_collection(collection, indices)
            packed = codes.pack(self.logits_of_features(rows.values))
            real = self.queries_of_features(rows.values) if queries else None
            return Encoded(packed, rows.indices, rows.skipped, real)
        wanted = np.arange(len(collection)) if indices is None else indices
        parts = [np.empty((0, codes.code_bytes(self.bits)), dtype=np.uint8)]
        real = [self.queries_of_features(np.empty((0, self.head.in_features), np.float32))]
        kept, skipped = [np.empty(0, dtype=np.int64)], []
        with progress(f"encoding {collection.name}", len(wanted)) as advance:
            for block in decode(collection, wanted, self.preprocessing):
                if len(block.indices):
                    features = self._extractor.of_pixels(block.pixels)
                    parts.append(codes.pack(self.logits_of_features(features)))
                    if queries:
                        real.append(self.queries_of_features(features))
                kept.append(block.indices)
                skipped += block.skipped
                advance(len(block.indices) + len(block.skipped))
        both = np.concatenate(parts), np.concatenate(kept)
        return Encoded(*both, skipped, np.concatenate(real) if queries else None)

    def features_of_tensor(self, pixels: Tensor) -> Tensor:
        """Bytes (n, 3, size, size) on the hasher's device to features (n, d)."""
        return self._extractor.of_tensor(pixels)

    @torch.inference_mode()
    def logits_of_features(self, features: NDArray[np.float32]) -> NDArray[np.float32]:
        """Features (n, d) to logits (n, bits)."""
        if not len(features):
            return np.empty((0, self.bits), dtype=np.float32)
        return in_fixed_batches(self.head.logits, features, self.device)

    @torch.inference_mode()
    def queries_of_features(self, features: NDArray[np.float32]) -> NDArray[np.float32]:
        """Features (n, d) to what the head ranks real-valued queries with (n, …)."""
        if not len(features):
            return self.head.query(torch.from_numpy(features).to(self.device)).cpu().numpy()
        return in_fixed_batches(self.head.query, features, self.device)

    def fingerprint(self) -> str:
        """A checksum of everything that decides a code; an index remembers it."""
        parts = [storage.tensors_checksum(m.state_dict()) for m in (self.backbone, self.head)]
        text = f"{parts} {self.backbone.name} {self.preprocessing} {self.head.config()}"
        return hashlib.sha256(text.encode()).hexdigest()

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Write the model folder; an older model in it is replaced only when all is on disk."""
        storage.write_files(Path(folder), self.files())

    def files(self) -> dict[str, Callable[[Path], None]]:
        """The files of the model folder with their writers, in the order they are put in place."""
        state = {f"backbone.{k}": v for k, v in self.backbone.state_dict().items()}
        state |= {f"head.{k}": v for k, v in self.head.state_dict().items()}
        config = {
            "format": FORMAT,
            "bits": self.bits,
            "method": self.method,
            "backbone": self.backbone.name,
            "preprocessing": self.preprocessing.to_config(),
            "head": self.head.config(),
            "classes": list(self.classes),
            "fingerprint": self.fingerprint(),
            "weights_sha256": storage.tensors_checksum(state),
            "versions": versions(),
            "details": self.details,
        }
        from fisherhash.model.card import model_card

        return {
            WEIGHTS: storage.write_tensors(state),
            CARD: storage.write_text(model_card(config)),
            CONFIG: storage.write_text(storage.dump_json(config)),
        }

    @classmethod
    def load(
        cls,
        folder: str | os.PathLike[str],
        *,
        device: torch.device | str = "cpu",
        backbone: nn.Module | None = None,
    ) -> Hasher:
        """Read a model folder; pass ``backbone`` if the model was built on a network of yours."""
        folder = Path(folder)
        config = _read_config(folder / CONFIG)
        state = storage.read_tensors(folder / WEIGHTS)
        checksum = storage.tensors_checksum(state)
        draft = folder / (CONFIG + storage.NEW)
        if config.get("weights_sha256") != checksum and draft.is_file():
            # A save was killed between moving the weights and moving the config: finish reading it.
            config = _read_config(draft)
        try:
            built_on = backbones.restore(
                config["backbone"],
                Preprocessing.from_config(config["preprocessing"]),
                module=backbone,
            )
            head = heads.restore(config["head"])
            names, method = tuple(config["classes"]), str(config["method"])
            details = dict(config["details"])
        except FisherhashError:
            raise
        # Values of a wrong type or size fail wherever the network's constructor first uses them.
        except Exception as error:
            raise FisherhashError(f"{folder / CONFIG} is damaged: {error}") from None
        _load_part(built_on, "backbone", state, folder)
        _load_part(head, "head", state, folder)
        if config.get("weights_sha256") != checksum:
            raise FisherhashError(
                f"{folder / WEIGHTS} is damaged: its checksum is not the one in {CONFIG}; "
                "restore both from a copy or train again"
            )
        return cls(built_on, head, method, names, details, choose_device(device))


def versions() -> dict[str, str]:
    """What a result depends on besides its settings."""
    return {
        "fisherhash": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": np.__version__,
    }


def _listed(images: Images) -> Iterable[ImageLike | Tensor]:
    if isinstance(images, Tensor | np.ndarray):
        return [images] if images.ndim < 4 else list(images)
    if isinstance(images, str | os.PathLike | bytes | Image.Image):
        return [images]
    return images


def _picture(image: ImageLike | Tensor) -> Image.Image:
    if isinstance(image, Tensor):
        if image.dtype != torch.uint8 or image.ndim != 3 or image.shape[0] != 3:
            raise UsageError(
                f"an image tensor must be uint8 of shape (3, height, width), got {image.dtype} "
                f"of shape {tuple(image.shape)}"
            )
        image = image.permute(1, 2, 0).cpu().numpy()
    try:
        return load_image(image)
    except UnreadableImage as error:
        if isinstance(image, str | os.PathLike):
            raise UnreadableImage(f"{os.fspath(image)}: {error}") from None
        raise


def _read_config(path: Path) -> dict[str, Any]:
    folder = path.parent
    if not path.is_file():
        if is_unfinished(folder):
            raise UsageError(
                f"{folder} holds an unfinished run; finish it by the command that began it"
            )
        if folder.is_file():
            what = "is a file, not a model folder"
        elif folder.is_dir():
            what = f"is not a model folder: it has no {CONFIG}"
        else:
            what = "does not exist"
        raise UsageError(f"{folder} {what}. Make a model with: fisherhash train DATA --out MODEL")
    config = storage.read_json(path)
    if config.get("format") != FORMAT:
        raise FisherhashError(
            f"{path} has format {config.get('format')!r}, this version reads {FORMAT}; "
            "update fisherhash or train again"
        )
    return config


def _load_part(module: nn.Module, part: str, state: Mapping[str, Tensor], folder: Path) -> None:
    prefix = part + "."
    found = {k.removeprefix(prefix): v for k, v in state.items() if k.startswith(prefix)}
    wanted = module.state_dict()
    wrong = sorted(
        {k for k in wanted if k not in found or found[k].shape != wanted[k].shape}
        | {k for k in found if k not in wanted}
    )
    if wrong:
        raise FisherhashError(
            f"{folder / WEIGHTS} holds the weights of another architecture than {CONFIG} says: "
            f"{len(wrong)} tensors of the {part} do not fit, the first is '{wrong[0]}'"
        )
    module.load_state_dict(found)
