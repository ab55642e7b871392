"""The second code of a trained model, and which ranking its card recommends."""

import dataclasses

import numpy as np
import pytest

from fisherhash.codes import hamming
from fisherhash.data.protocols import resolve
from fisherhash.data.sources import open_data
from fisherhash.index.images.image_index import ImageIndex
from fisherhash.model.hasher import Hasher
from fisherhash.training import second_code
from fisherhash.training.features import fit_features
from fisherhash.training.fitting import fit, train
from fisherhash.training.loop import Settings
from fisherhash.training.second_code import FINE_BITS, fit_second_code

QUICK = Settings(epochs=4, batch_size=8, learning_rate=0.002, head_epochs=2)


def quick(data, **arguments):
    return fit(data, **({"bits": 12, "backbone": "tiny", "settings": QUICK} | arguments))


@pytest.mark.parametrize("finetune", [False, True])
def test_it_follows_the_features_and_changes_no_first_code(photos, tmp_path, finetune):
    trained = quick(photos, finetune=finetune, fine_bits=20, out=tmp_path / "m")
    hasher, collection = trained.hasher, open_data(photos)
    assert hasher.fine_bits == 20
    rows = np.concatenate([part.values for part in hasher.row_blocks(collection)])
    block = hasher.encode_collection(collection)
    # nearer features, nearer second codes
    near = hamming(block.fine, block.fine).astype(float).ravel()
    apart = np.linalg.norm(rows[:, None] - rows[None], axis=2).ravel()
    assert np.corrcoef(near, apart)[0, 1] > 0.5
    plain = quick(photos, finetune=finetune).hasher
    assert plain.fine_bits == 0
    np.testing.assert_array_equal(plain.encode_collection(collection).codes, block.codes)
    again = Hasher.load(tmp_path / "m", runtime="torch").encode_collection(collection)
    np.testing.assert_array_equal(again.fine, block.fine)


def halved(photos):
    """A split whose database has images that were not trained on."""
    split = resolve(open_data(photos), None)
    return dataclasses.replace(split, train=split.train[::2])


def test_the_card_says_which_ranking_is_better(photos, tmp_path, monkeypatch):
    monkeypatch.setattr(second_code, "FEWEST_HELD_OUT", 5)
    trained = quick(photos, fine_bits=16, out=tmp_path / "m", protocol=halved(photos))
    found = trained.hasher.details["ranking"]
    assert found == trained.ranking
    better = found["mAP, real"] > found["mAP, hamming"] + second_code.LEAST_GAIN
    assert found["default"] == ("real" if better else "hamming") == trained.hasher.ranking
    split = trained.split
    fresh = set(split.database.tolist()) - set(split.train.tolist()) - set(split.query.tolist())
    assert found["queries"] == found["images"] == len(fresh)
    card = (tmp_path / "m" / "README.md").read_text()
    assert "## Ranking" in card
    assert f"| default | {found['default']} |" in card
    monkeypatch.setattr(second_code, "LEAST_GAIN", -2.0)
    again = quick(photos, fine_bits=16, protocol=halved(photos))
    assert again.hasher.ranking == "real"


def test_the_queries_choose_nothing(photos, tmp_path, monkeypatch):
    """Where all images of the database were trained on, the rankings are not compared."""
    monkeypatch.setattr(second_code, "LEAST_GAIN", -2.0)
    trained = quick(photos, fine_bits=16, out=tmp_path / "m")
    assert trained.ranking == {}
    assert trained.hasher.ranking == "hamming"
    assert "## Ranking" not in (tmp_path / "m" / "README.md").read_text()


def test_too_few_images_or_features_make_it_shorter_or_none():
    rng = np.random.default_rng(0)
    assert fit_second_code(rng.standard_normal((50, 20), np.float32), FINE_BITS, seed=0).bits == 20
    assert fit_second_code(rng.standard_normal((13, 20), np.float32), FINE_BITS, seed=0).bits == 12
    assert fit_second_code(rng.standard_normal((5, 20), np.float32), FINE_BITS, seed=0) is None


def test_train_makes_one_by_default_and_codes_without_distance_have_none(photos):
    hasher = train(photos, bits=12, backbone="tiny", settings=QUICK, recipe=None)
    assert hasher.fine_bits == min(FINE_BITS, hasher.feature_width, 41) > 8
    assert quick(photos, method="dqn", fine_bits=16).hasher.fine_bits == 0


def test_a_model_of_vectors_has_one_too(tmp_path):
    vectors = np.random.default_rng(1).standard_normal((90, 20), np.float32)
    hasher = fit_features(vectors, bits=8, fine_bits=16, out=tmp_path / "m").hasher
    assert hasher.fine_bits == 16
    block = next(hasher.encode_feature_blocks(vectors, queries=True))
    assert (block.fine.shape, block.queries.shape) == ((90, 2), (90, 8))
    again = next(Hasher.load(tmp_path / "m").encode_feature_blocks(vectors))
    np.testing.assert_array_equal(again.fine, block.fine)
    assert fit_features(vectors, bits=8).hasher.fine_bits == 0


def test_an_index_of_the_model_answers_queries_of_one_code_differently(photos, tmp_path):
    hasher = quick(photos, bits=2, fine_bits=32).hasher
    with ImageIndex.create(tmp_path / "i", hasher) as images:
        images.sync(photos)
        queries = sorted(photos.rglob("*.png"))
        results = images.search(queries, k=10, ranking="hamming")
        answers = {}
        for result in results:
            answer = tuple(match.item.id for match in result)
            answers.setdefault(answer, set()).add(result.fine)
        assert all(len(fines) == 1 for fines in answers.values())
        assert len(answers) > len({result.code for result in results})
