"""Shallow methods as scikit-learn transformers: one class per method, generated from its options.

``from fisherhash.training.estimators import ITQ`` is a transformer like any other:
``make_pipeline(StandardScaler(), ITQ(bits=64)).fit_transform(x)`` returns bits. ``encode`` packs
them into the codes that an index takes.
"""

from __future__ import annotations

import inspect
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from sklearn.base import BaseEstimator, TransformerMixin
from sklearn.utils.multiclass import check_classification_targets, type_of_target
from sklearn.utils.validation import check_is_fitted, validate_data

from fisherhash import methods
from fisherhash.codes import pack
from fisherhash.errors import UsageError
from fisherhash.methods import FeatureMethod
from fisherhash.methods.shallow._features import ROWS_AT_ONCE
from fisherhash.model.heads import Head

MOST_BITS = 64
"""Bits where none are given and the features have at least as many dimensions."""


class ShallowHasher(TransformerMixin, BaseEstimator):
    """A shallow method as a transformer; see its subclasses.

    Attributes:
        head_: What was fitted.
        bits_: The number of bits.
        classes_: The classes of the labels, where there are any.
    """

    method: ClassVar[str]
    options: ClassVar[dict[str, Any]]
    bits: int | None
    random_state: int

    def fit(self, X: ArrayLike, y: ArrayLike | None = None) -> ShallowHasher:
        """Fit the hash functions.

        Args:
            X: (n, d) features.
            y: (n,) classes or (n, classes) 0 and 1, for methods that learn from them.

        Returns:
            Itself.
        """
        rows = self._checked(X, ensure_min_samples=2)
        labels = self._labels(y, len(rows)) if self._supervised() else None
        options = {name: getattr(self, name) for name in self.options}
        anchors = options.get("anchors", MOST_BITS + 1)
        limit = min(MOST_BITS, rows.shape[1], len(rows) - 1, anchors - 1)
        self.bits_ = max(1, limit) if self.bits is None else self.bits
        classes = 0 if labels is None else labels.shape[1]
        found = methods.create(self.method, bits=self.bits_, classes=classes, options=options)
        if not isinstance(found, FeatureMethod):
            raise UsageError(f"{self.method} is trained by gradient, not fitted on features")
        try:
            with torch.no_grad():
                self.head_: Head = found.fit(
                    torch.from_numpy(np.ascontiguousarray(rows, np.float32)),
                    labels,
                    seed=self.random_state,
                ).eval()
        except UsageError as error:
            # What scikit-learn's users catch.
            raise ValueError(str(error)) from error
        return self

    def decision_function(self, X: ArrayLike) -> NDArray[np.float32]:
        """Return the logits (n, bits) of features (n, d); a bit is 1 where its logit is > 0."""
        check_is_fitted(self)
        rows = np.ascontiguousarray(self._checked(X, reset=False), np.float32)
        with torch.inference_mode():
            logits = [
                self.head_.logits(torch.from_numpy(rows[i : i + ROWS_AT_ONCE]))
                for i in range(0, len(rows), ROWS_AT_ONCE)
            ]
        return torch.cat(logits).numpy()

    def _checked(self, X: ArrayLike, **options: Any) -> NDArray[Any]:
        checked: Any = validate_data
        return checked(self, X, dtype=[np.float32, np.float64], **options)

    def transform(self, X: ArrayLike) -> NDArray[np.uint8]:
        """Return the bits (n, bits), 0 or 1, of features (n, d)."""
        return (self.decision_function(X) > 0).astype(np.uint8)

    def encode(self, X: ArrayLike) -> NDArray[np.uint8]:
        """Return the packed codes (n, bytes) of features (n, d), as an index takes them."""
        return pack(self.decision_function(X))

    def get_feature_names_out(self, input_features: Any = None) -> NDArray[np.object_]:
        """Return one name per bit."""
        check_is_fitted(self)
        return np.array([f"bit{k}" for k in range(self.bits_)], dtype=object)

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.target_tags.required = self._supervised()
        tags.transformer_tags.preserves_dtype = []
        return tags

    @classmethod
    def _supervised(cls) -> bool:
        return methods.find(cls.method).info.needs_labels

    def _labels(self, y: ArrayLike | None, count: int) -> torch.Tensor:
        """Return the labels (n, classes), 0 or 1."""
        if y is None:
            raise ValueError(
                f"{type(self).__name__} learns from labels: requires y to be passed, but the "
                "target y is None"
            )
        check_classification_targets(y)
        found = np.asarray(y)
        if len(found) != count:
            raise ValueError(f"there are {count} rows of features and {len(found)} labels")
        if type_of_target(y) == "multilabel-indicator":
            self.classes_ = np.arange(found.shape[1])
            return torch.from_numpy(found.astype(np.float32))
        self.classes_, numbers = np.unique(found.ravel(), return_inverse=True)
        return torch.eye(len(self.classes_))[torch.from_numpy(numbers.reshape(-1))]


def _transformer(name: str, method: type[FeatureMethod]) -> type[ShallowHasher]:
    """Return the transformer of a method; its constructor takes the method's options."""
    own = {key: field.default for key, field in methods.hyper_parameters(method).items()}
    defaults: dict[str, Any] = {"bits": None, **own, "random_state": 0}

    def __init__(self: ShallowHasher, **options: Any) -> None:  # noqa: N807
        for key in options.keys() - defaults.keys():
            raise TypeError(f"{method.__name__} has no option '{key}'")
        for key, default in defaults.items():
            setattr(self, key, options.get(key, default))

    # scikit-learn reads the options off the constructor's signature.
    kind = inspect.Parameter.KEYWORD_ONLY
    parameters = [inspect.Parameter(key, kind, default=value) for key, value in defaults.items()]
    first = inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD)
    __init__.__signature__ = inspect.Signature([first, *parameters])  # type: ignore[attr-defined]
    members = {"__doc__": method.__doc__, "__module__": __name__, "__init__": __init__}
    members |= {"method": name, "options": own}
    return type(method.__name__, (ShallowHasher,), members)


TRANSFORMERS: dict[str, type[ShallowHasher]] = {
    name: _transformer(name, method)
    for name, method in methods.registry().items()
    if issubclass(method, FeatureMethod)
}
"""Every shallow method's transformer, by the method's name."""

# By class name too, so that they can be imported and unpickled.
globals().update({made.__name__: made for made in TRANSFORMERS.values()})


def __getattr__(name: str) -> Any:
    raise AttributeError(
        f"there is no transformer '{name}'; there are "
        + ", ".join(sorted(made.__name__ for made in TRANSFORMERS.values()))
    )
