"""The hasher of a new index for which no model was named.

Codes that are fitted to the images themselves find more similar ones than codes that were made for
all kinds of images, once there are enough images to fit them to. What was measured is in
``results/default-hasher.json``, ``results/default-hasher-general2.json`` and in docs/search.md.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fisherhash.codes import pack
from fisherhash.data.splits import hash_order
from fisherhash.errors import UsageError
from fisherhash.index.images.stored import KnownCodes
from fisherhash.index.images.syncing import collection_of
from fisherhash.model import builtin

if TYPE_CHECKING:
    from fisherhash.data.folders import ImageFile
    from fisherhash.model.hasher import Hasher

FEWEST_FITTED = builtin.FEWEST_FITTED
FITTED_BITS = 128
"""Length of fitted codes: P@10 is 1 to 4 points above that of 64 bits."""
UNFITTED = {64: "general2-64", 128: "general2-128", 256: "general2-256"}
"""The built-in hashers for fewer images, by the length of their codes."""
UNFITTED_BITS = 128
FIT_SAMPLE = 10_000
"""Images that the codes are fitted to, where there are more."""
DRAFT = 1.5
"""How far fitted hashers let the JPEG decoder reduce large files, as the general2 hashers do."""


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
    codes: KnownCodes
    reason: str


def choose_hasher(
    name: str,
    files: Sequence[ImageFile],
    *,
    bits: int | None = None,
    device: str = "cpu",
    workers: int | None = None,
) -> ChosenHasher:
    """Fit a hasher to images if there are enough of them; otherwise take the built-in one.

    Args:
        name: what the progress bar shows.
        files: the images; of many, a sample decides that does not depend on their order.
        bits: length of the codes; 128 by default.
        device: where to encode; a processor, since the built-in hashers for few images are int8.
        workers: number of processes that encode; None lets the work decide.

    Raises:
        UsageError: too few images to fit codes to, and no built-in hasher has that length.
    """
    if len(files) >= FEWEST_FITTED:
        fitted = fit_sample(name, files, bits=bits, device=device, workers=workers)
        if fitted is not None:
            return fitted
    hasher = _unfitted(bits, device)
    reason = f"fewer than {FEWEST_FITTED:,} images are too few to fit codes to"
    choice = f"{hasher.bits}-bit codes of {hasher.about['builtin']}: {reason}"
    return ChosenHasher(hasher, hasher.about | {"chosen": reason}, {}, choice)


def _unfitted(bits: int | None, device: str) -> Hasher:
    """Load the built-in hasher of a length."""
    from fisherhash.model.hasher import Hasher

    name = UNFITTED.get(UNFITTED_BITS if bits is None else bits)
    if name is None:
        lengths = ", ".join(str(one) for one in UNFITTED)
        raise UsageError(
            f"--bits {bits} needs codes that are fitted, and there are fewer than "
            f"{FEWEST_FITTED:,} images to fit them to; choose one of {lengths}, or add --fit itq"
        )
    return Hasher.load_builtin(name, device=device)


def fit_sample(
    name: str,
    files: Sequence[ImageFile],
    *,
    bits: int | None = None,
    device: str = "cpu",
    workers: int | None = None,
) -> ChosenHasher | None:
    """Fit a hasher to a sample of image files by iterative quantisation, without torch.

    Args:
        name: as for :func:`choose_hasher`, like the arguments below.
        files: the images.
        bits: length of the codes; by default 128.
        device: where to encode.
        workers: number of processes.

    Returns:
        None if too few images can be read.
    """
    from fisherhash.model.fitted_hasher import FittedHasher
    from fisherhash.model.itq_fit import fit_itq
    from fisherhash.model.onnx_hasher import OnnxHasher
    from fisherhash.model.runtime import feature_rows

    base = OnnxHasher.from_package(builtin.DEFAULT_HASHER, device=device)
    runtime = base.runtime.decoding(dataclasses.replace(base.preprocessing, draft=DRAFT))
    order = hash_order([file.key for file in files], range(len(files)), seed=0)[:FIT_SAMPLE]
    sample = collection_of(name, [files[i] for i in sorted(order)])
    # Stored on disk: after an interruption the same command goes on from there.
    rows = feature_rows(runtime, sample, workers=workers)  # type: ignore[arg-type]
    if len(rows.indices) < min(FEWEST_FITTED, FIT_SAMPLE):
        return None
    length = FITTED_BITS if bits is None else bits
    weight, offset = fit_itq(rows.values, length)
    of = f"{len(rows.indices):,} of {len(files):,} images"
    details = {
        "data": {"name": name, "images": len(rows.indices), "of": len(files)},
        "options": {"features": f"{base.backbone_name} of {builtin.DEFAULT_HASHER}"},
    }
    hasher = FittedHasher(runtime, weight, offset, method="itq", details=details)
    codes = pack(hasher.logits_of_rows(rows.values))
    pairs = zip(rows.indices, codes, strict=True)
    known: KnownCodes = {sample.names[int(i)]: (code, None) for i, code in pairs}
    reason = f"there are at least {FEWEST_FITTED:,} images, enough to fit codes to"
    model = {"fitted": "itq", "images": len(known)} | hasher.about
    return ChosenHasher(hasher, model, known, f"{length}-bit codes, fitted to {of} (itq): {reason}")
