"""Sync and add as the command line offers them: they create the index if there is none."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from fisherhash.errors import UsageError
from fisherhash.index.base import Index, Uri
from fisherhash.index.images.image_index import ImageIndex
from fisherhash.index.images.models import check_model, fit_hasher
from fisherhash.index.images.results import SyncReport
from fisherhash.index.images.syncing import Import, check_folder, find_images, sync_images

if TYPE_CHECKING:
    from fisherhash.model.hasher import Hasher


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
) -> SyncReport:
    """Bring an index in sync with a folder of images; create the index if there is none.

    Args:
        uri: the index.
        folder: the images, in sub-folders of any depth.
        model: a model folder or the name of a built-in hasher; by default the index's own, for a
            new index the default built-in one.
        fit: for a new index: fit a hasher to these images by this method (``itq``) instead.
        bits: length of the codes of the fitted hasher.
        device: where to encode.
        dry_run: only report what would be done.
        allow_empty: let an empty folder empty the index.
        moved: the index was in sync with another folder, and this one takes its place.

    Raises:
        UsageError: there is no such folder or image, it is another folder than before, or the
            model is another one.
    """
    root, exists = check_folder(folder, uri), Index.exists(uri)
    if fit is not None and model is not None:
        raise UsageError("--fit and --model exclude each other")
    if bits is not None and fit is None and not exists:
        raise UsageError("--bits goes with --fit; a model has its own length")
    if exists:
        with _opened(uri, model, fit, bits, device=device, write=not dry_run) as images:
            return images.sync(root, dry_run=dry_run, allow_empty=allow_empty, moved=moved)
    found = find_images(root, uri)
    if not found.files:
        raise UsageError(found.nothing(root))
    if dry_run:
        return SyncReport(added=[file.key for file in found.files], notes=found.notes())
    if fit is None:
        hasher, description, codes = _load(model, device), None, None
    else:
        hasher, description, codes = fit_hasher(
            root.name, found.files, fit, bits=bits, device=device
        )
    with ImageIndex.create(uri, hasher, model=description) as images:
        return sync_images(Import(images.index, lambda: hasher, codes), root, found=found)


def add_to_index(
    uri: Uri,
    images: Iterable[str | os.PathLike[str]],
    *,
    model: str | os.PathLike[str] | None = None,
    labels: Sequence[str] | None = None,
    metadata: Mapping[str, Any] | None = None,
    device: str = "cpu",
) -> SyncReport:
    """Add images to an index, see :meth:`ImageIndex.add`; create the index if there is none."""
    if Index.exists(uri):
        opened = _opened(uri, model, device=device)
    else:
        opened = ImageIndex.create(uri, _load(model, device))
    with opened as index:
        return index.add(images, labels=labels, metadata=metadata)


@contextlib.contextmanager
def _opened(
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
        check_model(index, model=model, fit=fit, bits=bits)
        # An index that does not say what made its codes takes the model that was given.
        given = None if index.model or model is None else _load(model, device)
        yield ImageIndex(index, given, device=device)


def _load(model: str | os.PathLike[str] | None, device: str) -> Hasher:
    from fisherhash.model.hasher import Hasher

    return Hasher.load(model, device=device)
