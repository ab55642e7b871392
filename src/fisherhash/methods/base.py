"""The contract between a method and the training loop.

A method never touches the loop, the loader, the device or the evaluation. What is needed to encode
an image lives in the head and is saved. What is needed only for training lives in the method.

The base classes check the contract around a method's own code: the ranges of its options, the
shapes it is given, and what it returns. These checks read shapes and types only, never values on
the device, so they cost nothing when a captured CUDA graph is replayed.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Iterator, Mapping
from dataclasses import Field, dataclass, fields
from importlib.metadata import EntryPoint, entry_points
from typing import Any, ClassVar, Literal, Protocol, TypeVar, dataclass_transform

import torch
from torch import Tensor, nn

from fisherhash.codes import check_bits
from fisherhash.data.augment import PLAIN, Strength
from fisherhash.errors import FisherhashError, UsageError, counted, unknown_name
from fisherhash.methods._options import convert_option
from fisherhash.model.heads import Head, LinearHead
from fisherhash.system.options import check_options, options_of


@dataclass(frozen=True)
class MethodInfo:
    """What a method is, and where it was published.

    Attributes:
        name: Its name in the registry, also the name of its file.
        title: Title of the paper.
        venue: Conference or journal.
        year: Year of publication.
        url: Where to read the paper.
        supervision: What the labels are used for.
        multilabel: Whether the method is defined for images with several labels.
    """

    name: str
    title: str
    venue: str
    year: int
    url: str
    supervision: Literal[
        "none", "pairs", "triplets", "classes", "pairs and classes", "classes, if there are any"
    ]
    multilabel: bool = True

    @property
    def needs_labels(self) -> bool:
        """Whether the method cannot be trained without labels."""
        return self.supervision not in ("none", "classes, if there are any")


@dataclass(frozen=True)
class Batch:
    """The images of one step.

    With several views of n images, b = views * n: first all images in the first view, then all in
    the second, in the same order.

    Attributes:
        labels: (b, classes) floats, 0 or 1.
        index: (b,) positions in the training set.
        features: (b, d) output of the backbone.
        views: How many augmented views of each image the rows are.
    """

    labels: Tensor
    index: Tensor
    features: Tensor
    views: int = 1

    @property
    def first(self) -> Batch:
        """The rows of the first view."""
        if self.views == 1:
            return self
        images = len(self.index) // self.views
        return Batch(self.labels[:images], self.index[:images], self.features[:images])


@dataclass(frozen=True)
class Progress:
    """How far the training is; epoch and step count from 0."""

    epoch: int
    epochs: int
    step: int
    steps: int


class TrainingSet(Protocol):
    """The whole training set, for :meth:`HashMethod.start` and :meth:`HashMethod.refresh`."""

    @property
    def labels(self) -> Tensor:
        """(N, classes) floats, 0 or 1."""
        ...

    @property
    def streamed(self) -> bool:
        """Whether the images are on disk, so that all features might not fit into memory."""
        ...

    def outputs(self) -> Tensor:
        """Return the current outputs of the head in evaluation mode, (N, output_width)."""
        ...

    def features(self) -> Tensor:
        """Return the current features of the backbone, (N, d)."""
        ...

    def feature_blocks(self) -> Iterator[Tensor]:
        """Yield the current features in blocks (n, d), in order."""
        ...


@dataclass_transform(kw_only_default=True, eq_default=False)
@dataclass(kw_only=True, eq=False, repr=False)
class CheckedOptions:
    """Turns each subclass into a dataclass, and checks its fields against their annotations.

    A method declares a hyper-parameter once, as ``margin: Positive = 1.0`` in its class body. That
    makes it a keyword of the constructor and an attribute. Whatever else a constructor must do
    belongs in ``__post_init__``, after ``super().__post_init__()``.
    """

    info: ClassVar[MethodInfo]
    bits: int
    classes: int

    def __init_subclass__(cls) -> None:
        if "__init__" in vars(cls):
            raise TypeError(f"{cls.__name__}: declare options as fields and write __post_init__")
        dataclass(kw_only=True, eq=False, repr=False)(cls)

    def __post_init__(self) -> None:
        self.bits = check_bits(self.bits)
        try:
            check_options(self)
        except UsageError as error:
            raise UsageError(f"{self.info.name}: {error}") from None


class HashMethod(CheckedOptions, nn.Module):
    """A method trained by gradient. Subclasses declare their hyper-parameters as fields.

    The loop calls the method itself, ``method(outputs, batch)``, which checks the contract around
    ``loss``. Subclasses write ``loss``, and override the other functions where they need them.

    Everything that changes during training is a buffer or a parameter, so that checkpoints store it
    and a captured CUDA graph reads it.

    Args:
        bits: Length of the codes.
        classes: Number of classes.
    """

    remembered: ClassVar[tuple[str, ...]] = ()
    """Names of the buffers that hold features or outputs of the training images. ``refresh``
    computes them again; everything else that a method has learned stays."""

    views: ClassVar[int] = 1
    """How many augmented views of each image a step has. All go through the network together, so
    batch normalisation sees all of them; outputs and batch have ``views`` times as many rows, see
    :class:`Batch`. Features that are frozen cannot be augmented: there a view is the features with
    a share of them masked (:attr:`Strength.masked`)."""

    strengths: ClassVar[tuple[Strength, ...]] = (PLAIN,)
    """How strongly each view is augmented, one entry per view."""

    codebook: ClassVar[str] = ""
    """Name of the buffer (classes, bits) with centres that are fixed before training, if there is
    one. The centres of nested lengths then share their first bits."""

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if cls.views != len(cls.strengths):
            raise TypeError(
                f"{cls.__name__}: declare one strength per view, got {len(cls.strengths)} for "
                f"{cls.views} views"
            )

    def __post_init__(self) -> None:
        nn.Module.__init__(self)  # the options, plain values, are stored already
        super().__post_init__()
        self._begun = False

    @property
    def capturable(self) -> bool:
        """Whether a step stays on the device, so that a CUDA graph can capture it."""
        return True

    @property
    def output_width(self) -> int:
        """Outputs of the head per image; override it if they are not the logits."""
        return self.bits

    def head(self, in_features: int) -> Head:
        """Return the head that this method trains."""
        return LinearHead(in_features, self.bits)

    def begin(self, train: TrainingSet) -> None:
        """Begin a stage: ``start`` in the first one, ``refresh`` in every later one.

        Fine-tuning has two stages: the head alone, then the whole network.
        """
        if self._begun:
            self.refresh(train)
        else:
            self.start(train)
            self._begun = True

    def start(self, train: TrainingSet) -> None:
        """Allocate and fill the state, once, before the first step, without gradient."""

    def refresh(self, train: TrainingSet) -> None:
        """Compute what depends on features or outputs again, before a later stage; no gradient.

        What the method has learned (centres, codes, a classifier) stays as the last stage left it.
        """

    def class_centers(self) -> Tensor | None:
        """Return the centres (classes, bits) that a class's logits are pulled to, or None."""
        return None

    def epoch_metrics(self) -> dict[str, float]:
        """Return numbers to log after an epoch, beside the means of the loss terms."""
        return {}

    def loss(self, outputs: Tensor, batch: Batch) -> dict[str, Tensor]:
        """Return the batch's loss under the key ``loss``, and other terms to log. Pure."""
        raise NotImplementedError

    def after_step(self, outputs: Tensor, batch: Batch) -> None:
        """Update the state after the optimiser's step, without gradient.

        The outputs are those that the loss was computed from. Of several views, outputs and batch
        are the first one.
        """

    def on_epoch_start(self, progress: Progress) -> None:
        """Update the state before each epoch, without gradient."""

    def finish(self) -> None:
        """Make final what the head needs to encode, after the last epoch, without gradient."""

    def forward(self, outputs: Tensor, batch: Batch) -> dict[str, Tensor]:
        """Return ``loss(outputs, batch)``, with arguments and result checked.

        Raises:
            UsageError: A shape is wrong, or ``loss`` did not return what it must; the message
                names the method and what was expected.
        """
        name, b = self.info.name, len(batch.index)
        for what, tensor, shape in (
            ("outputs", outputs, (b, self.output_width)),
            ("labels", batch.labels, (b, self.classes)),
            ("index", batch.index, (b,)),
            ("features", batch.features, (b, batch.features.shape[-1])),
        ):
            if tensor.shape != shape:
                raise UsageError(f"{name}: {what} must have shape {shape}, got {(*tensor.shape,)}")
        if batch.views != self.views or b % self.views:
            raise UsageError(
                f"{name}: the batch must have {self.views} views of each image, got {b} rows of "
                f"{batch.views} views"
            )
        terms = self.loss(outputs, batch)
        if not isinstance(terms, dict) or "loss" not in terms:
            found = f"the keys {', '.join(terms)}" if isinstance(terms, dict) else repr(terms)
            raise UsageError(f"{name}: loss() must return a dict with the key 'loss', got {found}")
        for key, term in terms.items():
            if not isinstance(term, Tensor) or term.ndim:
                found = f"shape {(*term.shape,)}" if isinstance(term, Tensor) else repr(term)
                raise UsageError(
                    f"{name}: every term of loss() must be a tensor with one number, shape (); "
                    f"'{key}' is {found}"
                )
        wanted = torch.is_grad_enabled() and outputs.requires_grad
        if wanted and not terms["loss"].requires_grad:
            raise UsageError(
                f"{name}: the term 'loss' has no gradient; compute it from the outputs without "
                "detach() or no_grad()"
            )
        return terms


