"""What heads compute: one function per kind, from features (n, d) to logits (n, bits).

The functions are written for numpy arrays and for tensors alike: finished heads run them in numpy,
methods that are fitted to features and the export to ONNX in torch. This module imports no torch.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

Array = Any
"""A numpy array or a tensor."""


@dataclass(frozen=True)
class Parts:
    """What the function of a kind computes with.

    Attributes:
        bits: number of logits.
        arrays: by name; ``shift`` and ``scale`` are of the features, where there are any.
        numbers: by name.
        inner: the logits of the head that this one is built on, if there is one.
    """

    bits: int
    arrays: Mapping[str, Array]
    numbers: Mapping[str, Any]
    inner: Callable[[Array], Array] | None = None

    def __getitem__(self, name: str) -> Array:
        return self.arrays[name]

    def standardised(self, features: Array) -> Array:
        """Features (n, d), less the shift and times the scale where there are any."""
        if "shift" in self.arrays:
            features = features - self["shift"]
        return features * self["scale"] if "scale" in self.arrays else features

    def logits(self, features: Array) -> Array:
        """The logits (n, k) of the inner head; the features themselves where there is none."""
        return features if self.inner is None else self.inner(features)


def subspace_bits(bits: int, most: int = 8) -> list[int]:
    """Bits of each subspace of a product of codebooks: few subspaces, evenly filled.

    As few subspaces as possible with at most ``most`` bits (256 words) each; the first subspaces
    take one bit more where they do not divide.

    >>> subspace_bits(12), subspace_bits(13), subspace_bits(20)
    ([6, 6], [7, 6], [7, 7, 6])
    """
    subspaces = -(-bits // most)
    low, more = divmod(bits, subspaces)
    return [low + 1] * more + [low] * (subspaces - more)


def _library(values: Array) -> Any:
    """The library of an array: numpy, or torch, which whoever has a tensor has imported."""
    return np if isinstance(values, np.ndarray) else sys.modules["torch"]


def _first(parts: Parts, features: Array) -> Array:
    """The first logits of the inner head, or of a network that computes logits."""
    return parts.logits(features)[:, : parts.bits]


def _linear(parts: Parts, features: Array) -> Array:
    """W f + v."""
    return parts.standardised(features) @ parts["weight"].T + parts["offset"]


def _joined(parts: Parts, features: Array) -> Array:
    """The inner logits, then linear ones of the same features."""
    more = features @ parts["weight"] + parts["offset"]
    return _library(more).concatenate([parts.logits(features), more], 1)


def _cut(parts: Parts, features: Array) -> Array:
    """W u + t of the inner logits u."""
    return parts.logits(features) @ parts["mixing"].T + parts["offset"]


def _argmax(parts: Parts, features: Array) -> Array:
    """The code of the class with the largest score."""
    return parts["codes"][_linear(parts, features).argmax(1)]


def _sliced(parts: Parts, features: Array) -> Array:
    """One hidden layer, of which each bit has its own units."""
    inputs = parts.standardised(features)
    hidden = (inputs @ parts["hidden_weight"].T + parts["hidden_offset"]).clip(min=0)
    bits, width = parts["weight"].shape
    return (hidden.reshape(-1, bits, width) * parts["weight"]).sum(2) + parts["offset"]


def bottleneck(parts: Parts, features: Array) -> Array:
    """The bottleneck (n, width) in (-1, 1) that codebooks quantise."""
    values = _linear(parts, features)
    return _library(values).tanh(values)


def word_distances(parts: Parts, outputs: Array) -> list[Array]:
    """Squared distances (n, words) of outputs (n, width) to the words of each subspace."""
    books, found = parts["codebooks"], []
    size = books.shape[2]
    for number, own in enumerate(subspace_bits(parts.bits)):
        part = outputs[:, number * size : (number + 1) * size]
        found.append(distances_to(part, books[number, : 2**own]))
    return found


def _product(parts: Parts, features: Array) -> Array:
    """The numbers of the nearest words in binary, as -1 and 1, highest bit first."""
    bits = []
    tables = word_distances(parts, bottleneck(parts, features))
    for table, own in zip(tables, subspace_bits(parts.bits), strict=True):
        words = table.argmin(1)
        bits += [(words >> shift) & 1 for shift in range(own - 1, -1, -1)]
    return 2.0 * _library(features).stack(bits, 1) - 1.0


def _class_step(parts: Parts, features: Array) -> Array:
    """u + mu s C p, with p the probabilities of the classes."""
    logits = parts.logits(features)
    inputs = parts.standardised(features)
    scores = inputs @ parts["scores_weight"].T + parts["scores_offset"]
    scores = parts.numbers["sharpness"] * scores
    if parts.numbers["several"]:
        likely = 0.5 * (1.0 + _library(scores).tanh(0.5 * scores))
        likely = likely / likely.sum(1)[:, None].clip(min=1.0)
    else:
        likely = _softmax(scores)
    pull = parts.numbers["weight"] * parts["size"] * (likely @ parts["centers"])
    if isinstance(pull, np.ndarray):
        # A pull that cancels a logit does so exactly, however many images are computed together.
        pull = pull.astype(np.float32)
    return logits + pull


def _periodic(parts: Parts, features: Array) -> Array:
    """cos(W f + phase) + offset: bits that change several times along a direction."""
    turned = parts.standardised(features) @ parts["weight"].T + parts["phase"]
    return _library(turned).cos(turned) + parts["offset"]


def _kernel(parts: Parts, features: Array) -> Array:
    """W (k(f) - mean) + offset, k_j(f) = exp(-gamma ||f - a_j||^2) for each anchor a_j."""
    squares = distances_to(parts.standardised(features), parts["points"])
    kernel = _library(squares).exp(-parts["gamma"] * squares) - parts["mean"]
    return kernel @ parts["weight"].T + parts["offset"]


def _anchors(parts: Parts, features: Array) -> Array:
    """W z(f), with z the similarities to the nearest anchors, which sum to 1.

    The last logits are second bits of the first outputs y: y > 0 is compared with ``high``, another
    one with ``low``, so that each side of a cut is cut again.
    """
    similar = nearest_anchors(
        parts.standardised(features), parts["points"], parts["gamma"], parts.numbers["nearest"]
    )
    outputs = similar @ parts["weight"].T
    folded, library = outputs[:, : len(parts["high"])], _library(outputs)
    again = library.where(folded > 0, folded - parts["high"], parts["low"] - folded)
    return library.concatenate([outputs, again], 1)


def _cube(parts: Parts, features: Array) -> Array:
    """The nearest word in each subspace; words are numbered like the corners of a cube.

    Near words have numbers that differ in few bits. The logit of a bit is the squared distance to
    the nearest word where that bit is 0, less that to the nearest word where it is 1.
    """
    values = parts.standardised(features) @ parts["projection"]
    library, logits, first = _library(values), [], 0
    for number in range(sum(name.startswith("words_") for name in parts.arrays)):
        words = parts[f"words_{number}"]
        count, size = words.shape
        squares = distances_to(values[:, first : first + size], words)
        first += size
        for shift in range(count.bit_length() - 2, -1, -1):
            zero, one = ([w for w in range(count) if w >> shift & 1 == bit] for bit in (0, 1))
            logits.append(library.amin(squares[:, zero], 1) - library.amin(squares[:, one], 1))
    return library.stack(logits, 1)


def _trees(parts: Parts, features: Array) -> Array:
    """A weighted vote of small decision trees per bit, all of the same depth.

    Node 0 splits first; the children of node i are 2 i + 1 (feature at most the threshold) and
    2 i + 2. A branch that ends early repeats its vote below.
    """
    bits, trees, inner = parts["columns"].shape
    columns, thresholds, votes = (
        parts[name].reshape(-1) for name in ("columns", "thresholds", "votes")
    )
    library = _library(features)
    where = {} if library is np else {"device": features.device}
    # Tables are flat, so that one number per image and tree finds a node in them.
    first = library.arange(bits * trees, **where)[None, :]
    node = first * 0 + library.zeros_like(features[:, :1], dtype=library.int64)
    for _ in range(inner.bit_length()):
        at = node + inner * first
        if library is np:
            values = np.take_along_axis(features, columns[at], 1)
        else:
            values = features.gather(1, columns[at])
        node = 2 * node + 1 + (values > thresholds[at])
    found = votes[node - inner + (inner + 1) * first]
    return found.reshape(-1, bits, trees).sum(2)


def distances_to(rows: Array, others: Array) -> Array:
    """The squared distances (n, m) of rows (n, d) to others (m, d)."""
    squares = (rows * rows).sum(1)[:, None] + (others * others).sum(1)
    return (squares - 2.0 * rows @ others.T).clip(min=0.0)


def nearest_anchors(rows: Array, anchors: Array, gamma: Array, nearest: int) -> Array:
    """Similarities z (n, m) of rows (n, d) to their nearest anchors (m, d); each row sums to 1."""
    squares = distances_to(rows, anchors)
    if isinstance(squares, np.ndarray):
        chosen = np.argsort(squares, axis=1, kind="stable")[:, :nearest]
        near, found = np.take_along_axis(squares, chosen, 1), np.zeros_like(squares)
        np.put_along_axis(found, chosen, _softmax(-gamma * near), 1)
        return found
    near, chosen = squares.topk(nearest, dim=1, largest=False)
    return (squares * 0).scatter(1, chosen, _softmax(-gamma * near))


def _softmax(scores: Array) -> Array:
    if not isinstance(scores, np.ndarray):
        return scores.softmax(1)
    powers = np.exp(scores - scores.max(1, keepdims=True))
    return powers / powers.sum(1, keepdims=True)


KINDS: dict[str, Callable[[Parts, Array], Array]] = {
    "first": _first,
    "linear": _linear,
    "joined": _joined,
    "cut": _cut,
    "argmax": _argmax,
    "sliced": _sliced,
    "product": _product,
    "class-step": _class_step,
    "periodic": _periodic,
    "kernel": _kernel,
    "anchors": _anchors,
    "cube": _cube,
    "trees": _trees,
}
"""The function of each kind: features (n, d) to logits (n, bits)."""
