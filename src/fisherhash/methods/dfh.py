"""Deep Fisher Hashing (Li, Pei, Zha, van Gemert, BMVC 2019)."""

from typing import Annotated, Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fisherhash.errors import UsageError, unknown_name
from fisherhash.methods import _centers
from fisherhash.methods._codebooks import far_apart
from fisherhash.methods._options import NotNegative, PositiveInt
from fisherhash.methods._pairs import (
    MemoryMethod,
    TrainingLabels,
    class_proportions,
    quantization_error,
)
from fisherhash.methods.base import Batch, MethodInfo, Progress, TrainingSet, register, sign
from fisherhash.system.options import Range, Tuned

DFH_PARTS = ("pair", "margin", "intra", "inter")


@register
class DFH(MemoryMethod):
    """Deep Fisher Hashing: a pairwise margin, and one binary centre per class, pushed far apart.

    With u_i the K logits of image i, U all of them (K x N), b_i in {-1, 1}^K its code, C the class
    centres (K x M, binary), y_i the class proportions (one-hot, or 1/m on each of m labels; Y all
    of them, M x N) and theta_ij = u_i . u_j / 2 the paper minimises (Eq. 8)

        phi * [ sum_similar log(1 + e^(m - theta_ij)) + sum_dissimilar log(1 + e^(m + theta_ij)) ]
        + mu * sum_i ||b_i - C y_i||^2 + nu * ||C^T C - A||_F^2 + sum_i ||b_i - u_i||^2

    with A = K (2 I - J), by turns:

    * **U**: back-propagation through the pair term and ||b_i - u_i||^2, with B and C fixed;
    * **B** = sgn(mu C Y + U), which is the exact minimum;
    * **C**: ``exact`` coordinate descent on the binary problem (default), ``gradient`` descent on a
      relaxed V as printed in the paper, or the step of the ``released`` code, for comparison.

    The code of an image is sgn(u).

    How we read the paper where it is silent, ambiguous or wrong:

    * Centres are indexed by class: the sums of the inter-class term run to M, and I and J in A are
      M x M. The paper prints N and J_K.
    * The inter-class term is the quadratic one (Eq. 6, 7). The paper calls it equivalent to
      maximising the sum of distances (Eq. 5), but that sum is as large for centres that collapse
      onto v and -v. The released step uses the sum nevertheless.
    * Pairs are batch x all N training images, each of the latter with its last output. (The paper
      sums over all pairs but trains by batches.) One pass before the first step fills this memory.
      The pair of an image with itself is left out.
    * Sums become means: the pair term over its pairs, the quantisation term over images. Its
      weight ``quantization`` is psi of Eq. 3. In the scaling of Eq. 8 that is phi = 1 / (2 psi N)
      with pairs in both orders, or 1 / (psi N) with each pair once: only the batch's side of a pair
      has a gradient here. The term appears once (the paper writes it twice).
    * psi and eta are constant penalties; the paper calls them Lagrange multipliers.
    * The centre step is solved on the whole training set, at the start of every epoch, with
      B = sgn(mu C Y + U) from the remembered outputs, ``alternations`` times C then B.
    * V starts at the class means of the outputs of the first pass (weighted by y for several
      labels), C at sgn(V). The B-step uses C, not V. When the whole network is trained after the
      head, C and V go on from where the head's training left them.
    * sgn(0) is -1, the bit of a logit that is not greater than 0; no bit is ever 0.
    * The paper states no step size for the gradient step; ours backtracks.
    * Without the pair part the quantisation term has weight 1, because it has nothing to balance.
    * The pair part alone is DPSH with eta / N = psi, loss for loss. It needs DPSH's weight and rate
      too: psi = 0.1, which suits the method with centres, holds outputs at their first signs where
      no centre moves them, and a mean over pairs has a small gradient. On 1,440 images (24 bits,
      frozen features, mAP of held-out images) psi 0.01 at rate 0.05 has 0.618, like DPSH; psi 0.1
      has 0.327 at rate 0.01 and 0.281 at 0.05; psi 0.01 at rate 0.01 has 0.262.

    The following options go beyond the paper and are off by default. They address a weakness of its
    codes: when training ends, the images of a class share one code, and all other classes are
    equally far. That is right at the top of a ranking, but it orders nothing among the images that
    lie between two classes.

    * ``initial_centers="graded"``: classes that look similar get nearer centres than others. Off
      the diagonal A = K (a G - (1 - a) / (M - 1)), with G the cosines between the class means of
      the first features, measured from the mean of all, and a the ``affinity``. -1/(M-1) is what M
      equally distant codes can reach; -1, as printed, cannot be reached for M > 2. C starts at the
      best of several local minima of ||C^T C - A||_F^2.
    * ``initial_centers="far-apart"``: C starts at a code book whose words are far from each other.
    * ``positive_weight`` balances the pairs: with M classes only one pair in M is similar.
    * ``separation``: the U-step above pulls an image to its own centre, and no centre pushes it
      away. With weight lambda it also minimises the cross-entropy between y_i and the softmax,
      over the centres c, of sqrt(K) cos(u_i, c), so that an image is nearer to its own centre than
      to any other. With ``separation_margin`` q the scores are sqrt(K) (cos(u_i, c) - q) for the
      centres of the image's own classes. Without it the term has hardly any gradient once the
      order is right.

    Two techniques are open to every method and belong to the training settings: ``outputs``, more
    outputs than bits, from which the bits are cut; and the class step, which gives new images the
    code sgn(u + mu s C p), the B-step above with estimated classes (``training/class_step.py``).

    The paper tunes its weights by cross-validation and prints none of them. The defaults below were
    checked on a held-out fifth of CIFAR-10's 5,000 training images, at 12 and 48 bits
    (``results/dfh-design-validation.json``).

    Args:
        bits: K.
        classes: M.
        parts: Which parts of the objective are on: ``pair``, ``margin``, ``intra``, ``inter``,
            joined by commas. The paper's ablation switches them.
        margin: m; the paper chooses it from {0.5, 1, 1.5, 2}.
        quantization: psi, the weight of ||b - u||^2 against the pair term.
        intra: mu; a bit of b follows its class centre unless u disagrees by more than mu.
        inter: nu, in units of N / M^2, so that one value suits data of any size: the pull of a
            class on its centre grows with N / M images, the push of the other centres with M.
            The released step has its own weight, 1, unless this is 0.
        relaxation: eta, of the gradient centre step.
        center_step: How C is found.
        alternations: How often C and B take turns at the start of an epoch.
        sweeps: Passes over the classes in an exact step, which ends early when nothing flips.
        gradient_steps: Steps on V in a gradient step.
        positive_weight: Weight of a similar pair against a dissimilar one; 0 balances them, so that
            each kind has half of the weight.
        initial_centers: The signs of the class ``means``, as in the paper; a ``far-apart`` code
            book that does not depend on the data; or ``graded`` by how similar the classes look.
        affinity: a, how much graded centres follow the classes' similarity; 0 is not at all.
        separation: lambda, the weight of being nearer to the own centre than to the others.
        separation_margin: q, by how much nearer, as a difference of cosines; without effect where
            ``separation`` is 0.
    """

    info = MethodInfo(
        name="dfh",
        title="Push for Quantization: Deep Fisher Hashing",
        venue="BMVC",
        year=2019,
        url="https://arxiv.org/abs/1909.00206",
        supervision="pairs and classes",
    )

    parts: str = "pair,margin,intra,inter"
    margin: Annotated[float, Range(least=0), Tuned(0.0, 4.0)] = 1.0
    quantization: Annotated[float, Range(least=0), Tuned(3e-4, 3.0, "log")] = 0.1
    intra: Annotated[float, Range(least=0), Tuned(0.05, 5.0, "log")] = 1.0
    inter: Annotated[float, Range(least=0), Tuned(0.01, 10.0, "log")] = 2.0
    relaxation: Annotated[float, Range(least=0), Tuned(0.01, 10.0, "log")] = 1.0
    center_step: Annotated[
        Literal["exact", "gradient", "released"], Tuned(choices=("exact", "gradient"))
    ] = "exact"
    alternations: PositiveInt = 2
    sweeps: PositiveInt = 5
    gradient_steps: PositiveInt = 50
    positive_weight: NotNegative = 1.0
    initial_centers: Annotated[
        Literal["means", "far-apart", "graded"], Tuned(choices=("far-apart", "graded"))
    ] = "means"
    affinity: Annotated[float, Range(least=0, most=1), Tuned(0.0, 1.0)] = 0.5
    separation: Annotated[float, Range(least=0), Tuned(0.0, 10.0)] = 0.0
    separation_margin: Annotated[float, Range(least=0), Tuned(0.0, 0.6)] = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        on = _check_parts(self.parts)
        self._pair = "pair" in on
        self._margin = self.margin if "margin" in on else 0.0
        self._mu = self.intra if "intra" in on else 0.0
        self._nu = self.inter if "inter" in on else 0.0
        self._nu_scaled = self._nu
        self._quantization = self.quantization if self._pair else 1.0
        self._positive_weight = self.positive_weight
        self.centers = nn.Buffer(torch.ones(self.bits, self.classes))
        self.relaxed = nn.Buffer(torch.zeros(self.bits, self.classes))
        # A of the inter-class term.
        self.target = nn.Buffer(torch.from_numpy(_centers.opposed(self.bits, self.classes)))
        self.flips = nn.Buffer(torch.zeros((), dtype=torch.int64))

    @property
    def capturable(self) -> bool:
        """The released centre step runs on the host."""
        return self.center_step != "released"

    def start(self, train: TrainingSet) -> None:
        """Fill the memory of outputs, and set the initial centres."""
        self.memory.fill(train)
        outputs, labels = self.memory.outputs, self.memory.labels
        self._nu_scaled = self._nu * len(outputs) / max(self.classes, 1) ** 2
        if self.positive_weight == 0:
            similar = labels.similar_share()
            self._positive_weight = (1.0 - similar) / similar if 0 < similar < 1 else 1.0
        if self.initial_centers == "far-apart":
            self.relaxed = far_apart(self.classes, self.bits).T.to(outputs)
        elif self.initial_centers == "graded":
            means = _numpy(_feature_means(train, labels))
            target = _centers.graded(means, self.bits, self.affinity)
            self.relaxed = torch.from_numpy(_centers.code_book(target, means)).to(outputs)
            self.target.copy_(torch.from_numpy(target))
        else:
            self.relaxed = labels.means(outputs)
        self.centers = sign(self.relaxed)

    def class_centers(self) -> Tensor | None:
        """Return C; None without centres."""
        return self.centers.T if self._mu > 0 else None

    def binary(self, outputs: Tensor, proportions: Tensor) -> Tensor:
        """Take the B-step: return the codes (n, bits) nearest to outputs and class centres."""
        return self._nearest(outputs, proportions @ self.centers.T)

    def _nearest(self, outputs: Tensor, centers: Tensor) -> Tensor:
        return sign(self._mu * centers + outputs.detach().float())

    def _codes(self, part: slice) -> Tensor:
        """Take the B-step for a part of the training set."""
        mixed = self.memory.labels.mix(self.centers, shares=True, among=part)
        return self._nearest(self.memory.outputs[part], mixed)

    def loss(self, outputs: Tensor, batch: Batch) -> dict[str, Tensor]:
        """Return the U-step's objective on one batch."""
        proportions = class_proportions(batch.labels)
        target = self.binary(outputs, proportions)
        quantization = quantization_error(outputs, target)
        terms = {"quantization": quantization, "loss": self._quantization * quantization}
        if self._pair:
            terms["pair"] = self.memory.pair_loss(
                outputs, batch, margin=self._margin, positive_weight=self._positive_weight
            )
            terms["loss"] = terms["loss"] + terms["pair"]
        if self.separation > 0 and self._mu > 0:
            # The norm of a centre is sqrt(K), and cosines are scaled by it.
            scores = F.normalize(outputs.float(), dim=1) @ self.centers
            own = batch.labels.float() * self.bits**0.5
            scores = scores - self.separation_margin * own
            terms["separation"] = F.cross_entropy(scores, proportions)
            terms["loss"] = terms["loss"] + self.separation * terms["separation"]
        return terms

    def after_step(self, outputs: Tensor, batch: Batch) -> None:
        """Store the outputs; the released centre step also runs here, on the batch alone."""
        super().after_step(outputs, batch)
        if self.center_step == "released" and self._mu > 0:
            proportions = class_proportions(batch.labels)
            codes = self.binary(outputs, proportions)
            S, T = codes.T @ proportions, proportions.T @ proportions
            problem = self._problem(codes.numel(), S, T, 1.0 if self._nu else 0.0)
            self._move(problem.linear_sweep(_numpy(self.centers)))

    def on_epoch_start(self, progress: Progress) -> None:
        """Take the C-step over the whole training set, alternating with the B-step."""
        self.flips.zero_()
        if self._mu == 0 or self.center_step == "released":
            return
        labels = self.memory.labels
        T = labels.gram(shares=True)
        for _ in range(self.alternations):
            S = labels.collect_parts(self._codes, shares=True)
            bits = self.memory.outputs.numel()
            problem = self._problem(bits, S, T, self._nu_scaled)
            if self.center_step == "exact":
                C, flips = problem.exact_sweeps(_numpy(self.centers), self.sweeps)
                self._move(C)
                if not flips:
                    break
            else:
                V = problem.descend(_numpy(self.relaxed), self.gradient_steps)
                self.relaxed.copy_(torch.from_numpy(V))
                self._move(_centers.signs(V))

    def _move(self, centers: _centers.Matrix) -> None:
        moved = torch.from_numpy(centers).to(self.centers)
        self.flips += (moved != self.centers).sum()
        self.centers.copy_(moved)

    def epoch_metrics(self) -> dict[str, float]:
        """Return the bits of centres flipped in the epoch, and the centres' Hamming distances."""
        if self._mu == 0 or self.classes < 2:
            return {}
        C = self.centers
        different = ~torch.eye(self.classes, dtype=torch.bool, device=C.device)
        distances = (self.bits - C.T @ C)[different] / 2
        return {
            "flips": float(self.flips),
            "center_distance": float(distances.mean()),
            "center_distance_min": float(distances.min()),
        }

    def _problem(self, codes: int, S: Tensor, T: Tensor, inter: float) -> _centers.CenterProblem:
        return _centers.CenterProblem(
            _numpy(S),
            _numpy(T),
            _numpy(self.target),
            codes=codes,
            intra=self._mu,
            inter=inter,
            relaxation=self.relaxation,
        )


