"""Sync, add, vectors and watch as the command line offers them: what is missing is created.

An index describes what made its codes. A built-in hasher is named; any other one is stored in the
index itself, so that the index can be moved and the model folder deleted. Nothing here imports
torch before a hasher has to be loaded.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fisherhash.data.folders import list_images, walk_images
from fisherhash.data.formats import IMAGE_EXTENSIONS
from fisherhash.errors import FisherhashError, UsageError
from fisherhash.index.base import CannotReadError, DamagedError, Index, Uri
from fisherhash.index.images.choosing import (
    choose_hasher,
    codes_of_training,
    describe_model,
    hasher_of,
)
from fisherhash.index.images.encoding import ClusterEncoder, FileEncoder
from fisherhash.index.images.folders import StrPath, check_folder, list_files
from fisherhash.index.images.image_index import ImageIndex
from fisherhash.index.images.options import SyncOptions
from fisherhash.index.images.results import SyncReport
from fisherhash.index.images.syncing import SYNC, add_images, sync_images
from fisherhash.index.items import Entry
from fisherhash.system.extras import require_package
from fisherhash.system.progress import progress
from fisherhash.system.remote import is_url
from fisherhash.system.storage import read_json

if TYPE_CHECKING:
    from fisherhash.data.folders import ImageFile
    from fisherhash.model.hasher import Hasher

VECTORS_PER_COMMIT = 16_384
"""Less than a second of work."""
QUIET_MS = 1500
"""A sync begins when nothing changed for a moment: a file may take a while to be copied."""
LOOK_MS = 2000
"""How often the watcher looks whether it is to stop, and tries again what failed."""


def sync_index(
    uri: Uri,
    source: StrPath,
    options: SyncOptions = SYNC,
    *,
    model: StrPath | None = None,
    fit: str | None = None,
    bits: int | None = None,
    device: str = "cpu",
    cluster: str | None = None,
    workers: int | None = None,
) -> SyncReport:
    """Bring an index in sync with a folder of images; create the index if there is none.

    Args:
        uri: the index.
        source: the images, in sub-folders of any depth; or a URL of fsspec (``s3://…``) or a list,
            a text file ``.txt`` with one image per line, whose images are added, and none is
            removed.
        options: what is allowed.
        model: a model folder or the name of a built-in hasher; by default the index's own, or for a
            new index the one of :func:`~fisherhash.index.images.choosing.choose_hasher`.
        fit: for a new index: fit a hasher to these images by this method.
        bits: length of the codes, where no model is named.
        device: where to encode.
        cluster: encode on the Ray cluster at HOST:PORT; empty for the one that this machine belongs
            to, or a new one on this machine. All nodes must see the images.
        workers: number of processes that encode images; None lets the work decide.

    Raises:
        UsageError: there is no such folder or image, it is another folder than before, or the
            model is another one.
    """
    name = os.fspath(source)
    is_list = is_url(name) or (name.endswith(".txt") and os.path.isfile(name))
    if is_list:
        found = list_images(name)
    else:
        source = check_folder(source, uri)
        found, name = walk_images(source), source.name
    is_new = not Index.exists(uri)
    if is_new and not found.files and (is_list or not options.allow_empty):
        raise UsageError(f"{source} holds no images" if is_list else found.nothing(Path(source)))
    if is_new and options.dry_run:
        return SyncReport(added=[file.key for file in found.files], notes=found.notes())
    local = "cpu" if cluster is not None else device
    if is_new:
        images, encoder, reason = _create(uri, name, found.files, model, fit, bits, local, workers)
        if model is not None and not is_list:
            encoder.codes = codes_of_training(images.hasher, source) | dict(encoder.codes)
    else:
        images = _open(uri, model, fit, bits, device=local, write=not options.dry_run)
        encoder, reason = FileEncoder(lambda: images.hasher, workers=workers), ""
    with images, contextlib.ExitStack() as ending:
        if cluster is not None:
            encoder = ClusterEncoder(encoder, cluster, device=device)
            ending.callback(encoder.close)
        report = sync_images(
            images.index, encoder, source, options, found=found, remove=not is_list
        )
    report.notes += [reason] if reason else []
    return report


def add_to_index(
    uri: Uri,
    images: Sequence[StrPath],
    *,
    model: StrPath | None = None,
    labels: Sequence[str] | None = None,
    metadata: Mapping[str, Any] | None = None,
    device: str = "cpu",
    workers: int | None = None,
) -> SyncReport:
    """Add images to an index, see :meth:`ImageIndex.add`; create the index if there is none.

    A new index has the hasher that a sync with these images would choose.
    """
    if Index.exists(uri):
        with _open(uri, model, device=device) as opened:
            return opened.add(images, labels=labels, metadata=metadata, workers=workers)
    files, name = list_files(images, None)[0], os.path.basename(os.path.abspath(uri))
    opened, encoder, reason = _create(uri, name, files, model, None, None, device, workers)
    with opened:
        report = add_images(opened.index, encoder, images, labels=labels, metadata=metadata)
    report.notes += [reason] if reason else []
    return report


def _create(
    uri: Uri,
    name: str,
    files: Sequence[ImageFile],
    model: StrPath | None,
    fit: str | None,
    bits: int | None,
    device: str,
    workers: int | None,
) -> tuple[ImageIndex, FileEncoder, str]:
    """Create an index for images: itself, what encodes them, and why its hasher was chosen."""
    chosen = choose_hasher(
        name, files, model=model, fit=fit, bits=bits, device=device, workers=workers
    )
    images = ImageIndex.create(uri, chosen.hasher, model=chosen.model)
    return images, FileEncoder(lambda: images.hasher, chosen.codes, workers), chosen.reason


def _open(
    uri: Uri,
    model: StrPath | None,
    fit: str | None = None,
    bits: int | None = None,
    *,
    device: str,
    write: bool = True,
) -> ImageIndex:
    """Open an index to which a model was given, which must be its own."""
    index = Index.open(uri, write=write)
    try:
        if bits is not None and bits != index.bits:
            raise UsageError(
                f"{uri} has codes of {index.bits} bits, not {bits}; create another index"
            )
        if fit is not None and (model is not None or index.model.get("fitted") != fit):
            raise UsageError(
                f"{uri} has its model already ({describe_model(index.model)}); --fit is for a new "
                "index"
            )
        given = None
        if model is not None and str(model) != index.model.get("builtin"):
            given = _check_model(index, model, device)
        return ImageIndex(index, given, device=device)
    except BaseException:
        index.close()
        raise


def _check_model(index: Index, model: StrPath, device: str) -> Hasher | None:
    """Refuse a model that is not the one of the index; reads only its config where possible.

    Returns:
        The model, for an index that does not say what made its codes.
    """
    from fisherhash.model.hasher import Hasher

    if not index.model:
        return Hasher.load(model, device=device)
    try:
        fingerprint = read_json(Path(model).expanduser() / "config.json")["fingerprint"]
    except (FisherhashError, KeyError):
        fingerprint = Hasher.load(model).fingerprint()
    # A model whose bits have fitted ones behind them is known by its own fingerprint, too.
    if fingerprint not in (index.fingerprint, index.model.get("base")):
        raise UsageError(
            f"the codes of {index.uri} were made by another model "
            f"({describe_model(index.model)}) than {model}; codes of two models cannot be "
            "compared. Leave --model out, or create another index"
        )
    return None


def add_vectors(
    uri: Uri,
    features: StrPath,
    *,
    keys: StrPath | None = None,
    model: StrPath | None = None,
    labels: Sequence[str] | None = None,
    metadata: Mapping[str, Any] | None = None,
    device: str = "cpu",
) -> SyncReport:
    """Add the vectors of an .npy file to an index; create the index if there is none.

    The file is checked as a whole before anything is written. Every block is one commit; the same
    call continues where an interrupted one stopped.

    Args:
        uri: the index.
        features: the file with vectors (n, d).
        keys: a text file with one key per line; by default the numbers of the rows, from 0. A
            vector under a key that exists replaces the item, except under such a number.
        model: a model folder; by default the index's own.
        labels: of all these vectors.
        metadata: of all these vectors.
        device: where to encode.

    Raises:
        UsageError: a file is missing or does not hold what it should, a row's number is the key of
            another vector, or the model is another one.
    """
    from fisherhash.data.vectors import open_vectors, read_keys

    vectors, report = open_vectors(features), SyncReport()
    named = None if keys is None else read_keys(keys, len(vectors))
    names = list(map(str, range(len(vectors)))) if named is None else list(named)
    if Index.exists(uri):
        images = _open(uri, model, device=device)
    elif model is None:
        raise UsageError(
            f"{uri} does not exist yet; say which model encodes its vectors: --model MODEL"
        )
    else:
        chosen = choose_hasher("", (), model=model, device=device)
        # Before an index is created that would stay empty.
        chosen.hasher.check_vectors(vectors, str(features))
        images = ImageIndex.create(uri, chosen.hasher, model=chosen.model)
    with images, progress("encoding vectors", len(vectors)) as advance:
        index, hasher = images.index, images.hasher
        hasher.check_vectors(vectors, str(features))
        for block in hasher.encode_feature_blocks(vectors, block=VECTORS_PER_COMMIT):
            part, entries = [names[number] for number in block.indices.tolist()], []
            for key, code, item in zip(part, block.codes, index.get_items(part), strict=True):
                same = item is not None and item.code == code.tobytes()
                if same and labels is None and metadata is None:
                    report.unchanged += 1
                    continue
                if item is not None and not same and named is None:
                    raise UsageError(
                        f"{index.uri} has another vector under the key '{key}', which is the "
                        "number of a row; give these vectors keys of their own: --keys FILE"
                    )
                entries.append(Entry(key, code, labels=labels, metadata=metadata))
                (report.added if item is None else report.updated).append(key)
            index.upsert(entries, fingerprint=hasher.fingerprint())
            advance(len(part))
        report.count = len(index)
    return report


def watch_folder(
    uri: Uri,
    folder: StrPath,
    *,
    device: str = "cpu",
    workers: int | None = None,
    stop: threading.Event | None = None,
    say: Callable[[str], object] = print,
) -> Iterator[SyncReport]:
    """Sync an index whenever the images of its folder change.

    The index is open for writing only while it is synced. A sync that fails, because another
    process writes to the index or the folder is not there, is tried again.

    Args:
        uri: the index; it must be in sync with the folder already.
        folder: the images.
        device: where to encode images.
        workers: number of processes that encode images; None lets the work decide.
        stop: ends the watch when it is set.
        say: called with a sentence about a sync that failed.

    Yields:
        What each sync that changed anything did.

    Raises:
        FisherhashError: the extra ``web`` is missing, or the index is damaged.
    """
    require_package("watchfiles", "web", "--watch")
    from watchfiles import watch

    root = check_folder(folder, uri)
    loaded: list[Hasher] = []

    def hasher(index: Index) -> Hasher:
        """The hasher of the index, loaded when it is first needed and kept for the next sync."""
        if not loaded:
            loaded.append(hasher_of(index, device=device))
        return loaded[0]

    own = None if "://" in os.fspath(uri) else os.path.realpath(uri)
    changes = watch(
        root,
        watch_filter=lambda _, path: _may_matter(path, own),
        debounce=QUIET_MS,
        step=QUIET_MS // 3,
        stop_event=stop,
        rust_timeout=LOOK_MS,
        yield_on_timeout=True,
        raise_interrupt=True,
        ignore_permission_denied=True,
    )
    # Once at the start: something may have changed before the watch began.
    todo, said = True, ""
    for changed in changes:
        if not (todo or changed):
            continue
        try:
            with Index.open(uri, write=True) as index:
                encoder = FileEncoder(lambda index=index: hasher(index), workers=workers)
                report = sync_images(index, encoder, root)
        except (DamagedError, CannotReadError):
            raise
        except FisherhashError as error:
            todo = True
            if str(error) != said:
                said = str(error)
                say(f"{said}; trying again")
            continue
        todo, said = False, ""
        if report.added or report.updated or report.removed or report.new_skipped:
            yield report


def _may_matter(path: str, own: str | None) -> bool:
    """Whether a change of a file may change the index: an image, or a folder, outside the index."""
    if own is not None and (path == own or path.startswith(f"{own}-")):
        return False  # SQLite writes its journal beside the file
    suffix = os.path.splitext(path)[1].lower()
    return suffix in IMAGE_EXTENSIONS or not suffix or os.path.isdir(path)
