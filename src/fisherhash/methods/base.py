"""The contract between a method and the training loop.

A method never touches the loop, the loader, the device or the evaluation. What is needed to encode
an image lives in the head and is saved; what is needed only to train lives in the method.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Protocol, TypeVar, get_type_hints

import torch
from torch import Tensor, nn

from fisherhash.codes import check_bits
from fisherhash.errors import UsageError, unknown_name
from fisherhash.model.heads import Head, LinearHead


@dataclass(frozen=True)
class MethodInfo:
    """What a method is, and where it comes from.

    Attributes:
        name: the registry's word, also the file's name.
        title: the paper's title.
        venue: where it appeared.
        year: when.
        url: where to read it.
        supervision: what the labels are used for.
        multilabel: whether the method is defined for images with several labels.
        fit: ``gradient`` (trained by the loop) or ``closed-form`` (fitted on features).
    """

    name: str
    title: str
    venue: str
    year: int
    url: str
    supervision: Literal["none", "pairs", "triplets", "classes", "pairs and classes"]
    multilabel: bool
    fit: Literal["gradient", "closed-form"]


@dataclass(frozen=True)
class Batch:
    """One step's images as a method sees them.

    Attributes:
        labels: (b, classes) floats, 0 or 1.
        index: (b,) positions in the training set.
        features: (b, d) the backbone's output.
    """

    labels: Tensor
    index: Tensor
    features: Tensor


@dataclass(frozen=True)
class Progress:
    """How far the training is, both counted from 0."""

    epoch: int
    epochs: int
    step: int
    steps: int


class TrainingSet(Protocol):
    """The whole training set, for :meth:`HashMethod.start`."""

    @property
    def labels(self) -> Tensor:
        """(N, classes) floats, 0 or 1."""
        ...

    def outputs(self) -> Tensor:
        """(N, …) outputs of the head as it is now, in evaluation mode."""
        ...

    def features(self) -> Tensor:
        """(N, d) features of the backbone as it is now."""
        ...


class HashMethod(nn.Module):
    """A method trained by gradient. Subclasses take keyword-only hyper-parameters after these two.

    Everything that changes during training is a buffer, so that checkpoints hold it and a captured
    CUDA graph sees it.
    """

    info: ClassVar[MethodInfo]
    capturable: bool = True
    """Whether a step stays on the device, so that a CUDA graph can hold it."""

    def __init__(self, *, bits: int, classes: int) -> None:
        super().__init__()
        self.bits = check_bits(bits)
        self.classes = classes

    def head(self, in_features: int) -> Head:
        """The head this method trains."""
        return LinearHead(in_features, self.bits)

    def start(self, train: TrainingSet) -> None:
        """Before the first step of a stage, without gradient: allocate and fill the state.

        Fine-tuning has two stages, the head alone and the whole network: what the second must not
        lose or draw anew (targets, a classifier) is kept from the first.
        """

    def loss(self, outputs: Tensor, batch: Batch) -> dict[str, Tensor]:
        """The batch's loss under the key ``loss``; other keys are logged. Changes nothing."""
        raise NotImplementedError

    def after_step(self, outputs: Tensor, batch: Batch) -> None:
        """After the optimiser's step, without gradient; outputs are those the loss saw."""

    def on_epoch_start(self, progress: Progress) -> None:
        """Before each epoch, without gradient."""

    def finish(self) -> None:
        """After the last epoch, without gradient: what the head must hold to encode is final."""


class FeatureMethod:
    """A method with a closed form or its own solver, fitted on features."""

    info: ClassVar[MethodInfo]

    def __init__(self, *, bits: int, classes: int = 0) -> None:
        self.bits = check_bits(bits)
        self.classes = classes

    def fit(self, features: Tensor, labels: Tensor | None = None, *, seed: int = 0) -> Head:
        """Features (N, d), labels (N, classes) where the method uses them, to a fitted head."""
        raise NotImplementedError


AnyMethod = HashMethod | FeatureMethod
_REGISTRY: dict[str, type[AnyMethod]] = {}
M = TypeVar("M", bound=type[AnyMethod])


def register(method: M) -> M:
    """Class decorator: make a method known under ``info.name``."""
    name = method.info.name
    if name in _REGISTRY and _REGISTRY[name].__qualname__ != method.__qualname__:
        raise ValueError(f"two methods are called '{name}': {_REGISTRY[name]} and {method}")
    _REGISTRY[name] = method
    return method


def registry() -> Mapping[str, type[AnyMethod]]:
    """Every registered method by name."""
    return dict(sorted(_REGISTRY.items()))


def find(name: str) -> type[AnyMethod]:
    """The class of a method."""
    if name not in _REGISTRY:
        raise unknown_name("method", name, _REGISTRY)
    return _REGISTRY[name]


def hyper_parameters(method: type[AnyMethod]) -> dict[str, inspect.Parameter]:
    """A method's own hyper-parameters by name, with their defaults."""
    parameters = inspect.signature(method.__init__).parameters
    return {k: p for k, p in parameters.items() if k not in ("self", "bits", "classes")}


def create(
    name: str, *, bits: int, classes: int, options: Mapping[str, Any] | None = None
) -> AnyMethod:
    """Build a method by name; an unknown option is an error that names the nearest one.

    Option values may be text, as they come from the command line.
    """
    method = find(name)
    known = hyper_parameters(method)
    hints = get_type_hints(method.__init__)
    values: dict[str, Any] = {}
    for key, value in (options or {}).items():
        if key not in known:
            raise unknown_name(f"option of {name}", key, known)
        values[key] = _convert(name, key, value, hints[key])
    build: Callable[..., AnyMethod] = method
    return build(bits=bits, classes=classes, **values)


def resolved_options(method: AnyMethod) -> dict[str, Any]:
    """Every hyper-parameter's value as JSON; a method stores each under its own name."""
    return {key: getattr(method, key) for key in hyper_parameters(type(method))}


def _convert(method: str, key: str, value: Any, kind: Any) -> Any:
    if not isinstance(value, str) or kind is str:
        return value
    choices = getattr(kind, "__args__", ())
    if choices and all(isinstance(c, str) for c in choices):
        if value not in choices:
            raise unknown_name(f"value of {method}'s option {key}", value, choices)
        return value
    if kind is bool:
        words = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}
        if value.lower() not in words:
            raise UsageError(f"{method}: {key} must be true or false, got '{value}'")
        return words[value.lower()]
    try:
        return (int if kind is int else float)(value)
    except ValueError:
        what = "a whole number" if kind is int else "a number"
        raise UsageError(f"{method}: {key} must be {what}, got '{value}'") from None


def sign(values: Tensor) -> Tensor:
    """-1 and +1, never 0: +1 exactly where a code's bit would be 1 (value > 0).

    >>> sign(torch.tensor([-2.0, 0.0, 0.5])).tolist()
    [-1.0, -1.0, 1.0]
    """
    return torch.where(values > 0, 1.0, -1.0).to(values.dtype)
