"""Plots of evaluations: curves and distance histograms as PNG or SVG files."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np

from fisherhash.errors import UsageError, missing_extra
from fisherhash.evaluation.inputs import check_choice
from fisherhash.evaluation.results import Curve, Evaluation

Kind = Literal["pr", "pr-radius", "precision", "recall", "distances"]

_TITLES = {
    "pr": ("recall", "precision"),
    "pr-radius": ("recall within a Hamming radius", "precision within a Hamming radius"),
    "precision": ("N", "P@N"),
    "recall": ("N", "R@N"),
    "distances": ("Hamming distance", "share of the pairs"),
}


def plot(
    evaluations: Evaluation | Mapping[str, Evaluation],
    path: str | os.PathLike[str],
    *,
    kind: Kind = "pr",
    title: str | None = None,
) -> Path:
    """Draw one or several evaluations and write the plot to a file.

    Args:
        evaluations: One evaluation, or several by their names in the legend.
        path: The file to write; its suffix, ``.png`` or ``.svg``, decides the format.
        kind: ``"pr"`` (precision over recall by rank), ``"pr-radius"`` (by Hamming radius),
            ``"precision"`` (P@N), ``"recall"`` (R@N), or ``"distances"`` (histograms of similar
            and dissimilar pairs).
        title: Text above the plot.

    Returns:
        The path written.
    """
    target = Path(path)
    if target.suffix.lower() not in (".png", ".svg"):
        raise UsageError(f"a plot is written as .png or .svg, got '{target.name}'")
    check_choice("plot", kind, get_args(Kind))
    named = {"": evaluations} if isinstance(evaluations, Evaluation) else dict(evaluations)
    if not named:
        raise UsageError("there is no evaluation to plot")
    for name, evaluation in named.items():
        if kind in ("pr-radius", "distances") and evaluation.distances is None:
            which = f"'{name}'" if name else "this evaluation"
            raise UsageError(f"plot '{kind}' needs Hamming distances; {which} has none")
    try:
        import matplotlib
        from matplotlib.figure import Figure
    except ImportError:
        raise missing_extra("matplotlib", "plots", "drawing a plot") from None
    # a fixed salt and no date, so that the same evaluation always writes the same file
    with matplotlib.rc_context({"svg.hashsalt": "fisherhash"}):
        figure = Figure(figsize=(6, 4), layout="constrained")
        axes = figure.add_subplot()
        for number, (name, evaluation) in enumerate(named.items()):
            if kind == "distances":
                _draw_distances(axes, name, evaluation, f"C{number}")
            else:
                _draw_curve(axes, name, evaluation, kind)
        across, up = _TITLES[kind]
        axes.set(xlabel=across, ylabel=up, title=title or "")
        axes.set_ylim(bottom=0)
        if kind in ("precision", "recall"):
            axes.set_xscale("log")
        axes.grid(alpha=0.3)
        if kind == "distances" or any(named):
            axes.legend()
        target.parent.mkdir(parents=True, exist_ok=True)
        metadata = {"Date": None} if target.suffix.lower() == ".svg" else None
        figure.savefig(target, dpi=150, metadata=metadata)
    return target


def _draw_curve(axes: Any, name: str, evaluation: Evaluation, kind: str) -> None:
    radius = evaluation.pr_by_radius
    curve: Curve = radius if kind == "pr-radius" and radius else evaluation.pr_by_rank
    across = curve.at if kind in ("precision", "recall") else curve.recall
    up = curve.recall if kind == "recall" else curve.precision
    marker = "o" if kind == "pr-radius" else None
    axes.plot(across, up, label=name, marker=marker, markersize=3)


def _draw_distances(axes: Any, name: str, evaluation: Evaluation, colour: str) -> None:
    histogram = evaluation.distances
    if histogram is None:
        return
    for kind, style in (("similar", "-"), ("dissimilar", "--")):
        counts = np.array(getattr(histogram, kind), dtype=np.float64)
        label = f"{name}: {kind}" if name else kind
        share = counts / max(counts.sum(), 1)
        axes.step(histogram.distance, share, style, where="mid", color=colour, label=label)
