"""The runtime in ONNX Runtime: an exported network, pixels in, logits or features out.

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
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from fisherhash.data.preprocessing import Preprocessing
from fisherhash.errors import FisherhashError, UsageError
from fisherhash.system import storage
from fisherhash.system.cores import available_cores
from fisherhash.system.devices import AUTO

if TYPE_CHECKING:
    import torch

METADATA = "fisherhash"
"""The entry of an ONNX file's metadata that holds what :class:`OnnxRuntime` knows, as JSON."""
ONNX_FORMAT = 1
PIXELS, LOGITS, FEATURES = "pixels", "logits", "features"
ALL_LOGITS = "all_logits"
"""Those of the code and, behind them, those of the second code; only where there is one."""
_GPU_IMAGES = 32
_PROVIDER = "ExecutionProvider"
_METADATA_PROPS = 14
"""The field of an ONNX file that has the entries of its metadata."""


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


class OnnxRuntime:
    """An exported network.

    Args:
        source: the ONNX file, or its bytes.
        device: ``cpu``, ``cuda``, ``cuda:1``, or another execution provider by its name.
        checksum: SHA-256 of a file that does not change, if it was compared already. On a CPU, such
            a file is loaded when the first image is computed here: never, where worker processes
            compute all.

    Raises:
        UsageError: the device cannot be used, or the file was not exported by fisherhash.
        FisherhashError: the file is damaged, or was written by a later version.

    Attributes:
        name: name of the backbone.
        bits: number of logits per image.
        fine_bits: number of logits of the second code; 0 without one.
        preprocessing: what happens to an image before.
        kind: ``onnx-cpu``, ``onnx-cuda``, …
        metadata: what the file says about its model.
    """

    def __init__(
        self,
        source: Path | bytes,
        *,
        device: str | torch.device | None = "cpu",
        checksum: str | None = None,
    ) -> None:
        self._source = source
        what = "the exported model" if isinstance(source, bytes) else str(source)
        where, options = _placed(device)
        self._load = functools.partial(_session, source, where, options, what)
        if checksum is not None:
            self.checksum = checksum
        text = None if checksum is None or where != "cpu" else _stored_metadata(self.content())
        if text is None:
            text = self._session.get_modelmeta().custom_metadata_map.get(METADATA)
        self.metadata = _metadata(text, what)
        if self.metadata["int8"] and where != "cpu":
            if device not in (None, AUTO):
                raise UsageError(
                    f"{what} is an int8 model, which runs on a CPU only; use --device cpu, or the "
                    "model in full precision (--model general-64 for the built-in one)"
                )
            where = "cpu"
            self._session = _session(source, where, {}, what)
        self.kind = f"onnx-{where}"
        self.name = str(self.metadata["backbone"])
        self.bits = int(self.metadata["bits"])
        self.fine_bits = int(self.metadata.get("fine_bits", 0))
        self.preprocessing = Preprocessing.from_config(self.metadata["preprocessing"])
        self._images = 1 if where == "cpu" else _GPU_IMAGES
        self._pool: ThreadPoolExecutor | None = None
        self._starting = threading.Lock()

    @functools.cached_property
    def _session(self) -> Any:
        return self._load()

    @functools.cached_property
    def width(self) -> int:
        """Number of features per image."""
        head = self.metadata.get("head") or {}
        if "in_features" in head:
            return int(head["in_features"])
        shapes = {output.name: output.shape for output in self._session.get_outputs()}
        return int(shapes[FEATURES][1])

    def decoding(self, preprocessing: Preprocessing) -> OnnxRuntime:
        """The same network behind another preprocessing."""
        other = copy.copy(self)
        other.preprocessing = preprocessing
        return other

    @functools.cached_property
    def checksum(self) -> str:
        """SHA-256 of the file."""
        return hashlib.sha256(self.content()).hexdigest()

    def content(self) -> bytes:
        """The bytes of the file."""
        source = self._source
        return source if isinstance(source, bytes) else storage.read_bytes(source)

    def logits(self, pixels: NDArray[np.uint8]) -> NDArray[np.float32]:
        """Bytes (n, 3, size, size) to logits (n, bits)."""
        return self._run(LOGITS, self.bits, pixels)

    @property
    def output(self) -> str:
        """The output that holds all logits, those of the second code included."""
        return ALL_LOGITS if self.fine_bits else LOGITS

    def all_logits(self, pixels: NDArray[np.uint8]) -> NDArray[np.float32]:
        """Bytes (n, 3, size, size) to the logits of both codes (n, bits + fine_bits)."""
        return self._run(self.output, self.bits + self.fine_bits, pixels)

    def features(self, pixels: NDArray[np.uint8]) -> NDArray[np.float32]:
        """Bytes (n, 3, size, size) to features (n, width)."""
        return self._run(FEATURES, self.width, pixels)

    def worker_copy(self, output: str = FEATURES) -> OnnxFunction | None:
        """What worker processes compute with; None where this process computes better alone.

        Args:
            output: ``features``, ``logits`` or ``all_logits``.
        """
        here = self._images > 1 or sys.platform == "win32"
        if here or isinstance(self._source, bytes):
            return None
        return OnnxFunction(self._source, self.checksum, output, self.__dict__.get("_session"))

    def stored_by(self, images: str, count: int, kind: str | None) -> OnnxRuntime:
        """This runtime: there is no faster one."""
        return self

    def _run(self, output: str, width: int, pixels: NDArray[np.uint8]) -> NDArray[np.float32]:
        pixels, step = np.ascontiguousarray(pixels), self._images
        parts = [pixels[start : start + step] for start in range(0, len(pixels), step)]
        if parts and len(parts[-1]) < step:
            padding = np.zeros((step - len(parts[-1]), *pixels.shape[1:]), dtype=np.uint8)
            parts[-1] = np.concatenate([parts[-1], padding])
        # On a CPU several images are computed at the same time, each by one thread.
        apart = len(parts) > 1 and step == 1 and available_cores() > 1
        inputs = ({PIXELS: part} for part in parts)
        run = functools.partial(self._session.run, [output])
        found = self._threads().map(run, inputs) if apart else map(run, inputs)
        none = np.empty((0, width), dtype=np.float32)
        return np.concatenate([none, *(rows for (rows,) in found)])[: len(pixels)]

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
            self._session = _loaded.pop(self._checksum, None)
            _loaded.clear()
        if self._session is None:
            data = storage.read_bytes(self._path)
            if hashlib.sha256(data).hexdigest() != self._checksum:
                raise FisherhashError(f"{self._path} was replaced while it was used; try again")
            self._session = _session(data, "cpu", {}, str(self._path))
        pixels = np.ascontiguousarray(pixels)
        run = self._session.run
        return np.concatenate([run([self._output], {PIXELS: one[None]})[0] for one in pixels])