class FeatureMethod(CheckedOptions):
    """A method with a closed form or its own solver, fitted on features.

    Callers use ``fit``, which checks the contract around ``solve``. Subclasses write ``solve``.

    Args:
        bits: Length of the codes.
        classes: Number of classes; 0 without labels.
    """

    classes: int = 0

    def solve(self, features: Tensor, labels: Tensor | None, *, seed: int) -> Head:
        """Return a head fitted on features (N, d) and labels (N, classes)."""
        raise NotImplementedError

    def fit(self, features: Tensor, labels: Tensor | None = None, *, seed: int = 0) -> Head:
        """Return ``solve(features, labels, seed=seed)``, with arguments and result checked.

        Args:
            features: (N, d).
            labels: (N, classes), where the method uses them.
            seed: Of everything that is drawn at random.

        Raises:
            UsageError: A shape is wrong, or ``solve`` did not return a head of these bits.
            FisherhashError: The features, or the head, hold NaN or infinite values.
        """
        name = self.info.name
        if features.ndim != 2 or not features.numel():
            raise UsageError(
                f"{name}: features must have shape (N, d), neither 0, got {(*features.shape,)}"
            )
        if labels is not None and labels.shape != (len(features), self.classes):
            raise UsageError(
                f"{name}: labels must have shape {(len(features), self.classes)}, one row per "
                f"image, got {(*labels.shape,)}"
            )
        # In blocks: the features may be a file that is larger than the memory.
        finite = [torch.isfinite(block).all(1) for block in features.split(16_384)]
        broken = torch.nonzero(~torch.cat(finite))[:, 0]
        if len(broken):
            raise FisherhashError(
                f"{name}: features hold NaN or infinite values in "
                f"{counted(len(broken), 'row')}, the first is row {int(broken[0])}"
            )
        head = self.solve(features, labels, seed=seed)
        if not isinstance(head, Head):
            raise UsageError(f"{name}: solve() must return a Head, got {type(head).__name__}")
        expected = (features.shape[1], self.bits)
        if (head.in_features, head.bits) != expected:
            raise UsageError(
                f"{name}: solve() must return a head from {expected[0]} features to {expected[1]} "
                f"bits, got one from {head.in_features} to {head.bits}"
            )
        for key, values in head.state_dict().items():
            if not torch.isfinite(values).all():
                raise FisherhashError(f"{name}: '{key}' of the head holds NaN or infinite values")
        return head


