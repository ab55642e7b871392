"""Encoding on many machines: Ray actors read and encode images, one process writes the index.

The index is what makes it resumable: images that it has as they are, and those that could not be
read, are not encoded again. A chunk whose worker is lost goes to another one.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import ray
from ray.exceptions import RayActorError, RayTaskError

from fisherhash.data.collection import Collection
from fisherhash.data.remote import RemoteReader, list_images
from fisherhash.errors import FisherhashError, UsageError, counted
from fisherhash.index.base import Index, Uri
from fisherhash.index.carried import CarriedModel, pack_model, unpack_model, unpacked
from fisherhash.index.cluster.actors import connect_ray, start_actor
from fisherhash.index.images.creating import load_hasher, opened_index
from fisherhash.index.images.image_index import ImageIndex, hasher_of
from fisherhash.index.images.results import SyncReport
from fisherhash.index.images.syncing import Import
from fisherhash.system.remote import is_url

if TYPE_CHECKING:
    from fisherhash.data.folders import ImageFile
    from fisherhash.model.hasher import EncodedBlock, Hasher

CHUNK = 64
"""Images that a worker encodes at a time."""
_AHEAD = 2
_ATTEMPTS = 5
"""Workers that a chunk may take down before its images are to blame."""

ModelOnNode = str | CarriedModel
"""The name of a built-in hasher, or the packed folder of another one."""


class EncodingWorker:
    """The actor that encodes: it loads the model once, and reads images by path or URL."""

    def __init__(self, model: ModelOnNode, device: str) -> None:
        from fisherhash.model.hasher import Hasher

        if isinstance(model, str):
            self._hasher = Hasher.load_builtin(model, device=device)
        else:
            folder = unpacked(model.digest) or unpack_model("the model", *model)
            self._hasher = Hasher.load(folder, device=device)

    def encode(self, names: list[str], places: list[str]) -> tuple[str, list[EncodedBlock]]:
        """The model's fingerprint, and the codes of some images."""
        labels = np.zeros((len(names), 0), dtype=np.uint8)
        source = Collection("a chunk", names, labels, (), RemoteReader(places), kind="photos")
        return self._hasher.fingerprint(), list(self._hasher.encode_blocks(source, workers=0))


