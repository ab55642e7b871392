"""Reports: the best in bold, what is level with it, and the paper's numbers we miss."""

import math

import pytest

from fisherhash.experiments import report, standing


def part(rows, *, bits=(12,), stands_in=False, paper=None):
    """Rows by name: mAP of each seed."""
    made = {
        "data": "cifar10",
        "title": "CIFAR-10",
        "stands_in": stands_in,
        "bits": list(bits),
        "seeds": 3,
        "settings": {"epochs": 30},
        "bench": {"backbone": "b", "image_size": 128, "finetune": True},
        "protocol": {
            "protocol": "cifar10-small",
            "top": None,
            "train": 5000,
            "query": 1000,
            "database": 59000,
            "checksum": "0" * 64,
        },
        "rows": [],
        "runs": [],
    }
    for name, values in rows.items():
        method = "dfh" if name.startswith("DFH") else "other"
        numbers = [paper] * len(bits) if paper else []
        made["rows"].append({"name": name, "method": method, "tuned": True, "paper": numbers})
        for seed, value in enumerate(values):
            evaluation = {"map": value, "map_stable": value, "map_lower": None, "map_upper": None}
            made["runs"].append(
                {"row": name, "bits": 12, "seed": seed, "device": "d", "evaluation": evaluation}
            )
    return made


def results(made, target="table2"):
    return {
        "target": target,
        "title": "A table",
        "of": "paper",
        "kind": "table",
        "notes": [],
        "parts": [made],
        "tuning": {},
    }


def test_the_best_is_bold_and_the_level_marked():
    made = part({"DFH": [0.80, 0.82, 0.84], "near": [0.80, 0.81, 0.82], "far": [0.5, 0.5, 0.5]})
    lines = {line.split(" |")[0]: line for line in report.table(made)}
    assert "**0.820** (0.800–0.840)" in lines["| DFH"]
    assert "0.810 †" in lines["| near"]
    assert "†" not in lines["| far"]


def test_standard_errors():
    score = standing.Score((0.1, 0.2, 0.3))
    assert score.error == pytest.approx(0.1 / math.sqrt(3))
    assert standing.Score((0.1,)).error == 0.0
    assert math.isnan(standing.Score().mean)


@pytest.mark.parametrize(
    ("values", "stands_in", "sentence"),
    [
        ([0.9, 0.9, 0.9], False, "12 bits: DFH is first; it reaches the paper's 0.850."),
        ([0.8, 0.8, 0.8], False, "3.0 points behind other; it MISSES the paper's 0.850 by 5.0"),
        ([0.8, 0.8, 0.8], True, "DFH is 3.0 points behind other."),
        ([0.80, 0.82, 0.84], False, "DFH is level with the first, other"),
    ],
)
def test_verdicts(values, stands_in, sentence):
    made = part({"DFH": values, "other": [0.83, 0.83, 0.83]}, stands_in=stands_in, paper=0.85)
    said, *below = standing.verdicts(results(made), made)
    assert sentence in said
    missed = (
        [] if stands_in else ["Below the paper's number for it: other at 12 bits (-2.0 points)."]
    )
    assert below == missed


def test_a_first_row_says_who_is_level_and_how_many_seeds_it_has():
    made = part({"DFH": [0.83, 0.85, 0.87], "near": [0.82, 0.85, 0.86], "far": [0.7, 0.7, 0.7]})
    (said,) = standing.verdicts(results(made), made)
    assert "12 bits: DFH is first, level with near." in said
    made["runs"] = [run for run in made["runs"] if run["row"] != "DFH" or run["seed"]]
    (said,) = standing.verdicts(results(made), made)
    assert f"by {len(made['runs']) - 6} of {made['seeds']} seeds" in said


def test_table_1_s_order():
    made = part({"DFH a": [0.5, 0.5], "DFH b": [0.6, 0.6], "DFH c": [0.7, 0.7]})
    (said,) = standing.verdicts(results(made, "table1"), made)
    assert "order is reproduced (steps of +10.0, then +10.0 points)" in said
    made = part({"DFH a": [0.5, 0.5], "DFH b": [0.4, 0.4], "DFH c": [0.7, 0.7]})
    (said,) = standing.verdicts(results(made, "table1"), made)
    assert "NOT reproduced" in said


def test_not_run_and_not_defined(tmp_path):
    made = part({"DFH": [], "never": []})
    made["runs"] = [{"row": "never", "bits": 12, "seed": 0, "device": "d", "not_defined": "no"}]
    lines = report.table(made)
    assert lines[2] == "| DFH | not run |"
    assert lines[3] == "| never | – |"
    page = report.write(results(made), tmp_path)
    assert page.read_text().count("not run") == 2
    assert "not run" in (tmp_path / "table2.md").read_text()


def test_text_of_others_is_escaped():
    made = part({"DFH": [0.5], "<b>": [0.4]})
    page = report.html_page(results(made))
    assert "&lt;b&gt;" in page
    assert "<b>0.500</b>" in page


def test_real_valued_queries_are_a_row_beside_the_contest_of_the_codes():
    rows = {
        "DFH": [0.86, 0.87, 0.88],
        "DFH, real-valued queries": [0.90, 0.90, 0.91],
        "product": [0.88, 0.88, 0.88],
        "other": [0.5, 0.5, 0.5],
    }
    made = part(rows, bits=(12, 24))  # nothing ran at 24 bits
    made["rows"][1]["real_queries_of"] = "DFH"
    for run in made["runs"]:
        if run["row"] in ("DFH, real-valued queries", "product"):
            run["evaluation"]["ranking"] = "distance of the head"
    table = "\n".join(report.table(made))
    assert "| DFH, real-valued queries ‡ | 0.903" in table
    assert "| product ‡ | **0.880**" in table  # the best of those that compete
    assert "no part in who is best" in table
    assert standing.verdicts(results(made), made) == [
        "12 bits: DFH is 1.0 points behind product, and first of those ranked by Hamming distance; "
        "with real-valued queries, as product asks, it has 0.903, 2.3 points ahead of it."
    ]


def test_failed_runs_are_called_failed_and_why():
    made = part({"DFH": [0.9, 0.9, 0.9], "other": []})
    for seed in range(3):
        reason = {"row": "other", "bits": 12, "seed": seed, "failed": "the loss became nan"}
        made["runs"].append(reason)
    assert "| other | failed |" in "\n".join(report.table(made))
    assert "on d." in report.describe(made)
    said = standing.verdicts(results(made), made)
    assert said[-1] == "other, 12 bits: 3 failed, the loss became nan."


def test_what_failed_is_said_in_every_table():
    failed = [{"row": "pair", "bits": 12, "seed": s, "failed": "no memory"} for s in range(3)]
    made = part({"pair": [], "pair + intra": []})
    made["runs"] = failed
    made["protocol"] = None
    assert report.describe(made) == "Every run failed."
    for target in ("table1", "table2", "figures"):
        assert standing.verdicts(results(made, target), made) == [
            "pair, 12 bits: 3 failed, no memory."
        ]
    made["runs"] = []
    assert report.describe(made) == "Not run yet."


def test_few_seeds_are_said_of_the_codes():
    made = part({"DFH": [0.8, 0.8], "DFH, real": [0.9, 0.9], "product": [0.7, 0.7, 0.7]})
    made["rows"][1]["real_queries_of"] = "DFH"
    for run in made["runs"][2:]:
        run["evaluation"]["ranking"] = "distance of the head"
    (said,) = standing.verdicts(results(made), made)
    assert "DFH is first, by 2 of 3 seeds; with real-valued queries, as product asks" in said
