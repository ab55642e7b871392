"""Exact Hamming search over codes in the memory of a GPU, by position.

The codes are divided into groups of consecutive ones. A scan finds the smallest distance in every
group. The k nearest codes lie in the k first groups by (smallest distance, group): any code of
another group has k codes before it, one in each of these. Only these groups are looked at again, so
the codes are read from memory once, nothing of their size is written, and ties cost nothing.

The scan has three ways with the same results: Triton kernels that count the bits of an XOR (few
queries, limited by the memory) or multiply bits on the matrix units (many queries, limited by the
arithmetic), and a matrix product of torch, where there is no Triton, as on a CPU.
"""

from __future__ import annotations

import functools
import logging
import math
import threading
import warnings
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from fisherhash.codes import check_bits, check_codes, code_bytes
from fisherhash.errors import FisherhashError, UsageError
from fisherhash.index.checks import whole_number
from fisherhash.system.devices import choose_device

logger = logging.getLogger(__name__)

GPU_WAYS = ("auto", "count", "dot", "matmul")
SMALLEST_GROUP, LARGEST_GROUP = 128, 4096
MANY_QUERIES = 16
"""From this many queries on, the matrix units are faster than counting bits."""
DOT_BITS = 256
"""Wider codes do not fit into the registers of a block of the matrix units."""
UPLOADED = 1 << 22
"""Codes that are copied to the device at a time."""
MOST_PAIRS = 1 << 26
"""Distances held at a time."""

Found = tuple[NDArray[np.int64], NDArray[np.int64]]


