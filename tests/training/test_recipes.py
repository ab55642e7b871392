"""Recipes: what is chosen for which data, that it can be trained, and what the caller overrides."""

import dataclasses
import itertools
import json
import logging
from pathlib import Path

import pytest

from fisherhash.codes import MAX_BITS
from fisherhash.experiments.specs import BASES
from fisherhash.methods import create, resolved_options
from fisherhash.training.fitting import fit, train
from fisherhash.training.loop import Settings
from fisherhash.training.recipes import apply_recipe, find_recipe
from fisherhash.training.settings import MOST_OUTPUTS

RESULTS = Path(__file__).resolve().parents[2] / "results"
KINDS = list(itertools.product([False, True], [3, 10, 100], [False, True], [8, 48, 256]))


@pytest.mark.parametrize(("finetune", "classes", "several", "bits"), KINDS)
def test_every_recipe_names_options_and_settings_that_exist(finetune, classes, several, bits):
    kind = {"finetune": finetune, "classes": classes, "several": several, "bits": bits}
    best = find_recipe("best", **kind)
    options, settings = apply_recipe(best, {}, Settings())
    create("dfh", bits=bits, classes=classes, options=options)
    assert options
    assert settings.outputs == 0 or settings.cut == "between" or settings.outputs >= bits
    assert ("fine-tuned" in str(best)) == finetune
    assert "\n" not in str(best)
    assert apply_recipe(find_recipe("paper", **kind), {}, Settings()) == ({}, Settings())


def test_as_many_outputs_as_bits():
    assert MOST_OUTPUTS == MAX_BITS


@pytest.mark.parametrize(
    ("data", "row", "classes"),
    [("cifar10-small", "ours", 10), ("coco21", "ours", 21), ("tiny100", "ours", 100)],
)
def test_fine_tuning_takes_what_the_search_found(data, row, classes):
    """Whoever trains with defaults gets the hyper-parameters of the README's table."""
    stored = json.loads((RESULTS / "tuning-seed1.json").read_text())["benches"]
    rows = stored[f"{data}-seed1-efficientnet-lite0-128-finetuned"]["rows"]
    winners = {
        (name, key): rows[f"dfh-{name}"][key]
        for name in ("ours", "paper")
        for key in ("winner", "winner_step")
    }
    (name, _), best = max(winners.items(), key=lambda item: item[1]["score"])
    assert name == row
    several = data == "coco21"
    recipe = find_recipe("best", finetune=True, classes=classes, several=several, bits=48)
    found = dict(BASES[f"dfh-{row}"]) | best["options"] | best["settings"]
    found |= {f"step_{name}": value for name, value in (best.get("class_step") or {}).items()}
    if found["initial_centers"] == "far-apart":
        del found["affinity"]  # only graded centres have one
    options, settings = apply_recipe(recipe, {}, Settings())
    method = create("dfh", bits=48, classes=classes, options=options)
    ours = resolved_options(method) | dataclasses.asdict(settings)
    for name, value in found.items():
        rounded = pytest.approx(value, rel=0.05) if isinstance(value, float) else value
        assert ours[name] == rounded, name


def test_many_classes_are_encoded_with_the_class_step():
    for finetune in (False, True):
        kind = {"finetune": finetune, "classes": 100, "several": False, "bits": 16}
        assert find_recipe("best", **kind).settings["step_weight"] > 0


@pytest.fixture(autouse=True)
def few_steps(monkeypatch):
    """How good the hashers are is not the question here."""
    monkeypatch.setattr("fisherhash.training.class_step.LEAST_STEPS", 30)
    monkeypatch.setattr("fisherhash.methods._cutting.STEPS", 30)


QUICK = Settings(epochs=2, batch_size=8, head_epochs=1)


def test_what_was_chosen_is_said_in_one_line_and_stored(photos, caplog):
    with caplog.at_level(logging.INFO, logger="fisherhash"):
        found = fit(
            photos, bits=8, backbone="tiny", settings=QUICK, recipe="best", options={"inter": 1.0}
        )
    said = [r.getMessage() for r in caplog.records if "recipe" in r.getMessage()]
    assert len(said) == 1
    assert "frozen, few classes" in said[0]
    details = found.hasher.details
    assert details["options"]["initial_centers"] == "graded"
    assert details["options"]["inter"] == 1.0  # what the caller says counts
    assert details["settings"]["step_weight"] > 0
    assert found.hasher.head.kind == "class-step"


def test_train_takes_the_best_recipe_and_fit_none(photos):
    arguments = {"bits": 8, "backbone": "tiny", "settings": QUICK}
    assert train(photos, **arguments).head.kind == "class-step"
    assert train(photos, recipe="paper", **arguments).head.kind == "linear"
    assert fit(photos, **arguments).hasher.head.kind == "linear"


def test_other_methods_have_no_recipe(photos, caplog):
    with caplog.at_level(logging.INFO, logger="fisherhash"):
        hasher = train(photos, method="csq", bits=8, backbone="tiny", settings=QUICK)
    assert hasher.head.kind == "linear"
    assert not any("recipe" in record.getMessage() for record in caplog.records)
