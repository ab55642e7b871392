"""Reports: the best in bold, what no test tells from it, and the paper's numbers we miss."""

import json
import math

import numpy as np
import pytest

from fisherhash.experiments import report
from fisherhash.experiments.standing import Score, Standing
from fisherhash.experiments.tables import Table, TableCell, dump_results


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


def table(made, ranking="Hamming distance"):
    return report.part_report(results(made), made).tables[ranking].markdown()


def intro(made):
    return report.part_report(results(made), made).intro


def verdicts(made, target="table2"):
    return Standing(made).verdicts(target)


def test_one_table_as_markdown_and_as_html():
    made = Table(
        ["a & b", "12"], [["<i>", TableCell(" (1–2)", strong="1.5")], ["x", "–"]], "A note."
    )
    assert made.markdown().splitlines() == [
        "| a & b | 12 |",
        "|---|---|",
        "| <i> | **1.5** (1–2) |",
        "| x | – |",
        "",
        "A note.",
    ]
    html = made.html()
    assert '<th scope="col">a &amp; b</th>' in html
    assert '<tr><th scope="row">&lt;i&gt;</th><td><b>1.5</b> (1–2)</td></tr>' in html
    assert html.endswith("<p>A note.</p>")


def test_results_as_json_have_one_line_per_run_and_short_value():
    made = results(part({"DFH": [0.5, 0.6], "other": [0.4]}))
    made["parts"][0]["runs"][0]["options"] = {f"option {n}": n for n in range(40)}
    text = dump_results(made)
    assert json.loads(text) == made
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
    ("values", "stands_in", "sentence"),
    [
        (
            [0.9, 0.9, 0.9],
            False,
            "12 bits: DFH is first, 7.0 ± 0.0 points ahead of other; it reaches the paper's 0.850.",
        ),
        (
            [0.8, 0.8, 0.8],
            False,
            "is behind other; the mean of other is 3.0 ± 0.0 points higher; "
            "it MISSES the paper's 0.850 by 5.0",
        ),
        (
            [0.8, 0.8, 0.8],
            True,
            "12 bits: DFH is behind other; the mean of other is 3.0 ± 0.0 points higher.",
        ),
        (
            [0.80, 0.82, 0.84],
            False,
            "DFH is level with other; the mean of other is 1.0 ± 5.0 points higher",
        ),
    ],
)
def test_verdicts(values, stands_in, sentence):
    made = part({"DFH": values, "other": [0.83, 0.83, 0.83]}, stands_in=stands_in, paper=0.85)
    said, *below = verdicts(made)
    assert sentence in said
    gap = 100 * np.mean(values) - 85
    own = "" if gap > 0 else f"DFH at 12 bits ({gap:+.1f} points), "
    words = f"Below the paper's own number, no class step: {own}other at 12 bits (-2.0 points)."
    missed = [] if stands_in else [words]
    assert below == missed


def test_the_best_row_says_who_is_level_and_how_many_seeds_it_has():
    made = part({"DFH": [0.83, 0.85, 0.87], "near": [0.82, 0.85, 0.86], "far": [0.7, 0.7, 0.7]})
    (said,) = verdicts(made)
    assert "12 bits: DFH has the highest mean and is level with near (0.7 ± 4.6 points" in said
    made["runs"] = [run for run in made["runs"] if run["row"] != "DFH" or run["seed"]]
    (said,) = verdicts(made)
    assert f"({len(made['runs']) - 6} of {made['seeds']} seeds)" in said
    made["runs"] = [run for run in made["runs"] if run["seed"] == 1]
    (said,) = verdicts(made)
    assert "(one seed, no test)" in said


def test_a_row_with_one_seed_is_not_called_level():
    made = part({"DFH": [0.85, 0.85, 0.86], "far": [0.7, 0.71, 0.7], "broken": [0.1]})
    (said,) = verdicts(made)
    assert "DFH is first" in said
    assert "ahead of far (broken: one seed, no test)" in said


