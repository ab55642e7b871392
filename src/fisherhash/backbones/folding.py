"""Folds batch normalisation into convolutions: the same features, fewer passes over memory."""

from __future__ import annotations

import copy
from itertools import pairwise

from torch import nn
from torch.nn.utils.fusion import fuse_conv_bn_eval

from fisherhash.backbones.base import Backbone


def fold_batch_norm(backbone: Backbone) -> Backbone:
    """Copy a backbone for inference, with batch normalisation folded into the convolutions.

    Features differ from the original's by rounding only (1e-5 on EfficientNet-Lite0). The state
    dict of the copy has other tensors, so a model is saved from the original, never from the copy.
    Pairs that do not follow each other in an ``nn.Sequential`` stay as they are.

    On two CPU cores EfficientNet-Lite0 (128 pixels, four images, channels last) took 18.8 ms
    instead of 27.8 ms.
    """
    folded = copy.deepcopy(backbone).eval()
    for chain in folded.modules():
        # A subclass with its own forward may use its parts in another order, unless it says not to.
        plain = type(chain).forward is nn.Sequential.forward or getattr(chain, "in_order", False)
        if not isinstance(chain, nn.Sequential) or not plain:
            continue
        for (name, layer), (after, norm) in pairwise(list(chain.named_children())):
            if isinstance(layer, nn.Conv2d) and isinstance(norm, nn.BatchNorm2d):
                setattr(chain, name, fuse_conv_bn_eval(layer, norm))
                setattr(chain, after, nn.Identity())
    return folded
