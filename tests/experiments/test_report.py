"""Reports: the best in bold, what no test tells from it, and the paper's numbers we miss."""

import json
import math

import numpy as np
import pytest

from fisherhash.experiments import report
from fisherhash.experiments.comparison import (
    Comparison,
    Score,
    Verdict,
    comparisons,
    verdicts,
    verdicts_of,
)
from fisherhash.experiments.report import Table, TableCell, dump_results
from fisherhash.experiments.significance import Difference


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


def results(made):
    return {
        "target": "table2",
        "title": "A table",
        "kind": "table",
        "notes": [],
        "parts": [made],
        "tuning": {},
    }


def table(made, ranking="Hamming distance"):
    return report.part_report(results(made), made).tables[ranking].markdown()


def intro(made):
    return report.part_report(results(made), made).intro


def test_one_table_as_markdown_and_results_as_json():
    made = Table(["a & b", "12"], [["<i>", TableCell(" (1–2)", strong="1.5")], ["x", "–"]], "Note.")
    assert made.markdown().splitlines() == [
        "| a & b | 12 |",
        "|---|---|",
        "| <i> | **1.5** (1–2) |",
        "| x | – |",
        "",
        "Note.",
    ]
    found = results(part({"DFH": [0.5, 0.6], "other": [0.4]}))
    found["parts"][0]["runs"][0]["options"] = {f"option {n}": n for n in range(40)}
    text = dump_results(found)
    assert json.loads(text) == found
    assert text.endswith("}\n")
    assert sum(line.strip().startswith('{"row": ') for line in text.splitlines()) == 3
    assert '      "bits": [12],\n' in text


def test_the_best_is_bold_and_what_no_test_tells_from_it_is_marked():
    made = part({"DFH": [0.80, 0.82, 0.84], "near": [0.80, 0.81, 0.82], "far": [0.5, 0.5, 0.5]})
    lines = {line.split(" |")[0]: line for line in table(made).splitlines()}
    assert "**0.820** ± 0.050" in lines["| DFH"]
    assert "0.810 ± 0.025 †" in lines["| near"]
    assert "†" not in lines["| far"]
    made["runs"] = [run for run in made["runs"] if run["seed"] == 0]
    # Nothing to say with one seed, and what looks equal is equally bold.
    assert "| near | **0.800**, 1 seed |" in table(made)
    assert "| far | 0.500, 1 seed |" in table(made)
    assert "Bold: the highest of the column. With one seed nothing is tested." in table(made)


def test_intervals_of_scores():
    assert Score((0.1, 0.2, 0.3)).half == pytest.approx(4.302653 * 0.1 / math.sqrt(3))
    assert Score((0.1,)).half == math.inf
    assert math.isnan(Score().mean)


@pytest.mark.parametrize(
    ("word", "sentence", "gap", "more"),
    [
        ("first", "DFH is first (+3.0 ± 1.0 points against A).", 0.03, {}),
        ("level", "DFH is level with A, B (+0.3 ± 1.0 points", 0.003, {"level": ("A", "B")}),
        ("behind", "DFH is behind A (-3.0 ± 1.0", -0.03, {"ahead": ("A",), "level": ("B",)}),
        ("highest", "has the higher mean (+0.3 ± 1.0 points", 0.003, {"tested": False}),
        ("lower", "points against A; one seed, no test).", -0.003, {"tested": False}),
        ("lower", "points against A; one seed, no test: A).", -0.003, {"untested": ("A",)}),
        ("first", "is first (+0.3 ± 1.0 points against A; one", 0.003, {"untested": ("B",)}),
    ],
)
def test_every_verdict(word, sentence, gap, more):
    verdict = Verdict("evaluation", 12, "DFH", "A", Difference(gap, 0.01), **more)
    assert verdict.word == word
    assert verdict.sentence.startswith("12 bits: DFH ")
    assert sentence in verdict.sentence


def test_a_verdict_in_every_column_of_both_rankings():
    made = part({"DFH (ours)": [0.8, 0.801], "DFH (paper)": [0.7, 0.71], "DPSH": [0.6, 0.601]})
    for run in made["runs"]:
        run["real_queries"] = {"map": run["evaluation"]["map"] + 0.01}
    found = verdicts_of(made)
    assert [(one.ranking, one.bits) for one in found] == [("evaluation", 12), ("real_queries", 12)]
    assert {(one.row, one.rival, one.word) for one in found} == {("DFH (ours)", "DPSH", "first")}
    assert all(one.gap.mean == pytest.approx(0.2) for one in found)
    assert [one.word for one in verdicts_of(made, "other")] == ["behind"] * 2


