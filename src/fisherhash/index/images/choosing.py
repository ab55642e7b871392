"""The hasher of a new index: one choice, whichever door its images come through.

Codes that are fitted to the images themselves find more similar ones than codes that were made for
all kinds of images, once there are enough images to fit them to. What was measured is in
``results/default-hasher.json``, ``results/default-hasher-general2.json`` and in docs/search.md.

A trained model gives an index its learned bits and, behind them, bits that are fitted without
labels: images of classes that it was not trained on are found by these. Both are one code.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from fisherhash.errors import FisherhashError, UsageError
from fisherhash.index.base import Index
from fisherhash.index.images.encoding import collection_of
from fisherhash.index.items import Codes
from fisherhash.model import builtin

if TYPE_CHECKING:
    from fisherhash.data.collection import Collection
    from fisherhash.data.folders import ImageFile
    from fisherhash.model.hasher import EncodedBlock, Hasher
    from fisherhash.model.networks import Network

FEWEST_FITTED = builtin.FEWEST_FITTED
FITTED_BITS = 128
"""Length of fitted codes: P@10 is 1 to 4 points above that of 64 bits."""
UNFITTED = {64: "general2-64", 128: "general2-128", 256: "general2-256"}
"""The built-in hashers for fewer images, by the length of their codes; 128 by default."""
FIT_SAMPLE = 10_000
"""Images that the codes are fitted to, where there are more."""
FIT_BITS, FIT_IMAGES = 64, 20_000
"""The same where a method was named."""
DRAFT = 1.5
"""How far fitted hashers let the JPEG decoder reduce large files, as the general2 hashers do."""

logger = logging.getLogger(__name__)
_T = TypeVar("_T")
StrPath = str | os.PathLike[str]


@dataclass(frozen=True)
class ChosenHasher:
    """A hasher, and what an index should remember about it.

    Attributes:
        hasher: makes the codes.
        model: describes it.
        codes: those that are known already, by key.
        reason: why it was chosen, in one sentence.
    """

    hasher: Hasher
    model: dict[str, Any]
    codes: Mapping[str, Codes] = field(default_factory=dict)
    reason: str = ""


def choose_hasher(
    name: str,
    files: Sequence[ImageFile],
    *,
    model: StrPath | None = None,
    fit: str | None = None,
    bits: int | None = None,
    device: str = "cpu",
    workers: int | None = None,
) -> ChosenHasher:
    """The hasher of a new index: the one that was named, fitted as requested, or chosen.

    Without a name, codes are fitted to the images if there are enough of them; otherwise they are
    those of a built-in hasher. The choice depends neither on the door nor on the device.

    Args:
        name: what the progress bar shows.
        files: the images; of many, a sample decides that does not depend on their order.
        model: a model folder, or the name of a built-in hasher.
        fit: the method to fit a hasher by, without labels.
        bits: length of the codes where no model is named; 128 by default, or 64 with ``fit``.
        device: where to encode.
        workers: number of processes that encode; None lets the work decide.

    Raises:
        UsageError: options exclude each other, there are too few images to fit codes to and no
            built-in hasher has that length, or the method needs labels.
    """
    for flag, given in (("--fit", fit), ("--bits", bits)):
        if given is not None and model is not None:
            raise UsageError(f"{flag} and --model exclude each other; a model has its own codes")
    if fit is not None:
        return _fitted_by(name, files, fit, bits=bits, device=device)
    if model is not None:
        from fisherhash.model.hasher import Hasher

        hasher = Hasher.load(model, device=device)
        if files:
            hasher.check_takes_images()
        return _extended(name, files, hasher, workers)
    if len(files) >= FEWEST_FITTED:
        fitted = _fitted(name, files, FITTED_BITS if bits is None else bits, device, workers)
        if fitted is not None:
            return fitted
    unfitted = UNFITTED.get(128 if bits is None else bits)
    if unfitted is None:
        lengths = ", ".join(map(str, UNFITTED))
        raise UsageError(
            f"--bits {bits} needs codes that are fitted, and there are fewer than "
            f"{FEWEST_FITTED:,} images to fit them to; choose one of {lengths}, or add --fit itq"
        )
    hasher = load_builtin(unfitted, device)
    reason = f"fewer than {FEWEST_FITTED:,} images are too few to fit codes to"
    choice = f"{hasher.bits}-bit codes of {unfitted}: {reason}"
    return ChosenHasher(hasher, hasher.about | {"chosen": reason}, reason=choice)


def _fitted(
    name: str, files: Sequence[ImageFile], bits: int, device: str, workers: int | None
) -> ChosenHasher | None:
    """Codes of the packaged network, fitted to the images; None if too few can be read."""
    from fisherhash.model.hasher import Hasher
    from fisherhash.model.head import linear_head

    network = _on_device_or_cpu(lambda where: builtin.packaged_network(device=where), device)
    network = network.decoding(replace(network.preprocessing, draft=DRAFT))

    def make(weight: NDArray[np.float32], offset: NDArray[np.float32]) -> Hasher:
        details = {"options": {"features": f"{network.name} of {builtin.DEFAULT_HASHER}"}}
        return Hasher(network, linear_head(weight, offset), method="itq", details=details)

    found = _fit_itq(name, files, network, bits, workers, make)
    if found is None:
        return None
    hasher, codes = found
    hasher.details["data"] = {"name": name, "images": len(codes), "of": len(files)}
    reason = f"there are at least {FEWEST_FITTED:,} images, enough to fit codes to"
    return ChosenHasher(
        hasher,
        {"fitted": "itq", "images": len(codes)} | hasher.about,
        codes,
        f"{bits}-bit codes, fitted to {len(codes):,} of {len(files):,} images (itq): {reason}",
    )


def _extended(
    name: str, files: Sequence[ImageFile], hasher: Hasher, workers: int | None
) -> ChosenHasher:
    """A model's own bits and, where it learned from labels, fitted ones behind them."""
    # Built-in models, those that learned without labels and exported networks have no such bits.
    if hasher.fitted is None:
        return ChosenHasher(hasher, hasher.about)
    learned = f"{hasher.bits} bits that the model learned"
    own, found = hasher.about | {"base": hasher.fingerprint()}, None
    if len(files) >= FEWEST_FITTED:
        network = hasher.features_network
        bits = min(FITTED_BITS, network.width)
        found = _fit_itq(name, files, network, bits, workers, hasher.extended)
    if found is None:
        longer, codes, of = hasher.extended(*hasher.fitted), {}, "the images that it was trained on"
    else:
        longer, codes = found
        of, own["images"] = f"{len(codes):,} of {len(files):,} images", len(codes)
    added = longer.bits - hasher.bits
    own |= {"bits": longer.bits, "fitted_bits": added}
    return ChosenHasher(longer, own, codes, f"{learned}, {added} fitted to {of}")


