"""Recipes: what DFH is trained with by default, and what the paper prints.

A recipe sets options of the method and training settings. It sets only what the caller did not
give, and it never changes a method other than DFH, whose options it knows. Its values were chosen
on held-out training images of CIFAR-10, tiny100 and coco21; docs/reproduce.md has numbers.
Imports no torch: the command line names the recipes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from fisherhash.training.settings import Settings

RecipeName = Literal["best", "paper"]

MANY_CLASSES = 50
"""From how many classes on a data set has many: CIFAR-10 has 10, coco21 21, tiny100 100."""


@dataclass(frozen=True)
class Recipe:
    """Options and settings that belong together.

    Attributes:
        title: what it is, in a few words.
        options: hyper-parameters of DFH.
        settings: training settings.
    """

    title: str
    options: Mapping[str, Any] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        """One line for people: the title and the values."""
        values = ", ".join(
            f"{name} {value:g}" if isinstance(value, float) else f"{name} {value}"
            for name, value in {**self.options, **self.settings}.items()
        )
        return f"{self.title}: {values}" if values else self.title


GRADED: Mapping[str, Any] = {"initial_centers": "graded", "positive_weight": 0.0}
"""Centres as near to each other as the classes look alike, and balanced pairs."""


APART: Mapping[str, Any] = {"initial_centers": "far-apart", "positive_weight": 0.0}
"""Centres that start far apart: of a hundred class means some would share nearly all their bits."""


def find_recipe(
    name: RecipeName, *, finetune: bool, classes: int, several: bool, bits: int
) -> Recipe:
    """Return a recipe for DFH.

    Args:
        name: ``best``, the best known one, or ``paper``, the printed method.
        finetune: whether the whole network is trained.
        classes: number of classes.
        several: whether images have several labels.
        bits: length of the codes.
    """
    if name == "paper":
        return Recipe("DFH as printed in the paper")
    many = classes >= MANY_CLASSES
    kind = "many classes" if many else "several labels" if several else "few classes"
    title = f"the best known recipe of DFH, {'fine-tuned' if finetune else 'frozen'}, {kind}"
    if finetune:
        options, settings = _finetuned(many=many, several=several)
        return Recipe(title, options, {**settings, "outputs": max(settings["outputs"], bits)})
    if many:
        # Few bits cannot tell so many centres apart by themselves.
        return Recipe(title, APART, _step(2.0 if bits < 24 else 1.0, 1.0))
    if several:
        cut = {"outputs": max(64, bits), "learning_rate": 0.005}
        return Recipe(title, {"initial_centers": "means"}, {**cut, **_step(0.5, 8.0)})
    return Recipe(title, {**GRADED, "affinity": 0.4}, _step(0.25, 1.0))


def _finetuned(*, many: bool, several: bool) -> tuple[dict[str, Any], dict[str, Any]]:
    """The hyper-parameters of DFH's best row in the searches on fine-tuned networks."""
    if many:
        weights = {"quantization": 0.042, "intra": 1.4, "inter": 3.1}
        separation = {"separation": 0.93, "separation_margin": 0.093}
        rates = {"learning_rate": 0.0124, "backbone_rate": 1.1, "outputs": 64}
        return {**APART, **weights, **separation}, {**rates, **_step(0.5, 1.0)}
    if several:
        rates = {"learning_rate": 0.018, "backbone_rate": 0.43}
        cut = {"outputs": 128, "cut": "first"}
        return dict(APART), {**rates, **cut, **_step(2.0, 0.0625)}
    return dict(GRADED), {"learning_rate": 0.015, "backbone_rate": 0.34, "outputs": 128}


def apply_recipe(
    recipe: Recipe, options: Mapping[str, Any], settings: Settings
) -> tuple[dict[str, Any], Settings]:
    """Add a recipe to what was given, which stays, also where it is the default.

    >>> step = Recipe("r", {"inter": 0.2}, {"step_weight": 2.0, "outputs": 64})
    >>> options, settings = apply_recipe(step, {"inter": 1.0}, Settings(outputs=0))
    >>> options, settings.outputs, settings.step_weight
    ({'inter': 1.0}, 0, 2.0)
    """
    return {**recipe.options, **options}, settings.filled(recipe.settings)


def _step(weight: float, sharpness: float) -> dict[str, float]:
    return {"step_weight": weight, "step_sharpness": sharpness}
