"""The command line: one verb a function. Heavy imports stay inside the verbs.

Data goes to stdout, talk to stderr. Exit codes: 0, 1 (failed), 2 (bad use), 130 (interrupted).
The file is long because a verb's docstring is its help; what a verb does is in the library.
"""

from __future__ import annotations

import difflib
import io
import json
import logging
import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NoReturn

from cyclopts import App, CycloptsError, Parameter
from cyclopts.exceptions import MissingArgumentError

from fisherhash import __version__
from fisherhash.errors import FisherhashError, UsageError, unknown_name

if TYPE_CHECKING:
    from fisherhash.data.loading import Skipped
    from fisherhash.data.sources import Collection
    from fisherhash.data.splits import Split
    from fisherhash.evaluation import Evaluation

app = App(
    name="fisherhash",
    help="Tiny binary codes for images: learn them, measure them, search by Hamming distance.",
    version=__version__,
    help_format="plaintext",
    suppress_keyboard_interrupt=False,  # main says how to go on
)


def _integer(_: Any, tokens: Any) -> int:
    """A whole number, and nothing that would have to be rounded to one."""
    text = tokens[0].value
    try:
        return int(text)
    except ValueError:
        raise UsageError(f"{tokens[0].keyword} must be a whole number, got '{text}'") from None


Whole = Annotated[int, Parameter(converter=_integer)]
Json = Annotated[bool, Parameter(negative="")]
Flag = Annotated[bool, Parameter(negative="")]


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
    from fisherhash.demo import run_demo

    result = run_demo(out, bits=bits, say=_say)
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
        Train the whole network, or only the head on frozen features (the default on a CPU).
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
    from fisherhash.checkpoints import is_unfinished
    from fisherhash.data.protocols import resolve
    from fisherhash.data.sources import open_data
    from fisherhash.loop import Settings
    from fisherhash.training import fit

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
        "weight_decay": weight_decay,
        "schedule": schedule,
        "dropout": dropout,
        "validation": validation,
        "seed": seed,
    }
    settings = Settings(**{name: value for name, value in given.items() if value is not None})
    collection = open_data(data, download=download)
    _describe(collection)
    split = resolve(collection, protocol) if collection.classes else None
    if split is not None:
        _say(str(split))
        _notes(split.notes)
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
    _say(f"features {seconds['features']:.1f} s, training {seconds['training']:.1f} s")
    result: dict[str, Any] = {"model": str(out), **trained.hasher.details}
    if trained.evaluation is not None:
        _say(f"mAP {_map_line(trained.evaluation)}")
        result["evaluation"] = trained.evaluation.to_json()
    _report_skipped(trained.skipped, out)
    result["seconds"] = round(time.perf_counter() - began, 2)
    _say(f"model in {out}, {result['seconds']:.1f} s in all")
    if json:
        _print_json(result)


