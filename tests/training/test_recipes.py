"""Recipes: what is chosen for which data, that it can be trained, and what the caller overrides."""

import dataclasses
import itertools
import json
import logging
import pickle
from pathlib import Path

import pytest

from fisherhash.cli import main
from fisherhash.codes import MAX_BITS
from fisherhash.experiments.specs import BASES
from fisherhash.methods import create, resolved_options
from fisherhash.training.fitting import fit, train
from fisherhash.training.recipes import apply_recipe, find_recipe
from fisherhash.training.settings import MOST_OUTPUTS, Settings

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


GIVEN = {"learning_rate": 0.01, "backbone_rate": 1.0, "outputs": 0, "step_weight": 0.0}


def details(out):
    return json.loads((out / "config.json").read_text())["details"]


@pytest.mark.parametrize("command", [False, True])
@pytest.mark.parametrize("finetune", [False, True])
def test_what_is_given_wins_also_where_it_is_the_default(photos, tmp_path, finetune, command):
    """Both recipes have other values for some of these; the others are the recipe's."""
    out = tmp_path / "m"
    if command:
        words = f"train {photos} --out {out} --backbone tiny --bits 8 --epochs 1 --device cpu"
        words += " --batch-size 8 --head-epochs 1 --finetune" if finetune else " --frozen"
        words += "".join(f" --{k.replace('_', '-')} {v}" for k, v in GIVEN.items())
        with pytest.raises(SystemExit, match="0"):
            main(words.split())
    else:
        settings = Settings(epochs=1, batch_size=8, head_epochs=1, **GIVEN)
        train(photos, bits=8, backbone="tiny", finetune=finetune, settings=settings, out=out)
    found = details(out)
    assert {name: found["settings"][name] for name in GIVEN} == GIVEN
    assert found["options"]["initial_centers"] == "graded"


def test_settings_know_what_was_given():
    one = Settings(epochs=40, dropout=0.3)
    assert one == Settings()
    assert one.given == {"epochs", "dropout"}
    assert one.but(seed=1).given == {"epochs", "dropout", "seed"}
    assert pickle.loads(pickle.dumps(one)).given == one.given
    assert dataclasses.replace(one, seed=1).given == Settings().to_json().keys()
    assert one.filled({"epochs": 3, "seed": 2}) == Settings(seed=2)


def test_train_takes_the_best_recipe_and_fit_none(photos, caplog):
    arguments = {"bits": 8, "backbone": "tiny", "settings": QUICK}
    assert train(photos, **arguments).head.kind == "class-step"
    assert train(photos, recipe="paper", **arguments).head.kind == "linear"
    assert fit(photos, **arguments).hasher.head.kind == "linear"
    caplog.clear()
    with caplog.at_level(logging.INFO, logger="fisherhash"):
        assert train(photos, method="csq", **arguments).head.kind == "linear"
    assert not any("recipe" in record.getMessage() for record in caplog.records)