AnyMethod = HashMethod | FeatureMethod
_REGISTRY: dict[str, type[AnyMethod]] = {}
M = TypeVar("M", bound=type[AnyMethod])


def register(method: M) -> M:
    """Register a method under ``info.name``; a class decorator."""
    name = method.info.name
    if name in _REGISTRY and _REGISTRY[name].__qualname__ != method.__qualname__:
        raise ValueError(f"two methods are called '{name}': {_REGISTRY[name]} and {method}")
    _REGISTRY[name] = method
    return method


@functools.cache
def _installed() -> Mapping[str, EntryPoint]:
    """Return the methods of installed packages, by name."""
    return {one.name: one for one in entry_points(group="fisherhash.methods")}


def registry() -> Mapping[str, type[AnyMethod]]:
    """Return every registered method by name, and those of installed packages."""
    others = {name: find(name) for name in _installed() if name not in _REGISTRY}
    return dict(sorted({**others, **_REGISTRY}.items()))


def find(name: str) -> type[AnyMethod]:
    """Return the class of a method.

    Args:
        name: A name in the registry, the name of an entry point ``fisherhash.methods`` of an
            installed package, or ``module:Class``.

    Raises:
        UsageError: There is no such method; the message names the nearest one.
    """
    if name in _REGISTRY:
        return _REGISTRY[name]
    entry = _installed().get(name)
    if entry is None and ":" in name:
        entry = EntryPoint(name, name, "fisherhash.methods")
    if entry is None:
        raise unknown_name("method", name, registry())
    folder = os.getcwd()
    try:
        # A method may be a file in the current folder, of which a command knows nothing.
        sys.path.append(folder)
        found = entry.load()
    except (ImportError, AttributeError) as error:
        raise UsageError(f"the method '{name}' cannot be imported: {error}") from error
    finally:
        sys.path.remove(folder)
    if not (isinstance(found, type) and issubclass(found, (HashMethod, FeatureMethod))):
        raise UsageError(
            f"'{name}' is no method; a method is a subclass of fisherhash.methods.HashMethod or "
            "FeatureMethod"
        )
    return found


