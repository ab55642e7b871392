"""Discrete graph hashing (Liu, Mu, Kumar and Chang, NIPS 2014)."""

from typing import Annotated

import torch
from torch import Tensor

from fisherhash.methods._options import PositiveInt
from fisherhash.methods.base import FeatureMethod, MethodInfo, register, sign
from fisherhash.methods.shallow._graphs import AnchorGraph
from fisherhash.model.heads import Head
from fisherhash.system.options import Range, Tuned


@register
class DGH(FeatureMethod):
    """Codes of the training images found without relaxing them, on an anchor graph.

    max tr(B^T A B) + rho tr(B^T Y) over B in {-1, 1}^(N x K) and real Y with 1^T Y = 0 and
    Y^T Y = N I, by turns. Y keeps the bits balanced and uncorrelated:

    * **B** <- sgn(2 A B + rho Y), repeated until nothing changes. The first term is convex, so the
      objective never falls.
    * **Y** = sqrt(N) P Q^T, from the singular value decomposition of the centred B = P S Q^T.

    A new image gets sgn(W^T z(x)), W = L^-1 Z^T B: the mean code of its anchors.

    What differs from the paper: B starts at the signs of the graph's eigenvectors (DGH-I in the
    paper); where B's columns are dependent, the missing directions of Y are drawn at random. No
    code of the authors could be had to compare with; the anchor graph is that of ``agh``.

    Args:
        bits: K, fewer than the anchors.
        classes: Not used.
        anchors: m.
        nearest: Anchors that count for an image.
        width: Width of the kernel, in units of the median distance to the nearest anchors.
        balance: rho, in units of the mean degree of the graph.
        turns: Turns of B and Y.
    """

    info = MethodInfo(
        name="dgh",
        title="Discrete Graph Hashing",
        venue="NIPS",
        year=2014,
        url="https://papers.nips.cc/paper/5323-discrete-graph-hashing",
        supervision="none",
    )

    anchors: PositiveInt = 300
    nearest: Annotated[int, Range(above=0), Tuned(2, 20, "log")] = 5
    width: Annotated[float, Range(above=0), Tuned(0.25, 4.0, "log")] = 1.0
    balance: Annotated[float, Range(least=0), Tuned(0.01, 3.0, "log")] = 0.3
    turns: PositiveInt = 10

    def solve(self, features: Tensor, labels: Tensor | None, *, seed: int) -> Head:
        """Return a head fitted on features (N, d); labels are not used."""
        generator = torch.Generator().manual_seed(seed)
        graph = AnchorGraph(
            features,
            anchors=self.anchors,
            nearest=self.nearest,
            width=self.width,
            name="dgh",
            bits=self.bits,
            generator=generator,
        )
        codes = sign(graph.apply(graph.eigenvectors(self.bits)[0]))
        for _ in range(self.turns):
            balanced = uncorrelated(codes, generator)
            before = codes
            codes = self.code_step(graph, codes, balanced)
            if torch.equal(before, codes):
                break
        return graph.head(graph.collect(codes) / graph.sizes[:, None])

    def code_step(self, graph: AnchorGraph, codes: Tensor, balanced: Tensor) -> Tensor:
        """Return the codes (N, K) where B <- sgn(2 A B + rho Y) stops."""
        for _ in range(20):
            # A zero keeps the bit, so that the objective cannot oscillate.
            pull = 2.0 * graph.smooth(codes) + self.balance * balanced
            after = torch.where(pull == 0, codes, sign(pull))
            if torch.equal(after, codes):
                break
            codes = after
        return codes


def uncorrelated(codes: Tensor, generator: torch.Generator) -> Tensor:
    """Return Y (N, K) nearest to codes (N, K) with 1^T Y = 0 and Y^T Y = N I."""
    count, bits = codes.shape
    centred = codes - codes.mean(0)
    values, right = torch.linalg.eigh(centred.T @ centred)
    independent = values > 1e-8 * count
    left = centred @ right[:, independent] / values[independent].sqrt()
    missing = bits - left.shape[1]
    if missing:
        drawn = torch.randn(count, missing, generator=generator, dtype=torch.float64).to(codes)
        basis = torch.cat([torch.ones(count, 1).to(codes) / count**0.5, left], dim=1)
        for _ in range(2):  # twice: one pass leaves rounding errors
            drawn = drawn - basis @ (basis.T @ drawn)
        left = torch.cat([left, torch.linalg.qr(drawn).Q], dim=1)
        right = torch.cat([right[:, independent], right[:, ~independent]], dim=1)
    return count**0.5 * left @ right.T
