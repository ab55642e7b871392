"""Training rows (pixels, features) that stay on disk, and are read a little ahead of their use.

The rows of a training set lie in one file of the cache, see :mod:`~fisherhash.data.row_cache`. An
epoch visits them in an order that is shuffled by blocks: the order of the blocks is random, and the
rows of as many blocks as memory holds, a *window*, are mixed. A disk reads whole blocks much faster
than single rows. While one window is used, threads read the next; the first is read in growing
pieces. The order depends on the seed only, so an interrupted training continues with the same
order; a training set that fits into one window has the order that it has in memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fisherhash.data.row_cache import StoredRows

BLOCK_BYTES = 1 << 20
"""Bytes that are read from one place."""
WINDOW_BYTES = 1 << 28
"""Bytes of the rows that are mixed; twice as many are in memory."""
READERS = 4
"""Threads that read."""


class TrainingRows(Protocol):
    """The rows of a training set, in memory or on disk."""

    @property
    def streamed(self) -> bool:
        """Whether the rows are on disk."""
        ...

    @property
    def on_device(self) -> bool:
        """Whether :meth:`at` needs no copy from the host, so that a CUDA graph can hold it."""
        ...

    def __len__(self) -> int: ...

    def order(self, generator: torch.Generator) -> Tensor:
        """A random order (n,) of the rows."""
        ...

    def steps(self, order: Tensor, share: slice, device: torch.device) -> Iterator[Tensor]:
        """Yield each row of ``order`` (steps, b) on the device, its rows at hand for :meth:`at`.

        ``share`` selects the b columns that this process needs.
        """
        ...

    def at(self, index: Tensor, device: torch.device) -> Tensor:
        """The rows at ``index`` (b,); within :meth:`steps`, those of the current step."""
        ...

    def between(self, first: int, last: int, device: torch.device) -> Tensor:
        """The rows from one up to another."""
        ...


class ResidentRows:
    """Rows in memory.

    Args:
        values: (n, …) the rows, on any device.
    """

    streamed = False

    def __init__(self, values: Tensor) -> None:
        self.values = values

    @property
    def on_device(self) -> bool:
        """Whether the rows are on a GPU."""
        return self.values.is_cuda

    def __len__(self) -> int:
        return len(self.values)

    def order(self, generator: torch.Generator) -> Tensor:
        """A random order (n,) of the rows."""
        return torch.randperm(len(self), generator=generator)

    def steps(self, order: Tensor, share: slice, device: torch.device) -> Iterator[Tensor]:
        """Yield each row of ``order`` on the device."""
        yield from order.to(device)

    def at(self, index: Tensor, device: torch.device) -> Tensor:
        """The rows at ``index`` (b,)."""
        return self.values[index.to(self.values.device)].to(device, non_blocking=True)

    def between(self, first: int, last: int, device: torch.device) -> Tensor:
        """The rows from one up to another."""
        return self.values[first:last].to(device)


class StreamedRows:
    """Rows on disk, read ahead of their use.

    Args:
        stored: the rows.
        window_bytes: memory for the rows that are mixed; twice as much is used.
    """

    streamed = True
    on_device = True
    """The rows of a step are copied to the same place every time, before the step."""

    def __init__(self, stored: StoredRows, *, window_bytes: int = WINDOW_BYTES) -> None:
        self.stored = stored
        self.block = max(1, BLOCK_BYTES // stored.row_bytes)
        self.window = max(self.block, window_bytes // stored.row_bytes)
        self._current: Tensor | None = None
        self._buffer: Tensor | None = None

    def __len__(self) -> int:
        return len(self.stored)

    def order(self, generator: torch.Generator) -> Tensor:
        """A random order (n,) of the rows, shuffled by blocks."""
        return block_order(len(self), self.block, self.window, generator)

    def steps(self, order: Tensor, share: slice, device: torch.device) -> Iterator[Tensor]:
        """Yield each row of ``order`` on the device, when its rows have been read."""
        wanted = order[:, share].numpy()
        cuda = device.type == "cuda"
        sizes = _piece_sizes(len(wanted), max(1, self.window // max(1, order.shape[1])))
        pieces = np.split(wanted, np.cumsum(sizes)[:-1]) if sizes else []
        all_indices = iter(order.to(device))
        with ThreadPoolExecutor(1) as ahead, ThreadPoolExecutor(READERS) as readers:

            def read(number: int) -> Tensor:
                places = pieces[number].reshape(-1)
                return self._read(places, readers, pin=cuda).unflatten(0, pieces[number].shape)

            waiting: Future[Tensor] | None = ahead.submit(read, 0) if pieces else None
            try:
                for number in range(len(pieces)):
                    found = waiting.result() if waiting is not None else read(number)
                    more = number + 1 < len(pieces)
                    waiting = ahead.submit(read, number + 1) if more else None
                    for rows in found:
                        self._put(rows, device)
                        yield next(all_indices)
            finally:
                self._current = None

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

    def _read(
        self,
        places: NDArray[np.int64],
        readers: ThreadPoolExecutor | None = None,
        *,
        pin: bool = False,
    ) -> Tensor:
        """The rows at some places (n,), read in the order of the file."""
        kind = torch.from_numpy(np.empty(0, dtype=self.stored.dtype)).dtype
        found = torch.empty(len(places), *self.stored.row_shape, dtype=kind, pin_memory=pin)
        rows, order = found.numpy(), np.argsort(places, kind="stable")

        def part(slots: NDArray[np.int64]) -> None:
            self.stored.read(places[slots], [rows[slot] for slot in slots.tolist()])

        if readers is None:
            part(order)
        else:
            list(readers.map(part, np.array_split(order, READERS)))
        return found


def _piece_sizes(steps: int, window: int) -> list[int]:
    """Steps whose rows are read at once: windows, the first of which is cut into growing pieces.

    Nothing is trained while the first piece of an epoch is read.

    >>> _piece_sizes(100, 32)
    [2, 2, 4, 8, 16, 32, 32, 4]
    """
    sizes, taken = [], 0
    while taken < steps:
        size = min(max(1, window // 16, taken), window - taken) if taken < window else window
        sizes.append(min(size, steps - taken))
        taken += size
    return sizes


def block_order(count: int, block: int, window: int, generator: torch.Generator) -> Tensor:
    """A random order (count,) that visits blocks of rows, and mixes the rows of a window.

    >>> order = block_order(10, 2, 4, torch.Generator().manual_seed(0))
    >>> sorted(order.tolist()) == list(range(10))
    True
    >>> len({int(row) // 2 for row in order[:4]})
    2

    Args:
        count: number of rows.
        block: rows per block.
        window: rows that are mixed; if all rows are, the order is a plain random one.
        generator: draws the order.
    """
    if count <= window:
        return torch.randperm(count, generator=generator)
    rows = torch.arange(count)
    blocks = rows.split(block)
    drawn = torch.randperm(len(blocks), generator=generator).tolist()
    mixed = torch.cat([blocks[number] for number in drawn])
    window = max(1, window // block) * block
    return torch.cat(
        [part[torch.randperm(len(part), generator=generator)] for part in mixed.split(window)]
    )
