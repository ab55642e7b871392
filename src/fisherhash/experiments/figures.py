"""The paper's figures as SVG and PNG, drawn from results and from two small trainings."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from fisherhash.data.splits import hash_order
from fisherhash.errors import FisherhashError, counted, missing_extra
from fisherhash.experiments.cells import OpenSetup, Setup
from fisherhash.experiments.runner import Runner
from fisherhash.experiments.specs import CURVE_PART, MARGIN_PART, MODULE_PARTS, PRINTED, Part
from fisherhash.methods.dfh import DFH
from fisherhash.system import storage
from fisherhash.training.images import FrozenImages
from fisherhash.training.loop import Loop
from fisherhash.training.settings import Settings

COLOURS = ("#c0392b", "#1e8449")
TOP_RANK = 5000
MARGINS = (0.0, 0.5, 1.0, 1.5, 2.0)
# Of the illustration of centre learning: two classes of CIFAR-10, and the loss of each panel.
CLASSES = (3, 5)
IMAGES = 100
PANELS = {"input": "", "intra": "intra", "intra + inter": "intra,inter"}
SEEDS = 100
MOVE_BITS = 48
MOVES = ("flips", "center_distance", "center_distance_min")
"""What DFH logs in every epoch: bits of centres flipped, the centres' mean and least distance."""


def draw_all(results: Mapping[str, Any], setups: Sequence[Setup], runner: Runner) -> list[Path]:
    """Draw every figure there are results for; returns the SVG files in the paper's order.

    Args:
        results: the content of the figures' table.
        setups: one with CIFAR-10 trains the illustration of centre learning.
        runner: opens the setup; the files go into ``figures`` in its folder.
    """
    folder = runner.folder / "figures"
    modules, margins, curves = (
        [part for spec in specs for part in _matching(results["parts"], spec)]
        for specs in (MODULE_PARTS, [MARGIN_PART], [CURVE_PART])
    )
    drawings: list[tuple[str, tuple[float, float], Callable[[Any], None]]] = [
        ("separable", (8, 3.6), draw_separable),
        ("margin-loss", (5, 3.6), draw_margin_loss),
    ]
    cifar10 = [setup for setup in setups if setup.data == "cifar10"][:1]
    learned = _trained(folder / "centre-learning.json", cifar10, runner, illustration_points)
    for found in learned.values():
        drawings.append(("centre-learning", (10, 3.7), partial(draw_centres, found=found)))
    if moves := _trained(folder / "centre-moves.json", setups, runner, center_moves):
        size = (9.2, 3.2 * len(moves))
        drawings.append(("centre-moves", size, partial(draw_moves, found=moves)))
    if modules:
        size = (4.6 * 2, 3.6 * len(modules))
        drawings.append(("modules", size, partial(draw_modules, parts=modules)))
    drawings += [("margin", (5, 3.6), partial(draw_margins, part=part)) for part in margins]
    drawings += [("pr-curves", (7.5, 4.2), partial(draw_curves, part=part)) for part in curves]
    return [save_figure(folder / name, size, draw) for name, size, draw in drawings]


def _trained(
    path: Path,
    setups: Sequence[Setup],
    runner: Runner,
    train: Callable[[OpenSetup], dict[str, Any]],
) -> dict[str, Any]:
    """Return what a small training shows, by data set, trained once; none there is no time for."""
    found = storage.read_json(path) if path.is_file() else {}
    for setup in setups:
        if setup.name not in found and not runner.late:
            found[setup.name] = train(runner.open(setup))
            storage.write_file(path, storage.dump_json(found))
    return found


def save_figure(path: Path, size: tuple[float, float], draw: Callable[[Any], None]) -> Path:
    """Draw one figure and write it as .png and .svg; returns the latter."""
    try:
        import matplotlib
        from matplotlib.figure import Figure
    except ImportError:
        raise missing_extra("matplotlib", "plots", "drawing the figures") from None
    # A fixed salt and no date, so that the same results produce the same file.
    look: Any = {"svg.hashsalt": "fisherhash", "svg.fonttype": "none", "font.size": 9}
    with matplotlib.rc_context(look):
        figure = Figure(figsize=size, layout="constrained")
        draw(figure)
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path.with_suffix(".png"), dpi=150)
        figure.savefig(path.with_suffix(".svg"), metadata={"Date": None})
    return path.with_suffix(".svg")