@pytest.mark.parametrize("stands_in", [False, True])
def test_what_is_below_the_paper_is_said(stands_in):
    made = part({"DFH": [0.80] * 3, "other": [0.83] * 3}, stands_in=stands_in, paper=0.85)
    said, *below = verdicts(made, "table2")
    assert said == "12 bits: DFH is behind other (-3.0 ± 0.0 points against other)."
    words = (
        "Below the paper's own number, in points: DFH at 12 bits (-5.0), other at 12 bits (-2.0)."
    )
    assert below == ([] if stands_in else [words])


def test_a_stored_test_over_queries_is_used_in_both_directions():
    """The runs of a table are not stored with it, so its tests are."""
    made = part({"DFH": [0.80, 0.82, 0.84], "near": [0.80, 0.81, 0.82]})
    assert Comparison(made).level(12) == ["near"]
    known = {"ranking": "evaluation", "bits": 12, "row": "DFH", "other": "near"}
    made["tests"] = [{**known, "ahead": 0.01, "half": 0.004, "queries": 1000}]
    assert Comparison(made).level(12) == []
    assert "DFH is first (+1.0 ± 0.4 points against near)" in verdicts(made, "table2")[0]
    gap = Comparison(made).gap("near", "DFH", 12)
    assert (gap.mean, gap.half, gap.queries, gap.behind) == (-0.01, 0.004, 1000, True)
    made["tests"][0]["half"] = None  # one seed
    assert Comparison(made).level(12) == ["near"]


def test_tests_go_into_the_results_and_come_back():
    made = part({"DFH": [0.80, 0.82, 0.84], "other": [0.5, 0.6, 0.5]})
    rng = np.random.default_rng(0)
    queries = {
        (row, 12, "evaluation"): list(np.clip(rng.normal(mean, 0.1, (3, 50)), 0, 1))
        for row, mean in (("DFH", 0.82), ("other", 0.53))
    }
    (test,) = comparisons(made, queries)["evaluation"].tests()
    assert (test["row"], test["other"], test["queries"]) == ("DFH", "other", 50)
    assert test["half"] >= Comparison(made).tests()[0]["half"]
    again = json.loads(json.dumps({**made, "tests": [test]}))
    assert Comparison(again).gap("DFH", "other", 12).half == pytest.approx(test["half"])


def test_held_out_images_choose_among_the_rows_of_dfh():
    """The queries must not: the row with the higher mean on them may have been lucky."""
    rows = {"DFH": [0.80, 0.81], "DFH (b)": [0.84, 0.84], "other": [0.82, 0.83], "far": [0.5, 0.5]}
    made = part(rows)
    assert Comparison(made).verdict(12).row == "DFH (b)"
    for row, score in zip(made["rows"], (0.9, 0.7, 0.8, 0.6), strict=True):
        row["held_out"] = score
    tests = Comparison(made).tests()
    named = {(test["row"], test["other"]) for test in tests}
    assert {("DFH", "other"), ("DFH", "far"), ("DFH (b)", "other")} <= named
    verdict = Comparison(made).verdict(12)
    assert (verdict.row, verdict.rival, verdict.word) == ("DFH", "other", "level")
    made["tests"] = [{**test, "half": 0.001} for test in tests]
    assert Comparison(made).verdict(12).word == "behind"


@pytest.mark.parametrize(
    ("target", "wanted"),
    [
        ("table1", {("DFH b", "DFH a"), ("DFH c", "DFH b")}),
        ("ablation", {("DFH b", "DFH a"), ("DFH c", "DFH a")}),
    ],
)
def test_every_difference_that_a_table_names_is_tested_over_queries(target, wanted):
    made = part({"DFH a": [0.5, 0.5], "DFH b": [0.4, 0.4], "DFH c": [0.45, 0.45]})
    rng = np.random.default_rng(0)
    queries = {(row["name"], 12, "evaluation"): list(rng.random((2, 40))) for row in made["rows"]}
    tests = Comparison(made, queries=queries).tests(target)
    assert wanted <= {(test["row"], test["other"]) for test in tests}
    assert {test["queries"] for test in tests} == {40}


