"""The shallow methods as scikit-learn's users expect them."""

import pickle

import numpy as np
import pytest
from sklearn.base import clone
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.utils.estimator_checks import check_estimator

from fisherhash import codes
from fisherhash.training import estimators
from fisherhash.training.estimators import ITQ, TRANSFORMERS

# What a check of scikit-learn asks for and a hash function is not.
EXPECTED_FAILURES = {
    "check_methods_subset_invariance": "a logit may differ in the last bit with the batch size",
}

QUICK = {"itq", "sdh", "sh"}  # the others take a minute together


def data(count=120, width=10, seed=0):
    generator = np.random.default_rng(seed)
    labels = np.arange(count) % 3
    return generator.normal(size=(count, width)) + 2 * np.eye(3, width)[labels], labels


@pytest.mark.parametrize(
    "name",
    [
        name if name in QUICK else pytest.param(name, marks=pytest.mark.slow)
        for name in sorted(TRANSFORMERS)
    ],
)
def test_scikit_learn_accepts_it(name):
    quick = {"steps": 50, "trees": 3, "turns": 2, "iterations": 5, "rounds": 2}
    transformer = TRANSFORMERS[name]()
    known = transformer.get_params()
    transformer.set_params(**{key: value for key, value in quick.items() if key in known})
    check_estimator(transformer, expected_failed_checks=EXPECTED_FAILURES)


def test_in_a_pipeline_cloned_and_pickled():
    x, _ = data()
    pipeline = make_pipeline(StandardScaler(), ITQ(bits=8))
    bits = pipeline.fit_transform(x)
    assert bits.shape == (120, 8)
    assert set(np.unique(bits)) == {0, 1}
    assert clone(pipeline).get_params()["itq__bits"] == 8
    again = pickle.loads(pickle.dumps(pipeline))
    np.testing.assert_array_equal(again.transform(x), bits)
    itq = pipeline[-1]
    packed = itq.encode(pipeline[0].transform(x))
    np.testing.assert_array_equal(codes.unpack(packed, 8), bits)
    assert list(itq.get_feature_names_out()) == [f"bit{k}" for k in range(8)]


def test_labels_as_names_numbers_or_a_matrix():
    x, y = data()
    names = np.array(["cat", "dog", "hen"])[y]
    matrix = np.eye(3, dtype=int)[y]
    SDH = TRANSFORMERS["sdh"]
    by_number, by_name, by_row = (SDH(bits=8).fit(x, labels) for labels in (y, names, matrix))
    np.testing.assert_array_equal(by_number.transform(x), by_name.transform(x))
    np.testing.assert_array_equal(by_number.transform(x), by_row.transform(x))
    assert list(by_name.classes_) == ["cat", "dog", "hen"]
    with pytest.raises(ValueError, match="learns from labels"):
        SDH().fit(x)


def test_bad_options_say_so():
    with pytest.raises(TypeError, match="ITQ has no option 'bit'"):
        ITQ(bit=8)
    with pytest.raises(ValueError, match="11 bits need at least 11 feature dimensions"):
        ITQ(bits=11).fit(data()[0])
    with pytest.raises(AttributeError, match="no transformer 'IQT'; there are AGH"):
        estimators.IQT  # noqa: B018
