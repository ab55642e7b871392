"""A network in ONNX Runtime: an ONNX file, pixels in, features or logits out.

Every image is computed alone, by one thread: it has the same bits in any company, and on any number
of cores. Several images are computed at the same time, each by a thread of its own.
"""

from __future__ import annotations

import copy
import functools
import hashlib
import importlib.util
import json
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from fisherhash.data.computing import RowFunction
from fisherhash.data.preprocessing import Preprocessing
from fisherhash.errors import FisherhashError, UsageError
from fisherhash.system import storage
from fisherhash.system.cores import available_cores
from fisherhash.system.devices import AUTO

if TYPE_CHECKING:
    import torch

METADATA = "fisherhash"
"""The entry of an ONNX file's metadata that says what it is, as JSON."""
ONNX_FORMAT = 1
PIXELS, LOGITS, FEATURES = "pixels", "logits", "features"
_GPU_IMAGES = 32
_PROVIDER = "ExecutionProvider"


def installed() -> bool:
    """Whether ONNX Runtime is installed."""
    return importlib.util.find_spec("onnxruntime") is not None


def provides(device: str | torch.device | None) -> bool:
    """Whether only ONNX Runtime can run on a device: CUDA without torch, OpenVINO, CoreML, …"""
    name = str(device).partition(":")[0].lower()
    if name == "cuda" and importlib.util.find_spec("torch") is not None:
        return False
    return name in _providers()


def _providers() -> dict[str, str]:
    """The execution providers that are installed, by the name of their device."""
    import onnxruntime

    known = onnxruntime.get_available_providers()
    return {name.removesuffix(_PROVIDER).lower(): name for name in known}


class OnnxNetwork:
    """An exported network.

    Args:
        source: the ONNX file, or its bytes.
        device: ``cpu``, ``cuda``, ``cuda:1``, or another execution provider by its name.
        metadata: what the file says of itself, where it is known. A file on a CPU is then loaded
            when the first image is computed here: never, where worker processes compute all.
        output: what it computes: ``features``, or ``logits`` where the file has a head too.
        weights: a file that also holds its weights for torch, if there is one.

    Raises:
        UsageError: the device cannot be used, or the file was not exported by fisherhash.
        FisherhashError: the file is damaged, or was written by a later version.

    Attributes:
        name: name of the backbone.
        preprocessing: what happens to an image before.
        kind: ``onnx-cpu``, ``onnx-cuda``, …
        checksum: SHA-256 of the weights, or the fingerprint of a model with a head.
        metadata: what the file says of its model.
        output: what it computes.
    """

    def __init__(
        self,
        source: Path | bytes,
        *,
        device: str | torch.device | None = "cpu",
        metadata: dict[str, Any] | None = None,
        output: str = FEATURES,
        weights: Path | None = None,
    ) -> None:
        self.source, self.output, self._weights = source, output, weights
        what = "the exported model" if isinstance(source, bytes) else str(source)
        where, options = _provider_of(device)
        self._load = functools.partial(_session, source, where, options, what)
        if metadata is None:
            text = self._session.get_modelmeta().custom_metadata_map.get(METADATA)
            metadata = _metadata(text, what)
        self.metadata = metadata
        if metadata["int8"] and where != "cpu":
            if device not in (None, AUTO):
                raise UsageError(
                    f"{what} is an int8 model, which runs on a CPU only; use --device cpu, or the "
                    "model in full precision (--model general-64 for the built-in one)"
                )
            where = "cpu"
            self._session = _session(source, where, {}, what)
        self.kind = f"onnx-{where}"
        self.name = str(metadata["backbone"])
        self.checksum = str(metadata["fingerprint"])
        self.preprocessing = Preprocessing.from_config(metadata["preprocessing"])
        self._images = 1 if where == "cpu" else _GPU_IMAGES
        self._pool: ThreadPoolExecutor | None = None
        self._starting = threading.Lock()

    @functools.cached_property
    def _session(self) -> Any:
        return self._load()

    @property
    def width(self) -> int:
        """Numbers per image: of features, or of logits."""
        if self.output == LOGITS:
            return int(self.metadata["bits"])
        head = self.metadata.get("head") or {}
        if "in_features" in head:
            return int(head["in_features"])
        shapes = {output.name: output.shape for output in self._session.get_outputs()}
        return int(shapes[FEATURES][1])

    def decoding(self, preprocessing: Preprocessing) -> OnnxNetwork:
        """The same network behind another preprocessing."""
        other = copy.copy(self)
        other.preprocessing = preprocessing
        return other

    def loaded(self) -> OnnxNetwork:
        """This network, once its file is loaded."""
        _ = self._session
        return self

    def computing(self, output: str) -> OnnxNetwork:
        """The same network with another output: ``features`` or ``logits``."""
        other = copy.copy(self)
        other.output = output
        return other

    def content(self) -> bytes:
        """The bytes of the file."""
        return self.source if isinstance(self.source, bytes) else storage.read_bytes(self.source)

    def torch_weights(self) -> dict[str, NDArray[Any]]:
        """The tensors of the network's weights for torch, as they are stored, if they are."""
        if self._weights is None:
            return {}
        from safetensors.numpy import load

        tensors = load(storage.read_bytes(self._weights))
        return {name: value for name, value in tensors.items() if name.startswith("network.")}

    def features(self, pixels: NDArray[np.uint8]) -> NDArray[np.float32]:
        """Bytes (n, 3, size, size) to rows (n, width)."""
        pixels, step = np.ascontiguousarray(pixels), self._images
        parts = [pixels[start : start + step] for start in range(0, len(pixels), step)]
        if parts and len(parts[-1]) < step:
            padding = np.zeros((step - len(parts[-1]), *pixels.shape[1:]), dtype=np.uint8)
            parts[-1] = np.concatenate([parts[-1], padding])
        # On a CPU several images are computed at the same time, each by one thread.
        apart = len(parts) > 1 and step == 1 and available_cores() > 1
        inputs = ({PIXELS: part} for part in parts)
        run = functools.partial(self._session.run, [self.output])
        none = np.empty((0, self.width), dtype=np.float32)
        try:
            found = list(self._threads().map(run, inputs) if apart else map(run, inputs))
        # ONNX Runtime raises classes of its own, such as for images of another size.
        except Exception as error:
            reason = str(error).strip().splitlines()[0][:200]
            raise FisherhashError(f"{self.name} in ONNX Runtime: {reason}") from error
        return np.concatenate([none, *(rows for (rows,) in found)])[: len(pixels)]

    def row_function(self) -> RowFunction:
        """What computes the rows of image files, in worker processes where that is faster."""
        here = self._images > 1 or sys.platform == "win32"
        if here or isinstance(self.source, bytes):
            return RowFunction(self.features, self.preprocessing, (self.width,))
        session = self.__dict__.get("_session")
        function = OnnxFunction(self.source, self._file_checksum, self.output, session)
        return RowFunction(function, self.preprocessing, (self.width,), portable=True)

    def stored_by(self, count: int) -> OnnxNetwork:
        """This network: there is no faster one."""
        return self

    @functools.cached_property
    def _file_checksum(self) -> str:
        return hashlib.sha256(self.content()).hexdigest()

    def _threads(self) -> ThreadPoolExecutor:
        with self._starting:
            if self._pool is None:
                self._pool = ThreadPoolExecutor(available_cores(), "fisherhash-onnx")
            return self._pool


