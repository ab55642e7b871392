"""Supervised Hashing for Image Retrieval via Image Representation Learning (AAAI 2014)."""

import logging
from dataclasses import dataclass
from typing import Annotated, Self

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from fisherhash.methods._centers import Matrix
from fisherhash.methods._options import NotNegative, PositiveInt, Tuned
from fisherhash.methods._pairs import class_proportions
from fisherhash.methods.base import Batch, HashMethod, MethodInfo, TrainingSet, register
from fisherhash.model.heads import Head

logger = logging.getLogger(__name__)


@register
class CNNH(HashMethod):
    """CNN Hashing (Xia, Pan, Lai, Liu, Yan): first find codes that fit the pairs, then learn them.

    Stage 1, before training: with S_ij = 1 for similar and -1 for dissimilar images,

        min_H || S - (1/K) H H^T ||_F^2,   H in [-1, 1]^(N x K),

    by Newton steps on one entry at a time. With L = H H^T - K S, and F = K^2 times the objective,

        F' = 4 L_i. H_.j,   F'' = 4 (H_.j . H_.j + H_ij^2 + L_ii),   H_ij <- clip(H_ij - F' / F''),

    in random order; the targets are sgn(H). Stage 2: the network learns the target h_i of image i,

        min sum_i || tanh(u_i) - h_i ||^2.

    CNNH+ (``plus``) adds the classes as outputs beside the code. The code of an image is sgn(u).

    How we read the paper, and what differs:

    * Images with equal labels have equal rows of S, so they share one row of H, weighted by their
      number. The objective is the paper's, with that constraint. S and L are never formed; the step
      needs only H^T W H, and sums over the rows that share a label. Single-label data are thus
      solved with one row per class.
    * Images with several labels have many different label rows. Stage 1 is solved on the
      ``representatives`` most frequent ones. Every other row then takes the sign of the h that fits
      those best, by least squares with H fixed: h = K (H^T W H)^-1 H^T W s.
    * A step is accepted only if the objective falls. The change is computed exactly for each entry
      (it is a polynomial of degree 4 in the entry). Where F'' is not positive, the step goes to the
      bound.
    * Target codes follow the index in the training set, whatever the order of the batches.
    * Stage 2 takes the sum over bits and the mean over images. tanh and the squares are our
      reading of "regress".
    * An image without labels is similar to no other, so it has no target and adds no loss.
    * CNNH+: classes are a softmax with cross-entropy (proportions 1/m for m labels) on normalised
      features. Codes and classes share only the backbone, so this changes the codes only where the
      backbone is fine-tuned.

    Args:
        bits: K.
        classes: M.
        sweeps: Passes over H in stage 1; they end early when one hardly lowers the objective. The
            paper and its re-implementations use 5 to 10.
        representatives: Label rows in stage 1 for images with several labels; our choice.
        plus: Whether to train CNNH+.
        class_weight: Of the cross-entropy in CNNH+; our choice.
    """

    info = MethodInfo(
        name="cnnh",
        title="Supervised Hashing for Image Retrieval via Image Representation Learning",
        venue="AAAI",
        year=2014,
        url="https://ojs.aaai.org/index.php/AAAI/article/view/8952",
        supervision="pairs",
    )

    sweeps: Annotated[PositiveInt, Tuned(3, 40, "log")] = 10
    representatives: PositiveInt = 2048
    plus: bool = False
    class_weight: NotNegative = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        self.classifier: nn.Linear | None = None
        self.targets = nn.Buffer(torch.zeros(1, self.bits))
        self.rows = nn.Buffer(torch.empty(0, dtype=torch.int64))

    def head(self, in_features: int) -> Head:
        """Return one linear layer; CNNH+ also has class outputs, used only in training."""
        if self.plus:
            self.classifier = nn.Linear(in_features, self.classes)
        return super().head(in_features)

    def start(self, train: TrainingSet) -> None:
        """Run stage 1: find the target code of every label row, and the row of every image."""
        labels = train.labels.cpu().numpy() > 0
        groups = LabelRows.of(labels)
        # Drawn from torch's generator, so that it depends on the training's seed.
        rng = np.random.default_rng(int(torch.randint(2**31, ())))
        H = target_codes(groups, self.bits, self.sweeps, self.representatives, rng)
        distinct = len(np.unique(H, axis=0))
        if groups.single and distinct < len(H):
            logger.warning(
                "cnnh: %d classes share %d target codes of %d bits; use more bits",
                *(len(H), distinct, self.bits),
            )
        device = train.labels.device
        # The additional row of zeros is what -1 (no label) points to.
        self.targets = F.pad(torch.from_numpy(H).float(), (0, 0, 0, 1)).to(device)
        self.rows = torch.from_numpy(groups.row_of).to(device)

    def loss(self, outputs: Tensor, batch: Batch) -> dict[str, Tensor]:
        """Return the loss of stage 2 on one batch."""
        rows = self.rows[batch.index]
        errors = (torch.tanh(outputs.float()) - self.targets[rows]).square().sum(1)
        known = (rows >= 0).to(errors)
        regression = (errors * known).sum() / known.sum().clamp_min(1.0)
        terms = {"codes": regression, "loss": regression}
        if self.classifier is not None:
            features = batch.features.float()
            scores = self.classifier(F.layer_norm(features, features.shape[1:]))
            wanted = class_proportions(batch.labels.to(scores))
            entropy = -(wanted * F.log_softmax(scores, 1)).sum() / known.sum().clamp_min(1.0)
            terms |= {"classes": entropy, "loss": regression + self.class_weight * entropy}
        return terms


