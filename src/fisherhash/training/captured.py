"""A training step as a CUDA graph."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


class GraphStep:
    """A step captured once as a CUDA graph and replayed without launch overhead.

    The first steps run eagerly. They train as usual and warm up what a capture needs.

    Args:
        step: maps an index (b,) on the device to the terms of the loss; every tensor it reuses
            between calls must stay at the same address.
    """

    warm_up = 4

    def __init__(self, step: Callable[[Tensor], dict[str, Tensor]]) -> None:
        self.step = step
        self.calls = 0
        self.index: Tensor | None = None
        self.graph: torch.cuda.CUDAGraph | None = None
        self.terms: dict[str, Tensor] = {}
        self.stream = torch.cuda.Stream()

    def __call__(self, index: Tensor) -> dict[str, Tensor]:
        """Run one step; the next call overwrites the returned terms."""
        self.calls += 1
        if self.calls <= self.warm_up:
            self.stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self.stream):
                terms = self.step(index)
            torch.cuda.current_stream().wait_stream(self.stream)
            return terms
        if self.graph is None:
            self.index = index.clone()
            self.graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graph):
                self.terms = self.step(self.index)
        if self.index is not None:
            self.index.copy_(index)
        self.graph.replay()
        return self.terms
