"""The training loop of every method: seeds, learning rates, checkpoints, resuming."""

from __future__ import annotations

import json
import logging
import math
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import KW_ONLY, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fisherhash.errors import DivergedError, FisherhashError
from fisherhash.methods.base import HashMethod, Progress
from fisherhash.model.folder import is_unfinished
from fisherhash.system import storage
from fisherhash.system.progress import progress
from fisherhash.training.checkpoints import (
    checkpoint_files,
    read_checkpoint,
)
from fisherhash.training.class_step import SideClassifier
from fisherhash.training.distributed import current_ranks
from fisherhash.training.images import FrozenImages
from fisherhash.training.settings import Settings

logger = logging.getLogger(__name__)

METRICS = "metrics.jsonl"


@dataclass(eq=False)
class Loop:
    """Trains one method on one set of images.

    Attributes:
        method: the method to train.
        images: the training images, frozen or live.
        settings: how to train.
        finish: makes the final head from the trained one, after the method's own ``finish``.
        validate: measures held-out images after an epoch; its numbers become part of the row.
        folder: stores metrics and checkpoints; without one nothing is written.
        identity: what must match before a checkpoint is continued.
        title: label of the progress bar.
        history: one row of metrics per epoch.
    """

    method: HashMethod
    images: FrozenImages
    settings: Settings
    _: KW_ONLY
    finish: Callable[[], object] | None = None
    validate: Callable[[], dict[str, Any]] | None = None
    folder: Path | None = None
    identity: dict[str, Any] = field(default_factory=dict)
    title: str = "training"
    history: list[dict[str, Any]] = field(default_factory=list, init=False)

    def __post_init__(self) -> None:
        images, settings = self.images, self.settings
        self.device = images.labels.device
        self.size = min(settings.batch_size, len(images.labels))
        self.steps = len(images.labels) // self.size
        self._total = settings.epochs * self.steps
        # A method's own weights (such as a classifier) are trained and saved like the head's.
        self.modules = nn.ModuleDict({**images.modules, "method": self.method})
        self.classifier: SideClassifier | None = None
        # Where there is a network to train; frozen features are what they are.
        if settings.classifier_weight > 0 and "backbone" in images.modules:
            self.classifier = SideClassifier(images, settings)
            self.modules["classifier"] = self.classifier
        self.ranks = current_ranks()
        self.optimizer = _optimizer(self.modules, settings, self.device)
        self._parameters = [p for group in self.optimizer.param_groups for p in group["params"]]
        self._run_step = GraphStep(self._step) if self._capturable() else self._step

    def run(self) -> list[dict[str, Any]]:
        """Train, from the last checkpoint if there is one; returns one row of metrics per epoch."""
        first = self.start()
        with progress(self.title, self.settings.epochs) as advance, self.whole_batches():
            advance(first)
            for epoch in range(first, self.settings.epochs):
                self.history.append(self.epoch(epoch))
                self.ranks.on_first(partial(self._checkpoint, epoch))
                advance(1)
        self.modules.eval()
        with torch.no_grad():
            self.method.finish()
            if self.finish is not None:
                self.finish()
        # The finished method may encode differently than during training.
        if self.validate is not None and self.history:
            self.history[-1] |= self.validate()
            if self.folder is not None:
                files = {METRICS: self._metrics()}
                self.ranks.on_first(partial(storage.write_files, self.folder, files))
        return self.history

    def whole_batches(self) -> AbstractContextManager[None]:
        """Let a network that is trained see the whole batch where processes share it."""
        network = self.images.modules.get("backbone")
        return nullcontext() if network is None else self.ranks.whole_batches(network, self.size)

    def start(self) -> int:
        """Prepare the method and load a checkpoint if there is one; returns the first epoch."""
        self.images.head.dropout.p = self.settings.dropout
        with torch.no_grad():
            self.method.begin(self.images)
        first = self._resume()
        self.ranks.agree(self.modules)
        self.modules.train()
        return first

    def epoch(self, epoch: int) -> dict[str, Any]:
        """Train for one epoch; returns the mean of each loss term, and the time."""
        began = time.perf_counter()
        # Seeded in each epoch, so that a resumed run draws what an uninterrupted one draws.
        seed = self.settings.seed * 1_000_003 + epoch
        torch.manual_seed(seed)
        order = self.images.rows.order(torch.Generator().manual_seed(seed))
        order = order[: self.steps * self.size].view(self.steps, self.size)
        with torch.no_grad():
            self.method.on_epoch_start(
                Progress(epoch, self.settings.epochs, epoch * self.steps, self._total)
            )
        # A GPU does not add in the same order every time, so states computed on each drift apart.
        self.ranks.agree(self.method)
        sums: dict[str, Tensor] = {}
        share = self.images.share(self.size)
        for i, index in enumerate(self.images.rows.steps(order, share, self.device)):
            self._set_rate((epoch * self.steps + i) / self._total)
            for name, term in self._run_step(index).items():
                sums[name] = sums[name] + term.detach() if name in sums else term.detach().clone()
        row: dict[str, Any] = {"epoch": epoch + 1}
        # Together, because each copy from a GPU waits for it.
        totals = torch.stack([value.double().reshape(()) for value in sums.values()]).tolist()
        row |= {name: total / self.steps for name, total in sorted(zip(sums, totals, strict=True))}
        if not all(math.isfinite(row[name]) for name in sums):
            raise DivergedError(
                f"the loss became {row['loss']} in epoch {epoch + 1}; lower the learning rate "
                f"(it is {self.settings.learning_rate:g})"
            )
        row |= self.method.epoch_metrics()
        row["learning_rate"] = self.settings.learning_rate * self.settings.rate(
            (epoch + 1) * self.steps / self._total
        )
        last = epoch + 1 == self.settings.epochs
        due = (epoch + 1) % self.settings.validation_every == 0
        if self.validate is not None and due and not last:
            row |= self.validate()
        row["seconds"] = round(time.perf_counter() - began, 3)
        return row

    def _metrics(self) -> str:
        return "".join(json.dumps(row) + "\n" for row in self.history)

    def _step(self, index: Tensor) -> dict[str, Tensor]:
        batch = self.images.batch(index, self.method.strengths)
        outputs = self.images.head(batch.features)
        terms = self.method(outputs, batch)
        if self.classifier is not None:
            inputs = self.images.head.standardise(batch.features)
            terms = self.classifier(terms, inputs, batch.labels)
        self.optimizer.zero_grad(set_to_none=True)
        terms["loss"].backward()
        self.ranks.share_gradients(self._parameters)
        self.optimizer.step()
        with torch.no_grad():
            self.method.after_step(outputs.detach()[: len(index)], batch.first)
        return {name: term.detach() for name, term in terms.items()}

    def _set_rate(self, done: float) -> None:
        for group in self.optimizer.param_groups:
            value = group["highest"] * self.settings.rate(done)
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(value)
            else:
                group["lr"] = value

    def _capturable(self) -> bool:
        # Pixels that do not fit on the device are copied in every step, which no graph can hold.
        on_device = self.images.rows.on_device
        alone = self.ranks.size == 1
        return self.device.type == "cuda" and alone and on_device and self.method.capturable

    def _checkpoint(self, epoch: int) -> None:
        if self.folder is None:
            return
        files = checkpoint_files(epoch + 1, self._state(), self.identity)
        storage.write_files(self.folder, {METRICS: self._metrics(), **files})
        for old in self.folder.glob("checkpoint-*.safetensors"):
            if old.name not in files:
                old.unlink()

    def _state(self) -> dict[str, Tensor]:
        state = dict(self.modules.state_dict())
        for number, entry in self.optimizer.state_dict()["state"].items():
            for name, value in entry.items():
                if isinstance(value, Tensor):
                    state[f"optimizer.{number}.{name}"] = value
        return state

    def _resume(self) -> int:
        folder = self.folder
        if folder is None or not self.ranks.on_first(partial(is_unfinished, folder)):
            return 0

        def read() -> tuple[int, dict[str, Tensor], list[dict[str, Any]]]:
            checkpoint, state = read_checkpoint(folder)
            epoch = int(checkpoint["epoch"])
            rows = (folder / METRICS).read_text(encoding="utf-8").splitlines()[:epoch]
            return epoch, state, [json.loads(row) for row in rows]

        try:
            epoch, state, self.history = self.ranks.on_first(read)
            parts = {k: v for k, v in state.items() if not k.startswith("optimizer.")}
            self.modules.load_state_dict(parts)
        except (FisherhashError, OSError, KeyError, TypeError, ValueError, RuntimeError) as error:
            reason = " ".join(str(error).split())
            raise FisherhashError(
                f"the unfinished run in {self.folder} cannot be continued ({reason}); use "
                "--overwrite to start over"
            ) from None
        entries: dict[int, dict[str, Tensor]] = {}
        for key in state.keys() - parts.keys():
            _, number, name = key.split(".", 2)
            entries.setdefault(int(number), {})[name] = state[key].to(self.device)
        current = self.optimizer.state_dict()
        self.optimizer.load_state_dict({**current, "state": entries})
        logger.info("continuing %s after epoch %d", self.folder, epoch)
        return epoch


