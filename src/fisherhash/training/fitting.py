"""From data to a hasher: open, split, extract features, train, save."""

from __future__ import annotations

import copy
import dataclasses
import functools
import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, ParamSpec

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from fisherhash import backbones, codes, methods
from fisherhash.backbones import Backbone
from fisherhash.data.loading import Rows
from fisherhash.data.pixels import PixelBank, check_readable, pixel_rows, placed
from fisherhash.data.protocols import Split, resolve
from fisherhash.data.row_cache import StoredRows
from fisherhash.data.sources import Collection, open_data
from fisherhash.data.splits import hash_order
from fisherhash.data.streaming import StreamedRows
from fisherhash.data.unseen import hold_out_classes
from fisherhash.errors import FisherhashError, NotDefinedError, UsageError, counted
from fisherhash.methods import HashMethod
from fisherhash.methods._nested import Nested
from fisherhash.methods._nested import nested as nested_method
from fisherhash.model.folder import is_unfinished
from fisherhash.model.runtime import feature_rows
from fisherhash.model.torch_hasher import TorchHasher
from fisherhash.model.torch_runtime import TorchRuntime, on_device
from fisherhash.system.options import options_of
from fisherhash.training.checkpoints import check_resumable
from fisherhash.training.distributed import current_ranks, join
from fisherhash.training.finishing import Ending, Endings, check_cut
from fisherhash.training.looking import measure_agreement
from fisherhash.training.loop import FrozenImages, LiveImages, Loop
from fisherhash.training.measuring import held_out_top
from fisherhash.training.placement import FEATURES_BY, STREAM, begun_features, choose_stream
from fisherhash.training.recipes import RecipeName, apply_recipe, find_recipe
from fisherhash.training.second_code import FINE_BITS, add_second_code, compare_rankings
from fisherhash.training.settings import Settings
from fisherhash.training.trained import Trained

logger = logging.getLogger(__name__)
P = ParamSpec("P")

UNSEEN_MAP = "mAP on classes that a second training held out"
"""The line of a model card."""