def draw_separable(figure: Any) -> None:
    """Draw two classes that a line separates, and that share their codes after quantisation."""
    rng = np.random.default_rng(0)
    along = rng.uniform(-1.7, 1.7, (2, 60))
    apart = 0.45 + np.abs(rng.normal(0, 0.12, (2, 60)))
    classes = [
        np.stack([along[k] + side * apart[k] / 2, along[k] - side * apart[k] / 2], axis=1)
        for k, side in enumerate((-1.0, 1.0))
    ]
    before, after = figure.subplots(1, 2)
    counts = []
    for k, points in enumerate(classes):
        before.scatter(*points.T, s=14, color=COLOURS[k], label=f"class {k + 1}")
        codes = np.where(points > 0, 1, -1)
        counts.append(Counter(map(tuple, codes.tolist())))
        spread = rng.normal(0, 0.15, codes.shape)  # else all points of a code would be one dot
        after.scatter(*(codes + spread).T, s=14, color=COLOURS[k])
    before.plot([-2.1, 2.1], [-2.1, 2.1], "k--", lw=1)
    before.set_title("continuous: one line separates the classes")
    before.legend(loc="upper left")
    for x, y in product((-1, 1), repeat=2):
        words = f"[{x}, {y}]: {counts[0][x, y]} and {counts[1][x, y]}"
        after.text(x, y + 0.62, words, ha="center")
    after.set_title("quantised: the same codes hold both classes")
    for axes in (before, after):
        _quadrants(axes, 2.1)


def draw_margin_loss(figure: Any) -> None:
    """Draw L^S and L^D over the dissimilarity, for growing margins."""
    axes = figure.subplots()
    across = np.linspace(-6, 6, 241)
    for number, margin in enumerate(MARGINS):
        shade = 0.3 + 0.7 * number / (len(MARGINS) - 1)
        same, other = np.logaddexp(0, margin + across), np.logaddexp(0, margin - across)
        axes.plot(across, same, color=COLOURS[1], alpha=shade, label=f"m = {margin:g}")
        axes.plot(across, other, color=COLOURS[0], alpha=shade, ls="--")
    axes.text(4.6, 2.6, "same class", color=COLOURS[1], ha="center")
    axes.text(-4.6, 2.6, "different classes", color=COLOURS[0], ha="center")
    _finish(axes, xlabel="dissimilarity D", ylabel="loss", ylim=(0, 8))
    axes.legend(loc="upper center", title="margin, light to dark")


def draw_centres(figure: Any, found: Mapping[str, Any]) -> None:
    """Draw outputs of a 2-bit head: untrained, with L_intra, with L_intra and L_inter."""
    labels = np.array(found["labels"])
    for number, (axes, name) in enumerate(zip(figure.subplots(1, 3), found["panels"], strict=True)):
        points = np.array(found["panels"][name])
        for k, title in enumerate(found["classes"]):
            axes.scatter(*points[labels == k].T, s=12, color=COLOURS[k], alpha=0.7, label=title)
        _quadrants(axes, max(2.1, float(np.abs(points).max()) * 1.05))
        axes.set_title(f"({'abc'[number]}) {name}")
        axes.set_xlabel(_codes_of(points, labels))
        if number == 0:
            axes.legend(loc="upper left")


def draw_moves(figure: Any, found: Mapping[str, Mapping[str, Any]]) -> None:
    """Draw bits of centres flipped and the centres' distances by epoch, one row per data set."""
    grid = figure.subplots(len(found), 2, squeeze=False)
    for (data, one), (left, right) in zip(found.items(), grid, strict=True):
        epochs = np.arange(1, len(one["flips"]) + 1)
        left.plot(epochs, one["flips"], "o-", ms=4)
        left.set_yscale("symlog", linthresh=1)
        right.plot(epochs, one["center_distance"], label="mean")
        right.plot(epochs, one["center_distance_min"], "--", label="least")
        right.legend()
        title = f"{data}, {one['bits']} bits, {one['classes']} classes"
        for axes, words in ((left, "bits of centres flipped"), (right, "distance of two centres")):
            axes.xaxis.get_major_locator().set_params(integer=True)
            _finish(axes, xlabel="epoch", ylabel=words, title=title)
            axes.set_ylim(bottom=0)


