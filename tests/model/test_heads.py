"""Heads: the scale they start with, what is left when they are finished, what each kind does."""

import json
import subprocess
import sys

import numpy as np
import pytest
import torch

from fisherhash import backbones, codes
from fisherhash.errors import NotDefinedError, UsageError
from fisherhash.model import head as head_module
from fisherhash.model.hasher import Hasher
from fisherhash.model.head import FinishedHead, linear_head, no_head, word_numbers
from fisherhash.model.head_kinds import KINDS
from fisherhash.model.heads import (
    ArgmaxHead,
    ArrayHead,
    BatchNormHead,
    LinearHead,
    ProductHead,
    SlicedHead,
)
from fisherhash.model.itq_fit import fit_itq
from fisherhash.model.outer_heads import ClassStepHead, CutHead
from fisherhash.model.torch_network import TorchNetwork

MAKERS = {
    "linear": LinearHead,
    "batch-norm": BatchNormHead,
    "argmax": lambda d, bits: ArgmaxHead(d, bits, 5),
    "sliced": SlicedHead,
    "product": lambda d, bits: ProductHead(d, bits, 20),
    "cut": lambda d, bits: CutHead(d, bits, LinearHead(d, 20)),
    "cut again": lambda d, bits: CutHead(d, bits, SlicedHead(d, 20)),
    "class-step": lambda d, bits: ClassStepHead(d, bits, LinearHead(d, bits), 5, weight=0.5),
    "class-step several": lambda d, bits: ClassStepHead(
        d, bits, SlicedHead(d, bits), 5, several=True, weight=2.0
    ),
}
# These give the bits of a class or of a word, as -1 and 1.
CHOOSING = {"argmax", "product"}
kinds = pytest.mark.parametrize("kind", MAKERS)


def made(kind, bits, in_features=24):
    """A head with whatever else its kind needs, started on skewed features."""
    torch.manual_seed(0)
    head = MAKERS[kind](in_features, bits)
    head.start(skewed_features(width=in_features))
    if isinstance(head, ClassStepHead):
        head.inner.start(skewed_features(width=in_features))
    return head.eval()


def trained(kind, bits, in_features=24):
    """The same with other numbers in all that is trained or fitted."""
    head = made(kind, bits, in_features)
    with torch.no_grad():
        for name, value in (*head.named_parameters(), *head.named_buffers()):
            fixed = name.rpartition(".")[2] in ("shift", "scale", "unused")
            if value.is_floating_point() and not fixed:
                value.add_(0.1 * torch.rand_like(value))
    return head


def arrays_of(kind):
    """Arrays, numbers and bits of a head that is fitted to 12 features."""
    torch.manual_seed(1)
    points = {"points": torch.randn(6, 12), "gamma": torch.tensor(0.2)}
    none = torch.zeros(0)
    trees = {"columns": torch.randint(12, (4, 3, 7)), "thresholds": torch.randn(4, 3, 7)}
    return {
        "periodic": {"weight": torch.randn(4, 12), "phase": torch.rand(4), "offset": none[:0]},
        "kernel": points | {"mean": torch.rand(6), "weight": torch.randn(4, 6)},
        "anchors": points | {"weight": torch.randn(3, 6), "high": none[:1], "low": none[:1]},
        "cube": {
            "projection": torch.randn(12, 7),
            "words_0": torch.randn(4, 3),
            "words_1": torch.randn(4, 4),
        },
        "trees": trees | {"votes": torch.randn(4, 3, 8)},
    }[kind]


def skewed_features(count=400, width=24):
    """Scales from a thousandth to a thousand, means far from 0, one feature that never varies."""
    generator = torch.Generator().manual_seed(1)
    scales = torch.logspace(-3, 3, width)
    features = torch.randn(count, width, generator=generator) * scales + 5 * scales
    features[:, 3] = 7.0
    return features


@kinds
def test_logits_have_unit_scale_at_the_start(kind):
    head, features = made(kind, 16), skewed_features()
    logits = head.logits(features)
    assert logits.shape == (400, 16)
    if kind in CHOOSING:
        assert set(logits.unique().tolist()) <= {-1.0, 1.0}
    elif not isinstance(head, ClassStepHead):
        torch.testing.assert_close(logits.mean(0), torch.zeros(16), atol=1e-3, rtol=0)
        torch.testing.assert_close(logits.std(0), torch.ones(16), atol=1e-2, rtol=0)


@kinds
def test_every_feature_counts_alike_and_a_constant_one_not_at_all(kind):
    head, features = made(kind, 16), skewed_features()
    prepared = head.prepare(features)
    varied = [i for i in range(24) if i != 3]
    torch.testing.assert_close(prepared[:, varied].std(0), torch.ones(23), atol=1e-2, rtol=0)
    moved = features.clone()
    moved[:, 3] = 1e6
    assert torch.equal(head.logits(moved), head.logits(features))
    finished = head.finished()
    np.testing.assert_array_equal(finished.logits(moved), finished.logits(features))


