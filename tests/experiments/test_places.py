"""Where DFH stands, in a word and in a sentence."""

import pytest

from fisherhash.experiments.places import ColumnPlace
from fisherhash.experiments.significance import Difference
from fisherhash.experiments.standing import Standing

FAR, NEAR = Difference(0.03, 0.01), Difference(0.003, 0.01)
LOWER, MUCH_LOWER = Difference(-0.003, 0.01), Difference(-0.03, 0.01)


@pytest.mark.parametrize(
    ("verdict", "sentence", "gap", "more"),
    [
        ("first", "DFH is first, 3.0 ± 1.0 points ahead of A.", FAR, {"highest": True}),
        (
            "level",
            "DFH has the highest mean and is level with A (0.3 ± 1.0 points ahead of A).",
            NEAR,
            {"highest": True, "rows_level": ("A",)},
        ),
        (
            "level",
            "DFH is level with A; the mean of A is 0.3 ± 1.0 points higher.",
            LOWER,
            {"rows_level": ("A",)},
        ),
        (
            "behind",
            "DFH is behind A and level with B; the mean of A is 3.0 ± 1.0 points higher.",
            MUCH_LOWER,
            {"rows_ahead": ("A",), "rows_level": ("B",)},
        ),
        (
            "highest",
            "DFH has the highest mean, 0.3 ± 1.0 points ahead of A (one seed, no test).",
            NEAR,
            {"highest": True, "tested": False},
        ),
        (
            "highest",
            "DFH is 0.3 ± 1.0 points ahead of A (one seed, no test).",
            NEAR,
            {"tested": False},
        ),
        (
            "lower",
            "DFH is 0.3 ± 1.0 points behind A (one seed, no test).",
            LOWER,
            {"tested": False},
        ),
        (
            "lower",
            "DFH is ahead of all rows that have more than one seed; the mean of A is 0.3 ± 1.0 "
            "points higher (A: one seed, no test).",
            LOWER,
            {"untested": ("A",)},
        ),
    ],
)
def test_every_verdict(verdict, sentence, gap, more):
    place = ColumnPlace("evaluation", 12, "DFH", "A", gap, **more)
    assert place.verdict == verdict
    assert place.sentence == f"12 bits: {sentence}"


def test_a_place_in_every_column_of_both_rankings():
    rows = [("DFH (ours)", "dfh", 0.8), ("DFH (paper)", "dfh", 0.7), ("DPSH", "dpsh", 0.6)]
    part = {
        "bits": [12, 24],
        "seeds": 2,
        "stands_in": True,
        "rows": [{"name": name, "method": method, "paper": []} for name, method, _ in rows],
        "runs": [
            {
                "row": name,
                "bits": bits,
                "seed": seed,
                "evaluation": {"map": score + seed / 1000},
                "real_queries": {"map": score + seed / 500},
            }
            for name, _, score in rows
            for bits in (12, 24)
            for seed in (0, 1)
        ],
    }
    places = Standing(part).places()
    columns = [(ranking, bits) for ranking in ("evaluation", "real_queries") for bits in (12, 24)]
    assert [(place.ranking, place.bits) for place in places] == columns
    assert {(place.row, place.rival) for place in places} == {("DFH (ours)", "DPSH")}
    assert {place.verdict for place in places} == {"first"}
    assert all(place.gap.mean == pytest.approx(0.2) for place in places)
