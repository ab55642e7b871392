from __future__ import annotations

import torch
from torch import nn

from fisherhash import backbones
from fisherhash.data.preprocessing import Preprocessing


def norms(module: nn.Module) -> int:
    return sum(isinstance(part, nn.BatchNorm2d) for part in module.modules())


def test_folding_keeps_the_features_and_the_original():
    backbone = backbones.create("efficientnet-lite0", image_size=96)
    before = {name: tensor.clone() for name, tensor in backbone.state_dict().items()}
    folded = backbones.fold_batch_norm(backbone)
    assert (norms(backbone), norms(folded)) == (49, 0)
    pixels = torch.randint(256, (2, 3, 96, 96), dtype=torch.uint8)
    with torch.inference_mode():
        torch.testing.assert_close(folded(pixels), backbone(pixels), rtol=1e-4, atol=1e-4)
    assert all(torch.equal(before[name], t) for name, t in backbone.state_dict().items())
    assert (folded.name, folded.features) == (backbone.name, backbone.features)


class Reversed(nn.Sequential):
    def forward(self, images):
        for layer in reversed(list(self)):
            images = layer(images)
        return images


def test_only_what_follows_is_folded():
    torch.manual_seed(0)
    module = nn.Sequential(
        nn.BatchNorm2d(3),
        nn.Conv2d(3, 3, 3),
        nn.ReLU(),
        nn.BatchNorm2d(3),
        Reversed(nn.Conv2d(3, 3, 3), nn.BatchNorm2d(3)),
        nn.Conv2d(3, 3, 3),
        nn.BatchNorm2d(3),
    )
    for part in module.modules():
        if isinstance(part, nn.BatchNorm2d):
            nn.init.uniform_(part.weight)
            nn.init.normal_(part.running_mean)
    backbone = backbones.wrap(module, preprocessing=Preprocessing(size=16)).eval()
    folded = backbones.fold_batch_norm(backbone)
    assert (norms(backbone), norms(folded)) == (4, 3)
    pixels = torch.randint(256, (2, 3, 16, 16), dtype=torch.uint8)
    torch.testing.assert_close(folded(pixels), backbone(pixels))
