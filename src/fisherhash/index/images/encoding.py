"""From image files to codes: in this process, in worker processes, or on a Ray cluster.

Every door to an index (sync, add, the codes for copies) encodes through a :class:`FileEncoder`, so
the same files get the same codes wherever they are computed.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from fisherhash.data.collection import Collection, FileReader
from fisherhash.data.folders import ImageFile
from fisherhash.errors import FisherhashError, UsageError
from fisherhash.index.items import Codes

if TYPE_CHECKING:
    from fisherhash.model.hasher import EncodedBlock, Hasher

IMAGES_PER_COMMIT = 128
"""A few seconds of work."""
CHUNK = 64
"""Images that a worker of a cluster encodes at a time."""
_RETRIES = 100
"""How often Ray gives a chunk to a worker again; several a second while a node is coming back."""


@dataclass
class FileEncoder:
    """Encodes image files; the hasher is loaded when the first file is due.

    Attributes:
        hasher: returns the hasher of the index.
        codes: codes that are known already, because a hasher was fitted to these images, by key.
        workers: number of processes that encode; 0 means this one, None lets the work decide.
    """

    hasher: Callable[[], Hasher]
    codes: Mapping[str, Codes] = field(default_factory=dict)
    workers: int | None = None

    def blocks(self, name: str, files: Sequence[ImageFile]) -> Iterator[EncodedBlock]:
        """The codes of files, a block at a time, in order whatever is known already.

        Args:
            name: names the work in the progress bar.
            files: the files; the indices of the blocks count them.
        """
        known = np.array([n for n, file in enumerate(files) if file.key in self.codes], np.int64)
        rest, start = np.setdiff1d(np.arange(len(files)), known), 0
        for block in self._computed(name, files, rest) if len(rest) else ():
            last = max([*block.indices.tolist(), *(one.index for one in block.skipped)])
            stop = max(start, int(np.searchsorted(known, last)))
            yield self._with_known(files, known[start:stop], block)
            start = stop
        for first in range(start, len(known), IMAGES_PER_COMMIT):
            yield self._with_known(files, known[first : first + IMAGES_PER_COMMIT])

    def _with_known(
        self,
        files: Sequence[ImageFile],
        known: NDArray[np.int64],
        block: EncodedBlock | None = None,
    ) -> EncodedBlock:
        """A block with known codes among its own, in order."""
        from fisherhash.model.hasher import EncodedBlock

        if block is not None and not len(known):
            return block
        indices = known
        codes = np.stack([self.codes[files[number].key] for number in known.tolist()])
        if block is not None:
            indices = np.concatenate([known, block.indices])
            codes = np.concatenate([codes, block.codes])
        order = np.argsort(indices)
        skipped = [] if block is None else block.skipped
        return EncodedBlock(indices[order], codes[order], None, skipped)

    def _computed(
        self, name: str, files: Sequence[ImageFile], rest: NDArray[np.int64]
    ) -> Iterator[EncodedBlock]:
        return self.hasher().encode_blocks(
            collection_of(name, files), rest, block=IMAGES_PER_COMMIT, workers=self.workers
        )


def collection_of(name: str, files: Sequence[ImageFile]) -> Collection:
    """Image files, or images behind URLs, under their keys, without labels."""
    paths = [file.path for file in files]
    reader = FileReader(os.sep, paths)
    names, labels = [file.key for file in files], np.zeros((len(files), 0), dtype=np.uint8)
    return Collection(
        name=name, names=names, labels=labels, classes=(), reader=reader, kind="photos"
    )


def files_of(hasher: Hasher) -> dict[str, bytes]:
    """The files of a hasher's model folder, which an index carries."""
    try:
        with tempfile.TemporaryDirectory() as folder:
            hasher.save(folder)
            return {path.name: path.read_bytes() for path in Path(folder).iterdir()}
    except OSError as error:
        raise FisherhashError(f"the model cannot be written for the index: {error}") from error