def _codes_of(points: np.ndarray, labels: np.ndarray) -> str:
    """How far apart the classes' most common codes are, and how many bits agree with them."""
    common, pure = [], []
    for k in (0, 1):
        own = points[labels == k] > 0
        codes, counts = np.unique(own, axis=0, return_counts=True)
        common.append(codes[counts.argmax()])
        pure.append(np.mean(own == common[k]))
    bits = int((common[0] != common[1]).sum())
    share = f"{100 * np.mean(pure):.1f} % of all bits agree with them"
    return f"most common codes {counted(bits, 'bit')} apart\n{share}"


def draw_modules(figure: Any, parts: Sequence[Mapping[str, Any]]) -> None:
    """Draw precision and recall at the top 5,000 over the number of bits, per module."""
    grid = figure.subplots(len(parts), 2, squeeze=False)
    for (part, word), axes in zip(product(parts, ("precision", "recall")), grid.flat, strict=True):
        for number, name in enumerate(_names(part)):
            values = [_mean(part, name, bits, f"{word}_at", ranked=True) for bits in part["bits"]]
            style = "-" if "+" in name else "--"
            axes.plot(part["bits"], values, f"o{style}", ms=4, color=f"C{number}", label=name)
        words = f"{word} at the top {_ranks(part):,}"
        _finish(axes, xlabel="bits", ylabel=words, xticks=part["bits"], title=part["title"])
    lines, names = grid[0, 0].get_legend_handles_labels()
    figure.legend(lines, names, loc="outside lower center", ncols=len(names))


def draw_margins(figure: Any, part: Mapping[str, Any]) -> None:
    """Draw mAP over the margin."""
    axes = figure.subplots()
    margins = [float(name.split("=")[1]) for name in _names(part)]
    for bits in part["bits"]:
        values = [_mean(part, name, bits, "map") for name in _names(part)]
        axes.plot(margins, values, "o-", ms=4, label=f"{bits} bits")
    _finish(axes, xlabel="margin m", ylabel="mAP", title=part["title"])
    axes.legend()


