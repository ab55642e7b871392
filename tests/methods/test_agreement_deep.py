"""Losses of the deep methods since the paper, and MIHash, against their authors' code.

The values come from runs of public code, outside this project, on the same numbers:

* ``hyp2``: github.com/JerryXu0129/HyP2-Loss at e9c1c24, model.py, with our threshold;
* ``dhd``: github.com/youngkyunJang/Deep-Hash-Distillation at 0cc9cee, loss.py;
* ``cibhash``: github.com/zexuanqiu/CIBHash at 4c896ee, model/CIBHash.py;
* ``mdsh``: github.com/Wangld5/Center-Hashing at 5c28ab5, loss/ourLoss.py;
* ``crovca``: github.com/ilyassmoummad/cross-view-code-alignment at d025fc9, loss.py;
* ``mihash``: github.com/fcakir/mihash at e6ba59e, mi_forward.m and mi_backward.m, in Octave 7.3.

No code of the authors of CRH could be had. That of DRSCH is a layer for a GPU in an old version of
Caffe.
"""

import pytest
import torch

from fisherhash.methods import Batch, Progress, create
from fisherhash.methods._codebooks import promised_distance

SEVERAL = torch.tensor([[1.0, 0, 0], [0, 1, 1], [1, 1, 1], [0, 0, 1]])


def wave(rows, columns, shift):
    """Numbers between -1.5 and 1.5 that need no random generator."""
    steps = 0.7 * torch.arange(rows * columns, dtype=torch.float32) + shift
    return 1.5 * torch.sin(steps).view(rows, columns)


def batch_of(labels, *, index=None, views=1):
    index = torch.arange(len(labels) // views).repeat(views) if index is None else index
    return Batch(labels, index, torch.zeros(len(labels), 1), views)


def test_hyp2():
    method = create("hyp2", bits=6, classes=4)
    method.proxies.data = wave(4, 6, 1.1)
    labels = [[1.0, 1, 0, 0], [0, 0, 1, 1], [1, 0, 0, 0], [0, 1, 1, 0], [0, 0, 0, 1]]
    u = wave(5, 6, 0.3).requires_grad_()
    loss = method.loss(u, batch_of(torch.tensor(labels)))["loss"]
    loss.backward()
    assert float(loss) == pytest.approx(1.5898399, rel=1e-6)
    assert float(u.grad.abs().sum()) == pytest.approx(0.5281562, rel=1e-5)


def test_dhd():
    method = create("dhd", bits=6, classes=3)
    method.proxies.data = wave(3, 6, 1.1)
    views = torch.cat([wave(4, 6, 0.3), wave(4, 6, 2.0)])
    terms = method.loss(views, batch_of(SEVERAL.repeat(2, 1), views=2))
    expected = {"proxy": 3.2338541, "distillation": 1.0574429, "quantization": 0.4171520}
    assert {name: float(terms[name]) for name in expected} == pytest.approx(expected, rel=1e-5)


def test_cibhash():
    """Ours is the authors' loss times the number of bits."""
    u = wave(8, 6, 0.3).requires_grad_()
    terms = create("cibhash", bits=6, classes=0).loss(u, batch_of(torch.empty(8, 0), views=2))
    terms["loss"].backward()
    assert float(terms["contrast"]) == pytest.approx(4.0282979, rel=1e-6)
    assert float(terms["agreement"]) == pytest.approx(2.2338934, rel=1e-6)
    assert float(u.grad.abs().sum()) == pytest.approx(6 * 1.2861239, rel=1e-5)


class Train:
    """A training set whose outputs are known."""

    def __init__(self, outputs, labels):
        self._outputs, self.labels = outputs, labels

    def outputs(self):
        return self._outputs

    features = outputs


def test_mdsh():
    """Theirs is a mean over classes and bits too, and an image is similar to itself there."""
    method = create("mdsh", bits=8, classes=3)
    labels = torch.eye(3)[[0, 1, 2, 0, 1]]
    method.start(Train(wave(5, 8, 2.0), labels))
    method.centers.copy_(torch.where(wave(3, 8, 1.1) > 0, 1.0, -1.0))
    method.on_epoch_start(Progress(50, 100, 0, 10))
    index = torch.tensor([0, 1, 3])
    terms = method.loss(wave(3, 8, 0.3), batch_of(labels[index], index=index))
    assert float(terms["center"]) == pytest.approx(3 * 1.1297179, rel=1e-5)
    assert float(terms["pair"]) == pytest.approx(0.9100786, rel=1e-6)
    assert float(terms["quantization"]) == pytest.approx(8 * 0.2345554, rel=1e-6)


def test_mdsh_distances():
    cases = ((10, 12), (100, 16), (100, 48), (21, 24))
    assert [promised_distance(*case) for case in cases] == [5, 4, 17, 9]


def test_crovca():
    """Their regulariser, over two views; the cross-entropy is torch's, here and there."""
    u = wave(8, 6, 0.3).requires_grad_()
    terms = create("crovca", bits=6, classes=0).loss(u, batch_of(torch.empty(8, 0), views=2))
    terms["coding_rate"].backward()
    assert float(terms["coding_rate"]) == pytest.approx(1.6938379, rel=1e-5)
    assert float(u.grad.abs().sum()) == pytest.approx(0.1152747, rel=1e-4)


def test_mihash():
    """Theirs is a sum over anchors; 2 sigma(3 u) - 1 there is tanh(1.5 u) here."""
    options = {"bins": 5, "sharpness": 1.5, "loss_scale": 1.0}
    u = wave(9, 6, 0.3).requires_grad_()
    labels = torch.eye(3)[[0, 0, 1, 2, 1, 0, 2, 1, 2]]
    loss = create("mihash", bits=6, classes=3, options=options).loss(u, batch_of(labels))["loss"]
    loss.backward()
    assert float(loss) == pytest.approx(-0.1490270, rel=1e-5)
    assert float(u.grad.abs().sum()) == pytest.approx(0.3050706, rel=1e-4)