class OnnxFunction:
    """One output of an exported network on the CPU, for worker processes.

    Args:
        path: the ONNX file, which a worker opens when it computes its first image.
        checksum: SHA-256 of the file.
        output: ``features`` or ``logits``.
        session: of this process; it is not sent to others.
    """

    def __init__(self, path: Path, checksum: str, output: str, session: Any = None) -> None:
        self._path, self._checksum, self._output = path, checksum, output
        self._session = session

    def __reduce__(self) -> tuple[Any, ...]:
        return OnnxFunction, (self._path, self._checksum, self._output)

    def __call__(self, pixels: NDArray[np.uint8]) -> NDArray[np.float32]:
        """Bytes (n, 3, size, size) to rows; every image is computed alone.

        Raises:
            FisherhashError: the file was replaced since the model was loaded.
        """
        if self._session is None:
            data = storage.read_bytes(self._path)
            if hashlib.sha256(data).hexdigest() != self._checksum:
                raise FisherhashError(f"{self._path} was replaced while it was used; try again")
            self._session = _session(data, "cpu", {}, str(self._path))
        pixels = np.ascontiguousarray(pixels)
        run = self._session.run
        return np.concatenate([run([self._output], {PIXELS: one[None]})[0] for one in pixels])


def _provider_of(device: str | torch.device | None) -> tuple[str, dict[str, Any]]:
    """The execution provider of a device, in lower case, and its options."""
    if device == "cpu":
        return "cpu", {}
    providers = _providers()
    if device in (None, AUTO):
        return ("cuda", {}) if "cuda" in providers else ("cpu", {})
    name, _, number = str(device).lower().partition(":")
    if name not in providers or (number and not number.isdecimal()):
        raise UsageError(
            f"the device '{device}' cannot be used: this ONNX Runtime has {', '.join(providers)}"
        )
    return name, {"device_id": number} if number else {}


def _session(source: Path | bytes, where: str, provider_options: dict[str, Any], what: str) -> Any:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    options.use_deterministic_compute = True
    options.log_severity_level = 3
    providers: list[Any] = [(_providers()[where], provider_options)]
    if where != "cpu":
        providers.append(_providers()["cpu"])
    model = source if isinstance(source, bytes) else str(source)
    try:
        return onnxruntime.InferenceSession(model, options, providers=providers)
    # ONNX Runtime raises classes of its own for files that are cut, empty or no graph at all.
    except Exception as error:
        reason = str(error).strip().splitlines()[0][:200]
        raise FisherhashError(
            f"{what} cannot be loaded: {reason}. If it is damaged, export it again with: "
            "fisherhash export onnx MODEL"
        ) from None


def _metadata(text: str | None, what: str) -> dict[str, Any]:
    if text is None:
        raise UsageError(
            f"{what} was not exported by fisherhash; export a model with: fisherhash export onnx "
            "MODEL"
        )
    found = json.loads(text)
    if found.get("format") != ONNX_FORMAT:
        raise FisherhashError(
            f"{what} has format {found.get('format')!r}, this version reads {ONNX_FORMAT}; update "
            "fisherhash or export again"
        )
    return found
