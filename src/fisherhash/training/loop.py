"""The one training loop, for every method: seeds, schedules, checkpoints, resume."""

from __future__ import annotations

import json
import logging
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from fisherhash.backbones import Backbone
from fisherhash.data.augment import augment
from fisherhash.errors import FisherhashError, UsageError, unknown_name
from fisherhash.methods.base import Batch, HashMethod, Progress
from fisherhash.model.heads import Head
from fisherhash.system import storage
from fisherhash.system.progress import progress
from fisherhash.training.captured import GraphStep
from fisherhash.training.checkpoints import CHECKPOINT, is_unfinished

logger = logging.getLogger(__name__)

METRICS = "metrics.jsonl"
Optimizer = Literal["sgd", "adamw"]
Schedule = Literal["one-cycle", "cosine", "step", "constant"]
OPTIMIZERS: tuple[str, ...] = get_args(Optimizer)
SCHEDULES: tuple[str, ...] = get_args(Schedule)


@dataclass(frozen=True)
class Settings:
    """How a method is trained; equal for every method."""

    epochs: int = 40
    """Passes over the training set."""
    batch_size: int = 128
    """Images a step; the last, smaller batch of an epoch is dropped (the order changes anyway)."""
    optimizer: Optimizer = "sgd"
    """SGD with momentum 0.9, or AdamW."""
    learning_rate: float = 0.01
    """The highest learning rate of the head."""
    backbone_rate: float = 1.0
    """The backbone's learning rate as a share of the head's, when fine-tuning."""
    weight_decay: float = 5e-4
    """Of every weight matrix; biases and normalisation layers are left alone."""
    schedule: Schedule = "one-cycle"
    """Warm-up and cosine decay; cosine decay; a tenth at 60 % and 85 %; none."""
    dropout: float = 0.3
    """On the standardised features."""
    head_epochs: int = 20
    """When fine-tuning: epochs of the head alone on frozen features, before the whole network."""
    fixed_layers: int = -1
    """When fine-tuning: how many of the network's first layers keep their weights; -1 for as many
    as suit the network."""
    validation: float = 0.0
    """Share of the training images held out; mAP of each against the others is followed."""
    validation_every: int = 1
    """Epochs between two measurements of that mAP; the last epoch is always measured."""
    seed: int = 0
    """Decides initialisation, order, dropout and augmentation."""

    def __post_init__(self) -> None:
        for name, low, high in (
            ("epochs", 1, 100_000),
            ("batch_size", 1, 1_000_000),
            ("learning_rate", 1e-12, 1e3),
            ("backbone_rate", 0.0, 1e3),
            ("weight_decay", 0.0, 1e3),
            ("dropout", 0.0, 0.99),
            ("head_epochs", 0, 100_000),
            ("fixed_layers", -1, 1000),
            ("validation", 0.0, 0.9),
            ("validation_every", 1, 100_000),
            ("seed", 0, 2**32 - 1),
        ):
            value = getattr(self, name)
            whole = isinstance(low, int)
            if whole and (isinstance(value, bool) or not isinstance(value, int)):
                raise UsageError(f"{name} must be a whole number, got {value!r}")
            if not low <= value <= high:
                raise UsageError(f"{name} must be between {low:g} and {high:g}, got {value}")
        for name, known in (("optimizer", OPTIMIZERS), ("schedule", SCHEDULES)):
            if getattr(self, name) not in known:
                raise unknown_name(name, str(getattr(self, name)), known)

    def rate(self, done: float) -> float:
        """The learning rate as a share of the highest, when a share ``done`` of the steps is over.

        >>> [round(Settings().rate(x), 2) for x in (0.0, 0.25, 1.0)]
        [0.04, 1.0, 0.0]
        """
        if self.schedule == "constant":
            return 1.0
        if self.schedule == "step":
            return 1.0 if done < 0.6 else 0.1 if done < 0.85 else 0.01
        warm = 0.25 if self.schedule == "one-cycle" else 0.0
        if done < warm:
            return 0.04 + 0.96 * (1 - math.cos(math.pi * done / warm)) / 2
        return (1 + math.cos(math.pi * (done - warm) / (1 - warm))) / 2


class FrozenImages:
    """Training images as features, computed once; the backbone stays as it is."""

    def __init__(self, features: Tensor, labels: Tensor, head: Head) -> None:
        self._features = features
        self.labels = labels
        self.head = head
        self.modules: dict[str, nn.Module] = {"head": head}

    def batch_features(self, index: Tensor) -> Tensor:
        """Features (b, d) of the images at ``index``."""
        return self._features[index]

    def features(self) -> Tensor:
        """All features (N, d)."""
        return self._features

    @torch.no_grad()
    def outputs(self) -> Tensor:
        """Outputs (N, …) of the head as it is now, in evaluation mode."""
        training = self.head.training
        self.head.eval()
        outputs = self.head(self.features())
        self.head.train(training)
        return outputs