def fit(
    data: str | os.PathLike[str] | Collection,
    *,
    method: str = "dfh",
    bits: int = 48,
    options: Mapping[str, Any] | None = None,
    backbone: str | nn.Module = backbones.DEFAULT,
    weights: str | os.PathLike[str] | None = None,
    image_size: int | None = None,
    finetune: bool | None = None,
    protocol: str | Split | None = None,
    settings: Settings | None = None,
    recipe: RecipeName | None = None,
    device: str | None = None,
    out: str | os.PathLike[str] | None = None,
    overwrite: bool = False,
    measured: bool = False,
    bank: PixelBank | None = None,
    nested: Sequence[int] = (),
    stream: bool | None = None,
    unseen: bool = False,
    fine_bits: int = 0,
    endings: Sequence[tuple[int, Settings]] = (),
) -> Trained:
    """Train a hasher on a data set.

    Args:
        data: a folder of class sub-folders, a CSV, a folder with list files, a named data set, or
            a collection.
        method: one of ``methods.registry()``.
        bits: length of the codes.
        options: the method's hyper-parameters that differ from its defaults.
        backbone: a name or a network; a network is copied, not changed.
        weights: file with the backbone's weights, if it has no packaged weights.
        image_size: side of the images in pixels; by default the backbone's own.
        finetune: train the network with the head; by default True on CUDA and False elsewhere.
        protocol: how to split the data: a name, or the split itself; by default what the data
            suggests.
        settings: how to train.
        recipe: ``best`` or ``paper``: what DFH is trained with where ``options`` and ``settings``
            do not say otherwise; :func:`train` uses ``best`` by default, and ``fit`` none.
        device: ``cpu``, ``cuda``, …; by default CUDA where there is a GPU.
        out: the model folder; by default nothing is written. An unfinished run in it with the same
            settings is continued.
        overwrite: replace the model in ``out``.
        measured: also measure the hasher on the split's queries and database, before it is saved,
            so that an interrupted measurement is continued like an interrupted training.
        bank: the decoded pixels of all images of the split, for a grid of trainings.
        nested: shorter lengths to train as well: the first 12 bits are then a 12-bit code, see
            :meth:`Hasher.truncated`.
        stream: read the decoded training images from the cache on disk while they are used, with
            bounded memory; by default only if they would take more than half of the free memory.
        unseen: also train once more without a quarter of the classes, and measure that hasher among
            images of these; the hasher that is returned is not changed by it.
        fine_bits: length of a second code, fitted to the same features without labels, by which an
            index orders results, too; 0 for none. The rankings are then compared, too.
            :func:`train` makes one by default, and ``fit`` none.
        endings: bits and settings of other hashers that the same training can end in, for a grid
            of trainings: other bits or another cut of its outputs, another class step. They are
            returned as :attr:`Trained.others`, and not together with ``recipe``, ``out``,
            ``measured``, ``unseen`` or ``fine_bits``, which are about one hasher.

    Raises:
        UsageError: a name, a number or a folder is wrong, or the data has no labels to learn from.
        NotDefinedError: the method is not defined for this data or this number of bits.
        FisherhashError: too few images can be read, or the model cannot be written.
    """
    began = time.perf_counter()
    ranks, place = join(device)
    codes.check_bits(bits)
    if endings and (recipe or out is not None or measured or unseen or fine_bits):
        raise UsageError(
            "endings do not go together with recipe, out, measured, unseen or fine_bits"
        )
    asked: dict[str, Any] = {
        "method": method,
        "bits": bits,
        "options": options,
        "backbone": backbone,
        "weights": weights,
        "image_size": image_size,
        "settings": settings,
        "recipe": recipe,
        "device": device,
        "nested": nested,
    }
    options, settings = moved_options(method, options or {}, settings or Settings())
    info = methods.find(method).info
    ranks.check_trainable(info)
    collection = data if isinstance(data, Collection) else open_data(data)
    split = _split(collection, info, protocol)
    live = info.fit == "gradient" and (place.type == "cuda" if finetune is None else finetune)
    if recipe is not None and method == "dfh" and split is not None:
        chosen = find_recipe(
            recipe,
            finetune=live,
            classes=len(collection.classes),
            several=_has_several(collection, split),
            bits=bits,
        )
        given = settings.outputs
        options, settings = apply_recipe(chosen, options, settings)
        if nested:  # the bits must be the outputs themselves
            settings = dataclasses.replace(settings, outputs=given)
        logger.info("%s", chosen)
    if nested and settings.outputs:
        raise UsageError("bits that are cut from more outputs are not nested; leave outputs at 0")
    # A method may draw weights of its own: from the seed, but not the numbers the head draws.
    torch.manual_seed(settings.seed + 1)
    classes, outputs = len(collection.classes), settings.outputs or bits
    learner = methods.create(method, bits=outputs, classes=classes, options=options)
    resolved = methods.resolved_options(learner)
    if nested:
        learner = nested_method(method, nested, bits=bits, classes=classes, options=options)
    if split is None and settings.validation > 0:
        raise unmeasurable(collection.name)
    folder = None if out is None else Path(out)
    given = copy.deepcopy(backbone) if isinstance(backbone, nn.Module) else backbone
    network = backbones.create(given, weights=weights, image_size=image_size)
    if settings.fixed_layers < 0:
        fixed = network.early if live else 0
        settings = dataclasses.replace(settings, fixed_layers=fixed)
        endings = [(n, dataclasses.replace(other, fixed_layers=fixed)) for n, other in endings]
    if live:
        network.fix(settings.fixed_layers)
    runtime = TorchRuntime(on_device(network, place), place, via_onnx=True)
    identity = {
        "method": method,
        "bits": bits,
        "options": resolved,
        "backbone": network.name,
        "image_size": network.preprocessing.size,
        "finetune": live,
        "settings": settings.to_json(),
        "data": collection.name,
        "split": split.checksum if split else None,
        # What the names above stand for: the pixels and the first weights.
        "images": collection.reader.fingerprint()[:16],
        "weights": runtime.checksum[:16],
    }
    if isinstance(learner, Nested):
        identity["nested"] = [part.bits for part in learner.parts]
    wanted = split.train if split else np.arange(len(collection))
    size = network.preprocessing.size
    choose = partial(
        choose_stream,
        stream,
        images=len(wanted),
        row_bytes=4 * network.features + (3 * size * size if live else 0),
        folder=None if overwrite else folder,
        possible=isinstance(learner, HashMethod) and bank is None,
    )
    if streamed := ranks.on_first(choose):
        identity[STREAM] = True
    begun = ranks.on_first(partial(begun_features, None if overwrite else folder))
    if begun:
        identity[FEATURES_BY] = begun
    if folder is not None:
        ranks.on_first(partial(check_resumable, folder, identity, overwrite=overwrite))
    check_settings(learner, network.features, bits, settings, live=live)
    for ending in endings:
        check_ending(learner, network.features, (bits, settings), ending)

    torch.manual_seed(settings.seed)
    with ranks.in_turn():
        rows = feature_rows(runtime, collection, wanted, on_disk=streamed, kind=begun)
    if rows.kind != runtime.kind:
        identity[FEATURES_BY] = rows.kind
    elif begun:
        logger.warning("this run began with features by %s and goes on with torch's", begun)
    seen = (rows.indices.tolist(), len(collection), identity["settings"], resolved)
    ranks.check_same("training images or settings", repr(seen).encode())
    if len(rows.indices) < 2:
        raise FisherhashError(
            f"only {len(rows.indices)} of {len(wanted)} training images can be read"
        )
    extracted = time.perf_counter()

    history: list[dict[str, Any]] = []
    every: list[Ending] = []
    if isinstance(learner, HashMethod):
        top = None if split is None else held_out_top(split)
        every = [Ending(learner, *one, top) for one in [(bits, settings), *endings]]
        history = train_rows(
            Endings(every), network, collection, rows, live, bank, place, folder, identity
        )
        head = every[0].head
    else:
        labels = torch.from_numpy(collection.labels[rows.indices]).float().to(place)
        head = learner.fit(torch.from_numpy(rows.values).to(place), labels, seed=settings.seed)
    seconds = {"features": extracted - began, "training": time.perf_counter() - extracted}
    hasher = TorchHasher(network, head, method, collection.classes, device=place, via_onnx=True)
    trained = Trained(
        hasher,
        learner,
        collection,
        split,
        history,
        rows.skipped,
        seconds,
        finetuned=live,
        features_by=rows.kind,
        step=every[0].step if every else None,
    )
    trained.others = [_other(trained, ending) for ending in every[1:]]
    if fine_bits and head.hamming:
        began = time.perf_counter()
        where: dict[str, Any] = {"cached": not live, "seed": settings.seed}
        add_second_code(hasher, collection, rows.indices, codes.check_bits(fine_bits), **where)
        if split is not None:
            trained.ranking = compare_rankings(hasher, collection, split, **where)
        seconds["second code"] = time.perf_counter() - began
    if measured and split is not None:
        logger.info("trained in %.1f s; measuring", seconds["training"])
        trained.evaluation = ranks.on_first(partial(trained.evaluate, bank=bank))
        agreement = partial(measure_agreement, hasher, collection, split, cached=not live)
        trained.agreement = ranks.on_first(agreement)
    if unseen and split is not None:
        logger.info("training again without some classes, to measure on these")
        parts = hold_out_classes(collection, split)
        again = fit(parts.seen, **asked, finetune=live, protocol=parts.split, stream=stream)
        there = dataclasses.replace(again, collection=parts.unseen)
        trained.unseen = ranks.on_first(there.evaluate)
    # After measuring, which may find more images that cannot be read.
    hasher.details = training_details(trained, identity)
    if folder is not None:
        ranks.on_first(partial(trained.save, folder))
    return trained