class ClusterEncoder(FileEncoder):
    """Encodes on a Ray cluster: actors read and encode images, this process writes the index.

    Args:
        local: what would encode in this process; its number of workers is that of the actors, by
            default one per GPU, or one per core where there is none.
        address: HOST:PORT of the cluster; empty for the one that this machine belongs to, or a new
            one on this machine.
        device: ``cpu``, ``cuda``, or ``auto`` for GPUs where there are some.
    """

    def __init__(self, local: FileEncoder, address: str, *, device: str = "auto") -> None:
        from fisherhash.index.cluster.actors import connect_ray

        super().__init__(local.hasher, local.codes, local.workers)
        connect_ray(address, f"ray://{address}")
        import ray

        self._actors: list[Any] = []
        self._model: Any = None
        self._gpus = int(ray.cluster_resources().get("GPU", 0)) if device != "cpu" else 0
        if device == "cuda" and not self._gpus:
            raise UsageError("the cluster has no GPU; use --device cpu")

    def _start(self) -> None:
        import ray

        from fisherhash.index.cluster.actors import start_actor

        about, gpus = self.hasher().about, self._gpus
        model = str(about["builtin"]) if "builtin" in about else files_of(self.hasher())
        # Kept as long as the actors: one that is started again on another node reads it again.
        self._model = ray.put(model)
        cpus = max(1, int(ray.cluster_resources().get("CPU", 1)))
        count = self.workers or gpus or cpus
        # Half of what a worker uses: if its node ends, it is started again on another one, where it
        # would wait for ever if that were full.
        needs = {"num_gpus": 1, "num_cpus": 0} if gpus else {"num_cpus": min(1.0, cpus / count) / 2}
        options = {"scheduling_strategy": "SPREAD", "max_task_retries": _RETRIES, **needs}
        where = "cuda" if gpus else "cpu"
        self._actors = [
            start_actor(EncodingWorker, self._model, where, **options) for _ in range(count)
        ]

    def _computed(
        self, name: str, files: Sequence[ImageFile], rest: NDArray[np.int64]
    ) -> Iterator[EncodedBlock]:
        from ray.exceptions import RayActorError, RayTaskError
        from ray.util import ActorPool

        if not self._actors:
            self._start()
        fingerprint, pool = self.hasher().fingerprint(), ActorPool(self._actors)
        parts = [rest[start : start + CHUNK] for start in range(0, len(rest), CHUNK)]
        done = pool.map_unordered(
            lambda actor, part: actor.encode.remote([files[n] for n in part.tolist()], part), parts
        )
        try:
            for made, blocks in done:
                if made != fingerprint:
                    raise FisherhashError(
                        "a node of the cluster has another version of the model than this process; "
                        "install the same fisherhash on all of them"
                    )
                yield from blocks
        except RayActorError as error:
            raise FisherhashError(
                f"workers ended again and again while they encoded the same {CHUNK} images: "
                f"{error}. What is done is stored; the same command goes on"
            ) from None
        except RayTaskError as error:
            raise FisherhashError(f"a worker failed: {error.cause}") from error

    def close(self) -> None:
        """End the workers."""
        import ray

        for actor in self._actors:
            ray.kill(actor)


class EncodingWorker:
    """The actor that encodes: it loads the model once, and reads images by path or URL.

    Args:
        model: the name of a built-in hasher, or the files of another one's folder.
        device: where to encode.
    """

    def __init__(self, model: str | dict[str, bytes], device: str) -> None:
        from fisherhash.model.hasher import Hasher

        # As long as the actor: its files may be mapped.
        self._folder = tempfile.TemporaryDirectory()
        if isinstance(model, str):
            self._hasher = Hasher.load_builtin(model, device=device)
            return
        for name, data in model.items():
            Path(self._folder.name, os.path.basename(name)).write_bytes(data)
        self._hasher = Hasher.load(self._folder.name, device=device)

    def encode(
        self, files: list[ImageFile], numbers: NDArray[np.int64]
    ) -> tuple[str, list[EncodedBlock]]:
        """The model's fingerprint, and the codes of some images, which have these numbers."""
        blocks = [
            replace(
                block,
                indices=numbers[block.indices],
                skipped=[replace(one, index=int(numbers[one.index])) for one in block.skipped],
            )
            for block in self._hasher.encode_blocks(collection_of("a chunk", files), workers=0)
        ]
        return self._hasher.fingerprint(), blocks