def hyper_parameters(method: type[AnyMethod]) -> dict[str, Field[Any]]:
    """Return a method's own hyper-parameters by name, with their defaults."""
    return {one.name: one for one in fields(method) if one.name not in ("bits", "classes")}


def create(
    name: str, *, bits: int, classes: int, options: Mapping[str, Any] | None = None
) -> AnyMethod:
    """Build a method by name.

    Args:
        name: Its name, see :func:`find`.
        bits: Length of the codes.
        classes: Number of classes.
        options: Hyper-parameters; values may be text, as from the command line.

    Raises:
        UsageError: A name or a value is wrong; the message names the nearest name.
    """
    method = find(name)
    own = hyper_parameters(method)
    known = {option.name: option for option in options_of(method) if option.name in own}
    values: dict[str, Any] = {}
    for key, value in (options or {}).items():
        if key not in known:
            raise unknown_name(f"option of {name}", key, known)
        values[key] = convert_option(name, known[key], value)
    return method(bits=bits, classes=classes, **values)


def resolved_options(method: AnyMethod) -> dict[str, Any]:
    """Return every hyper-parameter's value as JSON."""
    return {key: getattr(method, key) for key in hyper_parameters(type(method))}


def sign(values: Tensor) -> Tensor:
    """Return -1 and +1, never 0: +1 exactly where a code's bit would be 1 (value > 0).

    >>> sign(torch.tensor([-2.0, 0.0, 0.5])).tolist()
    [-1.0, -1.0, 1.0]
    """
    return torch.where(values > 0, 1.0, -1.0).to(values.dtype)
