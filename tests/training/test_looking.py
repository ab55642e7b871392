"""What a training reports for somebody who looks at the results."""

import pytest

from fisherhash import Hasher
from fisherhash.data.protocols import resolve
from fisherhash.data.sources import open_data
from fisherhash.training.fitting import fit
from fisherhash.training.measuring import measure_agreement
from fisherhash.training.settings import Settings
from fisherhash.training.trained import UNSEEN_MAP


def test_a_card_has_agreement_and_unseen_classes(tmp_path):
    settings = Settings(epochs=1, batch_size=64)
    trained = fit(
        "sample",
        method="csq",
        bits=16,
        backbone="tiny",
        finetune=False,
        device="cpu",
        settings=settings,
        out=tmp_path / "m",
        measured=True,
        unseen=True,
    )
    assert trained.agreement is not None
    assert 0 < trained.agreement.value <= 1
    assert trained.unseen is not None
    assert trained.unseen.queries < trained.evaluation.queries
    card = (tmp_path / "m" / "README.md").read_text()
    assert f"| {UNSEEN_MAP} | {trained.unseen.map:.4f} |" in card
    assert "agreement with its features inside a class" in card
    collection = open_data("sample")
    again = measure_agreement(Hasher.load(tmp_path / "m"), collection, resolve(collection))
    assert again.value == pytest.approx(trained.agreement.value, abs=1e-3)
