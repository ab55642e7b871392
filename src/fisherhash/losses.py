"""Losses for any training loop: ``fisherhash.losses.DHN(scale=0.5)(outputs, labels)``.

They are the methods that need no state of the training set, under the names of their classes. A
code is then the signs of the outputs: bit k is 1 where output k is greater than 0.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fisherhash.errors import UsageError
from fisherhash.methods import Batch, HashMethod, create, registry

_HOOKS = ("__post_init__", "head", "start", "refresh", "after_step", "on_epoch_start", "finish")


class HashLoss(nn.Module):
    """The loss of a method, as a module.

    Args:
        method: Its name in the registry.
        options: Its hyper-parameters that differ from their defaults.

    Raises:
        UsageError: The name or an option is wrong; the message names the nearest one.
    """

    def __init__(self, method: str, **options: object) -> None:
        super().__init__()
        self.method, self.options = method, options
        create(method, bits=1, classes=1, options=options)  # are the options right?

    def forward(self, outputs: Tensor, labels: Tensor) -> Tensor:
        """Return the loss of one batch, a tensor with one number.

        Args:
            outputs: (batch, bits) of the network's last layer, one per bit.
            labels: (batch,) numbers of the classes, or (batch, classes) 0 and 1.
        """
        if outputs.ndim != 2 or len(labels) != len(outputs):
            raise UsageError(
                f"outputs must have shape (batch, bits) and labels one row for each, got "
                f"{(*outputs.shape,)} and {(*labels.shape,)}"
            )
        rows = (labels if labels.ndim == 2 else F.one_hot(labels.long())).to(outputs)
        size: dict[str, Any] = {"bits": outputs.shape[1], "classes": rows.shape[1]}
        batch = Batch(rows, torch.arange(len(rows), device=rows.device), outputs)
        method = create(self.method, **size, options=self.options)
        if not isinstance(method, HashMethod):
            raise UsageError(f"{self.method} is not trained by gradient, so it has no loss")
        return method(outputs, batch)["loss"]

    def extra_repr(self) -> str:
        """Return the method and the options that were given."""
        return ", ".join([self.method, *(f"{k}={v}" for k, v in self.options.items())])


def _loss(name: str, method: type[HashMethod]) -> type[HashLoss]:
    def __init__(self: HashLoss, **options: object) -> None:  # noqa: N807
        HashLoss.__init__(self, name, **options)

    members = {"__init__": __init__, "__doc__": method.__doc__, "__module__": __name__}
    return type(method.__name__, (HashLoss,), members)


LOSSES: dict[str, type[HashLoss]] = {
    name: _loss(name, method)
    for name, method in registry().items()
    if issubclass(method, HashMethod)
    and method.views == 1
    and all(getattr(method, hook) is getattr(HashMethod, hook) for hook in _HOOKS)
}
"""Every such loss, by the method's name."""

globals().update({made.__name__: made for made in LOSSES.values()})


def __getattr__(name: str) -> Any:
    raise AttributeError(
        f"there is no loss '{name}'; there are "
        + ", ".join(sorted(made.__name__ for made in LOSSES.values()))
    )
