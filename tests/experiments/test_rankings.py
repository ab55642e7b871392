"""Both rankings, without and with the class step, as the training itself measures them."""

import dataclasses

import pytest

from fisherhash.experiments.rankings import measure_rankings
from fisherhash.training.fitting import fit
from fisherhash.training.settings import Settings

STEP = {"step_weight": 2.0, "step_sharpness": 0.5}


def trained(method, **settings):
    chosen = Settings(epochs=1, **settings)
    made = fit("sample", method=method, bits=12, backbone="tiny", settings=chosen, finetune=False)
    return made, chosen


def test_every_number_is_that_of_the_training():
    made, settings = trained("csq", **STEP)
    found = measure_rankings([(made, settings)])[0]
    plain = dataclasses.replace(made, hasher=made.hasher.with_head(made.plain_head))
    wanted = {
        "hamming": plain.evaluate(),
        "real": plain.evaluate(real_queries=True),
        "step_hamming": made.evaluate(),
        "step_real": made.evaluate(real_queries=True),
    }
    names = {
        "hamming": found["evaluation"],
        "real": found["real_queries"],
        "step_hamming": found["class_step"]["evaluation"],
        "step_real": found["class_step"]["real_queries"],
    }
    for name, one in wanted.items():
        for key in ("map", "map_lower", "map_upper", "top", "ranking"):
            expected = getattr(one, key)
            close = pytest.approx(expected, abs=1e-9) if isinstance(expected, float) else expected
            assert names[name][key] == close
    assert len({round(one["map"], 6) for one in names.values()}) == 4
    plain = measure_rankings([trained("csq")])[0]
    assert plain.keys() == {"evaluation", "real_queries"}
    assert plain["evaluation"]["map"] == pytest.approx(found["evaluation"]["map"])


def test_codes_without_a_hamming_distance_have_one_ranking_and_no_step():
    found = measure_rankings([trained("dqn")])[0]
    assert found.keys() == {"evaluation"}
    assert measure_rankings([trained("dqn", **STEP)])[0].keys() == {"evaluation"}
