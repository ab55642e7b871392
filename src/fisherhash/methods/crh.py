"""Centres reassigned while training (CRH; Yin et al., AAAI 2026)."""

import math
from typing import Annotated

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from fisherhash.methods._options import PositiveInt
from fisherhash.methods._pairs import class_proportions
from fisherhash.methods.base import Batch, HashMethod, MethodInfo, Progress, register, sign
from fisherhash.system.options import Range, Tuned


@register
class CRH(HashMethod):
    """CRH: class centres chosen from a code book, and chosen again as the outputs move.

    The K bits are cut into heads of d bits, d the smallest divisor of K with 2^d >= 2 M. Each head
    has a book of 2 M words, and each class one word per head; together they are its centre c_m.
    With s and m constants and y_i the class proportions, the network minimises

        -(1/N) sum_i y_i . log softmax(s (cos(u_i, c) - m [y_i > 0])) + q mean (|tanh u| - 1)^2.

    After an epoch each class gets, head by head, the word that agrees best with the mean code of
    its images. Classes choose in a random order, and no two share a word. The code is sgn(u).

    What differs from the paper: words are drawn from a fixed seed; where d bits have fewer than 2 M
    words, all of them are the book, and where they have fewer than M, classes may share one.
    s = sqrt(2) ln(M - 1) is at least 2, because it would be 0 for two classes. No code of the
    authors could be had to compare with.

    Args:
        bits: K.
        classes: M.
        margin: m.
        quantization: q; the paper has 0.1 with one label per image, 0 with several.
        often: Epochs out of 300 in which centres are reassigned each time; later each fifth.
        codebook_seed: Selects the words.
    """

    info = MethodInfo(
        name="crh",
        title="Codebook-Centric Deep Hashing: End-to-End Joint Learning of Semantic Hash Centers "
        "and Neural Hash Function",
        venue="AAAI",
        year=2026,
        url="https://arxiv.org/abs/2511.12162",
        supervision="classes",
    )

    margin: Annotated[float, Range(least=0), Tuned(0.0, 0.5)] = 0.2
    quantization: Annotated[float, Range(least=0), Tuned(0.003, 1.0, "log")] = 0.1
    often: PositiveInt = 150
    codebook_seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        rng = np.random.default_rng([self.codebook_seed, self.bits, self.classes])
        size = head_bits(self.bits, self.classes)
        self._books = [_book(size, self.classes, rng) for _ in range(self.bits // size)]
        centers = np.concatenate(
            [
                book[rng.permutation(len(book))][np.arange(self.classes) % len(book)]
                for book in self._books
            ],
            axis=1,
        )
        self.centers = nn.Buffer(torch.from_numpy(centers).float())
        self.sums = nn.Buffer(torch.zeros(self.classes, self.bits))
        self._scale = max(2.0, math.sqrt(2.0) * math.log(max(self.classes - 1, 1)))

    def loss(self, outputs: Tensor, batch: Batch) -> dict[str, Tensor]:
        """Return the cross-entropy of scaled cosines, plus the distance of |tanh u| from 1."""
        u, labels = outputs.float(), batch.labels.float()
        cosines = F.normalize(u, eps=1e-6) @ self.centers.T * self.bits**-0.5
        scores = self._scale * (cosines - self.margin * labels)
        center = F.cross_entropy(scores, class_proportions(labels))
        quantization = (u.tanh().abs() - 1.0).square().mean()
        loss = center + self.quantization * quantization
        return {"loss": loss, "center": center, "quantization": quantization}

    def after_step(self, outputs: Tensor, batch: Batch) -> None:
        """Add the batch's codes to the sums of their classes."""
        self.sums.add_(class_proportions(batch.labels.float()).T @ sign(outputs.float()))

    def on_epoch_start(self, progress: Progress) -> None:
        """Give each class the words that agree best with its images' codes."""
        early = 300 * progress.epoch <= self.often * progress.epochs
        if progress.epoch == 0 or not (early or progress.epoch % 5 == 0):
            return
        rng = np.random.default_rng([self.codebook_seed, progress.epoch])
        found = reassigned(self.sums.cpu().numpy(), self._books, rng)
        self.centers.copy_(torch.from_numpy(found))
        self.sums.zero_()


def head_bits(bits: int, classes: int) -> int:
    """Return the bits of a head: the smallest divisor of ``bits`` with 2^d words for 2 M classes.

    >>> head_bits(48, 80), head_bits(48, 10), head_bits(7, 100)
    (8, 6, 7)
    """
    fitting = (d for d in range(1, bits + 1) if bits % d == 0 and 2**d >= 2 * classes)
    return next(fitting, bits)


def reassigned(
    sums: NDArray[np.float32], books: list[NDArray[np.int8]], rng: np.random.Generator
) -> NDArray[np.float32]:
    """Return the new centres (M, K), head by head the word that agrees best with each class.

    Args:
        sums: (M, K) the sum of the codes of each class.
        books: The words (n, d) of each head.
        rng: Draws the order in which classes choose.
    """
    parts, done = [], 0
    for book in books:
        agreement = sums[:, done : done + book.shape[1]] @ book.T.astype(np.float32)
        chosen = np.zeros(len(sums), dtype=np.int64)
        free = np.ones(len(book), dtype=bool)
        for row in rng.permutation(len(sums)):
            if not free.any():
                free[:] = True
            chosen[row] = np.where(free, agreement[row], -np.inf).argmax()
            free[chosen[row]] = False
        parts.append(book[chosen])
        done += book.shape[1]
    return np.concatenate(parts, axis=1).astype(np.float32)


def _book(bits: int, classes: int, rng: np.random.Generator) -> NDArray[np.int8]:
    """Draw up to 2 M distinct words (n, bits), -1 and 1."""
    if bits <= 20:
        numbers = rng.permutation(2**bits)[: 2 * classes]
        signs = (numbers[:, None] >> np.arange(bits)) & 1
    else:
        signs = np.unique(rng.integers(0, 2, (4 * classes, bits)), axis=0)
        signs = signs[rng.permutation(len(signs))][: 2 * classes]
    return (2 * signs - 1).astype(np.int8)