@kinds
@pytest.mark.parametrize("bits", [8, 11])
def test_a_finished_head_computes_what_the_trained_one_does(kind, bits):
    head, features = trained(kind, bits), skewed_features()
    finished = head.finished()
    assert (finished.bits, finished.in_features) == (bits, 24)
    assert finished.hamming == head.hamming
    with torch.no_grad():
        expected = head.logits(features)
        again = ArrayHead.of(finished).logits(features)
    found = torch.from_numpy(finished.logits(features.numpy()))
    torch.testing.assert_close(found, expected, atol=2e-3, rtol=1e-3)
    torch.testing.assert_close(again, expected, atol=2e-3, rtol=1e-3)
    # Neither the company nor the number of rows decides a bit.
    for some in (slice(5, 6), slice(0, 37)):
        alone = finished.logits(features[some].numpy())
        np.testing.assert_allclose(alone, found[some].numpy(), rtol=1e-6, atol=1e-9)


@kinds
def test_measurements_of_a_training_compute_with_the_trained_head_itself(kind):
    """To the last digit, so that the numbers of a training do not depend on how it is saved."""
    head, features = trained(kind, 11), skewed_features(10)
    finished = head.finished()
    live = finished.as_trained()
    with torch.inference_mode():
        padded = torch.cat([features, features.new_zeros(2, 24)]).split(4)
        expected = torch.cat([head.logits(rows) for rows in padded])[:10].numpy()
    np.testing.assert_array_equal(live.logits(features.numpy()), expected)
    np.testing.assert_array_equal(live.logits(features.numpy()[6:7]), expected[6:7])
    packed, queries = codes.pack(expected), live.query(features.numpy())
    ranked = [np.concatenate(list(one.distances(queries, packed))) for one in (live, finished)]
    np.testing.assert_allclose(*ranked, rtol=1e-4, atol=1e-3)
    restored = FinishedHead.restored(finished.config(), finished.tensors())
    assert restored.as_trained() is restored


def test_a_class_step_that_cancels_a_logit_is_0_in_any_company():
    """u = -1 and C p = 1 where all centres agree: a bit must not hang on the sum of p."""
    head = ArgmaxHead(24, 8, 5).requires_grad_(False)
    head.codes.fill_(-1.0)
    step = ClassStepHead(24, 8, head, 5, weight=1.0).eval()
    step.scores_weight.copy_(torch.randn(5, 24))
    finished, features = step.finished(), skewed_features(200).numpy() / 100
    together = finished.logits(features)
    assert (together == 0).all()
    alone = np.concatenate([finished.logits(row[None]) for row in features])
    np.testing.assert_array_equal(alone, together)


@kinds
def test_a_finished_head_is_restored_from_its_config_and_arrays(kind):
    head = trained(kind, 11).finished()
    config = json.loads(json.dumps(head.config()))
    again = FinishedHead.restored(config, head.tensors())
    assert again.checksum() == head.checksum() != trained(kind, 12).finished().checksum()
    features = skewed_features().numpy()
    np.testing.assert_array_equal(again.logits(features), head.logits(features))
    arrays = head.tensors()
    del arrays[next(iter(arrays))]
    with pytest.raises(ValueError, match="do not fit"):
        FinishedHead.restored(config, arrays)


@pytest.mark.parametrize("kind", ["periodic", "kernel", "anchors", "cube", "trees"])
def test_a_fitted_head_is_the_same_in_numpy_and_in_torch(kind):
    arrays = arrays_of(kind)
    if kind in ("periodic", "kernel"):
        arrays["offset"] = torch.rand(4)
    if kind == "anchors":
        arrays["high"], arrays["low"] = torch.rand(1), -torch.rand(1)
    head = ArrayHead(kind, 12, 4, arrays | {"shift": torch.rand(12)}, numbers={"nearest": 2})
    features = torch.randn(700, 12)
    finished = FinishedHead.restored(head.finished().config(), head.finished().tensors())
    found = torch.from_numpy(finished.logits(features.numpy()))
    assert found.shape == (700, 4)
    torch.testing.assert_close(found, head.logits(features), atol=1e-4, rtol=1e-4)
    assert 0 < (found > 0).float().mean() < 1


def test_from_matrix_is_the_matrix():
    weight, shift = torch.randn(5, 7), torch.randn(7)
    features = torch.randn(20, 7)
    head = LinearHead.from_matrix(weight, shift)
    assert (head.in_features, head.bits) == (7, 5)
    torch.testing.assert_close(head.eval()(features), (features - shift) @ weight.T)


