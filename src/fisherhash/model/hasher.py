"""The hasher: images in, codes out; a folder that can be saved, loaded and shared.

A hasher is a network (pixels to features) and a head (features to logits), both plain data. This
module imports neither torch nor ONNX Runtime: what a model needs is imported when it is loaded.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from fisherhash.errors import NotDefinedError, UsageError
from fisherhash.model import builtin
from fisherhash.model.encoder import EncodedBlock, Encoder
from fisherhash.model.folder import CONFIG, model_files, read_model, versions
from fisherhash.model.head import FinishedHead, no_head
from fisherhash.model.hub import locate_model
from fisherhash.model.networks import Network
from fisherhash.model.onnx_network import LOGITS, OnnxNetwork
from fisherhash.system import storage

if TYPE_CHECKING:
    import torch
    from torch import nn

    from fisherhash.model.export import Agreement

__all__ = ["EncodedBlock", "Hasher"]

logger = logging.getLogger(__name__)


class Hasher(Encoder):
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
        super().__init__(network, head, method)
        self.classes = tuple(classes)
        self.details, self.origin, self.fitted = details or {}, origin or {}, fitted

    def __repr__(self) -> str:
        return f"Hasher(method={self.method!r}, bits={self.bits}, backbone={self.backbone_name!r})"

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
        parts, fingerprint = read_model(found, device=device, backbone=backbone)
        hasher = cls(**parts, origin=origin)
        # All files are whole, so the config was edited, and the model is another one.
        if hasher.fingerprint() != fingerprint:
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
        hasher = cls(**read_model(builtin.folder(name), device=device)[0])
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