class LiveImages(FrozenImages):
    """Training images as bytes on the device; the backbone is trained with the head."""

    def __init__(self, pixels: Tensor, labels: Tensor, backbone: Backbone, head: Head) -> None:
        super().__init__(torch.empty(0), labels, head)
        self.pixels = pixels
        self.backbone = backbone
        self.modules = {"head": head, "backbone": backbone}

    def batch_features(self, index: Tensor) -> Tensor:
        """Features (b, d) of randomly augmented images, with gradient."""
        device = self.labels.device
        pixels = self.pixels[index.to(self.pixels.device)].to(device, non_blocking=True)
        images = augment(pixels).contiguous(memory_format=torch.channels_last)
        # Without the cache of casts: a captured graph must not keep a cast from before its replay.
        enabled = device.type == "cuda"
        with torch.autocast(device.type, torch.bfloat16, enabled=enabled, cache_enabled=False):
            return self.backbone(images)

    @torch.no_grad()
    def features(self) -> Tensor:
        """Features (N, d) of the images as they are, in evaluation mode."""
        training = self.backbone.training
        self.backbone.eval()
        device = self.labels.device
        parts = [
            self.backbone(chunk.to(device).contiguous(memory_format=torch.channels_last)).float()
            for chunk in self.pixels.split(256 if device.type == "cuda" else 8)
        ]
        self.backbone.train(training)
        return torch.cat(parts)