@dataclass(frozen=True)
class LabelRows:
    """The distinct rows of a label matrix, most frequent first, without the all-zero row.

    Attributes:
        labels: (R, classes) the rows.
        counts: (R,) images per row.
        row_of: (N,) the row of each image, -1 without a label.
        single: Whether no image has two labels.
    """

    labels: NDArray[np.bool_]
    counts: Matrix
    row_of: NDArray[np.int64]
    single: bool

    @classmethod
    def of(cls, labels: NDArray[np.bool_]) -> Self:
        """Group the rows of labels (N, classes)."""
        known = np.flatnonzero(labels.any(1))
        packed = np.packbits(labels[known], axis=1)
        _, first, inverse, counts = np.unique(
            packed, axis=0, return_index=True, return_inverse=True, return_counts=True
        )
        order = np.argsort(-counts, kind="stable")
        row_of = np.full(len(labels), -1, dtype=np.int64)
        row_of[known] = np.argsort(order)[inverse.reshape(-1)]
        rows = labels[known[first[order]]]
        single = int(rows.sum(1).max(initial=1)) == 1
        return cls(rows, counts[order].astype(np.float64), row_of, single)


def target_codes(
    groups: LabelRows, bits: int, sweeps: int, representatives: int, rng: np.random.Generator
) -> Matrix:
    """Run stage 1: return codes (R, bits) in {-1, 1} of all label rows."""
    count = len(groups.labels)
    solved = count if groups.single else min(count, representatives)
    codes = np.empty((count, bits))
    if not solved:
        return codes
    sharing = Sharing(groups.labels[:solved])
    weights = groups.counts[:solved] / max(groups.counts[:solved].mean(), 1.0)
    H = rng.uniform(-1.0, 1.0, (solved, bits))
    gains: list[float] = []
    for _ in range(sweeps):
        gains.append(newton_sweep(H, weights, sharing, rng))
        if gains[-1] <= 1e-4 * gains[0]:
            break
    codes[:solved] = np.where(H > 0, 1.0, -1.0)
    if solved < count:
        known = codes[:solved]
        inverse = np.linalg.pinv(known.T @ (weights[:, None] * known))
        for row in range(solved, count):
            near = sharing.with_labels(groups.labels[row])
            pull = 2.0 * (weights[near] @ known[near]) - weights @ known  # H^T W s
            codes[row] = np.where(inverse @ pull > 0, 1.0, -1.0)
    return codes


class Sharing:
    """Which label rows share a label, without a matrix of all pairs. labels: (R, classes)."""

    def __init__(self, labels: NDArray[np.bool_]) -> None:
        self.labels = labels
        self._members = [np.flatnonzero(column) for column in labels.T]

    def with_labels(self, row: NDArray[np.bool_]) -> NDArray[np.int64]:
        """Return the numbers of the rows that share a label with ``row`` (classes,)."""
        parts = [self._members[label] for label in np.flatnonzero(row)]
        return parts[0] if len(parts) == 1 else np.unique(np.concatenate(parts))


def newton_sweep(H: Matrix, weights: Matrix, sharing: Sharing, rng: np.random.Generator) -> float:
    """Take one Newton step on every entry of H (R, K), in place; return by how much F fell.

    F = sum_rs w_r w_s (h_r . h_s - K S_rs)^2, with w the weights (R,).
    """
    K = H.shape[1]
    Q = H.T @ (weights[:, None] * H)
    total = weights @ H
    fallen = 0.0
    for i in rng.permutation(len(H)):
        w, h = float(weights[i]), H[i].copy()
        near = sharing.with_labels(sharing.labels[i])
        # Q and the sum of w_r S_ir h_r, both without row i itself.
        others = Q - w * np.outer(h, h)
        pull = 2.0 * (weights[near] @ H[near]) - total - w * h
        slopes = others @ h - K * pull  # sum over r of w_r L_ir H_r, without row i
        own = float(h @ h) - K  # L_ii
        for j in rng.permutation(K):
            x, slope, curve = float(h[j]), float(slopes[j]), float(others[j, j])
            first = slope + w * own * x
            second = curve + w * (2.0 * x * x + own)
            aim = x - first / second if second > 0 else -np.sign(first)
            step = min(max(aim, -1.0), 1.0) - x
            new_own = own + 2.0 * step * x + step * step
            change = 2.0 * w * step * (2.0 * slope + step * curve)
            change += w * w * (new_own * new_own - own * own)
            if change < 0:
                h[j] = x + step
                slopes += step * others[:, j]
                own = new_own
                fallen -= change
        total += w * (h - H[i])
        Q = others + w * np.outer(h, h)
        H[i] = h
    return fallen