def check_settings(
    learner: HashMethod | methods.FeatureMethod,
    width: int,
    bits: int,
    settings: Settings,
    *,
    live: bool = False,
) -> None:
    """Refuse settings that a method has no use for.

    What one method has no use for may suit another, so a comparison goes on: it is not defined.

    Args:
        learner: the method.
        width: of the features.
        bits: length of the codes.
        settings: what to check.
        live: whether a network is trained.
    """
    name = learner.info.name
    if settings.classifier_weight and not live:
        raise UsageError(
            "classifier_weight is for a network that is trained; use --finetune, or leave it at 0"
        )
    if isinstance(learner, HashMethod) and settings.outputs:
        check_cut(name, learner.head(width), bits, settings)
    elif not isinstance(learner, HashMethod) and (settings.outputs or settings.step_weight):
        raise NotDefinedError(
            f"{name} is not trained by gradient; it takes neither outputs nor a class step"
        )


def unmeasurable(name: str) -> UsageError:
    """Return the error of data without labels that should be measured during training."""
    return UsageError(
        f"'{name}' has no labels, so a validation slice cannot be measured; leave validation at 0"
    )


def _hasher_of(function: Callable[P, Trained]) -> Callable[P, TorchHasher]:
    @functools.wraps(function)
    def train(*arguments: P.args, **options: P.kwargs) -> TorchHasher:
        options.setdefault("recipe", "best")
        options.setdefault("fine_bits", FINE_BITS)
        return function(*arguments, **options).hasher

    train.__name__ = train.__qualname__ = "train"
    return train