def _optimizer(
    modules: nn.ModuleDict, settings: Settings, device: torch.device
) -> torch.optim.Optimizer:
    groups = []
    cuda = device.type == "cuda"
    for name, module in modules.items():
        highest = settings.learning_rate * (settings.backbone_rate if name == "backbone" else 1.0)
        parameters = [p for p in module.parameters() if p.requires_grad]
        for decay, some in (
            (settings.weight_decay, [p for p in parameters if p.ndim > 1]),
            (0.0, [p for p in parameters if p.ndim <= 1]),
        ):
            # A tensor, so that a captured graph reads the current rate at every replay.
            rate = torch.tensor(highest, device=device) if cuda else highest
            group = {"params": some, "lr": rate, "highest": highest, "weight_decay": decay}
            if some:
                groups.append(group)
    if settings.optimizer == "adamw":
        return torch.optim.AdamW(groups, fused=cuda, capturable=cuda)
    return torch.optim.SGD(groups, lr=settings.learning_rate, momentum=0.9, fused=cuda)


class GraphStep:
    """A step captured once as a CUDA graph and replayed without launch overhead.

    The first steps run eagerly. They train as usual and warm up what a capture needs.

    Args:
        step: maps an index (b,) on the device to the terms of the loss; every tensor it reuses
            between calls must stay at the same address.
    """

    warm_up = 4

    def __init__(self, step: Callable[[Tensor], dict[str, Tensor]]) -> None:
        self.step = step
        self.calls = 0
        self.index: Tensor | None = None
        self.graph: torch.cuda.CUDAGraph | None = None
        self.terms: dict[str, Tensor] = {}
        self.stream = torch.cuda.Stream()

    def __call__(self, index: Tensor) -> dict[str, Tensor]:
        """Run one step; the next call overwrites the returned terms."""
        self.calls += 1
        if self.calls <= self.warm_up:
            self.stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self.stream):
                terms = self.step(index)
            torch.cuda.current_stream().wait_stream(self.stream)
            return terms
        if self.graph is None:
            self.index = index.clone()
            self.graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graph):
                self.terms = self.step(self.index)
        if self.index is not None:
            self.index.copy_(index)
        self.graph.replay()
        return self.terms
