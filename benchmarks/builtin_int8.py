"""How general-64-int8 was built and measured; run it to check or to rebuild it.

    python benchmarks/builtin_int8.py --json results/builtin-int8.json            measure
    python benchmarks/builtin_int8.py --json results/builtin-int8.json --write    … and write it

The network of general-64 is quantised to int8, calibrated on 128 training images. The head is then
fitted by the recipe of general-64 on the features of the quantised network. Needs the data sets
tiny100, coco21 and cifar10 (see FISHERHASH_DATA). Features are cached.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import statistics
from pathlib import Path

import numpy as np
from fisherhash.model.onnx_hasher import OnnxHasher
from fisherhash.model.onnx_runtime import OnnxRuntime
from fisherhash.model.torch_hasher import TorchHasher
from numpy.typing import NDArray

from builtin_hasher import CANDIDATES, SEEDS, SIZE, TESTS, Data, Trial, make
from fisherhash.data.computing import decode
from fisherhash.data.splits import hash_order
from fisherhash.model import builtin
from fisherhash.model.export import compare_logits
from fisherhash.model.folder import versions
from fisherhash.model.quantise import CALIBRATION_IMAGES, quantise
from fisherhash.system import storage

NAME = "general-64-int8"
FLOAT = "general-64"
ROOT = Path(__file__).resolve().parents[1]


def calibration(data: Data, runtime: OnnxRuntime) -> NDArray[np.uint8]:
    """Training images of tiny100 and coco21, half of each."""
    parts = []
    for name in ("tiny100", "coco21"):
        collection, split = data.of[name]
        order = hash_order(collection.names, split.train.tolist(), 0)
        some = np.array(order[: CALIBRATION_IMAGES // 2])
        parts += [block.values for block in decode(collection, some, runtime.preprocessing)]
    return np.concatenate(parts)


def measured(data: Data, recipe: str) -> list[dict[str, float]]:
    """mAP of the recipe, fitted on these features without the classes that are searched."""
    rows = []
    for seed in range(SEEDS):
        trial = Trial(data, seed)
        rows.append(trial.measure(CANDIDATES[recipe](trial.learning)))
        print(seed, rows[-1], flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", type=Path, required=True, help="write the numbers here")
    parser.add_argument("--write", action="store_true", help="write the shipped files")
    args = parser.parse_args()
    known = storage.read_json(ROOT / "results" / "builtin-hasher.json")
    recipe = known["chosen"]
    data = Data()
    whole = OnnxRuntime(builtin.folder(FLOAT) / builtin.HEAD_ONNX)
    pixels = calibration(data, whole)
    network = OnnxRuntime(quantise(whole, pixels))
    data.runtimes[SIZE] = network  # type: ignore[assignment]
    rows = measured(data, recipe)
    fitted = make(data, recipe, rows)
    exported, agreement = fitted.export()
    made = OnnxRuntime(quantise(OnnxRuntime(exported), pixels))
    if not np.array_equal(made.features(pixels[:16]), network.features(pixels[:16])):
        raise SystemExit("the network with the new head computes other features")
    collection, split = data.of["coco21"]
    blocks = decode(collection, split.query[:500], whole.preprocessing)
    some = np.concatenate([block.values for block in blocks])
    other = compare_logits(whole.logits(some), OnnxRuntime(quantise(whole, pixels)).logits(some))
    result = {
        "what": "mAP, expected over ties, of general-64 and of its int8 version, on classes that "
        "were not trained on",
        "recipe": recipe,
        "general-64": known["candidates"][recipe],
        NAME: rows,
        "bits of 64 that int8 changes with the head of general-64": other.differing / len(some),
        "export against torch": str(agreement),
        "bytes": {FLOAT: len(whole.content()), NAME: len(made.content())},
        "versions": versions(),
    }
    args.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    if args.write:
        write(made, fitted, result)


def write(made: OnnxRuntime, fitted: TorchHasher, result: dict) -> None:
    """Write the files that ``Hasher.load_builtin`` reads."""
    hasher = OnnxHasher(made, details=fitted.details)
    data = made.content()
    config = {"format": builtin.HEAD_FORMAT, **hasher.config()}
    config["onnx_sha256"] = hashlib.sha256(data).hexdigest()
    lines = ["| | " + " | ".join(TESTS) + " |", "|---|" + "---|" * len(TESTS)]
    for name in (FLOAT, NAME):
        means = (statistics.mean(row[test] for row in result[name]) for test in TESTS)
        lines.append(f"| {name} | " + " | ".join(f"{mean:.3f}" for mean in means) + " |")
    text = (Path(__file__).with_name("builtin_int8.md")).read_text(encoding="utf-8")
    changed = result["bits of 64 that int8 changes with the head of general-64"]
    for key, value in {
        "table": "\n".join(lines),
        "changed": f"{changed:.1f}",
        "size": f"{len(data) / 1e6:.1f}",
        "whole": f"{result['bytes'][FLOAT] / 1e6:.1f}",
    }.items():
        text = text.replace("{" + key + "}", value)
    storage.write_files(
        builtin.folder().with_name(NAME),
        {
            builtin.HEAD_ONNX: data,
            builtin.HEAD_CARD: text,
            builtin.HEAD_CONFIG: storage.dump_json(config),
        },
    )


if __name__ == "__main__":
    main()
