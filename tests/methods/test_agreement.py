"""Shallow methods against other implementations, on the same data.

Frozen codes come from runs of public code, outside this project. Each value is one bit of all 60
rows, packed. The sources:

* ``sh``: trainSH.m and compressSH.m by Weiss, Torralba and Fergus; ``itq``: trainITQ.m after Gong
  and Lazebnik; ``sgh``: trainSGH.m by Jiang and Li; all three as in
  github.com/willard-yuan/hashing-baseline-for-image-retrieval at 8228378, run in Octave 7.3.
* ``agh``: OneLayerAGH_Train.m by Liu, as in github.com/ColumbiaDVMM/Anchor-Graph-Hashing at
  b15951c, run in Octave 7.3.
* ``sdh``: github.com/wen-zhi/hashing at c7e6a54, in Python.
"""

import numpy as np
import pytest
import torch

from fisherhash import methods
from fisherhash.methods.base import sign
from fisherhash.methods.shallow import _features
from fisherhash.methods.shallow.itq import improved_rotation

FROZEN = {
    "sh": "324b84ada6333d80 1137c08a3a2bc7b0 2d300c5734802ee0 c6f6b5e9756e20f0"
    " 0c44dd7c2eaac600 d82cc86123732f70 902147a5604e0970 6e05468c65a6c3f0",
    "itq": "62cb86ade6261dc0 397384ce362335b0 a14a8e27c6713c40 06f03d5b5c8ce2e0"
    " c440a76567662ce0 12fff0a8aa3b1590",
    "agh": "d2cba4ade6733dd0 ee8c3f25c9c4ea40 3b47c9982eb3d790 568f38e8a3b22370 6dc6bc4c0691b6c0",
    "sgh": "334b86afa6331d80 e3cab725c6f53c40 12f3a4a8a62b15b0 c28f73a08b7fc110"
    " d84886e563722ce0 86d0379964ce20c0",
    "sdh": "304b84ada6333d80 f7fffffffffffff0 fffffffffffffff0 dfb77bda79cfc3f0"
    " 1003008820030180 d548bf7563f63c40 017cc4271a38fe30 cf803b5041c40040",
}
ITQ_START = """
-0.501840189 -0.416444282 -0.570336299 0.374539042 -0.128918817 -0.304216263
0.044105929 -0.685437868 0.456016778 -0.018388100 0.516379866 -0.230850614
0.220846572 -0.480607922 -0.439362880 -0.505274996 -0.054994779 0.518532381
-0.144669785 -0.166513224 0.287168275 -0.506072105 -0.664949045 -0.413052265
0.481513284 -0.304102055 0.194237360 0.584266291 -0.509253099 0.192958360
-0.666823435 -0.074568098 0.391831206 0.081261848 -0.110505186 0.614361072
"""


def formula(count, width):
    """Numbers between -0.5 and 0.5 that are the same in every language."""
    rows, columns = np.arange(count)[:, None], np.arange(width)
    wave = 43758.5453 * np.sin(12.9898 * (rows + 1) + 78.233 * (columns + 1))
    return wave - np.floor(wave) - 0.5


X = torch.from_numpy(formula(60, 8) * 0.8 ** np.arange(8))


def frozen(name):
    """The other implementation's bits (60, K)."""
    columns = [np.frombuffer(bytes.fromhex(one), np.uint8) for one in FROZEN[name].split()]
    return np.unpackbits(np.stack(columns), axis=1, count=60).T.astype(bool)


def same(found, expected, *, up_to_sign):
    """Compare bits; an eigenvector has no sign, so a whole column may be the other way round."""
    found = np.asarray(found, dtype=bool)
    assert found.shape == expected.shape
    agree = (found == expected).mean(0)
    np.testing.assert_array_equal(np.maximum(agree, 1 - agree) if up_to_sign else agree, 1.0)


@torch.no_grad()
def fitted_bits(name, features, bits, **options):
    method = methods.create(name, bits=bits, classes=0, options=options)
    head = method.fit(features, seed=0).eval()
    return head.logits(features.float()) > 0


def test_spectral_hashing_has_the_codes_of_its_authors():
    same(fitted_bits("sh", X, 8), frozen("sh"), up_to_sign=True)


