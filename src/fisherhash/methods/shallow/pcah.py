"""PCA hashing: the signs of the principal components."""

from torch import Tensor

from fisherhash.methods.base import FeatureMethod, MethodInfo, register
from fisherhash.methods.shallow._features import principal
from fisherhash.model.heads import Head, LinearHead


@register
class PCAH(FeatureMethod):
    """u = V^T (f - mean), with V the K principal directions of the features.

    Later bits follow directions of small variance and carry little; ``itq``, ``isohash`` and
    ``hashing_baseline`` rotate V to spread the variance.

    Args:
        bits: K, at most the width of the features.
        classes: Not used.
    """

    info = MethodInfo(
        name="pcah",
        title="Semi-Supervised Hashing for Scalable Image Retrieval",
        venue="CVPR",
        year=2010,
        url="https://doi.org/10.1109/CVPR.2010.5539994",
        supervision="none",
    )

    def solve(self, features: Tensor, labels: Tensor | None, *, seed: int) -> Head:
        """Return a head fitted on features (N, d); labels are not used."""
        found = principal(features, self.bits, name="pcah")
        return LinearHead.from_matrix(found.directions.T.float().cpu(), found.mean.float().cpu())
