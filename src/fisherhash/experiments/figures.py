"""The paper's figures as SVG and PNG, drawn from results and from one small training."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fisherhash.errors import counted, missing_extra
from fisherhash.experiments.illustration import center_moves, illustration_points
from fisherhash.experiments.specs import CURVE_PART, MARGIN_PART, MODULE_PARTS, Part
from fisherhash.system import storage

if TYPE_CHECKING:
    from fisherhash.experiments.benches import Bench
    from fisherhash.experiments.runner import Runner

POINTS_FILE, MOVES_FILE = "centre-learning.json", "centre-moves.json"
COLOURS = ("#c0392b", "#1e8449")
TOP_RANK = 5000
MARGINS = (0.0, 0.5, 1.0, 1.5, 2.0)


def draw_all(results: Mapping[str, Any], benches: Sequence[Bench], runner: Runner) -> list[Path]:
    """Draw every figure there are results for; returns the SVG files in the paper's order.

    Args:
        results: the content of the figures' table.
        benches: one with CIFAR-10 trains the illustration of centre learning.
        runner: opens the bench; the files go into ``figures`` in its folder.
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
    if points := _points(benches, folder, runner):
        drawings.append(("centre-learning", (10, 3.7), partial(draw_centres, found=points)))
    if moves := _moves(benches, folder, runner):
        size = (9.2, 3.2 * len(moves))
        drawings.append(("centre-moves", size, partial(draw_moves, found=moves)))
    if modules:
        size = (4.6 * 2, 3.6 * len(modules))
        drawings.append(("modules", size, partial(draw_modules, parts=modules)))
    drawings += [("margin", (5, 3.6), partial(draw_margins, part=part)) for part in margins]
    drawings += [("pr-curves", (7.5, 4.2), partial(draw_curves, part=part)) for part in curves]
    return [save_figure(folder / name, size, draw) for name, size, draw in drawings]


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
        for (name, step), colour in zip(one["steps"].items(), COLOURS, strict=False):
            epochs = np.arange(1, len(step["flips"]) + 1)
            left.plot(epochs, step["flips"], "o-", ms=4, color=colour)
            right.plot(epochs, step["center_distance"], color=colour, label=f"{name}, mean")
            least = step["center_distance_min"]
            right.plot(epochs, least, "--", color=colour, label=f"{name}, least")
        title = f"{data}, {one['bits']} bits, {one['classes']} classes"
        left.set_yscale("symlog", linthresh=1)
        right.yaxis.get_major_locator().set_params(integer=True)
        for axes, words in ((left, "bits of centres flipped"), (right, "distance of two centres")):
            axes.xaxis.get_major_locator().set_params(integer=True)
            _finish(axes, xlabel="epoch", ylabel=words, title=title)
            axes.set_ylim(bottom=0)
    lines, names = grid[0, 1].get_legend_handles_labels()
    figure.legend(lines, names, loc="outside lower center", ncols=len(names))


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


def _points(benches: Sequence[Bench], folder: Path, runner: Runner) -> dict[str, Any] | None:
    """The illustration's points, trained once; None without CIFAR-10 or time."""
    path = folder / POINTS_FILE
    if path.is_file():
        return storage.read_json(path)
    bench = next((bench for bench in benches if bench.data == "cifar10"), None)
    if bench is None or runner.late:
        return None
    found = illustration_points(runner.stage(bench))
    storage.write_file(path, storage.dump_json(found))
    return found


def _moves(benches: Sequence[Bench], folder: Path, runner: Runner) -> dict[str, Any]:
    """How centres move, by data set, trained once; without those there is no time for."""
    path = folder / MOVES_FILE
    found = storage.read_json(path) if path.is_file() else {}
    for bench in benches:
        if bench.name not in found and not runner.late:
            found[bench.name] = center_moves(runner.stage(bench))
            storage.write_file(path, storage.dump_json(found))
    return found


def _matching(parts: Sequence[Mapping[str, Any]], spec: Part) -> list[Mapping[str, Any]]:
    """The parts of the results that belong to a part of the specification and were measured."""
    data = {source.data for source in spec.sources}
    return [
        part
        for part in parts
        if any("evaluation" in run for run in part["runs"])
        and part["data"] in data
        and {row["name"] for row in part["rows"] if not row.get("real_queries_of")}
        <= {row.name for row in spec.rows}
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
