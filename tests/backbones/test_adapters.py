"""The adapters: on the real libraries where they can be imported, on stand-ins everywhere."""

from __future__ import annotations

import sys
from enum import Enum
from types import ModuleType, SimpleNamespace

import pytest
import torch
from torch import nn

from fisherhash import backbones
from fisherhash.data.preprocessing import Preprocessing
from fisherhash.errors import FisherhashError, UsageError


class Classifier(nn.Module):
    """A convolution, its average, and a classifier under the name and of the form asked for."""

    def __init__(self, part: str, classifier: nn.Module, classes: int = 10) -> None:
        super().__init__()
        self.part = part
        self.convolutional = any(isinstance(layer, nn.Conv2d) for layer in classifier.modules())
        self.trunk = nn.Conv2d(3, 6, 3, stride=2)
        self.add_module(part, classifier)
        self.aux_logits = True
        self.aux1 = nn.Linear(6, classes)

    def forward(self, images):
        maps = self.trunk(images)
        head = getattr(self, self.part)
        return head(maps if self.convolutional else maps.mean((2, 3))).flatten(1)


def pooling_classifier() -> nn.Module:
    return nn.Sequential(nn.Dropout(), nn.Conv2d(6, 10, 1), nn.ReLU(), nn.AdaptiveAvgPool2d(1))


NETWORKS = {
    "plain": (lambda: Classifier("fc", nn.Linear(6, 10)), 6, "fc."),
    "deep": (
        lambda: Classifier(
            "classifier", nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 10))
        ),
        8,
        "classifier.2.",
    ),
    "pooled": (lambda: Classifier("classifier", pooling_classifier()), 6, "classifier.1."),
}


@pytest.fixture
def torchvision(monkeypatch):
    config = SimpleNamespace(
        crop_size=[24],
        resize_size=[32],
        mean=(0.5, 0.4, 0.3),
        std=(0.2, 0.1, 0.4),
        interpolation=Enum("Mode", {"BICUBIC": "bicubic"}).BICUBIC,
    )
    weights = SimpleNamespace(DEFAULT=SimpleNamespace(transforms=lambda: config))
    fetched = []

    def get_model(name, weights):
        if weights is not None:
            fetched.append(name)
        if name == "offline" and weights is not None:
            raise OSError("no route to host")
        return NETWORKS.get(name, NETWORKS["plain"])[0]()

    package, models = ModuleType("torchvision"), ModuleType("torchvision.models")
    models.list_models = lambda: [*NETWORKS, "offline"]
    models.get_model_weights = lambda name: weights
    models.get_model = get_model
    package.models = models
    monkeypatch.setitem(sys.modules, "torchvision", package)
    monkeypatch.setitem(sys.modules, "torchvision.models", models)
    return fetched