_loaded: dict[str, Any] = {}
"""Networks that were loaded before they were needed, by the checksums of their files."""


def load_early(path: Path) -> None:
    """Load a network that an :class:`OnnxFunction` will use later in this process."""
    data = storage.read_bytes(path)
    _loaded[hashlib.sha256(data).hexdigest()] = _session(data, "cpu", {}, str(path))


def _placed(device: str | torch.device | None) -> tuple[str, dict[str, Any]]:
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


def _session(source: Path | bytes, where: str, placing: dict[str, Any], what: str) -> Any:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    options.use_deterministic_compute = True
    options.log_severity_level = 3
    providers: list[Any] = [(_providers()[where], placing)]
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


def _stored_metadata(data: bytes) -> str | None:
    """Our entry among those of an ONNX file; None if it is not found without ONNX Runtime."""
    try:
        for field, entry in _fields(data):
            if field == _METADATA_PROPS:
                pair = dict(_fields(entry))
                if pair[1] == METADATA.encode():
                    return pair[2].decode()
    except (IndexError, KeyError, ValueError):
        return None
    return None


def _fields(message: bytes) -> Iterator[tuple[int, bytes]]:
    """The fields of a message of protocol buffers that are bytes, with their numbers."""
    at = 0

    def number() -> int:
        nonlocal at
        value = shift = 0
        while True:
            byte, at = message[at], at + 1
            value, shift = value | (byte & 127) << shift, shift + 7
            if byte < 128:
                return value

    while at < len(message):
        field, kind = divmod(number(), 8)
        length = number()
        if kind not in (0, 2) or (kind == 2 and at + length > len(message)):
            raise ValueError(f"field {field} cannot be read")
        if kind == 2:
            yield field, message[at : at + length]
            at += length


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
