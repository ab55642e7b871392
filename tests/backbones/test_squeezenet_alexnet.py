"""Both networks against their definition, written again with functions on a state dict."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn import functional as F

from fisherhash import backbones


def squeezenet_shapes() -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {"features.0.weight": (96, 3, 7, 7)}
    shapes["features.0.bias"] = (96,)
    fires = {3: (96, 16, 64), 4: (128, 16, 64), 5: (128, 32, 128), 7: (256, 32, 128)}
    fires |= {8: (256, 48, 192), 9: (384, 48, 192), 10: (384, 64, 256), 12: (512, 64, 256)}
    for layer, (inputs, squeeze, expand) in fires.items():
        for part, shape in {
            "squeeze": (squeeze, inputs, 1, 1),
            "expand1x1": (expand, squeeze, 1, 1),
            "expand3x3": (expand, squeeze, 3, 3),
        }.items():
            shapes[f"features.{layer}.{part}.weight"] = shape
            shapes[f"features.{layer}.{part}.bias"] = shape[:1]
    return shapes | {"classifier.1.weight": (1000, 512, 1, 1), "classifier.1.bias": (1000,)}


def alexnet_shapes() -> dict[str, tuple[int, ...]]:
    weights = {
        "features.0": (64, 3, 11, 11),
        "features.3": (192, 64, 5, 5),
        "features.6": (384, 192, 3, 3),
        "features.8": (256, 384, 3, 3),
        "features.10": (256, 256, 3, 3),
        "classifier.1": (4096, 9216),
        "classifier.4": (4096, 4096),
        "classifier.6": (1000, 4096),
    }
    return {f"{n}.weight": s for n, s in weights.items()} | {
        f"{n}.bias": s[:1] for n, s in weights.items()
    }


def random_weights(shapes: dict[str, tuple[int, ...]]) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    state = {}
    for name, shape in shapes.items():
        fan_in = torch.Size(shape[1:]).numel() if len(shape) > 1 else 100
        state[name] = torch.empty(shape).uniform_(-1, 1, generator=generator) * (6 / fan_in) ** 0.5
    return state


def squeezenet(state: dict[str, Tensor], images: Tensor) -> Tensor:
    def conv(name: str, x: Tensor, stride: int = 1, padding: int = 0) -> Tensor:
        return F.conv2d(x, state[f"{name}.weight"], state[f"{name}.bias"], stride, padding)

    x = F.max_pool2d(conv("features.0", images, 2).relu(), 3, 2, ceil_mode=True)
    for layer in (3, 4, 5, 6, 7, 8, 9, 10, 11, 12):
        if layer in (6, 11):
            x = F.max_pool2d(x, 3, 2, ceil_mode=True)
            continue
        s = conv(f"features.{layer}.squeeze", x).relu()
        one = conv(f"features.{layer}.expand1x1", s).relu()
        three = conv(f"features.{layer}.expand3x3", s, padding=1).relu()
        x = torch.cat([one, three], 1)
    return F.adaptive_avg_pool2d(x, 1).flatten(1)


def alexnet(state: dict[str, Tensor], images: Tensor) -> Tensor:
    x = images
    for layer, stride, padding in ((0, 4, 2), (3, 1, 2), (6, 1, 1), (8, 1, 1), (10, 1, 1)):
        weight, bias = state[f"features.{layer}.weight"], state[f"features.{layer}.bias"]
        x = F.conv2d(x, weight, bias, stride, padding).relu()
        if layer in (0, 3, 10):
            x = F.max_pool2d(x, 3, 2)
    x = F.adaptive_avg_pool2d(x, 6).flatten(1)
    for layer in (1, 4):
        x = F.linear(x, state[f"classifier.{layer}.weight"], state[f"classifier.{layer}.bias"])
        x = x.relu()
    return x


def normalised(pixels: Tensor) -> Tensor:
    return (pixels.float() / 255 - torch.tensor([0.485, 0.456, 0.406]).view(3, 1, 1)) / (
        torch.tensor([0.229, 0.224, 0.225]).view(3, 1, 1)
    )


@pytest.mark.parametrize("size", [224, 100])
def test_squeezenet(tmp_path, size):
    state = random_weights(squeezenet_shapes())
    save_file(state, tmp_path / "w.safetensors")
    backbone = backbones.create(
        "squeezenet1.0", weights=tmp_path / "w.safetensors", image_size=size
    )
    pixels = torch.randint(256, (2, 3, size, size), dtype=torch.uint8)
    with torch.inference_mode():
        expected = squeezenet(state, normalised(pixels))
        torch.testing.assert_close(backbone(pixels), expected, rtol=1e-4, atol=1e-5)
    assert expected.std() > 1e-2


def test_alexnet(tmp_path):
    state = {name: tensor.half() for name, tensor in random_weights(alexnet_shapes()).items()}
    torch.save(state, tmp_path / "w.pth")
    state = {name: tensor.float() for name, tensor in state.items()}
    for size in (224, 150):
        backbone = backbones.create("alexnet", weights=str(tmp_path / "w.pth"), image_size=size)
        pixels = torch.randint(256, (2, 3, size, size), dtype=torch.uint8)
        with torch.inference_mode():
            expected = alexnet(state, normalised(pixels))
            torch.testing.assert_close(backbone(pixels), expected, rtol=1e-4, atol=1e-4)
        assert expected.std() > 1e-2
    assert not torch.equal(backbone.train()(pixels), backbone(pixels))  # dropout
    (tmp_path / "w.pth").unlink()  # 120 MB; pytest keeps the folders of three runs
