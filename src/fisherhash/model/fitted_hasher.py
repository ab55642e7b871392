"""A hasher that is fitted to a collection without torch: an exported network and one matrix.

Its folder holds the network as ``features.onnx`` and the matrix as ``head.safetensors``, so it does
not depend on which built-in hashers a version has.
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
from numpy.typing import NDArray

from fisherhash.data.computing import RowFunction
from fisherhash.data.preprocessing import Preprocessing
from fisherhash.errors import FisherhashError
from fisherhash.model.card import model_card
from fisherhash.model.folder import (
    CARD,
    CONFIG,
    FITTED_MATRIX,
    FITTED_NETWORK,
    MODEL_FORMAT,
    read_config,
    versions,
)
from fisherhash.model.hasher import ComputeRows, ExportedHead, Hasher
from fisherhash.model.onnx_runtime import OnnxRuntime
from fisherhash.model.runtime import Runtime, feature_function, feature_key
from fisherhash.system import storage

if TYPE_CHECKING:
    import torch

NETWORK_SUM, MATRIX_SUM = "features_sha256", "matrix_sha256"


class FittedHasher(Hasher):
    """Features of an exported network, and a linear head in numpy.

    Args:
        runtime: the exported network.
        weight: (bits, d) of the head.
        offset: (bits,) of the head: a bit is 1 where weight @ f + offset > 0.
        method: name of the method that fitted the head.
        details: how it was made.
        origin: where it came from.
    """

    def __init__(
        self,
        runtime: OnnxRuntime,
        weight: NDArray[np.float32],
        offset: NDArray[np.float32],
        *,
        method: str,
        details: dict[str, Any] | None = None,
        origin: dict[str, Any] | None = None,
    ) -> None:
        self.runtime, self.method, self.classes = runtime, method, ()
        self.weight = np.ascontiguousarray(weight, dtype=np.float32)
        self.offset = np.ascontiguousarray(offset, dtype=np.float32)
        self.details, self.origin = details or {}, origin or {}
        self.head = ExportedHead("linear", len(self.weight), True)

    def _truncated(self, bits: int) -> FittedHasher:
        part = self.weight[:bits], self.offset[:bits]
        return FittedHasher(self.runtime, *part, method=self.method, details=self.details)

    @property
    def backbone_name(self) -> str:
        """Name of the network that turns images into features."""
        return self.runtime.name

    @property
    def preprocessing(self) -> Preprocessing:
        """What happens to an image before the backbone."""
        return self.runtime.preprocessing

    @property
    def runtime_name(self) -> str:
        """What computes the codes, and where."""
        return self.runtime.kind

    @property
    def _network(self) -> Runtime:
        # Its checksum is a cached property, which a protocol cannot express.
        return cast("Runtime", self.runtime)

    @property
    def _row_width(self) -> int:
        return self.runtime.width

    @property
    def feature_width(self) -> int:
        """Dimensions of the features that the head takes."""
        return self.runtime.width

    @property
    def _compute(self) -> ComputeRows:
        return self.runtime.features

    @property
    def _row_key(self) -> str:
        return feature_key(self._network)

    def _row_function(self) -> RowFunction:
        return feature_function(self._network)

    def logits_of_rows(self, rows: NDArray[np.float32]) -> NDArray[np.float32]:
        """Features (n, d) to logits (n, bits).

        In double precision, so that the size of a block decides no bit.
        """
        values = np.asarray(rows, dtype=np.float64) @ self.weight.T.astype(np.float64)
        return (values + self.offset).astype(np.float32)

    def queries_of_rows(self, rows: NDArray[np.float32]) -> NDArray[np.float32]:
        """Real-valued queries are the logits."""
        return self.logits_of_rows(rows)

    def logits_of_features(self, features: NDArray[np.float32]) -> NDArray[np.float32]:
        """Features (n, d) to logits (n, bits)."""
        return self.logits_of_rows(features)

    def fingerprint(self) -> str:
        """A checksum of everything that decides a code; an index stores it."""
        parts = [self.runtime.checksum, self._matrix_sum]
        # The checksum covers the preprocessing that the network came with.
        if self.preprocessing != Preprocessing.from_config(self.runtime.metadata["preprocessing"]):
            parts.append(repr(self.preprocessing))
        return hashlib.sha256(" ".join(parts).encode()).hexdigest()

    @property
    def _matrix_sum(self) -> str:
        digest = hashlib.sha256(f"{self.weight.shape}".encode())
        digest.update(self.weight.tobytes())
        digest.update(self.offset.tobytes())
        return digest.hexdigest()

    def config(self) -> dict[str, Any]:
        """What describes the model, as JSON."""
        return {
            "format": MODEL_FORMAT,
            "kind": "fitted",
            "bits": self.bits,
            "method": self.method,
            "backbone": self.backbone_name,
            "preprocessing": self.preprocessing.to_config(),
            "head": {"kind": "linear", "in_features": self.feature_width, "bits": self.bits},
            "classes": [],
            "fingerprint": self.fingerprint(),
            NETWORK_SUM: self.runtime.checksum,
            MATRIX_SUM: self._matrix_sum,
            "versions": versions(),
            "details": self.details,
        }

    def files(self) -> dict[str, storage.Content]:
        """The files of the model folder and what goes into them, in the order of their writing."""
        from safetensors.numpy import save

        config = self.config()
        return {
            FITTED_NETWORK: self.runtime.content(),
            FITTED_MATRIX: save({"weight": self.weight, "offset": self.offset}),
            CARD: model_card(config),
            CONFIG: storage.dump_json(config),
        }

    @classmethod
    def from_folder(
        cls, place: Path, *, device: str | torch.device | None, backbone: object = None
    ) -> FittedHasher:
        """Load a hasher from its folder.

        Args:
            place: the folder.
            device: where the network runs.
            backbone: must be None; the folder has its network.

        Raises:
            FisherhashError: a file is damaged.
        """
        if backbone is not None:
            raise FisherhashError(f"the model in {place} has its network; pass none with it")
        from safetensors import SafetensorError
        from safetensors.numpy import load

        config = read_config(place / CONFIG)
        try:
            matrix = load(storage.read_bytes(place / FITTED_MATRIX))
            how = Preprocessing.from_config(config["preprocessing"])
            runtime = OnnxRuntime(place / FITTED_NETWORK, device=device).decoding(how)
            hasher = cls(
                runtime,
                matrix["weight"],
                matrix["offset"],
                method=str(config["method"]),
                details=dict(config["details"]),
                origin={"path": os.path.abspath(place)},
            )
            wrong = {
                FITTED_MATRIX: hasher._matrix_sum != config[MATRIX_SUM],
                FITTED_NETWORK: runtime.checksum != config[NETWORK_SUM],
                CONFIG: hasher.fingerprint() != config["fingerprint"],
            }
        except (SafetensorError, KeyError, TypeError, ValueError) as error:
            raise FisherhashError(f"the model in {place} is damaged: {error}") from None
        for name in wrong:
            if wrong[name]:
                raise FisherhashError(
                    f"{place / name} is damaged: its checksum is not the one in {CONFIG}; restore "
                    "it from a copy"
                )
        return hasher
