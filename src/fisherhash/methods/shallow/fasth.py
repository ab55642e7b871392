"""Fast supervised hashing with decision trees (Lin et al., CVPR 2014)."""

import importlib.util
from typing import Annotated, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fisherhash.errors import FisherhashError
from fisherhash.methods._options import PositiveInt
from fisherhash.methods.base import FeatureMethod, MethodInfo, register
from fisherhash.methods.shallow._affinity import (
    best_flips,
    drawn_pairs,
    needed,
    spectral_bit,
)
from fisherhash.model.heads import ArrayHead, Head
from fisherhash.system.options import Range, Tuned


@register
class FastH(FeatureMethod):
    """Two steps per bit: infer the bit of the training images, then learn trees that predict it.

    The bit maximises h^T R h, R = K S - sum of b b^T over the earlier bits, where b is what the
    trees predict, so that later bits correct earlier mistakes. Then a boosted ensemble of small
    decision trees learns the bit.

    What differs from the paper: a bit is inferred from the top eigenvector of R, as in the authors'
    spectral variant, by best single flips, in place of graph cuts on blocks; past ``sample`` images
    only a random sample is used; boosting is AdaBoost, and each tree sees a random share of the
    features. The authors' graph cuts are a compiled library that could not be run, so only the
    start of a bit is compared with their code.

    Args:
        bits: K.
        classes: M.
        trees: Trees per bit.
        depth: Splits from the root of a tree to a leaf.
        sample: The most images.
    """

    info = MethodInfo(
        name="fasth",
        title="Fast Supervised Hashing with Decision Trees for High-Dimensional Data",
        venue="CVPR",
        year=2014,
        url="https://arxiv.org/abs/1404.1561",
        supervision="pairs",
    )

    trees: PositiveInt = 20
    depth: Annotated[int, Range(1, 12), Tuned(2, 6)] = 4
    sample: PositiveInt = 2000

    def solve(self, features: Tensor, labels: Tensor | None, *, seed: int) -> Head:
        """Return a head fitted on features (N, d) and labels (N, classes)."""
        if importlib.util.find_spec("sklearn") is None:
            raise FisherhashError("fasth needs scikit-learn: pip install 'fisherhash[train]'")
        labels = needed(labels, "fasth")
        generator = torch.Generator().manual_seed(seed)
        rows, S = drawn_pairs(labels, self.sample, generator)
        # A tree sorts single features: column by column they are read twice as fast.
        inputs = np.asfortranarray(features[rows].float().cpu().numpy())
        shape, inner = (self.bits, self.trees), 2**self.depth - 1
        trees = {
            "columns": torch.zeros(*shape, inner, dtype=torch.long),
            "thresholds": torch.zeros(*shape, inner),
            "votes": torch.zeros(*shape, inner + 1),
        }
        R = self.bits * S
        for bit in range(self.bits):
            wanted = best_flips(R, spectral_bit(R))
            voted = self._boost(trees, bit, inputs, wanted.cpu().numpy(), seed)
            predicted = torch.from_numpy(np.where(voted > 0, 1.0, -1.0)).to(S)
            R.addr_(predicted, predicted, alpha=-1.0)
        return ArrayHead("trees", features.shape[1], self.bits, trees)

    def _boost(
        self,
        trees: dict[str, Tensor],
        bit: int,
        inputs: NDArray[np.float32],
        wanted: NDArray[np.float64],
        seed: int,
    ) -> NDArray[np.float64]:
        """Fit the trees of one bit by AdaBoost, into their tables; return their votes (n,)."""
        from sklearn.tree import DecisionTreeClassifier

        weight, voted = np.full(len(inputs), 1.0 / len(inputs)), np.zeros(len(inputs))
        for number in range(self.trees):
            tree: Any = DecisionTreeClassifier(
                max_depth=self.depth,
                max_features="sqrt",
                random_state=(seed * 1_000_003 + bit * 1009 + number) % 2**32,
            ).fit(inputs, wanted, sample_weight=weight, check_input=False)
            predicted = tree.predict(inputs, check_input=False)
            wrong = weight[predicted != wanted].sum()
            vote = 0.5 * np.log((1.0 - wrong + 1e-9) / (wrong + 1e-9))
            _store({k: table[bit, number] for k, table in trees.items()}, tree, vote)
            voted += vote * predicted
            weight = weight * np.exp(-vote * wanted * predicted)
            weight /= weight.sum()
            if wrong <= 1e-12:
                break
        return voted


def _store(tables: dict[str, Tensor], tree: Any, vote: float) -> None:
    """Write a fitted tree into its tables, filled up to full depth."""
    found = tree.tree_
    columns, thresholds, votes = (tables[name] for name in ("columns", "thresholds", "votes"))
    inner = len(columns)
    places = [(0, 0)]
    while places:
        node, at = places.pop()
        leaf = found.children_left[node] < 0
        if at >= inner:
            values = found.value[node][0]
            votes[at - inner] = vote * float(tree.classes_[values.argmax()])
            continue
        if not leaf:
            columns[at] = int(found.feature[node])
            thresholds[at] = float(found.threshold[node])
        left = node if leaf else found.children_left[node]
        right = node if leaf else found.children_right[node]
        places += [(left, 2 * at + 1), (right, 2 * at + 2)]
