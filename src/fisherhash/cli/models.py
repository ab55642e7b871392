"""Verbs that make, use and measure one model: demo, train, encode, evaluate.

The file is long because a verb's docstring is its help; what a verb does is in the library.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import Parameter

from fisherhash.cli.base import Flag, Json, Whole, app, describe, notes, print_json, say, writing
from fisherhash.errors import FisherhashError, UsageError, unknown_name

if TYPE_CHECKING:
    from fisherhash.data.loading import Skipped
    from fisherhash.data.sources import Collection
    from fisherhash.data.splits import Split
    from fisherhash.evaluation import Evaluation


@app.command
def demo(*, out: Path = Path("fisherhash-demo"), bits: Whole = 24) -> None:
    """Train on the built-in images, measure, and write a page of answers.

    Parameters
    ----------
    out
        Folder for the model and the page.
    bits
        Length of the codes.
    """
    from fisherhash.pages.demo import run_demo

    result = run_demo(out, bits=bits, say=say)
    print(result.page)


@app.command
def train(
    data: str,
    *,
    out: Path,
    method: str = "dfh",
    bits: Whole = 48,
    set_: Annotated[list[str] | None, Parameter(name="--set", negative="")] = None,
    backbone: str = "efficientnet-lite0",
    weights: Path | None = None,
    image_size: Whole | None = None,
    finetune: Annotated[bool | None, Parameter(negative="--frozen")] = None,
    protocol: str | None = None,
    epochs: Whole | None = None,
    batch_size: Whole | None = None,
    optimizer: Literal["sgd", "adamw"] | None = None,
    learning_rate: float | None = None,
    backbone_rate: float | None = None,
    head_epochs: Whole | None = None,
    fixed_layers: Whole | None = None,
    weight_decay: float | None = None,
    schedule: Literal["one-cycle", "cosine", "step", "constant"] | None = None,
    dropout: float | None = None,
    validation: float | None = None,
    seed: Whole = 0,
    device: str | None = None,
    resume: Flag = False,
    overwrite: Flag = False,
    evaluate: bool = True,
    download: Flag = False,
    json: Json = False,
) -> None:
    """Train a hasher on labelled images (or fit an unsupervised one), and measure it.

    Interrupted, the same command continues where it stopped.

    Parameters
    ----------
    data
        A folder of class sub-folders, a CSV (path,label[;label…]), a folder with train.txt,
        query.txt and database.txt, or a named data set (sample, cifar10, tiny100, coco21).
    out
        The model folder.
    method
        How codes are learned; see: fisherhash methods.
    bits
        Length of the codes, 1 to 1024.
    set_
        A hyper-parameter of the method, NAME=VALUE; may be given several times.
    backbone
        efficientnet-lite0, squeezenet1.0, alexnet, vgg-f, torchvision:NAME or timm:NAME.
    weights
        The backbone's weights file.
    image_size
        Side of the images in pixels.
    finetune
        Train the network with the head, or only the head on frozen features (the default on a CPU).
    protocol
        How the data is split; by default what the data suggests.
    epochs
        Passes over the training images.
    batch_size
        Images a step.
    optimizer
        SGD with momentum, or AdamW.
    learning_rate
        The highest learning rate.
    backbone_rate
        When fine-tuning: the backbone's learning rate as a share of the head's.
    head_epochs
        When fine-tuning: epochs of the head alone before the whole network.
    fixed_layers
        When fine-tuning: how many of the network's first layers keep their weights; by default as
        many as suit it (4 of efficientnet-lite0's 18).
    weight_decay
        Weight decay.
    schedule
        How the learning rate changes.
    dropout
        Share of the features dropped in a step.
    validation
        Share of the training images held out to follow mAP during training.
    seed
        Decides initialisation, order and augmentation.
    device
        cpu, cuda, …
    resume
        Insist on continuing an unfinished run.
    overwrite
        Replace what the model folder holds.
    evaluate
        Measure mAP on the split's queries and database afterwards.
    download
        Fetch a named data set that is not on this machine.
    json
        Print the result as JSON on stdout.
    """
    began = time.perf_counter()
    from fisherhash.data.protocols import resolve
    from fisherhash.data.sources import open_data
    from fisherhash.training.checkpoints import is_unfinished
    from fisherhash.training.fitting import fit
    from fisherhash.training.loop import Settings

    options = _options(set_ or [])
    if resume and not is_unfinished(out):
        raise UsageError(f"{out} holds no unfinished run to resume; run without --resume")
    if resume and overwrite:
        raise UsageError("--resume and --overwrite exclude each other")
    given = {
        "epochs": epochs,
        "batch_size": batch_size,
        "optimizer": optimizer,
        "learning_rate": learning_rate,
        "backbone_rate": backbone_rate,
        "head_epochs": head_epochs,
        "fixed_layers": fixed_layers,
        "weight_decay": weight_decay,
        "schedule": schedule,
        "dropout": dropout,
        "validation": validation,
        "seed": seed,
    }
    settings = Settings(**{name: value for name, value in given.items() if value is not None})
    collection = open_data(data, download=download)
    describe(collection)
    split = resolve(collection, protocol) if collection.classes else None
    if split is not None:
        say(str(split))
        notes(split.notes)
    trained = fit(
        collection,
        method=method,
        bits=bits,
        options=options,
        backbone=backbone,
        weights=weights,
        image_size=image_size,
        finetune=finetune,
        protocol=split,
        settings=settings,
        device=device,
        out=out,
        overwrite=overwrite,
        measured=evaluate,
    )
    seconds = trained.seconds
    say(f"features {seconds['features']:.1f} s, training {seconds['training']:.1f} s")
    result: dict[str, Any] = {"model": str(out), **trained.hasher.details}
    if trained.evaluation is not None:
        say(f"mAP {_map_line(trained.evaluation)}")
        result["evaluation"] = trained.evaluation.to_json()
    _report_skipped(trained.skipped, out)
    result["seconds"] = round(time.perf_counter() - began, 2)
    say(f"model in {out}, {result['seconds']:.1f} s in all")
    if json:
        print_json(result)


@app.command
def encode(
    *images: Path,
    model: str | None = None,
    out: Path | None = None,
    device: str = "cpu",
    json: Json = False,
) -> None:
    """Print the code of each image in hexadecimal, or write all codes to a file.

    Parameters
    ----------
    images
        Image files and folders.
    model
        A model folder, or the name of a built-in hasher; by default the built-in one.
    out
        Write a file FILE.npz (codes, names, bits) instead of printing; unreadable files are listed
        in FILE.skipped.csv beside it.
    device
        cpu, cuda, …
    json
        Print JSON instead of text.
    """
    import numpy as np

    from fisherhash import codes
    from fisherhash.data.loading import write_skipped
    from fisherhash.data.sources import open_paths
    from fisherhash.index.images.encoding import load_hasher

    if not images:
        raise UsageError("no image given: fisherhash encode IMAGES… [--model MODEL]")
    if out is not None:
        if out.suffix != ".npz" or out.is_dir():
            raise UsageError(f"--out must be a file that ends in .npz, got '{out}'")
        with writing(out):
            pass  # before the long part: can its folder be made?
    hasher = load_hasher(model, device=device)
    collection = open_paths(images)
    encoded = hasher.encode_collection(collection)
    names = [collection.names[int(i)] for i in encoded.indices]
    if out is not None:
        with writing(out):
            part = out.with_name(out.name + ".new.npz")
            np.savez(part, codes=encoded.codes, names=np.array(names), bits=hasher.bits)
            os.replace(part, out)
        say(f"{len(names)} codes of {hasher.bits} bits in {out}")
    elif json:
        rows = zip(names, codes.to_hex(encoded.codes), strict=True)
        print_json({"bits": hasher.bits, "codes": [{"name": n, "code": c} for n, c in rows]})
    else:
        for name, code in zip(names, codes.to_hex(encoded.codes), strict=True):
            print(f"{code}  {name}")
    for item in encoded.skipped:
        say(f"skipped {item.name}: {item.reason}")
    if encoded.skipped and out is not None:
        listed = out.with_suffix(".skipped.csv")
        with writing(listed):
            write_skipped(listed, encoded.skipped)
    if not names:
        raise FisherhashError("no image could be read")


@app.command
def evaluate(
    *,
    model: Path,
    data: str,
    protocol: str | None = None,
    compat: str | None = None,
    plots: Path | None = None,
    device: str = "cpu",
    json: Json = False,
) -> None:
    """Measure a model's retrieval on a data set: tie-aware mAP and what belongs to it.

    Parameters
    ----------
    model
        The model folder.
    data
        As for train.
    protocol
        How the data is split; by default the split the model was trained with, where its images
        are in the data, else what the data suggests.
    compat
        Also print what a common evaluator would have printed on the same codes: hashnet, dfh,
        swuxyj or dsh-analysis.
    plots
        Folder for precision-recall and other curves, PNG and SVG.
    device
        cpu, cuda, …
    json
        Print the result as JSON on stdout.
    """
    began = time.perf_counter()
    from fisherhash.data.protocols import resolve
    from fisherhash.data.sources import open_data
    from fisherhash.evaluation import EVALUATORS, plot
    from fisherhash.evaluation import compat as old_number
    from fisherhash.model.hasher import Hasher, versions
    from fisherhash.training.fitting import SPLIT_FILE
    from fisherhash.training.measuring import encode_split, measure

    hasher = Hasher.load(model, device=device)
    hamming = hasher.head.hamming
    if compat is not None and compat not in EVALUATORS:
        raise unknown_name("evaluator", compat, EVALUATORS)
    if compat is not None and not hamming:
        raise UsageError(f"--compat ranks by Hamming distance, which {hasher.method} does not use")
    collection = open_data(data)
    own = _own_split(model / SPLIT_FILE, collection)
    if protocol is None and own is not None and len(own.query) and len(own.database):
        split = own
    else:
        split = resolve(collection, protocol)
    say(str(split))
    notes(split.notes)
    seen = 0 if own is None else len(set(split.query.tolist()) & set(own.train.tolist()))
    if seen:
        say(f"WARNING: the model was trained on {seen:,} of the {len(split.query):,} queries")
    encoded = encode_split(hasher, collection, split)
    for item in encoded.skipped:
        say(f"skipped {item.name}: {item.reason}")
    measured = measure(encoded, top=split.top)
    result = {
        "protocol": split.to_json(),
        "queries_trained_on": seen,
        "evaluation": measured.to_json(),
        "model": {"folder": str(model), "bits": hasher.bits, "method": hasher.method}
        | hasher.details,
        "skipped": [{"name": item.name, "reason": item.reason} for item in encoded.skipped],
        "versions": versions(),
    }
    then = None
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
    if plots is not None:
        plots.mkdir(parents=True, exist_ok=True)
        by_distance = ("pr-radius", "distances") if hamming else ()
        for kind in ("pr", "precision", "recall", *by_distance):
            for suffix in ("png", "svg"):
                say(str(plot(measured, plots / f"{kind}.{suffix}", kind=kind)))
    result["seconds"] = round(time.perf_counter() - began, 2)
    if json:
        print_json(result)
        return
    print(f"protocol                    {split}")
    print(f"model                       {model}: {hasher.method}, {hasher.bits} bits")
    print(measured)
    if then is not None:
        print(then)
    print(f"wall time                   {result['seconds']} s")


def _options(pairs: list[str]) -> dict[str, str]:
    for pair in pairs:
        if "=" not in pair:
            raise UsageError(f"--set takes NAME=VALUE, got '{pair}'")
    return dict(pair.split("=", 1) for pair in pairs)  # type: ignore[misc]


def _own_split(path: Path, collection: Collection) -> Split | None:
    """The split a model was trained with, as far as the data still holds its images."""
    from fisherhash.data.splits import Split

    return Split.load(path, collection, drop_missing=True) if path.is_file() else None


def _report_skipped(skipped: list[Skipped], out: Path) -> None:
    if skipped:
        first = skipped[0]
        say(
            f"{len(skipped)} images could not be read and were skipped, the first is {first.name} "
            f"({first.reason}); all are listed in {out / 'skipped.csv'}"
        )


def _map_line(measured: Evaluation) -> str:
    if measured.map_lower is None or measured.map_upper is None:
        bounds = "tie bounds not available"
    else:
        bounds = f"ties can move it from {measured.map_lower:.4f} to {measured.map_upper:.4f}"
    return f"{measured.map:.4f} ({bounds}; in database order {measured.map_stable:.4f})"
