"""The paper's tables as data agree with each other and with the methods."""

import pytest

from fisherhash import methods
from fisherhash.data.protocol_table import PROTOCOLS
from fisherhash.errors import UsageError
from fisherhash.experiments import specs, tuning
from fisherhash.experiments.benches import Bench

PARTS = [(spec.name, part) for spec in specs.SPECS.values() for part in spec.parts]


@pytest.mark.parametrize(("name", "part"), PARTS)
def test_every_row_can_be_built(name, part):
    for row in part.rows:
        methods.create(row.method, bits=12, classes=10, options={**row.base, **row.options})
        assert len(row.paper) in (0, len(part.bits))
        assert row.space in tuning.SPACES
    assert len({row.name for row in part.rows}) == len(part.rows)
    assert all(source.protocol in PROTOCOLS for source in part.sources)
    assert not part.sources[0].stands_in


@pytest.mark.parametrize("finetune", [False, True])
@pytest.mark.parametrize("name", tuning.SPACES)
def test_every_space_keeps_the_budget_and_its_trials_can_be_built(name, finetune):
    bench = Bench("cifar10", "cifar10-small", finetune=finetune)
    space = tuning.SPACES[name]
    trials = [*space.rates(bench), *space.others(bench)]
    assert len(trials) == (tuning.FINETUNED_BUDGET if finetune else tuning.BUDGET)
    assert space.others(bench)
    (row, *_) = [row for _, part in PARTS for row in part.rows if row.space == name]
    method, base = row.method, row.base
    defaults = methods.create(method, bits=12, classes=10, options=base)
    for change in trials:
        own = {k: v for k, v in change.items() if k != "learning_rate"}
        built = methods.create(method, bits=12, classes=10, options={**base, **own})
        for key, value in own.items():
            assert getattr(built, key) == value
    for change in space.others(bench):  # a second trial that repeats the default would be wasted
        assert any(getattr(defaults, key) != value for key, value in change.items())


def test_the_paper_s_headline_numbers():
    dfh = specs.TABLE2.parts[0].rows[0]
    assert dfh.paper == (0.803, 0.825, 0.831, 0.844)
    best = [max(row.paper[k] for row in specs.TABLE2.parts[0].rows) for k in range(4)]
    assert tuple(best) == dfh.paper
    with pytest.raises(UsageError, match="Did you mean 'table1'"):
        specs.find_spec("table11")