def _feature_means(train: TrainingSet, labels: TrainingLabels) -> Tensor:
    """Return the class means (d, classes) of the standardised features, weighted by shares."""
    if not train.streamed:
        return labels.means(_standardised(train.features()))
    # In blocks, with 64 bits: sums of squares of a million features.
    count = 0
    sums: list[Tensor] = []
    for block in train.feature_blocks():
        values = block.double()
        shares = class_proportions(train.labels[count : count + len(block)]).double()
        parts = [values.sum(0), values.square().sum(0), values.T @ shares, shares.sum(0)]
        sums = [a + b for a, b in zip(sums, parts, strict=True)] if sums else parts
        count += len(block)
    mean, weight = sums[0] / count, sums[3].clamp_min(1e-12)
    deviation = (sums[1] / count - mean.square()).clamp_min(0.0).sqrt()
    scale = torch.where(deviation > 1e-6, 1.0 / deviation.clamp_min(1e-6), 0.0)
    return ((sums[2] / weight - mean[:, None]) * scale[:, None]).float()


def _standardised(features: Tensor) -> Tensor:
    """Return features (N, d) with mean 0, and deviation 1 where they vary at all."""
    features = features.float() - features.float().mean(0)
    deviation = features.std(0, correction=0)
    return features * torch.where(deviation > 1e-6, 1.0 / deviation.clamp_min(1e-6), 0.0)


def _numpy(values: Tensor) -> _centers.Matrix:
    return values.detach().cpu().numpy().astype(np.float64)


def _check_parts(parts: str) -> set[str]:
    on = {part.strip() for part in parts.split(",") if part.strip()}
    for part in on:
        if part not in DFH_PARTS:
            raise unknown_name("part of dfh", part, DFH_PARTS)
    if not on & {"pair", "intra"}:
        raise UsageError("dfh: nothing is left to train; parts need at least 'pair' or 'intra'")
    if "margin" in on and "pair" not in on:
        raise UsageError("dfh: the part 'margin' belongs to the part 'pair', which is off")
    if "inter" in on and "intra" not in on:
        raise UsageError("dfh: the part 'inter' moves centres that only the part 'intra' uses")
    return on
