"""Training rows (pixels, features), in memory or on disk, where they are read ahead of their use.

The rows on disk lie in one file of the cache, see :mod:`~fisherhash.data.row_cache`. Both kinds are
visited in the same random order, so a training computes the same from either. Threads read the rows
of the next steps while the current one is computed.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fisherhash.data.row_cache import StoredRows

AHEAD_BYTES = 1 << 28
"""Most bytes of the rows that are read ahead."""
AHEAD_STEPS = 16
READERS = 4
"""Threads that read, a step each."""


class ResidentRows:
    """Rows in memory.

    Args:
        values: (n, …) the rows, on any device.
    """

    streamed = False
    """Whether the rows are on disk."""

    def __init__(self, values: Tensor) -> None:
        self.values = values

    @property
    def on_device(self) -> bool:
        """Whether :meth:`at` needs no copy from the host, so that a CUDA graph can hold it."""
        return self.values.is_cuda

    def __len__(self) -> int:
        return len(self.values)

    def order(self, generator: torch.Generator) -> Tensor:
        """A random order (n,) of the rows."""
        return torch.randperm(len(self), generator=generator)

    def steps(self, order: Tensor, share: slice, device: torch.device) -> Iterator[Tensor]:
        """Yield each row of ``order`` (steps, b) on the device, its rows at hand for :meth:`at`.

        ``share`` selects the columns that this process needs.
        """
        yield from order.to(device)

    def at(self, index: Tensor, device: torch.device) -> Tensor:
        """The rows at ``index`` (b,); within :meth:`steps`, those of the current step."""
        return self.values[index.to(self.values.device)].to(device, non_blocking=True)

    def between(self, first: int, last: int, device: torch.device) -> Tensor:
        """The rows from one up to another."""
        return self.values[first:last].to(device)


class StreamedRows:
    """Rows on disk, with the methods of :class:`ResidentRows`.

    Args:
        stored: the rows.
        ahead_bytes: memory for the rows of the next steps; at least one step is read ahead.
    """

    streamed = True
    on_device = True
    """The rows of a step are copied to the same address every time, before the step."""

    def __init__(self, stored: StoredRows, *, ahead_bytes: int = AHEAD_BYTES) -> None:
        self.stored = stored
        self.ahead_bytes = ahead_bytes
        self._current: Tensor | None = None
        self._buffer: Tensor | None = None

    def __len__(self) -> int:
        return len(self.stored)

    def order(self, generator: torch.Generator) -> Tensor:
        """A random order (n,) of the rows, the same as in memory."""
        return torch.randperm(len(self), generator=generator)

    def steps(self, order: Tensor, share: slice, device: torch.device) -> Iterator[Tensor]:
        """Yield each row of ``order`` (steps, b) on the device, when its rows have been read."""
        wanted = order[:, share].numpy()
        step_bytes = max(1, wanted.shape[1] * self.stored.row_bytes)
        ahead = min(max(1, self.ahead_bytes // step_bytes), AHEAD_STEPS)
        with ThreadPoolExecutor(READERS) as readers:
            pin = device.type == "cuda"
            coming = (readers.submit(self._read, rows, pin=pin) for rows in wanted)
            read: deque[Future[Tensor]] = deque(itertools.islice(coming, ahead))
            try:
                for index in order.to(device):
                    self._put(read.popleft().result(), device)
                    read.extend(itertools.islice(coming, 1))
                    yield index
            finally:
                self._current = None
                readers.shutdown(cancel_futures=True)

    def _put(self, rows: Tensor, device: torch.device) -> None:
        """Make rows the current ones; on a GPU at one address in all epochs, for a CUDA graph."""
        if device.type == "cpu":
            self._current = rows
            return
        if self._buffer is None or self._buffer.shape != rows.shape:
            self._buffer = torch.empty_like(rows, device=device)
        self._current = self._buffer.copy_(rows, non_blocking=True)

    def at(self, index: Tensor, device: torch.device) -> Tensor:
        """The rows of the current step, or those at ``index`` (b,) outside of one."""
        if self._current is not None and len(self._current) == len(index):
            return self._current
        return self._read(index.cpu().numpy()).to(device)

    def between(self, first: int, last: int, device: torch.device) -> Tensor:
        """The rows from one up to another."""
        return self._read(np.arange(first, last)).to(device)

    def _read(self, numbers: NDArray[np.int64], *, pin: bool = False) -> Tensor:
        """The rows with some numbers (n,), read in the order of the file."""
        kind = torch.from_numpy(np.empty(0, dtype=self.stored.dtype)).dtype
        found = torch.empty(len(numbers), *self.stored.row_shape, dtype=kind, pin_memory=pin)
        rows, order = found.numpy(), np.argsort(numbers, kind="stable")
        self.stored.read(numbers[order], [rows[slot] for slot in order.tolist()])
        return found
