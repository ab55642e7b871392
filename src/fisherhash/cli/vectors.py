"""What train and encode do with vectors instead of images."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fisherhash.cli.base import DEFAULT_NETWORK, NetworkFlags, print_json, say
from fisherhash.errors import UsageError, counted

if TYPE_CHECKING:
    from fisherhash.model.hasher import Hasher
    from fisherhash.training.trained import Trained


def train_vectors(
    features: Path,
    labels: Path | None,
    network: NetworkFlags,
    others: Mapping[str, object],
    common: Mapping[str, Any],
) -> Trained:
    """Train on vectors.

    Args:
        features: the file with the vectors.
        labels: the file with their labels.
        network: the options about the network, of which only the device has a meaning.
        others: what was given that concerns images, by the option's name.
        common: what goes to the training as it is.
    """
    from fisherhash.training.features import fit_features

    about = {f"--{name.replace('_', '-')}": name for name in ("backbone", "weights", "image_size")}
    wrong = [name for name, value in others.items() if value]
    wrong += [
        option
        for option, name in about.items()
        if getattr(network, name) != getattr(DEFAULT_NETWORK, name)
    ]
    wrong += ["--finetune"] if network.finetune else []
    if wrong:
        raise UsageError(f"{wrong[0]} is about images; it has no meaning with --features")
    trained = fit_features(features, labels, device=network.device, **common)
    size, width = len(trained.collection), trained.hasher.feature_width
    say(f"{features}: {counted(size, 'vector')} of {counted(width, 'dimension')}")
    return trained


def encode_vectors(features: Path, hasher: Hasher, out: Path | None, *, json: bool) -> None:
    """Print the codes of vectors, or write them to a file.

    Args:
        features: the file with the vectors.
        hasher: encodes them.
        out: the file FILE.npz.
        json: print JSON instead of text.
    """
    import numpy as np

    from fisherhash import codes
    from fisherhash.data.vectors import open_vectors
    from fisherhash.system import storage
    from fisherhash.system.progress import progress

    vectors = open_vectors(features)
    hasher.check_vectors(vectors, str(features))
    if out is None and not json:
        for part in hasher.encode_feature_blocks(vectors):
            for row, code in zip(part.indices, codes.to_hex(part.codes), strict=True):
                print(f"{code}  {row}")
        return
    parts = []
    with progress(f"encoding {features.name}", len(vectors)) as advance:
        for part in hasher.encode_feature_blocks(vectors):
            parts.append(part.codes)
            advance(len(part.codes))
    found = np.concatenate(parts)
    if out is None:
        rows = enumerate(codes.to_hex(found))
        listed = [{"name": str(row), "code": code} for row, code in rows]
        print_json({"bits": hasher.bits, "codes": listed})
        return

    def save(path: Path) -> None:
        with path.open("wb") as file:
            names = np.arange(len(found)).astype(str)
            np.savez(file, codes=found, names=names, bits=hasher.bits)

    storage.write_files(out.parent, {out.name: save})
    say(f"{counted(len(found), 'code')} of {counted(hasher.bits, 'bit')} in {out}")
