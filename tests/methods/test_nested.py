"""Nested codes: the sum of a method's own losses, each length with its own state."""

import numpy as np
import pytest
import torch

from fisherhash import codes
from fisherhash.data.sources import open_data
from fisherhash.errors import NotDefinedError, UsageError
from fisherhash.methods import HashMethod, create, find, registry
from fisherhash.methods._nested import nested
from fisherhash.model.hasher import Hasher
from fisherhash.training.fitting import fit
from fisherhash.training.images import FrozenImages
from fisherhash.training.loop import Loop
from fisherhash.training.settings import Settings

GRADIENT = [name for name, method in registry().items() if issubclass(method, HashMethod)]
REFUSED = {"classifier", "dqn"}


def images(method, classes=3):
    generator = torch.Generator().manual_seed(0)
    labels = torch.eye(classes)[torch.arange(60) % classes]
    features = labels @ torch.randn(classes, 20, generator=generator)
    features += 0.3 * torch.randn(60, 20, generator=generator)
    torch.manual_seed(0)
    head = method.head(20)
    head.start(features)
    return FrozenImages(features, labels, head)


@pytest.mark.parametrize("name", ["dfh", "dpsh", "csq", "dhd", "cibhash"])
def test_the_loss_is_the_sum_of_the_losses_of_the_first_outputs(name):
    torch.manual_seed(3)
    method = nested(name, [4, 8], bits=12, classes=3)
    frozen = images(method)
    with torch.no_grad():
        method.begin(frozen)
    assert [part.bits for part in method.parts] == [4, 8, 12]
    batch = frozen.batch(torch.arange(15), method.strengths)
    outputs = frozen.head(batch.features).detach()
    terms = method(outputs, batch)
    total = 0.0
    for bits, part in zip((4, 8, 12), method.parts, strict=True):
        alone = create(name, bits=bits, classes=3)
        with torch.no_grad():
            alone.begin(Sliced(frozen, bits))
        alone.load_state_dict(part.state_dict())
        loss = alone(outputs[:, :bits], batch)["loss"].item()
        assert terms[f"loss_{bits}"].item() == pytest.approx(loss, rel=1e-5)
        total += loss
    assert terms["loss"].item() == pytest.approx(total, rel=1e-5)


@pytest.mark.parametrize("name", ["csq", "dpn", "mdsh", "orthohash"])
def test_fixed_centers_share_their_first_bits(name):
    """Else every length would pull the first bits to other codes."""
    method = nested(name, [12, 24], bits=48, classes=10)
    book = find(name).codebook
    short, middle, long = (getattr(part, book) for part in method.parts)
    assert torch.equal(long[:, :24], middle)
    assert torch.equal(middle[:, :12], short)
    assert torch.equal(short, getattr(create(name, bits=12, classes=10), book))
    assert not torch.equal(middle[:, 12:], short)  # new bits, not the old ones again

    def closest(codes):
        distances = (codes.shape[1] - codes @ codes.T) / 2
        return distances[~torch.eye(10, dtype=torch.bool)].min()

    assert closest(long) >= closest(middle) + 10 >= closest(short) + 14


class Sliced:
    """The first outputs of a training set."""

    def __init__(self, train, bits):
        self.train, self.bits, self.labels = train, bits, train.labels

    def outputs(self):
        return self.train.outputs()[:, : self.bits]

    streamed = False

    def features(self):
        return self.train.features()


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_bits_that_are_not_signs_of_outputs_are_refused(name):
    with pytest.raises(NotDefinedError, match=f"{name}: its bits are not the signs of its outputs"):
        nested(name, [4], bits=8, classes=3).head(20)


@pytest.mark.parametrize("name", [name for name in GRADIENT if name not in REFUSED])
def test_every_other_method_trains_nested(name):
    method = nested(name, [4], bits=8, classes=3)
    history = Loop(method, images(method), Settings(epochs=4, batch_size=20, dropout=0.0)).run()
    for row in history:
        assert np.isfinite(row["loss"])
        assert row["loss"] == pytest.approx(row["loss_4"] + row["loss_8"], rel=1e-4)


@pytest.mark.parametrize(
    ("name", "lengths", "sentence"),
    [
        ("dfh", [64], "between 1 and the 48 bits of the whole code, got 64"),
        ("dfh", [0], "between 1 and the 48 bits of the whole code, got 0"),
        ("itq", [12], "itq is not trained by gradient; it takes no nested lengths"),
    ],
)
def test_impossible_lengths_are_refused(name, lengths, sentence):
    with pytest.raises(UsageError, match=sentence):
        nested(name, lengths, bits=48, classes=3)


def test_the_first_bits_are_the_short_code(tmp_path, photos):
    """After training, saving and loading, in torch; the short model can be saved as well."""
    collection = open_data(photos)
    trained = fit(
        collection,
        method="dfh",
        bits=48,
        nested=[12, 24],
        backbone="tiny",
        recipe="best",
        settings=Settings(epochs=2, batch_size=14),
        device="cpu",
        out=tmp_path / "model",
    )
    assert trained.hasher.details["nested"] == [12, 24, 48]
    assert {"loss_12", "loss_24", "loss_48"} <= trained.history[0].keys()
    whole = Hasher.load(tmp_path / "model")
    assert whole.truncated(48) is whole
    long = codes.unpack(whole.encode_collection(collection).codes, 48)
    for bits in (12, 24):
        short = whole.truncated(bits)
        assert short.bits == bits
        assert short.fingerprint() != whole.fingerprint()
        found = short.encode_collection(collection).codes
        assert found.shape == (42, -(-bits // 8))
        np.testing.assert_array_equal(codes.unpack(found, bits), long[:, :bits])
        short.save(tmp_path / f"short-{bits}")
        again = Hasher.load(tmp_path / f"short-{bits}")
        assert again.fingerprint() == short.fingerprint()
        np.testing.assert_array_equal(again.encode_collection(collection).codes, found)
    for bits in (0, 49):
        with pytest.raises(UsageError, match=f"can be cut to 1 to 48 bits, got {bits}"):
            whole.truncated(bits)
    with pytest.raises(UsageError, match="leave outputs at 0"):
        fit(collection, bits=8, nested=[4], backbone="tiny", settings=Settings(outputs=16))


def test_an_unfinished_nested_run_is_continued(tmp_path, photos, monkeypatch):
    """The state of every length is in the checkpoint: the codes are those of one whole run."""
    collection = open_data(photos)

    def train(out):
        return fit(
            collection,
            method="dpsh",
            bits=8,
            nested=[4],
            backbone="tiny",
            settings=Settings(epochs=3, batch_size=14),
            device="cpu",
            out=out,
        )

    expected = train(tmp_path / "whole").hasher.fingerprint()
    epoch = Loop.epoch

    def interrupted(self, number):
        if number == 2:
            raise KeyboardInterrupt
        return epoch(self, number)

    with monkeypatch.context() as patch:
        patch.setattr(Loop, "epoch", interrupted)
        with pytest.raises(KeyboardInterrupt):
            train(tmp_path / "cut")
    assert train(tmp_path / "cut").hasher.fingerprint() == expected


def test_codes_without_a_hamming_distance_cannot_be_cut(photos):
    hasher = fit(
        photos, method="dqn", bits=8, backbone="tiny", settings=Settings(epochs=1), device="cpu"
    ).hasher
    with pytest.raises(NotDefinedError, match="no Hamming distance"):
        hasher.truncated(4)
