"""The model card: the README of a model folder, written when the model is saved."""

from __future__ import annotations

from typing import Any


def model_card(config: dict[str, Any]) -> str:
    """The card as Markdown, from the config of a model folder."""
    details = config["details"]
    reference = details.get("reference")
    names = config["classes"]
    listed = ", ".join(names[:20]) + (", …" if len(names) > 20 else "")
    size = (config["bits"] + 7) // 8
    if config["backbone"] is None:
        what, vectors = "vector", config["head"]["in_features"]
        use = f"hasher.encode_features(x)  # x: (n, {vectors}); uint8, {size} bytes per vector"
        source = {"input": f"vectors of {vectors} dimensions"}
    else:
        what = "image"
        use = f'hasher.encode(["photo.jpg"])  # uint8, {size} bytes per image'
        pixels = f"{config['preprocessing']['size']} px"
        source = {"backbone": config["backbone"], "image size": pixels}
    parts = [
        _front_matter(config),
        f"# {config['bits']}-bit {what} hasher ({config['method']})\n",
        f"Method: {reference}\n" if reference else f"Made by the method `{config['method']}`.\n",
        "## Use\n",
        '```python\nfrom fisherhash import Hasher\n\nhasher = Hasher.load("this folder")\n'
        f"codes = {use}\n```\n",
        "## What it is\n",
        _table(
            {
                "bits": config["bits"],
                **source,
                "classes": f"{len(names)}: {listed}" if names else "none",
                "fingerprint": config["fingerprint"][:16],
                **config["versions"],
            }
        ),
    ]
    for title in ("ranking", "data", "options", "settings", "results"):
        if details.get(title):
            parts += [f"## {title.capitalize()}\n", _table(details[title])]
    return "\n".join(parts)


def _front_matter(config: dict[str, Any]) -> str:
    """What the Hugging Face Hub reads at the top of a card, to list the model."""
    task = [] if config["backbone"] is None else ["pipeline_tag: image-feature-extraction"]
    tags = ["fisherhash", "hashing", "binary-codes", config["method"]]
    lines = ["---", "library_name: fisherhash", *task, "tags:", *(f"- {tag}" for tag in tags)]
    return "\n".join([*lines, "---", ""])


def _table(rows: dict[str, Any]) -> str:
    lines = ["| | |", "|---|---|"]
    lines += [f"| {name} | {_cell(value)} |" for name, value in rows.items() if value is not None]
    return "\n".join(lines) + "\n"


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    return str(value).replace("|", "\\|").replace("\n", " ")
