"""The place of a backbone in a model that takes vectors instead of images."""

from __future__ import annotations

from torch import Tensor

from fisherhash.backbones.base import Backbone
from fisherhash.data.preprocessing import Preprocessing
from fisherhash.errors import UsageError


class VectorInput(Backbone):
    """No network: the features are the user's own vectors.

    Args:
        dimensions: d, the width of the vectors.
    """

    name = "features"
    title = "none: the vectors are the features"

    def __init__(self, dimensions: int) -> None:
        if dimensions < 1:
            raise UsageError(f"vectors have at least one dimension, got {dimensions}")
        super().__init__(Preprocessing())
        self.features = dimensions

    def extract(self, images: Tensor) -> Tensor:
        """Refuse images.

        Raises:
            UsageError: always.
        """
        raise UsageError(f"this model takes vectors of {self.features} dimensions, not images")