class Loop:
    """Trains one method on one set of images.

    Args:
        method: what is learned.
        images: frozen or live.
        settings: how.
        validate: measures mAP on held-out images after an epoch.
        folder: where metrics and checkpoints go; nothing is written without one.
        identity: what must be the same for a checkpoint to be continued.
        title: what the progress bar says.
    """

    def __init__(
        self,
        method: HashMethod,
        images: FrozenImages,
        settings: Settings,
        *,
        validate: Callable[[], float] | None = None,
        folder: Path | None = None,
        identity: dict[str, Any] | None = None,
        title: str = "training",
    ) -> None:
        self.method = method
        self.images = images
        self.settings = settings
        self.validate = validate
        self.folder = folder
        self.identity = identity or {}
        self.title = title
        self.device = images.labels.device
        self.size = min(settings.batch_size, len(images.labels))
        self.steps = len(images.labels) // self.size
        # A method's own weights (a classifier, say) are trained and checkpointed like the head's.
        self.modules: dict[str, nn.Module] = {**images.modules, "method": method}
        self.optimizer = _optimizer(self.modules, settings, self.device)
        self.history: list[dict[str, Any]] = []
        capture = self._capturable()
        self._run_step = GraphStep(self._step) if capture else self._step

    def run(self) -> list[dict[str, Any]]:
        """Train, from the last checkpoint where there is one; returns a row of metrics an epoch."""
        first = self.start()
        with progress(self.title, self.settings.epochs) as advance:
            advance(first)
            for epoch in range(first, self.settings.epochs):
                self.history.append(self.epoch(epoch))
                self._checkpoint(epoch)
                advance(1)
        for module in self.modules.values():
            module.eval()
        with torch.no_grad():
            self.method.finish()
        self._validate_last()
        return self.history

    def start(self) -> int:
        """Prepare the method, load a checkpoint where there is one; returns the first epoch."""
        self.images.head.dropout.p = self.settings.dropout
        with torch.no_grad():
            self.method.start(self.images)
        first = self._resume()
        for module in self.modules.values():
            module.train()
        return first

    def epoch(self, epoch: int) -> dict[str, Any]:
        """Train for one epoch; returns the means of the loss's terms, and the time."""
        began = time.perf_counter()
        # Seeded anew each epoch: a resumed run draws what the uninterrupted one would have drawn.
        seed = self.settings.seed * 1_000_003 + epoch
        torch.manual_seed(seed)
        order = torch.randperm(
            len(self.images.labels), generator=torch.Generator().manual_seed(seed)
        )
        order = order[: self.steps * self.size].view(self.steps, self.size).to(self.device)
        with torch.no_grad():
            self.method.on_epoch_start(
                Progress(epoch, self.settings.epochs, epoch * self.steps, self._total)
            )
        sums: dict[str, Tensor] = {}
        for i, index in enumerate(order):
            self._set_rate((epoch * self.steps + i) / self._total)
            for name, term in self._run_step(index).items():
                sums[name] = sums[name] + term.detach() if name in sums else term.detach().clone()
        row: dict[str, Any] = {"epoch": epoch + 1}
        row |= {name: float(value) / self.steps for name, value in sorted(sums.items())}
        if not all(math.isfinite(row[name]) for name in sums):
            raise FisherhashError(
                f"the loss became {row['loss']} in epoch {epoch + 1}; lower the learning rate "
                f"(it is {self.settings.learning_rate:g})"
            )
        row["learning_rate"] = self.settings.learning_rate * self.settings.rate(
            (epoch + 1) * self.steps / self._total
        )
        last = epoch + 1 == self.settings.epochs
        if (
            self.validate is not None
            and not last
            and (epoch + 1) % self.settings.validation_every == 0
        ):
            row["validation_map"] = self.validate()
        row["seconds"] = round(time.perf_counter() - began, 3)
        return row

    def _validate_last(self) -> None:
        """Measure what the method finished, which may encode otherwise than during training."""
        if self.validate is None or not self.history:
            return
        self.history[-1]["validation_map"] = self.validate()
        if self.folder is not None:
            storage.write_files(self.folder, {METRICS: storage.write_text(self._lines())})

    def _lines(self) -> str:
        return "".join(json.dumps(row) + "\n" for row in self.history)

    def _step(self, index: Tensor) -> dict[str, Tensor]:
        features = self.images.batch_features(index).float()
        outputs = self.images.head(features)
        batch = Batch(self.images.labels[index], index, features)
        terms = self.method(outputs, batch)
        self.optimizer.zero_grad(set_to_none=True)
        terms["loss"].backward()
        self.optimizer.step()
        with torch.no_grad():
            self.method.after_step(outputs.detach(), batch)
        return {name: term.detach() for name, term in terms.items()}

    @property
    def _total(self) -> int:
        return self.settings.epochs * self.steps

    def _set_rate(self, done: float) -> None:
        for group in self.optimizer.param_groups:
            value = group["highest"] * self.settings.rate(done)
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(value)
            else:
                group["lr"] = value

    def _capturable(self) -> bool:
        # Pixels that did not fit the device are copied in every step, which a graph cannot hold.
        on_device = not isinstance(self.images, LiveImages) or self.images.pixels.is_cuda
        return self.device.type == "cuda" and on_device and self.method.capturable

    def _checkpoint(self, epoch: int) -> None:
        if self.folder is None:
            return
        name = f"checkpoint-{epoch + 1}.safetensors"
        entry = {"epoch": epoch + 1, "file": name, "identity": self.identity}
        files = {
            METRICS: storage.write_text(self._lines()),
            name: storage.write_tensors(self._state()),
            CHECKPOINT: storage.write_text(storage.dump_json(entry)),
        }
        storage.write_files(self.folder, files)
        for old in self.folder.glob("checkpoint-*.safetensors"):
            if old.name != name:
                old.unlink()

    def _state(self) -> dict[str, Tensor]:
        state: dict[str, Tensor] = {}
        for part, module in self.modules.items():
            state |= {f"{part}.{name}": value for name, value in module.state_dict().items()}
        for number, entry in self.optimizer.state_dict()["state"].items():
            for name, value in entry.items():
                if isinstance(value, Tensor):
                    state[f"optimizer.{number}.{name}"] = value
        return state

    def _resume(self) -> int:
        if self.folder is None or not is_unfinished(self.folder):
            return 0
        checkpoint = storage.read_json(self.folder / CHECKPOINT)
        try:
            epoch = int(checkpoint["epoch"])
            state = storage.read_tensors(self.folder / checkpoint["file"])
            for part, module in self.modules.items():
                prefix = f"{part}."
                module.load_state_dict(
                    {k.removeprefix(prefix): v for k, v in state.items() if k.startswith(prefix)}
                )
            rows = (self.folder / METRICS).read_text(encoding="utf-8").splitlines()[:epoch]
            self.history = [json.loads(row) for row in rows]
        except (FisherhashError, OSError, KeyError, TypeError, ValueError, RuntimeError) as error:
            reason = " ".join(str(error).split())
            raise FisherhashError(
                f"the unfinished run in {self.folder} cannot be continued ({reason}); use "
                "--overwrite to start anew"
            ) from None
        entries: dict[int, dict[str, Tensor]] = {}
        for key, value in state.items():
            if key.startswith("optimizer."):
                _, number, name = key.split(".", 2)
                entries.setdefault(int(number), {})[name] = value.to(self.device)
        current = self.optimizer.state_dict()
        self.optimizer.load_state_dict({**current, "state": entries})
        logger.info("continuing %s after epoch %d", self.folder, epoch)
        return epoch


def _optimizer(
    modules: dict[str, nn.Module], settings: Settings, device: torch.device
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
            # A tensor, so that a captured graph reads the rate of the step it replays.
            rate = torch.tensor(highest, device=device) if cuda else highest
            group = {"params": some, "lr": rate, "highest": highest, "weight_decay": decay}
            if some:
                groups.append(group)
    if settings.optimizer == "adamw":
        return torch.optim.AdamW(groups, fused=cuda, capturable=cuda)
    return torch.optim.SGD(groups, lr=settings.learning_rate, momentum=0.9, fused=cuda)