train = _hasher_of(fit)
"""Train a hasher: :func:`fit` with the best recipe and a second code by default."""


def moved_options(
    method: str, options: Mapping[str, Any], settings: Settings
) -> tuple[dict[str, Any], Settings]:
    """Turn options of earlier versions into the training settings that they are now.

    >>> moved_options("dfh", {"width": 64, "cut": "outputs"}, Settings())[1].cut
    'first'
    """
    found = methods.find(method)
    moved = found.moved if issubclass(found, HashMethod) else {}
    known = {one.name: one for one in options_of(Settings)}
    changes = {}
    for old, name in moved.items():
        if old in options:
            value = options[old]
            value = {"outputs": "first"}.get(value, value) if name == "cut" else value
            changes[name] = known[name].parse(value) if isinstance(value, str) else value
    kept = {key: value for key, value in options.items() if key not in moved}
    return kept, dataclasses.replace(settings, **changes)


def check_ending(
    learner: HashMethod | methods.FeatureMethod,
    width: int,
    training: tuple[int, Settings],
    ending: tuple[int, Settings],
) -> None:
    """Refuse an ending that a training cannot have.

    Args:
        learner: the method.
        width: of the features.
        training: the bits that a training is for, and how it trains.
        ending: the bits and settings of another hasher that it is to end in.
    """
    (bits, settings), (other_bits, other) = training, ending
    if other.of_training != settings.of_training or not isinstance(learner, HashMethod):
        raise UsageError(
            "another ending of a training may differ in its bits, its cut and its class step"
        )
    if other_bits != bits and not settings.outputs:
        raise UsageError(
            f"{bits} outputs cannot end as {other_bits} bits; set outputs, and the bits are cut"
        )
    if other.outputs:
        check_cut(learner.info.name, learner.head(width), other_bits, other)


def _other(trained: Trained, ending: Ending) -> Trained:
    """Return a training with another of its endings."""
    hasher = dataclasses.replace(trained.hasher, head=ending.head)
    # The last row of the history has what held-out images say about this ending.
    history = [*trained.history[:-1], *({**row, **ending.row} for row in trained.history[-1:])]
    return dataclasses.replace(trained, hasher=hasher, history=history, step=ending.step, others=[])