@pytest.mark.parametrize(
    ("means", "words"),
    [
        ([0.5, 0.5], "are in the paper's order (+10.0 ± 0.0, then +10.0 ± 0.0 points)"),
        ([0.7, 0.7], "are NOT in the paper's order"),
        ([0.5, 0.6], "though a step is within its 95 % interval"),
    ],
)
def test_table_1_s_order(means, words):
    made = part({"DFH a": means, "DFH b": [0.6, 0.6], "DFH c": [0.7, 0.7]})
    (said,) = verdicts(made, "table1")
    assert words in said


def test_what_each_addition_does():
    made = part({"DFH": [0.5, 0.5], "+ a": [0.6, 0.6], "+ b": [0.4, 0.4], "+ c": []})
    (said,) = verdicts(made, "ablation")
    assert said == "12 bits, against DFH, in points: + a +10.0 ± 0.0; + b -10.0 ± 0.0."


def test_not_run_and_not_defined():
    made = part({"DFH": [], "never": []})
    made["runs"] = [{"row": "never", "bits": 12, "seed": 0, "device": "d", "not_defined": "no"}]
    lines = table(made).splitlines()
    assert lines[2] == "| DFH | not run |"
    assert lines[3] == "| never | – |"
    assert report.html_page(results(made)).count("not run") == 2
    assert report.markdown(results(made)).count("not run") == 2


def test_two_rankings_and_codes_without_a_hamming_distance():
    rows = {"DFH": [0.86, 0.87, 0.88], "product": [0.88, 0.88, 0.88], "<b>": [0.5, 0.5, 0.5]}
    made = part(rows, bits=(12, 24))  # nothing ran at 24 bits
    for run in made["runs"]:
        if run["row"] == "product":
            run["evaluation"]["ranking"] = "distance of the head"
        else:
            run["real_queries"] = {**run["evaluation"], "map": run["evaluation"]["map"] + 0.05}
    by_codes, real = table(made), table(made, "real-valued queries")
    assert "| product ‡ | 0.880" in by_codes
    assert "**0.870**" in by_codes  # the best of those that compete
    assert "does not compete here" in by_codes
    assert "| DFH | **0.920**" in real
    assert "| product ‡ | 0.880" in real
    assert [(one.word, one.rival) for one in verdicts_of(made)] == [
        ("first", "<b>"),
        ("first", "product"),
    ]
    page = report.html_page(results(made))
    assert page.index("Ranked by Hamming distance") < page.index("Ranked by real-valued queries")
    assert "&lt;b&gt;" in page
    assert "<b>0.870</b>" in page


def test_winners_at_an_edge_are_on_the_page():
    made = results(part({"DFH": [0.5, 0.5]}))
    made["parts"][0]["rows"][0]["edges"] = ["margin"]
    winner = {"options": {"margin": 3.9}, "settings": {"learning_rate": 0.1}, "score": 0.7}
    step = {"class_step": {"weight": 0.5, "sharpness": 2.0}, "edges": ["step_sharpness"]}
    entry = {
        "space": {"margin": {"least": 0, "most": 4, "scale": "linear"}},
        "trials": [
            {"options": {"margin": 3.9}, "settings": {}, "epochs": 5, "plain": None},
            {"options": {"margin": 1.0}, "settings": {}, "epochs": 5, "plain": 0.6},
            {"options": {"margin": 1.0}, "settings": {}, "epochs": 20, "plain": 0.7},
        ],
        "winner": {**winner, "edges": ["margin"]},
        "winner_step": {**winner, **step},
    }
    made["tuning"] = {"bench": {"rows": {"dfh-paper": entry}}}
    page = report.html_page(made)
    assert "Tuned to an edge of the range that was searched: DFH (margin)." in page
    assert "margin 3.9 ⚠: 0.700" in page
    assert "step_weight 0.5, step_sharpness 2 ⚠" in page
    assert "2 points, 3 trials; 1 of the points without a score" in page
    assert "margin 0–4" in page


def test_failed_runs_are_called_failed_and_why():
    made = part({"DFH": [0.9, 0.9, 0.9], "other": []})
    for seed in range(3):
        reason = {"row": "other", "bits": 12, "seed": seed, "failed": "the loss became nan"}
        made["runs"].append(reason)
    assert "| other | failed |" in table(made)
    assert "on d." in intro(made)
    for target in ("table1", "table2", "figures", "compare"):
        said = verdicts(made, target)
        assert said[-1] == "other, 12 bits: 3 runs failed: the loss became nan."
    made["protocol"] = None
    assert intro(made) == "Every run failed."
    made["runs"] = []
    assert intro(made) == "Not run yet."
