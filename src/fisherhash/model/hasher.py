"""The hasher: images in, codes out; a folder that can be saved, loaded and shared.

A hasher is a network (pixels to features) and a head (features to logits), both plain data. This
module imports neither torch nor ONNX Runtime: what a model needs is imported when it is loaded.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fisherhash import codes
from fisherhash.data.collection import Collection
from fisherhash.data.computing import Rows, compute_blocks, decode_images
from fisherhash.data.images import UnreadableImage
from fisherhash.data.preprocessing import Preprocessing
from fisherhash.data.row_cache import stored_rows
from fisherhash.data.vectors import VECTORS_AT_ONCE, check_finite_rows, check_shape, vector_blocks
from fisherhash.errors import FisherhashError, NotDefinedError, UsageError
from fisherhash.model import builtin
from fisherhash.model.blocks import DecodedSource, EncodedBlock, one_by_one
from fisherhash.model.folder import CONFIG, model_files, read_model, versions
from fisherhash.model.head import FinishedHead, no_head
from fisherhash.model.hub import locate_model
from fisherhash.model.networks import (
    ONNX_CPU,
    TORCH_CPU,
    UNSURE,
    Network,
    feature_key,
    feature_rows,
)
from fisherhash.model.onnx_network import LOGITS, OnnxNetwork
from fisherhash.system import storage
from fisherhash.system.progress import progress

if TYPE_CHECKING:
    import torch
    from torch import nn

    from fisherhash.model.blocks import Images
    from fisherhash.model.export import Agreement

logger = logging.getLogger(__name__)


class Hasher:
    """Images to codes of ``bits`` bits; :meth:`load` makes one.

    Args:
        network: turns images into features; None for a model of vectors.
        head: turns features into logits.
        method: name of the method that trained the head.
        classes: names of the classes it was trained on, if there were labels.
        details: how it was made (data, split, hyper-parameters, results), for the model card.
        origin: where it came from: ``builtin``, ``path``, or empty if it was made in this process.
        fitted: weight (d, m) and offset (m,) of bits that were fitted to the training images
            without labels. An index of few images appends them, see :meth:`extended`; they are no
            part of the codes of this hasher.
    """

    def __init__(
        self,
        network: Network | None,
        head: FinishedHead,
        *,
        method: str,
        classes: Sequence[str] = (),
        details: dict[str, Any] | None = None,
        origin: dict[str, Any] | None = None,
        fitted: tuple[NDArray[np.float32], NDArray[np.float32]] | None = None,
    ) -> None:
        self.network, self.head, self.method, self.classes = network, head, method, tuple(classes)
        self.details, self.origin, self.fitted = details or {}, origin or {}, fitted

    def __repr__(self) -> str:
        return f"Hasher(method={self.method!r}, bits={self.bits}, backbone={self.backbone_name!r})"

    @property
    def bits(self) -> int:
        """Number of bits of a code."""
        return self.head.bits

    @property
    def ranking(self) -> Literal["hamming", "real"]:
        """How searches with its queries rank best, as measured when it was trained."""
        found = self.details.get("ranking")
        real = isinstance(found, dict) and found.get("default") == "real" and self.head.hamming
        return "real" if real else "hamming"

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
    def about(self) -> dict[str, Any]:
        """Which model this is, as JSON; an index stores it to find its model again."""
        if "builtin" in self.origin:
            return dict(self.origin)
        summary = {"method": self.method, "backbone": self.backbone_name, "bits": self.bits}
        return self.origin | summary

    def fingerprint(self) -> str:
        """A checksum of everything that decides a code; an index stores it."""
        if self.network is None:
            return self.head.checksum()
        if not self.rows_are_features:
            # That of the model whose head is part of the network.
            whole = self.network.checksum
            cut = self.bits < self.head.in_features
            return builtin.first_fingerprint(whole, self.bits) if cut else whole
        how = json.dumps(self.preprocessing.to_config(), sort_keys=True)
        about = (self.network.checksum, self.network.name, how, self.head.checksum())
        return hashlib.sha256(" ".join(about).encode()).hexdigest()

    @property
    def rows_are_features(self) -> bool:
        """Whether the network computes features, and not the logits themselves."""
        return not (isinstance(self.network, OnnxNetwork) and self.network.output == LOGITS)

    # Other codes of the same network.

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
        return self if bits == self.bits else self.with_head(self.head.cut(bits))

    def extended(self, weight: NDArray[np.floating], offset: NDArray[np.floating]) -> Hasher:
        """Return a hasher whose logits are this one's, then ``features @ weight + offset``.

        Args:
            weight: (feature_width, m).
            offset: (m,).

        Raises:
            UsageError: the shapes do not fit.
            NotDefinedError: the codes have no Hamming distance, or the network has no features.
        """
        if not self.rows_are_features:
            raise NotDefinedError(
                f"the network of this model ({self.method}) computes logits itself, so no bits of "
                "its features can follow; use a model folder with a network and a head"
            )
        return self.with_head(self.head.joined(weight, offset))

    def with_head(self, head: FinishedHead) -> Hasher:
        """Return a hasher with another head on the same network."""
        about: dict[str, Any] = {"method": self.method, "classes": self.classes}
        about |= {"details": dict(self.details), "fitted": self.fitted}
        return Hasher(self.network, head, **about)

    # From images to rows (features) to codes.

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
            sum(part.unsure for part in parts),
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
        unsure = int(np.count_nonzero(np.abs(logits) < UNSURE))
        return EncodedBlock(rows.indices, codes.pack(logits), real, rows.skipped, unsure)

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

    # Folders and files.

    def config(self) -> dict[str, Any]:
        """What describes the model, as JSON."""
        images = self.network is not None
        return {
            "bits": self.bits,
            "method": self.method,
            "backbone": self.backbone_name if images else None,
            "preprocessing": self.preprocessing.to_config() if images else None,
            "head": self.head.config(),
            "classes": list(self.classes),
            "fingerprint": self.fingerprint(),
            "versions": versions(),
            "details": self.details,
        }

    def files(self) -> dict[str, storage.Content]:
        """The files of the model folder and what goes into them, in the order of their writing."""
        return model_files(self.config(), self.network, self.head, self.fitted)

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Write the model folder; an older model in it is replaced only when all is on disk."""
        storage.write_files(Path(folder), self.files())

    def export(self) -> tuple[bytes, Agreement]:
        """Export network and head as one ONNX file; returns it, and how it agrees with this hasher.

        Raises:
            UsageError: the model takes vectors.
            FisherhashError: the extra is not installed, or something has no counterpart in ONNX.
        """
        from fisherhash.model.export import export_onnx

        if self.network is None:
            raise UsageError("a model of vectors has no network to export")
        return export_onnx(self.network, self.head, self.config())

    @classmethod
    def load(
        cls,
        model: str | os.PathLike[str] | None = None,
        *,
        device: torch.device | str | None = "cpu",
        backbone: nn.Module | None = None,
    ) -> Hasher:
        """Load a model from its folder, its ONNX file or the hub, or a built-in one by its name.

        ONNX Runtime runs the network on a CPU where the model has an ONNX file, otherwise torch,
        which ``pip install 'fisherhash[train]'`` brings.

        Args:
            model: a model folder, an exported ``.onnx`` file, one of ``builtin.NAMES``, or
                ``hf:user/name`` on the Hugging Face Hub, with the extra ``hub``; by default the
                built-in hasher. A folder comes first where both exist.
            device: where it runs: ``cpu``, ``cuda``, or an execution provider of ONNX Runtime such
                as ``openvino``; ``auto`` or None for CUDA where there is a GPU.
            backbone: the network, if the model was built on one of your own.

        Raises:
            UsageError: there is no such model; a typo is answered with the nearest name.
            FisherhashError: the model is damaged, or needs a package that is not installed.
        """
        found = locate_model(model)
        if isinstance(found, str):
            if backbone is not None:
                raise UsageError(f"the built-in hasher '{found}' has a backbone; pass none with it")
            return cls.load_builtin(found, device=device)
        origin = {"path": os.path.abspath(found)}
        if found.suffix == ".onnx" and found.is_file():
            if backbone is not None:
                raise UsageError("an exported model has its network; pass none with it")
            return cls.of_exported(OnnxNetwork(found, device=device), origin=origin)
        stored = read_model(found)
        hasher = cls(**stored.parts(device=device, backbone=backbone), origin=origin)
        # All files are whole, so the config was edited, and the model is another one.
        if hasher.fingerprint() != stored.config["fingerprint"]:
            what = "changed after the model was saved; it makes other codes than before"
            logger.warning("%s %s", found / CONFIG, what)
        return hasher

    @classmethod
    def load_builtin(
        cls,
        name: str = builtin.DEFAULT_HASHER,
        *,
        device: torch.device | str | None = "cpu",
    ) -> Hasher:
        """Load a built-in hasher, whatever folders there are.

        Args:
            name: one of ``builtin.NAMES``.
            device: where it runs, as for :meth:`load`.

        Raises:
            UsageError: there is no built-in hasher of this name.
            FisherhashError: its files are damaged, or a package that it needs is not installed.
        """
        folder = builtin.folder(name)
        try:
            stored = read_model(folder)
        except FisherhashError as error:
            raise builtin.damaged(folder, error) from None
        hasher = cls(**stored.parts(device=device))
        if name in builtin.FIRST:
            hasher = hasher.truncated(builtin.FIRST[name][1])
        hasher.origin = {"builtin": name}
        return hasher

    @classmethod
    def of_exported(
        cls,
        network: OnnxNetwork,
        *,
        details: dict[str, Any] | None = None,
        origin: dict[str, Any] | None = None,
    ) -> Hasher:
        """The hasher of an exported file, which has network and head in one graph."""
        known = network.metadata
        of, width = str(known["head"]["kind"]), int(known["head"]["in_features"])
        known_head = {"of": of, "features": width, "hamming": bool(known["hamming"])}
        head = no_head(int(known["bits"]), **known_head)
        about: dict[str, Any] = {"method": str(known["method"]), "details": details}
        about |= {"classes": tuple(known["classes"]), "origin": origin}
        return cls(network.computing(LOGITS), head, **about)