def test_a_stored_test_over_queries_is_used():
    """The runs of a table are not stored with it, so its tests are."""
    made = part({"DFH": [0.80, 0.82, 0.84], "near": [0.80, 0.81, 0.82]})
    assert Standing(made).hamming.level(12) == ["near"]
    known = {"ranking": "evaluation", "bits": 12, "row": "DFH", "other": "near"}
    made["tests"] = [{**known, "ahead": 0.01, "half": 0.004, "queries": 1000}]
    assert Standing(made).hamming.level(12) == []
    assert "DFH is first, 1.0 ± 0.4 points ahead of near" in verdicts(made)[0]
    made["tests"][0]["half"] = None  # one seed
    assert Standing(made).hamming.level(12) == ["near"]


def test_tests_go_into_the_results_and_come_back():
    made = part({"DFH": [0.80, 0.82, 0.84], "other": [0.5, 0.6, 0.5]})
    rng = np.random.default_rng(0)
    queries = {
        (row, 12, "evaluation"): list(np.clip(rng.normal(mean, 0.1, (3, 50)), 0, 1))
        for row, mean in (("DFH", 0.82), ("other", 0.53))
    }
    (test,) = Standing(made, queries).tests()
    assert (test["row"], test["other"], test["queries"]) == ("DFH", "other", 50)
    assert test["half"] >= Standing(made).tests()[0]["half"]
    again = json.loads(json.dumps({**made, "tests": [test]}))
    gap = Standing(again).hamming.gap("DFH", "other", 12)
    assert gap.half == pytest.approx(test["half"])


def test_held_out_images_choose_among_the_rows_of_dfh():
    """The queries must not: the row with the higher mean on them may have been lucky."""
    rows = {"DFH": [0.80, 0.81], "DFH (b)": [0.84, 0.84], "other": [0.82, 0.83], "far": [0.5, 0.5]}
    made = part(rows)
    assert "DFH (b) is first" in verdicts(made)[0] or "DFH (b) has" in verdicts(made)[0]
    for row, score in zip(made["rows"], (0.9, 0.7, 0.8, 0.6), strict=True):
        row["held_out"] = score
    made["tests"] = Standing(made).tests()
    named = {(test["row"], test["other"]) for test in made["tests"]}
    assert {("DFH", "other"), ("DFH", "far"), ("DFH (b)", "other")} <= named
    (said,) = verdicts(made)
    assert "12 bits: DFH is level with other; the mean of other is 2.0 ± 3.0 points higher" in said
    made["tests"] = [
        {**test, "half": 0.001} for test in made["tests"] if (test["row"], test["other"]) in named
    ]
    assert "DFH is behind other; the mean of other is 2.0 ± 0.1 points higher" in verdicts(made)[0]
    # Level with another method, below its own other row.
    for run in made["runs"]:
        if run["row"] == "other":
            run["evaluation"]["map"] = 0.80
    made["tests"] = Standing({**made, "tests": []}).tests()
    assert "DFH is level with other (0.5 ±" in verdicts(made)[0]


def test_a_stored_test_serves_both_ways():
    made = part({"DFH": [0.80, 0.82], "other": [0.9, 0.9]})
    known = {"ranking": "evaluation", "bits": 12, "row": "other", "other": "DFH"}
    made["tests"] = [{**known, "ahead": 0.09, "half": 0.02, "queries": 100}]
    gap = Standing(made).hamming.gap("DFH", "other", 12)
    assert (gap.mean, gap.half, gap.queries, gap.behind) == (-0.09, 0.02, 100, True)


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
    tests = Standing(made, queries).tests(target)
    assert wanted <= {(test["row"], test["other"]) for test in tests}
    assert {test["queries"] for test in tests} == {40}


def test_table_1_s_order():
    made = part({"DFH a": [0.5, 0.5], "DFH b": [0.6, 0.6], "DFH c": [0.7, 0.7]})
    (said,) = verdicts(made, "table1")
    assert "are in the paper's order (+10.0 ± 0.0, then +10.0 ± 0.0 points)" in said
    made = part({"DFH a": [0.5, 0.5], "DFH b": [0.4, 0.4], "DFH c": [0.7, 0.7]})
    (said,) = verdicts(made, "table1")
    assert "are NOT in the paper's order" in said
    made = part({"DFH a": [0.5, 0.6], "DFH b": [0.6, 0.6], "DFH c": [0.7, 0.7]})
    assert "though a step is within its 95 % interval" in verdicts(made, "table1")[0]


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


