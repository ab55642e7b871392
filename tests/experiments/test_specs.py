"""The paper's tables as data agree with each other and with the methods."""

import pytest

from fisherhash import methods
from fisherhash.data.protocols import PROTOCOLS
from fisherhash.data.splits import UNSEEN
from fisherhash.errors import UsageError
from fisherhash.experiments import specs
from fisherhash.experiments.planning import _reduced
from fisherhash.experiments.trials import parted
from fisherhash.training.settings import Settings

PARTS = [(spec.name, part) for spec in specs.SPECS.values() for part in spec.parts]


@pytest.mark.parametrize(("name", "part"), PARTS)
def test_every_row_can_be_built(name, part):
    for row in part.rows:
        own = parted({**row.base, **row.options})
        methods.create(row.method, bits=12, classes=10, options=own["options"])
        Settings(**own["settings"])
        assert len(row.paper) in (0, len(part.bits))
    assert len({row.name for row in part.rows}) == len(part.rows)
    assert all(s.protocol.removesuffix(UNSEEN) in PROTOCOLS for s in part.sources)
    assert not part.sources[0].stands_in
    assert len(part.tuning_bits) == 2


@pytest.mark.parametrize("spec", [specs.TABLE2, specs.TABLE3])
def test_what_one_row_is_given_every_row_is_given(spec):
    for part in spec.parts:
        names = {row.method for row in part.rows}
        assert names >= {"classifier", "csq", "orthohash", "dpn", "mihash", "hashnet", "dhn"}
        plain = [row for row in part.rows if not row.class_step]
        signs = [row for row in plain if _head(row).hamming]
        assert [row.stepped() for row in signs] == [row for row in part.rows if row.class_step]


def _head(row):
    return methods.create(row.method, bits=12, classes=10).head(16)


def test_tables_of_one_data_set_share_a_search():
    lengths = {}
    for _, part in PARTS:
        for source in part.sources:
            lengths.setdefault(source.protocol, set()).add(part.tuning_bits)
    assert all(len(found) == 1 for found in lengths.values())


def test_the_ablation_adds_one_thing_at_a_time():
    first, *others, ours, last = specs.ADDITIONS
    for row in others:
        changed = {
            key
            for key in {*first.base, *row.base}
            if first.base.get(key, "searched") != row.base.get(key, "searched")
        }
        changed |= {"separation"} & (set(first.idle) - set(row.idle))  # searched in its own row
        assert len(changed) + row.class_step == 1, row.name
    assert ours.stepped() == last


def test_the_paper_s_headline_numbers():
    dfh = specs.TABLE2.parts[0].rows[0]
    assert dfh.paper == (0.803, 0.825, 0.831, 0.844)
    known = [row.paper for row in specs.TABLE2.parts[0].rows if row.paper]
    best = [max(paper[k] for paper in known) for k in range(4)]
    assert tuple(best) == dfh.paper
    with pytest.raises(UsageError, match="Did you mean 'table1'"):
        specs.find_spec("table11")


def test_methods_since_the_paper_stand_in_the_tables_but_not_in_quick_runs():
    for spec in (specs.TABLE2, specs.TABLE3):
        assert {row.method for row in spec.parts[0].rows} >= set(specs.SINCE)
        quick = _reduced(spec, [], ends=True)[0].rows
        assert not {row.method for row in quick} & set(specs.SINCE)
        assert {row.method for row in quick} >= set(specs.NAMES)
        (named,) = _reduced(spec, ["hyp2", "12", "16"], ends=True)
        assert [row.name for row in named.rows] == ["HyP²", "HyP² + class step"]
