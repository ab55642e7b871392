"""The result of a training: the hasher, what is known of it, and its measurements."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fisherhash import methods
from fisherhash.data.computing import Skipped, skipped_csv
from fisherhash.data.pixels import PixelBank
from fisherhash.data.protocols import Split
from fisherhash.data.sources import Collection
from fisherhash.errors import UsageError
from fisherhash.evaluation import Evaluation
from fisherhash.evaluation.looking import NeighbourAgreement
from fisherhash.methods import HashMethod
from fisherhash.model.hasher import Hasher
from fisherhash.model.head import FinishedHead
from fisherhash.model.outer_heads import ClassStepHead
from fisherhash.system import storage
from fisherhash.training.checkpoints import discard_checkpoint
from fisherhash.training.class_step import ClassStep
from fisherhash.training.loop import METRICS
from fisherhash.training.measuring import SPLIT_FILE, WAYS, encode_heads, measure

SKIPPED_FILE = "skipped.csv"
UNSEEN_MAP = "mAP on classes that a second training held out"
"""The line of a model card."""


@dataclass
class Trained:
    """The result of a training.

    Attributes:
        hasher: the hasher.
        method: the method that trained it.
        collection: the images.
        split: how they were split; None without labels.
        history: one row of metrics per epoch.
        skipped: the images that could not be read.
        seconds: wall time per stage.
        finetuned: whether the backbone was trained too.
        features_by: the kind of the runtime that computed the features of the training images.
        evaluation: its measurement, if it was requested.
        agreement: of its codes with its features inside a class, likewise.
        unseen: the measurement of a second training on classes that this one held out.
        step: the head with the class step, whatever the hasher uses; None where there is none.
        others: the same training with each of the ``endings`` of :func:`fit`, in their order.
    """

    hasher: Hasher
    method: HashMethod | methods.FeatureMethod
    collection: Collection
    split: Split | None
    history: list[dict[str, Any]] = field(default_factory=list)
    skipped: list[Skipped] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)
    finetuned: bool = False
    features_by: str = ""
    evaluation: Evaluation | None = None
    agreement: NeighbourAgreement | None = None
    unseen: Evaluation | None = None
    step: ClassStepHead | None = None
    others: list[Trained] = field(default_factory=list)

    def evaluate(self, *, bank: PixelBank | None = None) -> Evaluation:
        """mAP of the split's queries against its database; ``bank`` holds their pixels."""
        found = self.evaluations([("hamming", self.hasher.head)], bank=bank)
        return found[0]

    def measurements(
        self, step: ClassStep | None = None, *, bank: PixelBank | None = None
    ) -> dict[str, Evaluation]:
        """mAP by Hamming distance and with real-valued queries, from one pass over the images.

        Args:
            step: also measure with this class step.
            bank: the pixels of the split's images.

        Returns:
            ``hamming`` and ``real``; with a step also ``step_hamming`` and ``step_real``. Codes
            without a Hamming distance have ``real`` alone.
        """
        head = self.plain_head
        ways = [(way, head) for way in WAYS if head.hamming or way == "real"]
        names = [way for way, _ in ways]
        if step is not None and self.step is not None:
            stepped = self.step.with_step(step.weight, step.sharpness).finished()
            ways += [(way, stepped) for way in WAYS]
            names += [f"step_{way}" for way in WAYS]
        return dict(zip(names, self.evaluations(ways, bank=bank), strict=True))

    @property
    def plain_head(self) -> FinishedHead:
        """The head without the class step."""
        return self.hasher.head if self.step is None else self.step.inner.finished()

    def evaluations(
        self, ways: Sequence[tuple[str, FinishedHead]], *, bank: PixelBank | None = None
    ) -> list[Evaluation]:
        """Measure heads on the split's queries and database.

        Args:
            ways: ``hamming`` or ``real`` (-valued queries), and the head.
            bank: the pixels of the split's images.
        """
        if self.split is None:
            raise UsageError(
                f"'{self.collection.name}' has no labels, so there is nothing to measure"
            )
        heads: dict[FinishedHead, bool] = {}
        for way, head in ways:
            heads[head] = heads.get(head, False) or way == "real"
        # Features of frozen weights are on disk or worth storing; those of new weights are not.
        encoded = encode_heads(
            self.hasher,
            self.collection,
            self.split,
            heads,
            cached=not self.finetuned,
            bank=bank if self.finetuned else None,
        )
        by_head, known = {one.head: one for one in encoded}, {item.name for item in self.skipped}
        self.skipped += [s for one in encoded[:1] for s in one.skipped if s.name not in known]
        top = self.split.top
        return [measure(by_head[head], top=top, real_queries=way == "real") for way, head in ways]

    def describe(self, identity: dict[str, Any]) -> None:
        """Note how the hasher was made, for its config and its card.

        Args:
            identity: of the training, see :class:`~fisherhash.training.jobs.Job`.
        """
        split, info = self.split, self.method.info
        kind = "vectors" if self.collection.kind == "vectors" else "images"
        data: dict[str, Any] = {"name": self.collection.name, kind: len(self.collection)}
        if split is not None:
            known = split.to_json()
            data |= {k: known[k] for k in ("protocol", "checksum", "train", "query", "database")}
        if kind == "images":
            data["skipped"] = len(self.skipped)
        settings = {"finetune": identity["finetune"], **identity["settings"]}
        self.hasher.details = {
            "reference": f"{info.title}, {info.venue} {info.year}, {info.url}",
            "data": data,
            "options": identity["options"],
            "settings": settings if self.history else {"seed": identity["settings"]["seed"]},
            **({"nested": identity["nested"]} if "nested" in identity else {}),
            "results": {f"seconds for {k}": round(v, 1) for k, v in self.seconds.items()}
            | (self.evaluation.summary() if self.evaluation else {})
            | (self.agreement.summary() if self.agreement else {})
            | ({UNSEEN_MAP: f"{self.unseen.map:.4f}"} if self.unseen else {}),
        }

    def save(self, folder: Path) -> None:
        """Write the model, its split and the list of skipped images; drop its checkpoint."""
        files = self.hasher.files()
        if self.split is not None:
            files[SPLIT_FILE] = self.split.dump()
        if self.skipped:
            files[SKIPPED_FILE] = skipped_csv(self.skipped)
        storage.write_files(folder, files)
        # What an older model left in the folder.
        current = {*files, METRICS} if self.history else set(files)
        for name in {SPLIT_FILE, SKIPPED_FILE, METRICS} - current:
            (folder / name).unlink(missing_ok=True)
        discard_checkpoint(folder)
