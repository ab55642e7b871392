"""Verbs that make, use and measure one model: demo, train, encode, evaluate."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Iterable, Mapping
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from fisherhash.cli.base import (
    DEFAULT_LIMITS,
    DEFAULT_NETWORK,
    Data,
    Flag,
    Json,
    LimitFlags,
    NetworkFlags,
    ProtocolName,
    Workers,
    app,
    describe,
    notes,
    parse_workers,
    print_data,
    print_json,
    say,
)
from fisherhash.errors import (
    FisherhashError,
    UsageError,
    counted,
    not_installed,
    printable,
    unknown_name,
)
from fisherhash.system.extras import require_package
from fisherhash.system.options import parse_number, parse_pairs
from fisherhash.training.recipes import RecipeName
from fisherhash.training.settings import Settings

if TYPE_CHECKING:
    from fisherhash.data.collection import Collection
    from fisherhash.data.computing import Skipped
    from fisherhash.evaluation import Evaluation
    from fisherhash.model.hasher import Hasher
    from fisherhash.training.trained import Trained

_DEFAULT_SETTINGS = Settings()
PRINTED = 32
"""Images whose codes are printed at a time."""


@app.command
def demo(*, out: Path = Path("fisherhash-demo"), bits: int = 24) -> None:
    """Train on the built-in images, measure, and write a page of search results.

    Args:
        out: Folder for the model and the page.
        bits: Length of the codes.
    """
    try:
        from fisherhash.pages.demo import run_demo
    except ModuleNotFoundError as error:
        reason = not_installed(error, "the demo, which trains a model,")
        if reason is error:
            raise
        raise FisherhashError(
            f"{reason}. Searching needs no training: fisherhash index sync photos.index FOLDER, "
            "then fisherhash search PHOTO --index photos.index"
        ) from error
    result = run_demo(out, bits=bits, say=say)
    print(result.page)


@app.command
def train(
    data: Data | None = None,
    *,
    out: Path,
    features: Path | None = None,
    labels: Path | None = None,
    method: str = "dfh",
    bits: int = 48,
    nested: str = "",
    recipe: RecipeName = "best",
    set_: Annotated[list[str] | None, Parameter(name="--set", negative="")] = None,
    network: NetworkFlags = DEFAULT_NETWORK,
    protocol: ProtocolName = None,
    settings: Annotated[Settings, Parameter(name="*")] = _DEFAULT_SETTINGS,
    stream: bool | None = None,
    resume: Flag = False,
    overwrite: Flag = False,
    evaluate: bool = True,
    unseen: Flag = False,
    download: Flag = False,
    json: Json = False,
) -> None:
    """Train a hasher on labelled images (or fit an unsupervised one), and measure it.

    With --features it is trained on vectors instead, all of them, and not measured.

    After an interruption the same command continues where it stopped. Several processes or GPUs
    train together under torchrun: torchrun --nproc-per-node 2 -m fisherhash train …

    Args:
        out: The model folder.
        features: Instead of images: a file FILE.npy with vectors (n, d), one per row.
        labels: With --features: a file FILE.npy with one number or text per vector, or 0 and 1
            (n, classes).
        method: How codes are learned; see: fisherhash methods.
        bits: Length of the codes, 1 to 1024.
        nested: Shorter lengths to train as well, such as 12,24: the first 12 bits of a code are
            then a good 12-bit code; see: fisherhash encode --bits.
        recipe: What DFH is trained with where no option says otherwise: the best known recipe for
            the data, or the method as printed in the paper.
        set_: A hyper-parameter of the method, NAME=VALUE; may be repeated. fisherhash methods NAME
            explains those of a method.
        stream: Read the training images from a cache on disk while they are used, in bounded
            memory, or with --no-stream hold all in memory. By default they are read from the disk
            if they would take more than half of the free memory.
        resume: Require an unfinished run to continue.
        overwrite: Replace what the model folder holds.
        evaluate: Measure mAP on the split's queries and database afterwards.
        unseen: Also train once more without a quarter of the classes, and measure that among images
            of these classes; the card prints it. Takes as long again.
        download: Download a named data set that is not on this machine.
        json: Print the result as JSON on stdout.
    """
    began = time.perf_counter()
    from fisherhash.data.protocols import resolve
    from fisherhash.data.sources import open_data
    from fisherhash.methods import find
    from fisherhash.model.folder import is_unfinished
    from fisherhash.training.fitting import fit
    from fisherhash.training.trained import UNSEEN_MAP

    find(method)  # before the long part: is there such a method?
    options = parse_pairs("--set", set_ or ())
    if resume and not is_unfinished(out):
        raise UsageError(f"{out} holds no unfinished run to resume; run without --resume")
    if resume and overwrite:
        raise UsageError("--resume and --overwrite exclude each other")
    common: dict[str, Any] = {
        "method": method,
        "bits": bits,
        "options": options,
        "settings": settings,
        "recipe": recipe,
        "out": out,
        "overwrite": overwrite,
    }
    if features is not None:
        given = {"DATA": data, "--protocol": protocol, "--download": download, "--nested": nested}
        given |= {"--stream": stream, "--unseen": unseen}
        trained = _train_vectors(features, labels, network, given, common)
    elif data is None:
        raise UsageError("DATA is missing; see fisherhash train --help")
    elif labels is not None:
        raise UsageError("--labels goes with --features; images have theirs from their folders")
    else:
        collection = open_data(data, download=download)
        describe(collection)
        split = resolve(collection, protocol) if collection.classes else None
        if split is not None:
            say(str(split))
            notes(split.notes)
        lengths = [parse_number("--nested", int, word) for word in nested.split(",") if nested]
        trained = fit(
            collection,
            nested=lengths,
            protocol=split,
            measured=evaluate,
            stream=stream,
            unseen=unseen,
            **common,
            **asdict(network),
        )
    seconds = trained.seconds
    say(f"features {seconds['features']:.1f} s, training {seconds['training']:.1f} s")
    result: dict[str, Any] = {"model": str(out), **trained.hasher.details}
    if nested:
        say(f"the shorter codes are measured by: fisherhash evaluate --model {out} --data {data}")
    if trained.evaluation is not None:
        say(f"mAP {_map_line(trained.evaluation)}")
        result["evaluation"] = trained.evaluation.to_json()
    if trained.agreement is not None:
        say(str(trained.agreement))
        result["agreement"] = trained.agreement.to_json()
    if trained.unseen is not None:
        say(f"{UNSEEN_MAP}: {trained.unseen.map:.4f}")
        result["unseen"] = trained.unseen.to_json()
    if trained.skipped:
        first = trained.skipped[0]
        say(
            f"{counted(len(trained.skipped), 'image')} could not be read, skipped; the first is "
            f"{first.name} ({first.reason}); all are listed in {out / 'skipped.csv'}"
        )
    result["seconds"] = round(time.perf_counter() - began, 2)
    say(f"model in {out}, {result['seconds']:.1f} s in all")
    if json:
        print_json(result)


@app.command(usage="Usage: fisherhash encode [OPTIONS] IMAGES...")
def encode(
    *images: Path,
    features: Path | None = None,
    model: str | None = None,
    bits: int | None = None,
    out: Path | None = None,
    limits: LimitFlags = DEFAULT_LIMITS,
    device: str = "cpu",
    workers: Workers = "auto",
    json: Json = False,
) -> None:
    """Print the code of each image in hexadecimal, or write all codes to a file.

    Args:
        images: Image files and folders.
        features: Instead of images: a file FILE.npy with vectors, named by their row numbers.
        model: A model folder, or the name of a built-in hasher; by default general-64.
        bits: Print only so many bits of each code, the first ones; see: fisherhash train --nested.
        out: Write a file FILE.npz (codes, names, bits) instead of printing; unreadable files are
            listed in FILE.skipped.csv beside it.
        device: cpu, cuda, … or auto.
        json: Print JSON instead of text.
    """
    import numpy as np

    from fisherhash import codes
    from fisherhash.data.computing import skipped_csv
    from fisherhash.data.sources import open_paths
    from fisherhash.system import storage

    if images and features is not None:
        raise UsageError("images and --features exclude each other; encode them one by one")
    if not images and features is None:
        raise UsageError("no image given: fisherhash encode IMAGES… [--model MODEL]")
    if out is not None:
        if out.suffix != ".npz" or out.is_dir():
            raise UsageError(f"--out must be a file that ends in .npz, got '{out}'")
        storage.write_files(out.parent, {})  # before the long part: can its folder be made?
    limits.apply()
    processes = parse_workers(workers)
    if features is not None:
        _encode_vectors(features, _load_cut(model, bits, device), out, json=json)
        return
    collection = open_paths(images)
    notes(collection.notes)
    hasher = _load_cut(model, bits, device)
    hasher.check_takes_images()
    if out is None and not json:
        _print_codes(hasher, collection, processes)
        return
    encoded = hasher.encode_collection(collection, workers=processes)
    names = [collection.names[int(i)] for i in encoded.indices]

    def save(path: Path) -> None:
        with path.open("wb") as file:
            np.savez(file, codes=encoded.codes, names=np.array(names), bits=hasher.bits)

    if out is not None:
        files: dict[str, storage.Content] = {out.name: save}
        if encoded.skipped:
            listed = out.with_suffix(".skipped.csv").name
            files[listed] = skipped_csv(encoded.skipped)
        storage.write_files(out.parent, files)
        say(f"{counted(len(names), 'code')} of {counted(hasher.bits, 'bit')} in {out}")
    else:
        rows = zip(names, codes.to_hex(encoded.codes), strict=True)
        print_json({"bits": hasher.bits, "codes": [{"name": n, "code": c} for n, c in rows]})
    _say_skipped(encoded.skipped)
    if not names:
        raise FisherhashError("no image could be read")


def _load_cut(model: str | None, bits: int | None, device: str) -> Hasher:
    """Load a hasher; with ``bits`` its codes are cut to their first bits."""
    from fisherhash.model.hasher import Hasher

    hasher = Hasher.load(model, device=device)
    if bits is None:
        return hasher
    cut = hasher.truncated(bits)
    if bits not in (hasher.bits, *hasher.details.get("nested", ())):
        say(f"the model was not trained for codes of {bits} bits; expect them to be worse")
    return cut


def _print_codes(hasher: Hasher, collection: Collection, workers: int | None) -> None:
    """Print codes as they are computed: a reader may have enough of them before the end."""
    from fisherhash import codes
    from fisherhash.system.progress import progress

    count, skipped = 0, []
    # On a terminal the lines show the progress.
    quiet = sys.stdout.isatty()
    title = f"encoding {collection.name}"
    with nullcontext(lambda _: None) if quiet else progress(title, len(collection)) as advance:
        for part in hasher.encode_blocks(collection, block=PRINTED, workers=workers):
            for index, code in zip(part.indices, codes.to_hex(part.codes), strict=True):
                print(f"{code}  {printable(collection.names[int(index)])}")
            sys.stdout.flush()
            skipped += part.skipped
            count += len(part.indices)
            advance(len(part.indices) + len(part.skipped))
    _say_skipped(skipped)
    if not count:
        raise FisherhashError("no image could be read")


@app.command
def evaluate(
    *,
    model: Path,
    data: Data,
    protocol: str | None = None,
    compat: str | None = None,
    plots: Path | None = None,
    agreement: Flag = False,
    device: str = "cpu",
    json: Json = False,
) -> None:
    """Measure a model's retrieval on a data set: tie-aware mAP and related metrics.

    Args:
        model: A model folder, or the name of a built-in hasher.
        protocol: Name of the split; by default the split the model was trained with, where its
            images are in the data, otherwise the one the data suggests.
        compat: Also print what a common evaluator would have printed on the same codes: hashnet,
            dfh, swuxyj or dsh-analysis.
        plots: Folder for precision-recall and other curves, as PNG and SVG.
        agreement: Measure how codes order the images inside a class also where that takes a second
            pass over the images, as for an exported model.
        device: cpu, cuda, … or auto.
        json: Print the result as JSON on stdout.
    """
    began = time.perf_counter()
    from fisherhash.data.protocols import resolve
    from fisherhash.data.sources import open_data
    from fisherhash.data.splits import Split
    from fisherhash.evaluation import EVALUATORS, plot
    from fisherhash.evaluation import compat as old_number
    from fisherhash.model.folder import versions
    from fisherhash.model.hasher import Hasher
    from fisherhash.training.measuring import SPLIT_FILE, encode_split, first_bits, measure

    if plots is not None:
        require_package("matplotlib", "plots", "--plots")
    hasher = Hasher.load(model, device=device)
    hamming = hasher.head.hamming
    if compat is not None and compat not in EVALUATORS:
        raise unknown_name("evaluator", compat, EVALUATORS)
    if compat is not None and not hamming:
        raise UsageError(f"--compat ranks by Hamming distance, which {hasher.method} does not use")
    collection = open_data(data)
    path = model / SPLIT_FILE
    # Without images that the data no longer holds.
    own = Split.load(path, collection, drop_missing=True) if path.is_file() else None
    if protocol is None and own is not None and len(own.query) and len(own.database):
        split = own
    else:
        split = resolve(collection, protocol)
    say(str(split))
    notes(split.notes)
    seen = 0 if own is None else len(set(split.query.tolist()) & set(own.train.tolist()))
    if seen:
        say(f"WARNING: the model was trained on {seen:,} of the {len(split.query):,} queries")
    encoded = encode_split(hasher, collection, split, real_queries=hamming)
    _say_skipped(encoded.skipped)
    measured = measure(encoded, top=split.top)
    lines: list[object] = [
        f"protocol                    {split}",
        f"model                       {model}: {hasher.method}, {hasher.bits} bits",
        measured,
    ]
    real = measure(encoded, top=split.top, real_queries=True) if hamming else None
    if real is not None:
        lines += [
            f"mAP by Hamming distance     {measured.map:.4f}",
            f"mAP by real-valued queries  {real.map:.4f}",
        ]
    shorter = {
        bits: measure(first_bits(encoded, hasher, bits), top=split.top)
        for bits in hasher.details.get("nested", ())
        if bits < hasher.bits
    }
    for length, found in shorter.items():
        lines.append(f"{f'mAP of the first {length} bits':<27} {found.map:.4f}")
    result = {
        "protocol": split.to_json(),
        "queries_trained_on": seen,
        "evaluation": measured.to_json(),
        "real_valued_queries": None if real is None else real.to_json(),
        "nested": {str(bits): found.to_json() for bits, found in shorter.items()},
        "model": {"folder": str(model), "bits": hasher.bits, "method": hasher.method}
        | hasher.details,
        "skipped": [{"name": item.name, "reason": item.reason} for item in encoded.skipped],
        "versions": versions(),
    }
    if agreement or hasher.rows_are_features:
        from fisherhash.training.measuring import measure_agreement

        looked = measure_agreement(hasher, collection, split)
        if looked is not None:
            lines.append(looked)
            result["agreement"] = looked.to_json()
    if compat is not None:
        then = old_number(
            compat,
            encoded.query_codes,
            encoded.database_codes,
            encoded.query_labels,
            encoded.database_labels,
            bits=hasher.bits,
            top=measured.top if measured.top < measured.database else None,
        )
        result["compat"] = then.to_json()
        lines.append(then)
    if plots is not None:
        plots.mkdir(parents=True, exist_ok=True)
        by_distance = ("pr-radius", "distances") if hamming else ()
        for kind in ("pr", "precision", "recall", *by_distance):
            for suffix in ("png", "svg"):
                say(str(plot(measured, plots / f"{kind}.{suffix}", kind=kind)))
    result["seconds"] = round(time.perf_counter() - began, 2)
    lines.append(f"wall time                   {result['seconds']} s")
    print_data(result, lines, json=json)


def _say_skipped(skipped: Iterable[Skipped]) -> None:
    for item in skipped:
        say(f"skipped {printable(item.name)}: {item.reason}")


def _map_line(measured: Evaluation) -> str:
    if measured.map_lower is None or measured.map_upper is None:
        bounds = "tie bounds not available"
    else:
        bounds = f"ties can move it from {measured.map_lower:.4f} to {measured.map_upper:.4f}"
    from fisherhash.experiments.significance import t_interval

    scored = [value for value in measured.average_precision.tolist() if not math.isnan(value)]
    # What other queries could have given; of a dozen, nearly anything.
    half = f" ± {t_interval(scored):.4f}" if len(scored) > 1 else ""
    found = f"{measured.map:.4f}{half} over {counted(len(scored), 'query', 'queries')}"
    return f"{found} ({bounds}; in database order {measured.map_stable:.4f})"


def _train_vectors(
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
    from fisherhash.training.fitting import fit_features

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


def _encode_vectors(features: Path, hasher: Hasher, out: Path | None, *, json: bool) -> None:
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