def draw_curves(figure: Any, part: Mapping[str, Any]) -> None:
    """Draw precision over recall of every method at one code length, mean over the seeds."""
    axes = figure.subplots()
    bits = part["bits"][0]
    for number, entry in enumerate(part["rows"]):
        curves = [one["pr_by_rank"] for one in _measured(part, entry["name"], bits)]
        if not curves:
            continue
        # Runs of different versions may have different ranks.
        ranks = np.unique(np.concatenate([curve["at"] for curve in curves]))
        recall, precision = (
            np.mean([np.interp(ranks, curve["at"], curve[name]) for curve in curves], axis=0)
            for name in ("recall", "precision")
        )
        width = 2.2 if entry["method"] == "dfh" else 1.2
        style = ("-", "--", ":")[number // 10 % 3]  # there are ten colours
        axes.plot(recall, precision, style, color=f"C{number}", lw=width, label=entry["name"])
    title = f"{part['title']}, {bits} bits"
    _finish(axes, xlabel="recall", ylabel="precision", ylim=(0, 1), xlim=(0, 1), title=title)
    figure.legend(loc="outside right center")


def _finish(axes: Any, **properties: Any) -> None:
    axes.set(**properties)
    axes.grid(alpha=0.3)


def _quadrants(axes: Any, reach: float) -> None:
    axes.axhline(0, color="black", lw=1)
    axes.axvline(0, color="black", lw=1)
    axes.set(xlim=(-reach, reach), ylim=(-reach, reach), aspect="equal")


def _matching(parts: Sequence[Mapping[str, Any]], spec: Part) -> list[Mapping[str, Any]]:
    """The parts of the results that belong to a part of the specification and were measured."""
    data = {source.data for source in spec.sources}
    return [
        part
        for part in parts
        if any("evaluation" in run for run in part["runs"])
        and part["data"] in data
        and {row["name"] for row in part["rows"]} <= {row.name for row in spec.rows}
        and set(part["bits"]) <= set(spec.bits)
    ]


def _names(part: Mapping[str, Any]) -> list[str]:
    return [row["name"] for row in part["rows"]]


def _measured(part: Mapping[str, Any], name: str, bits: int) -> list[Mapping[str, Any]]:
    runs = [run for run in part["runs"] if run["row"] == name and run["bits"] == bits]
    return [run["evaluation"] for run in runs if "evaluation" in run]


def _ranks(part: Mapping[str, Any]) -> int:
    """5,000, or the largest measured rank where the database is smaller."""
    measured = [run["evaluation"] for run in part["runs"] if "evaluation" in run]
    ranks = [int(at) for one in measured for at in one["precision_at"]]
    return max((at for at in ranks if at <= TOP_RANK), default=TOP_RANK)


def _mean(
    part: Mapping[str, Any], name: str, bits: int, key: str, *, ranked: bool = False
) -> float:
    """A metric's mean over the seeds; NaN, which is not drawn, where nothing ran."""
    values = [one[key] for one in _measured(part, name, bits)]
    if ranked:
        values = [value[str(_ranks(part))] for value in values]
    return statistics.mean(values) if values else math.nan


def illustration_points(opened: OpenSetup) -> dict[str, Any]:
    """Compute outputs (200, 2) of a 2-bit head: untrained, with L_intra, and with L_inter added.

    The head starts at random, at unit scale over all training images. As in the paper's figure,
    the two classes start in neighbouring quadrants: the first seed that does so is used.
    """
    collection, rows = opened.collection, opened.features(opened.split.train)
    everything = torch.from_numpy(rows.values).to(opened.device)
    where = {int(number): row for row, number in enumerate(rows.indices)}
    drawn: list[int] = []
    for column in CLASSES:
        own = rows.indices[collection.labels[rows.indices, column] > 0]
        drawn += hash_order(collection.names, own, 0)[:IMAGES]
    numbers = np.array(sorted(drawn), dtype=np.int64)
    features = everything[[where[int(number)] for number in numbers]]
    labels = torch.from_numpy(collection.labels[numbers][:, list(CLASSES)]).float()
    labels = labels.to(opened.device)
    kinds = labels.argmax(dim=1).cpu().numpy()
    settings = Settings(epochs=30, batch_size=50, learning_rate=0.003)

    def outputs(parts: str, seed: int) -> NDArray[np.float32]:
        """Outputs of a head, trained with some parts of the loss, or untrained without any."""
        torch.manual_seed(seed)
        head = DFH(bits=2, classes=len(CLASSES)).head(everything.shape[1]).to(opened.device)
        head.start(everything)
        if parts:
            method = DFH(bits=2, classes=len(CLASSES), parts=parts).to(opened.device)
            images = FrozenImages(features, labels, head)
            Loop(method, images, dataclasses.replace(settings, seed=seed)).run()
        with torch.no_grad():
            return head.eval()(features).cpu().numpy()

    for seed in range(SEEDS):
        start = outputs("", seed)
        first, second = (start[kinds == kind].mean(axis=0) > 0 for kind in (0, 1))
        if int((first != second).sum()) == 1:
            break
    else:
        raise FisherhashError("no seed puts the two classes into neighbouring quadrants")
    return {
        "classes": [collection.classes[column] for column in CLASSES],
        "labels": kinds.tolist(),
        "seed": seed,
        "panels": {name: outputs(parts, seed).round(4).tolist() for name, parts in PANELS.items()},
    }


def center_moves(opened: OpenSetup) -> dict[str, Any]:
    """Train DFH with the printed centre step on frozen features; returns ``MOVES`` by epoch."""
    rows, settings = opened.features(opened.split.train), Settings(epochs=20)
    features = torch.from_numpy(rows.values).to(opened.device)
    labels = torch.from_numpy(opened.collection.labels[rows.indices]).float().to(opened.device)
    torch.manual_seed(settings.seed)
    method = DFH(bits=MOVE_BITS, classes=labels.shape[1], **PRINTED).to(opened.device)
    head = method.head(features.shape[1]).to(opened.device)
    head.start(features)
    history = Loop(method, FrozenImages(features, labels, head), settings).run()
    found = {key: [row[key] for row in history] for key in MOVES}
    return {"bits": MOVE_BITS, "classes": labels.shape[1], **found}
