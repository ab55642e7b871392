"""Heads after training, as data: arrays, a few numbers, and the kind that says what they mean.

Logits are computed in numpy and in double precision, so that neither the size of a block nor the
number of threads decides a bit. This module imports no torch.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from fisherhash import codes
from fisherhash.errors import NotDefinedError, UsageError, unknown_name
from fisherhash.model.head_kinds import KINDS, Parts, bottleneck, subspace_bits, word_distances

ROWS_AT_ONCE = 512
"""Features whose logits are computed at a time."""
DISTANCES_AT_ONCE = 2**20
"""Distances held in memory at a time."""


class Computing(Protocol):
    """What computes with a head: its arrays in numpy, or in training the head in PyTorch."""

    def logits(self, features: NDArray[Any]) -> NDArray[np.float32]:
        """Features (n, in_features) to logits (n, bits)."""
        ...

    def query(self, features: NDArray[Any]) -> NDArray[np.float32]:
        """Features (n, in_features) to the real-valued queries that :meth:`distances` takes."""
        ...

    def distances(
        self, queries: NDArray[np.float32], packed: NDArray[np.uint8]
    ) -> Iterator[NDArray[np.float32]]:
        """Distances of real-valued queries (q, …) to packed codes (n, bytes), in blocks (b, n)."""
        ...


@dataclass(frozen=True, eq=False)
class FinishedHead:
    """A head after training: features (n, in_features) to logits (n, bits); bit = logit > 0.

    Attributes:
        kind: the name of the function, one of ``KINDS``.
        in_features: d.
        bits: K.
        arrays: what the function computes with, by name.
        numbers: the same for single numbers.
        inner: the head that this one is built on, if there is one.
        live: the head in PyTorch, in the process that trained it.
    """

    kind: str
    in_features: int
    bits: int
    arrays: dict[str, NDArray[Any]]
    numbers: dict[str, Any] = field(default_factory=dict)
    inner: FinishedHead | None = None
    live: Computing | None = field(default=None, repr=False)

    @property
    def hamming(self) -> bool:
        """Whether codes are compared by Hamming distance, and not by :meth:`distances` alone."""
        if self.inner is not None:
            return self.inner.hamming
        return self.kind != "product" and bool(self.numbers.get("hamming", True))

    def as_trained(self) -> Computing:
        """What the measurements of a training compute with: the head in PyTorch if it is here."""
        return self.live or self

    def logits(self, features: NDArray[Any]) -> NDArray[np.float32]:
        """Features (n, in_features) to logits (n, bits)."""
        return self._in_blocks(self._in_double, features, self.bits)

    def query(self, features: NDArray[Any]) -> NDArray[np.float32]:
        """Features (n, in_features) to the real-valued queries that :meth:`distances` takes.

        They are the logits where codes have a Hamming distance.

        Raises:
            UsageError: the head is part of an exported network, which does not compute them.
        """
        if self.hamming:
            return self.logits(features)
        self._check_distances()
        parts = self._parts
        return self._in_blocks(functools.partial(bottleneck, parts), features, len(parts["offset"]))

    def distances(
        self, queries: NDArray[np.float32], packed: NDArray[np.uint8]
    ) -> Iterator[NDArray[np.float32]]:
        """Distances of real-valued queries (q, …) to packed codes (n, bytes), in blocks (b, n).

        With a Hamming distance it is ||u - b||^2 of logits u and a code's b in {-1, 1}^K, less the
        terms that are the same for every b. Otherwise it is the asymmetric quantiser distance, a
        sum over the subspaces of the squared distances of the query to the code's words.

        Raises:
            UsageError: the head is part of an exported network, which computes no such queries.
        """
        self._check_distances()
        step = max(1, DISTANCES_AT_ONCE // max(1, len(packed)))
        blocks = (np.asarray(queries[at : at + step]) for at in range(0, len(queries), step))
        if self.hamming:
            # Each distinct code once, so that equal codes are at exactly equal distances.
            distinct, rows = np.unique(packed, axis=0, return_inverse=True)
            signs = 2 * codes.unpack(distinct, self.bits).astype(np.float32) - 1
            for block in blocks:
                yield (-2 * block @ signs.T)[:, rows.reshape(-1)]
            return
        words = word_numbers(packed, self.bits)
        for block in blocks:
            tables = word_distances(self._parts, block.astype(np.float64))
            yield np.sum(
                [table[:, own] for table, own in zip(tables, words, strict=True)], axis=0
            ).astype(np.float32)

    def _check_distances(self) -> None:
        if not self.hamming and self.kind != "product":
            raise UsageError(
                f"codes of the head '{self.numbers.get('of')}' are ranked by distances of "
                "real-valued queries, which an exported model does not compute; use the model "
                "folder that it was exported from"
            )

    def cut(self, bits: int) -> FinishedHead:
        """The head of the first logits alone."""
        if bits == self.bits:
            return self
        if self.kind == "linear":
            arrays = self.arrays | {n: self.arrays[n][:bits] for n in ("weight", "offset")}
            return FinishedHead(self.kind, self.in_features, bits, arrays)
        if self.kind == "first":
            return FinishedHead(
                self.kind, self.in_features, bits, {}, dict(self.numbers), self.inner
            )
        if self.kind == "joined" and self.inner is not None and bits <= self.inner.bits:
            return self.inner.cut(bits)
        return FinishedHead("first", self.in_features, bits, {}, {}, self)

    def joined(self, weight: NDArray[Any], offset: NDArray[Any]) -> FinishedHead:
        """This head's logits, and ``features @ weight + offset`` behind them.

        Args:
            weight: (in_features, m).
            offset: (m,).

        Raises:
            UsageError: the shapes do not fit.
            NotDefinedError: codes of this head have no Hamming distance.
        """
        if not self.hamming:
            raise NotDefinedError(
                f"codes of the head '{self.kind}' have no Hamming distance, so no bits can follow"
            )
        more = {"weight": _float32(weight), "offset": _float32(offset)}
        if more["weight"].shape != (self.in_features, *more["offset"].shape):
            raise UsageError(
                f"bits behind those of a head of {self.in_features} features need a weight of "
                f"shape ({self.in_features}, m) and an offset of shape (m,), got "
                f"{np.shape(weight)} and {np.shape(offset)}"
            )
        bits = self.bits + len(more["offset"])
        return FinishedHead("joined", self.in_features, bits, more, {}, self)

    def checksum(self) -> str:
        """SHA-256 of everything that decides a logit."""
        digest = hashlib.sha256(f"{self.kind} {sorted(self.numbers.items())} {self.bits}".encode())
        for name in sorted(self.arrays):
            array = np.ascontiguousarray(self.arrays[name])
            digest.update(f" {name} {array.dtype} {array.shape} ".encode())
            digest.update(array.tobytes())
        if self.inner is not None:
            digest.update(self.inner.checksum().encode())
        return digest.hexdigest()

    def config(self) -> dict[str, Any]:
        """What :meth:`restored` needs beside the arrays, as JSON."""
        known = {"kind": self.kind, "in_features": self.in_features, "bits": self.bits}
        inner = {} if self.inner is None else {"inner": self.inner.config()}
        return known | self.numbers | inner

    def tensors(self, prefix: str = "head.") -> dict[str, NDArray[Any]]:
        """All arrays, those of the inner head too, by the names that they are saved with."""
        found = {prefix + name: np.ascontiguousarray(a) for name, a in self.arrays.items()}
        return found | ({} if self.inner is None else self.inner.tensors(f"{prefix}inner."))

    @classmethod
    def restored(
        cls, config: Mapping[str, Any], tensors: Mapping[str, NDArray[Any]], prefix: str = "head."
    ) -> FinishedHead:
        """The head that :meth:`config` and :meth:`tensors` describe.

        Raises:
            ValueError: they do not belong together.
        """
        numbers = dict(config)
        kind, width, bits = (numbers.pop(name) for name in ("kind", "in_features", "bits"))
        inner = numbers.pop("inner", None)
        if kind not in KINDS:
            raise unknown_name("head", str(kind), KINDS)
        own = {
            name.removeprefix(prefix): array
            for name, array in tensors.items()
            if name.startswith(prefix) and not name.startswith(f"{prefix}inner.")
        }
        within = None if inner is None else cls.restored(inner, tensors, f"{prefix}inner.")
        head = cls(str(kind), int(width), codes.check_bits(int(bits)), own, numbers, within)
        try:
            shape = head._in_double(np.zeros((1, head.in_features))).shape
        except (IndexError, KeyError, TypeError, ValueError) as error:
            raise ValueError(f"the tensors of the head '{kind}' do not fit ({error!r})") from None
        if shape != (1, head.bits):
            raise ValueError(f"the head '{kind}' computes {shape[1]} logits, not {head.bits}")
        return head

    @functools.cached_property
    def _parts(self) -> Parts:
        arrays = {
            name: array.astype(np.float64) if array.dtype.kind == "f" else array
            for name, array in self.arrays.items()
        }
        inner = None if self.inner is None else self.inner._in_double
        return Parts(self.bits, arrays, self.numbers, inner)

    def _in_double(self, features: NDArray[np.float64]) -> NDArray[np.float64]:
        return KINDS[self.kind](self._parts, features)

    @staticmethod
    def _in_blocks(
        function: Callable[[NDArray[Any]], NDArray[Any]], features: NDArray[Any], width: int
    ) -> NDArray[np.float32]:
        found = np.empty((len(features), width), dtype=np.float32)
        for start in range(0, len(features), ROWS_AT_ONCE):
            some = np.asarray(features[start : start + ROWS_AT_ONCE], dtype=np.float64)
            found[start : start + len(some)] = function(some)
        return found


def word_numbers(packed: NDArray[np.uint8], bits: int) -> list[NDArray[np.int64]]:
    """Packed codes (n, bytes) to the numbers (n,) of their words, one array per subspace."""
    rows = codes.unpack(packed, bits).astype(np.int64)
    ends = np.cumsum(subspace_bits(bits))[:-1]
    parts = np.split(rows, ends, axis=1)
    return [own @ (1 << np.arange(own.shape[1] - 1, -1, -1)) for own in parts]


def linear_head(
    weight: NDArray[Any], offset: NDArray[Any], *, shift: NDArray[Any] | None = None
) -> FinishedHead:
    """The head ``(features - shift) @ weight + offset``; weight: (d, bits)."""
    arrays = {"weight": np.ascontiguousarray(_float32(weight).T), "offset": _float32(offset)}
    if shift is not None:
        arrays["shift"] = _float32(shift)
    return FinishedHead("linear", weight.shape[0], weight.shape[1], arrays)


def no_head(width: int, bits: int | None = None, **known: Any) -> FinishedHead:
    """The head of a network that computes logits (n, width) itself; ``bits`` of them count."""
    return FinishedHead("first", width, width if bits is None else bits, {}, known)


def _float32(values: NDArray[Any]) -> NDArray[np.float32]:
    return np.ascontiguousarray(values, dtype=np.float32)