class GpuEngine:
    """Exact search over codes on a GPU, with the results of :class:`Engine` in the same order.

    >>> codes = np.array([[3], [1], [6]], dtype=np.uint8)
    >>> engine = GpuEngine(codes, bits=8, device="cpu")
    >>> positions, distances = engine.search(np.array([[1]], dtype=np.uint8), k=2)
    >>> positions.tolist(), distances.tolist()
    ([[1, 0]], [[0, 1]])

    Args:
        codes: (n, bytes) packed codes, possibly memory-mapped; they are copied to the device.
        bits: length of a code.
        device: ``cuda``, ``cuda:1``, …, or ``cpu`` for a test; by default CUDA where there is one.
        way: one of GPU_WAYS, to force one way.
    """

    def __init__(
        self,
        codes: NDArray[np.uint8],
        bits: int,
        *,
        device: str | torch.device | None = None,
        way: str = "auto",
    ) -> None:
        self.bits = check_bits(bits)
        if codes.ndim != 2 or codes.dtype != np.uint8 or codes.shape[1] != code_bytes(bits):
            raise UsageError(
                f"codes of {bits} bits must be uint8 of shape (n, {code_bytes(bits)}), "
                f"got {codes.dtype} of shape {codes.shape}"
            )
        if way not in GPU_WAYS:
            raise UsageError(f"unknown way '{way}'. Known: {', '.join(GPU_WAYS)}")
        self.device = choose_device(device)
        if way in ("count", "dot") and self.device.type != "cuda":
            raise UsageError(f"the way '{way}' needs a CUDA device, not {self.device}")
        if way == "dot" and bits > DOT_BITS:
            raise UsageError(f"the way 'dot' takes codes of at most {DOT_BITS} bits, not {bits}")
        self.way = way
        self._total = len(codes)
        self._width = -(-bits // 32)
        self._lock = threading.Lock()
        self._words = self._upload(codes)

    def __len__(self) -> int:
        return self._total

    def _upload(self, codes: NDArray[np.uint8]) -> Tensor:
        """The codes as words (words, n), filled up to whole groups of any size."""
        room = -(-max(1, len(codes)) // LARGEST_GROUP) * LARGEST_GROUP
        try:
            words = torch.empty(self._width, room, dtype=torch.int32, device=self.device)
        except torch.cuda.OutOfMemoryError:
            raise FisherhashError(
                f"{len(codes):,} codes of {self.bits} bits take {room * self._width * 4:,} bytes, "
                f"more than {self.device} has free; use the engine of the processor"
            ) from None
        for start in range(0, len(codes), UPLOADED):
            some = _tensor(_as_words(codes[start : start + UPLOADED], self._width))
            words[:, start : start + len(some)] = some.to(self.device).T
        # Copies of the last code change no group's smallest distance.
        words[:, len(codes) :] = words[:, len(codes) - 1 : len(codes)] if len(codes) else 0
        return words

    def search(self, queries: ArrayLike, k: int) -> Found:
        """Positions and distances (n_queries, min(k, n)) of the nearest codes."""
        asked = self._queries(queries)
        k = min(whole_number("k", k, 1), len(self))
        if not k or not len(asked):
            nothing = np.zeros((len(asked), k), dtype=np.int64)
            return nothing, nothing.copy()
        size = _group_size(len(self), k)
        groups = -(-len(self) // size)
        chosen = min(k, groups)
        # Room for the groups' minima and for the distances in the chosen groups.
        step = max(1, MOST_PAIRS // max(groups, chosen * size))
        with self._lock:
            parts = [self._search(some, k, size, groups) for some in asked.split(step)]
            positions, distances = (
                torch.cat(some).cpu().numpy() for some in zip(*parts, strict=True)
            )
        return positions, distances

    def _search(self, queries: Tensor, k: int, size: int, groups: int) -> tuple[Tensor, Tensor]:
        """Positions and distances (n_queries, k) in the order of results."""
        chosen = min(k, groups)
        if chosen < groups:
            minima = self._minima(queries, size, groups)
            # In the order of their positions, so that ties are in theirs.
            first = _smallest(minima, chosen, self.bits)[0].sort().values
        else:
            first = torch.arange(groups, device=self.device).expand(len(queries), groups)
        rows = torch.arange(len(queries), device=self.device).repeat_interleave(chosen)
        near = self._in_groups(queries, rows, first.reshape(-1), size).view(len(queries), -1)
        if len(self) % size:
            # The last group is filled up with copies of the last code.
            last = torch.where(first[:, -1] == groups - 1, len(self) % size, size)
            inner = torch.arange(size, device=self.device)
            beyond = inner[None, :] >= last[:, None]
            near[:, -size:] = near[:, -size:].masked_fill(beyond, self.bits + 1)
        column, distance = _smallest(near, k, self.bits + 1)
        return first.gather(1, column // size) * size + column % size, distance

    def within(
        self, queries: ArrayLike, radius: int
    ) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
        """Offsets (n_queries + 1,), positions and distances of everything up to the radius."""
        asked = self._queries(queries)
        radius = min(whole_number("radius", radius, 0), self.bits)
        counts = [np.zeros(1, dtype=np.int64)]
        keys = [np.zeros(0, dtype=np.int64)]
        size = SMALLEST_GROUP
        groups = -(-len(self) // size)
        # At most 2 ** 12, so that a key of (query, distance, position) has 63 bits.
        step = min(1 << 12, max(1, MOST_PAIRS // max(1, groups)))
        each = max(1, len(self)) * (self.bits + 1)
        with self._lock:
            for some in asked.split(step) if len(asked) else ():
                found = self._within(some, radius, size, groups)
                counts.append(torch.bincount(found // each, minlength=len(some)).cpu().numpy())
                keys.append((found % each).cpu().numpy())
        joined, total = np.concatenate(keys), max(1, len(self))
        return np.cumsum(np.concatenate(counts)), joined % total, joined // total

    def _within(self, queries: Tensor, radius: int, size: int, groups: int) -> Tensor:
        """Sorted keys of (query, distance, position) of everything up to the radius."""
        pairs = torch.nonzero(self._minima(queries, size, groups) <= radius)
        inner = torch.arange(size, device=self.device)
        found = [torch.zeros(0, dtype=torch.int64, device=self.device)]
        for rows, group in (some.unbind(1) for some in pairs.split(max(1, MOST_PAIRS // size))):
            near = self._in_groups(queries, rows, group, size)
            position = group[:, None] * size + inner
            pair, place = torch.nonzero((near <= radius) & (position < len(self))).unbind(1)
            key = rows[pair] * (self.bits + 1) + near[pair, place]
            found.append(key * len(self) + position[pair, place])
        return torch.cat(found).sort().values

    def build(self) -> None:
        """There is nothing to build: the codes are on the device."""

    def tables(self) -> dict[str, NDArray[Any]]:
        """There are no search tables."""
        return {}

    def describe(self) -> dict[str, Any]:
        """Where the codes are, and how they are searched."""
        return {
            "codes": len(self),
            "bits": self.bits,
            "device": str(self.device),
            "way": self.way,
            "bytes": self._words.numel() * 4,
        }

    def _queries(self, queries: ArrayLike) -> Tensor:
        """Queries as words (n_queries, words) on the device."""
        given = check_codes(queries, self.bits)
        return _tensor(_as_words(given, self._width)).to(self.device)

    def _minima(self, queries: Tensor, size: int, groups: int) -> Tensor:
        """The smallest distance in each group (n_queries, groups)."""
        way = self.way
        if way == "auto":
            way = _fastest_way(self.device, self.bits, len(queries))
        if way == "matmul" or not groups:
            return self._minima_by_matmul(queries, size, groups)
        with torch.cuda.device(self.device):
            return _scanned(way, self._words, queries, size, groups)

    def _minima_by_matmul(self, queries: Tensor, size: int, groups: int) -> Tensor:
        kind = torch.float16 if self.device.type == "cuda" else torch.float32
        signs, ones = _signs(queries)
        signs = signs.to(kind).T.contiguous()
        found = torch.empty(len(queries), groups, dtype=torch.int16, device=self.device)
        width = max(len(queries), self._width * 32)
        step = max(1, MOST_PAIRS // (size * width))
        for start in range(0, groups, step):
            last = min(start + step, groups)
            bits = _bits_of(self._words[:, start * size : last * size].T)
            # Whole numbers up to 1024 are exact in half precision, too.
            near = (bits.to(kind) @ signs).view(last - start, size, -1).amin(1)
            found[:, start:last] = (near.T + ones.to(kind)[:, None]).to(torch.int16)
        return found

    def _in_groups(self, queries: Tensor, rows: Tensor, group: Tensor, size: int) -> Tensor:
        """Distances (pairs, size) of the query of each pair to the codes of its group."""
        if self.way != "matmul" and self.device.type == "cuda" and _works("count", self.device):
            with torch.cuda.device(self.device):
                return _distances(self._words, queries, rows, group, size)
        inner = torch.arange(size, device=self.device)
        places = group[:, None] * size + inner
        near = torch.zeros(len(rows), size, dtype=torch.int32, device=self.device)
        for w in range(self._width):
            near += _ones_in(self._words[w][places] ^ queries[rows, w][:, None])
        return near.to(torch.int16)


def _smallest(values: Tensor, count: int, largest: int) -> tuple[Tensor, Tensor]:
    """Columns and values (n, count) of the smallest values by (value, column), in that order.

    >>> [some.tolist() for some in _smallest(torch.tensor([[3, 1, 1, 0]]), 3, 3)]
    [[[3, 1, 2]], [[0, 1, 1]]]
    """
    columns = values.shape[1]
    # Half the bytes make the selection twice as fast.
    kind = torch.int32 if (largest + 1) * columns < 1 << 31 else torch.int64
    order = torch.arange(columns, device=values.device, dtype=kind)
    key = torch.add(order, values, alpha=columns)
    key = key.topk(count, largest=False, sorted=True).values.to(torch.int64)
    return key % columns, key // columns


def _group_size(total: int, k: int) -> int:
    """Codes per group: a power of two for which the minima and the chosen groups are few.

    >>> _group_size(10_000_000, 100), _group_size(100, 1)
    (512, 128)
    """
    best = math.sqrt(total / max(1, k))
    return int(min(LARGEST_GROUP, max(SMALLEST_GROUP, 2 ** math.ceil(math.log2(max(1.0, best))))))


def _as_words(codes: NDArray[np.uint8], width: int) -> NDArray[np.int32]:
    """Codes (n, bytes) as words (n, width) of 32 bits."""
    if codes.shape[1] == 4 * width:
        return np.ascontiguousarray(codes).view(np.int32)
    padded = np.zeros((len(codes), 4 * width), dtype=np.uint8)
    padded[:, : codes.shape[1]] = codes
    return padded.view(np.int32)


def _tensor(words: NDArray[np.int32]) -> Tensor:
    """Words as a tensor on the same memory, which is only read."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*not writable.*")
        return torch.from_numpy(words)


def _bits_of(words: Tensor) -> Tensor:
    """Words (n, width) as bits (n, 32 * width), in the order of the kernels."""
    shifts = torch.arange(32, device=words.device, dtype=torch.int32)
    return ((words[:, :, None] >> shifts) & 1).to(torch.int8).flatten(1)


def _signs(queries: Tensor) -> tuple[Tensor, Tensor]:
    """1 - 2q as bytes (n_queries, 32 * width), and |q| (n_queries,), of queries' bits q."""
    bits = _bits_of(queries)
    return (1 - 2 * bits).contiguous(), bits.sum(1, dtype=torch.int32)


def _ones_in(words: Tensor) -> Tensor:
    """How many bits of each word are 1."""
    words = words - ((words >> 1) & 0x55555555)
    words = (words & 0x33333333) + ((words >> 2) & 0x33333333)
    words = (words + (words >> 4)) & 0x0F0F0F0F
    words = words + (words >> 8)
    return (words + (words >> 16)) & 0x3F


def _kernels() -> Any:
    """The kernels; only Triton's compiler knows their types."""
    from fisherhash.index.engine import _gpu_kernels

    return _gpu_kernels


def _scanned(
    way: str, words: Tensor, queries: Tensor, size: int, groups: int, *, native: bool = True
) -> Tensor:
    """The smallest distances (n_queries, groups), by a Triton kernel.

    ``native`` is False for Triton's interpreter, which runs on a CPU.
    """
    kernels = _kernels()
    found = torch.empty(len(queries), groups, dtype=torch.int16, device=words.device)
    width, stride = words.shape
    if way == "count":
        together = max(1, 4096 // size)
        kernels.minima_by_count[(-(-groups // together),)](
            *(words, stride, queries, len(queries), found, groups),
            WORDS=width,
            GROUP=size,
            TOGETHER=together,
            ASM=native,
            num_warps=8,
        )
        return found
    signs, ones = _signs(queries)
    block = 128 if len(queries) > 64 else 64
    blocks, wide = -(-len(queries) // block), 1 << (width - 1).bit_length()
    filled = torch.zeros(blocks * block, 32 * wide, dtype=torch.int8, device=words.device)
    filled[: len(queries), : 32 * width] = signs
    kernels.minima_by_dot[(groups, blocks)](
        *(words, stride, filled, ones, len(queries), found, groups),
        WORDS=width,
        WIDE=wide,
        GROUP=size,
        ROWS=128,
        QUERIES=block,
        num_warps=block // 16,
    )
    return found


def _distances(
    words: Tensor, queries: Tensor, rows: Tensor, group: Tensor, size: int, *, native: bool = True
) -> Tensor:
    """Distances (pairs, size) by a Triton kernel; see :meth:`GpuEngine._in_groups`."""
    kernels = _kernels()
    found = torch.empty(len(rows), size, dtype=torch.int16, device=words.device)
    width, stride = words.shape
    kernels.distances_in_groups[(len(rows),)](
        *(words, stride, queries, rows.contiguous(), group.contiguous(), found),
        WORDS=width,
        GROUP=size,
        ASM=native,
        num_warps=4,
    )
    return found


def _fastest_way(device: torch.device, bits: int, queries: int) -> str:
    if device.type != "cuda" or not _works("count", device):
        return "matmul"
    many = queries >= MANY_QUERIES and bits <= DOT_BITS
    return "dot" if many and _works("dot", device) else "count"


@functools.cache
def _works(way: str, device: torch.device) -> bool:
    """Whether a kernel compiles, runs and is right on a device; tried once."""
    rng = np.random.default_rng(0)
    codes = rng.integers(0, 256, (1000, 8), dtype=np.uint8)
    queries = torch.from_numpy(_as_words(codes[:20], 2)).to(device)
    engine = GpuEngine(codes, 64, device=device, way="matmul")
    try:
        expected = engine._minima_by_matmul(queries, 128, 8)
        with torch.cuda.device(device):
            right = torch.equal(_scanned(way, engine._words, queries, 128, 8), expected)
            if way == "count":
                pairs = torch.arange(8, device=device), torch.arange(8, device=device)
                near = _distances(engine._words, queries, *pairs, 128)
                right &= torch.equal(near, engine._in_groups(queries, *pairs, 128))
    except ImportError:
        return False
    except Exception as error:  # no C compiler, no headers, an unknown GPU
        logger.warning("the kernel '%s' does not run on %s: %s", way, device, error)
        return False
    if not right:
        logger.warning("the kernel '%s' is wrong on %s and is not used", way, device)
    return right