def test_configs_that_describe_no_head():
    with pytest.raises(UsageError, match=r"unknown head 'liner'\. Did you mean 'linear'"):
        FinishedHead.restored({"kind": "liner", "in_features": 4, "bits": 8}, {})
    arrays = linear_head(np.ones((4, 8)), np.zeros(8)).tensors()
    with pytest.raises(ValueError, match="computes 8 logits, not 9"):
        FinishedHead.restored({"kind": "linear", "in_features": 4, "bits": 9}, arrays)
    with pytest.raises(UsageError, match="between 1 and 1024"):
        FinishedHead.restored({"kind": "linear", "in_features": 4, "bits": 0}, arrays)
    assert {"linear", "kernel", "anchors", "trees", "product", "joined"} <= KINDS.keys()


def features(count=60, width=16, seed=0):
    return torch.randn(count, width, generator=torch.Generator().manual_seed(seed))


def product(bits, width=24, words=True):
    torch.manual_seed(bits)
    head = ProductHead(16, bits, width)
    head.start(features())
    if words:
        head.codebooks.uniform_(-1, 1)
    return head.eval()


@pytest.mark.parametrize("bits", [6, 13, 20])
def test_a_code_is_the_numbers_of_the_nearest_words(bits):
    head = product(bits)
    z = head(features())
    packed = codes.pack(head.logits(features()).numpy())
    assert packed.shape == (60, codes.code_bytes(bits))
    numbers = np.stack(word_numbers(packed, bits), axis=1)
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
    monkeypatch.setattr(head_module, "DISTANCES_AT_ONCE", 100)
    head = product(bits)
    finished = head.finished()
    z = finished.query(features(7, seed=1).numpy())
    np.testing.assert_allclose(z, head(features(7, seed=1)).detach().numpy(), atol=1e-5)
    packed = codes.pack(finished.logits(features().numpy()))
    blocks = list(finished.distances(z, packed))
    assert [len(block) for block in blocks] == [1] * 7
    numbers = torch.from_numpy(np.stack(word_numbers(packed, bits), axis=1))
    items = head.reconstruct(numbers)
    expected = torch.cdist(torch.from_numpy(z), items).square().numpy()
    np.testing.assert_allclose(np.concatenate(blocks), expected, atol=1e-4, rtol=1e-3)


def test_numbers_beyond_a_subspaces_bits_are_never_chosen():
    """13 = 7 + 6 bits: words 64 to 127 of the second subspace have no number."""
    head = product(13)
    outputs = head(features()).detach()
    size = head.width // 2
    head.codebooks[1, 64:] = outputs[:1, size:]  # they would be nearest
    assert head.assign(outputs)[:, 1].max() < 64


def test_distances_of_logits_rank_codes_as_squared_distances_do(monkeypatch):
    head = LinearHead(16, 10)
    head.start(features())
    finished = head.finished()
    queries = finished.query(features().numpy())
    assert np.array_equal(queries, finished.logits(features().numpy()))
    rows = np.random.default_rng(0).choice([-1.0, 1.0], (30, 10))
    rows[20:] = rows[:10]
    database = codes.pack(rows)
    squared = ((queries[:, None] - rows) ** 2).sum(2)
    for block in (7, 2**20):
        monkeypatch.setattr(head_module, "DISTANCES_AT_ONCE", block)
        found = np.concatenate(list(finished.distances(queries, database)))
        same = (queries**2).sum(1, keepdims=True) + 10
        assert found + same == pytest.approx(squared, abs=1e-4)
        assert np.array_equal(found[:, 20:], found[:, :10])  # equal codes tie exactly


def test_a_head_that_is_part_of_its_network_has_no_distances_of_its_own():
    head = no_head(16, of="product", features=32, hamming=False)
    with pytest.raises(UsageError, match="which an exported model does not compute"):
        head.query(np.zeros((1, 16)))
    with pytest.raises(NotDefinedError, match="no bits can follow"):
        head.joined(np.zeros((16, 3)), np.zeros(3))


def pictures(count=5):
    rng = np.random.default_rng(0)
    return list(rng.integers(0, 256, (count, 32, 32, 3), dtype=np.uint8))


def tiny_hasher(head, **about):
    network = TorchNetwork(backbones.create("tiny"), torch.device("cpu"))
    return Hasher(network, head, method="mine", **about)