class ClusterImport(Import):
    """An import whose images are encoded by the actors of a Ray cluster."""

    def __init__(
        self, index: Index, hasher: Hasher, *, device: str, workers: int | None = None
    ) -> None:
        super().__init__(index, lambda: hasher, workers=workers)
        gpus = int(ray.cluster_resources().get("GPU", 0)) if device in ("auto", "cuda") else 0
        if device == "cuda" and not gpus:
            raise UsageError("the cluster has no GPU; use --device cpu")
        cpus = max(1, int(ray.cluster_resources().get("CPU", 1)))
        count = workers or gpus or cpus
        about = hasher.about
        model = str(about["builtin"]) if "builtin" in about else pack_model(hasher.save)
        stored = ray.put(model)
        # Half of what a worker uses: if its node ends, it is started again on another one, where it
        # would wait for ever if that were full.
        needs = {"num_gpus": 1, "num_cpus": 0} if gpus else {"num_cpus": min(1.0, cpus / count) / 2}
        options = {"scheduling_strategy": "SPREAD", **needs}
        where = "cuda" if gpus else "cpu"
        self._actors = [start_actor(EncodingWorker, stored, where, **options) for _ in range(count)]

    def may_be_readable(self, file: ImageFile) -> bool:
        """See :meth:`Import.may_be_readable`; a URL is simply tried again."""
        skip = self.skipped.get(file.key)
        if skip is not None and skip["size"] is None and is_url(file.path):
            return True
        return super().may_be_readable(file)

    def _fields(
        self, files: Sequence[ImageFile], given: Mapping[str, Any] | None = None
    ) -> Iterator[dict[str, Any] | None]:
        if any(is_url(file.path) for file in files):
            return iter([None] * len(files))
        return super()._fields(files, given)

    def _encoded(
        self, hasher: Hasher, name: str, todo: Sequence[ImageFile]
    ) -> Iterator[EncodedBlock]:
        fingerprint = hasher.fingerprint()
        waiting = list(range(0, len(todo), CHUNK))[::-1]
        attempts = dict.fromkeys(waiting, 0)
        running: dict[Any, tuple[int, int]] = {}

        def send(worker: int) -> None:
            start = waiting.pop()
            some = todo[start : start + CHUNK]
            call = self._actors[worker].encode
            ref = call.remote([file.key for file in some], [file.path for file in some])
            running[ref] = (worker, start)

        for worker in list(range(len(self._actors))) * _AHEAD:
            if waiting:
                send(worker)
        while running:
            (ref, *_), _ = ray.wait(list(running), num_returns=1)
            worker, start = running.pop(ref)
            try:
                made, blocks = ray.get(ref)
            except RayActorError:
                attempts[start] += 1
                if attempts[start] >= _ATTEMPTS:
                    raise FisherhashError(
                        f"{_ATTEMPTS} workers ended while they encoded {todo[start].key} and the "
                        "images after it. What is done is stored; the same command goes on"
                    ) from None
                waiting.append(start)
                worker = (worker + 1) % len(self._actors)
            except RayTaskError as error:
                raise FisherhashError(f"a worker failed: {error.cause}") from error
            else:
                if made != fingerprint:
                    raise FisherhashError(
                        "a node of the cluster has another version of the model than this process; "
                        "install the same fisherhash on all of them"
                    )
                for block in blocks:
                    skipped = [replace(one, index=one.index + start) for one in block.skipped]
                    yield replace(block, indices=block.indices + start, skipped=skipped)
            if waiting:
                send(worker)

    def close(self) -> None:
        """End the workers."""
        for actor in self._actors:
            ray.kill(actor)


def ingest_images(
    uri: Uri,
    source: str | os.PathLike[str],
    *,
    model: str | os.PathLike[str] | None = None,
    address: str = "",
    workers: int | None = None,
    device: str = "auto",
) -> SyncReport:
    """Encode images on a Ray cluster and add them to an index; create the index if there is none.

    Images that the index has as they are stay; none is removed. If interrupted, the same call
    continues.

    Args:
        uri: the index, of any kind.
        source: a folder that all nodes see, a URL of fsspec (``s3://…``), or a list of both: a
            text file with one image per line.
        model: as for :func:`~fisherhash.index.images.creating.sync_index`.
        address: HOST:PORT of the cluster; by default the one that this machine belongs to, or a
            new one on this machine.
        workers: number of actors; by default one per GPU, or one per core where there is none.
        device: ``cpu``, ``cuda``, or ``auto`` for GPUs where there are some.

    Raises:
        UsageError: there is no such source, no image in it, or the model is another one.
    """
    place = os.fspath(source)
    found = list_images(place)
    if not found.files:
        raise UsageError(f"{place} holds no images" + _left_out(found.other))
    exists = Index.exists(uri)
    if exists:
        opened = opened_index(uri, model, device="cpu")
    else:
        hasher = load_hasher(model, "cpu")
        hasher.check_takes_images()
        opened = ImageIndex.create(uri, hasher)
    with opened as images:
        hasher = hasher_of(images.index)
        connect_ray(address, str(uri))
        work = ClusterImport(images.index, hasher, device=device, workers=workers)
        try:
            work.report.notes = found.notes()
            todo = []
            for file in found.files:
                if work.is_unchanged(file):
                    work.report.unchanged += 1
                elif work.may_be_readable(file):
                    todo.append(file)
            for key, reason in found.broken.items():
                work.skip(key, reason)
            with work.writing():
                work.commit()
                work.encode(place, todo)
            return work.finish()
        finally:
            work.close()


def _left_out(other: Mapping[str, int]) -> str:
    return f" ({counted(sum(other.values()), 'other file')})" if other else ""
