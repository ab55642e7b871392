"""Heads of single methods: slices that share nothing, word numbers as codes, classes as codes."""

import math

import numpy as np
import pytest
import torch

from fisherhash import backbones, codes
from fisherhash.errors import FisherhashError, UsageError
from fisherhash.hasher import Hasher
from fisherhash.heads import HEADS, ArgmaxHead, LinearHead, ProductHead, SlicedHead, restore


def features(count=60, width=16, seed=0):
    return torch.randn(count, width, generator=torch.Generator().manual_seed(seed))


def product(bits, width=24, words=True):
    torch.manual_seed(bits)
    head = ProductHead(16, bits, width)
    head.start(features())
    if words:
        head.codebooks.uniform_(-1, 1)
    return head.eval()


def test_a_slice_is_the_printed_layer():
    torch.manual_seed(0)
    head = SlicedHead(16, 3, width=4).eval()
    head.start(features())
    x = head.prepare(features())[5]
    logits = head.logits(features())[5]
    for k in range(3):
        total = float(head.bias[k])
        for unit in range(4):
            row = k * 4 + unit
            active = float(head.hidden.weight[row] @ x + head.hidden.bias[row])
            total += float(head.weight[k, unit]) * max(0.0, active)
        assert float(logits[k]) == pytest.approx(total, abs=1e-5)


def test_no_two_bits_share_a_hidden_unit():
    head = SlicedHead(16, 5, width=7)
    head.start(features())
    head(features())[:, 2].sum().backward()
    moved = head.hidden.weight.grad.abs().sum(1).view(5, 7).sum(1) > 0
    assert moved.tolist() == [False, False, True, False, False]


def test_a_sliced_head_starts_at_unit_scale():
    head = SlicedHead(16, 12)
    head.start(5 + 100 * features(400))
    logits = head.logits(5 + 100 * features(400))
    torch.testing.assert_close(logits.mean(0), torch.zeros(12), atol=1e-4, rtol=0)
    torch.testing.assert_close(logits.std(0), torch.ones(12), atol=1e-2, rtol=0)


@pytest.mark.parametrize("bits", [1, 5, 8, 9, 12, 13, 17, 20, 48, 64, 97, 1024])
def test_any_number_of_bits_has_subspaces(bits):
    each = ProductHead.divide(bits)
    assert sum(each) == bits
    assert max(each) <= 8
    assert max(each) - min(each) <= 1
    assert len(each) == math.ceil(bits / 8)


def test_multiples_of_eight_are_bytes():
    assert ProductHead.divide(12) == [6, 6]
    assert ProductHead.divide(48) == [8] * 6


@pytest.mark.parametrize("bits", [1, 6, 12, 13, 20, 48])
def test_a_code_is_the_numbers_of_the_nearest_words(bits):
    head = product(bits)
    z = head(features())
    packed = codes.pack(head.logits(features()).numpy())
    assert packed.shape == (60, codes.code_bytes(bits))
    numbers = head.words(packed)
    size = head.width // head.subspaces
    for i in (0, 17, 59):
        text = "".join(str(b) for b in codes.unpack(packed[i : i + 1], bits)[0])
        at = 0
        for m, count in enumerate(head.subspace_bits):
            part = z[i, m * size : (m + 1) * size]
            distances = [
                float((part - head.codebooks[m, w]).square().sum()) for w in range(2**count)
            ]
            assert int(text[at : at + count], 2) == int(np.argmin(distances)) == numbers[i, m]
            at += count


@pytest.mark.parametrize("bits", [6, 13, 20])
def test_distances_are_a_sum_of_table_cells(bits, monkeypatch):
    monkeypatch.setattr("fisherhash.heads.BLOCK_PAIRS", 100)
    head = product(bits)
    z = head(features(7, seed=1)).detach()
    packed = codes.pack(head.logits(features()).numpy())
    blocks = list(head.distances(z, packed))
    assert [len(block) for block in blocks] == [1] * 7
    got = torch.cat(blocks)
    size = head.width // head.subspaces
    numbers = head.words(packed).tolist()
    for q, i in [(0, 0), (3, 41), (6, 59)]:
        total = 0.0
        for m in range(head.subspaces):
            word = head.codebooks[m, numbers[i][m]].tolist()
            part = z[q, m * size : (m + 1) * size].tolist()
            total += sum((a - b) ** 2 for a, b in zip(part, word, strict=True))
        assert float(got[q, i]) == pytest.approx(total, rel=1e-4)
    items = head.reconstruct(head.words(packed))
    torch.testing.assert_close(got, torch.cdist(z, items).square(), atol=1e-4, rtol=1e-3)


def test_numbers_beyond_a_subspaces_bits_are_never_chosen():
    """13 = 7 + 6 bits: words 64 to 127 of the second subspace have no number."""
    head = product(13)
    outputs = head(features()).detach()
    size = head.width // 2
    head.codebooks[1, 64:] = outputs[:1, size:]  # they would be nearest
    assert head.assign(outputs)[:, 1].max() < 64


def test_the_bottleneck_is_a_multiple_of_the_subspaces():
    assert ProductHead(16, 20, 100).width == 102
    assert restore(ProductHead(16, 20, 100).config()).width == 102


def test_heads_with_hamming_distances_have_no_others():
    head = LinearHead(16, 8)
    assert head.hamming
    assert not ProductHead.hamming
    with pytest.raises(NotImplementedError, match="'linear' have Hamming distances"):
        head.distances(torch.zeros(1, 8), np.zeros((1, 1), np.uint8))


def test_an_argmax_head_gives_the_code_of_the_likeliest_class():
    head = ArgmaxHead(16, 4, 3)
    head.start(features())
    torch.nn.init.normal_(head.linear.weight)
    head.codes.copy_(torch.tensor([[1.0, 1, 1, 1], [1, -1, 1, -1], [-1, -1, 1, 1]]))
    head.eval()
    assert torch.equal(head.logits(features()), head.codes[head(features()).argmax(1)])


@pytest.mark.parametrize("head", [SlicedHead, ProductHead])
def test_impossible_widths(head):
    with pytest.raises(UsageError, match="at least one"):
        head(16, 8, 0)
    with pytest.raises(FisherhashError):
        restore({"kind": head.kind, "in_features": 16, "bits": 8, "slices": 2})


def built(kind, in_features):
    if kind == "argmax":
        return ArgmaxHead(in_features, 13, 3)
    return HEADS[kind](in_features, 13)


@pytest.mark.parametrize("kind", ["sliced", "product", "argmax"])
def test_a_hasher_with_this_head_survives_its_folder(kind, tmp_path):
    backbone = backbones.create("tiny")
    head = built(kind, backbone.features)
    head.start(features(width=backbone.features))
    with torch.no_grad():
        for value in (*head.parameters(), *head.buffers()):
            if value.is_floating_point() and torch.isfinite(value).all():
                value.add_(0.1 * torch.randn_like(value))
    hasher = Hasher(backbone, head, "mine", ("a", "b", "c"))
    hasher.save(tmp_path / "model")
    loaded = Hasher.load(tmp_path / "model")
    pictures = np.random.default_rng(0).integers(0, 256, (5, 32, 32, 3), dtype=np.uint8)
    np.testing.assert_array_equal(loaded.encode(list(pictures)), hasher.encode(list(pictures)))
    assert loaded.fingerprint() == hasher.fingerprint()
    assert loaded.head.config() == head.config()