def test_itq_turns_as_the_authors_do():
    found = _features.principal(X, 6, name="itq")
    directions = found.directions
    # The start is for Octave's eigenvectors, whose first entries have these signs.
    signs = torch.tensor([1.0, 1.0, 1.0, 1.0, -1.0, -1.0], dtype=torch.float64)
    directions = directions * sign(directions[0]) * signs
    projected = (X - found.mean) @ directions
    start = torch.tensor([float(one) for one in ITQ_START.split()]).double().reshape(6, 6)
    rotation = improved_rotation(projected, start, 51)
    same(projected @ rotation > 0, frozen("itq"), up_to_sign=False)


def test_agh_has_the_codes_of_its_author(monkeypatch):
    anchors, sigma = X[::5], 0.5
    monkeypatch.setattr(_features, "k_means", lambda *_, **__: anchors)
    near = _features.distances_to(X, anchors).topk(3, largest=False).values
    width = sigma / float(near.median() * 2.0) ** 0.5  # exp(-d^2 / sigma^2), in our units
    found = fitted_bits("agh", X, 5, anchors=12, nearest=3, width=width)
    same(found, frozen("agh"), up_to_sign=True)


def test_sgh_has_the_codes_of_its_authors(monkeypatch):
    features = X - X.mean(0)
    features = features / features.norm(dim=1).max()
    monkeypatch.setattr(_features, "draw_rows", lambda *_: torch.arange(0, 60, 4))
    distances = _features.distances_to(features, features[::4])
    middle = _features.kernel_width(features, features[::4], name="sgh")
    width = float(distances.mean()) ** 0.5 / middle  # their kernel follows the mean square
    same(fitted_bits("sgh", features, 6, anchors=15, width=width), frozen("sgh"), up_to_sign=True)


def test_sdh_steps_as_another_implementation_does():
    classes = 2 * (X[:, 0] > 0).long() + (X[:, 1] > 0.1).long()
    labels = torch.eye(4, dtype=torch.float64)[classes]
    kernel = torch.exp(-_features.distances_to(X, X[:12]) / (2 * 0.4**2))
    phi = torch.cat([kernel, torch.ones(60, 1, dtype=torch.float64)], dim=1)
    gram = phi.T @ phi + 0.01 * torch.eye(13, dtype=torch.float64)
    method = methods.create("sdh", bits=8, classes=4, options={"attraction": 0.05, "ridge": 1.0})
    codes = sign(torch.from_numpy(formula(60, 16)[:, 8:]))
    for _ in range(5):
        predicted = phi @ torch.linalg.solve(gram, phi.T @ codes)
        codes = method.code_step(codes, labels, predicted)
    same(codes > 0, frozen("sdh"), up_to_sign=False)


def test_itq_finds_as_many_neighbours_as_that_of_faiss():
    """Each start ends in another rotation, so means over several starts are compared."""
    faiss = pytest.importorskip("faiss", reason="faiss-cpu is not installed")
    generator = torch.Generator().manual_seed(0)
    mixing = torch.randn(32, 32, generator=generator) * torch.logspace(0, -1, 32)
    features = torch.randn(2000, 32, generator=generator) @ mixing.T
    projected = _features.principal(features, 16, name="itq").project(features).float()
    near = torch.cdist(features[:300], features).topk(11, largest=False).indices[:, 1:]

    def error(values):
        """The mean squared distance to the nearest code, of data of mean square 1."""
        values = values / values.square().mean().sqrt()
        return float((values.abs() - 1.0).square().mean())

    def recall(values):
        """The share of the ten nearest rows that is among the 100 nearest codes."""
        bits = sign(values).double()
        order = 1e-6 * torch.arange(len(bits)) - bits[:300] @ bits.T
        found = order.topk(101, largest=False).indices
        return float(
            np.mean([torch.isin(*one).float().mean() for one in zip(near, found, strict=True)])
        )

    ours, theirs = [], []
    for seed in range(6):
        with torch.no_grad():
            method = methods.create("itq", bits=16, classes=0)
            ours.append(method.fit(features, seed=seed).logits(features))
        itq = faiss.ITQMatrix(16)
        itq.seed = seed + 1
        itq.train(projected.numpy())
        theirs.append(torch.from_numpy(itq.apply(projected.numpy())))
    one, other = [recall(values) for values in ours], [recall(values) for values in theirs]
    noise = max(np.std(one), np.std(other))
    assert abs(np.mean(one) - np.mean(other)) < 2 * noise
    assert min(*one, *other) > recall(projected) + 10 * noise  # what PCA alone finds is no match
    # faiss leaves a little error that one more exact turn would lower; ours has none of it.
    assert np.mean([error(values) for values in ours]) < np.mean([error(v) for v in theirs])
