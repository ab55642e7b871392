"""Sync and add as the command line offers them: they create the index if there is none.

An index describes what made its codes. A built-in hasher is named; any other one is stored in the
index itself, so that the index can be moved and the model folder deleted. Nothing here imports
torch before a hasher has to be loaded.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fisherhash.errors import FisherhashError, UsageError
from fisherhash.index.base import Index, Uri
from fisherhash.index.images.choosing import ChosenHasher, choose_hasher
from fisherhash.index.images.image_index import ImageIndex
from fisherhash.index.images.results import SyncReport
from fisherhash.index.images.stored import CodePair, codes_by_name
from fisherhash.index.images.syncing import (
    Import,
    check_folder,
    collection_of,
    find_images,
    sync_images,
)
from fisherhash.model.onnx_runtime import installed
from fisherhash.system.devices import is_processor
from fisherhash.system.storage import read_json

if TYPE_CHECKING:
    from fisherhash.data.folders import ImageFile
    from fisherhash.model.hasher import Hasher

FIT_BITS = 64
FIT_IMAGES = 20_000


def sync_index(
    uri: Uri,
    folder: str | os.PathLike[str],
    *,
    model: str | os.PathLike[str] | None = None,
    fit: str | None = None,
    bits: int | None = None,
    device: str = "cpu",
    dry_run: bool = False,
    allow_empty: bool = False,
    moved: bool = False,
    refresh_fields: bool = False,
    workers: int | None = None,
) -> SyncReport:
    """Bring an index in sync with a folder of images; create the index if there is none.

    Args:
        uri: the index.
        folder: the images, in sub-folders of any depth.
        model: a model folder or the name of a built-in hasher; by default the index's own. For a
            new index, one is fitted to these images if there are enough of them, otherwise it is
            the default built-in one, see :func:`~fisherhash.index.images.choosing.choose_hasher`.
        fit: for a new index: fit a hasher to these images by this method.
        bits: length of the codes, where no model is named.
        device: where to encode.
        dry_run: only report what would be done.
        allow_empty: let an empty folder empty the index.
        moved: the index was in sync with another folder, and this one takes its place.
        refresh_fields: read the fields of photos that have not changed, too.
        workers: number of processes that encode images; None lets the work decide.

    Raises:
        UsageError: there is no such folder or image, it is another folder than before, or the
            model is another one.
    """
    root, exists = check_folder(folder, uri), Index.exists(uri)
    if fit is not None and model is not None:
        raise UsageError("--fit and --model exclude each other")
    if bits is not None and model is not None and not exists:
        raise UsageError("--bits and --model exclude each other; a model has its own length")
    if exists:
        with opened_index(uri, model, fit, bits, device=device, write=not dry_run) as images:
            return images.sync(
                root,
                dry_run=dry_run,
                allow_empty=allow_empty,
                moved=moved,
                refresh_fields=refresh_fields,
                workers=workers,
            )
    found = find_images(root, uri)
    if not found.files and not allow_empty:
        raise UsageError(found.nothing(root))
    if dry_run:
        return SyncReport(added=[file.key for file in found.files], notes=found.notes())
    chosen = _chosen_hasher(
        root.name, found.files, model, fit, bits=bits, device=device, workers=workers
    )
    with ImageIndex.create(uri, chosen.hasher, model=chosen.model) as images:
        work = Import(images.index, lambda: chosen.hasher, chosen.codes, workers=workers)
        report = sync_images(work, root, found=found)
    if chosen.reason:
        report.notes.append(chosen.reason)
    return report


def _chosen_hasher(
    name: str,
    files: Sequence[ImageFile],
    model: str | os.PathLike[str] | None,
    fit: str | None,
    *,
    bits: int | None,
    device: str,
    workers: int | None,
) -> ChosenHasher:
    """The hasher of a new index: the one that was named, fitted as requested, or chosen."""
    if fit is not None:
        hasher, description, codes = fit_hasher(name, files, fit, bits=bits, device=device)
        return ChosenHasher(hasher, description, codes, "")
    if model is None and is_processor(device) and installed():
        return choose_hasher(name, files, bits=bits, device=device, workers=workers)
    if bits is not None:
        raise UsageError(f"--bits goes with --fit on {device}; the built-in hasher has its own")
    hasher = load_hasher(model, device)
    hasher.check_takes_images()
    return ChosenHasher(hasher, hasher.about, {}, "")


def add_to_index(
    uri: Uri,
    images: Iterable[str | os.PathLike[str]],
    *,
    model: str | os.PathLike[str] | None = None,
    labels: Sequence[str] | None = None,
    metadata: Mapping[str, Any] | None = None,
    device: str = "cpu",
    workers: int | None = None,
) -> SyncReport:
    """Add images to an index, see :meth:`ImageIndex.add`; create the index if there is none."""
    if Index.exists(uri):
        opened = opened_index(uri, model, device=device)
    else:
        hasher = load_hasher(model, device)
        hasher.check_takes_images()
        opened = ImageIndex.create(uri, hasher)
    with opened as index:
        return index.add(images, labels=labels, metadata=metadata, workers=workers)


@contextlib.contextmanager
def opened_index(
    uri: Uri,
    model: str | os.PathLike[str] | None,
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


def _check_model(
    index: Index, model: str | os.PathLike[str] | None, fit: str | None, bits: int | None
) -> None:
    """Refuse a model that is not the one of the index; reads the model's config where possible."""
    if bits is not None and bits != index.bits:
        raise UsageError(
            f"{index.uri} has codes of {index.bits} bits, not {bits}; create another index"
        )
    if fit is not None and index.model.get("fitted") != fit:
        raise UsageError(
            f"{index.uri} has its model already ({describe_model(index.model)}); --fit is for a "
            "new index"
        )
    if model is None or index.fingerprint is None or str(model) == index.model.get("builtin"):
        return
    try:
        fingerprint = read_json(Path(model).expanduser() / "config.json")["fingerprint"]
    except (FisherhashError, KeyError):
        from fisherhash.model.hasher import Hasher

        fingerprint = Hasher.load(model).fingerprint()
    if fingerprint != index.fingerprint:
        raise UsageError(
            f"the codes of {index.uri} were made by another model "
            f"({describe_model(index.model)}) than {model}; codes of two models cannot be "
            "compared. Leave --model out, or create another index"
        )