@app.command
def encode(
    *images: Path, model: Path, out: Path | None = None, device: str = "cpu", json: Json = False
) -> None:
    """Print the code of each image in hexadecimal, or write all codes to a file.

    Parameters
    ----------
    images
        Image files and folders.
    model
        The model folder.
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
    from fisherhash.hasher import Hasher

    if not images:
        raise UsageError("no image given: fisherhash encode IMAGES… --model MODEL")
    if out is not None:
        if out.suffix != ".npz" or out.is_dir():
            raise UsageError(f"--out must be a file that ends in .npz, got '{out}'")
        with _writing(out):
            pass  # before the long part: can its folder be made?
    hasher = Hasher.load(model, device=device)
    collection = open_paths(images)
    encoded = hasher.encode_collection(collection)
    names = [collection.names[int(i)] for i in encoded.indices]
    if out is not None:
        with _writing(out):
            part = out.with_name(out.name + ".new.npz")
            np.savez(part, codes=encoded.codes, names=np.array(names), bits=hasher.bits)
            os.replace(part, out)
        _say(f"{len(names)} codes of {hasher.bits} bits in {out}")
    elif json:
        rows = zip(names, codes.to_hex(encoded.codes), strict=True)
        _print_json({"bits": hasher.bits, "codes": [{"name": n, "code": c} for n, c in rows]})
    else:
        for name, code in zip(names, codes.to_hex(encoded.codes), strict=True):
            print(f"{code}  {name}")
    for item in encoded.skipped:
        _say(f"skipped {item.name}: {item.reason}")
    if encoded.skipped and out is not None:
        listed = out.with_suffix(".skipped.csv")
        with _writing(listed):
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
    from fisherhash.hasher import Hasher, versions
    from fisherhash.measuring import encode_split, measure
    from fisherhash.training import SPLIT_FILE

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
    _say(str(split))
    _notes(split.notes)
    seen = 0 if own is None else len(set(split.query.tolist()) & set(own.train.tolist()))
    if seen:
        _say(f"WARNING: the model was trained on {seen:,} of the {len(split.query):,} queries")
    encoded = encode_split(hasher, collection, split)
    for item in encoded.skipped:
        _say(f"skipped {item.name}: {item.reason}")
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
                _say(str(plot(measured, plots / f"{kind}.{suffix}", kind=kind)))
    result["seconds"] = round(time.perf_counter() - began, 2)
    if json:
        _print_json(result)
        return
    print(f"protocol                    {split}")
    print(f"model                       {model}: {hasher.method}, {hasher.bits} bits")
    print(measured)
    if then is not None:
        print(then)
    print(f"wall time                   {result['seconds']} s")


@app.command
def compare(
    *,
    data: str,
    out: Path,
    methods: str = "all",
    bits: str = "12,48",
    seeds: Whole = 1,
    protocol: str | None = None,
    backbone: str = "efficientnet-lite0",
    weights: Path | None = None,
    image_size: Whole | None = None,
    finetune: Annotated[bool, Parameter(negative="--frozen")] = False,
    epochs: Whole | None = None,
    learning_rate: float | None = None,
    device: str | None = None,
    json: Json = False,
) -> None:
    """Train several methods alike, measure them alike, and write one table.

    Interrupted, the same command continues where it stopped.

    Parameters
    ----------
    data
        As for train.
    out
        Folder for the runs, table.md and results.json.
    methods
        Names joined by commas, or all.
    bits
        Code lengths joined by commas.
    seeds
        How many seeds; they are 0, 1, 2, …
    protocol
        How the data is split; by default what the data suggests.
    backbone
        As for train; one for all methods.
    weights
        The backbone's weights file.
    image_size
        Side of the images in pixels.
    finetune
        Train the whole network, or only the head on frozen features (the default).
    epochs
        Passes over the training images.
    learning_rate
        The highest learning rate.
    device
        cpu, cuda, …
    json
        Print the results as JSON on stdout instead of the table.
    """
    from fisherhash.experiments.compare import compare as run
    from fisherhash.loop import Settings

    given = {"epochs": epochs, "learning_rate": learning_rate}
    comparison = run(
        data,
        out=out,
        names=[name.strip() for name in methods.split(",") if name.strip()],
        bits=[_whole(number) for number in bits.split(",")],
        seeds=seeds,
        protocol=protocol,
        backbone=backbone,
        weights=weights,
        image_size=image_size,
        finetune=finetune,
        settings=Settings(**{k: v for k, v in given.items() if v is not None}),
        device=device,
        say=_say,
    )
    if json:
        _print_json({"rows": comparison.rows, "failed": comparison.failed})
    else:
        print(comparison.table, end="")
    _say(f"table.md and results.json are in {out}")
    if comparison.failed:
        raise FisherhashError(f"{len(comparison.failed)} runs failed; the same command tries again")


@app.command(name="check-data")
def check_data(
    data: str, *, protocol: str | None = None, workers: Whole | None = None, json: Json = False
) -> None:
    """Read every image and report what is wrong with a data set; exit code 1 if anything is.

    Parameters
    ----------
    data
        As for train.
    protocol
        Check the splits of this protocol, which leaves out what must not be in them; by default
        the data's own lists are checked as they are.
    workers
        Processes that decode.
    json
        Print JSON instead of text.
    """
    from fisherhash.data.check import check
    from fisherhash.data.protocols import resolve
    from fisherhash.data.sources import open_data

    collection = open_data(data)
    _describe(collection)
    split = None if protocol is None else resolve(collection, protocol)
    report = check(collection, split, workers=workers)
    if json:
        _print_json(report.to_json())
    else:
        print(report)
    if not report.ok:
        raise SystemExit(1)


@app.command
def methods(*, json: Json = False) -> None:
    """List the methods, with their hyper-parameters.

    Parameters
    ----------
    json
        Print JSON instead of text.
    """
    from dataclasses import asdict

    from fisherhash.methods import hyper_parameters, registry

    listed = {
        name: asdict(method.info)
        | {"options": {k: p.default for k, p in hyper_parameters(method).items()}}
        for name, method in registry().items()
    }
    if json:
        _print_json(listed)
        return
    for name, info in listed.items():
        print(f"{name:<12} {info['title']} ({info['venue']} {info['year']})")
        learns = "no labels" if info["supervision"] == "none" else info["supervision"]
        several = "several labels" if info["multilabel"] else "one label an image"
        print(f"{'':<12} learns from {learns}; {several}; {info['url']}")
        options = " ".join(f"{k}={v}" for k, v in info["options"].items())
        if options:
            print(f"{'':<12} --set {options}")


@app.command
def doctor(*, json: Json = False) -> None:
    """Say what is installed, what is missing, and where things are kept.

    Parameters
    ----------
    json
        Print JSON instead of text.
    """
    from fisherhash.doctor import examine

    found = examine()
    if json:
        _print_json(found)
        return
    for section, rows in found.items():
        print(section)
        for name, value in rows.items():
            print(f"  {name:<20} {value}")


def main(arguments: list[str] | None = None) -> NoReturn:
    """The entry point of the command ``fisherhash``."""
    library = logging.getLogger("fisherhash")
    library.setLevel(logging.INFO)
    if not any(isinstance(handler, _Talk) for handler in library.handlers):
        library.addHandler(_Talk())
    # Read when torch is loaded. Threads that spin while they wait made training ten times slower
    # on a machine with other work to do.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    if isinstance(sys.stdout, io.TextIOWrapper):
        # A file name that is not UTF-8 leaves as the bytes it came as.
        sys.stdout.reconfigure(errors="surrogateescape")
    words = sys.argv[1:] if arguments is None else arguments
    try:
        app(words, exit_on_error=False, print_error=False, result_action="return_value")
    except CycloptsError as error:
        _fail(_explain(error, words), 2)
    except FisherhashError as error:
        _fail(str(error), error.exit_code)
    except KeyboardInterrupt:
        _fail(_interrupted(words), 130)
    except BrokenPipeError:
        # The reader went away (head, less): nobody is left to tell.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(1) from None
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        _fail(f"{where}{error.strerror or error}", 1)
    raise SystemExit(0)


def _explain(error: CycloptsError, words: list[str]) -> str:
    """The parser's complaint; a mistyped flag is named before the one that seems to be missing."""
    if isinstance(error, MissingArgumentError) and words:
        verb = app[words[0]]
        known = [
            name for argument in verb.assemble_argument_collection() for name in argument.names
        ]
        for word in words:
            flag = word.split("=")[0]
            if flag.startswith("--") and flag not in known:
                near = difflib.get_close_matches(flag, known, n=1, cutoff=0.4)
                hint = f" Did you mean {near[0]}?" if near else ""
                return f"Unknown option: {flag}.{hint}"
    return str(error).strip()


