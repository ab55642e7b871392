"""The result of a training: the hasher, what is known of it, and its measurements."""

from __future__ import annotations

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
from fisherhash.training.loop import METRICS
from fisherhash.training.measuring import SPLIT_FILE, encode_split, measure

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

    def evaluate(self, *, real_queries: bool = False, bank: PixelBank | None = None) -> Evaluation:
        """Measure the hasher on the split's queries and database.

        Args:
            real_queries: rank by distances of real-valued queries, not by Hamming distance.
            bank: the pixels of the split's images.
        """
        if self.split is None:
            raise UsageError(
                f"'{self.collection.name}' has no labels, so there is nothing to measure"
            )
        # Features of frozen weights are on disk or worth storing; those of new weights are not.
        live = self.finetuned
        where: dict[str, Any] = {"cached": not live, "bank": bank if live else None}
        hasher, split = self.hasher, self.split
        encoded = encode_split(hasher, self.collection, split, real_queries=real_queries, **where)
        known = {item.name for item in self.skipped}
        self.skipped += [item for item in encoded.skipped if item.name not in known]
        return measure(encoded, top=split.top, real_queries=real_queries)

    @property
    def plain_head(self) -> FinishedHead:
        """The head without the class step."""
        return self.hasher.head if self.step is None else self.step.inner.finished()

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