def describe_model(model: Mapping[str, Any]) -> str:
    """The description of an index's model in words."""
    if "builtin" in model:
        why = f" ({model['chosen']})" if "chosen" in model else ""
        return f"the built-in hasher {model['builtin']}{why}"
    if "fitted" in model:
        images = model.get("images", "?")
        count = f"{images:,}" if isinstance(images, int) else images
        return f"{model['fitted']}, fitted to {count} of its images"
    return str(model.get("path", "unknown"))


def fit_hasher(
    name: str, files: Sequence[ImageFile], method: str, *, bits: int | None, device: str
) -> tuple[Hasher, dict[str, Any], dict[str, CodePair]]:
    """Fit a hasher to at most 20,000 of some image files, without labels.

    Returns:
        The hasher, its description for the index, and the codes that are known from fitting it,
        by key.
    """
    from fisherhash.data.splits import hash_order
    from fisherhash.methods import find, registry
    from fisherhash.training.fitting import fit

    if find(method).info.needs_labels:
        free = sorted(n for n, m in registry().items() if not m.info.needs_labels)
        raise UsageError(
            f"{method} learns from labels, which --fit does without; take one of "
            f"{', '.join(free)}, or train a model and give it with --model"
        )
    order = hash_order([file.key for file in files], range(len(files)), seed=0)[:FIT_IMAGES]
    sample = collection_of(name, [files[i] for i in sorted(order)])
    hasher = fit(
        sample, method=method, bits=FIT_BITS if bits is None else bits, device=device
    ).hasher
    known: dict[str, CodePair] = {}
    for block in hasher.encode_blocks(sample, cached=True):
        known |= codes_by_name(sample.names, block)
    return hasher, {"fitted": method, "images": len(known)} | hasher.about, known


def load_hasher(model: str | os.PathLike[str] | None, device: str) -> Hasher:
    """Load the hasher of a model; None for the default built-in one."""
    from fisherhash.model.hasher import Hasher

    return Hasher.load(model, device=device)