def _interrupted(words: list[str]) -> str:
    if not words or words[0] not in ("train", "compare"):
        return "interrupted"
    without = " without --overwrite" if "--overwrite" in words else ""
    return f"interrupted; the same command{without} continues where it stopped"


class _Talk(logging.Handler):
    """What the library logs goes where the command line talks."""

    def emit(self, record: logging.LogRecord) -> None:
        _say(self.format(record))


def _fail(sentence: str, code: int) -> NoReturn:
    print(f"fisherhash: {sentence}", file=sys.stderr)
    raise SystemExit(code)


def _say(sentence: str) -> None:
    print(sentence, file=sys.stderr, flush=True)


def _print_json(value: Any) -> None:
    print(json.dumps(value, indent=2, ensure_ascii=False))


def _options(pairs: list[str]) -> dict[str, str]:
    for pair in pairs:
        if "=" not in pair:
            raise UsageError(f"--set takes NAME=VALUE, got '{pair}'")
    return dict(pair.split("=", 1) for pair in pairs)  # type: ignore[misc]


def _whole(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise UsageError(f"bits must be whole numbers joined by commas, got '{text}'") from None


def _own_split(path: Path, collection: Collection) -> Split | None:
    """The split a model was trained with, as far as the data still holds its images."""
    from fisherhash.data.splits import Split

    return Split.load(path, collection, drop_missing=True) if path.is_file() else None


def _describe(collection: Collection) -> None:
    labels = f"{len(collection.classes)} classes" if collection.classes else "no labels"
    _say(f"{collection.name}: {len(collection):,} images, {labels}")
    _notes(collection.notes)


def _notes(notes: tuple[str, ...]) -> None:
    for note in notes:
        _say(f"note: {note}")


def _report_skipped(skipped: list[Skipped], out: Path) -> None:
    if skipped:
        first = skipped[0]
        _say(
            f"{len(skipped)} images could not be read and were skipped, the first is {first.name} "
            f"({first.reason}); all are listed in {out / 'skipped.csv'}"
        )


def _map_line(measured: Evaluation) -> str:
    if measured.map_lower is None or measured.map_upper is None:
        bounds = "tie bounds not available"
    else:
        bounds = f"ties can move it from {measured.map_lower:.4f} to {measured.map_upper:.4f}"
    return f"{measured.map:.4f} ({bounds}; in database order {measured.map_stable:.4f})"


class _writing:  # noqa: N801
    """Turns a failed write into an error that names the file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __enter__(self) -> None:
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise FisherhashError(f"could not write {self.path}: {error.strerror}") from error

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if isinstance(error, OSError):
            self.path.with_name(self.path.name + ".new.npz").unlink(missing_ok=True)
            reason = error.strerror or error
            raise FisherhashError(f"could not write {self.path}: {reason}") from error