@kinds
def test_a_hasher_with_this_head_survives_its_folder(kind, tmp_path):
    hasher = tiny_hasher(trained(kind, 13, 32).finished(), classes=("a", "b", "c"))
    hasher.save(tmp_path / "model")
    loaded = Hasher.load(tmp_path / "model")
    np.testing.assert_array_equal(loaded.encode(pictures()), hasher.encode(pictures()))
    assert loaded.fingerprint() == hasher.fingerprint()
    assert loaded.head.config() == hasher.head.config()
    if hasher.head.hamming:
        short = hasher.truncated(8)
        assert np.array_equal(short.encode(pictures()), hasher.encode(pictures())[:, :1])


def test_learned_bits_are_followed_by_fitted_ones(tmp_path):
    """The first bits are the learned code; the model keeps what was fitted, apart from its code."""
    rng = np.random.default_rng(0)
    weight, offset = rng.normal(size=(32, 9)), rng.normal(size=9)
    plain = tiny_hasher(trained("linear", 16, 32).finished(), fitted=(weight, offset))
    for hasher in (plain, plain.with_head(trained("sliced", 16, 32).finished())):
        longer = hasher.extended(*hasher.fitted)
        logits = longer.logits(pictures())
        assert logits.shape == (5, 25)
        np.testing.assert_array_equal(logits[:, :16], hasher.logits(pictures()))
        (rows,) = (part.values for part in hasher.row_blocks(pictures()))
        np.testing.assert_allclose(logits[:, 16:], rows @ weight + offset, rtol=1e-4, atol=1e-4)
        assert longer.fingerprint() != hasher.fingerprint()
        assert longer.truncated(16).fingerprint() == hasher.fingerprint()
        assert longer.truncated(20).bits == 20
        longer.save(tmp_path / "longer")
        loaded = Hasher.load(tmp_path / "longer")
        assert loaded.fingerprint() == longer.fingerprint()
        np.testing.assert_array_equal(loaded.logits(pictures()), logits)
    hasher.save(tmp_path / "model")
    loaded = Hasher.load(tmp_path / "model")
    np.testing.assert_allclose(loaded.fitted[0], weight)
    assert loaded.bits == 16
    assert plain.with_head(plain.head).fingerprint() == plain.fingerprint()
    with pytest.raises(UsageError, match=r"weight of shape \(32, m\)"):
        hasher.extended(weight.T, offset)
    with pytest.raises(NotDefinedError, match="no Hamming distance"):
        tiny_hasher(trained("product", 16, 32).finished()).extended(weight, offset)
    with pytest.raises(NotDefinedError, match="computes logits itself"):
        Hasher.load("copy-64").extended(weight, offset)


def test_itq_balances_bits_and_brings_data_close_to_their_signs():
    rng = np.random.default_rng(0)
    mixing = rng.normal(size=(8, 20)) * np.geomspace(3, 0.5, 8)[:, None]
    data = (rng.normal(size=(500, 8)) @ mixing + 5).astype(np.float32)
    weight, offset = fit_itq(data, 8)
    assert (weight.shape, offset.shape) == ((20, 8), (8,))
    logits = data @ weight + offset
    assert np.abs(logits.mean(axis=0)).max() < 1e-3
    # Columns are orthonormal: the head projects and rotates.
    assert np.allclose(weight.T @ weight, np.eye(8), atol=1e-5)
    centred = data - data.mean(axis=0)
    plain = centred @ np.linalg.svd(centred, full_matrices=False)[2][:8].T

    def loss(values):
        return np.square(np.where(values > 0, 1.0, -1.0) - values).sum()

    assert loss(logits) < loss(plain)
    assert fit_itq(data, 8)[0].tobytes() == weight.tobytes()
    with pytest.raises(NotDefinedError, match="17 images, there are 20 and 16"):
        fit_itq(data[:16], 16)


def test_a_hasher_is_fitted_to_a_packaged_network_without_torch(tmp_path):
    script = (
        "import sys; sys.modules['torch'] = None\n"
        "import numpy as np\n"
        "from fisherhash import Hasher\n"
        "from fisherhash.model import builtin\n"
        "from fisherhash.model.head import linear_head\n"
        "from fisherhash.model.itq_fit import fit_itq\n"
        "network = builtin.packaged_network()\n"
        "data = np.random.default_rng(0).normal(size=(200, network.width)).astype('f4')\n"
        "hasher = Hasher(network, linear_head(*fit_itq(data, 16)), method='itq')\n"
        "hasher.save(sys.argv[1])\n"
        "print(hasher.encode(np.zeros((9, 9, 3), np.uint8)).tobytes().hex())\n"
    )
    command = [sys.executable, "-c", script, tmp_path / "m"]
    out = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    assert sum(path.stat().st_size for path in (tmp_path / "m").iterdir()) < 150_000
    loaded = Hasher.load(tmp_path / "m")
    assert out.strip() == loaded.encode(np.zeros((9, 9, 3), np.uint8)).tobytes().hex()
    assert loaded.truncated(8).bits == 8
