"""Where an option is searched, and what counts as the edge of that."""

import dataclasses

import pytest

from fisherhash.system.options import Option, Range, Tuned


def option(tuned, kind=float, limits=None):
    return Option("x", kind, (), limits or Range(), "", tuned)


@pytest.mark.parametrize("tuned", [Tuned(0.01, 10, "log"), Tuned(-1, 3), Tuned(1, 64, "log")])
def test_a_share_of_the_range_and_back(tuned):
    for share in (0.0, 0.2, 0.5, 0.999):
        assert tuned.share(tuned.at(share)) == pytest.approx(share)
    assert tuned.at(0.0) == pytest.approx(tuned.least)


def test_drawn_values_have_the_option_s_type_and_few_digits():
    assert option(Tuned(1, 64, "log"), int).drawn(0.5) == 8
    assert option(Tuned(0.001, 1.0, "log")).drawn(1 / 3) == 0.01
    assert option(Tuned(0.0, 1.0)).drawn(0.123456) == 0.123
    assert option(Tuned(choices=("a", "b", "c")), str).drawn(0.99) == "c"
    with pytest.raises(ValueError, match="declares no range"):
        option(None).drawn(0.5)


def test_an_edge_is_one_that_could_be_moved():
    one = option(Tuned(0.0, 10.0), limits=Range(least=0))
    assert one.edge(9.6)
    assert not one.edge(9.4)
    assert not one.edge(0.1)  # nothing lies beyond 0
    assert dataclasses.replace(one, range=Range()).edge(0.1)
    assert not option(Tuned(choices=(1, 2))).edge(1)


@pytest.mark.parametrize("wrong", [(1.0, 1.0, "linear"), (0.0, 1.0, "log"), (2.0, 1.0, "log")])
def test_ranges_that_make_no_sense(wrong):
    with pytest.raises(ValueError, match="cannot search"):
        Tuned(*wrong)


def test_as_json():
    known = {"least": 0.1, "most": 1, "scale": "log"}
    assert Tuned(0.1, 1, "log").to_json() == known
    assert Tuned(choices=("a", 0)).to_json() == {"choices": ["a", 0]}