@pytest.fixture
def timm(monkeypatch):
    calls = []

    def create_model(name, pretrained, num_classes, img_size=20):
        calls.append((name, pretrained, img_size))
        assert num_classes == 0
        module = nn.Sequential(nn.Conv2d(3, 6, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten())
        module.pretrained_cfg = {"classifier": "head.fc", "fixed_input_size": "vit" in name}
        return module

    config = {
        "input_size": (3, 20, 20),
        "interpolation": "bicubic",
        "crop_pct": 0.9,
        "mean": (0.5, 0.5, 0.5),
        "std": (0.25, 0.25, 0.25),
    }
    package, data = ModuleType("timm"), ModuleType("timm.data")
    package.list_models = lambda: ["resnet18", "vit_small"]
    package.create_model = create_model
    data.resolve_data_config = lambda args, model: config
    package.data = data
    monkeypatch.setitem(sys.modules, "timm", package)
    monkeypatch.setitem(sys.modules, "timm.data", data)
    return calls


@pytest.mark.parametrize("model", ["plain", "deep", "pooled"])
def test_torchvision_without_its_classifier(torchvision, tmp_path, model):
    make, features, last = NETWORKS[model]
    whole = make().state_dict()
    torch.save(whole, tmp_path / "w.pth")
    name = f"torchvision:{model}"
    backbone = backbones.create(name, weights=tmp_path / "w.pth")
    assert torchvision == []
    assert (backbone.name, backbone.features) == (name, features)
    assert backbone.preprocessing == Preprocessing(
        size=24, crop=0.75, mean=(127.5, 102.0, 76.5), std=(51.0, 25.5, 102.0)
    )
    state = backbone.state_dict()
    assert not [key for key in state if last in key or "aux" in key]
    assert torch.equal(state["module.trunk.weight"], whole["trunk.weight"])
    again = backbones.restore(name, backbone.preprocessing)
    again.load_state_dict(state)
    pixels = torch.randint(256, (2, 3, 24, 24), dtype=torch.uint8)
    assert torch.equal(again(pixels), backbone(pixels))
    assert backbones.create(name).features == features
    assert torchvision == [model]


def test_torchvision_unknown_model(torchvision):
    with pytest.raises(UsageError, match=r"no model 'plaine'. Near: torchvision:plain"):
        backbones.create("torchvision:plaine")


def test_weights_that_cannot_be_fetched(torchvision):
    with pytest.raises(FisherhashError, match=r"torchvision:offline .*no route.*weights=FILE"):
        backbones.create("torchvision:offline")
    assert backbones.create("torchvision:offline", pretrained=False).features == 6


def test_timm(timm, tmp_path):
    backbone = backbones.create("timm:resnet18.a1_in1k", image_size=16)
    assert timm == [("resnet18.a1_in1k", True, 20)]
    assert (backbone.name, backbone.features) == ("timm:resnet18.a1_in1k", 6)
    assert backbone.preprocessing == Preprocessing(
        size=16, crop=0.9, mean=(127.5,) * 3, std=(63.75,) * 3
    )
    inner = {key.removeprefix("module."): value for key, value in backbone.state_dict().items()}
    torch.save(inner | {"head.fc.weight": torch.zeros(10, 6)}, tmp_path / "w.pth")
    again = backbones.create("timm:resnet18", weights=tmp_path / "w.pth")
    assert timm[-1] == ("resnet18", False, 20)
    assert torch.equal(again.state_dict()["module.0.weight"], inner["0.weight"])


def test_timm_transformer_is_made_for_the_size(timm):
    backbones.create("timm:vit_small", image_size=32, pretrained=False)
    assert timm == [("vit_small", False, 20), ("vit_small", False, 32)]


def test_timm_unknown_model(timm):
    with pytest.raises(UsageError, match=r"timm has no model 'resnet81'. Near: timm:resnet18"):
        backbones.create("timm:resnet81")


@pytest.mark.parametrize("library", ["torchvision", "timm"])
def test_library_not_installed(monkeypatch, library):
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(FisherhashError, match=rf"'{library}', .*fisherhash\[timm\]"):
        backbones.create(f"{library}:resnet18", pretrained=False)


@pytest.mark.parametrize(
    ("name", "features"),
    [
        ("torchvision:resnet18", 512),
        ("torchvision:alexnet", 4096),
        ("torchvision:squeezenet1_0", 512),
        ("torchvision:googlenet", 1024),
        ("timm:resnet18", 512),
    ],
)
def test_real_libraries(name, features):
    pytest.importorskip(name.partition(":")[0], exc_type=(ImportError, RuntimeError))
    backbone = backbones.create(name, pretrained=False, image_size=224).train()
    assert backbone(torch.randint(256, (2, 3, 224, 224)).float()).shape == (2, features)


def test_wrap_finds_the_width_and_leaves_the_module_alone():
    module = nn.Sequential(nn.Conv2d(3, 7, 3), nn.BatchNorm2d(7), nn.Dropout())
    module[2].eval()
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    backbone = backbones.wrap(module, preprocessing=Preprocessing(size=16))
    assert [part.training for part in module] == [True, True, False]
    assert all(torch.equal(before[name], t) for name, t in module.state_dict().items())
    assert (backbone.name, backbone.features) == ("module:Sequential", 7)
    pixels = torch.randint(256, (3, 3, 16, 16), dtype=torch.uint8)
    backbone.eval()
    images = (pixels - backbone.mean) / backbone.std
    torch.testing.assert_close(backbone(pixels), module(images).mean((2, 3)))


def test_wrap_refuses_a_module_that_does_not_run():
    with pytest.raises(UsageError, match=r"module:Linear does not run on .*\(n, 3, 224, 224\)"):
        backbones.wrap(nn.Linear(5, 5))


class Returns(nn.Module):
    def __init__(self, output) -> None:
        super().__init__()
        self.output = output

    def forward(self, images):
        return self.output


@pytest.mark.parametrize(
    ("output", "found"),
    [
        (torch.zeros(2, 4, 5), r"\(2, 4, 5\)"),
        ((torch.zeros(2, 4),), "tuple"),
        (torch.zeros(4), r"\(4,\)"),
        (torch.zeros(1, 4), r"\(1, 4\)"),
    ],
)
def test_wrap_refuses_other_outputs(output, found):
    with pytest.raises(UsageError, match=f"must return features .*it returned {found}"):
        backbones.wrap(Returns(output), preprocessing=Preprocessing(size=8))
