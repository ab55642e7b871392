"""The bits of a trained model that know no labels, for an index of few images."""

import numpy as np
import pytest

from fisherhash.codes import hamming, pack
from fisherhash.model.hasher import Hasher
from fisherhash.training import steps
from fisherhash.training.fitting import fit, fit_features
from fisherhash.training.settings import Settings

QUICK = Settings(epochs=4, batch_size=8, learning_rate=0.002, head_epochs=2)


def quick(data, **arguments):
    return fit(data, **({"bits": 12, "backbone": "tiny", "settings": QUICK} | arguments))


@pytest.mark.parametrize("finetune", [False, True])
def test_they_follow_the_features_and_change_no_learned_bit(photos, tmp_path, finetune):
    trained = quick(photos, finetune=finetune, out=tmp_path / "m")
    hasher, collection = trained.hasher, trained.collection
    weight, offset = hasher.fitted
    images, width = len(trained.split.train), hasher.feature_width
    assert weight.shape == (width, min(steps.FITTED_BITS, images - 1, width))
    rows = np.concatenate([part.values for part in hasher.row_blocks(collection)])
    codes = pack(rows @ weight + offset)
    near = hamming(codes, codes).astype(float).ravel()
    apart = np.linalg.norm(rows[:, None] - rows[None], axis=2).ravel()
    assert np.corrcoef(near, apart)[0, 1] > 0.5
    for kept, known in zip(Hasher.load(tmp_path / "m").fitted, hasher.fitted, strict=True):
        np.testing.assert_array_equal(kept, known)
    plain = quick(photos, finetune=finetune, fitted=False).hasher
    learned = [each.encode_collection(collection).codes for each in (plain, hasher)]
    np.testing.assert_array_equal(*learned)
    assert plain.fitted is None


def test_too_few_images_or_features_make_them_fewer_or_none(tmp_path):
    """Vectors have them, too."""
    rng = np.random.default_rng(0)

    def bits(count, width):
        vectors = rng.standard_normal((count, width), np.float32)
        np.save(tmp_path / "y.npy", np.arange(count) % 2)
        trained = fit_features(vectors, tmp_path / "y.npy", method="itq_cca", bits=4)
        fitted = trained.hasher.fitted
        return None if fitted is None else len(fitted[1])

    assert [bits(50, 20), bits(13, 20), bits(5, 20)] == [20, 12, None]
    assert bits(300, 200) == steps.FITTED_BITS


def test_codes_without_labels_or_without_a_distance_have_none(photos):
    assert quick(photos, method="itq").hasher.fitted is None
    assert quick(photos, method="dqn").hasher.fitted is None