def _fitted_by(
    name: str, files: Sequence[ImageFile], method: str, *, bits: int | None, device: str
) -> ChosenHasher:
    """A hasher that a method fits to at most 20,000 of the images, without labels."""
    from fisherhash.methods import find, registry
    from fisherhash.training.fitting import fit

    if find(method).info.needs_labels:
        free = sorted(n for n, m in registry().items() if not m.info.needs_labels)
        raise UsageError(
            f"{method} learns from labels, which --fit does without; take one of "
            f"{', '.join(free)}, or train a model and give it with --model"
        )
    sample, bits = _sample(name, files, FIT_IMAGES), FIT_BITS if bits is None else bits
    hasher = fit(sample, method=method, bits=bits, device=device).hasher
    (block,) = hasher.encode_blocks(sample, cached=True)
    codes = _codes_by_key(sample.names, block)
    return ChosenHasher(hasher, {"fitted": method, "images": len(codes)} | hasher.about, codes)


def codes_of_training(hasher: Hasher, root: StrPath) -> dict[str, Codes]:
    """The codes of a folder's images whose features are on disk since a model was trained on it."""
    from fisherhash.data.row_cache import has_rows
    from fisherhash.data.sources import open_data

    if not has_rows("features"):
        return {}
    try:
        images = open_data(root)
        stored = hasher.encode_stored(images)
    except FisherhashError:
        return {}  # a folder that can be synced need not be a data set
    if stored is None or not len(stored.indices):
        return {}
    logger.info("%s images: features are on disk already", f"{len(stored.indices):,}")
    return _codes_by_key(images.names, stored)


def _codes_by_key(names: Sequence[str], block: EncodedBlock) -> dict[str, Codes]:
    return {
        str(names[number]): code
        for number, code in zip(block.indices.tolist(), block.codes, strict=True)
    }


