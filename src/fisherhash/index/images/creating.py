"""Sync, add and vectors as the command line offers them: they create the index if there is none.

An index describes what made its codes. A built-in hasher is named; any other one is stored in the
index itself, so that the index can be moved and the model folder deleted. Nothing here imports
torch before a hasher has to be loaded.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fisherhash.errors import FisherhashError, UsageError
from fisherhash.index.base import Index, Uri
from fisherhash.index.images.choosing import choose_hasher, describe_model, load_hasher
from fisherhash.index.images.encoding import ClusterEncoder, Encoder
from fisherhash.index.images.image_index import ImageIndex
from fisherhash.index.images.importing import Import
from fisherhash.index.images.options import SyncOptions
from fisherhash.index.images.results import SyncReport
from fisherhash.index.images.syncing import (
    StrPath,
    add_images,
    check_folder,
    find_images,
    list_files,
    sync_images,
    take_images,
)
from fisherhash.index.items import Entry
from fisherhash.system.progress import progress
from fisherhash.system.remote import is_url
from fisherhash.system.storage import read_json

if TYPE_CHECKING:
    from fisherhash.data.folders import FoundImages

SYNC = SyncOptions()
VECTORS_PER_COMMIT = 16_384
"""Less than a second of work."""


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
    root, found = _listed(source, uri)
    name = os.fspath(source) if root is None else root.name
    local = "cpu" if cluster is not None else device
    reason, codes = "", {}
    if Index.exists(uri):
        opened = opened_index(uri, model, fit, bits, device=local, write=not options.dry_run)
    else:
        if not found.files and (root is None or not options.allow_empty):
            raise UsageError(f"{source} holds no images" if root is None else found.nothing(root))
        if options.dry_run:
            return SyncReport(added=[file.key for file in found.files], notes=found.notes())
        chosen = choose_hasher(
            name, found.files, model=model, fit=fit, bits=bits, device=local, workers=workers
        )
        opened = ImageIndex.create(uri, chosen.hasher, model=chosen.model)
        reason, codes = chosen.reason, chosen.codes
    with opened as images, contextlib.ExitStack() as ending:
        encoder = Encoder(lambda: images.hasher, codes=codes, workers=workers)
        if cluster is not None:
            encoder = ClusterEncoder(encoder, cluster, device=device)
            ending.callback(encoder.close)
        work = Import(images.index, encoder)
        if root is None:
            report = take_images(work, name, options, found=found)
        else:
            report = sync_images(work, root, options, found=found)
    report.notes += [reason] if reason else []
    return report


def _listed(source: StrPath, uri: Uri) -> tuple[Path | None, FoundImages]:
    """The folder, and its images; None where the images are behind a URL or in a list."""
    name = os.fspath(source)
    if is_url(name) or (name.endswith(".txt") and os.path.isfile(name)):
        from fisherhash.data.remote import list_images

        return None, list_images(name)
    root = check_folder(source, uri)
    return root, find_images(root)


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
    reason, codes = "", {}
    if Index.exists(uri):
        opened = opened_index(uri, model, device=device)
    else:
        files, name = list_files(images, None)[0], os.path.basename(os.path.abspath(uri))
        chosen = choose_hasher(name, files, model=model, device=device, workers=workers)
        opened = ImageIndex.create(uri, chosen.hasher, model=chosen.model)
        reason, codes = chosen.reason, chosen.codes
    with opened as index:
        encoder = Encoder(lambda: index.hasher, codes=codes, workers=workers)
        report = add_images(Import(index.index, encoder), images, labels=labels, metadata=metadata)
    report.notes += [reason] if reason else []
    return report


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

    vectors = open_vectors(features)
    names = None if keys is None else read_keys(keys, len(vectors))
    names = list(map(str, range(len(vectors)))) if names is None else list(names)
    given = {"labels": labels, "metadata": metadata}
    if Index.exists(uri):
        with opened_index(uri, model, device=device) as images:
            images.hasher.check_vectors(vectors, str(features))
            return _add_vectors(images, vectors, names, given, replace=keys is not None)
    if model is None:
        raise UsageError(
            f"{uri} does not exist yet; say which model encodes its vectors: --model MODEL"
        )
    chosen = choose_hasher("", (), model=model, device=device)
    # Before an index is created that would stay empty.
    chosen.hasher.check_vectors(vectors, str(features))
    with ImageIndex.create(uri, chosen.hasher, model=chosen.model) as images:
        return _add_vectors(images, vectors, names, given, replace=keys is not None)


def _add_vectors(
    images: ImageIndex, vectors: Any, names: list[str], given: dict[str, Any], *, replace: bool
) -> SyncReport:
    index, hasher, report = images.index, images.hasher, SyncReport()
    relabelled = any(value is not None for value in given.values())
    with progress("encoding vectors", len(vectors)) as advance:
        for block in hasher.encode_feature_blocks(vectors, block=VECTORS_PER_COMMIT):
            keys, entries = [names[number] for number in block.indices.tolist()], []
            for key, code, item in zip(keys, block.codes, index.get_items(keys), strict=True):
                same = item is not None and item.code == code.tobytes()
                if same and not relabelled:
                    report.unchanged += 1
                    continue
                if item is not None and not same and not replace:
                    raise UsageError(
                        f"{index.uri} has another vector under the key '{key}', which is the "
                        "number of a row; give these vectors keys of their own: --keys FILE"
                    )
                entries.append(Entry(key, code, **given))
                (report.added if item is None else report.updated).append(key)
            index.upsert(entries, fingerprint=hasher.fingerprint())
            advance(len(keys))
    report.count = len(index)
    return report


@contextlib.contextmanager
def opened_index(
    uri: Uri,
    model: StrPath | None,
    fit: str | None = None,
    bits: int | None = None,
    *,
    device: str,
    write: bool = True,
) -> Iterator[ImageIndex]:
    """Open an index to which a model was given, which must be its own."""
    with Index.open(uri, write=write) as index:
        _check_model(index, model, fit, bits)
        # An index that does not say what made its codes takes the model that was given.
        given = None if index.model or model is None else load_hasher(model, device)
        yield ImageIndex(index, given, device=device)


def _check_model(index: Index, model: StrPath | None, fit: str | None, bits: int | None) -> None:
    """Refuse a model that is not the one of the index; reads the model's config where possible."""
    if bits is not None and bits != index.bits:
        raise UsageError(
            f"{index.uri} has codes of {index.bits} bits, not {bits}; create another index"
        )
    if fit is not None and (model is not None or index.model.get("fitted") != fit):
        raise UsageError(
            f"{index.uri} has its model already ({describe_model(index.model)}); --fit is for a "
            "new index"
        )
    if model is None or index.fingerprint is None or str(model) == index.model.get("builtin"):
        return
    try:
        fingerprint = read_json(Path(model).expanduser() / "config.json")["fingerprint"]
    except (FisherhashError, KeyError):
        fingerprint = load_hasher(model, "cpu").fingerprint()
    # A model whose bits have fitted ones behind them is known by its own fingerprint, too.
    if fingerprint not in (index.fingerprint, index.model.get("base")):
        raise UsageError(
            f"the codes of {index.uri} were made by another model "
            f"({describe_model(index.model)}) than {model}; codes of two models cannot be "
            "compared. Leave --model out, or create another index"
        )
