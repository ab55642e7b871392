"""Verbs that hand a model over: export onnx, push."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from cyclopts import App

from fisherhash.cli.base import Flag, Json, app, print_json, say
from fisherhash.errors import UsageError

if TYPE_CHECKING:
    from fisherhash.model.export import Agreement
    from fisherhash.model.onnx_runtime import OnnxRuntime
    from fisherhash.system import storage

export_app = App(
    name="export", help="Write a model as a file for other programs.", help_format="markdown"
)
app.command(export_app)


@export_app.command
def onnx(
    model: str,
    *,
    out: Path | None = None,
    int8: Flag = False,
    images: Path | None = None,
    json: Json = False,
) -> None:
    """Write backbone and head as one ONNX file, from pixels to logits, and check it.

    Args:
        model: A model folder, or the name of a built-in hasher.
        out: A file FILE.onnx, or a new model folder. By default the file becomes a part of the
            model folder; with --int8, which makes another model, MODEL-int8 is a new folder.
        int8: Quantise the network: a third of the size, faster on a CPU, other codes.
        images: With --int8: a folder with images like yours, on 128 of which the network is
            calibrated; by default the built-in sample.
        json: Print the result as JSON on stdout.
    """
    from fisherhash.model.export import compare_logits, missing_package
    from fisherhash.model.hasher import Hasher
    from fisherhash.model.hub import is_address
    from fisherhash.model.location import locate_model
    from fisherhash.model.onnx_hasher import OnnxHasher
    from fisherhash.model.onnx_runtime import OnnxRuntime

    if images is not None and not int8:
        raise UsageError("--images goes with --int8")
    place = locate_model(model)
    if out is None and (isinstance(place, str) or not place.is_dir() or is_address(model)):
        raise UsageError("--out is missing: a file FILE.onnx, or a new model folder")
    place = Path(place)
    if out is not None and out.suffix != ".onnx" and out.exists():
        raise UsageError(f"{out} exists already; give a new folder, or a file that ends in .onnx")
    missing_package(required="exporting a model")
    agreement: Agreement | None = None
    hasher: Any = Hasher.load(model, runtime="auto" if int8 else "torch")
    if not isinstance(hasher, OnnxHasher):
        data, agreement = hasher.export()
        say(f"ONNX Runtime against torch: {agreement}")
        runtime = OnnxRuntime(data)
    else:
        runtime = hasher.runtime
    details = hasher.details
    if int8:
        from fisherhash.model.quantise import quantise

        pixels = _calibration(runtime, images)
        whole, runtime = runtime, OnnxRuntime(quantise(runtime, pixels))
        agreement = compare_logits(whole.logits(pixels), runtime.logits(pixels))
        say(
            f"int8 changes {agreement.differing / agreement.images:.1f} of {runtime.bits} bits "
            f"per image on the {agreement.images} images of the calibration"
        )
    target = out or (place.with_name(f"{place.name}-int8") if int8 else place)
    if int8 and out is None and target.exists():
        raise UsageError(f"{target} exists already; give another folder with --out")
    exported = OnnxHasher(runtime, details=details)
    _write(target, runtime, exported, whole_model=int8 or target != place)
    megabytes = len(runtime.content()) / 1e6
    say(f"{megabytes:.1f} MB in {target}")
    if json:
        found = {"out": str(target), "fingerprint": exported.fingerprint(), "int8": int8}
        print_json(
            found | {"agreement": agreement and vars(agreement), "bytes": len(runtime.content())}
        )


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


def _write(target: Path, runtime: OnnxRuntime, hasher: Any, *, whole_model: bool) -> None:
    """Write an ONNX file, a model folder, or the ONNX file of a model folder that exists."""
    from fisherhash.model.folder import CONFIG, described_files, read_config
    from fisherhash.system.storage import write_file, write_files

    data = runtime.content()
    if target.suffix == ".onnx":
        write_file(target, data)
        return
    files: dict[str, storage.Content]
    files = hasher.files() if whole_model else described_files(read_config(target / CONFIG), data)
    write_files(target, files)


def _calibration(runtime: OnnxRuntime, images: Path | None) -> Any:
    """Pixels (n, 3, size, size) of some images, always the same of the same folder."""
    import numpy as np

    from fisherhash.data.computing import decode
    from fisherhash.data.sources import open_data, open_paths
    from fisherhash.data.splits import hash_order
    from fisherhash.model.quantise import CALIBRATION_IMAGES

    collection = open_data("sample") if images is None else open_paths([images])
    order = hash_order(collection.names, range(len(collection)), 0)[:CALIBRATION_IMAGES]
    blocks = decode(collection, np.array(order), runtime.preprocessing)
    pixels = np.concatenate([np.asarray(block.values) for block in blocks])
    if len(pixels) == 0:
        raise UsageError(f"no image in {images} can be read")
    return pixels