def _sample(name: str, files: Sequence[ImageFile], most: int) -> Collection:
    """At most so many of the images, by the hashes of their names inside their common folder."""
    from fisherhash.data.splits import hash_order

    ordered = sorted(files, key=lambda file: file.path)
    # Of their texts, not of their folders: they may be URLs.
    prefix = os.path.commonprefix([file.path for file in ordered])  # noqa: RUF071
    common = prefix.rfind("/") + 1
    order = hash_order([file.path[common:] for file in ordered], range(len(ordered)), seed=0)
    return collection_of(name, [ordered[i] for i in sorted(order[:most])])


def _fit_itq(
    name: str,
    files: Sequence[ImageFile],
    network: Network,
    bits: int,
    workers: int | None,
    make: Callable[[NDArray[np.float32], NDArray[np.float32]], Hasher],
) -> tuple[Hasher, dict[str, Codes]] | None:
    """Fit bits to the features that a network computes of a sample of the images.

    The features are stored on disk: after an interruption, the same command goes on from there.

    Args:
        name: what the progress bar shows.
        files: the images.
        network: computes the features.
        bits: how many bits to fit.
        workers: number of processes that encode.
        make: the hasher from weight (d, bits) and offset (bits,): a bit is 1 where
            ``features @ weight + offset > 0``.

    Returns:
        The hasher, and the codes of the images that the bits were fitted to; None if too few can
        be read.
    """
    from fisherhash.model.itq_fit import fit_itq
    from fisherhash.model.networks import feature_rows

    sample = _sample(name, files, FIT_SAMPLE)
    rows = feature_rows(network, sample, workers=workers)
    if len(rows.indices) < min(FEWEST_FITTED, FIT_SAMPLE):
        return None
    hasher = make(*fit_itq(rows.values, bits))
    names, codes = [str(sample.names[i]) for i in rows.indices.tolist()], {}
    for block in hasher.encode_feature_blocks(rows.values):
        codes |= _codes_by_key(names, block)
    return hasher, codes


# Loading


def load_builtin(name: str, device: str) -> Hasher:
    """Load a built-in hasher by its name only: a folder of that name may exist here."""
    from fisherhash.model.hasher import Hasher

    return _on_device_or_cpu(lambda where: Hasher.load_builtin(name, device=where), device)


def _on_device_or_cpu(load: Callable[[str], _T], device: str) -> _T:
    """Load for a device; on the CPU where the runtime cannot use a GPU, and say so."""
    try:
        return load(device)
    except UsageError as error:
        if device.partition(":")[0] != "cuda":
            raise
        logger.warning("%s. Images are encoded on the CPU", error)
        return load("cpu")


def hasher_of(index: Index, *, device: str = "cpu") -> Hasher:
    """Load the hasher that made the codes of an index.

    Raises:
        UsageError: the index does not say which.
        FisherhashError: the hasher is missing, damaged, or not the one that made the codes.
    """
    from fisherhash.model.hasher import Hasher

    if not index.model:
        raise UsageError(
            f"{index.uri} does not say which model made its codes, so it cannot encode images; "
            "search by --key, or by codes from Python"
        )
    if "builtin" in index.model:
        what = f"the built-in hasher '{index.model['builtin']}' of this version"
        hasher = load_builtin(str(index.model["builtin"]), device)
    else:
        folder = index.model_folder()
        if folder is None:
            raise FisherhashError(f"the model of {index.uri} is missing; restore it from a copy")
        what = f"the model in {folder}"
        hasher = _on_device_or_cpu(lambda where: Hasher.load(folder, device=where), device)
    if index.fingerprint not in (None, hasher.fingerprint()):
        raise FisherhashError(
            f"{what} is not the one that made the codes of {index.uri}; restore it, or create the "
            "index again"
        )
    return hasher


def describe_model(model: Mapping[str, Any]) -> str:
    """The description of an index's model in words."""
    images = f"{model['images']:,}" if isinstance(model.get("images"), int) else "?"
    if "builtin" in model:
        why = f" ({model['chosen']})" if "chosen" in model else ""
        return f"the built-in hasher {model['builtin']}{why}"
    if "fitted" in model:
        return f"{model['fitted']}, fitted to {images} of its images"
    path = str(model.get("path", "unknown"))
    if "fitted_bits" in model:
        of = f"{images} of its images" if "images" in model else "the images of its training"
        return f"{path}, and {model['fitted_bits']} bits fitted to {of}"
    return path
