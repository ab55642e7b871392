"""Heads: the scale they start with, what is needed to build them again, what each kind does."""

import inspect
import math

import numpy as np
import pytest
import torch
from fisherhash.model.torch_hasher import TorchHasher

from fisherhash import backbones, codes
from fisherhash.errors import FisherhashError, UsageError
from fisherhash.model.hasher import Hasher
from fisherhash.model.heads import (
    HEADS,
    ArgmaxHead,
    LinearHead,
    ProductHead,
    SlicedHead,
    WideHead,
    restore_head,
)

kinds = pytest.mark.parametrize("kind", sorted(HEADS))
# These give the bits of a class or of a word, as -1 and 1.
CHOOSING = {"argmax", "product"}
# Methods in closed form compute all of these, which have no first weights.
FITTED = {"anchor-graph", "cube", "kernel", "periodic", "trees"}


def made(kind, bits, in_features=24):
    """A head with whatever else its kind needs."""
    needs = inspect.signature(HEADS[kind]).parameters.values()
    outputs = 20 if kind == "cut-logits" else bits
    more = {"classes": 5, "width": 20, "inner": LinearHead(in_features, outputs)}
    more |= {"anchors": 6, "nearest": 2, "trees": 2, "depth": 2}
    more |= {"dimensions": [3, 4], "subspace_bits": [bits // 2, bits - bits // 2]}
    return HEADS[kind](
        in_features,
        bits,
        **{n.name: more[n.name] for n in needs if n.default is n.empty and n.name in more},
    )


def skewed_features(count=400, width=24):
    """Scales from a thousandth to a thousand, means far from 0, one feature that never varies."""
    generator = torch.Generator().manual_seed(1)
    scales = torch.logspace(-3, 3, width)
    features = torch.randn(count, width, generator=generator) * scales + 5 * scales
    features[:, 3] = 7.0
    return features


@pytest.mark.parametrize("kind", sorted(HEADS.keys() - FITTED))
def test_logits_have_unit_scale_at_the_start(kind):
    torch.manual_seed(0)
    head = made(kind, 16)
    features = skewed_features()
    head.start(features)
    logits = head.eval().logits(features)
    assert logits.shape == (400, 16)
    if kind in CHOOSING:
        assert set(logits.unique().tolist()) <= {-1.0, 1.0}
        return
    torch.testing.assert_close(logits.mean(0), torch.zeros(16), atol=1e-3, rtol=0)
    torch.testing.assert_close(logits.std(0), torch.ones(16), atol=1e-2, rtol=0)


@kinds
def test_every_feature_counts_alike_and_a_constant_one_not_at_all(kind):
    head = made(kind, 16)
    features = skewed_features()
    head.start(features)
    prepared = head.eval().prepare(features)
    varied = [i for i in range(24) if i != 3]
    torch.testing.assert_close(prepared[:, varied].std(0), torch.ones(23), atol=1e-2, rtol=0)
    moved = features.clone()
    moved[:, 3] = 1e6
    assert torch.equal(head.logits(moved), head.logits(features))


@kinds
def test_starting_twice_from_one_seed_gives_one_head(kind):
    heads = []
    for _ in range(2):
        torch.manual_seed(3)
        heads.append(made(kind, 8))
        heads[-1].start(skewed_features())
    assert all(
        torch.equal(a, b) for a, b in zip(*(h.state_dict().values() for h in heads), strict=True)
    )


@kinds
def test_dropout_acts_while_training_and_never_while_encoding(kind):
    head = made(kind, 8)
    features = skewed_features()
    head.start(features)
    head.dropout.p = 0.5
    head.train()
    zeros = (head.prepare(features)[:, 0] == 0).float().mean()
    assert 0.35 < zeros < 0.65
    head.eval()
    assert torch.equal(head.logits(features), head.logits(features))
    assert not (head.prepare(features)[:, 0] == 0).any()


@kinds
def test_start_leaves_the_mode_as_it_was(kind):
    for training in (True, False):
        head = made(kind, 8).train(training)
        head.start(skewed_features())
        assert head.training is training


@kinds
def test_a_restored_head_gives_the_same_logits(kind):
    head = made(kind, 11)
    features = skewed_features()
    head.start(features)
    other = restore_head(head.config())
    assert type(other) is type(head)
    other.load_state_dict(head.state_dict())
    assert torch.equal(other.eval().logits(features), head.eval().logits(features))


def test_a_linear_head_is_one_matrix_after_standardising():
    head = LinearHead(24, 8)
    features = skewed_features()
    head.start(features)
    varies = features.std(0) > 0
    standard = torch.where(varies, (features - features.mean(0)) / features.std(0, correction=0), 0)
    expected = standard @ head.linear.weight.T + head.linear.bias
    torch.testing.assert_close(head.eval()(features), expected, atol=2e-3, rtol=1e-3)


def test_from_matrix_is_the_matrix():
    weight, shift = torch.randn(5, 7), torch.randn(7)
    features = torch.randn(20, 7)
    head = LinearHead.from_matrix(weight, shift)
    assert (head.in_features, head.bits) == (7, 5)
    torch.testing.assert_close(head.eval()(features), (features - shift) @ weight.T)


def test_configs_that_describe_no_head():
    with pytest.raises(UsageError, match=r"unknown head 'liner'\. Did you mean 'linear'"):
        restore_head({"kind": "liner", "in_features": 4, "bits": 8})
    with pytest.raises(UsageError, match="unknown head ''"):
        restore_head({})
    with pytest.raises(FisherhashError, match="the head 'linear' cannot be built"):
        restore_head({"kind": "linear", "in_features": 4, "bits": 8, "slices": 2})
    with pytest.raises(UsageError, match="between 1 and 1024"):
        restore_head({"kind": "linear", "in_features": 4, "bits": 0})


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
    monkeypatch.setattr("fisherhash.model.heads.DISTANCES_AT_ONCE", 100)
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
    assert restore_head(ProductHead(16, 20, 100).config()).width == 102


def test_distances_of_logits_rank_codes_as_squared_distances_do(monkeypatch):
    head = LinearHead(16, 10)
    head.start(features())
    assert head.hamming
    assert not ProductHead.hamming
    queries = head.query(features()).detach()
    assert torch.equal(queries, head.logits(features()))
    rows = np.random.default_rng(0).choice([-1.0, 1.0], (30, 10))
    rows[20:] = rows[:10]
    database = codes.pack(rows)
    squared = ((queries.numpy()[:, None] - rows) ** 2).sum(2)
    for block in (7, 2**20):
        monkeypatch.setattr("fisherhash.model.head_base.DISTANCES_AT_ONCE", block)
        found = torch.cat(list(head.distances(queries, database))).numpy()
        same = (queries.numpy() ** 2).sum(1, keepdims=True) + 10
        assert found + same == pytest.approx(squared, abs=1e-4)
        assert np.array_equal(found[:, 20:], found[:, :10])  # equal codes tie exactly


def test_a_wide_head_queries_with_what_its_bits_are_cut_from():
    head = WideHead(16, 4, 6)
    head.start(features())
    torch.nn.init.normal_(head.mixing)
    assert torch.equal(head.query(features()), head.logits(features()))


def test_an_argmax_head_gives_the_code_of_the_likeliest_class():
    head = ArgmaxHead(16, 4, 3)
    head.start(features())
    torch.nn.init.normal_(head.linear.weight)
    head.codes.copy_(torch.tensor([[1.0, 1, 1, 1], [1, -1, 1, -1], [-1, -1, 1, 1]]))
    head.eval()
    assert torch.equal(head.logits(features()), head.codes[head(features()).argmax(1)])


CUTS = pytest.mark.parametrize(("bits", "width"), [(12, 30), (12, 5), (12, 12), (1, 3), (7, 1)])


def wide_head(bits, width):
    """As training leaves it: what the bits are cut with is no longer what it was at the start."""
    torch.manual_seed(bits)
    head = WideHead(16, bits, width)
    head.start(features())
    head.mixing.copy_(torch.randn(bits, width))
    head.offsets.copy_(torch.randn(bits))
    return head.eval()


@CUTS
def test_bits_are_cut_from_the_outputs_by_a_second_layer(bits, width):
    head = wide_head(bits, width)
    outputs, logits = head(features()), head.logits(features())
    assert outputs.shape == (60, width)
    assert logits.shape == (60, bits)
    for i, k in ((0, 0), (17, bits // 2), (59, bits - 1)):
        total = float(head.offsets[k])
        total += sum(float(head.mixing[k, j]) * float(outputs[i, j]) for j in range(width))
        assert float(logits[i, k]) == pytest.approx(total, abs=1e-4)
    assert {name for name, _ in head.named_parameters()} == {"linear.weight", "linear.bias"}


@CUTS
def test_a_wide_head_starts_with_outputs_of_unit_scale_and_their_signs_as_bits(bits, width):
    head = WideHead(16, bits, width)
    head.start(5 + 100 * features(400))
    outputs = head.eval()(5 + 100 * features(400))
    torch.testing.assert_close(outputs.mean(0), torch.zeros(width), atol=1e-3, rtol=0)
    torch.testing.assert_close(outputs.std(0), torch.ones(width), atol=1e-2, rtol=0)
    logits = head.logits(5 + 100 * features(400))
    for k in range(bits):  # where there are fewer outputs than bits, these come again
        torch.testing.assert_close(logits[:, k], outputs[:, k % width])


@CUTS
def test_a_restored_wide_head_gives_the_same_codes(bits, width):
    head = wide_head(bits, width)
    assert head.config()["width"] == width
    other = restore_head(head.config())
    assert {"mixing", "offsets"} <= other.state_dict().keys()
    other.load_state_dict(head.state_dict())
    assert torch.equal(other.eval()(features()), head(features()))
    assert torch.equal(other.logits(features()) > 0, head.logits(features()) > 0)


@pytest.mark.parametrize("head", [SlicedHead, ProductHead, WideHead])
@pytest.mark.parametrize("width", [0, -3])
def test_impossible_widths(head, width):
    with pytest.raises(UsageError, match="at least one"):
        head(16, 8, width)
    with pytest.raises(FisherhashError):
        restore_head({"kind": head.kind, "in_features": 16, "bits": 8, "slices": 2})


@kinds
def test_a_hasher_with_this_head_survives_its_folder(kind, tmp_path):
    backbone = backbones.create("tiny")
    head = made(kind, 13, backbone.features)
    head.start(features(width=backbone.features))
    with torch.no_grad():
        for value in (*head.parameters(), *head.buffers()):
            if value.is_floating_point() and torch.isfinite(value).all():
                value.add_(0.1 * torch.randn_like(value))
    hasher = TorchHasher(backbone, head, "mine", ("a", "b", "c"))
    hasher.save(tmp_path / "model")
    loaded = Hasher.load(tmp_path / "model")
    pictures = np.random.default_rng(0).integers(0, 256, (5, 32, 32, 3), dtype=np.uint8)
    np.testing.assert_array_equal(loaded.encode(list(pictures)), hasher.encode(list(pictures)))
    assert loaded.fingerprint() == hasher.fingerprint()
    assert loaded.head.config() == head.config()