def test_text_of_others_is_escaped():
    made = part({"DFH": [0.5], "<b>": [0.4]})
    page = report.html_page(results(made))
    assert "&lt;b&gt;" in page
    assert "<b>0.500</b>" in page


def test_two_rankings_and_codes_without_a_hamming_distance():
    rows = {"DFH": [0.86, 0.87, 0.88], "product": [0.88, 0.88, 0.88], "other": [0.5, 0.5, 0.5]}
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
    assert verdicts(made) == [
        "12 bits: DFH is first, 37.0 ± 2.5 points ahead of other.",
        "12 bits, real-valued queries: DFH is first, 4.0 ± 2.5 points ahead of product.",
    ]
    page = report.html_page(results(made))
    assert page.index("Ranked by Hamming distance") < page.index("Ranked by real-valued queries")


def test_real_valued_queries_of_older_tables_were_rows_of_their_own():
    rows = {"DFH": [0.86, 0.87], "DFH, real-valued queries": [0.90, 0.91], "product": [0.88, 0.88]}
    made = part(rows)
    made["rows"][1]["real_queries_of"] = "DFH"
    for run in made["runs"]:
        if run["row"] != "DFH":
            run["evaluation"]["ranking"] = "distance of the head"
    assert "DFH, real" not in table(made)
    assert "| DFH | **0.905**" in table(made, "real-valued queries")


def test_winners_at_an_edge_are_on_the_page():
    made = results(part({"DFH": [0.5, 0.5]}))
    made["parts"][0]["rows"][0]["edges"] = ["margin"]
    winner = {"options": {"margin": 3.9}, "settings": {"learning_rate": 0.1}, "score": 0.7}
    entry = {
        "points": 16,
        "without_score": 3,
        "space": {"margin": {"least": 0, "most": 4, "scale": "linear"}},
        "trials": [
            {"options": {"margin": 3.9}, "settings": {}, "epochs": 5, "plain": None},
            {"options": {"margin": 1.0}, "settings": {}, "epochs": 5, "plain": 0.6},
            {"options": {"margin": 1.0}, "settings": {}, "epochs": 20, "plain": 0.7},
        ],
        "winner": {**winner, "edges": ["margin"]},
        "winner_step": {
            **winner,
            "edges": ["step_sharpness"],
            "class_step": {"weight": 0.5, "sharpness": 2.0},
        },
    }
    made["tuning"] = {"bench": {"rows": {"dfh-paper": entry}}}
    page = report.html_page(made)
    assert "Tuned to an edge of the range that was searched: DFH (margin)." in page
    assert "margin 3.9 ⚠: 0.700" in page
    assert "step_weight 0.5, step_sharpness 2 ⚠" in page
    assert "2 points, 3 trials; 1 of the points without a score" in page
    assert "margin 0–4" in page
    assert "no score" in page


def test_failed_runs_are_called_failed_and_why():
    made = part({"DFH": [0.9, 0.9, 0.9], "other": []})
    for seed in range(3):
        reason = {"row": "other", "bits": 12, "seed": seed, "failed": "the loss became nan"}
        made["runs"].append(reason)
    assert "| other | failed |" in table(made)
    assert "on d." in intro(made)
    said = verdicts(made)
    assert said[-1] == "other, 12 bits: 3 runs failed: the loss became nan."


def test_what_failed_is_said_in_every_table():
    failed = [{"row": "pair", "bits": 12, "seed": s, "failed": "no memory"} for s in range(3)]
    made = part({"pair": [], "pair + intra": []})
    made["runs"] = failed
    made["protocol"] = None
    assert intro(made) == "Every run failed."
    for target in ("table1", "table2", "figures"):
        assert verdicts(made, target) == ["pair, 12 bits: 3 runs failed: no memory."]
    made["runs"] = []
    assert intro(made) == "Not run yet."
