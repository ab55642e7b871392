"""Hashing with graphs (Liu, Wang, Kumar and Chang, ICML 2011)."""

from typing import Annotated, Literal

import torch
from torch import Tensor

from fisherhash.methods._options import PositiveInt
from fisherhash.methods.base import FeatureMethod, MethodInfo, register
from fisherhash.methods.shallow._graphs import AnchorGraph
from fisherhash.model.heads import Head
from fisherhash.system.options import Range, Tuned


@register
class AGH(FeatureMethod):
    """The signs of the smoothest functions on a graph of the images.

    The graph joins images that share anchors: A = Z L^-1 Z^T, with Z the similarities to the
    nearest of m anchors. Its eigenvectors Y = Z W, the constant one left out, are the bits.

    With ``layers="two"`` half as many eigenvectors give two bits each. The second bit cuts both
    sides of the first again: sgn(y - b+) for y > 0, sgn(b- - y) else. Among the thresholds that
    balance the second bit, b+ and b- make it the smoothest on the graph; that is a quadratic
    problem in one unknown.

    What differs from the paper: the width of the kernel follows the median distance to the nearest
    anchors; an odd number of bits gives one eigenvector one bit only.

    Args:
        bits: K, fewer than the anchors.
        classes: Not used.
        anchors: m, centres of k-means.
        nearest: Anchors that count for an image; the paper's s.
        width: Width of the kernel, in units of the median distance to the nearest anchors.
        layers: Bits per eigenvector.
    """

    info = MethodInfo(
        name="agh",
        title="Hashing with Graphs",
        venue="ICML",
        year=2011,
        url="https://icml.cc/2011/papers/6_icmlpaper.pdf",
        supervision="none",
    )

    anchors: PositiveInt = 300
    nearest: Annotated[int, Range(above=0), Tuned(2, 20, "log")] = 5
    width: Annotated[float, Range(above=0), Tuned(0.25, 4.0, "log")] = 1.0
    layers: Annotated[Literal["one", "two"], Tuned(choices=("one", "two"))] = "one"

    def solve(self, features: Tensor, labels: Tensor | None, *, seed: int) -> Head:
        """Return a head fitted on features (N, d); labels are not used."""
        graph = AnchorGraph(
            features,
            anchors=self.anchors,
            nearest=self.nearest,
            width=self.width,
            name="agh",
            bits=self.bits,
            generator=torch.Generator().manual_seed(seed),
        )
        folds = self.bits // 2 if self.layers == "two" else 0
        weight, _ = graph.eigenvectors(self.bits - folds)
        if not folds:
            return graph.head(weight)
        outputs = graph.apply(weight[:, :folds])
        cuts = [second_cut(graph, outputs[:, k]) for k in range(folds)]
        high, low = torch.tensor(cuts, dtype=torch.float64).T
        return graph.head(weight, high=high, low=low)


def second_cut(graph: AnchorGraph, outputs: Tensor) -> tuple[float, float]:
    """Return the thresholds b+ and b- that cut outputs (N,) a second time.

    With e+ and e- the indicators of the two sides and f = |y| - b+ e+ + b- e-, they minimise
    f^T (I - A) f subject to 1^T f = 0.
    """
    positive = (outputs > 0).double()
    sides = torch.stack([-positive, 1.0 - positive, outputs.abs().double()], dim=1)
    form = sides.T @ (sides - graph.smooth(sides))
    counts, total = -sides[:, 0].sum(), sides[:, 2].sum()
    others = sides[:, 1].sum()
    if counts == 0 or others == 0:
        return 0.0, 0.0
    # b- = (n+ b+ - total) / n-: one unknown is left, with f = constant + b+ * slope.
    constant = torch.stack([torch.zeros(()).to(form), -total / others, torch.ones(()).to(form)])
    slope = torch.stack([torch.ones(()).to(form), counts / others, torch.zeros(()).to(form)])
    curvature = slope @ form @ slope
    high = 0.0 if curvature <= 0 else float(-(slope @ form @ constant) / curvature)
    return high, float((counts * high - total) / others)
