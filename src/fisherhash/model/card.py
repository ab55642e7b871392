"""The model card: what a model folder's README says, written when the model is saved."""

from __future__ import annotations

from typing import Any

from fisherhash import methods


def model_card(config: dict[str, Any]) -> str:
    """Markdown for the config of a model folder."""
    details = config["details"]
    parts = [
        f"# {config['bits']}-bit image hasher ({config['method']})\n",
        _method(config["method"]),
        "## Use\n",
        '```python\nfrom fisherhash import Hasher\n\nhasher = Hasher.load("this folder")\n'
        'codes = hasher.encode(["photo.jpg"])  '
        f"# uint8, {(config['bits'] + 7) // 8} bytes an image\n```\n",
        "## What it is\n",
        _table(
            {
                "bits": config["bits"],
                "backbone": config["backbone"],
                "image size": f"{config['preprocessing']['size']} px",
                "classes": _classes(config["classes"]),
                "fingerprint": config["fingerprint"][:16],
                **config["versions"],
            }
        ),
    ]
    for title in ("data", "options", "settings", "results"):
        if details.get(title):
            parts += [f"## {title.capitalize()}\n", _table(details[title])]
    return "\n".join(parts)


def _method(name: str) -> str:
    if name not in methods.registry():
        return f"Made by the method `{name}`.\n"
    info = methods.find(name).info
    return f"Method: {info.title}, {info.venue} {info.year}, {info.url}\n"


def _table(rows: dict[str, Any]) -> str:
    lines = ["| | |", "|---|---|"]
    lines += [f"| {name} | {_cell(value)} |" for name, value in rows.items() if value is not None]
    return "\n".join(lines) + "\n"


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    return str(value).replace("|", "\\|").replace("\n", " ")


def _classes(names: list[str]) -> str:
    if not names:
        return "none"
    shown = ", ".join(names[:20]) + (", …" if len(names) > 20 else "")
    return f"{len(names)}: {shown}"
