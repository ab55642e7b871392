"""The cost of a training step: DFH beside plain cross-entropy, interleaved in one run.

    python benchmarks/training.py                 on CUDA: batch 128, 10,000 images, 100 classes
    python benchmarks/training.py --quick         small, on a CPU: checks that it runs

Also times one whole training (5,000 images, 30 epochs) and encoding. The images are random: their
content does not change the time of a step.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

from fisherhash import backbones
from fisherhash.methods import Batch, HashMethod, MethodInfo, create
from fisherhash.model.torch_network import TorchNetwork, on_device
from fisherhash.training.images import LiveImages
from fisherhash.training.loop import Loop
from fisherhash.training.settings import Settings


class CrossEntropy(HashMethod):
    """The simplest supervised step on the same network: a linear classifier on the logits."""

    info = MethodInfo("cross-entropy", "", "", 0, "", "classes", False)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.classifier = nn.Linear(self.bits, self.classes)

    def loss(self, outputs: Tensor, batch: Batch) -> dict[str, Tensor]:
        return {"loss": F.cross_entropy(self.classifier(outputs.float()), batch.labels)}


def make_loop(
    name: str,
    pixels: Tensor,
    labels: Tensor,
    args: argparse.Namespace,
    epochs: int,
    *,
    fixed: bool = False,
) -> Loop:
    torch.manual_seed(0)
    device = pixels.device
    network = backbones.create(
        args.backbone, weights=args.weights, pretrained=False, image_size=args.size
    )
    on_device(network, device)
    if fixed:
        network.fix(network.early)
    shape = {"bits": args.bits, "classes": labels.shape[1]}
    method = CrossEntropy(**shape) if name == "cross-entropy" else create(name, **shape)
    if not isinstance(method, HashMethod):
        raise SystemExit(f"{name} is not trained by gradient")
    method.to(device)
    head = method.head(network.features).to(device)
    images = LiveImages(pixels, labels, network, head)
    head.start(images.features())
    settings = Settings(epochs=epochs, batch_size=args.batch, learning_rate=1e-4)
    loop = Loop(method, images, settings)
    loop.start()
    return loop


def timed(work, device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize()
    began = time.perf_counter()
    work()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="tiny network and data")
    parser.add_argument("--backbone", default="efficientnet-lite0")
    parser.add_argument("--weights", default=None)
    parser.add_argument("--size", type=int, default=128)
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--bits", type=int, default=64)
    parser.add_argument("--images", type=int, default=10_000)
    parser.add_argument("--classes", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path, help="write the numbers here")
    args = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if args.quick:
        args.backbone, args.size, args.images, args.rounds = "tiny", 32, 1_000, 3
    name = torch.cuda.get_device_name() if device.type == "cuda" else f"{os.cpu_count()} CPU cores"
    print(f"{name}; load average {os.getloadavg()[0]:.2f}")
    print(f"{args.backbone}, {args.size} px, batch {args.batch}, {args.bits} bits", flush=True)

    generator = torch.Generator().manual_seed(0)
    shape = (args.images, 3, args.size, args.size)
    pixels = torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator).to(device)
    labels = torch.eye(args.classes)[torch.arange(args.images) % args.classes].to(device)
    methods = ("cross-entropy", "dfh")
    loops = {m: make_loop(m, pixels, labels, args, epochs=args.rounds + 1) for m in methods}
    times: dict[str, list[float]] = {m: [] for m in methods}
    for round_ in range(args.rounds + 1):
        for m in methods:
            seconds = timed(lambda m=m, e=round_: loops[m].epoch(e), device)
            if round_:  # the first epoch warms up and captures
                times[m].append(seconds / loops[m].steps)
    step = {m: statistics.median(t) for m, t in times.items()}
    ratio = step["dfh"] / step["cross-entropy"]
    for m in methods:
        print(f"{m:<16} {1e3 * step[m]:8.3f} ms per step ({1 / step[m]:.1f} steps/s)")
    print(f"dfh / cross-entropy = {ratio:.3f}, centre step included", flush=True)
    result = {
        "machine": name,
        "backbone": args.backbone,
        "size": args.size,
        "batch": args.batch,
        "bits": args.bits,
        "images": args.images,
        "classes": args.classes,
        "milliseconds_a_step": {m: 1e3 * s for m, s in step.items()},
        "ratio": ratio,
    }

    few, epochs = (500, 3) if args.quick else (5_000, 30)
    training: dict[str, float] = {}
    for what, fixed in (("every layer trained", False), ("first layers fixed, the default", True)):
        loop = make_loop(
            "dfh", pixels[:few], labels[:few, :10].contiguous(), args, epochs, fixed=fixed
        )
        loop.epoch(0)
        training[what] = timed(lambda own=loop: [own.epoch(e) for e in range(epochs)], device)
        print(f"{few:,} images, {epochs} epochs, {what}: {training[what]:.2f} s after warm-up")
        sys.stdout.flush()
    computing = TorchNetwork(loop.images.backbone, device)  # type: ignore[attr-defined]
    count = 500 if args.quick else 60_000
    block = pixels[: min(args.images, count)].cpu().numpy()
    repeats = -(-count // len(block))
    computing.features(block[:512])
    encoding = timed(lambda: [computing.features(block) for _ in range(repeats)], device)
    encoding *= count / (repeats * len(block))
    print(f"encoding {count:,} images: {encoding:.2f} s from bytes in host memory")
    result |= {"training_seconds": training, "encoding_seconds": encoding, "numpy": np.__version__}
    if args.json:
        args.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
