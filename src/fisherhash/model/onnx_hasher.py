"""The hasher in ONNX Runtime: an exported model, which needs no torch."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from fisherhash.data.collection import Collection
from fisherhash.data.computing import RowFunction
from fisherhash.data.preprocessing import Preprocessing
from fisherhash.data.row_cache import has_rows
from fisherhash.errors import FisherhashError, UsageError
from fisherhash.model import builtin
from fisherhash.model.export import cut_logits
from fisherhash.model.folder import (
    CARD,
    CONFIG,
    ONNX,
    ONNX_SUM,
    WEIGHTS,
    described_files,
    usable_onnx,
    versions,
)
from fisherhash.model.hasher import ComputeRows, EncodedBlock, ExportedHead, Hasher
from fisherhash.model.onnx_runtime import OnnxRuntime
from fisherhash.system import storage

if TYPE_CHECKING:
    import torch

DECIDING = ("fingerprint", "bits", "backbone", "preprocessing", "head")
"""What the config of a folder and the metadata of its ONNX file must agree on."""


class OnnxHasher(Hasher):
    """An exported model.

    Args:
        runtime: the exported network.
        details: how it was made.
        origin: where it came from.
        folder: the model folder it is a part of.
        first: how many of the network's bits are the code; by default all.
    """

    def __init__(
        self,
        runtime: OnnxRuntime,
        *,
        details: dict[str, Any] | None = None,
        origin: dict[str, Any] | None = None,
        folder: Path | None = None,
        first: int | None = None,
    ) -> None:
        known = runtime.metadata
        self.runtime, self.details, self.origin = runtime, details or {}, origin or {}
        self.method, self.classes = str(known["method"]), tuple(known["classes"])
        kind, hamming = str(known["head"]["kind"]), bool(known["hamming"])
        self.head = self._exported = ExportedHead(kind, first or runtime.bits, hamming)
        self._folder = folder
        self._in_torch: Hasher | None = None

    def _truncated(self, bits: int) -> OnnxHasher:
        return OnnxHasher(self.runtime, details=self.details, folder=self._folder, first=bits)

    @property
    def _whole(self) -> bool:
        """Whether the code has all bits that the network computes."""
        return self.bits == self.runtime.bits

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
        """What computes the codes, and where: ``onnx-cpu``, ``onnx-cuda``, …"""
        return self.runtime.kind

    @property
    def rows_are_features(self) -> bool:
        """They are logits: the exported network ends there."""
        return False

    @property
    def fine_bits(self) -> int:
        """Number of bits of the second code; 0 without one."""
        return self.runtime.fine_bits

    @property
    def _row_width(self) -> int:
        return self.runtime.bits + self.runtime.fine_bits

    @property
    def feature_width(self) -> int:
        """Dimensions of the features that the head takes."""
        return int(self.runtime.metadata["head"]["in_features"])

    def logits_of_features(self, features: NDArray[np.float32]) -> NDArray[np.float32]:
        """Features (n, d) to logits (n, bits), by the head in the model folder, with torch.

        Raises:
            UsageError: there is no such head: the exported network starts from pixels.
            FisherhashError: torch is not installed.
        """
        return self._with_torch().logits_of_features(features)

    def fine_of_features(self, features: NDArray[np.float32]) -> NDArray[np.float32]:
        """Features (n, d) to the logits of the second code (n, fine_bits), likewise."""
        return self._with_torch().fine_of_features(features)

    def _with_torch(self) -> Hasher:
        if self._in_torch is None:
            folder = self._folder
            if "builtin" in self.origin and self.origin["builtin"] not in builtin.EXPORTED_ONLY:
                self._in_torch = Hasher.load_builtin(self.origin["builtin"], runtime="torch")
            elif folder is not None and (folder / WEIGHTS).is_file():
                self._in_torch = Hasher.load(folder, runtime="torch")
            else:
                raise UsageError(
                    "an exported network starts from pixels, so it cannot encode features; load "
                    f"the model folder it was exported from, with its {WEIGHTS}"
                )
        return self._in_torch

    @property
    def _compute(self) -> ComputeRows:
        return self.runtime.all_logits

    @property
    def _row_key(self) -> str:
        return f"logits {self.runtime.metadata['fingerprint']} {self.runtime.kind}"

    def _row_function(self) -> RowFunction:
        copy = self.runtime.worker_copy(self.runtime.output)
        compute = self.runtime.all_logits if copy is None else copy
        return RowFunction(
            compute, self.preprocessing, (self._row_width,), portable=copy is not None
        )

    def encode_stored(self, collection: Collection) -> EncodedBlock | None:
        """Codes of the images whose logits are stored on disk, or whose features are.

        Training stores features, which the head in the model folder turns into codes with torch.
        """
        found = super().encode_stored(collection)
        folder = self._folder
        if found is not None or folder is None or not (folder / WEIGHTS).is_file():
            return found
        if importlib.util.find_spec("torch") is None or not has_rows("features", collection):
            return None
        whole = Hasher.load(folder, runtime="torch")
        return whole.truncated(self.bits).encode_stored(collection)

    def logits_of_rows(self, rows: NDArray[np.float32]) -> NDArray[np.float32]:
        """The rows are the logits (n, bits), of which a truncated code has the first."""
        return np.asarray(rows)[:, : self.bits]

    def fine_of_rows(self, rows: NDArray[np.float32]) -> NDArray[np.float32]:
        """Those of the second code (n, fine_bits) come behind."""
        return np.asarray(rows)[:, self.runtime.bits :]

    def queries_of_rows(self, rows: NDArray[np.float32]) -> NDArray[np.float32]:
        """Logits are the queries of codes that are ranked by Hamming distance.

        Raises:
            UsageError: codes of this head are ranked otherwise.
        """
        if not self.head.hamming:
            self._exported.distances(rows, np.empty((0, 0), dtype=np.uint8))
        return self.logits_of_rows(rows)

    def fingerprint(self) -> str:
        """A checksum of everything that decides a code; an index stores it."""
        whole = str(self.runtime.metadata["fingerprint"])
        if self._whole:
            return whole
        return builtin.first_fingerprint(whole, self.bits)

    def config(self) -> dict[str, Any]:
        """What describes the model, as JSON."""
        known = self.runtime.metadata
        described = {key: known[key] for key in (*DECIDING, "method", "classes")}
        if self.fine_bits:
            described["fine_bits"] = self.fine_bits
        if not self._whole:
            described |= {"bits": self.bits, "head": known["head"] | {"bits": self.bits}}
            described["fingerprint"] = self.fingerprint()
        return described | {"versions": versions(), "details": self.details}

    def files(self) -> dict[str, storage.Content]:
        """The files of the model folder: those it came from, or the ONNX file, described.

        Raises:
            FisherhashError: the code has fewer bits than the exported network computes, and the
                extra that cuts the network is not installed.
        """
        if not self._whole:
            config = self.config()
            return described_files(config, cut_logits(self.runtime, config))
        if self._folder is not None and "builtin" not in self.origin:
            names = (WEIGHTS, ONNX, CARD, CONFIG)
            return {
                name: storage.read_bytes(self._folder / name)
                for name in names
                if (self._folder / name).is_file()
            }
        return described_files(self.config(), self.runtime.content())

    @classmethod
    def from_folder(
        cls, place: Path, *, device: str | torch.device | None, backbone: object = None
    ) -> OnnxHasher:
        """Load an ONNX file, or the one in a model folder.

        Args:
            place: the file, or the folder.
            device: where it runs.
            backbone: must be None; an exported model has its network.

        Raises:
            UsageError: there is no exported model in the folder.
            FisherhashError: the file is damaged, or belongs to another model than its folder says.
        """
        if backbone is not None:
            raise UsageError("an exported model has its network; pass none with it")
        origin = {"path": os.path.abspath(place)}
        if place.is_file():
            return cls(OnnxRuntime(place, device=device), origin=origin)
        config = usable_onnx(place)
        if config is None:
            raise UsageError(f"{place} holds no exported model")
        return _described(place, config, device, origin)

    @classmethod
    def from_package(cls, name: str, *, device: str | torch.device | None) -> OnnxHasher:
        """Load the ONNX file of a built-in hasher.

        Raises:
            FisherhashError: its files are damaged.
        """
        config = builtin.onnx_config(name)
        # Its files do not change while it is used, so it may be loaded later.
        origin = {"builtin": name}
        whole = _described(builtin.folder(name), config, device, origin, later=True)
        if name not in builtin.FIRST:
            return whole
        short = whole._truncated(builtin.FIRST[name][1])
        short.origin = whole.origin
        return short


def _described(
    place: Path,
    config: dict[str, Any],
    device: str | torch.device | None,
    origin: dict[str, Any],
    *,
    later: bool = False,
) -> OnnxHasher:
    checksum = config.get(ONNX_SUM) if later else None
    runtime = OnnxRuntime(place / ONNX, device=device, checksum=checksum)
    wrong = [key for key in DECIDING if config.get(key) != runtime.metadata[key]]
    if wrong:
        raise FisherhashError(
            f"{place / ONNX} belongs to another model than config.json says ({wrong[0]} "
            f"differs); write it again with: fisherhash export onnx {place}"
        )
    return OnnxHasher(runtime, details=dict(config["details"]), origin=origin, folder=place)
