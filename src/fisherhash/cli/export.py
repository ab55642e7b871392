"""Verbs that hand a model over: export onnx, push."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from cyclopts import App

from fisherhash.cli.base import Flag, Json, app, print_json, say
from fisherhash.errors import UsageError

if TYPE_CHECKING:
    from fisherhash.model.hasher import Hasher

export_app = App(
    name="export", help="Write a model as a file for other programs.", help_format="markdown"
)
app.command(export_app)


@export_app.command
def onnx(
    model: str,
    *,
    out: Path,
    int8: Flag = False,
    images: Path | None = None,
    json: Json = False,
) -> None:
    """Write network and head as one ONNX file, from pixels to logits, and check it.

    Args:
        model: A model folder, or the name of a built-in hasher.
        out: A file FILE.onnx, or a new model folder.
        int8: Quantise the network: a third of the size, faster on a CPU, other codes.
        images: With --int8: a folder with images like yours, on 128 of which the network is
            calibrated; by default the built-in sample.
        json: Print the result as JSON on stdout.
    """
    from fisherhash.model.export import compare_logits, missing_package
    from fisherhash.model.hasher import Hasher
    from fisherhash.model.onnx_network import LOGITS, OnnxNetwork
    from fisherhash.system.storage import write_file

    if images is not None and not int8:
        raise UsageError("--images goes with --int8")
    if out.suffix != ".onnx" and out.exists():
        raise UsageError(f"{out} exists already; give a new folder, or a file that ends in .onnx")
    missing_package(required="exporting a model")
    hasher = Hasher.load(model)
    data, agreement = hasher.export()
    say(f"the exported file against the model: {agreement}")
    if int8:
        from fisherhash.model.quantise import quantise

        whole = OnnxNetwork(data, output=LOGITS)
        pixels = _calibration(hasher, images)
        data = quantise(whole, pixels)
        found = OnnxNetwork(data, output=LOGITS).features(pixels)
        agreement = compare_logits(whole.features(pixels), found)
        say(
            f"int8 changes {agreement.differing / agreement.images:.1f} of {hasher.bits} bits "
            f"per image on the {agreement.images} images of the calibration"
        )
    exported = Hasher.of_exported(OnnxNetwork(data), details=hasher.details)
    if out.suffix == ".onnx":
        write_file(out, data)
    else:
        exported.save(out)
    say(f"{len(data) / 1e6:.1f} MB in {out}")
    if json:
        facts = {"out": str(out), "fingerprint": exported.fingerprint(), "int8": int8}
        print_json(facts | {"agreement": vars(agreement), "bytes": len(data)})


@app.command
def push(model: Path, name: str, *, private: Flag = False) -> None:
    """Upload a model to the Hugging Face Hub; "hf:user/name" is then its name everywhere.

    It needs the extra "hub" and a token that may write: hf auth login.

    Args:
        model: A model folder.
        name: user/name; it is made if it does not exist.
        private: Make a new one private.
    """
    from fisherhash.model.hub import upload_model

    page = upload_model(model.expanduser(), name, private=private)
    say(f"{model} is at {page}")
    print(f"hf:{name.removeprefix('hf:')}")


def _calibration(hasher: Hasher, images: Path | None) -> Any:
    """Pixels (n, 3, size, size) of some images, always the same of the same folder."""
    import numpy as np

    from fisherhash.data.computing import decode
    from fisherhash.data.sources import open_data, open_paths
    from fisherhash.data.splits import hash_order
    from fisherhash.model.quantise import CALIBRATION_IMAGES

    collection = open_data("sample") if images is None else open_paths([images])
    order = hash_order(collection.names, range(len(collection)), 0)[:CALIBRATION_IMAGES]
    blocks = decode(collection, np.array(order), hasher.preprocessing)
    pixels = np.concatenate([np.asarray(block.values) for block in blocks])
    if len(pixels) == 0:
        raise UsageError(f"no image in {images} can be read")
    return pixels