def train_rows(
    endings: Endings,
    network: Backbone,
    collection: Collection,
    rows: Rows,
    live: bool,
    bank: PixelBank | None,
    device: torch.device,
    folder: Path | None,
    identity: dict[str, Any],
) -> list[dict[str, Any]]:
    """Train the head on frozen features and, when fine-tuning, then the whole network."""
    learner, settings = endings.learner, endings.settings
    held = _held_out(collection, rows.indices, settings)
    numbers = [rows.indices[part] for part in (~held, held)]
    labels = [torch.from_numpy(collection.labels[some]).float().to(device) for some in numbers]
    features = [_placed_rows(rows.values[part], device) for part in (~held, held)]
    head = learner.head(network.features).to(device)
    images, held_out = (FrozenImages(f, own, head) for f, own in zip(features, labels, strict=True))
    head.start(images.sample()[0])
    learner.to(device)
    endings.begin(head)
    if live:
        ranks = current_ranks()
        if settings.head_epochs and not ranks.on_first(partial(is_unfinished, folder)):
            first = dataclasses.replace(settings, epochs=settings.head_epochs, validation=0.0)
            Loop(learner, images, first, title="training the head").run()
        pixels: list[Tensor | StreamedRows]
        with ranks.in_turn():
            if isinstance(rows.values, StoredRows):
                stored = pixel_rows(collection, rows.indices, network.preprocessing, on_disk=True)
                check_readable(np.setdiff1d(rows.indices, stored.indices), stored.skipped)
                pixels = [_placed_rows(stored.values[part], device) for part in (~held, held)]
            else:
                if bank is None:
                    bank = PixelBank(collection, rows.indices, network.preprocessing, device)
                pixels = [placed(bank.of(numbers[0]), device), bank.of(numbers[1])]
        images, held_out = (
            LiveImages(p, own, network, head) for p, own in zip(pixels, labels, strict=True)
        )
        # A bank of our own is not needed twice.
        del bank, pixels
    loop = Loop(
        learner,
        images,
        settings,
        finish=partial(endings.finish, images),
        validate=partial(endings.validate, held_out) if held.any() else None,
        folder=folder,
        identity=identity,
    )
    return loop.run()


def _placed_rows(values: NDArray | StoredRows, device: torch.device) -> Tensor | StreamedRows:
    """Rows on the device, or a stream of those that are on the disk."""
    if isinstance(values, StoredRows):
        return StreamedRows(values)
    return torch.from_numpy(values).to(device)


def _held_out(
    collection: Collection, numbers: NDArray[np.int64], settings: Settings
) -> NDArray[np.bool_]:
    """(n,) which training images are the validation slice."""
    cut = round(len(numbers) * settings.validation)
    if len(numbers) - cut < 2:
        raise UsageError(
            f"a validation share of {settings.validation:g} leaves {len(numbers) - cut} of "
            f"{counted(len(numbers), 'image')} to train on; lower it"
        )
    order = hash_order(collection.names, numbers.tolist(), settings.seed)
    return np.isin(numbers, order[:cut])


def _split(
    collection: Collection, info: methods.MethodInfo, protocol: str | Split | None
) -> Split | None:
    if collection.classes:
        split = protocol if isinstance(protocol, Split) else resolve(collection, protocol)
        if _has_several(collection, split) and not info.multilabel:
            raise NotDefinedError(f"{info.name} is not defined for images with several labels")
        return split
    if info.needs_labels:
        raise UsageError(
            f"'{collection.name}' has no labels and {info.name} learns from them. Put the images "
            "into one sub-folder per class, provide a CSV (path,label), or use --method itq"
        )
    return None


def _has_several(collection: Collection, split: Split) -> bool:
    """Whether a training image has several labels."""
    return bool(collection.labels[split.train].sum(1).max(initial=0) > 1)


def training_details(trained: Trained, identity: dict[str, Any]) -> dict[str, Any]:
    """How the hasher was made, for its config and its card."""
    split, info = trained.split, trained.method.info
    data: dict[str, Any] = {"name": trained.collection.name, "images": len(trained.collection)}
    if split is not None:
        known = split.to_json()
        data |= {k: known[k] for k in ("protocol", "checksum", "train", "query", "database")}
    data["skipped"] = len(trained.skipped)
    settings = {"finetune": identity["finetune"], **identity["settings"]}
    return {
        "reference": f"{info.title}, {info.venue} {info.year}, {info.url}",
        "data": data,
        "options": identity["options"],
        "settings": settings if trained.history else {"seed": identity["settings"]["seed"]},
        **({"nested": identity["nested"]} if "nested" in identity else {}),
        **({"ranking": trained.ranking} if trained.ranking else {}),
        "results": {f"seconds for {k}": round(v, 1) for k, v in trained.seconds.items()}
        | (trained.evaluation.summary() if trained.evaluation else {})
        | (trained.agreement.summary() if trained.agreement else {})
        | ({UNSEEN_MAP: f"{trained.unseen.map:.4f}"} if trained.unseen else {}),
    }
