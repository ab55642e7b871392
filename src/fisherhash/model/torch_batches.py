"""PyTorch in batches of one size, so that a row has the same bits alone and in any batch."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fisherhash import codes
from fisherhash.model.head import DISTANCES_AT_ONCE, word_numbers

# Rounding depends on the batch size, so every batch has this one, padded. Four runs fastest on two
# cores.
MICRO_BATCH = 4
GPU_BATCH = 256


@torch.inference_mode()
def in_fixed_batches(
    function: Callable[[Tensor], Tensor], values: NDArray, device: torch.device
) -> NDArray[np.float32]:
    """Apply a function to rows (n, …), always in batches of one size; the last one is padded.

    Images are given to it in the channels-last order that convolutions run fastest in.
    """
    order = torch.channels_last if values.ndim == 4 else torch.preserve_format
    size = MICRO_BATCH if device.type == "cpu" else GPU_BATCH
    rows = []
    # No rows at all are one batch of padding: the result has its shape nevertheless.
    for start in range(0, max(1, len(values)), size):
        chunk = torch.from_numpy(values[start : start + size])
        padding = chunk.new_zeros(size - len(chunk), *chunk.shape[1:])
        padded = torch.cat([chunk, padding]) if len(padding) else chunk
        given = padded.to(device, memory_format=order)
        rows.append(function(given).float().cpu()[: len(chunk)])
    return torch.cat(rows).numpy()


class LiveHead:
    """A head in PyTorch as it was trained: the measurements of a training compute with it.

    In single precision and in batches of one size, where a saved model computes in double: a logit
    that is mathematically zero may have another sign there.

    Args:
        head: the trained head, a :class:`~fisherhash.model.heads.Head`.
    """

    def __init__(self, head: Any) -> None:
        self._head = head

    def logits(self, features: NDArray[np.float32]) -> NDArray[np.float32]:
        """Features (n, in_features) to logits (n, bits)."""
        return self._batches(self._head.logits, features)

    def query(self, features: NDArray[np.float32]) -> NDArray[np.float32]:
        """Features (n, in_features) to the real-valued queries that :meth:`distances` takes."""
        own = self._head.logits if self._head.hamming else self._head.forward
        return self._batches(own, features)

    def _batches(
        self, function: Callable[[Tensor], Tensor], features: NDArray[np.float32]
    ) -> NDArray[np.float32]:
        self._head.eval()
        return in_fixed_batches(function, features, self._head.shift.device)

    @torch.no_grad()
    def distances(
        self, queries: NDArray[np.float32], packed: NDArray[np.uint8]
    ) -> Iterator[NDArray[np.float32]]:
        """The distances of :meth:`FinishedHead.distances`, in blocks (b, n)."""
        head, rows = self._head, torch.from_numpy(queries)
        blocks = rows.split(max(1, DISTANCES_AT_ONCE // max(1, len(packed))))
        if head.kind == "product":
            words = [torch.from_numpy(one) for one in word_numbers(packed, head.bits)]
            for block in blocks:
                tables = head.tables(block.to(head.shift.device)).cpu()
                parts = (tables[:, m, own] for m, own in enumerate(words))
                yield functools.reduce(torch.add, parts).numpy()
            return
        # Each distinct code once, so that equal codes are at exactly equal distances.
        distinct, code_of = np.unique(packed, axis=0, return_inverse=True)
        signs = 2.0 * torch.from_numpy(codes.unpack(distinct, head.bits)).float() - 1.0
        for block in blocks:
            yield (-2.0 * block @ signs.T)[:, code_of.reshape(-1)].numpy()
